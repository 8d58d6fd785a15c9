"""A session that survives lost connections, with a server that is cut off, forgets, refuses or never acknowledges."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.protocol import State

from realtime.client import resuming_session
from realtime.client.resuming_session import ResumingSession, jittered
from realtime.client.wire_client import COMPLETED, DELTA, CannotConnect, SessionOptions
from tests.waiting import stays, until

RATE = 100
WISHES = SessionOptions(RATE, None)
Script = Callable[["Wire"], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_session, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(resuming_session, "KEEP_S", 4)


class Wire:
    """The server's side of one connection."""

    def __init__(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.socket = socket
        self.path = socket.request.path
        self.samples = 0
        self.gaps: list[int] = []

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def greet(self, token: str | None = "token") -> None:
        await self.say("session.created")
        assert (await self.hear())["type"] == "session.update"
        await self.say("session.updated", session={"resume": {"token": token}} if token else {})

    async def hear(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.socket.recv())
        if event["type"] == "input_audio_buffer.append":
            self.samples += len(base64.b64decode(event["audio"])) // 2
        elif event["type"] == "input_audio_buffer.gap":
            self.gaps.append(event["samples"])
            self.samples += event["samples"]
        return event

    async def hear_samples(self, wanted: int) -> None:
        while self.samples < wanted:
            await self.hear()

    async def hear_the_end(self) -> None:
        while (await self.hear())["type"] != "input_audio_buffer.clear":
            pass

    async def end(self) -> None:
        await self.hear_the_end()
        await self.say("input_audio_buffer.cleared")
        await self.socket.wait_closed()

    def cut(self) -> None:
        self.socket.transport.abort()


@asynccontextmanager
async def server(*scripts: Script | HTTPStatus) -> AsyncIterator[str]:
    """Each connection gets the next script, or is refused."""
    left = list(scripts)

    async def handle(socket: ServerConnection) -> None:
        script = left.pop(0)
        assert not isinstance(script, HTTPStatus)
        await script(Wire(socket))

    def refuse(socket: ServerConnection, request: Request) -> Response | None:
        status = left[0]
        if not isinstance(status, HTTPStatus):
            return None
        left.pop(0)
        response = socket.respond(status, "")
        response.headers["Retry-After"] = "7"
        return response

    async with serve(handle, "127.0.0.1", 0, process_request=refuse) as running:
        port = next(iter(running.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/v1/realtime?intent=transcription"
        assert not left, "every script was played"


async def talk(session: ResumingSession) -> tuple[list[dict[str, Any]], list[str]]:
    events: list[dict[str, Any]] = []
    lines: list[str] = []
    await asyncio.wait_for(session.run(events.append, lines.append), 20)
    return events, lines


def pcm(samples: int) -> bytes:
    return bytes(2 * samples)


async def test_refused_at_first_is_an_error_and_refused_later_too() -> None:
    async with server(HTTPStatus.SERVICE_UNAVAILABLE) as url:
        with pytest.raises(CannotConnect, match="refused with 503"):
            await talk(ResumingSession(url, None, WISHES))

    async def first(wire: Wire) -> None:
        await wire.greet()
        wire.cut()

    async with server(first, HTTPStatus.UNAUTHORIZED) as url:
        with pytest.raises(CannotConnect, match="refused with 401"):
            await talk(ResumingSession(url, None, WISHES))


async def test_session_taken_over_elsewhere_is_not_fought_for() -> None:
    async def first(wire: Wire) -> None:
        await wire.greet()
        await wire.socket.close(4409, "resumed on another connection")

    async with server(first) as url:
        with pytest.raises(CannotConnect, match="was resumed by another client"):
            await talk(ResumingSession(url, None, WISHES))


async def test_resumed_session_gets_what_it_lacks_and_nothing_twice() -> None:
    async def first(wire: Wire) -> None:
        await wire.greet()
        await wire.hear_samples(100)
        await wire.say("input_audio_buffer.acknowledged", samples=60, seq=1)
        await wire.say(DELTA, item_id="a", delta="Hello", seq=2)
        wire.cut()

    async def second(wire: Wire) -> None:
        assert "resume=token" in wire.path and "after=2" in wire.path
        await wire.say("session.resumed", session={}, received_samples=80)
        await wire.hear_samples(20)
        await wire.end()
        assert wire.samples == 20 and not wire.gaps

    async with server(first, HTTPStatus.SERVICE_UNAVAILABLE, second) as url:
        session = ResumingSession(url, None, WISHES)
        session.append(pcm(100))
        session.finish()
        events, lines = await talk(session)
    assert [event["delta"] for event in events if event["type"] == DELTA] == ["Hello"]
    assert lines[0] == "" and "broke off" in lines[1] and "503" in lines[2] and lines[3:] == [""]


async def test_turn_committed_before_the_line_dropped_is_waited_for_after_it() -> None:
    async def first(wire: Wire) -> None:
        await wire.greet()
        await wire.hear_the_end()
        await wire.say("input_audio_buffer.committed", item_id="a")
        await wire.say("input_audio_buffer.cleared")
        wire.cut()

    async def second(wire: Wire) -> None:
        await wire.say("session.resumed", session={}, received_samples=10)
        await wire.hear_the_end()
        await wire.say("input_audio_buffer.cleared")
        await stays(lambda: wire.socket.state is State.OPEN, 0.1)  # the client waits for the rest
        await wire.say(COMPLETED, item_id="a", transcript="the last words")
        await wire.socket.wait_closed()

    async with server(first, second) as url:
        session = ResumingSession(url, None, WISHES)
        session.append(pcm(10))
        session.finish()
        events, _ = await talk(session)
    assert events[-1]["transcript"] == "the last words"


async def test_sound_that_was_kept_too_long_becomes_a_gap_of_its_length() -> None:
    lost = asyncio.Event()

    async def first(wire: Wire) -> None:
        await wire.greet()
        await wire.hear_samples(100)
        wire.cut()
        await lost.wait()

    async def second(wire: Wire) -> None:
        await wire.say("session.resumed", session={}, received_samples=100)
        await wire.end()
        assert wire.gaps == [500] and wire.samples == 900

    async with server(first, second) as url:
        session = ResumingSession(url, None, WISHES)
        session.append(pcm(100))

        def speak_on(trouble: str) -> None:
            if trouble:
                session.append(pcm(900))

        running = asyncio.create_task(session.run(lambda event: None, speak_on))
        await until(lambda: session.unacknowledged.lost == 600)
        lost.set()
        session.finish()
        await asyncio.wait_for(running, 20)
    assert session.unacknowledged.lost == 600


async def test_session_that_is_gone_is_followed_by_one_whose_times_are_shifted() -> None:
    async def first(wire: Wire) -> None:
        await wire.greet()
        await wire.hear_samples(250)
        await wire.say("input_audio_buffer.acknowledged", samples=200)
        wire.cut()

    async def third(wire: Wire) -> None:
        assert "intent=transcription" in wire.path and "resume" not in wire.path
        await wire.greet("another")
        await wire.hear_samples(50)
        words = [{"word": "late", "start": 0.1, "end": 0.4}]
        await wire.say(DELTA, item_id="b", delta="late", words=words, seq=1)
        await wire.end()
        assert wire.samples == 50

    async with server(first, HTTPStatus.NOT_FOUND, third) as url:
        session = ResumingSession(url, None, WISHES)
        session.append(pcm(250))
        session.finish()
        events, _ = await talk(session)
    (delta,) = [event for event in events if event["type"] == DELTA]
    assert delta["words"] == [{"word": "late", "start": 2.1, "end": 2.4}]


async def test_name_that_the_lost_session_still_has_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_session, "NAME_WAIT_S", 0.01)

    async def first(wire: Wire) -> None:
        await wire.greet(None)
        wire.cut()

    async def refusing(wire: Wire) -> None:
        await wire.say("session.created")
        await wire.hear()
        await wire.say("error", error={"code": "name_taken", "message": "Another session is published as 'talk'."})
        await wire.socket.wait_closed()

    async def last(wire: Wire) -> None:
        await wire.greet(None)
        await wire.end()

    async with server(first, refusing, refusing, last) as url:
        session = ResumingSession(url, None, WISHES)
        session.append(pcm(50))
        session.finish()
        events, lines = await talk(session)
    assert not [event for event in events if event["type"] == "error"]
    assert len([line for line in lines if "published as 'talk'" in line]) == 2
    # At first it is an error: the name belongs to another client.
    async with server(refusing) as url:
        session = ResumingSession(url, None, WISHES)
        running = asyncio.create_task(session.run(events.append, lines.append))
        await until(lambda: any(event["type"] == "error" for event in events))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("token", ["token", None])
async def test_sound_that_can_wait_waits_for_the_server(token: str | None) -> None:
    """A server that acknowledges is waited for; of one that never does, what was sent counts as received."""
    total = 2000

    async def only(wire: Wire) -> None:
        await wire.greet(token)
        while wire.samples < total:
            await wire.hear()
            if token:
                await wire.say("input_audio_buffer.acknowledged", samples=wire.samples)
        await wire.end()

    async with server(only) as url:
        session = ResumingSession(url, None, WISHES)
        running = asyncio.create_task(talk(session))
        for _ in range(total // 100):
            await asyncio.wait_for(session.wait_for_room(100), 20)
            session.append(pcm(100))
        session.finish()
        await running
    assert session.unacknowledged.lost == 0


async def test_gap_of_the_source_is_sent_in_its_place_and_again_after_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resuming_session, "SEND_GAP_S", 8)

    async def first(wire: Wire) -> None:
        await wire.greet()
        await wire.hear_samples(50 + 800)
        assert wire.gaps == [800]  # a long gap is sent in parts
        wire.cut()

    async def second(wire: Wire) -> None:
        await wire.say("session.resumed", session={}, received_samples=350)
        await wire.end()
        assert wire.gaps == [700] and wire.samples == 700 + 20

    async with server(first, second) as url:
        session = ResumingSession(url, None, WISHES)
        session.append(pcm(50))
        session.append_gap(1000)
        session.append(pcm(20))
        session.finish()
        await talk(session)
    assert session.unacknowledged.lost == 0


async def test_a_server_that_says_when_to_come_back_is_asked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float, float]] = []

    def jittered(wait_s: float, retry_after_s: float) -> float:
        waits.append((wait_s, retry_after_s))
        return 0.0

    monkeypatch.setattr(resuming_session, "jittered", jittered)

    async def first(wire: Wire) -> None:
        await wire.greet()
        wire.cut()

    async def second(wire: Wire) -> None:
        await wire.say("session.resumed", received_samples=0)
        await wire.end()

    async with server(first, HTTPStatus.SERVICE_UNAVAILABLE, second) as url:
        session = ResumingSession(url, None, WISHES)
        session.finish()
        await talk(session)
    assert waits == [(0.01, 0.0), (0.02, 7.0)]


@pytest.mark.parametrize("retry_after_s", [0.0, 5.0, 1e9])
def test_clients_that_lost_their_server_in_one_moment_come_back_over_time(retry_after_s: float) -> None:
    """Not in step, not before the server wants to be asked, and not after a day because a server says so."""
    waits = [jittered(1.0, retry_after_s) for _ in range(1000)]
    least, most = min(waits), max(waits)
    obeyed = min(retry_after_s, 60.0)
    assert max(0.5, obeyed) <= least and most <= max(1.5, 1.5 * obeyed)
    # A tenth of the time in which they come sees few more than a tenth of them.
    tenth = (most - least) / 10
    assert max(sum(start <= wait <= start + tenth for wait in waits) for start in waits) < 250
