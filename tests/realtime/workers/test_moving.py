"""Sessions that move between gateways of one engine: after a drain, a death or a takeover the words are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from engine.client import handoff
from engine.client.client import EngineClient
from engine.client.engine_handles import EngineThread, RemoteEngine
from engine.server.loop import EngineLoop
from realtime.app import listening
from realtime.config import Config, LimitsConfig, ServerConfig, SessionConfig
from realtime.http.websocket_routes import WebSocketRoutes
from realtime.serving.session_factory import GatewayServices
from realtime.serving.signed_tokens import Signer
from realtime.session.events import Configure, EngineSwitched
from tests.e2e.raw_client import COMPLETED, RawClient, greeted_client, raw_client
from tests.engine import fakes
from tests.realtime.workers import engines
from tests.realtime.workers.clients import VAD, SpeakingClient

INCLUDE = ["session.resume", "input_audio_buffer.acks"]
FORMAT = {"type": "audio/pcm", "rate": engines.RATE}
# How long a turn of `engines.talk` takes, with the pause behind it, and then some.
SECONDS = 3


@dataclass
class Place:
    """A gateway that listens."""

    url: str
    client: EngineClient
    gateway: WebSocketRoutes

    @property
    def entries(self) -> list[Any]:
        return list(self.gateway.sessions.entries.values())

    def cut(self) -> None:
        for entry in self.entries:
            if entry.connection is not None:
                entry.connection._extras.abort()


@asynccontextmanager
async def places(
    windowed: bool = False, keep_s: float = 60.0, number: int = 2, build: Callable[[], EngineLoop] | None = None
) -> AsyncIterator[list[Place]]:
    server, session = ServerConfig(port=0, drain_s=1.0), SessionConfig(resume_s=keep_s)
    config = Config(server=server, limits=LimitsConfig(max_load=0), session=session)
    engine = EngineThread(build or partial(engines.build, windowed=windowed), warm=False)
    signer = Signer()
    async with AsyncExitStack() as stack:
        found: list[Place] = []
        for place in range(number):
            handle = RemoteEngine(engine.address) if place else engine
            client = await stack.enter_async_context(fakes.running(handle))
            running = await stack.enter_async_context(
                listening(client, config, GatewayServices(signer=signer, handoff_store=client))
            )
            url = running.url.replace("http", "ws", 1) + "/v1/realtime"
            found.append(Place(url, client, running.server.gateway))
        yield found


@pytest.fixture(scope="module")
def audio() -> bytes:
    return engines.talk(6, 1)


# Where a frame-synchronous model is flushed decides what it says, and that depends on when a pause is noticed.
@pytest.mark.parametrize(("windowed", "manual"), [(True, False), (True, True), (False, True)])
async def test_a_session_that_is_handed_over_again_and_again_says_the_same(
    windowed: bool, manual: bool, audio: bytes
) -> None:
    detection: dict[str, Any] = {"turn_detection": None} if manual else {}
    async with places(windowed) as both:
        calm = SpeakingClient(lambda: both[0].url, audio, **detection)
        await calm.speak()
        calm.check()
        turns = count()
        moving = SpeakingClient(lambda: both[next(turns) % 2].url, audio, **detection)
        speaking = asyncio.create_task(moving.speak())
        for moves in range(1, 4):
            enough = len(moving.events) + 3
            await fakes.until(lambda enough=enough: len(moving.events) >= enough or speaking.done())
            for place in both:
                place.cut()
            await fakes.until(lambda moves=moves: moving.lines.count("") > moves or speaking.done())
        await speaking
        moving.check()
        assert calm.text and moving.text == calm.text
        assert moving.losses >= 2


async def begin(client: RawClient, audio: bytes) -> str:
    session = await client.update(format=FORMAT, turn_detection=None, include=INCLUDE)
    await client.append(audio)
    return session["resume"]["token"]


async def test_a_gateway_that_drains_leaves_its_sessions_to_the_others(audio: bytes) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        token = await begin(client, audio[:64_000])
        last = (await client.until("input_audio_buffer.acknowledged"))[-1]["seq"]
        first.gateway.sessions.hands_over = True
        await first.gateway.sessions.drain(1.0)
        await client.socket.wait_closed()
        assert client.socket.close_code == 1012
        assert not first.entries
        # Here it is not any more. That it is over would not be true.
        assert await status_of(f"{first.url}?resume={token}&after={last}") == 503
        async with raw_client(f"{second.url}?resume={token}&after={last}") as again:
            greeting = await again.receive()
            assert greeting["type"] == "session.resumed"
            assert greeting["received_samples"] == 32_000, "all that came was handed over"
            await again.send("input_audio_buffer.commit")
            assert (await again.until(COMPLETED))[-1]["transcript"]


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 30, ""])
async def test_a_request_to_resume_that_is_refused_takes_no_session(audio: bytes, after: str) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        token = await begin(client, audio[:64_000])
        assert await status_of(f"{second.url}?resume={token}&after={after}") == 400
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["transcript"]


async def test_an_old_owner_that_goes_on_after_a_takeover_changes_nothing(
    audio: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        token = await begin(client, audio[:64_000])
        last = (await client.until("input_audio_buffer.acknowledged"))[-1]["seq"]
        # It does not hear that the session is wanted, nor that it is another's.
        first.client.handoffs.on_wanted = first.client.handoffs.on_fenced = None
        (stale,) = first.entries
        async with raw_client(f"{second.url}?resume={token}&after={last}") as again:
            greeting = await again.receive()
            await client.append(audio[:32_000])
            await client.send("input_audio_buffer.commit")
            await fakes.until(lambda: stale.live.session.appended == 48_000)
            await again.append(audio[greeting["received_samples"] * 2 : 64_000])
            await again.send("input_audio_buffer.commit")
            events = await again.until(COMPLETED)
            assert [event["seq"] for event in events] == list(range(last + 1, last + 1 + len(events)))
            calm = await transcript(second.url, audio[:64_000])
            assert events[-1]["transcript"] == calm


@asynccontextmanager
async def resumed(url: str) -> AsyncIterator[RawClient]:
    """As a client does it: after 503, which an engine that stood still causes, it asks again."""
    async with AsyncExitStack() as stack:
        while True:
            try:
                client = await stack.enter_async_context(raw_client(url))
                break
            except InvalidStatus as refused:
                if refused.response.status_code != 503:
                    raise
                await asyncio.sleep(0.1)
        yield client


async def test_no_event_id_comes_twice_whoever_goes_on_with_a_session() -> None:
    """Greetings are no part of what a session was sent, and each connection has one. The owner is lost each time, so
    that the next one goes on from what the engine was told, not from a last word."""
    sound = engines.talk(6 * SECONDS, 1)
    told: dict[str, dict[str, Any]] = {}
    by_number: dict[int, dict[str, Any]] = {}

    def note(event: dict[str, Any]) -> None:
        known = told.setdefault(event["event_id"], event)
        assert known == event, "two events with one id"
        if "seq" in event:
            assert by_number.setdefault(event["seq"], event) == event, "an event that is sent again is the same"

    # The time is bounded here, so that a wait that never ends is shown with the line that waits.
    async with places(number=3) as found, asyncio.timeout(90):
        for place in found:
            place.client.handoffs.on_wanted = None
        async with raw_client(found[0].url) as client:
            note(await client.receive())
            # Turns end by themselves: whatever a client asks for would make a new base of the session's will.
            wishes = {"audio": {"input": {"format": FORMAT, "turn_detection": VAD}}, "include": INCLUDE}
            await client.send("session.update", session={"type": "transcription"} | wishes)
            updated = await client.receive()
            note(updated)
            token = updated["session"]["resume"]["token"]
            await client.append(sound[:16_000])
            for event in await client.until("input_audio_buffer.acknowledged"):
                note(event)
            client.socket.transport.abort()
        for turn, place in enumerate([found[0], found[1], found[1], found[2], found[0]]):
            # Some of what came is asked for again.
            last = max(by_number)
            after = last - turn % 3
            async with resumed(f"{place.url}?resume={token}&after={after}") as again:
                greeting = await again.receive()
                note(greeting)
                first = greeting["received_samples"] * 2
                await again.append(sound[first : first + 2 * SECONDS * engines.RATE])
                event: dict[str, Any] = {"type": "", "seq": 0}
                while event["type"] != COMPLETED or event["seq"] <= last:
                    event = await again.receive()
                    note(event)
                again.socket.transport.abort()
        assert sorted(by_number) == list(range(1, len(by_number) + 1))
        assert sum(event["type"] == COMPLETED for event in by_number.values()) >= 5


async def transcript(url: str, audio: bytes) -> str:
    async with greeted_client(url) as client:
        await begin(client, audio)
        await client.send("input_audio_buffer.commit")
        return (await client.until(COMPLETED))[-1]["transcript"]


async def status_of(url: str) -> int:
    with pytest.raises(InvalidStatus) as caught:
        async with raw_client(url):
            pass
    return caught.value.response.status_code


async def test_tokens_that_are_not_ours_and_sessions_that_nobody_has() -> None:
    async with places(keep_s=0.2) as (first, second):
        strange = Signer().resume_token("sess_1", "address 127.0.0.1")
        assert await status_of(f"{second.url}?resume={strange}&after=0") == 404
        async with greeted_client(first.url) as client:
            token = (await client.update(include=INCLUDE))["resume"]["token"]
            other = "B" if token[9] == "A" else "A"
            assert await status_of(f"{second.url}?resume={token[:9]}{other}{token[10:]}&after=0") == 404
            await client.socket.close(1000)
        await fakes.until(lambda: not first.entries)
        assert await status_of(f"{second.url}?resume={token}&after=1") == 410


async def test_a_session_moves_before_it_has_a_stream_and_with_its_settings(audio: bytes) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        wishes = {"format": FORMAT, "turn_detection": None, "transcription": {"language": "en"}}
        token = (await client.update(**wishes, include=INCLUDE))["resume"]["token"]
        async with raw_client(f"{second.url}?resume={token}&after=1") as again:
            greeting = await again.receive()
            shown = greeting["session"]["audio"]["input"]
            assert shown["format"] == FORMAT and shown["transcription"]["language"] == "en"
            await again.append(audio[:32_000])
            await again.send("input_audio_buffer.commit")
            assert (await again.until(COMPLETED))[-1]["transcript"]
        await client.socket.wait_closed()
        assert client.socket.close_code == 4409


async def test_a_day_of_events_leaves_a_will_of_a_bounded_size(audio: bytes) -> None:
    async with places(number=1) as (only,), greeted_client(only.url) as client:
        await client.update(format=FORMAT, turn_detection=None, include=INCLUDE)
        sizes: list[int] = []
        target = only.client.handoff_target(None)
        assert target is not None
        entrusted = target.link
        send = entrusted.send

        def weigh(command: Any, items: Any = None) -> None:
            if hasattr(command, "entries"):
                sizes.append(sum(map(len, command.entries)) + len(command.base or b"") + len(command.chunk))
            send(command, items)

        entrusted.send = weigh  # type: ignore[method-assign]
        for _ in range(20):
            await client.append(audio[:16_000])
            await client.send("input_audio_buffer.commit")
            await client.until(COMPLETED)
        assert len(sizes) > 20
        assert max(sizes[len(sizes) // 2 :]) <= 2 * max(sizes[: len(sizes) // 2])


@asynccontextmanager
async def resumed_at_last(url: str) -> AsyncIterator[RawClient]:
    """A client that tries again as long as it is told to."""
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        while True:
            try:
                client = await stack.enter_async_context(raw_client(url))
                break
            except InvalidStatus as error:
                assert error.response.status_code == 503 and "retry-after" in error.response.headers
                await asyncio.sleep(0.05)
        yield client


async def test_an_engine_that_does_not_answer_is_no_reason_to_give_a_session_up(
    audio: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        token = await begin(client, audio[:32_000])
        with monkeypatch.context() as patch:
            patch.setattr(handoff, "ANSWER_SECONDS", 0.0)
            assert await status_of(f"{second.url}?resume={token}&after=1") == 503
        # The answer that came too late was left for the next request, which may come before that is done.
        async with resumed_at_last(f"{second.url}?resume={token}&after=1") as again:
            assert (await again.receive())["type"] == "session.resumed"


@pytest.mark.parametrize("moment", ["before the stream is told to end", "while it runs out", "when it has said all"])
async def test_options_that_change_while_a_session_moves_are_in_force_behind_it(
    audio: bytes, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        token = await begin(client, audio[:64_000])
        last = (await client.until("input_audio_buffer.acknowledged"))[-1]["seq"]
        (entry,) = first.entries
        live, runner, stream = entry.live, entry.live.runner, entry.live.runner.engine_stream
        finish, submit = stream.finish, runner._submit

        def give_up() -> None:
            first.gateway.sessions._on_claim(live.id, live.handoff.number)

        async def finish_and_give_up() -> None:
            await finish()
            give_up()

        def submit_and_give_up(event: Any) -> None:
            submit(event)
            if isinstance(event, EngineSwitched):
                give_up()

        if moment == "while it runs out":
            monkeypatch.setattr(stream, "finish", finish_and_give_up)
        elif moment == "when it has said all":
            monkeypatch.setattr(runner, "_submit", submit_and_give_up)
        live.submit(Configure(replace(live.session.settings, language="en")))
        if moment == "before the stream is told to end":
            give_up()
        await fakes.until(lambda: not first.entries)
        async with raw_client(f"{second.url}?resume={token}&after={last}") as again:
            greeting = await again.receive()
            await again.append(audio[greeting["received_samples"] * 2 : 96_000])
            await again.send("input_audio_buffer.commit")
            assert (await again.until(COMPLETED))[-1]["transcript"]
            (moved,) = second.entries
            assert moved.live.runner.engine_stream._opening.options == {"language": "en"}


async def test_a_session_that_comes_to_a_gateway_while_that_begins_to_drain_is_not_lost(
    audio: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with places() as (first, second), greeted_client(first.url) as client:
        token = await begin(client, audio[:64_000])
        last = (await client.until("input_audio_buffer.acknowledged"))[-1]["seq"]
        sessions, adopt = second.gateway.sessions, second.client.adopt
        sessions.hands_over = True
        drains: list[asyncio.Task[None]] = []

        async def adopt_late(key: str, is_wanted: Any) -> Any:
            adopted = await adopt(key, is_wanted)
            drains.append(asyncio.create_task(sessions.drain(-2.0)))
            await fakes.until(lambda: sessions.draining)
            return adopted

        async def hand_the_others_over(*_: Any) -> None:
            await fakes.until(lambda: [entry for entry in second.entries if entry.connection is not None] != [])

        with monkeypatch.context() as patch:
            patch.setattr(second.client, "adopt", adopt_late)
            patch.setattr(sessions, "_hand_over", hand_the_others_over)
            async with raw_client(f"{second.url}?resume={token}&after={last}") as passing:
                await passing.socket.wait_closed()
                assert passing.socket.close_code == 1012
            await drains[0]
        assert not second.entries
        async with raw_client(f"{first.url}?resume={token}&after={last}") as again:
            assert (await again.receive())["type"] == "session.resumed"
            await again.send("input_audio_buffer.commit")
            assert (await again.until(COMPLETED))[-1]["transcript"]
