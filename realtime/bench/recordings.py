"""The audio of a load test: reads the manifest, decodes the recordings into a bank, and makes a playlist per client.

All recordings are decoded once into one file of raw samples (`Bank`), which the client processes map into memory. A
`Playlist` is what one client plays, with its reference text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr

from audio.containers import read_file
from audio.errors import AudioError
from audio.formats import MODEL_RATE

# Bytes of a PCM16 sample.
SAMPLE_BYTES = 2


class BadManifest(Exception):
    """The manifest or a recording is not usable; the text names the line or the file."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The place of a recording in the bank, in samples, and its reference text if there is one."""

    start: int
    samples: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Bank:
    """All recordings in sequence, as PCM16 mono at `rate`, in the file `path`."""

    path: Path
    rate: int
    clips: tuple[Clip, ...]


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Part of a client's audio: samples of the bank, or silence if `start` is None."""

    start: int | None
    samples: int


@dataclass(frozen=True, slots=True)
class Playlist:
    """The audio of one client."""

    pieces: tuple[AudioPiece, ...]
    # Reference text; None if it is not known.
    text: str | None

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)


def build_bank(files: list[tuple[Path, str | None]], rate: int, path: Path) -> Bank:
    """Decode the recordings into `path`. Raises BadManifest."""
    clips, start = [], 0
    with path.open("wb") as bank:
        for file, text in files:
            try:
                audio = np.concatenate(list(read_file(file)))
            except (AudioError, OSError) as error:
                raise BadManifest(f"{file} cannot be used: {error}") from error
            resampled = soxr.resample(audio, MODEL_RATE, rate) if rate != MODEL_RATE else audio
            bank.write((np.clip(resampled, -1, 1) * 32767).astype("<i2").tobytes())
            clips.append(Clip(start, len(resampled), text))
            start += len(resampled)
    return Bank(path, rate, tuple(clips))


@dataclass(frozen=True, slots=True)
class Recording:
    """A line of a manifest: the file, its reference text (empty: no speech), its length, and its group."""

    path: Path
    text: str
    seconds: float
    kind: str


def read_recordings(path: Path) -> list[Recording]:
    """Read a manifest: JSON lines with `path` (relative to the manifest), `text`, `seconds`, and optionally `kind`.
    Other keys are ignored. Raises BadManifest."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadManifest(f"cannot read the manifest {path}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_recording(json.loads(line), path.parent))
            except json.JSONDecodeError as error:
                raise BadManifest(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
            except ValueError as error:
                raise BadManifest(f"{path}, line {number}: {error}") from error
    return found


def _recording(entry: object, folder: Path) -> Recording:
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object with path, text and seconds")
    for name, kind in (("path", str), ("text", str), ("seconds", int | float)):
        if name not in entry:
            raise ValueError(f"`{name}` is missing")
        if not isinstance(entry[name], kind):
            raise ValueError(f"`{name}` has the wrong type: {entry[name]!r}")
    text, seconds = entry["text"].strip(), entry["seconds"]
    if isinstance(seconds, bool) or not seconds > 0:
        raise ValueError(f"`seconds` must be a number above zero, not {seconds!r}")
    return Recording(folder / entry["path"], text, float(seconds), str(entry.get("kind", "clips" if text else "noise")))


def read_manifest(path: Path, max_seconds: float) -> list[tuple[Path, str | None]]:
    """The recordings with speech of at most `max_seconds` seconds, and their texts. Raises BadManifest."""
    fitting = [recording for recording in read_recordings(path) if recording.text and recording.seconds <= max_seconds]
    if not fitting:
        raise BadManifest(
            f"{path} has no recording with speech of at most {max_seconds:g} s; play longer with --seconds"
        )
    return [(recording.path, recording.text) for recording in fitting]


def playlist(bank: Bank, client: int, seconds: float, pause_s: float) -> Playlist:
    """Audio for one client: whole recordings in a random order, with pauses between them.

    The same client of the same bank always gets the same audio. If the bank has a single recording, each client starts
    at a different place in it, and the reference text is not known.
    """
    order = random.Random(f"client {client}")
    pause = AudioPiece(None, round(pause_s * bank.rate))
    target = round(seconds * bank.rate)
    if len(bank.clips) == 1:
        return _rotated(bank, order, target, pause)
    clips = list(bank.clips)
    order.shuffle(clips)
    pieces: list[AudioPiece] = []
    texts: list[str] = []
    total = 0
    while fitting := [clip for clip in clips if total + clip.samples <= target or not texts]:
        for clip in fitting:
            if not texts or total + clip.samples <= target:
                pieces += [AudioPiece(clip.start, clip.samples), pause]
                texts.append(clip.text or "")
                total += clip.samples + pause.samples
    known = all(clip.text is not None for clip in clips)
    return Playlist(tuple(pieces), " ".join(texts) if known else None)


def _rotated(bank: Bank, order: random.Random, target: int, pause: AudioPiece) -> Playlist:
    """A single recording, repeated, from a random place on."""
    (clip,) = bank.clips
    cut = order.randrange(clip.samples)
    pieces: list[AudioPiece] = []
    total = 0
    while total < target:
        for piece in (AudioPiece(clip.start + cut, clip.samples - cut), pause, AudioPiece(clip.start, cut), pause):
            room = target - total
            if room > 0 and piece.samples:
                pieces.append(AudioPiece(piece.start, min(piece.samples, room)))
                total += pieces[-1].samples
    return Playlist((*pieces, pause), None)


def chunks(bank_bytes: memoryview, parts: Playlist, chunk_samples: int) -> Iterator[bytes]:
    """The playlist's bytes in equal chunks; the last may be shorter."""
    chunk = bytearray()
    size = chunk_samples * SAMPLE_BYTES
    for piece in parts.pieces:
        done = 0
        while done < piece.samples:
            count = min(chunk_samples - len(chunk) // SAMPLE_BYTES, piece.samples - done)
            if piece.start is None:
                chunk += bytes(count * SAMPLE_BYTES)
            else:
                first = (piece.start + done) * SAMPLE_BYTES
                chunk += bank_bytes[first : first + count * SAMPLE_BYTES]
            done += count
            if len(chunk) == size:
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)
