"""The process that pulls one stream from the network (HLS, RTMP, Icecast and others) and decodes it.

It is a fork of the decoder program (`decoder_process.py`), one for each connection, with the same limits on memory and
files. It gets a job with the URL, and sends blocks of samples until the stream ends (messages: `media_protocol.py`).
`pulled_audio.py` is the other side, which starts another process to reconnect.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any

import numpy as np

from audio.errors import AudioError, NoAudioTrack, UnsupportedFormat
from audio.formats import MODEL_RATE, PCM16_SCALE
from audio.network import BLOCK_SAMPLES, Block, StreamKind, read_network, scheme_of
from realtime.serving.checked_fetch import CheckedFetch
from realtime.serving.media_protocol import BLOCK, DONE, FAULT, FRAME, MAX_JOB_BYTES, OPENED, START

SRT = "srt"
# Bytes of ffmpeg's messages that are kept in a file, and bytes at their end that are read.
MAX_KEPT_BYTES = 64 * 1024
MAX_SAID_BYTES = 4096
PR_SET_PDEATHSIG = 1
# Faults that another attempt does not repair.
FINAL = (NoAudioTrack, UnsupportedFormat)


def pull(line: socket.socket, set_bounds: Callable[[], None]) -> None:
    """Read the job and send the audio until the stream ends. Raises OSError if the other side has left."""
    # PyAV prints errors of `fetch` that it drops. With the limit on written files that fails if it goes to a log file.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    with line.makefile("rb") as reader:
        job: dict[str, Any] = json.loads(reader.readline(MAX_JOB_BYTES))
    fault: dict[str, Any] | None = None
    try:
        for part in _parts(job, set_bounds):
            if isinstance(part, StreamKind):
                _tell(line, OPENED, json.dumps({"seconds": part.seconds, "keeps_time": part.keeps_time}).encode())
            else:
                _tell(line, BLOCK, START.pack(part.start, part.clock_shift) + part.samples.tobytes())
    except AudioError as error:
        fault = {"text": str(error), "final": isinstance(error, FINAL)}
    except MemoryError:
        fault = {"text": "the stream takes more memory to decode than is allowed", "final": False}
    except OSError as error:
        fault = {"text": error.strerror or str(error), "final": False}
    _tell(line, *((DONE, b"") if fault is None else (FAULT, json.dumps(fault).encode())))


def _parts(job: dict[str, Any], set_bounds: Callable[[], None]) -> Iterator[StreamKind | Block]:
    url, open_s, read_s = job["url"], job["open_s"], job["read_s"]
    if scheme_of(url) == SRT and job["hosts"] is None:
        # ffmpeg needs more memory than a decoder. Only the user's own command gets here.
        return _srt(url)
    set_bounds()
    fetch = None if job["hosts"] is None else CheckedFetch(job["hosts"], read_s)
    return read_network(url, open_s, read_s, fetch)


def _srt(url: str) -> Iterator[StreamKind | Block]:
    """An SRT stream, pulled by the program ffmpeg: PyAV's libav has no SRT. Its times are those of its samples."""
    program = shutil.which("ffmpeg")
    if program is None:
        raise UnsupportedFormat("SRT needs the program ffmpeg; install it (apt-get install ffmpeg)")
    command = [program, "-nostdin", "-loglevel", "error", "-protocol_whitelist", "srt", "-i", url]
    command += ["-vn", "-ac", "1", "-ar", str(MODEL_RATE), "-f", "s16le", "pipe:1"]
    at = 0
    # The messages go into a file: ffmpeg would stop at a full pipe.
    with tempfile.TemporaryFile() as messages:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            preexec_fn=_bounds_of_ffmpeg(),
        ) as ffmpeg:
            assert ffmpeg.stdout is not None
            try:
                while data := ffmpeg.stdout.read(2 * BLOCK_SAMPLES):
                    if not at:
                        yield StreamKind(None, False)
                    samples = np.frombuffer(data, "<i2", len(data) // 2) * PCM16_SCALE
                    yield Block(at / MODEL_RATE, samples.astype(np.float32))
                    at += len(samples)
            finally:
                ffmpeg.kill()
        if not at:
            raise OSError(_last_line(messages) or "ffmpeg ended without a message")


def _bounds_of_ffmpeg() -> Callable[[], None]:
    """What the new process does before it becomes ffmpeg: it ends with this process, and bounds its messages."""
    parent = os.getpid()
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def bound() -> None:
        # Writes beyond the limit fail; without this line they would end ffmpeg.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_KEPT_BYTES, MAX_KEPT_BYTES))
        if library is not None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)  # the parent ended before the line above

    return bound


def _last_line(messages: IO[bytes]) -> str:
    size = messages.seek(0, os.SEEK_END)
    messages.seek(max(0, size - MAX_SAID_BYTES))
    lines = messages.read(MAX_SAID_BYTES).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _tell(line: socket.socket, kind: bytes, content: bytes) -> None:
    line.sendall(FRAME.pack(kind, len(content)) + content)
