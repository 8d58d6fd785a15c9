"""The program that decodes untrusted container audio outside the gateway, in one process for each file or stream.
Processes that pull a stream from the network are its forks too (`pull_process.py`).

    python -m realtime.serving.decoder_process FD

The program loads libav and waits for orders on the socket FD. For each file or stream it forks, which is fast because
the loaded libraries are shared. Each fork has resource limits, and audio that crashes libav crashes only its own fork.
`isolated_decoder.py` is the gateway's side.
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
from realtime.serving.decoder_protocol import ANSWER, BEGIN, DONE, END, FAULT, HUNGRY, MORE, NO_MORE, ORDER, PIECE, PULL
from realtime.serving.pull_process import pull

# Address space of a fork beyond the shared part. The index of a six-hour file takes 100 MB.
MAX_DECODER_BYTES = 256 * 1024 * 1024
# A fork needs one file and one socket; libav opens no files.
MAX_DECODER_FILES = 16
REAP_S = 1.0


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM):
        # The program ends when the gateway closes the socket; until then the gateway may have files to finish.
        signal.signal(name, signal.SIG_IGN)
    # Keep the garbage collector from writing to memory pages that the forks share.
    gc.collect()
    gc.freeze()
    _Forks(socket.socket(fileno=int(sys.argv[1]))).serve()


class _Forks:
    """Executes the gateway's orders: starts and kills decoder processes."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        # Decoder number -> process id.
        self._children: dict[int, int] = {}

    def serve(self) -> None:
        """Execute orders until the gateway closes the socket, then kill all decoders."""
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
        if kind in (BEGIN, PULL) and descriptors:
            self._begin(number, descriptors, kind == PULL)
        elif kind == END and number in self._children:
            # The process id cannot have been reused: only `_reap` waits for children, and it forgets their ids.
            os.kill(self._children[number], signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _begin(self, number: int, descriptors: list[int], pulls: bool) -> None:
        try:
            pid = os.fork()
        except OSError:
            return  # the gateway sees that the socket is closed
        if pid == 0:
            self._orders.close()
            line, *files = descriptors
            _live(socket.socket(fileno=line), os.fdopen(files[0], "rb") if files else None, pulls)
        self._children[number] = pid

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._children[number]


def _live(line: socket.socket, file: BinaryIO | None, pulls: bool) -> None:
    """Decode one file or stream, or pull one, then exit: the whole life of a forked process."""
    try:
        if pulls:
            return pull(line, _set_bounds)
        _set_bounds()
        _decode(_Line(line), file)
    except (OSError, EOFError):
        pass  # the gateway has closed the socket
    except Exception:
        # A bug in this program. The gateway sees that the socket is closed.
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
    """Bytes of address space of this process now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.RLIM_INFINITY - MAX_DECODER_BYTES


class _Line(ByteReader):
    """The socket to the gateway: receives pieces of bytes, and sends one answer of samples for each of them.

    Streams are read from it. A file has its own descriptor, and an empty piece only asks for the next samples.
    """

    def __init__(self, line: socket.socket) -> None:
        super().__init__()
        self._line = line
        self._made: list[NDArray[np.float32]] = []
        self._samples = 0
        self._ended = False

    def begin(self) -> None:
        """Wait for the first piece."""
        self._take()

    def read(self, size: int) -> bytes:
        while self._taken == len(self._piece) and not self._ended:
            self.answer(HUNGRY)
            self._take()
        return self._next(size)

    def add(self, block: NDArray[np.float32]) -> None:
        """Collect decoded samples. At `STEP_SAMPLES` they are sent, and decoding waits until the gateway asks again."""
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
        """Receive the next piece. Raises EOFError if the gateway has closed the socket."""
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
            "the audio takes more memory to decode than is allowed; send it in another format, or in shorter pieces"
        )
    if fault is None:
        line.answer(DONE)
        return
    # Samples decoded before the fault are valid.
    line.hand_over()
    line.answer(FAULT, f"{type(fault).__name__}\n{fault}")


if __name__ == "__main__":
    main()
