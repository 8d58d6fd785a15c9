"""The counts of a session are released, wherever and however its socket fails."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import realtime
from engine.client.handoff import AdoptedSession
from realtime.config import Config, LimitsConfig
from realtime.http import websocket_routes
from realtime.http.authentication import Authenticator, Context
from realtime.http.websocket_routes import WebSocketRoutes
from realtime.serving.metrics import Metrics
from realtime.serving.publishing import Publisher
from realtime.serving.quota import Counts
from realtime.serving.registry import Sessions
from realtime.serving.session_factory import GatewayServices, SessionFactory
from realtime.serving.signed_tokens import Signer
from realtime.session.settings import INCLUDE_RESUME
from realtime.workers.worker_link import QuotaCoordinator, SharedQuota, WorkerConnection
from tests.phone_calls import CONNECTED, mulaw, start_message
from tests.realtime.gateway_doubles import FakeEngine, tone

OURS = str(Path(realtime.__file__).parent)
CHANNELS = 3
CONFIG = Config(limits=LimitsConfig(max_sessions=CHANNELS, sessions_per_key=CHANNELS))
GOES_ON = json.dumps({"type": "session.update", "session": {"include": [INCLUDE_RESUME]}})
SOUND = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(tone(0.5)).decode()})
COMMIT = json.dumps({"type": "input_audio_buffer.commit"})


# Ways to fail


@dataclass
class Fault:
    """Something that happens at the n-th place where it can."""

    at: int
    seen: int = 0
    where: str = ""

    @property
    def happened(self) -> bool:
        return self.seen >= self.at

    def is_due(self) -> bool:
        self.seen += 1
        return self.seen == self.at


class Failing(Coroutine[Any, Any, Any]):
    """A coroutine of ours to which something happens at one of the points where it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], fault: Fault, error: type[BaseException]) -> None:
        self._coroutine = coroutine
        self._fault = fault
        self._error = error

    def send(self, value: Any) -> Any:
        return self._waits_for(self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        return self._waits_for(self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("a task runs it")

    def _waits_for(self, future: Any) -> Any:
        if not self._fault.is_due():
            return future
        if self._error is asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return future
        if future is not None:
            future._asyncio_future_blocking = False
        return self.throw(self._error("something broke"))


@asynccontextmanager
async def failing_at_awaits(at: int, error: type[BaseException]) -> AsyncIterator[Fault]:
    """Every task whose coroutine is ours counts the points at which it waits, all of them together."""
    fault, loop = Fault(at), asyncio.get_running_loop()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        code = getattr(coroutine, "cr_code", None)
        if code is not None and code.co_filename.startswith(OURS):
            coroutine = Failing(coroutine, fault, error)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make)
    try:
        yield fault
    finally:
        loop.set_task_factory(None)


# What gives back cannot fail half-way and have given back; a task that cannot be made has its coroutine left over. The
# garbage collector may call a finalizer from anywhere: an error in it reaches no caller.
SPARED = {"release", "end", "_remove", "detach", "create_task", "__del__"}
WAITS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
WATCHED = tuple(f"{OURS}/{path}" for path in ("http/websocket_routes.py", "serving/registry.py"))


@asynccontextmanager
async def failing_at_calls(at: int) -> AsyncIterator[Fault]:
    """Every plain function that the gateway or the registry calls counts."""
    fault, before = Fault(at), sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        called_by = frame.f_back
        if called_by is None or called_by.f_code.co_filename not in WATCHED or frame.f_code.co_flags & WAITS:
            return
        names = {frame.f_code.co_name, called_by.f_code.co_name}
        if not names & SPARED and fault.is_due():
            fault.where = f"{called_by.f_code.co_name} calls {frame.f_code.co_name}"
            raise RuntimeError("something broke")

    sys.settrace(trace)
    try:
        yield fault
    finally:
        sys.settrace(before)


# A server without sockets


@dataclass
class Place:
    """A gateway, and who counts for it."""

    gateway: WebSocketRoutes
    counts: Counts
    now: list[float]
    engine: FakeEngine
    # Resume tokens of sessions that another process has.
    tokens: list[str] = field(default_factory=list)

    @property
    def sessions(self) -> Sessions:
        return self.gateway.sessions


@asynccontextmanager
async def place(shared: bool = False, handoff_store: Any = None) -> AsyncIterator[Place]:
    engine, now, metrics, signer = FakeEngine(), [0.0], Metrics(), Signer()
    async with shared_quota() if shared else alone() as (quota, coordinator):
        around = GatewayServices(metrics, signer, handoff_store, quota, Publisher.alone(1.0))
        sessions = Sessions(engine, CONFIG, lambda: now[0], lambda: 0.0, around)
        counts = sessions.quota.counts if coordinator is None else coordinator.counts  # type: ignore[attr-defined]
        gateway = WebSocketRoutes(Context(engine, CONFIG, metrics, Authenticator((), signer), sessions))
        yield Place(gateway, counts, now, engine)


@asynccontextmanager
async def alone() -> AsyncIterator[tuple[None, None]]:
    yield None, None


@asynccontextmanager
async def shared_quota() -> AsyncIterator[tuple[SharedQuota, QuotaCoordinator]]:
    """A worker's side and its parent's, with the real line between them."""
    ours, theirs = [await WorkerConnection.from_socket(end) for end in socket.socketpair()]
    coordinator = QuotaCoordinator(CONFIG.limits, lambda: 0.0)
    coordinator.add(1, ours)
    quota = SharedQuota(theirs, lambda: 0.0)

    async def hear(line: WorkerConnection, told: Callable[[Any], None]) -> None:
        async for message in line:
            told(message)

    hearing = [
        asyncio.create_task(hear(ours, lambda message: coordinator.on_message(1, message))),
        asyncio.create_task(hear(theirs, quota.on_message)),
    ]
    try:
        yield quota, coordinator
    finally:
        for task in hearing:
            task.cancel()
        await asyncio.gather(*hearing, return_exceptions=True)
        ours.close()
        theirs.close()
        await asyncio.gather(ours._writer.wait_closed(), theirs._writer.wait_closed())


async def client(place: Place, path: str, query: str, *messages: str | bytes) -> list[dict[str, Any]]:
    """A socket that says this and leaves; the frames that it was sent. What the server raises is the server's."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    queue.put_nowait({"type": "websocket.connect"})
    for message in messages:
        kind = "text" if isinstance(message, str) else "bytes"
        queue.put_nowait({"type": "websocket.receive", kind: message})
    queue.put_nowait({"type": "websocket.disconnect", "code": 1001})
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(0)
        if queue.qsize() == 1:
            # It listens for a while before it leaves.
            for _ in range(20):
                await asyncio.sleep(0)
        return await queue.get()

    scope = {
        "type": "websocket",
        "path": path,
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "subprotocols": ["realtime"],
        "extensions": {"websocket.http.response": {}},
    }
    endpoints = {"/v1/listen": place.gateway.deepgram, "/v1/twilio": place.gateway.twilio}
    serve = endpoints.get(path, place.gateway.realtime)
    serving = asyncio.create_task(serve(scope, receive, send))
    async with asyncio.timeout(20):
        await asyncio.wait((serving,))
    if not serving.cancelled():
        serving.exception()
    return [json.loads(message["text"]) for message in sent if message["type"] == "websocket.send"]


# Stories


async def one_session(place: Place) -> None:
    await client(place, "/v1/realtime", "", SOUND, COMMIT)


async def several_channels(place: Place) -> None:
    query = f"encoding=linear16&sample_rate=16000&multichannel=true&channels={CHANNELS}"
    await client(place, "/v1/listen", query, tone(1.0), json.dumps({"type": "CloseStream"}))


async def phone_call(place: Place) -> None:
    media = {"track": "inbound", "timestamp": "0", "payload": base64.b64encode(mulaw(tone(1.0, 8_000))).decode()}
    start = start_message(["inbound", "outbound"])
    messages = (CONNECTED, start, {"event": "media", "media": media}, {"event": "stop"})
    await client(place, "/v1/twilio", "", *(json.dumps(message) for message in messages))


async def left_and_resumed(place: Place) -> None:
    frames = await client(place, "/v1/realtime", "", GOES_ON, SOUND)
    tokens = [frame["session"]["resume"]["token"] for frame in frames if frame["type"] == "session.updated"]
    if tokens:
        await client(place, "/v1/realtime", f"resume={tokens[0]}&after=0", SOUND)


async def adopted(place: Place) -> None:
    await client(place, "/v1/realtime", f"resume={place.tokens[0]}&after=0", SOUND)


async def nothing_is_left(place: Place, fault: Fault) -> None:
    """No session, count or stream, at the latest when sessions have waited for their clients for long enough."""
    place.now[0] += CONFIG.session.resume_s + 1
    await place.sessions.tick()
    for _ in range(500):
        left = (len(place.sessions), place.counts.total(), len(place.engine.active))
        if not any(left):
            break
        await asyncio.sleep(0.001)
    else:
        pytest.fail(f"{left} sessions, counts and streams are left after fault {fault}")
    assert not any(place.counts._by_process.values())


async def run_through(
    story: Callable[[Place], Coroutine[Any, Any, None]], fail: Callable[[int], Any], **options: Any
) -> int:
    """The story again and again, with the fault at the first place, the second, and so on to the last."""
    at = 1
    while True:
        async with place(**options) as running:
            if running.sessions._handoff_store is not None:
                running.tokens.append(running.sessions._signer.resume_token("sess_elsewhere", "address 127.0.0.1"))
            async with fail(at) as fault:
                await story(running)
            await nothing_is_left(running, fault)
        if not fault.happened:
            return at - 1
        at += 1


ERRORS = [RuntimeError, OSError, asyncio.CancelledError]


@pytest.fixture(autouse=True)
def last_words_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some of the faults a call waits for its last words in vain."""
    monkeypatch.setattr(websocket_routes, "FINISH_S", 0.2)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("story", [one_session, several_channels, phone_call, left_and_resumed])
async def test_an_error_at_any_await_leaves_nothing_counted(
    story: Callable[[Place], Coroutine[Any, Any, None]], shared: bool, error: type[BaseException]
) -> None:
    places = await run_through(story, lambda at: failing_at_awaits(at, error), shared=shared)
    assert places >= 10


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("story", [one_session, several_channels, phone_call, left_and_resumed])
async def test_an_error_in_any_function_leaves_nothing_counted(
    story: Callable[[Place], Coroutine[Any, Any, None]], shared: bool
) -> None:
    assert await run_through(story, failing_at_calls, shared=shared) >= 40


class FakeHandoffStore:
    """Engines that have a session of another process."""

    def __init__(self) -> None:
        self.handoffs = SimpleNamespace(on_wanted=None, on_fenced=None)

    def handoff_target(self, stream: Any) -> None:
        return None

    async def confirm(self) -> None:
        await asyncio.sleep(0)

    async def renew(self, owned: Any) -> int:
        await asyncio.sleep(0)
        return int(owned.number)

    async def adopt(self, key: str, is_wanted: Any = None) -> AdoptedSession:
        await asyncio.sleep(0)
        return AdoptedSession(2, b"", [], [])


def go_on(maker: SessionFactory, session_id: str, caller: str, adopted: AdoptedSession) -> Any:
    """As if it had been read from the value: its client may come back, and has not come yet."""
    from realtime.dialects.openai import OpenAIDialect
    from realtime.serving.quota import Caller
    from realtime.session.settings import Settings

    entry = maker.make(Caller(caller), Settings(include=(INCLUDE_RESUME,)), OpenAIDialect)
    entry.live.id = session_id
    return entry


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
async def test_an_error_while_a_session_is_adopted_leaves_nothing_counted(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionFactory, "adopt", go_on)
    for error in ERRORS:
        places = await run_through(
            adopted,
            lambda at, error=error: failing_at_awaits(at, error),
            shared=shared,
            handoff_store=FakeHandoffStore(),
        )
        assert places >= 5
    assert await run_through(adopted, failing_at_calls, shared=shared, handoff_store=FakeHandoffStore()) >= 20
