"""One session on asyncio: `LiveSession` connects the session core with its client and with its engine stream.

Events from the client (`inbox.py`) and from the engine go to the core, and the effects that the core returns are
applied at once. Events for the client go into the outbox. Commands for the engine go to the session's `StreamRunner`
(`stream_runner.py`), which has a bounded queue. When that queue is full, `LiveSession.wait_for_room` makes the reader
of the socket wait, so TCP slows down a client that sends faster than the engine takes audio.

A resumable session outlives its socket. `ResentAudio` is for a session whose gateway died: when the client sends audio
again that the engine never received, `ResentAudio` passes it to the engine without counting it twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine import messages
from engine.client.handoff import AdoptedSession
from engine.errors import AtCapacity, EngineError
from realtime.dialects.base import Dialect, encode_json
from realtime.errors import ClientFault, CloseCode, OptionsRefused
from realtime.serving.engine_api import EngineApi
from realtime.serving.event_logs import SentLog
from realtime.serving.handoff import SessionHandoff
from realtime.serving.metrics import Metrics
from realtime.serving.outbox import Outbox
from realtime.serving.publishing import SessionPublication
from realtime.serving.saved_session import SavedLive
from realtime.serving.stream_runner import EngineCommand, LiveLimits, StreamRunner
from realtime.serving.webhooks import SessionWebhooks
from realtime.session.core import PendingFlush, Session, SessionPhase
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
from realtime.session.settings import INCLUDE_RESUME, Settings

log = logging.getLogger("tickertape.session")


class ResentAudio:
    """Audio that a session has counted and its engine never received, because the gateway between them died.

    The client sends it again: samples `start` to `end` of the session. It is fed to the engine, together with the
    flushes at positions in it that the engine was not asked for (`marks`), and not counted a second time.
    """

    def __init__(self, start: int, end: int, marks: Iterable[PendingFlush]) -> None:
        self._next = start
        self._end = end
        self._marks = deque(marks)

    @property
    def is_complete(self) -> bool:
        return self._next >= self._end and not self._marks

    def accept(self, audio: Samples | int) -> tuple[list[EngineCommand], Samples | int]:
        """Returns the commands for the resent part of this audio, and the rest of the audio, which is new."""
        commands: list[EngineCommand] = self._due()
        while self._next < self._end and _length(audio):
            until = min([self._end, *(mark.sample for mark in self._marks if mark.sample > self._next)])
            part, audio = _split(audio, until - self._next)
            commands.append(FeedGap(part) if isinstance(part, int) else Feed(part))
            self._next += _length(part)
            commands += self._due()
        return commands, audio

    def _due(self) -> list[EngineCommand]:
        due: list[EngineCommand] = []
        while self._marks and self._marks[0].sample <= self._next:
            mark = self._marks.popleft()
            due.append(FlushEngine(mark.pause, mark.ends_speech))
        return due


def _length(audio: Samples | int) -> int:
    return audio if isinstance(audio, int) else len(audio)


def _split(audio: Samples | int, count: int) -> tuple[Samples | int, Samples | int]:
    if isinstance(audio, int):
        return min(audio, count), max(0, audio - count)
    return audio[:count], audio[count:]


class LiveSession:
    """One session with its outbox and its engine stream: applies the effects that the session core decides."""

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
        # Set if other processes may adopt the session.
        self.handoff: SessionHandoff | None = None
        # Publishes the session's words to viewers.
        self.publication = SessionPublication(None, "", session_id, session.sample_rate)
        # Sends the session's finals to webhooks.
        self.webhooks = SessionWebhooks(None, None, session_id, session.sample_rate)
        # Of an adopted session: audio that its engine never received, and the new stream that was decided on.
        self._resent: ResentAudio | None = None
        self._reanchor: Reanchor | None = None
        # A timer runs for a turn whose final waits.
        self._final_timer_runs = False

    # The client's side

    def in_force(self, asked: Settings) -> tuple[Settings, list[ClientFault]]:
        """The settings that the model accepts, and a fault for each option it refuses; those keep their old value."""
        if asked == self.session.settings:
            return asked, []
        taken, faults = asked.in_force_after(self.session.settings, self._engine.spec)
        if missing := asked.ignored_options(taken):
            log.info("session %s: the model does not support %s", self.id, ", ".join(missing))
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
        """Pass an event to the core and apply the effects. Ignored if the session is closed."""
        if self.session.closed:
            return
        if self._resent is not None and isinstance(event, Append | Gap):
            event = self._feed_resent(event, self._resent)
        now = self.clock()
        effects = self.session.handle(event, now)
        for effect in effects:
            self._apply(effect)
        self._set_final_timer(now)
        if self.handoff is None:
            return
        if self.resumable:
            self.handoff.record(event, now, effects)
        else:
            self.handoff.close()

    def _set_final_timer(self, now: float) -> None:
        """Have the core act when a final has waited long enough for labels or a revision."""
        due = self.session.final_due
        if due is not None and not self._final_timer_runs:
            self._final_timer_runs = True
            asyncio.get_running_loop().call_later(max(0.0, due - now), self._final_is_due)

    def _final_is_due(self) -> None:
        self._final_timer_runs = False
        if self.session.final_due is not None:
            self.submit(Tick())

    def send_event(self, event: ServerEvent) -> None:
        """Send the client an event that does not come from the core."""
        self.outbox.put(event)
        if self.handoff is not None and self.resumable:
            self.handoff.save_base()

    def apply_settings(self, settings: Settings) -> None:
        """Apply the initial settings of a dialect, without an answer to the client."""
        for effect in self.session.handle(Configure(settings), self.clock()):
            if not isinstance(effect, Send):
                self._apply(effect)
        if self.handoff is not None and self.resumable:
            self.handoff.save_base()

    async def inject(self, items: Sequence[messages.Item | None]) -> int:
        """Put prepared items into the caches of the engines; returns how many were accepted."""
        return await self._engine.inject(items)

    def tick(self) -> None:
        if self.session.appended or self.session.phase is SessionPhase.FINISHING:
            self.submit(Tick())
        if self.handoff is not None and self.resumable:
            self.handoff.check_engine()

    def drain(self, deadline: float) -> None:
        self.submit(Drain(deadline))

    async def wait_for_room(self) -> None:
        """Wait until the engine queue is not full."""
        while self.full:
            await self.runner.queue.wait_for_room()

    @property
    def full(self) -> bool:
        return self.runner.full

    async def next_frames(self) -> list[str] | Hangup:
        """The next frames for the client, or the Hangup that ends the session."""
        event = await self.outbox.get()
        if isinstance(event, Hangup):
            return event
        frames = self._write(event)
        if self.handoff is not None and self.resumable:
            self.handoff.record_written(self.clock())
            # The handoff leaves before the client sees the frames, so an adopter knows all that the client knows.
            await self.handoff.wait_until_sent()
        return frames

    def _write(self, event: ServerEvent) -> list[str]:
        return [self._frame(body) for body in self.dialect.write(event, self.session.settings)]

    def _frame(self, body: dict[str, object]) -> str:
        return self.sent.add(body) if self.resumable else encode_json(body)

    def frames_after(self, sequence: int) -> list[str] | None:
        """Frames sent after the one with this number; None if some of them were dropped."""
        return self.sent.missed(sequence)

    def greeting_again(self) -> str:
        """The first frame on a socket that resumes this session: `session.resumed` with the samples received so far."""
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
                self.publication.on_event(event, self.session.settings.formatting)
                self.webhooks.on_event(event, self.session.settings)
            case Hangup():
                self.outbox.hang_up(effect)
                self.runner.queue.wake()
                self.runner.queue.make_room()
            case Measured(name, value):
                self._metrics.measure(name, value)
                if name == "stalls":
                    log.warning(
                        "session %s: the engine reports speech and sends no text; starting a new engine stream", self.id
                    )
            case Reanchor():
                self.runner.restart_stream(effect)
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

    # Handoff to another process

    def handle_again(self, event: Event, now: float) -> None:
        """Handle an entry of a handoff: apply its effects for the client, and not those for the engine again."""
        for effect in self.session.handle(event, now):
            if isinstance(effect, Send):
                self.outbox.put(effect.event)
            elif isinstance(effect, Hangup):
                self.outbox.hang_up(effect)
            elif isinstance(effect, Reanchor):
                self._reanchor = effect

    def write_again(self) -> bool:
        """Write the next event of the outbox into the log of sent frames; False if none waits."""
        event = self.outbox.pop()
        if event is not None:
            self._write(event)
        return event is not None

    def take_over(self, saved: SavedLive, adopted: AdoptedSession, core: Session, rest: Samples) -> None:
        """Continue with the stream of another process. The client resends the audio that the engine never received.

        `core` is the session on the clock of this process; `rest` is audio that the previous owner did not send.
        """
        self.session = self.runner.session = core
        queue, fed = self.runner.queue, self.runner.load(saved, adopted)
        if saved.reanchor is not None:
            self._reanchor = Reanchor(saved.reanchor[0], ())
        if self._reanchor is not None:
            # A new stream was decided on, and its replay audio is lost: silence takes its place.
            base = self._reanchor.base
            self.runner.restart_stream(Reanchor(base, (core.appended - base,)))
            for mark in core.marks:
                queue.put(FlushEngine(mark.pause, mark.ends_speech))
        else:
            if saved.runs_out:
                queue.put(Reopen(core.settings))
            self._resent = ResentAudio(fed, core.appended, core.marks[adopted.flushes :])
            for command in self._resent.accept(rest)[0]:
                queue.put(command)
            core.rewind(min(fed + len(rest), core.appended))
        if core.appended:  # else the stream is not open yet, and opens with the settings of that moment
            queue.put(FollowTurns(core.settings))
        if saved.reopen and not saved.runs_out and self._reanchor is None:
            queue.put(Reopen(core.settings))
        if core.phase is SessionPhase.FINISHING:
            queue.put(FinishEngine())
        if core.appended:
            self._start()

    def _feed_resent(self, event: Append | Gap, resent: ResentAudio) -> Append | Gap:
        """Feed the part of the audio that the core has counted before; returns the new part."""
        commands, rest = resent.accept(event.samples)
        for command in commands:
            self._command(command)
        if resent.is_complete:
            self._resent = None
        if isinstance(rest, int):
            return Gap(rest, event.source_samples, event.source_ms)
        return Append(rest, event.source_samples, event.source_ms)

    def release(self, is_fenced: bool) -> None:
        """End the session here without ending its engine stream: another process continues it. Without an await: an
        output that came meanwhile would end the task, and with it the stream.

        `is_fenced`: another process took the session over. A stream that this one has opened since then, or since its
        last save, is ended.
        """
        if is_fenced or self.handoff is None or self.runner.engine_stream is not self.handoff.last_saved_stream:
            self.runner.abort_everywhere()
        else:
            self.runner.release()
        self.stop()

    # The task that runs the engine stream

    def stop(self) -> None:
        """End the session now, without a message to the client. May be called twice."""
        # A closed core ignores later events, such as a tick, that would start the task again.
        self.session.close_without_effects()
        if self._task is not None:
            self._task.cancel()
            self._stopped, self._task = self._task, None

    async def close(self) -> None:
        """Stop, and wait until the engine stream has ended. The stop stays in effect if the wait is cancelled."""
        self.stop()
        if self._stopped is not None:
            await asyncio.wait((self._stopped,))

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self.runner.work(group)
        except* AtCapacity:
            # No error event: clients take one for a mistake of their own and do not try again.
            self._end(Hangup(CloseCode.TRY_LATER, "at capacity; try again", "capacity"))
        except* OptionsRefused as refused:
            self.outbox.put(Problem("invalid_value", f"{refused.exceptions[0]}."))
            self._end(Hangup(CloseCode.POLICY, "the model does not support these options", "options"))
        except* EngineError as errors:
            log.warning("session %s: %s", self.id, errors.exceptions[0])
            self.submit(messages.Dead("the engine stopped"))
        except* Exception:
            log.exception("session %s failed", self.id)
            self._end(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
        finally:
            await self.runner.close()

    def _end(self, hangup: Hangup) -> None:
        self.session.close_without_effects()
        self.outbox.hang_up(hangup)
