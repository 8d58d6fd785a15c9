"""Errors of what runs outside a task on behalf of a task group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine import messages
from engine.client.handoff import AdoptedSession
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineError, StreamError
from engine.spec import ModelSpec
from realtime.dialects.base import Dialect, encode_json
from realtime.errors import ClientFault, CloseCode, OptionsRefused
from realtime.metrics.gateway import Metrics
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.serving.engine_queue import EngineCommand, EngineQueue, ResentAudio
from realtime.serving.handoff import SavedLive, SentLog, SessionHandoff
from realtime.serving.outbox import Outbox
from realtime.serving.throttle import SHARE_S
from realtime.session.boundaries import turn_rule
from realtime.session.core import Phase, Session
from realtime.session.events import (
    Append,
    Configure,
    Drain,
    Effect,
    EngineSwitched,
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


def fail(group: asyncio.TaskGroup, error: Exception) -> None:
    """End the group as if a task of it had met this error. Whoever called does not notice."""
    failing = _raise(error)
    try:
        group.create_task(failing)
    except RuntimeError:
        failing.close()  # the group is ending already


async def _raise(error: Exception) -> NoReturn:
    raise error


# Bounds of what one session may hold, and a client's delay on the model's clock.

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


# Carries out what a session wants of its engine stream, command by command, and hands on what the stream says.

log = logging.getLogger("tickertape.session")

FINAL = (messages.Closed, messages.Failed, messages.Dead)
NOT_FOR_SESSIONS = (messages.StreamState, messages.SessionOutput)


class StreamRunner:
    """One stream at a time. `submit` takes what the stream says."""

    def __init__(
        self, session_id: str, session: Session, engine: EngineApi, limits: LiveLimits, submit: Callable[[Event], None]
    ) -> None:
        self.session = session
        self.queue = EngineQueue(int(limits.max_audio_in_flight_s * session.sample_rate), limits.max_commands)
        self.stream: StreamApi | None = None
        # The options that streams are opened with. Later changes come with a Reopen, in their place among the audio.
        self.settings = session.settings
        self._id = session_id
        self._engine = engine
        self._submit = submit
        # Done with the stream's last output, or when nobody wants to hear more of it.
        self._said_all: asyncio.Future[None] | None = None
        # Another stream with other options comes when this one has said all.
        self._runs_out = False
        # All commands so far were carried out, and the next one is waited for.
        self._rests = False
        # Outputs of a stream that was left behind must not reach the core; each stream has its number.
        self._generation = 0
        self._opened = 0
        # The session's samples at which the stream began and up to which audio was fed.
        self._base, self._fed = 0, 0
        # Of a stream that came from another process: answers to flushes that the core knows of, then to others.
        self._known_flushes, self._strange_flushes = 0, 0

    @property
    def full(self) -> bool:
        return self.queue.full and not self.session.closed

    @property
    def engine_stream(self) -> EngineStream | None:
        return self.stream if isinstance(self.stream, EngineStream) else None

    def leave_for(self, reanchor: Reanchor) -> None:
        """What the stream still says is not wanted: another one comes, with the options of now."""
        self._generation += 1
        self.settings, self._runs_out = self.session.settings, False
        if self._said_all is not None and not self._said_all.done():
            self._said_all.set_result(None)
        self.queue.begin_anew(reanchor)

    def put(self, command: EngineCommand) -> None:
        """Audio that nothing stands before and that the stream has room for is fed at once; all else waits its turn."""
        if not (self._rests and isinstance(command, Feed) and not self.queue and self._hear_now(command.samples)):
            self.queue.put(command)

    def save(self, last: bool) -> dict[str, Any]:
        """What a session's value says of its stream; `last`: with the audio that has not left for the engine."""
        reanchor, stream = self.queue.reanchor, self.engine_stream
        return {
            "engine_settings": self.settings,
            "streams_opened": self._opened,
            "fed": self._fed,
            "reanchor": None if reanchor is None else (reanchor.base, self.session.appended - reanchor.base),
            "reopen": self._runs_out or self.queue.reopen is not None,
            "rest": stream.rest().tobytes() if last and stream is not None else b"",
            "runs_out": self._runs_out,
        }

    def load(self, saved: SavedLive, adopted: AdoptedSession) -> int:
        """Go on with the stream of another process. Returns the session's sample from which on audio is to be fed."""
        self.settings, self._opened = saved.engine_settings, saved.streams_opened
        self.stream, self._runs_out = adopted.stream, saved.runs_out
        known = len(self.session.marks)
        self._known_flushes, self._strange_flushes = known, max(0, adopted.flushes - known)
        self._base, self._fed = self.session.engine_start, saved.fed
        if adopted.stream is not None:
            self._fed = self.session.engine_start + adopted.goes_on_at
        return self._fed

    def lay_down(self) -> None:
        """The stream goes on in another process."""
        stream, self.stream = self.engine_stream, None
        if stream is not None:
            stream.lay_down()

    def drop(self) -> None:
        """The session goes on in another process, without this stream: if an engine runs it for us, it is to end. The
        one that another process has by now is not ours to end, and engines know that."""
        stream, self.stream = self.engine_stream, None
        if stream is not None:
            stream.drop()

    async def abandon(self) -> None:
        """End the stream, if there still is one."""
        stream, self.stream = self.stream, None
        if stream is not None:
            await self._abort(stream)
        self.queue.clear()

    async def work(self, group: asyncio.TaskGroup) -> None:
        if self.stream is not None and self.queue.reanchor is None:
            # It came from another process.
            self._listen_to(self.stream, group)
        clock = asyncio.get_running_loop().time
        while not self.session.closed:
            began = clock()
            while self.queue and not self.session.closed:
                await self._execute(self.queue.take(), group)
                if not self.full:
                    self.queue.make_room()
                if clock() - began >= SHARE_S:
                    # A minute of audio may wait here, and a stream that has room for it does not make us wait.
                    await asyncio.sleep(0)
                    began = clock()
            self.queue.rest()
            if not self.queue and not self.session.closed:
                self._rests = True
                try:
                    await self.queue.wait()
                finally:
                    self._rests = False

    async def _execute(self, command: EngineCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Reanchor(base, replay):
                await self._leave()
                await self._open(base, group)
                for audio in replay:
                    await self._hear(audio, group)
            case Reopen(settings):
                self.settings = settings
                if self.stream is not None and self._said_all is not None:
                    self._runs_out = True
                    await self.stream.finish()
                    await self._said_all
                    await self._leave()
                self._runs_out = False
            case Feed(samples):
                try:
                    await self._hear(samples, group)
                finally:
                    self.queue.heard(len(samples))
            case FeedGap(samples):
                try:
                    await self._hear(samples, group)
                finally:
                    self.queue.heard(samples)
            case FlushEngine(pause):
                await self._flush(pause)
            case FollowTurns(settings):
                self.settings = settings
                if self.stream is not None:
                    self.stream.change_turns(self._turn_rule)
            case FinishEngine():
                await self._finish()

    async def _hear(self, audio: Samples | int, group: asyncio.TaskGroup) -> None:
        if self.stream is None:
            await self._open(self._fed, group)
        assert self.stream is not None
        try:
            if isinstance(audio, int):
                self._fed += audio
                await self.stream.gap(audio)
            else:
                self._fed += len(audio)
                await self.stream.feed(audio)
        except StreamError as error:
            # The stream's own last output says so too, and the core answers that with a new stream.
            log.debug("session %s: %s", self._id, error)

    def _hear_now(self, samples: Samples) -> bool:
        if self.stream is None or not self.stream.feed_now(samples):
            return False
        self._fed += len(samples)
        return True

    @property
    def _turn_rule(self) -> messages.TurnRule | None:
        return turn_rule(self.settings.turn_detection, self.session.sample_rate)

    async def _flush(self, pause: int | None) -> None:
        if self.stream is None:
            self._submit(messages.Flushed(self._id, 0, 0))
            return
        try:
            await self.stream.flush(None if pause is None else max(0, pause - self._base))
        except StreamError as error:
            log.debug("session %s: %s", self._id, error)

    async def _finish(self) -> None:
        if self.stream is None:
            self._submit(messages.Closed(self._id, 0))
            return
        await self.stream.finish()

    async def _open(self, base: int, group: asyncio.TaskGroup) -> None:
        settings, spec = self.settings, self._engine.spec
        self._opened += 1
        name = f"{self._id}.{self._opened}"
        delay, options = delay_positions(settings.delay, spec), settings.engine_options()
        try:
            stream = await self._engine.open(name, delay_positions=delay, options=options, turns=self._turn_rule)
        except ValueError as error:
            raise OptionsRefused(str(error)) from error
        self.stream = stream
        self._fed = self._base = base
        self._known_flushes = self._strange_flushes = 0
        self._submit(EngineSwitched(base))
        self._listen_to(stream, group)

    def _listen_to(self, stream: StreamApi, group: asyncio.TaskGroup) -> None:
        said_all = self._said_all = asyncio.get_running_loop().create_future()
        generation = self._generation

        def hear(output: messages.Output) -> None:
            if isinstance(output, messages.Closed) and self.stream is stream:
                # At once: whoever goes on with the session from here on must not wait for this stream to say anything.
                self.stream = None
            try:
                if generation == self._generation:
                    self._hand_on(output)
            except Exception as error:
                # As if the runner had met it: the session ends, and nobody else's.
                fail(group, error)
            over = isinstance(output, FINAL) or generation != self._generation or self.session.closed
            if over and not said_all.done():
                said_all.set_result(None)

        stream.listen(hear)

    def _hand_on(self, output: messages.Output) -> None:
        assert not isinstance(output, NOT_FOR_SESSIONS), "they are the client's"
        if self._runs_out and isinstance(output, messages.Closed):
            # The end of this stream, but not of the session: the next one goes on from here.
            self._submit(EngineSwitched(self._fed))
        elif not (isinstance(output, messages.Flushed) and self._is_strange_flush()):
            self._submit(output)
        if self.session.closed:
            self.queue.wake()

    def _is_strange_flush(self) -> bool:
        """Whether a process before this one asked for it and the core does not know; the next one is known again."""
        if not self._strange_flushes:
            return False
        if self._known_flushes:
            self._known_flushes -= 1
            return False
        self._strange_flushes -= 1
        return True

    async def _leave(self) -> None:
        """Give up the stream: its outputs are muted already."""
        stream, self.stream, self._said_all = self.stream, None, None
        if stream is not None:
            await self._abort(stream)

    async def _abort(self, stream: StreamApi) -> None:
        try:
            await stream.abort()
        except EngineError as error:
            log.debug("session %s: %s", self._id, error)


# One session with its engine stream: carries out what the core decides. It outlives a socket if it can be resumed.
#
# The core is called synchronously from two sides, the client's messages and the engine's outputs; its effects are
# applied at once. Commands for the engine go through one queue in order, which holds at most `max_audio_in_flight_s`
# of audio; when it is full, `room()` makes the reader of the socket wait.


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
        self.handoff: SessionHandoff | None = None
        # Of a session that another process began: audio that its engine never got, and a new stream decided on.
        self._resent: ResentAudio | None = None
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
        if self._resent is not None and isinstance(event, Append | Gap):
            event = self._take_resent(event, self._resent)
        now = self.clock()
        effects = self.session.handle(event, now)
        for effect in effects:
            self._apply(effect)
        if self.handoff is None:
            return
        if self.resumable:
            self.handoff.note(event, now, effects)
        else:
            self.handoff.close()

    def tell(self, event: ServerEvent) -> None:
        """Something that the client is told beside what the core decides."""
        self.outbox.put(event)
        if self.handoff is not None and self.resumable:
            self.handoff.begin_anew()

    def adopt(self, settings: Settings) -> None:
        """Begin anew with a dialect's settings, without an answer to the client."""
        for effect in self.session.handle(Configure(settings), self.clock()):
            if not isinstance(effect, Send):
                self._apply(effect)
        if self.handoff is not None and self.resumable:
            self.handoff.begin_anew()

    async def inject(self, items: Sequence[messages.Item | None]) -> int:
        """Put items prepared elsewhere into the engines' caches; how many were taken."""
        return await self._engine.inject(items)

    def tick(self) -> None:
        if self.session.appended or self.session.phase is Phase.FINISHING:
            self.submit(Tick())
        if self.handoff is not None and self.resumable:
            self.handoff.review()

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
        if self.handoff is not None and self.resumable:
            self.handoff.wrote(self.clock())
            # Nobody is told what only this process knows.
            await self.handoff.left()
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

    def take_over(self, saved: SavedLive, adopted: AdoptedSession, core: Session, rest: Samples) -> None:
        """Go on with the stream of another process. What its engine never got is asked of the client again."""
        self.session = self.runner.session = core
        queue, fed = self.runner.queue, self.runner.load(saved, adopted)
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
            self._resent = ResentAudio(fed, core.appended, core.marks[adopted.flushes :])
            for command in self._resent.accept(rest)[0]:
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

    def _take_resent(self, event: Append | Gap, resent: ResentAudio) -> Append | Gap:
        """Feed what the core has counted before; returns what it has not."""
        commands, rest = resent.accept(event.samples)
        for command in commands:
            self._command(command)
        if resent.is_complete:
            self._resent = None
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
