"""Streams pulled from loopback: what arrives is what was sent, and what is missing is a gap of its length."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from realtime.serving import isolated_decoder
from realtime.serving.decoder_process import MAX_READ_MESSAGE_BYTES
from realtime.serving.isolated_decoder import PulledAudio, PullFailed
from tests.media_streams import (
    FFMPEG,
    RtspServer,
    WebServer,
    encode,
    free_port,
    head_of,
    hls_segments,
    needs_ffmpeg,
    playlist,
    reconnect_soon,
    serve_segments,
    spoken,
    wav_bytes,
    web_server,
)
from tests.waiting import forever, stays, until

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting ffmpeg blocks a little; that is the test's doing."""
    yield


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    reconnect_soon(monkeypatch)


class Heard:
    """What a stream has given so far."""

    def __init__(self, url: str, give_up_after_s: float | None = 20.0) -> None:
        self.parts: list[NDArray[np.float32] | int] = []
        self.lines: list[str] = []
        self._pulled = PulledAudio(url, on_status=self.lines.append, give_up_after_s=give_up_after_s)

    async def all(self) -> None:
        async with asyncio.timeout(PATIENCE_S), aclosing(self._pulled.audio()) as audio:
            async for part in audio:
                self.parts.append(part)

    @property
    def gaps(self) -> list[int]:
        return [part for part in self.parts if isinstance(part, int)]

    @property
    def samples(self) -> NDArray[np.float32]:
        audio = [part for part in self.parts if not isinstance(part, int)]
        return np.concatenate(audio) if audio else np.empty(0, np.float32)

    @property
    def seconds(self) -> float:
        return len(self.samples) / 16_000


def tones(samples: NDArray[np.float32]) -> list[int]:
    """The number of each second of `spoken`, by its frequency."""
    found = []
    for start in range(0, len(samples) - 15_999, 16_000):
        spectrum = np.abs(np.fft.rfft(samples[start + 4000 : start + 12_000]))
        found.append(round((2 * float(np.argmax(spectrum)) - 300) / 60))
    return found


async def test_file_over_http_is_heard_whole_and_ends() -> None:
    sent = spoken(3.0)
    async with web_server() as web:
        web.pages["/talk.wav"] = wav_bytes(sent)
        heard = Heard(web.url("/talk.wav"))
        await heard.all()
    assert not heard.gaps and len(heard.samples) == len(sent)
    assert np.allclose(heard.samples, sent, atol=1e-3)


async def test_file_that_breaks_off_is_continued_where_it_was() -> None:
    whole, cuts = wav_bytes(spoken(6.0)), [60_000, 150_000]

    async def broken(writer: asyncio.StreamWriter) -> None:
        end = cuts.pop(0) if cuts else len(whole)
        writer.write(head_of(len(whole)) + whole[:end])
        await writer.drain()

    async with web_server() as web:
        web.pages["/talk.wav"] = broken
        heard = Heard(web.url("/talk.wav"))
        await heard.all()
    assert not cuts and not heard.gaps
    assert np.allclose(heard.samples, spoken(6.0), atol=1e-3)
    assert len([line for line in heard.lines if line]) == 2


async def test_file_that_begins_much_later_after_a_reconnect_has_another_clock() -> None:
    """A gap is at most an hour: a file can name any time, and the gap would be computed and waited for."""
    for begins_s, gaps in ((1e13, []), (4.0 + 3601, []), (6.0, [32_000])):
        pulled = PulledAudio("http://127.0.0.1/talk")
        pulled.resume_at(4.0, asyncio.get_running_loop().time())
        parts = pulled._parts(isolated_decoder._Kind(10.0, True), begins_s, 0.0, spoken(0.2), True)
        assert [part for part in parts if isinstance(part, int)] == gaps, begins_s
        assert pulled.position is not None and pulled.position[0] == begins_s + 0.2


@needs_ffmpeg
async def test_broadcast_that_breaks_off_has_a_gap_by_the_clock() -> None:
    """As Icecast serves it: without a length, and from now on at each connection."""
    sound, let_in = encode(spoken(2.0), "-c:a", "libmp3lame", "-f", "mp3"), asyncio.Event()
    connections = 0

    async def broadcast(writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            await let_in.wait()
        writer.write(head_of(None, "audio/mpeg") + sound)
        await writer.drain()
        if connections > 1:
            await forever()

    async with web_server() as web:
        clock = asyncio.get_running_loop().time
        began = clock()
        web.pages["/live"] = broadcast
        heard = Heard(web.url("/live"))
        hearing = asyncio.create_task(heard.all())
        await until(lambda: connections == 2)
        before, away_s = heard.seconds, 1.0
        await stays(lambda: heard.seconds == before, away_s)
        let_in.set()
        await until(lambda: heard.seconds > before + 1.5)
        took = clock() - began
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
    # The gap is about as long as the server was away (its first block was spoken meanwhile), and shorter than the test.
    assert 1.9 < before < 2.2 and len(heard.gaps) == 1 and away_s - 0.25 <= heard.gaps[0] / 16_000 <= took


@asynccontextmanager
async def off_air(segments: list[tuple[float, bytes]]) -> AsyncIterator[tuple[WebServer, Heard, asyncio.Task[None]]]:
    """HLS whose first three segments were heard, and whose playlist is gone."""
    async with web_server() as web:
        serve_segments(web, segments)
        web.pages["/live.m3u8"] = playlist(segments, 0, 3)
        heard = Heard(web.url("/live.m3u8"))
        hearing = asyncio.create_task(heard.all())
        await until(lambda: heard.seconds > 5.5)
        del web.pages["/live.m3u8"]
        await until(lambda: any(heard.lines))
        yield web, heard, hearing


@needs_ffmpeg
async def test_hls_that_is_interrupted_misses_exactly_the_segments_that_are_gone(tmp_path: Path) -> None:
    segments = hls_segments(tmp_path, 16)
    async with off_air(segments) as (web, heard, hearing):
        # When it is back, the segments 3 and 4 have left the playlist.
        web.pages["/live.m3u8"] = playlist(segments, 5, 7)
        await until(lambda: heard.gaps)
        web.pages["/live.m3u8"] = playlist(segments, 5, 8, ended=True)
        await hearing
    lost = segments[3][0] + segments[4][0]
    assert len(heard.gaps) == 1 and abs(heard.gaps[0] / 16_000 - lost) < 0.25
    assert abs(heard.seconds + lost - 16) < 0.3
    # The gap stands where it belongs, and nothing is heard twice.
    placed = np.concatenate([np.zeros(part, np.float32) if isinstance(part, int) else part for part in heard.parts])
    known = [0, 1, 2, 3, 4, 11, 12, 13, 14]
    assert [tones(placed)[second] for second in known] == known


@needs_ffmpeg
async def test_hls_that_is_back_soon_misses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    segments = hls_segments(tmp_path, 10)
    async with off_air(segments) as (web, heard, hearing):
        web.pages["/live.m3u8"] = playlist(segments, 1, 5, ended=True)
        await hearing
    assert not heard.gaps and abs(heard.seconds - 10) < 0.2
    assert tones(heard.samples)[:9] == list(range(9))


@needs_ffmpeg
async def test_encoder_that_is_started_again_within_a_connection_has_a_gap_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock begins anew, so the times of the stream do not tell what is missing."""
    # The three segments at the start come at once; only the last of their audio says how early audio usually comes.
    monkeypatch.setattr(isolated_decoder, "ESTIMATE_S", 0.5)
    old, new = hls_segments(tmp_path, 6, clock_s=300.0)[:3], hls_segments(tmp_path, 4)[:2]
    async with web_server() as web:
        clock = asyncio.get_running_loop().time
        serve_segments(web, old + new)
        web.pages["/live.m3u8"] = playlist(old, 0, 3)
        heard = Heard(web.url("/live.m3u8"))
        hearing = asyncio.create_task(heard.all())
        await until(lambda: heard.seconds > 5.5)
        before, away_s = clock(), 3.0
        await stays(lambda: not heard.gaps, away_s)
        web.pages["/live.m3u8"] = playlist(old + new, 0, 5)
        await until(lambda: heard.seconds > 9)
        took = clock() - before
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
    assert not any(heard.lines) and len(heard.gaps) == 1 and away_s - 1 <= heard.gaps[0] / 16_000 <= took
    assert tones(heard.samples)[:9] == [0, 1, 2, 3, 4, 5, 0, 1, 2]


@needs_ffmpeg
async def test_encoder_that_is_started_again_between_connections_is_heard_from_its_first_second(tmp_path: Path) -> None:
    """The new clock is behind the old one: that is no audio that was heard before."""
    old, new = hls_segments(tmp_path, 6, clock_s=300.0)[:3], hls_segments(tmp_path, 6)[:3]
    async with web_server() as web:
        serve_segments(web, old + new)
        web.pages["/live.m3u8"] = playlist(old, 0, 3)
        heard = Heard(web.url("/live.m3u8"))
        hearing = asyncio.create_task(heard.all())
        await until(lambda: heard.seconds > 5.5)
        del web.pages["/live.m3u8"]
        await until(lambda: any(heard.lines))
        first = heard.seconds
        web.pages["/live.m3u8"] = playlist(old + new, 3, 6)
        await until(lambda: heard.seconds > first + 5)
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
    assert len(heard.gaps) <= 1
    assert tones(heard.samples[round(first * 16_000) :])[:4] == [0, 1, 2, 3]


async def test_clock_that_libav_has_prolonged_is_that_of_the_next_connection() -> None:
    pulled, now = PulledAudio("http://127.0.0.1/live.m3u8"), asyncio.get_running_loop().time()
    pulled.resume_at(2**33 / 90_000 + 160.0, now - 5.0)
    kind = isolated_decoder._Kind(None, keeps_time=True)
    assert pulled._missing_after_reconnect(kind, 158.0, 0.2, now) == pytest.approx(-2.0)


async def test_audio_that_comes_late_was_lost_and_uneven_audio_was_not() -> None:
    estimate = isolated_decoder._LossEstimate()
    assert estimate.lost(0.2, 100.0) == 0.0
    for second in range(0, 40, 4):  # a segment of four seconds, which comes when it is complete
        for piece in range(20):
            estimate.add(0.2, 104.0 + second + 0.001 * piece)
    # The next segment would come at 144; ten seconds later ten seconds are lost.
    estimate.add(0.1, 154.0)
    assert estimate.lost(0.2, 154.0) == pytest.approx(10.0, abs=0.2)
    estimate.add(10.0 + 0.2, 154.0)
    for piece in range(19):
        estimate.add(0.2, 154.0 + 0.001 * piece)
    estimate.add(0.1, 158.8)
    assert estimate.lost(0.2, 158.8) == 0.0


@needs_ffmpeg
@pytest.mark.parametrize("protocol", ["rtmp", "srt"])
async def test_publisher_that_comes_back_is_heard_again(protocol: str, tmp_path: Path) -> None:
    """ffmpeg serves one listener and ends; then it serves another one."""
    sound = tmp_path / "sound.wav"
    sound.write_bytes(wav_bytes(spoken(2.0)))
    port = free_port()
    url = f"rtmp://127.0.0.1:{port}/live/studio" if protocol == "rtmp" else f"srt://127.0.0.1:{port}"
    target = ["-f", "flv", "-listen", "1", url] if protocol == "rtmp" else ["-f", "mpegts", f"{url}?mode=listener"]

    def publish() -> subprocess.Popen[bytes]:
        assert FFMPEG is not None
        command = [FFMPEG, "-nostdin", "-v", "error", "-re", "-i", str(sound), "-c:a", "aac", *target]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    heard, running = Heard(url), [publish()]

    async def hear() -> None:
        while True:
            try:
                return await heard.all()
            except PullFailed:
                await asyncio.sleep(0.1)  # ffmpeg does not listen yet

    hearing = asyncio.create_task(hear())
    try:
        await until(lambda: any(heard.lines))
        first = heard.seconds
        running.append(publish())
        await until(lambda: heard.seconds > first + 1)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        for process in running:
            process.kill()
            process.wait()
    assert first > 1.5 and len(heard.gaps) == 1 and heard.gaps[0] > 0
    assert any(heard.lines)


@needs_ffmpeg
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
async def test_ffmpeg_ends_with_the_process_that_pulls() -> None:
    """The gateway kills that process (SIGKILL), so it cannot end ffmpeg itself."""
    url = f"srt://127.0.0.1:{free_port()}?mode=listener"

    def running() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if url.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    hearing = asyncio.create_task(Heard(url).all())
    try:
        await until(running)
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await until(lambda: not running(), 20)
    finally:
        for left in running():
            os.kill(left, signal.SIGKILL)


def srt_with(script: str, folder: Path) -> str:
    """What a pull from SRT says at its end if ffmpeg is this script."""
    program = folder / "ffmpeg"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    code = """
from realtime.serving.decoder_process import read_srt
try:
    print("samples", sum(len(part.samples) for part in read_srt("srt://studio.example") if hasattr(part, "samples")))
except OSError as error:
    print(error)
"""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, timeout=30, check=True)
    return done.stdout.decode().strip()


def test_messages_of_ffmpeg_do_not_stop_its_audio_and_are_bounded(tmp_path: Path) -> None:
    flood = "head -c 3000000 /dev/zero | tr '\\0' x >&2"
    assert srt_with(f"{flood}; head -c 32000 /dev/zero", tmp_path) == "samples 16000"
    assert 0 < len(srt_with(flood, tmp_path)) <= MAX_READ_MESSAGE_BYTES
    assert srt_with("echo first >&2; echo the last words >&2", tmp_path) == "the last words"
    assert srt_with("true", tmp_path) == "ffmpeg ended without a message"


@needs_ffmpeg
async def test_camera_that_cuts_the_connection_is_heard_again_after_a_gap() -> None:
    """RTSP, with the audio inside the connection (TCP)."""
    camera = RtspServer(encode(spoken(3.0), "-ar", "8000", "-f", "mulaw"), away_s=2.0)
    server = await asyncio.start_server(camera.serve, "127.0.0.1", 0)
    heard = Heard(f"rtsp://127.0.0.1:{server.sockets[0].getsockname()[1]}/stream")
    hearing = asyncio.create_task(heard.all())
    try:
        await until(lambda: any(heard.lines))
        first = heard.seconds
        await until(lambda: heard.seconds > first + 1)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        server.close()
    assert 2 < first < 3.2 and len(heard.gaps) == 1 and heard.gaps[0] > 0
    assert tones(heard.samples)[1:2] == [1]
    assert all("RTP/AVP/TCP" in asked for asked in camera.asked if asked.startswith("SETUP")), camera.asked


@pytest.mark.parametrize(
    "named", ["file:///etc/hostname", "/etc/hostname", "concat:/etc/hostname|/etc/passwd", "data:audio/wav;base64,UklG",
              "subfile,,start,0,end,9,,:/etc/hostname", "unix:/run/x", "gopher://127.0.0.1:1/x"]
)  # fmt: skip
async def test_playlist_cannot_name_files_of_this_machine(named: str) -> None:
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:2", "#EXTINF:2.0,", named, "#EXT-X-ENDLIST", ""]
    async with web_server() as web:
        web.pages["/evil.m3u8"] = "\n".join(lines).encode()
        heard = Heard(web.url("/evil.m3u8"), 0.0)
        with pytest.raises(PullFailed):
            await heard.all()
    assert not heard.parts


async def test_what_is_no_stream_is_refused_with_a_reason() -> None:
    async with web_server() as web:
        web.pages["/page"] = b"<html>no audio here</html>" * 100
        for url, text in (
            (web.url("/page"), "cannot be read"),
            (web.url("/missing"), "404"),
            (f"http://127.0.0.1:{free_port()}/", "refused"),
            ("file:///etc/hostname", "cannot be pulled"),
            ("concat:/etc/hostname", "cannot be pulled"),
        ):
            with pytest.raises(PullFailed, match=text):
                await Heard(url).all()


async def test_server_that_says_nothing_or_never_ends_its_playlist_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_decoder, "OPEN_S", 2.0)

    async def silent(writer: asyncio.StreamWriter) -> None:
        await forever()

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(head_of(None) + b"#EXTM3U\n#EXT-X-TARGETDURATION:2\n")
        while True:
            writer.write(b"#EXTINF:2.0,\n/segment.ts\n" * 100)
            await writer.drain()

    async with web_server() as web:
        web.pages |= {"/silent": silent, "/endless.m3u8": endless}
        for path in ("/silent", "/endless.m3u8"):
            with pytest.raises(PullFailed):
                await Heard(web.url(path)).all()


async def test_stream_that_stays_away_is_given_up() -> None:
    async def once(writer: asyncio.StreamWriter) -> None:
        del web.pages["/talk.wav"]
        writer.write(head_of(200_000) + wav_bytes(spoken(4.0))[:60_000])

    async with web_server() as web:
        web.pages["/talk.wav"] = once
        heard = Heard(web.url("/talk.wav"), give_up_after_s=0.5)
        with pytest.raises(PullFailed, match="404"):
            await heard.all()
    assert heard.seconds > 1


async def test_file_comes_at_the_pace_of_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_decoder, "FILE_BURST_S", 1.0)
    async with web_server() as web:
        web.pages["/talk.wav"] = wav_bytes(spoken(30.0))
        heard = Heard(web.url("/talk.wav"))
        began = asyncio.get_running_loop().time()
        hearing = asyncio.create_task(heard.all())
        await until(lambda: heard.seconds > 2)
        assert heard.seconds < asyncio.get_running_loop().time() - began + 1.5
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
