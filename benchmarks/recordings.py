"""Test recordings with reference texts: reads manifests, loads audio, and joins clips into sessions with pauses.

Used by all benchmarks that need real speech. The format of a manifest is that of `tickertape bench`
(`realtime/bench/clients.py`). The sample recording, which `tickertape pull` provides, needs no manifest. Synthetic
audio is in `benchmarks/sounds.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audio.containers import read_file
from audio.errors import AudioError
from benchmarks.measuring import RunFailed
from benchmarks.sounds import SAMPLE_RATE, Samples, write_wav
from engine.errors import EngineError
from engine.weights.store import pull
from realtime.bench.clients import BadManifest, Recording, read_recordings

Clip = Recording
# The model of small runs.
SMALL_MODEL = "moonshine-tiny"
# The recording that `tickertape pull` fetches, and the words of its beginning.
SAMPLE = "sample-two-cities"
SAMPLE_SECONDS = 6.4
SAMPLE_TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom"


@dataclass(frozen=True, slots=True)
class Part:
    """Start and end of a clip in a session, in seconds, with the pause after it."""

    clip: Clip
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Session:
    """Clips one after the other, each followed by a pause, as one microphone would record them; or given samples."""

    name: str
    clips: tuple[Clip, ...]
    pause_seconds: float = 0.0
    samples: Samples | None = None

    def load(self) -> tuple[Samples, list[Part]]:
        if self.samples is not None:
            return self.samples, [Part(self.clips[0], 0.0, len(self.samples) / SAMPLE_RATE)]
        pause = np.zeros(round(self.pause_seconds * SAMPLE_RATE), np.float32)
        pieces: list[Samples] = []
        parts = []
        count = 0
        for clip in self.clips:
            pieces += [load_audio(clip.path), pause]
            end = count + len(pieces[-2]) + len(pause)
            parts.append(Part(clip, count / SAMPLE_RATE, end / SAMPLE_RATE))
            count = end
        return np.concatenate(pieces), parts


def sound_session(name: str, samples: Samples) -> Session:
    return Session(name, (Clip(Path(name), "", len(samples) / SAMPLE_RATE, "clips"),), samples=samples)


def one_session_per_clip(clips: Sequence[Clip], pause_seconds: float) -> list[Session]:
    return [Session(f"clip-{number}", (clip,), pause_seconds) for number, clip in enumerate(clips)]


def joined_sessions(clips: Sequence[Clip], count: int, pause_seconds: float, rounds: int = 1) -> list[Session]:
    """All clips, distributed over `count` sessions; each session plays its clips `rounds` times."""
    dealt = [tuple(clips[first::count]) * rounds for first in range(count)]
    return [Session(f"session-{number}", mine, pause_seconds) for number, mine in enumerate(dealt) if mine]


def read_manifest(path: Path, kind: str | None = None, limit: int | None = None) -> list[Clip]:
    """The manifest's recordings, of one kind if given, the first `limit` of them. All of them begin like audio."""
    clips = read_recordings(path)
    chosen = [clip for clip in clips if kind in (None, clip.kind)]
    if not chosen:
        kinds = sorted({clip.kind for clip in clips})
        found = f"no recording of kind {kind!r}; it has {', '.join(kinds)}" if kinds else "no recordings"
        raise BadManifest(f"{path} has {found}")
    for clip in chosen[:limit]:
        # A bad file should stop the run before it starts, not after an hour.
        try:
            next(read_file(clip.path))
        except (AudioError, OSError) as error:
            raise BadManifest(f"{path} names {clip.path}, which cannot be used: {error}") from error
    return chosen[:limit]


def manifest_entries(path: Path) -> list[dict[str, Any]]:
    """The lines of a manifest with everything that they say. Raises BadManifest."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise BadManifest(f"cannot read the manifest {path}: {error}") from error


def load_audio(path: Path) -> Samples:
    try:
        return np.concatenate(list(read_file(path)))
    except (AudioError, OSError) as error:
        raise BadManifest(f"cannot use {path}: {error}") from error


def add_manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", type=Path, nargs="?", help="JSON lines with path, text and seconds")


@contextmanager
def manifest_of(options: argparse.Namespace) -> Iterator[Path]:
    """The manifest of the command line. A small run without one has the beginning of the sample recording."""
    if options.manifest is not None:
        yield options.manifest
    elif not options.small:
        raise BadManifest("the manifest is missing")
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_wav(Path(folder) / "sample.wav", sample_speech(SAMPLE_SECONDS))
            path = Path(folder) / "manifest.jsonl"
            path.write_text(json.dumps({"path": "sample.wav", "text": SAMPLE_TEXT, "seconds": SAMPLE_SECONDS}) + "\n")
            yield path


def exit_status(run: Callable[[], None]) -> int:
    """Runs a benchmark. 0: done; 1: the engine failed; 2: the manifest, a recording or a model cannot be used."""
    try:
        run()
    except RunFailed as error:
        print(f"error: the engine failed: {error}", file=sys.stderr)
        return 1
    except (BadManifest, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def sample_path() -> Path:
    path = pull(SAMPLE)
    return path if path.is_file() else next(path.glob("*.wav"))


def sample_speech(seconds: float | None = None) -> Samples:
    """The recording that `tickertape demo` plays, or its beginning."""
    return load_audio(sample_path())[: None if seconds is None else round(seconds * SAMPLE_RATE)]
