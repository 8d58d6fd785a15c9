"""The program that decodes what strangers send, apart from the gateway: one process for each file and each stream.

    python -m realtime.serving.decoder_process FD

It has libav loaded and waits on a socket for something to decode. For each file or stream it forks: that takes
milliseconds, and what is loaded is shared. A fork has bounds on what it may use; whatever its bytes do to libav, they
do it there. The gateway's end of this is in `isolated_decoder.py`.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from audio.containers import STEP_SAMPLES, read_stream, read_upload
from audio.errors import AudioError, TooLargeToDecode
from audio.pipes import ByteReader
from realtime.serving.decoder_protocol import ANSWER, BEGIN, DONE, END, FAULT, HUNGRY, MORE, NO_MORE, ORDER, PIECE

# What a fork may take on top of what all of them share. An index of six hours takes 100 MB, all else a few.
MAX_DECODER_BYTES = 256 * 1024 * 1024
# It reads one file and talks over one socket; libav opens none.
MAX_DECODER_FILES = 16
REAP_S = 1.0


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM):
        # It ends with the gateway, which may still have files to finish.
        signal.signal(name, signal.SIG_IGN)
    # What is loaded is shared with all forks for as long as nobody touches it.
    gc.collect()
    gc.freeze()
    _Forks(socket.socket(fileno=int(sys.argv[1]))).serve()


class _Forks:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._children: dict[int, int] = {}

    def serve(self) -> None:
        """Until the gateway is gone."""
        while True:
            ready, _, _ = select.select([self._orders], [], [], REAP_S if self._children else None)
            self._reap()
            if ready and not self._take_order():
                break
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _take_order(self) -> bool:
        order, descriptors, _, _ = socket.recv_fds(self._orders, ORDER.size, 2)
        if len(order) < ORDER.size:
            return False
        kind, number = ORDER.unpack(order)
        if kind == BEGIN and descriptors:
            self._begin(number, descriptors)
        elif kind == END and number in self._children:
            # Nobody else waits for it, so the number of the process is still its own.
            os.kill(self._children[number], signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _begin(self, number: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError:
            return  # the gateway sees that the line is cut
        if pid == 0:
            self._orders.close()
            line, *files = descriptors
            _live(socket.socket(fileno=line), os.fdopen(files[0], "rb") if files else None)
        self._children[number] = pid

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._children[number]


def _live(line: socket.socket, file: BinaryIO | None) -> None:
    """The life of a fork."""
    try:
        _set_bounds()
        _decode(_Line(line), file)
    except (OSError, EOFError):
        pass  # the gateway does not wait any more
    except Exception:
        # A fault of ours. The gateway sees that the line is cut.
        traceback.print_exc()
    finally:
        os._exit(0)


def _set_bounds() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, _address_bytes() + MAX_DECODER_BYTES),
        (resource.RLIMIT_NOFILE, MAX_DECODER_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _address_bytes() -> int:
    """How much address space the process has now; far more than it uses."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.RLIM_INFINITY - MAX_DECODER_BYTES


class _Line(ByteReader):
    """The gateway at the other end: bytes come, samples go, one answer to each order.

    A stream is read from here; a file has its own descriptor, and orders only say when to go on.
    """

    def __init__(self, line: socket.socket) -> None:
        super().__init__()
        self._line = line
        self._made: list[NDArray[np.float32]] = []
        self._samples = 0
        self._ended = False

    def begin(self) -> None:
        """Wait for the first order."""
        self._take()

    def read(self, size: int) -> bytes:
        while self._taken == len(self._piece) and not self._ended:
            self.answer(HUNGRY)
            self._take()
        return self._next(size)

    def add(self, block: NDArray[np.float32]) -> None:
        """Samples; many of them are handed over, and the next ones are made when the gateway has taken them."""
        self._made.append(block)
        self._samples += len(block)
        if self._samples >= STEP_SAMPLES:
            self.hand_over()

    def hand_over(self) -> None:
        if self._made:
            self.answer(MORE)
            self._take()

    def answer(self, kind: bytes, said: str = "") -> None:
        content = b"".join(block.tobytes() for block in self._made) if not said else said.encode()
        self._made, self._samples = [], 0
        self._line.sendall(ANSWER.pack(kind, len(content)) + content)

    def _take(self) -> None:
        """The next order. Raises EOFError if none will come."""
        (length,) = PIECE.unpack(self._receive(PIECE.size))
        self._ended = self._ended or length == NO_MORE
        if length and length != NO_MORE:
            self._piece, self._taken = self._piece[self._taken :] + self._receive(length), 0

    def _receive(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._line.recv(min(size, 1 << 16))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _decode(line: _Line, file: BinaryIO | None) -> None:
    line.begin()
    fault: AudioError | None = None
    try:
        for block in read_stream(line) if file is None else read_upload(file):
            line.add(block)
    except AudioError as error:
        fault = error
    except MemoryError:
        fault = TooLargeToDecode(
            "the audio takes more memory to decode than it may; send it in another format, or in shorter pieces"
        )
    if fault is None:
        line.answer(DONE)
        return
    # Samples from before the fault are good.
    line.hand_over()
    line.answer(FAULT, f"{type(fault).__name__}\n{fault}")


if __name__ == "__main__":
    main()
