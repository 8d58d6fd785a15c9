"""The program that decodes untrusted audio: uploaded files, container streams, and streams pulled from the network.

    python -m realtime.serving.decoder_process FD

The gateway starts the program once, and sends it orders over the socket FD (`isolated_decoder.py`; messages:
`media_processes.py`). The program loads libav, and forks a process for each order, which is fast because forks share
the loaded libraries. Each fork has resource limits, and audio that crashes libav ends only its own fork.

A fork that pulls a stream from the network gets a job with the URL, and sends blocks of samples until the stream ends
(`network_reader.py` reads them). The gateway's side is `pulled_audio.py`, which starts another fork to reconnect.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from audio.container_filters import ByteReader
from audio.containers import STEP_SAMPLES, read_stream, read_upload
from audio.errors import AudioError, NoAudioTrack, TooLargeToDecode, UnsupportedFormat
from realtime.serving.checked_fetch import CheckedFetch
from realtime.serving.media_processes import (
    BLOCK,
    DONE,
    FAULT,
    FRAME,
    HUNGRY,
    MAX_JOB_BYTES,
    MORE,
    NO_MORE,
    OPENED,
    PIECE,
    PULL,
    START,
    ForkServer,
    set_bounds,
)
from realtime.serving.network_reader import SRT, Block, StreamKind, read_network, read_srt, scheme_of

# Address space of a fork beyond the part that it shares with the program. The index of a six-hour file takes 100 MB.
MAX_DECODER_BYTES = 256 * 1024 * 1024
# Open files of a fork, which needs one file and one socket; libav opens no files.
MAX_DECODER_FILES = 16
# Faults of a stream after which reconnecting is useless.
FINAL = (NoAudioTrack, UnsupportedFormat)


def main() -> None:
    ForkServer(socket.socket(fileno=int(sys.argv[1])), _run_fork).serve()


def _run_fork(kind: bytes, line: socket.socket, file: BinaryIO | None) -> None:
    """Decode one file or stream, or pull one; a fork runs this until it ends."""
    if kind == PULL:
        return pull(line, _limit_resources)
    _limit_resources()
    _decode(_GatewaySocket(line), file)


def _limit_resources() -> None:
    set_bounds(MAX_DECODER_BYTES, MAX_DECODER_FILES)


class _GatewaySocket(ByteReader):
    """The socket to the gateway: receives pieces of bytes, and answers each of them with samples.

    The pieces are the bytes of a stream. A file comes with its own descriptor; then every piece is empty, and asks for
    the next samples. `read` is called by the container reader (`audio/containers.py`).
    """

    def __init__(self, line: socket.socket) -> None:
        super().__init__()
        self._line = line
        # Decoded samples that are not sent yet, and their number.
        self._decoded: list[NDArray[np.float32]] = []
        self._samples = 0
        # The gateway has sent the end of the stream.
        self._ended = False

    def begin(self) -> None:
        """Wait for the first piece."""
        self._receive_piece()

    def read(self, size: int) -> bytes:
        while self._offset == len(self._piece) and not self._ended:
            self.answer(HUNGRY)
            self._receive_piece()
        return self._next(size)

    def add(self, block: NDArray[np.float32]) -> None:
        """Collect decoded samples. At `STEP_SAMPLES` they are sent, and decoding waits until the gateway asks again."""
        self._decoded.append(block)
        self._samples += len(block)
        if self._samples >= STEP_SAMPLES:
            self.send_decoded()

    def send_decoded(self) -> None:
        """Send the collected samples, and wait until the gateway asks for more."""
        if self._decoded:
            self.answer(MORE)
            self._receive_piece()

    def answer(self, kind: bytes, text: str = "") -> None:
        """Answer the last piece with a text, or with the collected samples."""
        content = b"".join(block.tobytes() for block in self._decoded) if not text else text.encode()
        self._decoded, self._samples = [], 0
        self._line.sendall(FRAME.pack(kind, len(content)) + content)

    def _receive_piece(self) -> None:
        """Receive the next piece. Raises EOFError if the gateway has closed the socket."""
        (length,) = PIECE.unpack(self._receive(PIECE.size))
        self._ended = self._ended or length == NO_MORE
        if length and length != NO_MORE:
            self._piece, self._offset = self._piece[self._offset :] + self._receive(length), 0

    def _receive(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._line.recv(min(size, 1 << 16))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _decode(line: _GatewaySocket, file: BinaryIO | None) -> None:
    """Decode a file, or a stream whose bytes come as pieces, and send the samples."""
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
    line.send_decoded()
    line.answer(FAULT, f"{type(fault).__name__}\n{fault}")


def pull(line: socket.socket, set_bounds: Callable[[], None]) -> None:
    """Receive a job and send the audio of its stream until that ends. Raises OSError if the gateway has closed the
    socket. `set_bounds` limits the resources of this process; it is not called for SRT."""
    # PyAV prints the errors of `fetch` that it ignores. Printing would fail if the error output is a log file, because
    # this process may not write files.
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    os.close(null_device)
    with line.makefile("rb") as reader:
        job: dict[str, Any] = json.loads(reader.readline(MAX_JOB_BYTES))
    fault: dict[str, Any] | None = None
    try:
        for part in _parts(job, set_bounds):
            if isinstance(part, StreamKind):
                _send(line, OPENED, json.dumps({"seconds": part.seconds, "keeps_time": part.keeps_time}).encode())
            else:
                _send(line, BLOCK, START.pack(part.start, part.clock_shift) + part.samples.tobytes())
    except AudioError as error:
        fault = {"text": str(error), "final": isinstance(error, FINAL)}
    except MemoryError:
        fault = {"text": "the stream takes more memory to decode than is allowed", "final": False}
    except OSError as error:
        fault = {"text": error.strerror or str(error), "final": False}
    _send(line, *((DONE, b"") if fault is None else (FAULT, json.dumps(fault).encode())))


def _parts(job: dict[str, Any], set_bounds: Callable[[], None]) -> Iterator[StreamKind | Block]:
    url, open_s, read_s = job["url"], job["open_s"], job["read_s"]
    if scheme_of(url) == SRT and job["hosts"] is None:
        # No limits: ffmpeg needs more memory than a decoder. Only `tickertape listen` pulls SRT.
        return read_srt(url)
    set_bounds()
    fetch = None if job["hosts"] is None else CheckedFetch(job["hosts"], read_s)
    return read_network(url, open_s, read_s, fetch)


def _send(line: socket.socket, kind: bytes, content: bytes) -> None:
    line.sendall(FRAME.pack(kind, len(content)) + content)


if __name__ == "__main__":
    main()
