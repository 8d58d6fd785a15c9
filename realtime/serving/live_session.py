"""One session with its engine stream: carries out what the core decides. It outlives a socket if it can be resumed.

The core is called synchronously from two sides, the client's messages and the engine's outputs; its effects are
applied at once. Commands for the engine go through one queue in order, which holds at most `max_audio_in_flight_s` of
audio; when it is full, `room()` makes the reader of the socket wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import messages
from engine.errors import AtCapacity, EngineError, StreamError
from engine.spec import ModelSpec
from realtime.dialects.base import Dialect
from realtime.dialects.json_frames import encode_json
from realtime.errors import CloseCode
from realtime.metrics.gateway import Metrics
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.serving.engine_queue import EngineCommand, EngineQueue
from realtime.serving.outbox import Outbox
from realtime.serving.sent_log import SentLog
from realtime.session.core import Session
from realtime.session.events import (
    Configure,
    Drain,
    Effect,
    EngineSwitched,
    Event,
    Feed,
    FeedGap,
    FinishEngine,
    FlushEngine,
    Hangup,
    Measured,
    Reanchor,
    Reopen,
    Samples,
    Send,
    Tick,
)
from realtime.session.phases import Phase
from realtime.session.settings import INCLUDE_RESUME, Settings

log = logging.getLogger("tickertape.session")

# What the names of the OpenAI scale mean here; the medium is the model's own default.
DELAY_MS = {"minimal": 160, "low": 320, "high": 960, "xhigh": 2400}


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """Bounds of what one session may hold."""

    max_audio_in_flight_s: float = 60.0
    max_commands: int = 4096
    max_outbox_events: int = 1024
    max_outbox_bytes: int = 2_000_000
    max_log_events: int = 4096
    max_log_bytes: int = 4 * 1024 * 1024
    # Longest message that is not audio.
    max_control_bytes: int = 64 * 1024


def delay_positions(delay: str | int | None, spec: ModelSpec) -> int | None:
    """A client's delay on the model's clock; None leaves it to the model."""
    milliseconds = DELAY_MS.get(delay) if isinstance(delay, str) else delay
    if milliseconds is None or spec.max_delay_positions == 0:
        return None
    positions = -(-milliseconds * spec.sample_rate // (1000 * spec.samples_per_position))
    return max(1, min(positions, spec.max_delay_positions))


class LiveSession:
    """The asyncio side of one session."""

    def __init__(
        self,
        session_id: str,
        session: Session,
        dialect: Dialect,
        engine: EngineApi,
        limits: LiveLimits,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.id = session_id
        self.session = session
        self.dialect = dialect
        self.outbox = Outbox(limits.max_outbox_events, limits.max_outbox_bytes)
        self.clock = clock
        self.limits = limits
        self._engine = engine
        self._metrics = metrics
        self._queue = EngineQueue(int(limits.max_audio_in_flight_s * session.sample_rate), limits.max_commands)
        self._stream: StreamApi | None = None
        self._engine_settings = session.settings
        self._results: asyncio.Task[None] | None = None
        # Outputs of a stream that was left behind must not reach the core; each stream has its number.
        self._generation = 0
        self._streams_opened = 0
        self._fed = 0
        self._task: asyncio.Task[None] | None = None
        self._sent = SentLog(limits.max_log_events, limits.max_log_bytes)

    # The client's side

    @property
    def has_stream(self) -> bool:
        return self._stream is not None

    @property
    def resumable(self) -> bool:
        wanted = self.session.settings.wants(INCLUDE_RESUME)
        return wanted and not self.session.closed and not self.outbox.overrun

    @property
    def queued_seconds(self) -> float:
        return self._queue.samples / self.session.sample_rate

    def submit(self, event: Event) -> None:
        """Hand an event to the core and apply what it decides. A closed session takes nothing more."""
        if self.session.closed:
            return
        for effect in self.session.handle(event, self.clock()):
            self._apply(effect)

    def adopt(self, settings: Settings) -> None:
        """Begin anew with a dialect's settings, without an answer to the client."""
        for effect in self.session.handle(Configure(settings), self.clock()):
            if not isinstance(effect, Send):
                self._apply(effect)

    async def inject(self, items: Sequence[messages.Item | None]) -> int:
        """Put items prepared elsewhere into the engines' caches; how many were taken."""
        return await self._engine.inject(items)

    def tick(self) -> None:
        if self.session.appended or self.session.phase is Phase.FINISHING:
            self.submit(Tick())

    def drain(self, deadline: float) -> None:
        self.submit(Drain(deadline))

    async def room(self) -> None:
        """Wait until the engine has taken enough of the queue."""
        while self.full:
            await self._queue.wait_for_room()

    @property
    def full(self) -> bool:
        return self._queue.full and not self.session.closed

    async def next_frames(self) -> list[str] | Hangup:
        """What the writer sends next."""
        event = await self.outbox.get()
        if isinstance(event, Hangup):
            return event
        return [self._frame(body) for body in self.dialect.write(event, self.session.settings)]

    def _frame(self, body: dict[str, object]) -> str:
        return self._sent.add(body) if self.resumable else encode_json(body)

    def frames_after(self, sequence: int) -> list[str] | None:
        """Frames sent after the one with this number; None if some of them are gone."""
        return self._sent.after(sequence)

    def greeting_again(self) -> str:
        """The first frame of a socket that goes on with this session: where it stands."""
        settings = self.session.settings
        body = self.dialect.created(settings) or {}
        body["type"] = "session.resumed"
        body["received_samples"] = self.session.source_samples
        return encode_json(body)

    # Effects

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Send(event):
                self.outbox.put(event)
            case Hangup():
                self.outbox.hang_up(effect)
                self._queue.wake()
                self._queue.make_room()
            case Measured(name, value):
                self._metrics.measure(name, value)
                if name == "stalls":
                    log.warning("session %s: speech without text; starting a new engine stream", self.id)
            case Reanchor():
                self._generation += 1
                self._command(effect)
            case Feed() | FeedGap() | FlushEngine() | FinishEngine() | Reopen():
                self._command(effect)

    def _command(self, command: EngineCommand) -> None:
        self._queue.put(command)
        if self._task is None:
            # Later changes of the model's options come with a Reopen, in their place among the audio.
            self._engine_settings = self.session.settings
            self._task = asyncio.create_task(self._run(), name=f"session {self.id}")

    # The engine's side

    async def close(self) -> None:
        """End the session now, without a word to the client. Harmless when done twice."""
        # Nothing that still comes in, a tick for one, may start anything again.
        self.session.abandon()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._work(group)
        except* AtCapacity:
            # No error event: clients take that for their own mistake and do not come back.
            self._end(Hangup(CloseCode.TRY_LATER, "at capacity; try again", "capacity"))
        except* EngineError as errors:
            log.warning("session %s: %s", self.id, errors.exceptions[0])
            self.submit(messages.Dead("the engine stopped"))
        except* Exception:
            log.exception("session %s failed", self.id)
            self._end(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
        finally:
            if self._stream is not None:
                await self._abort(self._stream)
            self._stream = None
            self._queue.clear()

    def _end(self, hangup: Hangup) -> None:
        self.session.abandon()
        self.outbox.hang_up(hangup)

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while not self.session.closed:
            while self._queue and not self.session.closed:
                await self._execute(self._queue.take(), group)
                if not self.full:
                    self._queue.make_room()
            self._queue.rest()
            if not self._queue and not self.session.closed:
                await self._queue.wait()
        if self._results is not None:
            self._results.cancel()

    async def _execute(self, command: EngineCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Reanchor(base, replay):
                await self._leave()
                await self._open(base, group)
                for audio in replay:
                    await self._hear(audio, group)
            case Reopen(settings):
                self._engine_settings = settings
                if self._stream is not None and self._results is not None:
                    await self._stream.finish()
                    await self._results
                    self._stream = self._results = None
            case Feed(samples):
                try:
                    await self._hear(samples, group)
                finally:
                    self._queue.heard(len(samples))
            case FeedGap(samples):
                try:
                    await self._hear(samples, group)
                finally:
                    self._queue.heard(samples)
            case FlushEngine(at_pause):
                await self._flush(at_pause)
            case FinishEngine():
                await self._finish()

    async def _hear(self, audio: Samples | int, group: asyncio.TaskGroup) -> None:
        if self._stream is None:
            await self._open(self._fed, group)
        assert self._stream is not None
        try:
            if isinstance(audio, int):
                self._fed += audio
                await self._stream.gap(audio)
            else:
                self._fed += len(audio)
                await self._stream.feed(audio)
        except StreamError as error:
            # The stream's own last output says so too, and the core answers that with a new stream.
            log.debug("session %s: %s", self.id, error)

    async def _flush(self, at_pause: bool) -> None:
        if self._stream is None:
            self.submit(messages.Flushed(self.id, 0, 0))
            return
        try:
            await self._stream.flush(at_pause)
        except StreamError as error:
            log.debug("session %s: %s", self.id, error)

    async def _finish(self) -> None:
        if self._stream is None:
            self.submit(messages.Closed(self.id, 0))
            return
        await self._stream.finish()

    async def _open(self, base: int, group: asyncio.TaskGroup) -> None:
        settings, spec = self._engine_settings, self._engine.spec
        self._streams_opened += 1
        name = f"{self.id}.{self._streams_opened}"
        delay, options = delay_positions(settings.delay, spec), settings.engine_options()
        try:
            stream = await self._engine.open(name, delay_positions=delay, options=options)
        except ValueError as error:
            # The client loses nothing by an option that this model does not know: go on without it.
            log.info("session %s: opened without options: %s", self.id, error)
            stream = await self._engine.open(f"{name}.plain", delay_positions=delay)
        self._stream = stream
        self._fed = base
        self.submit(EngineSwitched(base))
        self._results = group.create_task(self._deliver(stream, self._generation), name=f"results {name}")

    async def _deliver(self, stream: StreamApi, generation: int) -> None:
        async for output in stream:
            if generation != self._generation:
                return
            assert not isinstance(output, messages.StreamState), "states stay with the engine's client"
            self.submit(output)
            if self.session.closed:
                self._queue.wake()
                return

    async def _leave(self) -> None:
        """Give up the stream: its outputs are muted already."""
        stream, self._stream = self._stream, None
        if self._results is not None:
            self._results.cancel()
            self._results = None
        if stream is not None:
            await self._abort(stream)

    async def _abort(self, stream: StreamApi) -> None:
        try:
            await stream.abort()
        except EngineError as error:
            log.debug("session %s: %s", self.id, error)
