"""`tickertape listen` as a process, with real streams of ffmpeg on loopback and a running server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.test_commands import run, start
from tests.media_streams import hls_segments, needs_ffmpeg, playlist, serve_segments, spoken, wav_bytes, web_server
from tests.waiting import until


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting a process blocks a little; that is this test's doing, not the server's."""
    yield


@needs_ffmpeg
async def test_hls_with_an_interruption_has_the_words_of_the_file_but_for_the_gap(serve: Serve, tmp_path: Path) -> None:
    segments, file = hls_segments(tmp_path, 16), tmp_path / "words.json"

    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    async with serve() as running, web_server() as web:
        serve_segments(web, segments)
        web.pages["/live.m3u8"] = playlist(segments, 0, 3)
        command = ("listen", web.url("/live.m3u8"), "--server", running.http, "--output", str(file), "--words")
        process = await start(*command)
        await until(lambda: any(line.get("words") for line in lines()))
        del web.pages["/live.m3u8"]
        await until(lambda: web.asked.count("/live.m3u8") > 4)
        web.pages["/live.m3u8"] = playlist(segments, 5, 8, ended=True)
        shown, said = await asyncio.wait_for(process.communicate(), 60)
        # The session heard sixteen seconds: the gap is as long as what is missing.
        assert process.returncode == 0, said.decode()
    found = lines()
    (gap,) = [line for line in found if line.get("gap")]
    lost = segments[3][0] + segments[4][0]
    assert isinstance(gap["start"], float) and isinstance(gap["end"], float)
    assert abs(gap["end"] - gap["start"] - lost) < 0.25 and abs(gap["start"] - 6.0) < 0.25
    words = [word for line in found if "words" in line for word in line["words"]]  # type: ignore[attr-defined]
    # The fake engine has a word for every 0.4 s of sound, and none in the gap.
    assert not [word for word in words if word["end"] > gap["start"] + 0.5 and word["start"] < gap["end"] - 0.5]
    assert abs(len(words) - (16 - lost) / 0.4) <= 2 and words[-1]["end"] > 15
    assert "no sound until" in shown.decode() and "trying again" in said.decode()


async def test_interrupt_ends_a_stream_that_is_away_and_says_what_was_heard(serve: Serve) -> None:
    async def once(writer: asyncio.StreamWriter) -> None:
        del web.pages["/talk.wav"]
        sound = wav_bytes(spoken(3.0))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * len(sound)) + sound)

    async with serve() as running, web_server() as web:
        web.pages["/talk.wav"] = once
        process = await start("listen", web.url("/talk.wav"), "--server", running.http)
        assert process.stderr is not None
        while b"trying again" not in await asyncio.wait_for(process.stderr.readline(), 60):
            pass
        process.send_signal(signal.SIGINT)
        shown, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0 and b"w1 w2" in shown


async def test_stream_that_cannot_be_pulled_is_said_in_one_line(serve: Serve) -> None:
    async with serve() as running, web_server() as web:
        code, _, said = await run("listen", web.url("/missing"), "--server", running.http)
        assert code == 1 and said.splitlines()[-1].startswith("error: cannot pull the stream:") and "404" in said
        code, _, said = await run("listen", "file:///etc/hostname")
        assert code == 2 and "not the address of a stream" in said
