"""Decodes audio files and container streams for the gateway, each in a process of its own.

This is the gateway's side; the processes run `decoder_process.py`. Audio that makes libav crash, hang or use too much
memory ends its own process, and the caller gets an AudioError. Uploads and speaker enrolment call `decoded_file`, which
decodes a whole file. The inbox of a session holds an `IsolatedDecoder` for a live stream in a container.
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


async def begin_pulling() -> tuple[socket.socket, Callable[[], None]]:
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
