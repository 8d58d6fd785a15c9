"""A fleet in one thread and on one virtual clock: real gateways, real engines, and a network between them.

Each gateway has an event loop of its own, and each engine is ticked by hand. A process that is stopped is one whose
loop is not run: what was sent to it waits, and when it goes on, its clock has jumped. Who runs when, and how much of
what was sent has arrived by then, is up to `chance`. Gateways are real from the ASGI application down to the link, and
engines from the host down. Their sockets are replaced: ZeroMQ between them, uvicorn between client and gateway.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from engine.boundary.codec import Frames
from engine.boundary.sockets import ZMQ_HEARTBEAT_TIMEOUT_MS
from engine.client import link as links
from engine.client import pool
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import RemoteEngine
from engine.server.host import EngineHost
from realtime.config import Config, LimitsConfig, ServerConfig, SessionConfig
from realtime.http import routes
from realtime.serving.metrics import Metrics
from realtime.serving.session_factory import GatewayServices
from realtime.serving.signed_tokens import Signer
from realtime.serving.socket_extras import EXTENSION, SocketExtras
from tests.e2e.raw_client import COMPLETED
from tests.realtime.workers import engines
from tests.realtime.workers.clients import VAD

ROUND_S = 0.1
PULSE_S = ZMQ_HEARTBEAT_TIMEOUT_MS / 1000
CONFIG = Config(
    server=ServerConfig(ping_interval_s=0.0), limits=LimitsConfig(max_load=0), session=SessionConfig(resume_s=60.0)
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class OwnLoop(asyncio.SelectorEventLoop):
    """The event loop of one process; it never waits."""

    def __init__(self, clock: Clock) -> None:
        self._virtual = clock
        super().__init__()

    def time(self) -> float:
        return self._virtual.now

    def turn(self) -> None:
        """Until there is nothing to do at this time."""
        for _ in range(1000):
            self.call_soon(self.stop)
            self.run_forever()
            timers = [timer for timer in self._scheduled if not timer.cancelled() and timer.when() <= self.time()]  # type: ignore[attr-defined]
            if not self._ready and not timers:  # type: ignore[attr-defined]
                return
        raise AssertionError("a process that never rests")


def arrived(line: deque[tuple[float, list[bytes]]], is_all: bool, now: float, chance: Random) -> list[list[bytes]]:
    """What has come by now of what is under way, in its order: all of earlier rounds, and some of this one. A client
    that was told something cannot be elsewhere before the word of it has come to the engine."""
    due = sum(sent_at < now - ROUND_S / 2 for sent_at, _ in line)
    count = len(line) if is_all else chance.randint(due, len(line))
    return [line.popleft()[1] for _ in range(count)]


class Part:
    """A process: it runs, or is stopped until a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stopped_until: float | None = None

    @property
    def is_awake(self) -> bool:
        return self.stopped_until is None

    def stop(self, seconds: float) -> None:
        self.stopped_until = self.clock.now + seconds

    def wake_if_due(self) -> None:
        if self.stopped_until is not None and self.clock.now >= self.stopped_until:
            self.stopped_until = None


class Wire:
    """One connection of a gateway to an engine, as both sides see it."""

    def __init__(self, number: int, gateway: Gateway, engine: Engine, socket: GatewaySide) -> None:
        self.name = f"{number}".encode()
        self.gateway, self.engine, self.socket = gateway, engine, socket
        # What is under way, and when it was sent.
        self.to_engine: deque[tuple[float, list[bytes]]] = deque()
        self.to_gateway: deque[tuple[float, list[bytes]]] = deque()
        # When each side last heard the other; and whether it has given the connection up.
        self.heard_at = {gateway: gateway.clock.now, engine: gateway.clock.now}
        self.is_broken = False
        self.gateway_knows = self.engine_knows = False


class GatewaySide:
    """In the place of `GatewaySocket`."""

    fleet: SimulatedFleet

    def __init__(
        self,
        context: Any,
        address: str,
        on_frames: Callable[[Frames], None],
        on_disconnect: Callable[[], None],
        on_refused: Callable[[], None],
        keys: Any = None,
    ) -> None:
        self.on_frames, self.on_disconnect = on_frames, on_disconnect
        self.is_closed = False
        self.wire = self.fleet.connect(address, self)

    def send(self, frames: list[Any]) -> None:
        if not self.is_closed and not self.wire.gateway_knows:
            self.wire.to_engine.append((self.fleet.clock.now, [bytes(frame) for frame in frames]))

    def close(self, last: list[Any] | None = None) -> None:
        if not self.is_closed:
            if last is not None:
                self.send(last)
            self.is_closed = True
            self.wire.is_broken = self.wire.gateway_knows = True


class EngineSide:
    """In the place of `EngineSocket`."""

    def __init__(self) -> None:
        self.arriving: deque[tuple[bytes, list[bytes]]] = deque()
        self.wires: dict[bytes, Wire] = {}

    def wait(self, seconds: float) -> bool:
        return bool(self.arriving)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.arriving.popleft() if self.arriving else None

    def send(self, name: bytes, frames: list[Any]) -> bool:
        wire = self.wires[name]
        if wire.engine_knows:
            return False
        wire.to_gateway.append((wire.engine.clock.now, [bytes(frame) for frame in frames]))
        return True


class Engine(Part):
    def __init__(self, clock: Clock, number: int) -> None:
        super().__init__(clock)
        self.address = f"tcp://engine{number}:1"
        self.side = EngineSide()
        loop = engines.build(windowed=True)
        self.host = EngineHost(loop, self.side, f"engine{number}", lambda: clock.now)  # type: ignore[arg-type]
        self._has_work = loop.has_work

    def run(self, chance: Random) -> None:
        wires = [wire for wire in self.side.wires.values() if wire.to_engine or wire.is_broken]
        chance.shuffle(wires)
        for wire in wires:
            for frames in arrived(wire.to_engine, wire.is_broken, self.clock.now, chance):
                self.side.arriving.append((wire.name, frames))
        for _ in range(3):
            self.host.tick()
        while self._has_work():
            self.host.tick()
        for wire in wires:
            wire.engine_knows = wire.is_broken


class Socket:
    """One WebSocket of the client at a gateway: what each side has sent and the other has not read."""

    def __init__(self, gateway: Gateway, query: str) -> None:
        self.gateway, self.query = gateway, query
        self.to_server: deque[dict[str, Any]] = deque([{"type": "websocket.connect"}])
        self.to_client: deque[dict[str, Any]] = deque()
        self.is_closed = False
        self.sent_at = self.opened_at = self.heard_at = gateway.clock.now
        self._news: asyncio.Event | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.to_server) or self.is_closed

    def send_text(self, kind: str, **fields: Any) -> None:
        self.sent_at = self.gateway.clock.now
        self.to_server.append({"type": "websocket.receive", "text": json.dumps({"type": kind, **fields})})

    async def serve(self, app: Any) -> None:
        self._news = asyncio.Event()
        extras = SocketExtras(
            has_left=lambda: self.is_closed and not self.to_server,
            has_closed=lambda: self.is_closed,
            waited_s=lambda: self.gateway.clock.now - self.sent_at,
            nothing_waits=lambda: not self.to_server,
        )
        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "raw_path": b"/v1/realtime",
            "query_string": self.query.encode(),
            "headers": [(b"host", b"127.0.0.1:8000")],
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 8000),
            "scheme": "ws",
            "subprotocols": [],
            "extensions": {EXTENSION: extras, "websocket.http.response": {}},
        }
        await app(scope, self._receive, self._send)

    def look(self) -> None:
        """The gateway's loop looks whether something has come."""
        if self._news is not None and self.has_news:
            self._news.set()

    async def _receive(self) -> dict[str, Any]:
        assert self._news is not None
        while not self.to_server:
            if self.is_closed:
                return {"type": "websocket.disconnect", "code": 1006}
            self._news.clear()
            await self._news.wait()
        return self.to_server.popleft()

    async def _send(self, message: dict[str, Any]) -> None:
        """Bytes for a client that has closed are dropped without an error."""
        if not self.is_closed:
            self.to_client.append(dict(message))


class Gateway(Part):
    def __init__(self, clock: Clock, addresses: list[str], signer: Signer) -> None:
        super().__init__(clock)
        self.loop = OwnLoop(clock)
        self.wires: list[Wire] = []
        self.sockets: list[Socket] = []
        self._accepting: deque[Socket] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.client = EngineClient([RemoteEngine(address) for address in addresses], ClientSettings())
        self.app = routes.build_app(self.client, CONFIG, GatewayServices(Metrics(), signer, self.client))
        self.sessions = self.app.state.gateway.sessions
        self._spawn(self.client.start())
        self._spawn(self.sessions.run_ticker())

    def open(self, query: str) -> Socket:
        """Connections to a process that is stopped are made all the same, and wait."""
        socket = Socket(self, query)
        self._accepting.append(socket)
        return socket

    def run(self, chance: Random) -> None:
        """All that a woken loop finds at once, in any order."""
        found: list[Callable[[], Any]] = [lambda wire=wire: self._read(wire, chance) for wire in self.wires]  # type: ignore[misc]
        found += [socket.look for socket in self.sockets]
        found += [self._accept for _ in self._accepting]
        chance.shuffle(found)
        for look in found:
            look()
            if chance.random() < 0.5:
                self.loop.turn()
        self.loop.turn()
        self.sockets = [socket for socket in self.sockets if socket.has_news or not socket.is_closed]
        self.wires = [wire for wire in self.wires if not wire.gateway_knows]

    def _accept(self) -> None:
        socket = self._accepting.popleft()
        self.sockets.append(socket)
        self._spawn(socket.serve(self.app))

    def _read(self, wire: Wire, chance: Random) -> None:
        for frames in arrived(wire.to_gateway, wire.is_broken, self.clock.now, chance):
            if not wire.socket.is_closed:
                self.loop.call_soon(wire.socket.on_frames, frames)
        if wire.is_broken and not wire.gateway_knows:
            wire.gateway_knows = True
            if not wire.socket.is_closed:
                self.loop.call_soon(wire.socket.on_disconnect)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        for _ in range(20):
            self.loop.turn()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
        self.loop.close()


class SimulatedFleet:
    """Two gateways over two engines. `run` lets time pass."""

    def __init__(self, chance: Random, patch: pytest.MonkeyPatch, gateways: int = 2) -> None:
        self.chance, self.clock = chance, Clock()
        GatewaySide.fleet = self
        patch.setattr(links, "GatewaySocket", GatewaySide)
        patch.setattr(routes, "time", self.clock)
        patch.setattr(pool, "random", SimpleNamespace(Random=lambda: chance))
        self.engines = [Engine(self.clock, number) for number in range(2)]
        self._connections = 0
        signer = Signer(b"secret of the simulation")
        addresses = [engine.address for engine in self.engines]
        self.gateways = [Gateway(self.clock, addresses, signer) for _ in range(gateways)]
        self.clients: list[Client] = []

    def connect(self, address: str, side: GatewaySide) -> Wire:
        loop = asyncio.get_running_loop()
        (gateway,) = [gateway for gateway in self.gateways if gateway.loop is loop]
        (engine,) = [engine for engine in self.engines if engine.address == address]
        self._connections += 1
        wire = Wire(self._connections, gateway, engine, side)
        gateway.wires.append(wire)
        engine.side.wires[wire.name] = wire
        return wire

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.round()

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = self.clock.now + seconds
        while not condition():
            assert self.clock.now < end, "it did not happen"
            self.round()

    def round(self) -> None:
        self.clock.now += ROUND_S
        parts: list[Gateway | Engine] = [*self.gateways, *self.engines]
        for part in parts:
            part.wake_if_due()
        self._feel_pulse()
        order: list[Gateway | Engine | Client] = [part for part in parts if part.is_awake]
        order += self.clients
        self.chance.shuffle(order)
        for part in order:
            part.run(self.chance)

    def _feel_pulse(self) -> None:
        """A running side gives the connection up after a timeout without the other side. One that has just woken
        may do so first, or first read the messages that have arrived."""
        for gateway in self.gateways:
            for wire in gateway.wires:
                both = wire.gateway.is_awake and wire.engine.is_awake
                for side in (wire.gateway, wire.engine):
                    late = self.clock.now - wire.heard_at[side] > PULSE_S
                    if side.is_awake and late and (not both or self.chance.random() < 0.5):
                        wire.is_broken = True
                    if both:
                        wire.heard_at[side] = self.clock.now

    def end(self) -> None:
        for gateway in self.gateways:
            gateway.end()


class Client:
    """Speaks `audio`, keeps what is not acknowledged, and goes on with its session wherever it gets an answer.

    It waits `patience_s` for an answer, and for a sign that it is heard; then it looks elsewhere. What the server must
    never do to it is noted in `wrongs`.
    """

    def __init__(self, fleet: SimulatedFleet, audio: bytes, patience_s: float = 5.0, at: int = 0) -> None:
        self.fleet, self.audio, self.patience_s = fleet, audio, patience_s
        self.wrongs: list[str] = []
        self.events: dict[int, dict[str, Any]] = {}
        self.is_done = False
        self.is_held = False
        self._ids: dict[str, Any] = {}
        self.token = ""
        self._acknowledged = self._sent = self._spoken = 0
        self._greeted = self._finished = self._cleared = False
        self._at = at
        self._next_try = 0.0
        self.status = 0
        fleet.clients.append(self)
        self.socket = self._open()

    @property
    def text(self) -> list[str]:
        return [event["transcript"] for event in self._in_order if event["type"] == COMPLETED]

    @property
    def _in_order(self) -> list[dict[str, Any]]:
        return [self.events[number] for number in sorted(self.events)]

    def leave(self, at: int | None = None, closes: bool = True) -> None:
        """Close the connection, or just leave it, and look for another."""
        self.socket.is_closed = closes
        self._at = (self._at + 1) % len(self.fleet.gateways) if at is None else at
        self.socket = self._open()

    def run(self, chance: Random) -> None:
        now = self.fleet.clock.now
        while self.socket.to_client and not self.is_done:
            self.socket.heard_at = now
            self._take(self.socket.to_client.popleft())
        if self.is_done:
            return
        if self.socket.is_closed:
            if now >= self._next_try:
                self.leave(chance.randrange(len(self.fleet.gateways)))
        elif now - self.socket.heard_at > self.patience_s:
            self.leave()
        elif self._greeted:
            self._speak()

    def _open(self) -> Socket:
        self._greeted = self._finished = self._cleared = False
        query = f"resume={self.token}&after={max(self.events, default=0)}" if self.token else ""
        return self.fleet.gateways[self._at].open(query)

    def _lose(self, wait_s: float) -> None:
        self.socket.is_closed = True
        self._next_try = self.fleet.clock.now + wait_s

    def _take(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "websocket.send":
                self._note(json.loads(message["text"]))
            case "websocket.close":
                if message["code"] == 4409:
                    self.wrongs.append("closed with 4409, although this is the only connection")
                elif message["code"] == 1011:
                    self.wrongs.append(f"closed with 1011: {message['reason']}")
                self._lose(0.2)
            case "websocket.http.response.start":
                self.status = message["status"]
            case "websocket.http.response.body":
                if self.status != 503:
                    self.wrongs.append(f"answered with {self.status}: {json.loads(message['body'])['error']['code']}")
                    self.token, self.is_done = "", True
                self._lose(0.2)

    def _note(self, event: dict[str, Any]) -> None:
        if self._ids.setdefault(event["event_id"], event) != event:
            self.wrongs.append(f"two events with the id {event['event_id']}")
        if "seq" in event:
            known = self.events.setdefault(event["seq"], event)
            if known != event:
                self.wrongs.append(f"two events with the number {event['seq']}: {known}, {event}")
            if max(self.events) != len(self.events):
                self.wrongs.append(f"number {event['seq']} after {len(self.events) - 1} events")
        kind = event["type"]
        if kind == "session.created":
            wishes = {
                "audio": {"input": {"format": {"type": "audio/pcm", "rate": engines.RATE}, "turn_detection": VAD}},
                "include": ["session.resume", "input_audio_buffer.acks"],
            }
            self.socket.send_text("session.update", session={"type": "transcription", **wishes})
        elif kind == "session.updated":
            self.token, self._greeted = event["session"]["resume"]["token"], True
        elif kind == "session.resumed":
            self._sent, self._greeted = event["received_samples"], True
            if self._sent < self._acknowledged:
                self.wrongs.append(f"asks for sample {self._sent} after {self._acknowledged} were acknowledged")
        elif kind == "input_audio_buffer.acknowledged":
            self._acknowledged = max(self._acknowledged, event["samples"])
        elif kind == "input_audio_buffer.cleared":
            self._cleared = True
        elif kind == "error" and event["error"]["event_id"] != "last":
            self.wrongs.append(f"an error: {event['error']['message']}")
        committed = {event["item_id"] for event in self._in_order if event["type"] == "input_audio_buffer.committed"}
        self.is_done = self._cleared and len(committed) == len(self.text)

    def _speak(self) -> None:
        """A piece more than before, at the pace of speech; and all that this connection has not been sent."""
        if not self.is_held:
            self._spoken = min(self._spoken + int(ROUND_S * engines.RATE), len(self.audio) // 2)
        data = self.audio[2 * self._sent : 2 * self._spoken]
        if data:
            self.socket.send_text("input_audio_buffer.append", audio=base64.b64encode(data).decode())
            self._sent = self._spoken
        elif self._sent == len(self.audio) // 2 and not self._finished:
            self._finished = True
            self.socket.send_text("input_audio_buffer.commit", event_id="last")
            self.socket.send_text("input_audio_buffer.clear")
