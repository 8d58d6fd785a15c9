"""Engines in this process behind the real supervisor: each is a loop that runs and dies when a test says so.

What crosses is plain commands and outputs; time is turns of the event loop. So any order of deaths, refusals and slow
answers can be played, thousands of times.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import structs

from engine.boundary import codec
from engine.boundary.crash_suspects import StreamInStep
from engine.boundary.input_cache import SenderCache
from engine.client.link import LinkEvents
from engine.errors import AtCapacity, EngineUnreachable
from engine.messages import Abort, Closed, Command, Dead, Failed, Feed, Item, Open, Output, SessionCommand
from engine.server.loop import EngineLoop
from engine.spec import ModelSpec
from tests.engine import fakes


class LoopEngine:
    """An engine as a handle, and the loop itself while it lives."""

    is_ours = True
    known: dict[str, LoopEngine] = {}

    def __init__(self, name: str, build: Callable[[], EngineLoop] = fakes.build) -> None:
        self.address = f"inproc://{name}"
        self.start_timeout_s = 5.0
        self.build = build
        self.loop: EngineLoop | None = build()
        self.lives = 0
        self.full = False
        self.flights: list[StreamInStep] = []
        self.status = codec.Status(slots_total=100)
        self.link: LoopLink | None = None
        self.known[self.address] = self

    def kill(self) -> None:
        """At once, with everything it has not said."""
        self.loop = None
        self.break_link()

    def break_link(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.break_off()

    def revive(self) -> None:
        if self.loop is None:
            self.loop = self.build()
            self.lives += 1

    def take_in(self) -> None:
        """Hear what was sent."""
        if self.link is not None:
            self.link.deliver_commands()

    def run(self, steps: int) -> None:
        """So many steps, if there is work for them; what they say arrives."""
        while self.link is not None and self.loop is not None and self.loop.has_work() and steps:
            steps -= 1
            result = self.loop.step()
            self.loop.scheduler.check_integrity()
            self.link.say([] if result is None else result.outputs)

    # What a handle can.

    async def start(self) -> None:
        return None

    async def exited(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def crashed(self) -> bool:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.loop is None

    def in_flight(self) -> list[StreamInStep] | None:
        return self.flights

    async def stop(self, at_once: bool = False) -> None:
        return None


class LoopLink:
    """In place of an `EngineLink`."""

    has_room = True
    engine_failed = False
    version = "test"
    silent_s = 0.0

    def __init__(self, address: str, cache_bytes: int, events: LinkEvents, keys: Any = None) -> None:
        self.lost: str | None = None
        self.engine = ""
        self.status = LoopEngine.known[address].status
        self.cache = SenderCache(cache_bytes)
        self._host = LoopEngine.known[address]
        self._events = events
        self._commands: deque[tuple[Command, list[Item]]] = deque()
        self._sources: deque[Any] = deque()
        # As in a host, each opened stream has a name of its own in the loop: the gateway's name -> the loop's.
        self._names: dict[str, str] = {}
        self._openings = 0

    async def connect(self, context: Any, gateway: str, model: str | None, timeout_s: float) -> ModelSpec:
        await asyncio.sleep(0)
        loop = self._host.loop
        if loop is None:
            raise EngineUnreachable("it is dead")
        # A gateway that connects anew has nothing open.
        loop.submit([Abort(name) for name in list(loop.scheduler.streams)], 0)
        while loop.has_work():
            loop.step()
        self.engine = f"{self._host.address} {self._host.lives}"
        self._host.link = self
        return loop.scheduler.spec

    def send(self, command: Any, items: list[Item] | None = None) -> None:
        if self.lost is None:
            self._commands.append((command, items or []))

    def send_paced(self, source: Any) -> None:
        if self.lost is None and source not in self._sources:
            self._sources.append(source)

    async def wait_acknowledged(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self.lost = self.lost or "closed"

    def break_off(self) -> None:
        if self.lost is None:
            self.lost = "broken"
            self._events.on_lost("broken")

    def deliver_commands(self) -> None:
        while self._commands:
            self._submit(*self._commands.popleft())
        while self._sources and self.lost is None:
            entry = self._sources[0].next_piece()
            if entry is None:
                self._sources.popleft()
            else:
                self._submit(*entry)
                self._sources.rotate(-1)

    def _submit(self, command: Any, items: list[Item]) -> None:
        loop = self._host.loop
        assert loop is not None
        if isinstance(command, Open) and self._host.full:
            error = AtCapacity(command.stream, "no room")
            self.say([Failed(command.stream, "AtCapacity", str(error))])
            return
        if isinstance(command, SessionCommand):
            return
        if isinstance(command, Open):
            self._openings += 1
            self._names[command.stream] = f"{command.stream}/{self._openings}"
        if command.stream not in self._names:
            return  # the stream has ended
        if isinstance(command, (Open, Feed)):
            command = structs.replace(command, items=[structs.replace(item) for item in items])
        name = self._names[command.stream]
        if isinstance(command, Abort):
            del self._names[command.stream]
        loop.submit([structs.replace(command, stream=name)], 0)

    def say(self, outputs: list[Output]) -> None:
        loop = self._host.loop
        if self.lost is not None or loop is None:
            return
        for output in outputs:
            if not isinstance(output, Dead) and (name := output.stream.partition("/")[0]) != output.stream:
                if self._names.get(name, output.stream) != output.stream:
                    continue  # the gateway has opened another stream under this name
                if isinstance(output, (Closed, Failed)):
                    self._names.pop(name, None)
                output.stream = name
            self._events.on_output(output)
        for name, stream in list(loop.scheduler.streams.items()):
            if self._names.get(name.partition("/")[0]) == name:
                self._events.on_progress(codec.Progress(name.partition("/")[0], stream.computed))
