"""Decodes untrusted audio for the gateway, each file and each container stream in a process of its own.

This is the gateway's side; the processes run `decoder_process.py`. Audio that makes libav crash, hang or use too much
memory ends its own process, and the caller gets an AudioError. Uploads and speaker enrolment call `decoded_file`, which
decodes a whole file. The audio intake of a session has an `IsolatedDecoder` for a live stream in a container.
`begin_pulling` starts a process that pulls a stream from the network, for `pulled_audio.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable
from functools import partial
from threading import Lock
from typing import BinaryIO, cast
from weakref import WeakKeyDictionary

import numpy as np

from audio import errors
from audio.errors import AudioError, CorruptAudio, DecodingTooSlow, TooManyDecoders
from realtime.serving.media_processes import (
    BEGIN,
    DECODER_PROGRAM,
    DONE,
    FAULT,
    FRAME,
    MORE,
    NO_MORE,
    PIECE,
    PULL,
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
