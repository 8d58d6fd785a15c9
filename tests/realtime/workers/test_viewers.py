"""Viewers and speakers at different workers: real processes, one of which is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from realtime.client.wire_client import SessionOptions
from realtime.workers.parent import Parent
from tests.e2e.raw_client import greeted_client
from tests.e2e.viewing import SocketViewer, StreamViewer, publish, socket_viewer, stream_viewer
from tests.engine import fakes
from tests.realtime.workers import engines
from tests.realtime.workers.clients import VAD, SpeakingClient
from tests.realtime.workers.test_worker import kill, url_of, workers

pytestmark = pytest.mark.timeout(240)
TALK = ("", "talk")


@dataclass(frozen=True)
class PublishedOptions(SessionOptions):
    name: str = "talk"

    def session(self, include: Sequence[str]) -> dict[str, Any]:
        return {**super().session(include), "publish": self.name}


class Speaker(SpeakingClient):
    def __init__(self, url: Callable[[], str], audio: bytes, name: str = "talk") -> None:
        super().__init__(url, audio)
        self._options = PublishedOptions(engines.RATE, VAD, name=name)


class Reading:
    """What a viewer has read so far."""

    def __init__(self, viewer: SocketViewer | StreamViewer) -> None:
        self.events: list[dict[str, Any]] = []
        self.task = asyncio.create_task(self._read(viewer))

    async def _read(self, viewer: SocketViewer | StreamViewer) -> None:
        with contextlib.suppress(ConnectionClosed, EOFError, OSError, asyncio.IncompleteReadError, TimeoutError):
            while True:
                self.events.append(await viewer.event())

    @property
    def lines(self) -> list[str]:
        lines: dict[str, str] = {}
        for event in self.events:
            for line in event.get("lines", []) + ([event] if event["type"] == "final" else []):
                assert lines.setdefault(line["id"], line["text"]) == line["text"]
        return list(lines.values())


async def watch_at_both(parent: Parent, stack: contextlib.AsyncExitStack, token: str = "") -> list[Reading]:
    """Viewers, more and more until both workers have some."""
    readings: list[Reading] = []
    for number in range(64):
        make = socket_viewer if number % 2 else stream_viewer
        readings.append(Reading(await stack.enter_async_context(make(parent.port, "talk", token))))
        await fakes.until(lambda: bool(readings[-1].events))
        if number and len(parent.coordinator.channels[TALK].followers) == 2:
            break
    for reading in readings:
        stack.callback(reading.task.cancel)
    return readings


async def test_viewers_at_any_worker_see_all_words_also_when_the_speakers_worker_dies() -> None:
    """A link that was revoked before is revoked at all workers, also at the new one."""
    async with workers() as parent, contextlib.AsyncExitStack() as stack:
        speaker = Speaker(lambda: url_of(parent), engines.talk(8, 1))
        speaker.hold_at(4.0)
        speaking = asyncio.create_task(speaker.speak())
        await fakes.until(lambda: bool(speaker.text))
        made, newer = await made_link(parent), await made_link(parent)
        with_link = await watch_at_both(parent, stack, made["token"])
        await request(parent, "DELETE", f"links/{made['id']}")
        await fakes.until(lambda: all(reading.task.done() for reading in with_link))
        readings = await watch_at_both(parent, stack)
        await fakes.until(lambda: all(reading.lines for reading in readings))
        channel = parent.coordinator.channels[TALK]
        first = channel.member
        assert first is not None
        kill(parent, first)
        speaker.hold_at(None)
        await speaking
        assert len(speaker.text) == 4 and channel.member != first
        # Those at the worker that died lost their connection; the others noticed nothing.
        await fakes.until(lambda: any(reading.lines == speaker.text for reading in readings))
        there = [reading for reading in readings if not reading.task.done()]
        await fakes.until(lambda: all(reading.lines == speaker.text for reading in there))
        for reading in there:
            kinds = [event["type"] for event in reading.events]
            numbers = [event["seq"] for event in reading.events]
            assert "begin" not in kinds and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        # The session is over: the name is free again, at either worker.
        await fakes.until(lambda: all(reading.events[-1]["type"] == "end" for reading in there))
        await fakes.until(lambda: len(parent.workers) == 2)
        await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
        for number in range(6):
            async with greeted_client(url_of(parent)) as one, greeted_client(url_of(parent)) as two:
                assert (await publish(one, f"name{number}"))["type"] == "session.updated"
                assert (await publish(two, f"name{number}"))["error"]["code"] == "name_taken"
            assert await request(parent, "HEAD", f"events?token={made['token']}") == 401
            assert await request(parent, "HEAD", f"events?token={newer['token']}") == 200


async def made_link(parent: Parent) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        return dict((await http.post(f"http://127.0.0.1:{parent.port}/v1/sessions/talk/links")).json())


async def request(parent: Parent, method: str, path: str) -> int:
    """The status of a request on a connection of its own."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        return (await http.request(method, f"http://127.0.0.1:{parent.port}/v1/sessions/talk/{path}")).status_code
