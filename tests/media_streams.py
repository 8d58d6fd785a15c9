"""Streams on loopback for the tests that pull them: a small web server, and ffmpeg as an encoder and as a server."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from realtime.serving import isolated_decoder

FFMPEG = shutil.which("ffmpeg")
needs_ffmpeg = pytest.mark.skipif(FFMPEG is None, reason="ffmpeg is not installed (apt-get install ffmpeg)")

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class WebServer:
    """Answers each path with bytes, or with a function that writes the whole response. Others are not found."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Answer] = {}
        self.asked: list[str] = []
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Cut all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            page = self.pages.get(path)
            if page is None:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            elif isinstance(page, bytes):
                writer.write(head_of(len(page)) + page)
            else:
                await page(writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def head_of(length: int | None, kind: str = "application/octet-stream") -> bytes:
    size = b"" if length is None else b"Content-Length: %d\r\n" % length
    return b"HTTP/1.1 200 OK\r\n" + size + b"Connection: close\r\nContent-Type: " + kind.encode() + b"\r\n\r\n"


def redirect(target: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())

    return answer


@asynccontextmanager
async def web_server() -> AsyncIterator[WebServer]:
    web = WebServer()
    server = await asyncio.start_server(web.serve, "127.0.0.1", 0)
    web.port = server.sockets[0].getsockname()[1]
    try:
        yield web
    finally:
        server.close()
        # A connection that was accepted just before is known only some turns of the loop later.
        for _ in range(5):
            web.cut()
            await asyncio.sleep(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spoken(seconds: float) -> NDArray[np.float32]:
    """Tones that change every second, so that a second that is missing or repeated is noticed."""
    at = np.arange(round(16_000 * seconds))
    return (0.3 * np.sin(2 * np.pi * (300 + 60 * (at // 16_000)) * at / 16_000)).astype(np.float32)


def wav_bytes(samples: NDArray[np.float32]) -> bytes:
    data = (samples * 32767).astype("<i2").tobytes()
    fields = ((1, 2), (1, 2), (16_000, 4), (32_000, 4), (2, 2), (16, 2))
    body = b"".join(value.to_bytes(size, "little") for value, size in fields)
    head = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    return head + body + b"data" + len(data).to_bytes(4, "little") + data


def late_file(samples: NDArray[np.float32], begins_s: float) -> bytes:
    """A Matroska file whose first sample has this time."""
    file, at = io.BytesIO(), round(begins_s * 16_000)
    with av.open(file, "w", format="matroska", options={"avoid_negative_ts": "disabled"}) as container:
        track = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for start in range(0, len(samples), 3200):
            block = (samples[None, start : start + 3200] * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(block, format="s16", layout="mono")
            frame.sample_rate = 16_000
            for packet in track.encode(frame):
                packet.pts = packet.dts = at + start
                packet.time_base = Fraction(1, 16_000)
                container.mux(packet)
    return file.getvalue()


def cut_then(whole: bytes, end: int, then: bytes) -> Answer:
    """A file that breaks off at its first connection, and is another one from then on."""
    parts = [head_of(len(whole)) + whole[:end]]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(parts.pop() if parts else head_of(len(then)) + then)
        await writer.drain()

    return answer


def encode(samples: NDArray[np.float32], *arguments: str) -> bytes:
    """The samples as ffmpeg writes them to its standard output with these arguments."""
    assert FFMPEG is not None
    command = [FFMPEG, "-nostdin", "-v", "error", "-f", "f32le", "-ar", "16000", "-ac", "1", "-i", "/dev/stdin"]
    return subprocess.run([*command, *arguments, "pipe:1"], input=samples.tobytes(), stdout=-1, check=True).stdout


def hls_segments(folder: Path, seconds: int, each: int = 2, clock_s: float = 0.0) -> list[tuple[float, bytes]]:
    """Seconds and bytes of the MPEG-TS segments of `spoken(seconds)`, as ffmpeg's HLS muxer cuts them. The stream's
    clock begins at `clock_s`."""
    assert FFMPEG is not None
    raw = folder / "sound.wav"
    raw.write_bytes(wav_bytes(spoken(seconds)))
    options = ["-output_ts_offset", str(clock_s), "-hls_time", str(each), "-hls_list_size", "0"]
    options += ["-f", "hls", str(folder / "whole.m3u8")]
    subprocess.run([FFMPEG, "-nostdin", "-v", "error", "-i", str(raw), "-c:a", "aac", *options], check=True)
    lines = (folder / "whole.m3u8").read_text().splitlines()
    return [
        (float(line.removeprefix("#EXTINF:").rstrip(",")), (folder / lines[number + 1]).read_bytes())
        for number, line in enumerate(lines)
        if line.startswith("#EXTINF:")
    ]


def playlist(segments: list[tuple[float, bytes]], first: int, last: int, *, ended: bool = False) -> bytes:
    """A live playlist of segments `first` to `last - 1`, or its end."""
    lines = ["#EXTM3U", "#EXT-X-VERSION:3", "#EXT-X-TARGETDURATION:3", f"#EXT-X-MEDIA-SEQUENCE:{first}"]
    for number in range(first, last):
        lines += [f"#EXTINF:{segments[number][0]:.3f},", f"/segment{number}.ts"]
    return "\n".join([*lines, *(["#EXT-X-ENDLIST"] if ended else []), ""]).encode()


def serve_segments(web: WebServer, segments: list[tuple[float, bytes]]) -> None:
    for number, (_, data) in enumerate(segments):
        web.pages[f"/segment{number}.ts"] = data


RTP_S = 0.02


class RtspServer:
    """A camera: serves G.711 as RTP inside the RTSP connection, at the pace of speech, to each client anew. After the
    first connection it is silent for `away_s` seconds."""

    def __init__(self, mulaw: bytes, away_s: float) -> None:
        self._mulaw = mulaw
        self._away_s = away_s
        self._has_played = False
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                method = lines[0].split()[0]
                fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
                self.asked.append(f"{method} {fields.get('Transport', '')}".strip())
                writer.write(self._answer(method, fields, lines[0].split()[1]))
                if method == "PLAY":
                    return await self._play(writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    def _answer(self, method: str, fields: dict[str, str], url: str) -> bytes:
        lines, body = ["RTSP/1.0 200 OK", f"CSeq: {fields['CSeq']}", "Session: 1"], ""
        if method == "OPTIONS":
            lines.append("Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN")
        elif method == "DESCRIBE":
            media = "m=audio 0 RTP/AVP 0\r\na=rtpmap:0 PCMU/8000\r\na=control:track1\r\n"
            body = f"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n{media}"
            lines += [f"Content-Base: {url}/", "Content-Type: application/sdp", f"Content-Length: {len(body)}"]
        elif method == "SETUP":
            lines.append("Transport: RTP/AVP/TCP;unicast;interleaved=0-1")
        return "\r\n".join([*lines, "", body]).encode()

    async def _play(self, writer: asyncio.StreamWriter) -> None:
        size, clock = round(8000 * RTP_S), asyncio.get_running_loop().time
        if self._has_played:
            await asyncio.sleep(self._away_s)
        self._has_played = True
        began = clock()
        for number, at in enumerate(range(0, len(self._mulaw), size)):
            head = b"\x80\x00" + number.to_bytes(2, "big") + at.to_bytes(4, "big") + b"tape"
            packet = head + self._mulaw[at : at + size]
            writer.write(b"$\x00" + len(packet).to_bytes(2, "big") + packet)
            await writer.drain()
            await asyncio.sleep(max(0.0, began + number * RTP_S - clock()))


def reconnect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnects come soon, and audio as fast as it is sent."""
    monkeypatch.setattr(isolated_decoder, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(isolated_decoder, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(isolated_decoder, "FILE_BURST_S", 1e6)
