"""Where a session can stand, and which events have an answer there. Data only; `Session` in `core` has the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from engine import messages
from realtime.errors import CloseCode, IllegalEvent
from realtime.session.boundaries import Boundaries, SavedBoundaries
from realtime.session.events import (
    Acknowledged,
    Append,
    Clear,
    Closing,
    Commit,
    Configure,
    Drain,
    Effect,
    End,
    Ended,
    EngineSwitched,
    Event,
    Feed,
    FeedGap,
    FinishEngine,
    FlushEngine,
    FollowTurns,
    Gap,
    Hangup,
    ItemFailed,
    Measured,
    Reopen,
    Send,
    ServerEvent,
    SessionUpdated,
    Tick,
)
from realtime.session.settings import INCLUDE_ACKS, Settings
from realtime.session.stall import SavedStall, StallGuard


class Phase(Enum):
    """Where a session stands."""

    # Audio and control events are answered as they come.
    ACTIVE = auto()
    # A commit waits until speech detection has seen all audio before it; later commits and clears queue behind it.
    COMMITTING = auto()
    # No more audio; the engine runs out.
    FINISHING = auto()
    CLOSED = auto()


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.ACTIVE: frozenset({Phase.COMMITTING, Phase.FINISHING, Phase.CLOSED}),
    Phase.COMMITTING: frozenset({Phase.ACTIVE, Phase.FINISHING, Phase.CLOSED}),
    Phase.FINISHING: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}

_ENGINE = {
    messages.Opened: "_ignore",
    messages.Text: "_text",
    messages.Speech: "_speech",
    messages.Flushed: "_flushed",
    messages.Closed: "_engine_closed",
    messages.Failed: "_engine_failed",
    messages.Refused: "_engine_failed",
    messages.Dead: "_engine_dead",
    EngineSwitched: "_engine_switched",
}

# Which method answers an event in a phase. What is not in the table is illegal there.
TABLE: dict[Phase, dict[type, str]] = {
    Phase.ACTIVE: {
        Configure: "_configure",
        Append: "_append",
        Gap: "_gap",
        Commit: "_commit",
        Clear: "_clear",
        End: "_end",
        Drain: "_drain",
        Tick: "_tick",
        **_ENGINE,
    },
    Phase.COMMITTING: {
        Configure: "_configure",
        Append: "_append",
        Gap: "_gap",
        Commit: "_defer",
        Clear: "_defer",
        End: "_end",
        Drain: "_drain",
        Tick: "_tick",
        **_ENGINE,
    },
    # What a client still sends while its session runs out has no effect.
    Phase.FINISHING: {
        **dict.fromkeys((Configure, Append, Gap, Commit, Clear, End, Drain), "_ignore"),
        Tick: "_tick",
        **_ENGINE,
    },
    Phase.CLOSED: {},
}


# Numbers of the configuration that the session core itself needs.


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Seconds, unless a name says otherwise."""

    stall_seconds: float = 8.0
    keep_seconds: float = 30.0
    ack_interval_seconds: float = 0.25
    # Audio is acknowledged when it came, or (a number) when the engine has heard it and so many samples beyond it.
    ack_margin_samples: int | None = None
    # Failures of engine streams in a row, without a word in between, that end the session.
    max_engine_failures: int = 3
    # A turn that lasts longer ends after a word, and the next one goes on.
    max_turn_seconds: float = 3600.0


# A session as a value: all that decides what it says next, as plain data that another process can go on with.
#
# Not part of it: the sample rate and the limits, which are the server's, and the sound that the stall guard keeps. Of
# that, only its length is saved: a stream that has to hear it again after a move hears silence there, and times stay
# right. Everything else in a value is bounded by what bounds a session: the longest turn, and the audio in flight.


@dataclass(frozen=True, slots=True)
class PendingFlush:
    """A flush that the engine has yet to answer, and the sample at which it stands."""

    sample: int
    pause: int | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A commit (or clear) that cannot be answered yet, and where in the audio it stands."""

    clears: bool
    event_id: str | None
    sample: int
    source_ms: float


@dataclass(frozen=True, slots=True)
class SavedSession:
    """Times are on the clock of the process that saved it."""

    settings: Settings
    phase: Phase
    boundaries: SavedBoundaries
    stall: SavedStall
    marks: list[PendingFlush]
    waiting: list[Waiting]
    held_speech: list[messages.Speech]
    engine_start: int
    acked_samples: int
    acked_at: float
    drain_deadline: float | None
    engine_failures: int


# The heart of the gateway: one session as a pure state machine, `handle(event, now) -> effects`.
#
# No I/O, no clock, no asyncio: the shell delivers client events and engine outputs in order and carries the effects
# out in order. One engine stream runs through the whole session; turns are cut inside it:
#
# - a turn that ends asks the engine to flush; text that arrives before the answer belongs to that turn; - where
# speech detection ends a turn, audio of the next one may already be with the engine, so words are told apart by their
# times; - turns speak one at a time: text of a later turn waits until every earlier turn is completed; - samples are
# counted, never timed: each appended sample is fed to the engine once.


class Session:
    """One client's session. See the module for the rules it keeps."""

    def __init__(
        self, settings: Settings, sample_rate: int, new_item_id: Callable[[], str], limits: SessionLimits | None = None
    ) -> None:
        self.settings = settings
        self.phase = Phase.ACTIVE
        self.sample_rate = sample_rate
        self.limits = limits or SessionLimits()
        self._effects: list[Effect] = []
        self._boundaries = Boundaries(
            settings, sample_rate, new_item_id, self._do, self._flush, self.limits.max_turn_seconds
        )
        self._turns, self._audio = self._boundaries.turns, self._boundaries.audio
        self._stall = StallGuard(sample_rate, self.limits.stall_seconds, self.limits.keep_seconds)
        self._marks: deque[PendingFlush] = deque()
        self._waiting: deque[Waiting] = deque()
        self._held_speech: list[messages.Speech] = []
        self._engine_start = self._engine_failures = 0
        self._acked_samples, self._acked_at = 0, 0.0
        self._drain_deadline: float | None = None

    # What the shell may ask

    @property
    def closed(self) -> bool:
        return self.phase is Phase.CLOSED

    @property
    def appended(self) -> int:
        """Samples fed to the engine so far."""
        return self._audio.appended

    @property
    def source_samples(self) -> int:
        """Samples of the client's own that they came from."""
        return self._audio.source_samples

    @property
    def source_ms(self) -> float:
        return self._audio.source_ms

    @property
    def heard_seconds(self) -> float:
        """How much of the audio the engine has listened to."""
        return self._audio.covered / self.sample_rate

    @property
    def marks(self) -> list[PendingFlush]:
        """Flushes that the engine has yet to answer."""
        return list(self._marks)

    @property
    def engine_start(self) -> int:
        """The session's sample that is the first of the engine stream."""
        return self._engine_start

    @property
    def speaking(self) -> bool:
        return self._boundaries.speaking

    @property
    def idle(self) -> bool:
        """Nothing is open and nothing is owed to the client."""
        return self._turns.current is None and not self._turns.ended and not self._waiting

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Answer one event. An event that is illegal in this phase raises and changes nothing."""
        handler = TABLE[self.phase].get(type(event))
        if handler is None:
            raise IllegalEvent(f"{type(event).__name__} has no answer in phase {self.phase.name}")
        self._effects = effects = list[Effect]()
        getattr(self, handler)(event, now)
        return effects

    def abandon(self) -> None:
        """The shell cannot go on: no event has an answer any more."""
        self.phase = Phase.CLOSED

    def check_integrity(self) -> None:
        """Recompute what must hold between the parts; for tests and for idle moments."""
        self._boundaries.check_integrity()
        assert self.phase is not Phase.COMMITTING or self._waiting
        marks = [mark.sample for mark in self._marks]
        assert all(mark <= self.appended for mark in marks)
        assert marks == sorted(marks)

    # A session as a value

    def save(self) -> SavedSession:
        """The session as it is now. It shares its turns with this one: encode it before anything else happens."""
        return SavedSession(
            settings=self.settings,
            phase=self.phase,
            boundaries=self._boundaries.save(),
            stall=self._stall.save(),
            marks=list(self._marks),
            waiting=list(self._waiting),
            held_speech=self._held_speech,
            engine_start=self._engine_start,
            acked_samples=self._acked_samples,
            acked_at=self._acked_at,
            drain_deadline=self._drain_deadline,
            engine_failures=self._engine_failures,
        )

    def load(self, saved: SavedSession, shift: float) -> None:
        """Go on where another session with these settings stopped, on a clock that shows `shift` more."""
        self.phase = saved.phase
        self._boundaries.load(saved.boundaries, shift)
        self._audio = self._boundaries.audio
        self._stall.load(saved.stall, shift)
        self._marks, self._waiting = deque(saved.marks), deque(saved.waiting)
        self._held_speech, self._engine_start = saved.held_speech, saved.engine_start
        self._acked_samples, self._acked_at = saved.acked_samples, saved.acked_at + shift
        self._drain_deadline = None if saved.drain_deadline is None else saved.drain_deadline + shift
        self._engine_failures = saved.engine_failures

    def rewind(self, samples: int) -> None:
        """The client sends its audio behind this sample again: it is counted as its own again, but not as ours."""
        self._audio.source_samples = self._source_at(samples)
        self._audio.source_ms = samples * 1000 / self.sample_rate

    def _source_at(self, samples: int) -> int:
        """How many of the client's own samples lie before this one of ours."""
        chosen = self.settings.format
        rate = self.sample_rate if chosen.container else chosen.rate
        behind_ms = self.source_ms - samples * 1000 / self.sample_rate
        return max(0, self.source_samples - round(behind_ms * rate / 1000))

    # Client events

    def _ignore(self, event: Event, now: float) -> None:
        """Nothing to do."""

    def _configure(self, event: Configure, now: float) -> None:
        old, new = self.settings, event.settings
        self.settings = new
        self._boundaries.configure(new)
        if self.appended and (new.engine_options(), new.delay) != (old.engine_options(), old.delay):
            self._effects.append(Reopen(new))
        elif self.appended and new.turn_detection != old.turn_detection:
            self._effects.append(FollowTurns(new))
        self._send(SessionUpdated(new))

    def _append(self, event: Append, now: float) -> None:
        if len(event.samples):
            self._stall.keep(self.appended, event.samples)
            self._effects.append(Feed(event.samples))
        self._advance(len(event.samples), event.source_samples, event.source_ms, now)

    def _gap(self, event: Gap, now: float) -> None:
        if event.samples:
            self._stall.keep(self.appended, event.samples)
            self._effects.append(FeedGap(event.samples))
        self._advance(event.samples, event.source_samples, event.source_ms, now)

    def _advance(self, samples: int, source_samples: int, source_ms: float, now: float) -> None:
        self._boundaries.advance(samples, source_samples, source_ms)
        self._acknowledge(now)

    def _commit(self, event: Commit, now: float) -> None:
        buffered_ms = self._boundaries.uncommitted_ms
        if buffered_ms < self.settings.minimum_commit_ms:
            self._boundaries.refuse_commit(buffered_ms, event.event_id)
        elif self._boundaries.may_commit:
            self._boundaries.commit(event.event_id, now)
        else:
            # Speech detection has yet to see the end of the buffer; who spoke until when is known at the flush.
            self._defer(event, now)
            self._move(Phase.COMMITTING)

    def _clear(self, event: Clear, now: float) -> None:
        self._boundaries.clear()

    def _defer(self, event: Commit | Clear, now: float) -> None:
        self._waiting.append(Waiting(isinstance(event, Clear), event.event_id, self.appended, self.source_ms))
        self._flush()

    def _end(self, event: End, now: float) -> None:
        """Turns that are open, or that speech detection still finds, are committed when the engine has run out."""
        self._move(Phase.FINISHING)
        self._effects.append(FinishEngine())

    def _drain(self, event: Drain, now: float) -> None:
        self._drain_deadline = event.deadline
        self._send(Closing("the server is restarting; connect again"))
        self._drain_if_idle()

    def _tick(self, event: Tick, now: float) -> None:
        self._acknowledge(now)
        if self.phase is Phase.FINISHING:
            return
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._end(End(), now)
        elif self._stall.stalled(now):
            self._effects.append(Measured("stalls", 1))
            self._reanchor(now)

    # Engine outputs

    def _text(self, event: messages.Text, now: float) -> None:
        if event.delta or event.words:
            self._stall.heard_text(event, self._engine_start, now)
            self._engine_failures = 0
            self._boundaries.tell(self._turns.route(event, self._engine_start, now), now)
            self._drain_if_idle()

    def _speech(self, event: messages.Speech, now: float) -> None:
        start, second = event.sample + self._engine_start, self._audio.covered // self.sample_rate
        for number, probability in enumerate(event.probabilities):
            frame_start = start + number * event.frame_samples
            if self._waiting and frame_start >= self._waiting[0].sample:
                # Audio behind a waiting commit must not open a turn before the commit is answered.
                rest = event.probabilities[number:]
                frame = event.sample + number * event.frame_samples
                self._held_speech.append(messages.Speech(event.stream, frame, event.frame_samples, rest))
                break
            self._frame(frame_start + event.frame_samples, probability, now)
        if self._audio.covered // self.sample_rate > second:  # a histogram is too dear for every frame
            self._effects.append(Measured("lag_seconds", (self.appended - self._audio.covered) / self.sample_rate))
        if not self.speaking:
            self._stall.quiet(self._audio.covered)
        self._boundaries.flush_ended()

    def _frame(self, end: int, probability: float, now: float) -> None:
        # A replay shows frames again, and a flush may round the last one up.
        end = min(end, self.appended)
        samples = end - self._audio.covered
        if samples > 0:
            self._stall.heard_speech(probability, samples, now)
            self._boundaries.hear(probability, samples, now)

    def _flushed(self, event: messages.Flushed, now: float) -> None:
        if not self._marks:
            raise IllegalEvent("the engine answered a flush that nobody asked for")
        mark = self._marks.popleft().sample
        self._boundaries.tell(self._turns.settle(), now)
        while self._waiting and self._waiting[0].sample <= mark:
            self._resolve(self._waiting.popleft(), now)
        self._boundaries.tell(self._turns.complete_until(mark), now)
        self._boundaries.settle(mark)
        if self.phase is Phase.COMMITTING and not self._waiting:
            self._move(Phase.ACTIVE)
        self._recall_speech(now)
        self._drain_if_idle()

    def _recall_speech(self, now: float) -> None:
        """Judge the speech that had to wait for a commit or clear before it."""
        held, self._held_speech = self._held_speech, []
        for speech in held:
            self._speech(speech, now)

    def _engine_closed(self, event: messages.Closed, now: float) -> None:
        self._boundaries.tell(self._turns.settle(), now)
        if self.phase is Phase.FINISHING:
            while self._waiting:
                self._resolve(self._waiting.popleft(), now)
            self._recall_speech(now)
            self._boundaries.end_open(now)
            self._boundaries.tell(self._turns.complete_until(self.appended), now)
            self._boundaries.settle(self.appended)
            self._send(Ended(self.appended))
            self._close_finished()

    def _engine_failed(self, event: messages.Failed | messages.Refused, now: float) -> None:
        """This stream failed: committed items fail with it, and the session goes on with a new stream."""
        self._engine_failures += 1
        self._effects.append(Measured("engine_failures", 1))
        self._fail_items("transcription_failed", event.message)
        if self.phase is Phase.FINISHING or self._engine_failures >= self.limits.max_engine_failures:
            self._close(CloseCode.INTERNAL, "transcription failed", "stream_failure")
        else:
            # The failed items have had their answer; the new stream hears what came after them.
            self._stall.forget_before(self._boundaries.boundary)
            self._reanchor(now)

    def _engine_dead(self, event: messages.Dead, now: float) -> None:
        self._fail_items("engine_unavailable", "the engine stopped")
        self._close(CloseCode.INTERNAL, "the engine stopped; connect again", "engine_stopped")

    def _engine_switched(self, event: EngineSwitched, now: float) -> None:
        self._boundaries.tell(self._turns.settle(), now)
        self._engine_start = event.base

    def _resolve(self, waiting: Waiting, now: float) -> None:
        """Answer a commit or clear: the engine has said everything about the audio before it."""
        if waiting.clears:
            self._boundaries.clear_late(waiting.sample, waiting.source_ms)
        else:
            self._boundaries.commit_late(waiting.sample, waiting.source_ms, waiting.event_id, now)

    # The engine and the way out

    def _flush(self, pause: int | None = None) -> None:
        # A stream that is being finished says everything anyway.
        if self.phase is not Phase.FINISHING:
            self._marks.append(PendingFlush(self.appended, pause))
            self._effects.append(FlushEngine(pause))

    def _reanchor(self, now: float) -> None:
        """Go on with a new stream; what the old one still owed is asked of the new one."""
        self._effects.append(self._stall.reanchor(self.appended, now))
        self._marks.clear()
        if self._turns.ended or self._waiting:
            self._flush()

    def _fail_items(self, code: str, message: str) -> None:
        for turn in self._turns.fail_ended():
            self._send(ItemFailed(turn.item_id, code, message))

    def _acknowledge(self, now: float) -> None:
        if now - self._acked_at < self.limits.ack_interval_seconds or not self.settings.wants(INCLUDE_ACKS):
            return
        margin = self.limits.ack_margin_samples
        safe = self.source_samples if margin is None else self._source_at(max(0, self._audio.covered - margin))
        if safe > self._acked_samples:
            self._acked_samples, self._acked_at = safe, now
            self._send(Acknowledged(safe))

    def _drain_if_idle(self) -> None:
        if self._drain_deadline is not None and self.phase is Phase.ACTIVE and self.idle:
            self._close_finished()

    def _close_finished(self) -> None:
        if self._drain_deadline is None:
            self._close(CloseCode.NORMAL, "finished", "finished")
        else:
            self._close(CloseCode.RESTART, "the server is restarting", "drain")

    def _close(self, code: CloseCode, reason: str, cause: str) -> None:
        self._move(Phase.CLOSED)
        self._effects.append(Hangup(code, reason, cause))

    def _move(self, to: Phase) -> None:
        if to not in MOVES[self.phase]:
            raise IllegalEvent(f"a session cannot go from {self.phase.name} to {to.name}")
        self.phase = to

    def _send(self, event: ServerEvent) -> None:
        self._effects.append(Send(event))

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)
