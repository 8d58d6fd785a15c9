"""Decodes audio for the gateway, each source in a process of its own: files, container streams, and pulled streams.

This is the gateway's side; the processes run `decoder_process.py`. Audio that makes libav crash, hang or use too much
memory ends its own process, and the caller gets an AudioError. Uploads and speaker enrolment call `decoded_file`, which
decodes a whole file. The inbox of a session holds an `IsolatedDecoder` for a live stream in a container.

`PulledAudio` is the audio of a stream that is pulled from the network, for `tickertape listen` and for the streams that
a server pulls (`pulled_streams.py`). It reconnects when the stream breaks, and reports missing audio as gaps. It
compares the stream's own times with the clock, so that the audio keeps its place in time after a reconnect. Each
connection is another process.
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

# Decoders that may work at the same time; more of them would take CPU time from live audio.
AT_ONCE = 4
# Time limit for one step (5 s of audio, or one piece of bytes), which normally takes milliseconds.
MAX_STEP_S = 20.0
# The longest answer of a decoder: one step and one more packet.
MAX_ANSWER_BYTES = 8 * 1024 * 1024

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class IsolatedDecoder:
    """Decodes one file or one stream, step by step."""

    def __init__(self, line: socket.socket, number: int) -> None:
        self._line = line
        self._number = number
        self._asking = False
        self._over = False
        self._fault: AudioError | None = None

    @classmethod
    async def begin(cls, file: BinaryIO | None = None) -> IsolatedDecoder:
        """Start a decoder for a file, or for a stream whose bytes come with `ask`. Raises TooManyDecoders."""
        beginning = _Beginning()
        try:
            return cls(*await asyncio.to_thread(beginning.run, file))
        except BaseException:
            beginning.give_up()
            raise

    async def ask(self, piece: bytes | None = b"") -> tuple[Samples, bool]:
        """Send bytes of the stream (none to get the next samples, None for the end of the stream).

        Returns samples, and whether more can be decoded without new bytes; after `end`, no samples. Raises AudioError,
        and raises it again on every later call.
        """
        if self._fault is not None:
            raise type(self._fault)(str(self._fault))
        if self._over:
            return _nothing(), False
        loop = asyncio.get_running_loop()
        self._asking = True
        try:
            async with _places.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
                kind, content = await self._exchange(piece)
        except AudioError as error:
            if self._over:
                return _nothing(), False
            self._fault = error
            raise
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._asking = False
            if self._over or self._fault is not None:
                self._close()
        if kind == DONE:
            self.end()
        return np.frombuffer(content, np.float32), kind == MORE

    def end(self) -> None:
        """Stop the decoder, also in the middle of a step. May be called twice."""
        self._over = True
        if not self._asking:
            self._close()
        else:
            # The pending `ask` sees that the socket is closed.
            _forks.end(self._number)

    def _close(self) -> None:
        if self._line.fileno() >= 0:
            self._line.close()
            _forks.end(self._number)

    async def _exchange(self, piece: bytes | None) -> tuple[bytes, bytearray]:
        order = PIECE.pack(NO_MORE) if piece is None else PIECE.pack(len(piece)) + piece
        try:
            async with asyncio.timeout(MAX_STEP_S):
                await asyncio.get_running_loop().sock_sendall(self._line, order)
                kind, length = FRAME.unpack(await self._receive(FRAME.size))
                content = await self._receive(min(length, MAX_ANSWER_BYTES))
        except TimeoutError:
            raise DecodingTooSlow("the audio takes too long to decode; send it in another format") from None
        except OSError as error:
            raise _gone() from error
        if kind == FAULT:
            raise _fault(content.decode(errors="replace"))
        return kind, content

    async def _receive(self, size: int) -> bytearray:
        received, at = bytearray(size), 0
        while at < size:
            got = await asyncio.get_running_loop().sock_recv_into(self._line, memoryview(received)[at:])
            if not got:
                raise _gone()
            at += got
        return received


class _Beginning:
    """Starts a decoder on a thread, and stops it again if its caller was cancelled meanwhile."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._given_up = False
        self._begun: tuple[socket.socket, int] | None = None

    def run(self, file: BinaryIO | None, kind: bytes = BEGIN) -> tuple[socket.socket, int]:
        begun = _begin(file, kind)
        with self._lock:
            self._begun = begun
            if self._given_up:
                IsolatedDecoder(*begun).end()
        return begun

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if self._begun is not None:
                IsolatedDecoder(*self._begun).end()


async def _begin_pulling() -> tuple[socket.socket, Callable[[], None]]:
    """Start a process that pulls a stream; returns the socket to it, and a function that kills it. Raises
    TooManyDecoders."""
    beginning = _Beginning()
    try:
        line, number = await asyncio.to_thread(beginning.run, None, PULL)
    except BaseException:
        beginning.give_up()
        raise
    return line, partial(_forks.end, number)


async def decoded_file(file: BinaryIO) -> AsyncGenerator[Samples]:
    """The samples of a file in steps; the next step is decoded when the last one was taken. Raises AudioError."""
    decoder = await IsolatedDecoder.begin(file)
    try:
        more = True
        while more:
            samples, more = await decoder.ask()
            yield samples
    finally:
        decoder.end()


def _nothing() -> Samples:
    return np.empty(0, np.float32)


def _gone() -> AudioError:
    return CorruptAudio("the decoder crashed on this audio; send it in another format, such as WAV or FLAC")


def _fault(said: str) -> AudioError:
    name, _, text = said.partition("\n")
    kind = getattr(errors, name, CorruptAudio)
    return kind(text) if isinstance(kind, type) and issubclass(kind, AudioError) else CorruptAudio(text)


def _begin(file: BinaryIO | None, kind: bytes) -> tuple[socket.socket, int]:
    """Start a decoder; returns the socket to it and its number. Blocks, and raises TooManyDecoders."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                if file is None:
                    return ours, _forks.begin([theirs.fileno()], kind)
                with _shared(file) as shared:
                    return ours, _forks.begin([theirs.fileno(), shared.fileno()], kind)
            except BaseException:
                ours.close()
                raise
    except OSError as error:
        raise TooManyDecoders(f"no decoder can be started now ({error.strerror}); try again in a minute") from error


def _shared(file: BinaryIO) -> BinaryIO:
    """The same file, at its beginning, behind a descriptor that can be passed to another process. Raises OSError."""
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

# Seconds for opening a stream, and without audio after which a connection is given up. HLS segments have up to 10 s.
OPEN_S = 30.0
STALL_S = 30.0
# Seconds before a reconnect; doubles with each attempt, until audio comes again.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
# Seconds of audio that may come ahead of real time: HLS comes in segments, and Icecast sends some audio at once.
LIVE_AHEAD_S, FILE_AHEAD_S = 30.0, 2.0
# After a reconnect to a live stream with times of its own: seconds of audio that may be repeated, because HLS begins
# some segments before the live edge, and seconds by which its times may be ahead of the clock. Beyond these limits the
# times count as those of a new clock.
AGAIN_S, AHEAD_S = 60.0, 60.0
# Seconds that may be missing where a file goes on after a reconnect; beyond that it has another clock.
MAX_FILE_GAP_S = 3600.0
# The times of MPEG-TS begin at 0 again after this many seconds; within a connection libav corrects that.
TS_CLOCK_S = 2**33 / 90_000
# A difference in seconds that is not worth a gap; and one between audio and clock, because audio comes unevenly.
SMALL_S = 0.05
UNEVEN_S = 1.0
# Seconds of the newest audio by which it is judged how early audio usually comes; a segment of HLS has up to 10.
USUAL_S = 20.0


class PullFailed(Exception):
    """The stream cannot be pulled; the text says why."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        # Another attempt would fail too.
        self.final = final


@dataclass(frozen=True, slots=True)
class _Kind:
    seconds: float | None
    keeps_time: bool


class PulledAudio:
    """One stream. `audio()` yields samples, and a number of samples (int) where audio is missing."""

    def __init__(
        self,
        url: str,
        *,
        hosts: Sequence[str] | None = None,
        on_line: Callable[[str], None] = lambda text: None,
        give_up_s: float | None = None,
    ) -> None:
        """`hosts`: the hosts that may be contacted (`checked_fetch.py`); None: any. `on_line` gets a text when the
        connection is lost, and an empty one when audio comes again. After `give_up_s` seconds without audio the stream
        has failed; None: it is tried for ever."""
        self._url = url
        self._hosts = hosts
        self._on_line = on_line
        self._give_up_s = give_up_s
        # The stream's time at the end of the audio so far, and when that audio came; None before the first audio.
        self._end: float | None = None
        self._came_at = 0.0
        # What was added to the stream's own times on this connection (`Block.clock_shift`).
        self._clock_shift = 0.0
        # Audio of this connection that was heard on an earlier one, in samples.
        self._repeated = 0
        self._pace = _Pace()
        self._earliness = _Earliness()

    @property
    def place(self) -> tuple[float, float] | None:
        """The stream's own time at the end of the audio so far, and when that audio came; None before the first."""
        return None if self._end is None else (self._end - self._clock_shift, self._came_at)

    def go_on(self, end: float, came_at: float) -> None:
        """An earlier `PulledAudio` has got the stream up to this place: the first connection is a reconnect."""
        self._end, self._came_at = end, came_at

    async def audio(self) -> AsyncGenerator[Samples | int]:
        """Raises PullFailed if the first connection fails, or at last when the stream is given up."""
        clock = asyncio.get_running_loop().time
        wait_s, silent_since = FIRST_WAIT_S, clock()
        while True:
            came_before = self._came_at
            try:
                async with aclosing(self._one_connection()) as parts:
                    async for part in parts:
                        wait_s, silent_since = FIRST_WAIT_S, clock()
                        yield part
                        await self._pace.wait()
                return
            except PullFailed as error:
                if error.final or self._end is None:
                    raise
                silent_since = max(silent_since, self._came_at) if self._came_at != came_before else silent_since
                if self._give_up_s is not None and clock() - silent_since >= self._give_up_s:
                    raise
                self._on_line(f"{error}; trying again")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _one_connection(self) -> AsyncGenerator[Samples | int]:
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
                    for part in self._placed(kind, start, clock_shift, samples, is_first):
                        yield part
                    is_first = False
                elif name == DONE:
                    break
        if kind is None or kind.seconds is None:
            raise PullFailed("the stream has ended")

    def _placed(
        self, kind: _Kind, start: float, clock_shift: float, samples: Samples, is_first: bool
    ) -> list[Samples | int]:
        """The gap before these samples if there is one, and what of them was not heard before."""
        now, seconds = asyncio.get_running_loop().time(), len(samples) / MODEL_RATE
        if not self._pace.has_begun:
            self._pace.begin(FILE_AHEAD_S if kind.seconds is not None else LIVE_AHEAD_S)
        if self._end is None:
            self._end = start
        elif is_first:
            self._on_line("")
        missing = start - self._end
        if is_first and self._came_at:
            missing = self._after_reconnect(kind, start, seconds, now)
        elif clock_shift != self._clock_shift and kind.seconds is None:
            missing = self._earliness.lost(seconds, now)
        self._clock_shift = clock_shift
        parts: list[Samples | int] = []
        if missing > SMALL_S:
            parts.append(round(missing * MODEL_RATE))
        elif missing < 0 and self._repeated:
            known = min(len(samples), self._repeated)
            self._repeated -= known
            samples = samples[known:]
        if len(samples):
            parts.append(samples)
            self._end, self._came_at = start + seconds, now
        count = sum(part if isinstance(part, int) else len(part) for part in parts)
        self._pace.came(count)
        self._earliness.came(count / MODEL_RATE, now)
        return parts

    def _after_reconnect(self, kind: _Kind, start: float, seconds: float, now: float) -> float:
        """Seconds missing before the first audio of a new connection; if negative, seconds of it that came before."""
        assert self._end is not None
        if kind.seconds is None:
            # A live stream goes on with its newest clock; a file begins again with its first one.
            self._end -= self._clock_shift
        away, missing = max(0.0, now - self._came_at - seconds), start - self._end
        if kind.seconds is None:
            missing = remainder(missing, TS_CLOCK_S)
        self._repeated = 0
        if kind.seconds is not None and missing > MAX_FILE_GAP_S:
            return 0.0
        is_same_clock = kind.keeps_time and -AGAIN_S <= missing <= away + AHEAD_S
        if kind.seconds is not None or is_same_clock:
            self._repeated = round(max(0.0, -missing) * MODEL_RATE)
            return missing
        return away


class _Earliness:
    """How early audio comes: the seconds of audio so far, less the seconds of the clock."""

    def __init__(self) -> None:
        self._audio_s = 0.0
        # The last `USUAL_S` of audio: where each piece ended, and how early it came.
        self._lately: deque[tuple[float, float]] = deque()

    def came(self, seconds: float, now: float) -> None:
        self._audio_s += seconds
        self._lately.append((self._audio_s, self._audio_s - now))
        while self._lately[0][0] < self._audio_s - USUAL_S:
            self._lately.popleft()

    def lost(self, seconds: float, now: float) -> float:
        """Seconds of audio lost before a piece of this length that comes now: by how much it is later than usual."""
        if self._lately:
            # The end of the audio with the old clock, which came together with this piece.
            self._lately.pop()
        if not self._lately:
            return 0.0
        late = min(early for _, early in self._lately) - (self._audio_s + seconds - now)
        return late if late > UNEVEN_S else 0.0


class _Pace:
    """Delays audio that comes more than `ahead_s` before its time."""

    def __init__(self) -> None:
        self.has_begun = False
        self._ahead_s = 0.0
        self._time = asyncio.get_running_loop().time
        # When the audio that comes next would have been spoken, if none is early.
        self._due = 0.0

    def begin(self, ahead_s: float) -> None:
        self.has_begun, self._ahead_s, self._due = True, ahead_s, self._time()

    def came(self, samples: int) -> None:
        self._due = max(self._due, self._time() - self._ahead_s) + samples / MODEL_RATE

    async def wait(self) -> None:
        early_s = self._due - self._time() - self._ahead_s
        if early_s > 0:
            await asyncio.sleep(early_s)


@asynccontextmanager
async def _pulling(url: str, hosts: Sequence[str] | None) -> AsyncIterator[AsyncIterator[tuple[bytes, bytes]]]:
    """The messages of a pulling process, which is killed at the end of the block. Raises PullFailed."""
    job = {"url": url, "open_s": OPEN_S, "read_s": STALL_S, "hosts": None if hosts is None else list(hosts)}
    try:
        line, kill = await _begin_pulling()
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
    patience = OPEN_S
    while True:
        try:
            async with asyncio.timeout(patience):
                kind, length = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > MAX_FRAME_BYTES:
                    raise PullFailed("the pulling process sent a message that is too long")
                content = await reader.readexactly(length)
        except TimeoutError:
            raise PullFailed(f"no audio came for {patience:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise PullFailed("the pulling process crashed on this stream") from None
        patience = STALL_S
        yield kind, content
        if kind in (DONE, FAULT):
            return
