"""The program that decodes untrusted audio: uploaded files, container streams, and streams pulled from the network.

    python -m realtime.serving.decoder_process FD

The gateway starts the program once, and sends it orders over the socket FD (`isolated_decoder.py`; messages:
`media_processes.py`). The program loads libav, and forks a process for each order, which is fast because forks share
the loaded libraries. Each fork has resource limits, and audio that crashes libav ends only its own fork.

A fork that pulls a stream from the network gets a job with the URL, and sends blocks of samples until the stream ends.
The gateway's side is `PulledAudio` in `isolated_decoder.py`, which starts another fork to reconnect. `read_network`
reads HLS, RTMP, RTSP, Icecast and files over HTTP with libav, and `read_srt` runs the program ffmpeg for SRT. They
yield `Block`s of 16 kHz mono with their time in the stream. If the time of a block is later than the end of the block
before it, audio is missing between them. Libav may use the protocols and formats that are listed here and no others: a
playlist cannot name a file of this machine. With `fetch`, libav uses no protocol at all: `fetch` opens every URL.
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


# Reading a stream from the network


SRT = "srt"
# The longest file of ffmpeg's messages, and how many bytes at its end are read.
MAX_MESSAGE_FILE_BYTES = 64 * 1024
MAX_READ_MESSAGE_BYTES = 4096
# The operation of prctl(2) that sets the signal which a process gets when its parent ends.
PR_SET_PDEATHSIG = 1

# Schemes of URLs, protocols, formats and codecs that libav may use.
HTTP_SCHEMES = ("http", "https")
SCHEMES = (*HTTP_SCHEMES, "rtmp", "rtmps", "rtmpt", "rtmpts", "rtsp", "rtsps")
# `crypto` decrypts HLS segments; the others are transports.
PROTOCOLS = "crypto,http,https,ffrtmphttp,rtmp,rtmps,rtmpt,rtmpts,rtp,srtp,tcp,tls,udp"
NETWORK_FORMATS = f"{SERVED_FORMATS},aac,flv,hls,live_flv,mpegts,rtsp"
# The same, for streams that `fetch` opens: formats that open no connection of their own.
FETCHED_FORMATS = f"{SERVED_FORMATS},aac,flv,hls,mpegts"
NETWORK_CODECS = (*SERVED_CODECS, "aac_latm", "g722", "mp2", "mp2float")
# If the time of a frame differs by more than this from the end of the frame before it, audio is missing or the stream's
# clock has changed.
JUMP_S = 0.5
# A jump forward by more than this, or a jump back, is a changed clock and not missing audio.
MAX_JUMP_S = 3600.0
# Damaged packets in a row after which the stream is given up.
MAX_DAMAGED_PACKETS = 200
# How much of the declared duration may be missing at the end of a file: seconds, and a share of the duration.
MISSING_S, MISSING_SHARE = 1.0, 0.02
# Samples of a block: 0.2 s.
BLOCK_SAMPLES = MODEL_RATE // 5


def read_srt(url: str) -> Iterator[StreamKind | Block]:
    """An SRT stream, pulled by the program ffmpeg: PyAV's libav has no SRT. Its times are those of its samples."""
    program = shutil.which("ffmpeg")
    if program is None:
        raise UnsupportedFormat("SRT needs the program ffmpeg; install it (apt-get install ffmpeg)")
    command = [program, "-nostdin", "-loglevel", "error", "-protocol_whitelist", "srt", "-i", url]
    command += ["-vn", "-ac", "1", "-ar", str(MODEL_RATE), "-f", "s16le", "pipe:1"]
    samples_so_far = 0
    # The messages go into a file, because ffmpeg would stop at a full pipe.
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
                    if not samples_so_far:
                        yield StreamKind(None, False)
                    samples = np.frombuffer(data, "<i2", len(data) // 2) * PCM16_SCALE
                    yield Block(samples_so_far / MODEL_RATE, samples.astype(np.float32))
                    samples_so_far += len(samples)
            finally:
                ffmpeg.kill()
        if not samples_so_far:
            raise OSError(_last_line(messages) or "ffmpeg ended without a message")


def _bounds_of_ffmpeg() -> Callable[[], None]:
    """A function that the new process runs before it becomes ffmpeg: ffmpeg then ends when this process ends, and the
    file of its messages is bounded."""
    parent = os.getpid()
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def bound() -> None:
        # Writes beyond the limit fail; without this line they would end ffmpeg.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_MESSAGE_FILE_BYTES, MAX_MESSAGE_FILE_BYTES))
        if library is not None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)  # the parent ended before the line above

    return bound


def _last_line(messages: IO[bytes]) -> str:
    size = messages.seek(0, os.SEEK_END)
    messages.seek(max(0, size - MAX_READ_MESSAGE_BYTES))
    lines = messages.read(MAX_READ_MESSAGE_BYTES).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


@dataclass(frozen=True, slots=True)
class Block:
    """Samples at 16 kHz; `start` is the time of the first one in the stream, in seconds."""

    start: float
    samples: NDArray[np.float32]
    # Seconds that were added to the times of the stream because its clock has changed, for example because an encoder
    # was restarted. Where `clock_shift` changes, only the listener's own clock can tell whether audio is missing.
    clock_shift: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamKind:
    """Whether a stream is a file or live. `seconds`: the declared length of a file, 0 if it is not known; None for a
    live stream. `keeps_time`: a new connection continues the times of the one before, as HLS and files do."""

    seconds: float | None
    keeps_time: bool


class Fetched(Protocol):
    """The body of a response, as `checked_fetch.Body` has it. `name` is its URL; `length` its declared bytes, None for
    a live stream; `fault` is set if it ended too early."""

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
    """Yields the kind of the stream, then the audio of its first audio track. Raises AudioError and OSError.

    Without `fetch`, `open_s` and `read_s` bound how long libav waits for the network. The iterator ends after a
    complete file, or when the server has closed a live stream.
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
    """Collects frames to blocks of about 0.2 s. Where the times of the frames jump, a new `_Signal` begins."""
    signal: _Signal | None = None
    try:
        for frame in frames:
            time = frame.time
            if signal is None:
                signal = _Signal(frame.sample_rate, time or 0.0)
            elif signal.rate != frame.sample_rate or (time is not None and abs(time - signal.expected) > JUMP_S):
                yield from signal.end()
                jump = 0.0 if time is None else time - signal.expected
                # If the clock of the stream has changed, undo the jump: the blocks continue without a gap.
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
    """Audio without a gap: its frames are mixed down, resampled, and collected to blocks."""

    def __init__(self, rate: int, start: float, clock_shift: float = 0.0) -> None:
        self.rate = rate
        # The stream's own time at which the next frame should begin.
        self.expected = start
        # See `Block.clock_shift`.
        self.clock_shift = clock_shift
        # The time of the next block.
        self._next_start = start + clock_shift
        self._resampler = Resampler(rate)
        self._collected: list[NDArray[np.float32]] = []

    def add(self, frame: av.AudioFrame) -> Iterator[Block]:
        self.expected += frame.samples / self.rate
        self._collected.append(self._resampler.resample(mix_down(frame)))
        if sum(map(len, self._collected)) >= BLOCK_SAMPLES:
            yield self._block()

    def end(self) -> Iterator[Block]:
        self._collected.append(self._resampler.flush())
        if any(map(len, self._collected)):
            yield self._block()

    def _block(self) -> Block:
        block = Block(self._next_start, np.concatenate(self._collected), self.clock_shift)
        self._collected = []
        self._next_start += len(block.samples) / MODEL_RATE
        return block


if __name__ == "__main__":
    main()
