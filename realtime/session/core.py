"""The session core: one session as a pure state machine, `Session.handle(event, now) -> effects`.

It has no I/O, no clock and no asyncio. `realtime/serving/live_session.py` passes client events and engine outputs in
order, and applies the effects in order; `events.py` defines both. `Session` owns the phase, the pending flushes and the
waiting commits; turn boundaries are in `boundaries.py`, the text of turns in `turns.py`. Usually one engine stream
serves the whole session, and turns are parts of it:

- At the end of a turn the engine is flushed; text that arrives before the answer belongs to that turn.
- If speech detection has ended a turn, the engine may already have audio of the next one, so words are assigned to
  turns by their times.
- Turns send text one at a time: text of a later turn is held until every earlier turn is completed.
- Positions are counts of samples, not times of arrival. Each appended sample is fed to the engine once, except after a
  stall.

`StallGuard` detects that the engine reports speech but sends no text. It owns the audio since the last text, up to a
limit. When the engine stalls, the session abandons its engine stream and opens a new one, which gets this audio again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from msgspec.structs import replace

from engine import messages
from realtime.errors import CloseCode, IllegalEvent
from realtime.session.boundaries import Boundaries, SavedBoundaries, turn_rule
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
    Reanchor,
    Reopen,
    Samples,
    Send,
    ServerEvent,
    SessionUpdated,
    Tick,
)
from realtime.session.settings import INCLUDE_ACKS, Settings
from realtime.session.words import timed_word

# If this much audio has no speech probabilities yet, or is not computed yet, the engine is late or being replaced:
# missing text is no stall. An engine that is late by more than the second value may never compute it.
BEHIND_SECONDS, MAX_BEHIND_SECONDS = 3.0, 120.0


class SessionPhase(Enum):
    """The states of a session."""

    # Audio and control events are handled at once.
    ACTIVE = auto()
    # A commit waits for the speech probabilities of all audio before it; later commits and clears wait behind it.
    COMMITTING = auto()
    # No more audio comes; the engine stream finishes its text.
    FINISHING = auto()
    CLOSED = auto()


# Allowed transitions.
TRANSITIONS: dict[SessionPhase, frozenset[SessionPhase]] = {
    SessionPhase.ACTIVE: frozenset({SessionPhase.COMMITTING, SessionPhase.FINISHING, SessionPhase.CLOSED}),
    SessionPhase.COMMITTING: frozenset({SessionPhase.ACTIVE, SessionPhase.FINISHING, SessionPhase.CLOSED}),
    SessionPhase.FINISHING: frozenset({SessionPhase.CLOSED}),
    SessionPhase.CLOSED: frozenset(),
}

# The methods that handle the engine's outputs, in every phase except CLOSED.
_ENGINE_HANDLERS = {
    messages.Opened: "_ignore",
    messages.Text: "_text",
    messages.Speech: "_speech",
    messages.Labels: "_labels",
    messages.Flushed: "_flushed",
    messages.Revised: "_revised",
    messages.Closed: "_engine_closed",
    messages.Failed: "_engine_failed",
    messages.Refused: "_engine_failed",
    messages.Dead: "_engine_dead",
    EngineSwitched: "_engine_switched",
}

# The method that handles an event in a phase. An event that is not in the table is illegal in that phase.
HANDLERS: dict[SessionPhase, dict[type, str]] = {
    SessionPhase.ACTIVE: {
        Configure: "_configure",
        Append: "_append",
        Gap: "_gap",
        Commit: "_commit",
        Clear: "_clear",
        End: "_end",
        Drain: "_drain",
        Tick: "_tick",
        **_ENGINE_HANDLERS,
    },
    SessionPhase.COMMITTING: {
        Configure: "_configure",
        Append: "_append",
        Gap: "_gap",
        Commit: "_defer",
        Clear: "_defer",
        End: "_end",
        Drain: "_drain",
        Tick: "_tick",
        **_ENGINE_HANDLERS,
    },
    # Client events have no effect while the session finishes.
    SessionPhase.FINISHING: {
        **dict.fromkeys((Configure, Append, Gap, Commit, Clear, End, Drain), "_ignore"),
        Tick: "_tick",
        **_ENGINE_HANDLERS,
    },
    SessionPhase.CLOSED: {},
}


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The part of the configuration that the session core needs."""

    # Seconds of speech without text that count as a stall; 0: never.
    stall_seconds: float = 8.0
    # Seconds of audio kept for the replay after a stall.
    keep_seconds: float = 30.0
    # Shortest time between two acknowledgements.
    ack_interval_seconds: float = 0.25
    # None: audio is acknowledged when it arrives. Otherwise it is acknowledged when the engine has reported speech
    # probabilities of it and of this many samples after it.
    ack_margin_samples: int | None = None
    # Consecutive failures of engine streams, without text between them, that end the session.
    max_engine_failures: int = 3
    # A longer turn is ended after a word, and the next turn continues.
    max_turn_seconds: float = 3600.0
    # Whether the engine has a turn detector, which answers in the pauses of semantic turn detection.
    has_turn_detector: bool = False


@dataclass(frozen=True, slots=True)
class PendingFlush:
    """A flush that the engine has not answered."""

    # The end of the audio at the time of the flush.
    sample: int
    # The sample up to which text is wanted, if the flush was asked for in a pause.
    pause: int | None
    # Whether the client itself ended the turn there.
    ends_speech: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A commit or clear that cannot be answered yet."""

    # True: a clear; False: a commit.
    clears: bool
    event_id: str | None
    # The end of the audio when it arrived: a sample at the engine's rate, and milliseconds of the client's audio.
    sample: int
    source_ms: float


@dataclass(frozen=True, slots=True)
class SavedSession:
    """The saved state of a session: all that decides its next effects, so that another process can continue it.

    The sample rate and the limits are the server's and not part of it. Of the audio that the stall guard keeps, only
    the length is saved: a replay after a handoff has silence there, so that times stay right. The size is bounded by
    the longest turn and the audio without answers. Times are on the clock of the process that saved it.
    """

    settings: Settings
    phase: SessionPhase
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


class Session:
    """One client's session; the rules are in the module docstring."""

    def __init__(
        self, settings: Settings, sample_rate: int, new_item_id: Callable[[], str], limits: SessionLimits | None = None
    ) -> None:
        self.settings = settings
        self.phase = SessionPhase.ACTIVE
        self.sample_rate = sample_rate
        self.limits = limits or SessionLimits()
        self._effects: list[Effect] = []
        self._boundaries = Boundaries(
            settings,
            sample_rate,
            new_item_id,
            self._add_effect,
            self._flush,
            self.limits.max_turn_seconds,
            self.limits.has_turn_detector,
        )
        self.turns, self._audio = self._boundaries.turns, self._boundaries.audio
        self.stall = StallGuard(sample_rate, self.limits.stall_seconds, self.limits.keep_seconds)
        # Flushes that the engine has not answered, in order.
        self._marks: deque[PendingFlush] = deque()
        self._waiting: deque[Waiting] = deque()
        # Speech reports after the first waiting commit or clear, in samples of the session.
        self._held_speech: list[messages.Speech] = []
        # The session sample at which the engine stream began.
        self._engine_start = 0
        # Consecutive failures of engine streams without text between them.
        self._engine_failures = 0
        # Source samples in the last acknowledgement, and its time.
        self._acked_samples, self._acked_at = 0, 0.0
        # When the session closes at the latest, once the server drains.
        self._drain_deadline: float | None = None

    @property
    def closed(self) -> bool:
        return self.phase is SessionPhase.CLOSED

    @property
    def appended(self) -> int:
        """Samples fed to the engine so far."""
        return self._audio.appended

    @property
    def source_samples(self) -> int:
        """Samples received, at the client's rate."""
        return self._audio.source_samples

    @property
    def source_ms(self) -> float:
        return self._audio.source_ms

    @property
    def covered_seconds(self) -> float:
        """Seconds of audio with speech probabilities from the engine."""
        return self._audio.covered / self.sample_rate

    @property
    def marks(self) -> list[PendingFlush]:
        """Flushes that the engine has not answered."""
        return list(self._marks)

    @property
    def engine_start(self) -> int:
        """The session sample at which the engine stream began."""
        return self._engine_start

    @property
    def speech_track(self) -> messages.TrackState:
        """The speech track after the audio that has speech probabilities, for a new engine stream."""
        return self._boundaries.track

    @property
    def turn_rule(self) -> messages.TurnRule | None:
        """The rule for the engine's speech track."""
        return turn_rule(self.settings.turn_detection, self.sample_rate, self.limits.has_turn_detector)

    @property
    def speaking(self) -> bool:
        return self._boundaries.speaking

    @property
    def idle(self) -> bool:
        """Whether no turn is open, and no event for the client is outstanding."""
        turns = self.turns
        return turns.current is None and not turns.ended and not turns.finishing and not self._waiting

    @property
    def final_due(self) -> float | None:
        """When the final of a turn stops waiting for labels or a revision; None if none waits."""
        return self.turns.final_due

    def label_state(self, base: int) -> tuple[messages.Saved, int] | None:
        """The engine's last state of the speaker labels, and the sample of its stream that is session sample `base`.

        For a new engine stream that begins at session sample `base`.
        """
        speakers = self.turns.speakers
        return None if speakers is None or speakers.state is None else (speakers.state, base - speakers.state_base)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event; returns its effects. Raises IllegalEvent, with nothing changed, if the phase forbids it."""
        handler = HANDLERS[self.phase].get(type(event))
        if handler is None:
            raise IllegalEvent(f"{type(event).__name__} is not allowed in phase {self.phase.name}")
        self._effects = effects = list[Effect]()
        getattr(self, handler)(event, now)
        if self.turns.finishing and not self.closed:
            self._boundaries.send_events(self.turns.finish(now), now)
            self._drain_if_idle()
        return effects

    def close_without_effects(self) -> None:
        """Close the session without effects: every later event is illegal."""
        self.phase = SessionPhase.CLOSED

    def check_integrity(self) -> None:
        """Assert the invariants between the parts; for tests."""
        self._boundaries.check_integrity()
        assert self.phase is not SessionPhase.COMMITTING or self._waiting
        marks = [mark.sample for mark in self._marks]
        assert all(mark <= self.appended for mark in marks)
        assert marks == sorted(marks)

    # Saving and loading

    def save(self) -> SavedSession:
        """The saved state. It shares mutable turns with the session: encode it before the next event."""
        return SavedSession(
            settings=self.settings,
            phase=self.phase,
            boundaries=self._boundaries.save(),
            stall=self.stall.save(),
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
        """Continue from a saved session with the same settings; `shift` is our clock minus its clock."""
        self.phase = saved.phase
        self._boundaries.load(saved.boundaries, shift)
        self._audio = self._boundaries.audio
        self.stall.load(saved.stall, shift)
        self._marks, self._waiting = deque(saved.marks), deque(saved.waiting)
        self._held_speech, self._engine_start = saved.held_speech, saved.engine_start
        self._acked_samples, self._acked_at = saved.acked_samples, saved.acked_at + shift
        self._drain_deadline = None if saved.drain_deadline is None else saved.drain_deadline + shift
        self._engine_failures = saved.engine_failures

    def rewind(self, samples: int) -> None:
        """The client will resend the audio after this sample: set the source counts back, not the engine's counts."""
        self._audio.source_samples = self._source_at(samples)
        self._audio.source_ms = samples * 1000 / self.sample_rate

    def _source_at(self, samples: int) -> int:
        """The number of source samples before this sample at the engine's rate."""
        chosen = self.settings.format
        rate = self.sample_rate if chosen.container else chosen.rate
        later_ms = self.source_ms - samples * 1000 / self.sample_rate
        return max(0, self.source_samples - round(later_ms * rate / 1000))

    # Client events

    def _ignore(self, event: Event, now: float) -> None:
        """The event has no effect."""

    def _configure(self, event: Configure, now: float) -> None:
        old, new = self.settings, event.settings
        self.settings = new
        self._boundaries.configure(new, now)
        if self.appended and (new.engine_options(), new.delay) != (old.engine_options(), old.delay):
            self._effects.append(Reopen(new))
        elif self.appended and new.turn_detection != old.turn_detection:
            self._effects.append(FollowTurns(new))
        self._send(SessionUpdated(new))

    def _append(self, event: Append, now: float) -> None:
        if len(event.samples):
            self.stall.keep(self.appended, event.samples)
            self._effects.append(Feed(event.samples))
        self._advance(len(event.samples), event.source_samples, event.source_ms, now)

    def _gap(self, event: Gap, now: float) -> None:
        if event.samples:
            self.stall.keep(self.appended, event.samples)
            self._effects.append(FeedGap(event.samples))
        self._advance(event.samples, event.source_samples, event.source_ms, now)

    def _advance(self, samples: int, source_samples: int, source_ms: float, now: float) -> None:
        self._boundaries.advance(samples, source_samples, source_ms)
        self.turns.note_audio(now)
        self._acknowledge(now)

    def _commit(self, event: Commit, now: float) -> None:
        buffered_ms = self._boundaries.uncommitted_ms
        if buffered_ms < self.settings.minimum_commit_ms:
            self._boundaries.refuse_commit(buffered_ms, event.event_id)
        elif self._boundaries.can_commit_now:
            self._boundaries.commit(event.event_id, now)
        else:
            # Speech probabilities of the last audio are missing; they have arrived when the flush is answered.
            self._defer(event, now)
            self._change_phase(SessionPhase.COMMITTING)

    def _clear(self, event: Clear, now: float) -> None:
        self._boundaries.clear()

    def _defer(self, event: Commit | Clear, now: float) -> None:
        self._waiting.append(Waiting(isinstance(event, Clear), event.event_id, self.appended, self.source_ms))
        self._flush(None, True)

    def _end(self, event: End, now: float) -> None:
        """Finish the engine stream. Open turns, and turns found in the rest of the audio, are committed when it has
        closed."""
        self._change_phase(SessionPhase.FINISHING)
        self._effects.append(FinishEngine())

    def _drain(self, event: Drain, now: float) -> None:
        self._drain_deadline = event.deadline
        self._send(Closing("the server is restarting; connect again"))
        self._drain_if_idle()

    def _tick(self, event: Tick, now: float) -> None:
        self._acknowledge(now)
        if self.phase is SessionPhase.FINISHING:
            return
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._end(End(), now)
        elif (
            self.appended - self._audio.covered > BEHIND_SECONDS * self.sample_rate
            or BEHIND_SECONDS < event.behind_s <= MAX_BEHIND_SECONDS
        ):
            self.stall.postpone(now)
        elif self.stall.is_stalled(now):
            self._effects.append(Measured("stalls", 1))
            self._reanchor(now)

    # Engine outputs

    def _text(self, event: messages.Text, now: float) -> None:
        if event.delta or event.words:
            self.stall.add_text(event, self._engine_start, now)
            self._engine_failures = 0
            self._boundaries.send_events(self.turns.route(event, self._engine_start, now), now)
            self._drain_if_idle()

    def _speech(self, event: messages.Speech, now: float) -> None:
        if self._engine_start:
            event = _copy(event)
            event.shift(self._engine_start)
        self._handle_speech(event, now)

    def _handle_speech(self, speech: messages.Speech, now: float) -> None:
        """Handle a report of the speech track, in samples of the session."""
        if self._waiting and speech.end > self._waiting[0].sample:
            # Audio after a waiting commit must not open a turn before the commit is answered.
            speech, rest = _split_speech(speech, self._waiting[0].sample, self.speech_track)
            self._held_speech.append(rest)
        second = self._audio.covered // self.sample_rate
        # A replay repeats frames, and the last frame before a flush may reach beyond the audio.
        if min(speech.end, self.appended) > self._audio.covered:
            self.stall.add_speech(speech.spoken, now)
            self._boundaries.on_speech(speech, now)
        if self._audio.covered // self.sample_rate > second:  # once per second: a histogram is too slow for each frame
            self._effects.append(Measured("lag_seconds", (self.appended - self._audio.covered) / self.sample_rate))
        if not self.speaking:
            self.stall.add_silence(self._audio.covered)
        self._boundaries.flush_ended()

    def _labels(self, event: messages.Labels, now: float) -> None:
        if self.turns.speakers is not None:
            self.turns.speakers.add(event, self._engine_start)
            self._boundaries.send_events(self.turns.newly_labelled(now), now)

    def _flushed(self, event: messages.Flushed, now: float) -> None:
        if not self._marks:
            raise IllegalEvent("the engine answered a flush that was not requested")
        mark = self._marks.popleft().sample
        if event.is_revised:
            self.turns.await_revision(event.sample + self._engine_start, now)
        self._boundaries.send_events(self.turns.settle(now), now)
        while self._waiting and self._waiting[0].sample <= mark:
            self._answer(self._waiting.popleft(), now)
        self._boundaries.send_events(self.turns.complete_until(mark, now), now)
        self._boundaries.settle(mark)
        if self.phase is SessionPhase.COMMITTING and not self._waiting:
            self._change_phase(SessionPhase.ACTIVE)
        self._handle_held_speech(now)
        self._drain_if_idle()

    def _revised(self, event: messages.Revised, now: float) -> None:
        words = None
        if event.words is not None:
            words = [timed_word(word, self._engine_start) for word in event.words]
        self.turns.revise(event.start + self._engine_start, event.end + self._engine_start, words)

    def _handle_held_speech(self, now: float) -> None:
        """Handle the speech probabilities that waited for a commit or clear."""
        held, self._held_speech = self._held_speech, []
        for speech in held:
            self._handle_speech(speech, now)

    def _engine_closed(self, event: messages.Closed, now: float) -> None:
        self._boundaries.send_events(self.turns.settle(now), now)
        if self.phase is SessionPhase.FINISHING:
            while self._waiting:
                self._answer(self._waiting.popleft(), now)
            self._handle_held_speech(now)
            self._boundaries.end_open(now)
            self._boundaries.send_events(self.turns.complete_until(self.appended, now), now)
            self._boundaries.send_events(self.turns.finish(now, at_once=True), now)
            self._boundaries.settle(self.appended)
            self._send(Ended(self.appended))
            self._close_finished()

    def _engine_failed(self, event: messages.Failed | messages.Refused, now: float) -> None:
        """The stream failed: committed items fail with it, and the session continues with a new stream."""
        self._engine_failures += 1
        self._effects.append(Measured("engine_failures", 1))
        is_last = self.phase is SessionPhase.FINISHING or self._engine_failures >= self.limits.max_engine_failures
        if is_last:
            self._end_open_speech(now)
        self._fail_items("transcription_failed", event.message, now)
        if is_last:
            self._close(CloseCode.INTERNAL, "transcription failed", "stream_failure")
        else:
            # The failed items are answered; the new stream gets only the audio after them.
            self.stall.forget_before(self._boundaries.boundary)
            self._reanchor(now)

    def _engine_dead(self, event: messages.Dead, now: float) -> None:
        self._end_open_speech(now)
        self._fail_items("engine_unavailable", "the engine stopped", now)
        self._close(CloseCode.INTERNAL, "the engine stopped; connect again", "engine_stopped")

    def _end_open_speech(self, now: float) -> None:
        """End the open turn before the session ends with an error, so that its item fails with the others.

        Without turn detection, audio that the client has not committed is no turn.
        """
        if self.phase is SessionPhase.FINISHING or self.settings.turn_detection is not None:
            self._boundaries.end_open(now)

    def _engine_switched(self, event: EngineSwitched, now: float) -> None:
        self._boundaries.send_events(self.turns.settle(now), now)
        self.turns.forget_awaited_revisions()
        self._engine_start = event.base

    def _answer(self, waiting: Waiting, now: float) -> None:
        """Answer a commit or clear: all text and speech probabilities of the audio before it have arrived."""
        if waiting.clears:
            self._boundaries.clear_late(waiting.sample, waiting.source_ms, now)
        else:
            self._boundaries.commit_late(waiting.sample, waiting.source_ms, waiting.event_id, now)

    # Engine commands and closing

    def _flush(self, pause: int | None = None, ends_speech: bool = False, turn_over: bool = False) -> None:
        # A stream that is being finished sends all its text anyway.
        if self.phase is not SessionPhase.FINISHING:
            self._marks.append(PendingFlush(self.appended, pause, ends_speech))
            self._effects.append(FlushEngine(pause, ends_speech, turn_over))

    def _reanchor(self, now: float) -> None:
        """Continue with a new stream; if text is outstanding, flush the new one."""
        self._effects.append(self.stall.reanchor(self.appended, now))
        self._marks.clear()
        self.turns.forget_awaited_revisions()
        if self.turns.ended or self._waiting:
            self._flush()

    def _fail_items(self, code: str, message: str, now: float) -> None:
        self._boundaries.send_events(self.turns.finish(now, at_once=True), now)
        self._boundaries.send_events(self.turns.emit_held(now), now)
        for turn in self.turns.fail_ended():
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
        if self._drain_deadline is not None and self.phase is SessionPhase.ACTIVE and self.idle:
            self._close_finished()

    def _close_finished(self) -> None:
        if self._drain_deadline is None:
            self._close(CloseCode.NORMAL, "finished", "finished")
        else:
            self._close(CloseCode.RESTART, "the server is restarting", "drain")

    def _close(self, code: CloseCode, reason: str, cause: str) -> None:
        self._change_phase(SessionPhase.CLOSED)
        self._effects.append(Hangup(code, reason, cause))

    def _change_phase(self, to: SessionPhase) -> None:
        if to not in TRANSITIONS[self.phase]:
            raise IllegalEvent(f"a session cannot change from {self.phase.name} to {to.name}")
        self.phase = to

    def _send(self, event: ServerEvent) -> None:
        self._effects.append(Send(event))

    def _add_effect(self, effect: Effect) -> None:
        self._effects.append(effect)


def _copy(speech: messages.Speech) -> messages.Speech:
    return replace(speech, events=[replace(event) for event in speech.events])


def _split_speech(
    speech: messages.Speech, sample: int, before: messages.TrackState
) -> tuple[messages.Speech, messages.Speech]:
    """Split a speech report at the first frame that begins at or after `sample`. `before` is the track before it.

    `spoken`, the number of samples that are certainly speech, goes to the second part.
    """
    frames = max(0, -(-(sample - speech.sample) // speech.frame_samples))
    end = speech.sample + frames * speech.frame_samples
    first = [event for event in speech.events if event.at <= end]
    rest = [event for event in speech.events if event.at > end]
    phase, fell, start = before.phase, before.fell, before.start
    for event in first:
        match event:
            case messages.SpeechStarted() | messages.SpeechResumed():
                phase = messages.Phase.SPEAKING
            case messages.SpeechPaused():
                phase, fell = messages.Phase.PAUSED, event.sample
            case messages.SpeechEnded():
                phase = messages.Phase.QUIET
    if phase in (messages.Phase.QUIET, messages.Phase.STARTING):
        # The second part shows whether speech was about to start at the split.
        follows = speech.track.start if speech.track.phase is messages.Phase.STARTING else end
        if rest and isinstance(rest[0], messages.SpeechStarted):
            follows = rest[0].sample
        starts = follows < end
        phase, start = (messages.Phase.STARTING, follows) if starts else (messages.Phase.QUIET, start)
    track = messages.TrackState(phase, start, fell, before.floor, end)
    head = replace(speech, probabilities=speech.probabilities[:frames], events=first, track=track, spoken=0)
    return head, replace(speech, sample=end, probabilities=speech.probabilities[frames:], events=rest)


# The stall guard

# Audio kept before the last silence, so that a replay does not begin within a word.
MARGIN_SECONDS = 1.0
# Pieces of audio are joined up to this length.
JOINED_SAMPLES = 1600


@dataclass(frozen=True, slots=True)
class SavedStall:
    """The saved state of a `StallGuard`. Of the kept audio only the place and the length are saved."""

    kept_from: int
    kept_samples: int
    speech_samples: int
    last_sign: float | None
    patience: int


class StallGuard:
    """Counts speech since the last text and keeps its audio."""

    def __init__(self, sample_rate: int, stall_seconds: float, keep_seconds: float) -> None:
        self._rate = sample_rate
        self._stall_seconds = stall_seconds
        self._keep_samples = int(keep_seconds * sample_rate)
        self._margin_samples = int(MARGIN_SECONDS * sample_rate)
        # Audio from sample `_kept_from` on: samples, or a number of silent samples.
        self._kept: deque[Samples | int] = deque()
        self._kept_from = 0
        self._kept_samples = 0
        # Samples of speech since the last text.
        self._speech_samples = 0
        # Time of the last text, or of the first speech after it; None before any speech.
        self._waiting_since: float | None = None
        # Factor for the stall time. It doubles with each stall without text, because music may sound like speech.
        self._patience = 1

    @property
    def kept_samples(self) -> int:
        return self._kept_samples

    def save(self) -> SavedStall:
        return SavedStall(
            self._kept_from, self._kept_samples, self._speech_samples, self._waiting_since, self._patience
        )

    def load(self, saved: SavedStall, shift: float) -> None:
        """Continue from a saved guard, with silence for its audio; `shift` is our clock minus its clock."""
        self._kept = deque([saved.kept_samples] if saved.kept_samples else [])
        self._kept_from, self._kept_samples = saved.kept_from, saved.kept_samples
        self._speech_samples, self._patience = saved.speech_samples, saved.patience
        self._waiting_since = None if saved.last_sign is None else saved.last_sign + shift

    def keep(self, start: int, audio: Samples | int) -> None:
        """Keep audio that begins at sample `start`; an integer is a number of silent samples."""
        if not self._kept:
            self._kept_from = start
        self._kept_samples += _length(audio)
        self._kept.append(
            _joined(self._kept.pop(), audio) if self._kept and _may_join(self._kept[-1], audio) else audio
        )
        if self._kept_samples > self._keep_samples:
            self.forget_before(self._kept_from + self._kept_samples - self._keep_samples)

    def add_speech(self, samples: int, now: float) -> None:
        """Count this many more samples that are certainly speech."""
        if samples:
            if self._speech_samples == 0:
                self._waiting_since = now
            self._speech_samples += samples

    def add_text(self, text: messages.Text, base: int, now: float) -> None:
        """Text has arrived: audio up to its last word is not needed any more."""
        self._speech_samples = 0
        self._waiting_since = now
        self._patience = 1
        if text.words:
            self.forget_before(base + text.words[-1].end_sample)

    def add_silence(self, covered: int) -> None:
        """There is silence at sample `covered`. If there was no speech since the last text, older audio is dropped."""
        if self._speech_samples == 0:
            self.forget_before(covered - self._margin_samples)

    def postpone(self, now: float) -> None:
        """No text can be expected at this time: the stall time begins again."""
        if self._waiting_since is not None:
            self._waiting_since = now

    def is_stalled(self, now: float) -> bool:
        """Whether there was enough speech, for long enough, without text. A stall time of 0 switches the guard off."""
        limit = self._stall_seconds * self._patience
        if self._stall_seconds <= 0 or self._waiting_since is None:
            return False
        return self._speech_samples >= limit * self._rate and now - self._waiting_since >= limit

    def reanchor(self, appended: int, now: float) -> Reanchor:
        """The effect that begins a new stream with the kept audio. The audio stays kept: the new stream may stall
        too."""
        self._speech_samples = 0
        self._waiting_since = now
        self._patience *= 2
        base = self._kept_from if self._kept else appended
        return Reanchor(base, tuple(self._kept))

    def forget_before(self, sample: int) -> None:
        """Drop the audio before this sample."""
        while self._kept and self._kept_from < sample:
            oldest = self._kept.popleft()
            dropped = min(_length(oldest), sample - self._kept_from)
            self._kept_from += dropped
            self._kept_samples -= dropped
            if dropped < _length(oldest):
                self._kept.appendleft(oldest - dropped if isinstance(oldest, int) else oldest[dropped:])


def _may_join(last: Samples | int, audio: Samples | int) -> bool:
    """Whether two pieces may be joined; many tiny pieces would need more memory than their samples."""
    if isinstance(last, int) or isinstance(audio, int):
        return isinstance(last, int) and isinstance(audio, int)
    return len(last) + len(audio) <= JOINED_SAMPLES


def _joined(last: Samples | int, audio: Samples | int) -> Samples | int:
    if isinstance(last, int) or isinstance(audio, int):
        return _length(last) + _length(audio)
    return np.concatenate((last, audio))


def _length(audio: Samples | int) -> int:
    return audio if isinstance(audio, int) else len(audio)
