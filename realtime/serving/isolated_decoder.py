"""Decoders of what strangers send, each in a process of its own, as the event loop sees them.

Bytes that make libav crash, hang or grow cost their own process: the gateway and its sessions go on. What is in such a
process is in `decoder_forks.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from threading import Lock
from typing import BinaryIO, cast
from weakref import WeakKeyDictionary

import numpy as np

from audio import errors
from audio.errors import AudioError, CorruptAudio, DecodingTooSlow, TooManyDecoders
from realtime.serving.decoder_protocol import ANSWER, BEGIN, DONE, END, FAULT, MORE, NO_MORE, ORDER, PIECE, PROGRAM
from realtime.session.events import Samples

# Decoders at work at once; more of them would take the processor from live audio.
AT_ONCE = 4
# A step is 5 s of sound or a piece of bytes, either a matter of milliseconds.
MAX_STEP_S = 20.0
# A decoder's longest answer: a step, and a packet beyond it.
MAX_ANSWER_BYTES = 8 * 1024 * 1024
STOP_S = 2.0

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class IsolatedDecoder:
    """One file, or one stream. Ask it for a step at a time."""

    def __init__(self, line: socket.socket, number: int) -> None:
        self._line = line
        self._number = number
        self._asking = False
        self._over = False
        self._fault: AudioError | None = None

    @classmethod
    async def begin(cls, file: BinaryIO | None = None) -> IsolatedDecoder:
        """For a file, or for a stream whose pieces come with `ask`. Raises TooManyDecoders."""
        beginning = _Beginning()
        try:
            return cls(*await asyncio.to_thread(beginning.run, file))
        except BaseException:
            beginning.give_up()
            raise

    async def ask(self, piece: bytes | None = b"") -> tuple[Samples, bool]:
        """Give a piece, nothing to let it go on, or None for the end. Returns samples, and whether more can be made of
        what was given already. Raises AudioError, on this and every later call; gives nothing after `end`."""
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
        """Nothing more comes of it, whatever it is doing now. Harmless twice."""
        self._over = True
        if not self._asking:
            self._close()
        else:
            # Whoever waits for its answer sees that it is gone.
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
                kind, length = ANSWER.unpack(await self._receive(ANSWER.size))
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
    """A decoder that begins on a thread. Nobody may wait for it any more when it has begun, and then it ends."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._given_up = False
        self._begun: tuple[socket.socket, int] | None = None

    def run(self, file: BinaryIO | None) -> tuple[socket.socket, int]:
        begun = _begin(file)
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


async def decoded_file(file: BinaryIO) -> AsyncGenerator[Samples]:
    """The samples of a file in steps, the next one when the last is taken. Raises AudioError."""
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
    return CorruptAudio("the decoder did not survive this audio; send it in another format, such as WAV or FLAC")


def _fault(said: str) -> AudioError:
    name, _, text = said.partition("\n")
    kind = getattr(errors, name, CorruptAudio)
    return kind(text) if isinstance(kind, type) and issubclass(kind, AudioError) else CorruptAudio(text)


def _begin(file: BinaryIO | None) -> tuple[socket.socket, int]:
    """A line to a new decoder, and its number; may take as long as a process takes to start. Raises TooManyDecoders."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                if file is None:
                    return ours, _forks.begin([theirs.fileno()])
                with _shared(file) as shared:
                    return ours, _forks.begin([theirs.fileno(), shared.fileno()])
            except BaseException:
                ours.close()
                raise
    except OSError as error:
        raise TooManyDecoders(f"no decoder can be started now ({error.strerror}); try again in a minute") from error


def _shared(file: BinaryIO) -> BinaryIO:
    """The same file behind a descriptor that can be given away, at its beginning. Raises OSError."""
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


class _Forks:
    """The program of `decoder_forks.py`, started when the first decoder is needed, and anew if it is gone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._owner = 0

    def begin(self, descriptors: list[int]) -> int:
        """The number of a new decoder. Raises OSError."""
        with self._lock:
            number = next(self._numbers)
            order = ORDER.pack(BEGIN, number)
            with suppress(ConnectionError):
                if self._orders is not None and self._owner == os.getpid():
                    socket.send_fds(self._orders, [order], descriptors)
                    return number
            self._start()
            assert self._orders is not None
            socket.send_fds(self._orders, [order], descriptors)
            return number

    def end(self, number: int) -> None:
        """Whatever that decoder is doing, it is over. Harmless if it has ended."""
        with suppress(OSError):
            if self._orders is not None and self._owner == os.getpid():
                self._orders.send(ORDER.pack(END, number))

    def stop(self) -> None:
        if self._owner == os.getpid():
            self._stop()

    def _start(self) -> None:
        if self._owner == os.getpid():
            self._stop()
        ours, theirs = socket.socketpair()
        # Nothing of the gateway's secrets goes along.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        # Orders are short, and the program does nothing but take them.
        ours.setblocking(False)
        self._orders, self._owner = ours, os.getpid()

    def _stop(self) -> None:
        orders, self._orders = self._orders, None
        process, self._process = self._process, None
        if orders is not None:
            orders.close()
        if process is not None:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_forks = _Forks()
atexit.register(_forks.stop)
