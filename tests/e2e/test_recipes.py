"""Every command of docs/recipes.md is run against a server: the lines of the page, with another server and stream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.conftest import Running, Serve
from tests.e2e.test_commands import microphone
from tests.e2e.viewing import socket_viewer, until
from tests.media_streams import spoken, wav_bytes, web_server
from tests.phone_calls import RATE, mulaw, phone_call, start_message
from tests.realtime.gateway_doubles import silence, tone
from tests.waiting import PATIENCE_S
from tests.waiting import until as until_so

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
RECIPES = ("A meeting room", "OBS", "A phone line", "Home Assistant", "A radio station", "A church")
KEY = "change-this-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
# Commands that end when they are interrupted.
LASTING = re.compile(r"tickertape (mic|listen|wyoming|serve)\b|curl -sN ")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/watch/(\w[\w-]*)(\?overlay&lines=2&size=4)?#(vl_\S+)")

__all__ = ["microphone"]

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("curl", "jq", "sed", "bash"))), reason="the recipes use curl, jq and sed"
)


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting a process blocks a little; that is this test's doing, not the server's."""
    yield


def section(title: str) -> str:
    text = PAGE.read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def lines(text: str) -> list[str]:
    """The lines of all shell blocks."""
    return [line for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]


class Terminal:
    """Runs lines of the page with one environment, which `export` changes. Lasting commands go on in the background."""

    def __init__(self, running: Running, folder: Path, stack: AsyncExitStack, **more: str) -> None:
        self._folder = folder
        self._stack = stack
        program = folder / "programs" / "tickertape"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m realtime.cli "$@"\n')
        program.chmod(0o755)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
        path = f"{program.parent}:{more.pop('PATH', os.environ['PATH'])}"
        root = str(PAGE.parents[1])
        self.environment = {"PYTHONPATH": root, **clean, **more, "PATH": path, "NO_PROXY": "*", "LC_ALL": "C.UTF-8"}
        self._server = running.http

    async def begin(self) -> None:
        """The lines before all recipes, with the address of the test's server."""
        first = lines(PAGE.read_text().partition("\n## ")[0])
        assert first[1] == "tickertape serve --host 0.0.0.0"
        for line in first[2:]:
            await self.run(line.replace("http://127.0.0.1:8000", self._server))

    async def run(self, line: str) -> str:
        """What a line prints; for one that lasts, an empty text."""
        if LASTING.match(line):
            process = await self._start(f"exec {line}", sys.stderr)
            self._stack.push_async_callback(_interrupt, process)
            return ""
        if line.startswith("export "):
            line = f"{line} && env -0"
        process = await self._start(f"set -e -o pipefail; {line}", asyncio.subprocess.PIPE)
        shown, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 0, (line, shown)
        if "env -0" in line:
            self.environment = dict(entry.split("=", 1) for entry in shown.decode().split("\0") if "=" in entry)
        return shown.decode()

    async def _start(self, line: str, output: Any) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("bash", "-c", line), cwd=self._folder, env=self.environment, stdout=output, stderr=sys.stderr
        )


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.wait(), PATIENCE_S)


@asynccontextmanager
async def terminal(serve: Serve, folder: Path, **environment: str) -> AsyncIterator[tuple[Running, Terminal]]:
    hosts = {"stream_hosts": ("127.0.0.1",)}
    async with serve(auth={"keys": (KEY,)}, server=hosts) as running, AsyncExitStack() as stack:
        made = Terminal(running, folder, stack, **environment)
        await made.begin()
        yield running, made


async def words_at(running: Running, address: str) -> str:
    """The first final text that the page at this address shows."""
    match = ADDRESS.fullmatch(address.strip())
    assert match, address
    async with socket_viewer(running.port, match[1], match[3]) as viewer:
        events = await until(viewer, "final") if not (first := await viewer.event())["lines"] else [first]
    return str(events[-1]["text"] if events[-1]["type"] == "final" else events[-1]["lines"][0]["text"])


def test_the_page_has_all_recipes_and_each_is_short() -> None:
    assert set(RECIPES) <= set(re.findall(r"^## (.*)$", PAGE.read_text(), re.M))
    for title in RECIPES:
        assert 1 <= len(lines(section(title))) <= 10


@pytest.mark.parametrize("title", ["A meeting room", "OBS", "A church"])
async def test_a_microphone_with_an_audience(
    serve: Serve, tmp_path: Path, microphone: dict[str, str], title: str
) -> None:
    async with terminal(serve, tmp_path, **microphone) as (running, shell):
        mic, link, *rest = lines(section(title))
        assert await shell.run(mic) == ""
        address = await shell.run(link)
        assert ("?overlay" in address) == (title == "OBS")
        assert (await words_at(running, address)).startswith("w1 w2 w3")
        for line in rest:
            assert json.loads(await shell.run(line))
    if title == "A meeting room":
        assert "w1 w2 w3" in (tmp_path / "meeting.srt").read_text()


async def test_a_phone_line(serve: Serve, tmp_path: Path) -> None:
    (twiml,) = re.findall(r"^```xml\n(.*?)^```$", section("A phone line"), re.M | re.S)
    stream = ElementTree.fromstring(twiml).find("./Start/Stream")
    assert stream is not None and str(stream.get("url")).endswith("/v1/twilio")
    assert stream.get("track") == "both_tracks"
    parameters = {found.get("name"): found.get("value") for found in stream.iter("Parameter")}
    start = start_message(["inbound", "outbound"], customParameters=parameters)
    async with terminal(serve, tmp_path) as (running, shell):
        link, *streams = lines(section("A phone line"))
        address = await shell.run(link)
        for line in streams:
            await shell.run(line)
        await until_so(lambda: len(streams) <= running.metric("viewers"))
        async with phone_call(running.port, start) as call:
            for track in ("inbound", "outbound"):
                await call.media(mulaw(tone(1.3, RATE) + silence(0.9, RATE)), track)
            assert await words_at(running, address) == "w1 w2 w3"
            async with socket_viewer(running.port, "line-outbound", additional_headers=BEARER) as viewer:
                assert (await viewer.event())["live"]
            await call.stop()


async def test_home_assistant(serve: Serve, tmp_path: Path, unused_tcp_port: int) -> None:
    pytest.importorskip("wyoming.client", reason="the package wyoming is not installed")
    from tests.e2e.test_wyoming import client, say

    (line,) = lines(section("Home Assistant"))
    async with terminal(serve, tmp_path) as (_, shell):
        # The test may not listen on all addresses, and the port may be taken.
        await shell.run(line.replace("0.0.0.0", "127.0.0.1").replace("10300", str(unused_tcp_port)))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with client(unused_tcp_port) as connection:
                        assert await say(connection, 2.1) == "w1 w2 w3 w4 w5"
                        break
                except OSError:
                    await asyncio.sleep(0.1)


async def test_a_radio_station(serve: Serve, tmp_path: Path) -> None:
    async with web_server() as web, terminal(serve, tmp_path) as (running, shell):
        web.pages["/live.mp3"] = wav_bytes(spoken(6.0))
        radio, listen, link, *pulled = lines(section("A radio station"))
        await shell.run(radio.replace("https://radio.example.org/live.mp3", web.url("/live.mp3")))
        await shell.run(listen)
        assert (await words_at(running, await shell.run(link))).startswith("w1 w2")
        await until_so(lambda: (tmp_path / "radio.vtt").exists() and "w1 w2" in (tmp_path / "radio.vtt").read_text())
        create, show, events, delete = pulled
        await shell.run(create)
        assert shell.environment["ID"].startswith("stream_")
        assert (await shell.run(show)).strip() in ("connecting", "live", "ended")
        await shell.run(events)
        await shell.run(delete)
