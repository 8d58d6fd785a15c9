"""Recordings with known words: manifests, audio, and sessions made of them.

A manifest is JSON lines; each line has `path` (relative to the manifest), `text` (what is said; empty: nobody speaks)
and `seconds`. `kind` groups recordings; every other key is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audio.containers import read_file
from audio.errors import AudioError

SAMPLE_RATE = 16_000


class ManifestError(Exception):
    """The manifest or one of its recordings cannot be used; the text names the line or the file."""


@dataclass(frozen=True, slots=True)
class Clip:
    path: Path
    text: str
    seconds: float
    kind: str


@dataclass(frozen=True, slots=True)
class Part:
    """Where a clip lies in a session, in seconds. The pause behind it belongs to it."""

    clip: Clip
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Session:
    """Clips one after the other, each followed by a pause, as one microphone would hear them."""

    name: str
    clips: tuple[Clip, ...]
    pause_seconds: float

    def load(self) -> tuple[NDArray[np.float32], list[Part]]:
        pause = np.zeros(round(self.pause_seconds * SAMPLE_RATE), np.float32)
        pieces: list[NDArray[np.float32]] = []
        parts = []
        count = 0
        for clip in self.clips:
            pieces += [load_audio(clip.path), pause]
            end = count + len(pieces[-2]) + len(pause)
            parts.append(Part(clip, count / SAMPLE_RATE, end / SAMPLE_RATE))
            count = end
        return np.concatenate(pieces), parts


def read_manifest(path: Path, kind: str | None = None, limit: int | None = None) -> list[Clip]:
    """The manifest's recordings, of one kind if given, the first `limit` of them. All of them begin like audio."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot read the manifest {path}: {error}") from error
    clips = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                clips.append(_parse(line, path.parent))
            except ValueError as error:
                raise ManifestError(f"{path}, line {number}: {error}") from error
    chosen = [clip for clip in clips if kind in (None, clip.kind)]
    if not chosen:
        kinds = sorted({clip.kind for clip in clips})
        found = f"no recording of kind {kind!r}; it has {', '.join(kinds)}" if kinds else "no recordings"
        raise ManifestError(f"{path} has {found}")
    for clip in chosen[:limit]:
        if not clip.path.is_file():
            raise ManifestError(f"{path} names {clip.path}, which does not exist")
        # A bad file should stop the run before it starts, not after an hour.
        try:
            next(read_file(clip.path))
        except (AudioError, OSError) as error:
            raise ManifestError(f"{path} names {clip.path}, which cannot be used: {error}") from error
    return chosen[:limit]


def _parse(line: str, folder: Path) -> Clip:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    text = _field(entry, "text", str)
    seconds = _field(entry, "seconds", (int, float))
    if isinstance(seconds, bool) or not seconds > 0:
        raise ValueError(f"`seconds` must be a number above zero, not {seconds!r}")
    kind = entry.get("kind", "clips" if text.strip() else "noise")
    return Clip(folder / _field(entry, "path", str), text, float(seconds), str(kind))


def _field(entry: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    if name not in entry:
        raise ValueError(f"`{name}` is missing")
    if not isinstance(entry[name], kind):
        raise ValueError(f"`{name}` has the wrong type: {entry[name]!r}")
    return entry[name]


def load_audio(path: Path) -> NDArray[np.float32]:
    try:
        return np.concatenate(list(read_file(path)))
    except (AudioError, OSError) as error:
        raise ManifestError(f"cannot use {path}: {error}") from error


def one_session_per_clip(clips: Sequence[Clip], pause_seconds: float) -> list[Session]:
    return [Session(f"clip-{number}", (clip,), pause_seconds) for number, clip in enumerate(clips)]


def joined_sessions(clips: Sequence[Clip], count: int, pause_seconds: float, rounds: int = 1) -> list[Session]:
    """All clips, dealt to `count` sessions; each session plays its own `rounds` times over."""
    dealt = [tuple(clips[first::count]) * rounds for first in range(count)]
    return [Session(f"session-{number}", mine, pause_seconds) for number, mine in enumerate(dealt) if mine]
