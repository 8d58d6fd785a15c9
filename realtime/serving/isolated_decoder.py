"""Decodes untrusted audio for the gateway, each in a process of its own: files, container streams, pulled streams.

This is the gateway's side; the processes run `decoder_process.py`. Audio that makes libav crash, hang or use too much
memory ends its own process, and the caller gets an AudioError. Uploads and speaker enrolment call `decoded_file`, which
decodes a whole file. The audio intake of a session has an `IsolatedDecoder` for a live stream in a container.

`PulledAudio` is the audio of a stream that is pulled from the network, for `tickertape listen` and for the streams that
a server pulls (`pulled_streams.py`). Each connection is a process of its own, which sends samples with their time in
the stream. `PulledAudio` reconnects when the connection breaks, and reports missing audio as gaps. It compares the
stream's own times with the clock, so that the audio keeps its place in time after a reconnect.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import remainder
from threading import Lock
from typing import BinaryIO, cast
from weakref import WeakKeyDictionary

import numpy as np

from audio import errors
from audio.errors import AudioError, CorruptAudio, DecodingTooSlow, TooManyDecoders
from audio.formats import MODEL_RATE
from realtime.serving.media_processes import (
    BEGIN,
    BLOCK,
    DECODER_PROGRAM,
    DONE,
    FAULT,
    FRAME,
    MAX_FRAME_BYTES,
    MORE,
    NO_MORE,
    OPENED,
    PIECE,
    PULL,
    START,
    ForkServerClient,
)
from realtime.session.events import Samples

# Decoders of this gateway that may work at the same time; more of them would take CPU time from live audio.
DECODERS_AT_ONCE = 4
# Time limit for one step (5 s of audio, or one piece of bytes), which normally takes milliseconds.
MAX_STEP_S = 20.0
# The longest answer of a decoder: one step and one more packet.
MAX_ANSWER_BYTES = 8 * 1024 * 1024

# The slots of `DECODERS_AT_ONCE`, one semaphore for each event loop.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class IsolatedDecoder:
    """Decodes one file or one stream, step by step."""

    def __init__(self, line: socket.socket, number: int) -> None:
        self._line = line
        self._number = number
        # `ask` is waiting for an answer.
        self._is_exchanging = False
        self._has_ended = False
        # The error that ended decoding.
        self._fault: AudioError | None = None

    @classmethod
    async def begin(cls, file: BinaryIO | None = None) -> IsolatedDecoder:
        """Start a decoder for a file, or for a stream whose bytes come with `ask`. Raises TooManyDecoders."""
        starting = _Starting()
        try:
            return cls(*await asyncio.to_thread(starting.run, file))
        except BaseException:
            starting.cancel()
            raise

    async def ask(self, piece: bytes | None = b"") -> tuple[Samples, bool]:
        """Send bytes of the stream: empty to get the next samples, None for the end of the stream.

        Returns samples, and whether more can be decoded without new bytes; after `end`, no samples. Raises AudioError,
        and the same error on every later call.
        """
        if self._fault is not None:
            raise type(self._fault)(str(self._fault))
        if self._has_ended:
            return _no_samples(), False
        loop = asyncio.get_running_loop()
        self._is_exchanging = True
        try:
            async with _slots.setdefault(loop, asyncio.Semaphore(DECODERS_AT_ONCE)):
                kind, content = await self._exchange(piece)
        except AudioError as error:
            if self._has_ended:
                return _no_samples(), False
            self._fault = error
            raise
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._is_exchanging = False
            if self._has_ended or self._fault is not None:
                self._close()
        if kind == DONE:
            self.end()
        return np.frombuffer(content, np.float32), kind == MORE

    def end(self) -> None:
        """Stop the decoder, also in the middle of a step. May be called twice."""
        self._has_ended = True
        if not self._is_exchanging:
            self._close()
        else:
            # The pending `ask` sees that the socket is closed.
            _forks.end(self._number)

    def _close(self) -> None:
        if self._line.fileno() >= 0:
            self._line.close()
            _forks.end(self._number)

    async def _exchange(self, piece: bytes | None) -> tuple[bytes, bytearray]:
        message = PIECE.pack(NO_MORE) if piece is None else PIECE.pack(len(piece)) + piece
        try:
            async with asyncio.timeout(MAX_STEP_S):
                await asyncio.get_running_loop().sock_sendall(self._line, message)
                kind, length = FRAME.unpack(await self._receive(FRAME.size))
                content = await self._receive(min(length, MAX_ANSWER_BYTES))
        except TimeoutError:
            raise DecodingTooSlow("the audio takes too long to decode; send it in another format") from None
        except OSError as error:
            raise _crashed() from error
        if kind == FAULT:
            raise _audio_error(content.decode(errors="replace"))
        return kind, content

    async def _receive(self, size: int) -> bytearray:
        received, filled = bytearray(size), 0
        while filled < size:
            count = await asyncio.get_running_loop().sock_recv_into(self._line, memoryview(received)[filled:])
            if not count:
                raise _crashed()
            filled += count
        return received


class _Starting:
    """Starts a process on a thread, and ends the process if its caller was cancelled meanwhile."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._cancelled = False
        self._started: tuple[socket.socket, int] | None = None

    def run(self, file: BinaryIO | None, kind: bytes = BEGIN) -> tuple[socket.socket, int]:
        started = _start_fork(file, kind)
        with self._lock:
            self._started = started
            if self._cancelled:
                IsolatedDecoder(*started).end()
        return started

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._started is not None:
                IsolatedDecoder(*self._started).end()


async def begin_pulling() -> tuple[socket.socket, Callable[[], None]]:
    """Start a process that pulls a stream; returns the socket to it, and a function that kills it. Raises
    TooManyDecoders."""
    starting = _Starting()
    try:
        line, number = await asyncio.to_thread(starting.run, None, PULL)
    except BaseException:
        starting.cancel()
        raise
    return line, partial(_forks.end, number)


async def decoded_file(file: BinaryIO) -> AsyncGenerator[Samples]:
    """Yields the samples of a file in steps; the next step is decoded when the caller asks for it. Raises
    AudioError."""
    decoder = await IsolatedDecoder.begin(file)
    try:
        more = True
        while more:
            samples, more = await decoder.ask()
            yield samples
    finally:
        decoder.end()


def _no_samples() -> Samples:
    return np.empty(0, np.float32)


def _crashed() -> AudioError:
    return CorruptAudio("the decoder crashed on this audio; send it in another format, such as WAV or FLAC")


def _audio_error(content: str) -> AudioError:
    """The error in a FAULT of a decoder: the name of its class, and its text."""
    name, _, text = content.partition("\n")
    kind = getattr(errors, name, CorruptAudio)
    return kind(text) if isinstance(kind, type) and issubclass(kind, AudioError) else CorruptAudio(text)


def _start_fork(file: BinaryIO | None, kind: bytes) -> tuple[socket.socket, int]:
    """Start a process; returns the socket to it and its number. Blocks the thread. Raises TooManyDecoders."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                if file is None:
                    return ours, _forks.begin([theirs.fileno()], kind)
                with _passable(file) as shared:
                    return ours, _forks.begin([theirs.fileno(), shared.fileno()], kind)
            except BaseException:
                ours.close()
                raise
    except OSError as error:
        raise TooManyDecoders(f"no decoder can be started now ({error.strerror}); try again in a minute") from error


def _passable(file: BinaryIO) -> BinaryIO:
    """The same file from its start, with a descriptor that can be passed to another process. Raises OSError."""
    in_memory = isinstance(file, tempfile.SpooledTemporaryFile) and not getattr(file, "_rolled", True)
    shared: BinaryIO
    if not in_memory:
        shared = os.fdopen(os.dup(file.fileno()), "rb")
    elif hasattr(os, "memfd_create"):
        shared = os.fdopen(os.memfd_create("upload"), "w+b")
    else:
        shared = cast(BinaryIO, tempfile.TemporaryFile())
    try:
        file.seek(0)
        if in_memory:
            shared.write(file.read())
        shared.seek(0)
    except BaseException:
        shared.close()
        raise
    return shared


_forks = ForkServerClient(DECODER_PROGRAM)


# Streams that are pulled from the network


# Seconds in which a stream must open, and seconds without audio after which a connection is given up. HLS segments have
# up to 10 s.
OPEN_S = 30.0
STALL_S = 30.0
# Seconds before a reconnect. The pause doubles with each attempt up to `LONGEST_WAIT_S`, until audio arrives again.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
# Seconds of audio that are passed on ahead of real time; later audio is delayed. HLS sends segments at once, and
# Icecast sends some audio when a connection begins.
LIVE_BURST_S, FILE_BURST_S = 30.0, 2.0
# After a reconnect to a live stream that keeps its time: seconds of audio that may be repeated, because HLS begins some
# segments before the live edge, and seconds by which the stream's time may have advanced more than our clock. Beyond
# these limits the stream is taken to have a new clock.
REPEAT_LIMIT_S, CLOCK_AHEAD_LIMIT_S = 60.0, 60.0
# Seconds of a file that may be missing after a reconnect. If more seems to be missing, the file has a new clock.
MAX_FILE_GAP_S = 3600.0
# The times of MPEG-TS wrap around to 0 after this many seconds. Within a connection libav corrects that.
TS_CLOCK_S = 2**33 / 90_000
# Shorter gaps, in seconds, are not reported.
MIN_GAP_S = 0.05
# Audio that is late by no more than this counts as uneven delivery and not as lost audio.
JITTER_S = 1.0
# Seconds of the newest audio from which it is estimated how early audio usually arrives; a segment of HLS has up to 10.
ESTIMATE_S = 20.0


class PullFailed(Exception):
    """The stream cannot be pulled; the text says why."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        # Another attempt would fail too.
        self.final = final


@dataclass(frozen=True, slots=True)
class _Kind:
    """The same as `decoder_process.StreamKind`, whose file loads libav."""

    seconds: float | None
    keeps_time: bool


class PulledAudio:
    """One stream. `audio()` yields samples, and the length of each gap as a number of samples (int)."""

    def __init__(
        self,
        url: str,
        *,
        hosts: Sequence[str] | None = None,
        on_status: Callable[[str], None] = lambda text: None,
        give_up_after_s: float | None = None,
    ) -> None:
        """`hosts` are the hosts that may be contacted (`checked_fetch.py`); None: any. `on_status` gets a text when the
        connection is lost, and an empty text when audio arrives again. After `give_up_after_s` seconds without audio
        the stream has failed; None: it is tried for ever."""
        self._url = url
        self._hosts = hosts
        self._on_status = on_status
        self._give_up_after_s = give_up_after_s
        # The stream's time at the end of the audio so far, in seconds; None before the first audio.
        self._end: float | None = None
        # When that audio arrived, on the clock of the event loop.
        self._arrived_at = 0.0
        # Seconds that were added to the stream's own times on this connection (`Block.clock_shift`).
        self._clock_shift = 0.0
        # Samples still to be dropped, because an earlier connection has delivered them.
        self._repeated = 0
        self._pace = _RealTimePace()
        self._loss_estimate = _LossEstimate()

    @property
    def position(self) -> tuple[float, float] | None:
        """The stream's own time at the end of the audio so far, and when that audio arrived; None before the first."""
        return None if self._end is None else (self._end - self._clock_shift, self._arrived_at)

    def resume_at(self, end: float, arrived_at: float) -> None:
        """Continue after the audio that an earlier process has pulled: the first connection counts as a reconnect."""
        self._end, self._arrived_at = end, arrived_at

    async def audio(self) -> AsyncGenerator[Samples | int]:
        """Raises PullFailed if the first connection fails, if reconnecting is useless, or if the stream is given up."""
        clock = asyncio.get_running_loop().time
        wait_s, silent_since = FIRST_WAIT_S, clock()
        while True:
            arrived_before = self._arrived_at
            try:
                async with aclosing(self._connection_audio()) as parts:
                    async for part in parts:
                        wait_s, silent_since = FIRST_WAIT_S, clock()
                        yield part
                        await self._pace.wait()
                return
            except PullFailed as error:
                if error.final or self._end is None:
                    raise
                if self._arrived_at != arrived_before:
                    silent_since = max(silent_since, self._arrived_at)
                if self._give_up_after_s is not None and clock() - silent_since >= self._give_up_after_s:
                    raise
                self._on_status(f"{error}; trying again")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _connection_audio(self) -> AsyncGenerator[Samples | int]:
        """The audio of one connection. Ends at the end of a file; raises PullFailed at any other end."""
        kind: _Kind | None = None
        is_first = True
        async with _pulling(self._url, self._hosts) as messages:
            async for name, content in messages:
                if name == OPENED:
                    kind = _Kind(**json.loads(content))
                elif name == FAULT:
                    fault = json.loads(content)
                    raise PullFailed(fault["text"], fault["final"])
                elif name == BLOCK and kind is not None:
                    start, clock_shift = START.unpack_from(content)
                    samples = np.frombuffer(content, np.float32, offset=START.size)
                    for part in self._parts(kind, start, clock_shift, samples, is_first):
                        yield part
                    is_first = False
                elif name == DONE:
                    break
        if kind is None or kind.seconds is None:
            raise PullFailed("the stream has ended")

    def _parts(
        self, kind: _Kind, start: float, clock_shift: float, samples: Samples, is_first: bool
    ) -> list[Samples | int]:
        """The gap before these samples if there is one, and those of them that are not repeated."""
        now, seconds = asyncio.get_running_loop().time(), len(samples) / MODEL_RATE
        if not self._pace.has_begun:
            self._pace.begin(FILE_BURST_S if kind.seconds is not None else LIVE_BURST_S)
        if self._end is None:
            self._end = start
        elif is_first:
            self._on_status("")
        missing = start - self._end
        if is_first and self._arrived_at:
            missing = self._missing_after_reconnect(kind, start, seconds, now)
        elif clock_shift != self._clock_shift and kind.seconds is None:
            missing = self._loss_estimate.lost(seconds, now)
        self._clock_shift = clock_shift
        parts: list[Samples | int] = []
        if missing > MIN_GAP_S:
            parts.append(round(missing * MODEL_RATE))
        elif missing < 0 and self._repeated:
            dropped = min(len(samples), self._repeated)
            self._repeated -= dropped
            samples = samples[dropped:]
        if len(samples):
            parts.append(samples)
            self._end, self._arrived_at = start + seconds, now
        count = sum(part if isinstance(part, int) else len(part) for part in parts)
        self._pace.add(count)
        self._loss_estimate.add(count / MODEL_RATE, now)
        return parts

    def _missing_after_reconnect(self, kind: _Kind, start: float, seconds: float, now: float) -> float:
        """Seconds missing before the first audio of a new connection; if negative, seconds of it that are repeated."""
        assert self._end is not None
        if kind.seconds is None:
            # A live stream continues with its newest clock; a file begins again with its first one.
            self._end -= self._clock_shift
        outage, missing = max(0.0, now - self._arrived_at - seconds), start - self._end
        if kind.seconds is None:
            missing = remainder(missing, TS_CLOCK_S)
        self._repeated = 0
        if kind.seconds is not None and missing > MAX_FILE_GAP_S:
            return 0.0
        is_same_clock = kind.keeps_time and -REPEAT_LIMIT_S <= missing <= outage + CLOCK_AHEAD_LIMIT_S
        if kind.seconds is not None or is_same_clock:
            self._repeated = round(max(0.0, -missing) * MODEL_RATE)
            return missing
        return outage


class _LossEstimate:
    """Estimates how much audio was lost where a live stream changes its clock: by how much the next piece is later than
    usual. The earliness of a piece is the seconds of audio up to its end, minus its time of arrival."""

    def __init__(self) -> None:
        self._audio_s = 0.0
        # The pieces of the last `ESTIMATE_S` of audio: (seconds of audio up to its end, earliness).
        self._recent: deque[tuple[float, float]] = deque()

    def add(self, seconds: float, now: float) -> None:
        self._audio_s += seconds
        self._recent.append((self._audio_s, self._audio_s - now))
        while self._recent[0][0] < self._audio_s - ESTIMATE_S:
            self._recent.popleft()

    def lost(self, seconds: float, now: float) -> float:
        """Seconds of audio that were lost before a piece of this length that arrives now."""
        if self._recent:
            # The last piece with the old clock arrived together with this one, so it says nothing about usual times.
            self._recent.pop()
        if not self._recent:
            return 0.0
        late = min(early for _, early in self._recent) - (self._audio_s + seconds - now)
        return late if late > JITTER_S else 0.0


class _RealTimePace:
    """Delays audio that arrives more than `burst_s` ahead of real time."""

    def __init__(self) -> None:
        self.has_begun = False
        self._burst_s = 0.0
        self._time = asyncio.get_running_loop().time
        # When the next audio is due in real time, on the clock of the event loop.
        self._due = 0.0

    def begin(self, burst_s: float) -> None:
        self.has_begun, self._burst_s, self._due = True, burst_s, self._time()

    def add(self, samples: int) -> None:
        self._due = max(self._due, self._time() - self._burst_s) + samples / MODEL_RATE

    async def wait(self) -> None:
        early_s = self._due - self._time() - self._burst_s
        if early_s > 0:
            await asyncio.sleep(early_s)


@asynccontextmanager
async def _pulling(url: str, hosts: Sequence[str] | None) -> AsyncIterator[AsyncIterator[tuple[bytes, bytes]]]:
    """The messages of a pulling process, which is killed at the end of the block. Raises PullFailed."""
    job = {"url": url, "open_s": OPEN_S, "read_s": STALL_S, "hosts": None if hosts is None else list(hosts)}
    try:
        line, kill = await begin_pulling()
    except AudioError as error:
        raise PullFailed(str(error)) from error
    try:
        reader, writer = await asyncio.open_connection(sock=line)
        try:
            writer.write(json.dumps(job).encode() + b"\n")
            yield _messages(reader)
        finally:
            writer.close()
    finally:
        kill()
        line.close()


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    timeout_s = OPEN_S
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                kind, length = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > MAX_FRAME_BYTES:
                    raise PullFailed("the pulling process sent a message that is too long")
                content = await reader.readexactly(length)
        except TimeoutError:
            raise PullFailed(f"no audio came for {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise PullFailed("the pulling process crashed on this stream") from None
        timeout_s = STALL_S
        yield kind, content
        if kind in (DONE, FAULT):
            return
