"""The program that decodes untrusted audio: uploaded files, container streams, and streams pulled from the network.

    python -m realtime.serving.decoder_process FD

The gateway starts the program once, and sends it orders over the socket FD (`isolated_decoder.py`; messages:
`media_processes.py`). The program loads libav, and forks a process for each order, which is fast because forks share
the loaded libraries. Each fork has resource limits, and audio that crashes libav ends only its own fork.

A fork that pulls a stream (HLS, RTMP, RTSP, Icecast, files over HTTP; SRT with the program ffmpeg) gets a job with the
URL, and sends blocks of samples until the stream ends. `isolated_decoder.py` is the other side, which starts another
process to reconnect. `read_network` yields `Block`s of 16 kHz mono with their time in the stream. A block whose time is
later than the end of the block before it follows a gap. Libav may use the protocols and formats that are listed here
and no others: a playlist cannot name a file of this machine. With `fetch`, libav uses no protocol at all: `fetch` opens
every URL.
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
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Protocol
from urllib.parse import urlsplit

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Discard
from numpy.typing import NDArray

from audio.container_filters import ByteReader
from audio.containers import (
    MAX_PACKET_BYTES,
    MAX_PACKET_SAMPLES,
    SERVED_CODECS,
    SERVED_FORMATS,
    STEP_SAMPLES,
    mix_down,
    read_stream,
    read_upload,
)
from audio.errors import AudioError, CorruptAudio, NoAudioTrack, NotAudio, TooLargeToDecode, UnsupportedFormat
from audio.formats import MODEL_RATE, PCM16_SCALE, Resampler
from realtime.serving.checked_fetch import PLAYLIST, CheckedFetch
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

# Address space of a fork beyond the shared part. The index of a six-hour file takes 100 MB.
MAX_DECODER_BYTES = 256 * 1024 * 1024
# A fork needs one file and one socket; libav opens no files.
MAX_DECODER_FILES = 16
SRT = "srt"
# Bytes of ffmpeg's messages that are kept in a file, and bytes at their end that are read.
MAX_KEPT_BYTES = 64 * 1024
MAX_SAID_BYTES = 4096
PR_SET_PDEATHSIG = 1
# Faults that another attempt does not repair.
FINAL = (NoAudioTrack, UnsupportedFormat)
HTTP_SCHEMES = ("http", "https")
SCHEMES = (*HTTP_SCHEMES, "rtmp", "rtmps", "rtmpt", "rtmpts", "rtsp", "rtsps")
# `crypto` decrypts HLS segments; the others are transports.
PROTOCOLS = "crypto,http,https,ffrtmphttp,rtmp,rtmps,rtmpt,rtmpts,rtp,srtp,tcp,tls,udp"
NETWORK_FORMATS = f"{SERVED_FORMATS},aac,flv,hls,live_flv,mpegts,rtsp"
# Formats that open no connection of their own.
FETCHED_FORMATS = f"{SERVED_FORMATS},aac,flv,hls,mpegts"
NETWORK_CODECS = (*SERVED_CODECS, "aac_latm", "g722", "mp2", "mp2float")
# A difference between the times of a stream and its samples beyond which audio is missing or its clock has changed.
JUMP_S = 0.5
# A longer jump is a changed clock and not missing audio.
MAX_JUMP_S = 3600.0
# Damaged packets in a row after which the stream is given up.
MAX_DAMAGED_PACKETS = 200
# The part of the declared duration that may be missing at the end of a complete file.
MISSING_S, MISSING_SHARE = 1.0, 0.02
BLOCK_SAMPLES = MODEL_RATE // 5


def main() -> None:
    ForkServer(socket.socket(fileno=int(sys.argv[1])), _run_fork).serve()


def _run_fork(kind: bytes, line: socket.socket, file: BinaryIO | None) -> None:
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


@dataclass(frozen=True, slots=True)
class Block:
    """Samples at 16 kHz; `start` is the time of the first one in the stream, in seconds."""

    start: float
    samples: NDArray[np.float32]
    # Seconds that were added to the times of the stream because its clock has changed, as it does when an encoder is
    # started again. Where it changes, only the clock of the listener can tell whether audio is missing.
    clock_shift: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamKind:
    """What a stream is. `seconds`: its declared length, 0 if that is not known, None if it is live. `keeps_time`: its
    times go on where they were if it is opened again, as those of HLS and of files do."""

    seconds: float | None
    keeps_time: bool


class Fetched(Protocol):
    """The body of a response. `length`: its declared bytes, None for a live stream."""

    name: str
    length: int | None
    fault: OSError | None

    def peek(self, size: int) -> bytes: ...

    def read(self, size: int = -1) -> bytes: ...


Fetch = Callable[[str], Fetched]


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case."""
    return urlsplit(url).scheme.lower()


def read_network(url: str, open_s: float, read_s: float, fetch: Fetch | None = None) -> Iterator[StreamKind | Block]:
    """The kind of the stream, then its first audio track. Raises AudioError and OSError.

    `open_s` and `read_s` bound how long libav waits for the network, without `fetch`. The end of the iterator is the
    end of a complete file, or of a live stream that was closed by its server.
    """
    if scheme_of(url) not in (SCHEMES if fetch is None else HTTP_SCHEMES):
        raise UnsupportedFormat(f"addresses that begin with '{scheme_of(url)}:' cannot be pulled")
    try:
        if fetch is None:
            with _open(url, open_s, read_s) as container:
                yield from _read(container, False)
            return
        file = fetch(url)
        with _open_fetched(file, fetch) as container:
            yield from _read(container, file.length is not None)
        if file.fault is not None:
            raise file.fault
    except av.error.FFmpegError as error:
        raise CorruptAudio(f"the stream cannot be read: {error.strerror}") from error


def _open(url: str, open_s: float, read_s: float) -> InputContainer:
    options = _options(NETWORK_FORMATS, PROTOCOLS)
    if scheme_of(url) in ("rtsp", "rtsps"):
        options["rtsp_transport"] = "tcp"
    return av.open(url, mode="r", options=options, metadata_errors="ignore", timeout=(open_s, read_s))


def _options(formats: str, protocols: str) -> dict[str, str]:
    return {
        "format_whitelist": formats,
        "codec_whitelist": ",".join(NETWORK_CODECS),
        "protocol_whitelist": protocols,
        "max_streams": "64",
        # Microseconds of audio that libav reads to find the tracks of a live stream.
        "analyzeduration": "1000000",
    }


def _open_fetched(file: Fetched, fetch: Fetch) -> InputContainer:
    options = _options(FETCHED_FORMATS, "none")
    kind = None
    if file.peek(len(PLAYLIST)).startswith(PLAYLIST):
        kind = "hls"
        # The HLS demuxer would keep connections of libav's own HTTP client open, which is not used here.
        options |= {"http_persistent": "0", "http_multiple": "0"}
    return av.open(
        file,
        mode="r",
        format=kind,
        options=options,
        metadata_errors="ignore",
        io_open=lambda target, flags, given: fetch(target),
    )


def _read(container: InputContainer, has_length: bool) -> Iterator[StreamKind | Block]:
    if not container.streams.audio:
        raise (
            NoAudioTrack("the stream has no audio track")
            if container.streams
            else NotAudio("the address has neither audio nor video")
        )
    track = container.streams.audio[0]
    for other in container.streams:
        # Variants of an HLS stream that are not read must not be fetched.
        if other.index != track.index:
            other.discard = Discard.all
    decoder = track.codec_context
    if decoder is None or decoder.name not in NETWORK_CODECS:
        named = "an unknown codec" if decoder is None else f"the codec {decoder.name!r}"
        raise UnsupportedFormat(f"the stream has {named}, which is not supported")
    decoder.options = {"max_samples": str(MAX_PACKET_SAMPLES)}
    kind = _kind(container, has_length)
    yield kind
    end = None
    for block in _blocks(_frames(container, track)):
        end = block.start + len(block.samples) / MODEL_RATE
        yield block
    if kind.seconds and end is not None:
        begin = (container.start_time or 0) / av.time_base
        missing = begin + kind.seconds - end
        if missing > MISSING_S + MISSING_SHARE * kind.seconds:
            raise CorruptAudio(f"the last {missing:.0f} s of the file are missing")


def _kind(container: InputContainer, has_length: bool) -> StreamKind:
    live_formats = ("rtsp", "flv", "live_flv")
    has_duration = container.duration is not None and container.duration > 0
    is_hls = container.format.name == "hls"
    is_file = container.format.name not in live_formats and (has_duration or (has_length and not is_hls))
    seconds = (container.duration or 0) / av.time_base if is_file else None
    return StreamKind(seconds, is_file or is_hls)


def _frames(container: InputContainer, track: AudioStream) -> Iterator[av.AudioFrame]:
    """Decoded frames. Damaged packets are skipped: a live stream is often joined in the middle of one."""
    damaged = 0
    for packet in container.demux(track):
        if packet.size > MAX_PACKET_BYTES:
            raise CorruptAudio(f"a packet of the stream is larger than {MAX_PACKET_BYTES} bytes")
        try:
            frames = track.codec_context.decode(packet if packet.size else None)
        except (av.error.InvalidDataError, EOFError) as error:
            damaged += 1
            if damaged > MAX_DAMAGED_PACKETS:
                raise CorruptAudio("the audio of the stream is damaged") from error
            continue
        damaged = 0 if frames else damaged
        yield from frames


def _blocks(frames: Iterator[av.AudioFrame]) -> Iterator[Block]:
    """Frames as blocks of about 0.2 s. Where the times of the frames jump, a new signal begins."""
    signal: _Signal | None = None
    try:
        for frame in frames:
            time = frame.time
            if signal is None:
                signal = _Signal(frame.sample_rate, time or 0.0)
            elif signal.rate != frame.sample_rate or (time is not None and abs(time - signal.expected) > JUMP_S):
                yield from signal.end()
                jump = 0.0 if time is None else time - signal.expected
                # If the clock of the stream has changed, its times go on without a gap.
                signal.clock_shift -= 0.0 if 0 <= jump <= MAX_JUMP_S else jump
                signal = _Signal(frame.sample_rate, signal.expected if time is None else time, signal.clock_shift)
            yield from signal.add(frame)
    except (AudioError, av.error.FFmpegError, OSError):
        if signal is not None:
            yield from signal.end()
        raise
    if signal is not None:
        yield from signal.end()


class _Signal:
    """Audio without a gap: frames are mixed, resampled and collected to blocks."""

    def __init__(self, rate: int, start: float, clock_shift: float = 0.0) -> None:
        self.rate = rate
        # The time at which the next frame should begin.
        self.expected = start
        # Added to the times of the stream, whose clock may have changed.
        self.clock_shift = clock_shift
        self._at = start + clock_shift
        self._resampler = Resampler(rate)
        self._waiting: list[NDArray[np.float32]] = []

    def add(self, frame: av.AudioFrame) -> Iterator[Block]:
        self.expected += frame.samples / self.rate
        self._waiting.append(self._resampler.resample(mix_down(frame)))
        if sum(map(len, self._waiting)) >= BLOCK_SAMPLES:
            yield self._block()

    def end(self) -> Iterator[Block]:
        self._waiting.append(self._resampler.flush())
        if any(map(len, self._waiting)):
            yield self._block()

    def _block(self) -> Block:
        block = Block(self._at, np.concatenate(self._waiting), self.clock_shift)
        self._waiting = []
        self._at += len(block.samples) / MODEL_RATE
        return block


if __name__ == "__main__":
    main()
