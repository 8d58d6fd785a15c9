"""The clients of a load test: processes that play recordings to a server in real time and record all events.

`read_manifest` reads the list of recordings. All of them are decoded once into one file of raw samples (`Bank`), which
the client processes map into memory. Each client plays its own `Playlist` on an absolute schedule: a chunk is sent when
its last sample would have been spoken, regardless of earlier chunks. Times are seconds since the client's first sample.
The lateness of each chunk is recorded too: if the generator cannot keep up, the figures do not describe the server.
`load_test.py` reads what the clients wrote.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import soxr
from websockets.exceptions import ConnectionClosed

from audio.containers import read_file
from audio.errors import AudioError
from audio.formats import MODEL_RATE
from realtime.client.wire_client import CannotConnect, SessionOptions, WireSession, open_session

# The audio: a bank of recordings, and a playlist per client

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


# The clients

# Sessions are opened this many seconds before their audio, so that no client is measured while others connect.
CONNECT_S = 1.0
# Timeout for the start of the client processes.
READY_S = 120.0
# Seconds for the last finals after the end of the audio.
LAST_FINALS_S = 20.0

Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and the options of its sessions."""

    url: str
    key: str | None = field(repr=False)
    model: str | None
    chunk_ms: int
    silence_ms: int
    speakers: bool = False


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """What one client plays, and when it starts."""

    client: int
    # Seconds after the common start.
    phase: float
    playlist: Playlist


def play_all(
    target: Target, bank: Bank, plans: list[ClientPlan], processes: int, folder: Path, name: str
) -> list[Path]:
    """Play all plans at once from `processes` processes; returns the files of the record."""
    shares = [plans[index::processes] for index in range(min(processes, len(plans)))]
    context = get_context("spawn")
    all_ready = context.Barrier(len(shares))
    paths = [folder / f"{name}-{index}.jsonl" for index in range(len(shares))]
    workers = [
        context.Process(
            target=_run_process, args=(target, bank, share, all_ready, path), name=f"bench-{index}", daemon=True
        )
        for index, (share, path) in enumerate(zip(shares, paths, strict=True))
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join()
    return paths


def _run_process(target: Target, bank: Bank, plans: list[ClientPlan], all_ready: Barrier, path: Path) -> None:
    """Main function of a client process."""
    with path.open("w", encoding="utf-8") as file, bank.path.open("rb") as raw:
        with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as samples:
            all_ready.wait(READY_S)
            start = time.perf_counter() + CONNECT_S
            asyncio.run(_play_share(target, bank, samples, plans, start, file))


async def _play_share(
    target: Target, bank: Bank, samples: memoryview, plans: list[ClientPlan], start: float, file: TextIO
) -> None:
    players = [Player(target, bank, samples, plan, start + plan.phase, _writer(plan, file)) for plan in plans]
    await asyncio.gather(*(player.play() for player in players))


def _writer(plan: ClientPlan, file: TextIO) -> Record:
    def record(entry: dict[str, Any]) -> None:
        file.write(json.dumps({"client": plan.client, **entry}) + "\n")

    return record


class Player:
    """One client: opens a session, plays its playlist, and records the events."""

    def __init__(
        self, target: Target, bank: Bank, samples: memoryview, plan: ClientPlan, start: float, record: Record
    ) -> None:
        self._target = target
        self._bank = bank
        self._samples = samples
        self._plan = plan
        self._start = start
        self._record = record

    @property
    def _now(self) -> float:
        """Seconds since the first sample."""
        return time.perf_counter() - self._start

    async def play(self) -> None:
        """Run the client. Failures are recorded and not raised."""
        seconds = self._plan.playlist.samples / self._bank.rate
        try:
            await asyncio.sleep(max(0.0, -CONNECT_S - self._now))
            async with (
                open_session(self._target.url, self._target.key) as session,
                asyncio.timeout(CONNECT_S + seconds + LAST_FINALS_S),
            ):
                await self._run_session(session)
        except CannotConnect as error:
            self._fail(str(error))
        except TimeoutError:
            self._fail(f"finals did not arrive within {LAST_FINALS_S:g} s of the end")
        except ConnectionClosed as error:
            self._fail(f"the server closed the connection: {error}")
        self._record({"t": self._now, "end": seconds})

    async def _run_session(self, session: WireSession) -> None:
        turns = {"type": "server_vad", "silence_duration_ms": self._target.silence_ms}
        target = self._target
        await session.configure(SessionOptions(self._bank.rate, turns, target.model, speakers=target.speakers))
        listener = asyncio.create_task(self._listen(session), name=f"client {self._plan.client}")
        try:
            await self._speak(session)
            await listener
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    def _fail(self, reason: str) -> None:
        self._record({"t": self._now, "failure": reason})

    async def _speak(self, session: WireSession) -> None:
        chunk_samples = self._bank.rate * self._target.chunk_ms // 1000
        late_ms: list[float] = []
        sent = 0
        for chunk in chunks(self._samples, self._plan.playlist, chunk_samples):
            sent += len(chunk) // 2
            due = sent / self._bank.rate
            await asyncio.sleep(max(0.0, due - self._now))
            late_ms.append(round(1000 * (self._now - due), 2))
            await session.append(chunk)
        self._record({"t": self._now, "late_ms": late_ms})
        await session.finish()

    async def _listen(self, session: WireSession) -> None:
        async for event in session.events():
            self._record({"t": round(self._now, 4), "event": event})
            if session.is_over:
                return
        self._fail("the server closed the session before its last final")
