"""One session on asyncio: `LiveSession` connects the session core with its client and with its engine stream.

Events from the client (`inbox.py`) and from the engine go to the core, and the effects that the core returns are
applied at once. Events for the client go into the outbox.

Commands for the engine (audio, silence, flushes, changes of options) go through one ordered queue, `EngineQueue`.
`StreamRunner` executes them, and opens and replaces the engine stream. The queue holds at most `max_audio_in_flight_s`
of audio. When it is full, `LiveSession.wait_for_room` makes the reader of the socket wait, so TCP slows down a client
that sends faster than the engine takes audio.

A resumable session outlives its socket. `ResentAudio` is for a session whose gateway died: when the client sends audio
again that the engine never received, `ResentAudio` passes it to the engine without counting it twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine import messages
from engine.client.handoff import AdoptedSession
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineError, StreamError
from engine.spec import ModelSpec
from realtime.dialects.base import Dialect, encode_json
from realtime.errors import ClientFault, CloseCode, OptionsRefused
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.serving.handoff import SavedLive, SessionHandoff
from realtime.serving.metrics import Metrics
from realtime.serving.outbox import Outbox, SentLog
from realtime.serving.publishing import SessionPublication
from realtime.serving.quota import SHARE_S
from realtime.serving.webhooks import SessionWebhooks
from realtime.session.boundaries import turn_rule
from realtime.session.core import PendingFlush, Session, SessionPhase
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

log = logging.getLogger("tickertape.session")


# The engine stream of a session


EngineCommand = Feed | FeedGap | FlushEngine | FinishEngine | Reanchor | Reopen | FollowTurns


class EngineQueue:
    """Commands with one consumer; `put` never waits. Audio counts as queued until the engine stream has accepted it."""

    def __init__(self, max_samples: int, max_commands: int) -> None:
        # Samples that are queued, or being fed.
        self.samples = 0
        self._max_samples = max_samples
        self._max_commands = max_commands
        self._commands: deque[EngineCommand] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def full(self) -> bool:
        return self.samples > self._max_samples or len(self._commands) > self._max_commands

    def put(self, command: EngineCommand) -> None:
        if isinstance(command, Feed):
            self.samples += len(command.samples)
        elif isinstance(command, FeedGap):
            # Declared silence counts as audio: a model may have to process every position of it.
            self.samples += command.samples
        self._commands.append(command)
        self._wake.set()

    def replace_all(self, reanchor: Reanchor) -> None:
        """Replace all queued commands by one that begins a new stream and contains their audio. The core sends the
        flushes again after it."""
        for command in self._commands:
            if isinstance(command, Feed | FeedGap):
                self.consumed(len(command.samples) if isinstance(command, Feed) else command.samples)
        self._commands.clear()
        self.put(reanchor)

    def pop(self) -> EngineCommand:
        return self._commands.popleft()

    @property
    def reanchor(self) -> Reanchor | None:
        """The queued command to begin a new stream, if any."""
        return next((command for command in self._commands if isinstance(command, Reanchor)), None)

    @property
    def reopen(self) -> Reopen | None:
        """The queued command to change the stream's options, if any."""
        return next((command for command in self._commands if isinstance(command, Reopen)), None)

    def consumed(self, samples: int) -> None:
        """The engine stream has accepted this number of samples."""
        self.samples -= samples

    def clear(self) -> None:
        self._commands.clear()
        self.samples = 0
        self._room.set()

    # Waiting

    def wake(self) -> None:
        """Wake the consumer although nothing was put."""
        self._wake.set()

    def make_room(self) -> None:
        """Wake the callers of `wait_for_room`."""
        self._room.set()

    def mark_idle(self) -> None:
        """Called by the consumer when it has emptied the queue: the next `put` wakes it."""
        self._wake.clear()

    async def wait(self) -> None:
        """Wait until something was put since the last `mark_idle`."""
        await self._wake.wait()

    async def wait_for_room(self) -> None:
        """Wait for the next call of `make_room`."""
        self._room.clear()
        await self._room.wait()


def fail(group: asyncio.TaskGroup, error: Exception) -> None:
    """End the group as if one of its tasks had raised this error; the caller itself continues."""
    failing = _raise(error)
    try:
        group.create_task(failing)
    except RuntimeError:
        failing.close()  # the group is ending already


async def _raise(error: Exception) -> NoReturn:
    raise error


# The delay names of the OpenAI API in milliseconds. "medium" is the model's own default.
DELAY_MS = {"minimal": 160, "low": 320, "high": 960, "xhigh": 2400}


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """Limits for the memory of one session."""

    # Seconds of audio in the engine queue.
    max_audio_in_flight_s: float = 60.0
    max_commands: int = 4096
    max_outbox_events: int = 1024
    max_outbox_bytes: int = 2_000_000
    max_log_events: int = 4096
    max_log_bytes: int = 4 * 1024 * 1024
    # Longest message that is not audio, in bytes.
    max_control_bytes: int = 64 * 1024


def delay_positions(delay: str | int | None, spec: ModelSpec) -> int | None:
    """A client's delay in positions of the model, rounded up; None means the model's default."""
    milliseconds = DELAY_MS.get(delay) if isinstance(delay, str) else delay
    if milliseconds is None or spec.max_delay_positions == 0:
        return None
    positions = -(-milliseconds * spec.sample_rate // (1000 * spec.samples_per_position))
    return max(1, min(positions, spec.max_delay_positions))


# Outputs after which a stream sends nothing more.
FINAL = (messages.Closed, messages.Failed, messages.Dead)
NOT_FOR_SESSIONS = (messages.StreamState, messages.SessionOutput)


class StreamRunner:
    """Executes a session's commands on its engine stream, one stream at a time. Outputs are passed to `submit`."""

    def __init__(
        self, session_id: str, session: Session, engine: EngineApi, limits: LiveLimits, submit: Callable[[Event], None]
    ) -> None:
        self.session = session
        self.queue = EngineQueue(int(limits.max_audio_in_flight_s * session.sample_rate), limits.max_commands)
        self.stream: StreamApi | None = None
        # The options for the next stream. Changes come as a Reopen command, in order with the audio.
        self.settings = session.settings
        self._id = session_id
        self._engine = engine
        self._submit = submit
        # Done at the stream's last output, or when the stream is abandoned.
        self._outputs_done: asyncio.Future[None] | None = None
        # The stream is to finish, and a stream with other options follows it.
        self._is_finishing = False
        # All commands are executed, and `work` waits for the next one.
        self.is_idle = False
        # Grows when a stream is abandoned, so that its late outputs do not reach the core.
        self._generation = 0
        # Number of streams opened so far; part of the stream's name.
        self._opened = 0
        # Session samples: where the stream began, and up to where audio was fed.
        self._base, self._fed = 0, 0
        # Of an adopted stream: outstanding flushes that the core knows, and later ones that it does not know.
        self._known_flushes, self._unknown_flushes = 0, 0

    @property
    def full(self) -> bool:
        return self.queue.full and not self.session.closed

    @property
    def engine_stream(self) -> EngineStream | None:
        return self.stream if isinstance(self.stream, EngineStream) else None

    @property
    def behind_s(self) -> float:
        """Seconds of audio that the engine has not computed."""
        return 0.0 if self.engine_stream is None else self.engine_stream.behind_s

    def restart_stream(self, reanchor: Reanchor) -> None:
        """Abandon the current stream and begin a new one with the session's current options."""
        self._generation += 1
        self.settings, self._is_finishing = self.session.settings, False
        if self._outputs_done is not None and not self._outputs_done.done():
            self._outputs_done.set_result(None)
        self.queue.replace_all(reanchor)

    def put(self, command: EngineCommand) -> None:
        """Queue a command. Audio is fed at once if the queue is empty and the stream has room."""
        if not (self.is_idle and isinstance(command, Feed) and not self.queue and self._feed_now(command.samples)):
            self.queue.put(command)

    def save(self, last: bool) -> dict[str, Any]:
        """The fields of `SavedLive` about the stream; with `last`, including audio not sent to the engine yet."""
        reanchor, stream = self.queue.reanchor, self.engine_stream
        return {
            "engine_settings": self.settings,
            "streams_opened": self._opened,
            "fed": self._fed,
            "reanchor": None if reanchor is None else (reanchor.base, self.session.appended - reanchor.base),
            "reopen": self._is_finishing or self.queue.reopen is not None,
            "rest": stream.rest().tobytes() if last and stream is not None else b"",
            "runs_out": self._is_finishing,
        }

    def load(self, saved: SavedLive, adopted: AdoptedSession) -> int:
        """Continue with an adopted stream. Returns the session sample from which audio has to be fed."""
        self.settings, self._opened = saved.engine_settings, saved.streams_opened
        self.stream, self._is_finishing = adopted.stream, saved.runs_out
        known = len(self.session.marks)
        self._known_flushes, self._unknown_flushes = known, max(0, adopted.flushes - known)
        self._base, self._fed = self.session.engine_start, saved.fed
        if adopted.stream is not None:
            self._fed = self.session.engine_start + adopted.goes_on_at
        return self._fed

    def release(self) -> None:
        """Leave the stream running in the engine: another process adopts it."""
        stream, self.stream = self.engine_stream, None
        if stream is not None:
            stream.release()

    def abort_everywhere(self) -> None:
        """End the stream if an engine runs it for this process. Another process owns the session now; engines ignore
        this for a stream that was adopted."""
        stream, self.stream = self.engine_stream, None
        if stream is not None:
            stream.abort_everywhere()

    async def close(self) -> None:
        """End the stream, if there is one, and empty the queue."""
        stream, self.stream = self.stream, None
        if stream is not None:
            await self._abort(stream)
        self.queue.clear()

    async def work(self, group: asyncio.TaskGroup) -> None:
        """Execute commands until the session is closed. Errors from the stream's listener end the group."""
        if self.stream is not None and self.queue.reanchor is None:
            # An adopted stream.
            self._subscribe(self.stream, group)
        clock = asyncio.get_running_loop().time
        while not self.session.closed:
            began = clock()
            while self.queue and not self.session.closed:
                await self._execute(self.queue.pop(), group)
                if not self.full:
                    self.queue.make_room()
                if clock() - began >= SHARE_S:
                    # The queue may hold a minute of audio, and feeding a stream that has room never yields by itself.
                    await asyncio.sleep(0)
                    began = clock()
            self.queue.mark_idle()
            if not self.queue and not self.session.closed:
                self.is_idle = True
                try:
                    await self.queue.wait()
                finally:
                    self.is_idle = False

    async def _execute(self, command: EngineCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Reanchor(base, replay):
                await self._abort_current()
                await self._open(base, group)
                for audio in replay:
                    await self._feed(audio, group)
            case Reopen(settings):
                self.settings = settings
                if self.stream is not None and self._outputs_done is not None:
                    self._is_finishing = True
                    await self.stream.finish()
                    await self._outputs_done
                    await self._abort_current()
                self._is_finishing = False
            case Feed(samples):
                try:
                    await self._feed(samples, group)
                finally:
                    self.queue.consumed(len(samples))
            case FeedGap(samples):
                try:
                    await self._feed(samples, group)
                finally:
                    self.queue.consumed(samples)
            case FlushEngine(pause, ends_speech, turn_over):
                await self._flush(pause, ends_speech, turn_over)
            case FollowTurns(settings):
                self.settings = settings
                if self.stream is not None:
                    self.stream.change_turns(self._turn_rule)
            case FinishEngine():
                await self._finish()

    async def _feed(self, audio: Samples | int, group: asyncio.TaskGroup) -> None:
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
            # The stream's last output reports the same error to the core, which answers with a new stream.
            log.debug("session %s: %s", self._id, error)

    def _feed_now(self, samples: Samples) -> bool:
        if self.stream is None or not self.stream.feed_now(samples):
            return False
        self._fed += len(samples)
        return True

    @property
    def _turn_rule(self) -> messages.TurnRule | None:
        return turn_rule(self.settings.turn_detection, self.session.sample_rate, self.session.limits.has_turn_detector)

    async def _flush(self, pause: int | None, ends_speech: bool, turn_over: bool) -> None:
        if self.stream is None:
            self._submit(messages.Flushed(self._id, 0, 0))
            return
        try:
            await self.stream.flush(None if pause is None else max(0, pause - self._base), ends_speech, turn_over)
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
        heard = self.session.speech_track.sample
        try:
            stream = await self._engine.open(
                name,
                delay_positions=delay,
                options=options,
                turns=self._turn_rule,
                track=self.session.speech_track.shifted(-base) if heard else None,
                heard_until=max(0, heard - base),
                labels=self.session.label_state(base) if settings.labels_speakers else None,
            )
        except ValueError as error:
            raise OptionsRefused(str(error)) from error
        self.stream = stream
        self._fed = self._base = base
        self._known_flushes = self._unknown_flushes = 0
        self._submit(EngineSwitched(base))
        self._subscribe(stream, group)

    def _subscribe(self, stream: StreamApi, group: asyncio.TaskGroup) -> None:
        outputs_done = self._outputs_done = asyncio.get_running_loop().create_future()
        generation = self._generation

        def on_output(output: messages.Output) -> None:
            if isinstance(output, messages.Closed) and self.stream is stream:
                # Before the output is handled: if the session is saved there, its value must not contain this stream.
                self.stream = None
            try:
                if generation == self._generation:
                    self._handle_output(output)
            except Exception as error:
                # Same result as an error in the runner: this session ends, others are not affected.
                fail(group, error)
            over = isinstance(output, FINAL) or generation != self._generation or self.session.closed
            if over and not outputs_done.done():
                outputs_done.set_result(None)

        stream.subscribe(on_output)

    def _handle_output(self, output: messages.Output) -> None:
        assert not isinstance(output, NOT_FOR_SESSIONS), "handled by the engine client"
        if self._is_finishing and isinstance(output, messages.Closed):
            # The end of this stream and not of the session: the next stream continues from here.
            self._submit(EngineSwitched(self._fed))
        elif not (isinstance(output, messages.Flushed) and self._is_unknown_flush()):
            self._submit(output)
        if self.session.closed:
            self.queue.wake()

    def _is_unknown_flush(self) -> bool:
        """Whether this answer is for a flush of the previous owner that the core does not know. Answers come in order:
        first those to flushes that the core knows, then the unknown ones."""
        if not self._unknown_flushes:
            return False
        if self._known_flushes:
            self._known_flushes -= 1
            return False
        self._unknown_flushes -= 1
        return True

    async def _abort_current(self) -> None:
        """Abort the stream; its outputs are ignored already."""
        stream, self.stream, self._outputs_done = self.stream, None, None
        if stream is not None:
            await self._abort(stream)

    async def _abort(self, stream: StreamApi) -> None:
        try:
            await stream.abort()
        except EngineError as error:
            log.debug("session %s: %s", self._id, error)


# The session


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
            self.submit(Tick(self.runner.behind_s))

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
            self.submit(Tick(self.runner.behind_s))
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
