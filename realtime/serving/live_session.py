"""One session with its engine stream: carries out what the core decides. It outlives a socket if it can be resumed.

The core is called synchronously from two sides, the client's messages and the engine's outputs; its effects are
applied at once. Commands for the engine go through one queue in order, which holds at most `max_audio_in_flight_s` of
audio; when it is full, `room()` makes the reader of the socket wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine import messages
from engine.client.wills import Inheritance
from engine.errors import AtCapacity, EngineError
from realtime.dialects.base import Dialect
from realtime.dialects.json_frames import encode_json
from realtime.errors import ClientFault, CloseCode, OptionsRefused
from realtime.metrics.gateway import Metrics
from realtime.serving.engine_api import EngineApi
from realtime.serving.engine_queue import EngineCommand
from realtime.serving.live_limits import LiveLimits
from realtime.serving.outbox import Outbox
from realtime.serving.owed_audio import OwedAudio
from realtime.serving.saved_live import SavedLive
from realtime.serving.sent_log import SentLog
from realtime.serving.stream_runner import StreamRunner
from realtime.serving.will import Will
from realtime.session.core import Session
from realtime.session.events import (
    Append,
    Configure,
    Drain,
    Effect,
    Event,
    Feed,
    FeedGap,
    FinishEngine,
    FlushEngine,
    FollowTurns,
    Gap,
    Hangup,
    Measured,
    Problem,
    Reanchor,
    Reopen,
    Samples,
    Send,
    ServerEvent,
    Tick,
)
from realtime.session.phases import Phase
from realtime.session.settings import INCLUDE_RESUME, Settings

log = logging.getLogger("tickertape.session")


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
        self.runner = StreamRunner(session_id, session, engine, limits, self.submit)
        self._task: asyncio.Task[None] | None = None
        self._stopped: asyncio.Task[None] | None = None
        self.sent = SentLog(session_id, limits.max_log_events, limits.max_log_bytes)
        # What is entrusted to the engine, where other processes may go on with the session.
        self.will: Will | None = None
        # Of a session that another process began: audio that its engine never got, and a new stream decided on.
        self._owed: OwedAudio | None = None
        self._reanchor: Reanchor | None = None

    # The client's side

    def in_force(self, asked: Settings) -> tuple[Settings, list[ClientFault]]:
        """What the model takes of it, and what it refuses: that stays as it was."""
        if asked == self.session.settings:
            return asked, []
        taken, faults = asked.in_force_after(self.session.settings, self._engine.spec)
        if missing := asked.untaken(taken):
            log.info("session %s: the model takes no %s", self.id, ", no ".join(missing))
        return taken, faults

    @property
    def has_stream(self) -> bool:
        return self.runner.stream is not None

    @property
    def resumable(self) -> bool:
        wanted = self.session.settings.wants(INCLUDE_RESUME)
        return wanted and not self.session.closed and not self.outbox.overrun

    @property
    def queued_seconds(self) -> float:
        return self.runner.queue.samples / self.session.sample_rate

    def submit(self, event: Event) -> None:
        """Hand an event to the core and apply what it decides. A closed session takes nothing more."""
        if self.session.closed:
            return
        if self._owed is not None and isinstance(event, Append | Gap):
            event = self._repay(event, self._owed)
        now = self.clock()
        effects = self.session.handle(event, now)
        for effect in effects:
            self._apply(effect)
        if self.will is None:
            return
        if self.resumable:
            self.will.note(event, now, effects)
        else:
            self.will.close()

    def tell(self, event: ServerEvent) -> None:
        """Something that the client is told beside what the core decides."""
        self.outbox.put(event)
        if self.will is not None and self.resumable:
            self.will.begin_anew()

    def adopt(self, settings: Settings) -> None:
        """Begin anew with a dialect's settings, without an answer to the client."""
        for effect in self.session.handle(Configure(settings), self.clock()):
            if not isinstance(effect, Send):
                self._apply(effect)
        if self.will is not None and self.resumable:
            self.will.begin_anew()

    async def inject(self, items: Sequence[messages.Item | None]) -> int:
        """Put items prepared elsewhere into the engines' caches; how many were taken."""
        return await self._engine.inject(items)

    def tick(self) -> None:
        if self.session.appended or self.session.phase is Phase.FINISHING:
            self.submit(Tick())
        if self.will is not None and self.resumable:
            self.will.review()

    def drain(self, deadline: float) -> None:
        self.submit(Drain(deadline))

    async def room(self) -> None:
        """Wait until the engine has taken enough of the queue."""
        while self.full:
            await self.runner.queue.wait_for_room()

    @property
    def full(self) -> bool:
        return self.runner.full

    async def next_frames(self) -> list[str] | Hangup:
        """What the writer sends next."""
        event = await self.outbox.get()
        if isinstance(event, Hangup):
            return event
        frames = self._write(event)
        if self.will is not None and self.resumable:
            self.will.wrote(self.clock())
            # Nobody is told what only this process knows.
            await self.will.left()
        return frames

    def _write(self, event: ServerEvent) -> list[str]:
        return [self._frame(body) for body in self.dialect.write(event, self.session.settings)]

    def _frame(self, body: dict[str, object]) -> str:
        return self.sent.add(body) if self.resumable else encode_json(body)

    def frames_after(self, sequence: int) -> list[str] | None:
        """Frames sent after the one with this number; None if some of them are gone."""
        return self.sent.after(sequence)

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
                self.runner.queue.wake()
                self.runner.queue.make_room()
            case Measured(name, value):
                self._metrics.measure(name, value)
                if name == "stalls":
                    log.warning("session %s: speech without text; starting a new engine stream", self.id)
            case Reanchor():
                self.runner.leave_for(effect)
                self._start()
            case Feed() | FeedGap() | FlushEngine() | FinishEngine() | Reopen() | FollowTurns():
                self._command(effect)

    def _command(self, command: EngineCommand) -> None:
        self.runner.put(command)
        if self._task is None:
            self.runner.settings = self.session.settings
            self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"session {self.id}")

    # A session that moves from one process to another

    def handle_again(self, event: Event, now: float) -> None:
        """What another process did with this event, without what the engine was told then."""
        for effect in self.session.handle(event, now):
            if isinstance(effect, Send):
                self.outbox.put(effect.event)
            elif isinstance(effect, Hangup):
                self.outbox.hang_up(effect)
            elif isinstance(effect, Reanchor):
                self._reanchor = effect

    def write_again(self) -> bool:
        """The next event that waits for the client becomes frames that it was sent; False if none waits."""
        event = self.outbox.take()
        if event is not None:
            self._write(event)
        return event is not None

    def take_over(self, saved: SavedLive, inherited: Inheritance, core: Session, rest: Samples) -> None:
        """Go on with the stream of another process. What its engine never got is asked of the client again."""
        self.session = self.runner.session = core
        queue, fed = self.runner.queue, self.runner.load(saved, inherited)
        if saved.reanchor is not None:
            self._reanchor = Reanchor(saved.reanchor[0], ())
        if self._reanchor is not None:
            # Nobody has the audio any more.
            base = self._reanchor.base
            self.runner.leave_for(Reanchor(base, (core.appended - base,)))
            for mark in core.marks:
                queue.put(FlushEngine(mark.pause))
        else:
            if saved.runs_out:
                queue.put(Reopen(core.settings))
            self._owed = OwedAudio(fed, core.appended, core.marks[inherited.flushes :])
            for command in self._owed.pay(rest)[0]:
                queue.put(command)
            core.rewind(min(fed + len(rest), core.appended))
        if core.appended:  # else the stream is yet to be opened, by what the settings are then
            queue.put(FollowTurns(core.settings))
        if saved.reopen and not saved.runs_out and self._reanchor is None:
            queue.put(Reopen(core.settings))
        if core.phase is Phase.FINISHING:
            queue.put(FinishEngine())
        if core.appended:
            self._start()

    def _repay(self, event: Append | Gap, owed: OwedAudio) -> Append | Gap:
        """Feed what the core has counted before; returns what it has not."""
        commands, rest = owed.pay(event.samples)
        for command in commands:
            self._command(command)
        if owed.is_paid:
            self._owed = None
        if isinstance(rest, int):
            return Gap(rest, event.source_samples, event.source_ms)
        return Append(rest, event.source_samples, event.source_ms)

    async def let_go(self, is_fenced: bool) -> None:
        """The session goes on in another process: end it here without a word to its engine stream. If it was taken from
        us, this process may have begun another stream for it since."""
        if is_fenced:
            self.runner.drop()
        else:
            self.runner.lay_down()
        await self.close()

    # The engine's side

    def stop(self) -> None:
        """End the session now, without a word to the client. Harmless when done twice."""
        # Nothing that still comes in, a tick for one, may start anything again.
        self.session.abandon()
        if self._task is not None:
            self._task.cancel()
            self._stopped, self._task = self._task, None

    async def close(self) -> None:
        """Stop, and wait until the engine stream is given back. A cancellation while waiting does not undo the stop."""
        self.stop()
        if self._stopped is not None:
            await asyncio.wait((self._stopped,))

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self.runner.work(group)
        except* AtCapacity:
            # No error event: clients take that for their own mistake and do not come back.
            self._end(Hangup(CloseCode.TRY_LATER, "at capacity; try again", "capacity"))
        except* OptionsRefused as refused:
            self.outbox.put(Problem("invalid_value", f"{refused.exceptions[0]}."))
            self._end(Hangup(CloseCode.POLICY, "the model does not take these options", "options"))
        except* EngineError as errors:
            log.warning("session %s: %s", self.id, errors.exceptions[0])
            self.submit(messages.Dead("the engine stopped"))
        except* Exception:
            log.exception("session %s failed", self.id)
            self._end(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
        finally:
            await self.runner.abandon()

    def _end(self, hangup: Hangup) -> None:
        self.session.abandon()
        self.outbox.hang_up(hangup)
