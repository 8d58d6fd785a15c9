"""The program that decodes untrusted audio files and container streams, each in a process of its own.

    python -m realtime.serving.decoder_process FD

The gateway starts the program once, and sends it orders over the socket FD (`isolated_decoder.py`). The program loads
libav, and forks a process for each order, which is fast because forks share the loaded libraries. Each fork has
resource limits, and audio that crashes libav ends only its own fork. A fork can also pull a stream from the network
(`pull_process.py`).
"""

from __future__ import annotations

import socket
import sys
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from audio.containers import STEP_SAMPLES, read_stream, read_upload
from audio.errors import AudioError, TooLargeToDecode
from audio.pipes import ByteReader
from realtime.serving.media_fork_server import ForkServer, set_bounds
from realtime.serving.media_protocol import DONE, FAULT, FRAME, HUNGRY, MORE, NO_MORE, PIECE, PULL
from realtime.serving.pull_process import pull

# Address space of a fork beyond the shared part. The index of a six-hour file takes 100 MB.
MAX_DECODER_BYTES = 256 * 1024 * 1024
# A fork needs one file and one socket; libav opens no files.
MAX_DECODER_FILES = 16


def main() -> None:
    ForkServer(socket.socket(fileno=int(sys.argv[1])), _live).serve()


def _live(kind: bytes, line: socket.socket, file: BinaryIO | None) -> None:
    """Decode one file or stream, or pull one; a fork runs this until it ends."""
    if kind == PULL:
        return pull(line, _set_bounds)
    _set_bounds()
    _decode(_Line(line), file)


def _set_bounds() -> None:
    set_bounds(MAX_DECODER_BYTES, MAX_DECODER_FILES)


class _Line(ByteReader):
    """The socket to the gateway: receives pieces of bytes, and answers each of them with samples.

    The pieces are the bytes of a stream. A file has its own descriptor; then a piece is empty, and asks for the next
    samples.
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
        self._line.sendall(FRAME.pack(kind, len(content)) + content)

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
