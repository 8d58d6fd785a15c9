"""`SpeechTrack`: where one stream has speech and silence.

A track turns speech probabilities into events at exact samples. `Listener` (`engine/server/speech.py`) has one per
stream, in the engine loop. Only the track and its gate (`engine/server/speech_gate.py`) compare a speech probability
with a threshold. These use its results:

- the session, through the gateway: where turns begin, pause and end, where utterances end, whether a model stalls;
- the gate of a windowed model and the skipped silence of a frame-synchronous one: which audio the model gets;
- the flush at a pause: where the last speech ended;
- the times of words: where sound is;
- the labels of speakers: which frames have a voice (`voiced_frames`).

A frame is loud (probability at or above the rule's threshold), quiet (below its stop threshold) or between, which
changes nothing:

| phase | loud | between | quiet |
|---|---|---|---|
| QUIET | STARTING | stay | stay |
| STARTING | stay; `SpeechStarted` and SPEAKING after `min_speech_samples` | the same | QUIET: a click |
| SPEAKING | stay | stay | `SpeechPaused`, PAUSED |
| PAUSED | `SpeechResumed`, SPEAKING | stay; `SpeechEnded` and QUIET after `silence_samples` | the same |

The track passes each frame to its gate, and with it where it has found speech. If the turn rule has questions to the
turn detector, the track adds `TurnScored` without an answer after each silence of `questions`, until there is speech
again; `engine/server/turn_questions.py` asks the detector.

A track is a pure function of the frames, the rule, and the samples at which the rule was changed or the open speech was
ended. Events depend on the probabilities over time, not on the length of frames or on how they are split into calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import (
    Phase,
    Saved,
    SpeechEnded,
    SpeechEvent,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    TrackState,
    TurnRule,
    TurnScored,
)
from engine.server.speech_gate import (
    SAMPLES_PER_MS,
    SOUND,
    Begin,
    Decision,
    End,
    GateState,
    Pause,
    Resume,
    Skip,
    SpeechGate,
    SplitUtterance,
)

# Difference between the thresholds for speech and for silence; silence must be possible with a very low threshold too.
HYSTERESIS = 0.15
MIN_STOP_THRESHOLD = 0.01
# From this probability on a frame has enough of a voice to tell whose it is, whatever the threshold of the turns.
VOICE = 0.5
# From this probability on a frame is surely speech: a model that stays silent on much of it has stalled.
SURELY_SPEECH = 0.6


# For a stream without turn detection.
DEFAULT_RULE = TurnRule(0.5, 64 * SAMPLES_PER_MS, 500 * SAMPLES_PER_MS)

_NO_EVENTS: list[SpeechEvent] = []

# A decision of the gate, or an event of speech.
TrackEvent = Decision | SpeechEvent
DECISIONS = (Skip, Begin, Pause, Resume, End, SplitUtterance)


def stop_threshold(threshold: float) -> float:
    """The probability below which a frame is quiet."""
    return max(threshold - HYSTERESIS, min(MIN_STOP_THRESHOLD, threshold))


def voiced_frames(probabilities: Iterable[float]) -> list[bool]:
    """Which frames have enough of a voice to tell whose it is."""
    return [probability >= VOICE for probability in probabilities]


@dataclass(frozen=True, slots=True)
class Change:
    """A change at a sample: from the first frame that ends after it, open speech is ended (`restarts`), or `rule` is
    the rule."""

    sample: int
    restarts: bool
    rule: TurnRule | None = None


class SpeechTrack:
    """Finds the speech of one stream. The rules are in the module's docstring."""

    def __init__(
        self, rule: TurnRule | None = None, gate: SpeechGate | None = None, *, finds_sounds: bool = False
    ) -> None:
        """Without a rule there is no turn detection: `SpeechEnded` ends no text. `finds_sounds`: for `take_sounds`."""
        self.gate = gate
        # End of the last frame.
        self.sample = 0
        self.phase = Phase.QUIET
        # Audio before this sample belongs to earlier speech or was dropped; no speech begins there any more.
        self._floor = 0
        # First sample of the current or last speech, and of the silence after it.
        self._start = 0
        self._fell = 0
        # How many more times the turn detector is asked in this pause.
        self._questions = 0
        # End of the last frame with sound, and of the last speech that ended by a rule for turns.
        self._last_sound = 0
        self.turn_end = 0
        # Frames up to this sample were judged on another engine; they are for the gate only.
        self._judged_before = 0
        # Samples of the frames since `take_spoken` that are surely speech.
        self._spoken = 0
        self._sounds: list[tuple[int, int]] | None = [] if finds_sounds else None
        self._changes: deque[Change] = deque()
        self._use(rule)

    @property
    def state(self) -> TrackState:
        return TrackState(self.phase, self._start, self._fell, self._floor, self.sample, self._questions)

    @property
    def rule(self) -> TurnRule | None:
        """The rule in force."""
        return self._rule

    @property
    def ends_text(self) -> bool:
        """Whether there is turn detection: text ends where speech ends."""
        return self._rule is not None

    @property
    def speaking(self) -> bool:
        return self.phase is Phase.SPEAKING or self.phase is Phase.STARTING

    @property
    def last_sound(self) -> int:
        """Where the last sound ended that the model gets. A sound may be speech."""
        return self._last_sound if self.gate is None else self.gate.speech_end

    @property
    def quiet_until(self) -> int | None:
        """There is certainly no speech between the last speech and this sample; None while there is speech."""
        if self.phase is Phase.SPEAKING:
            return None
        return self._start if self.phase is Phase.STARTING else self.sample

    def continue_from(self, state: TrackState) -> None:
        """Another track has judged the frames up to `state.sample`. They may come once more, for the gate only."""
        self.phase = state.phase
        self._start, self._fell, self._floor = state.start, state.fell, state.floor
        self._questions = min(state.questions, len(self._asked_after))
        self._judged_before = state.sample

    def change(self, rule: TurnRule | None, sample: int) -> None:
        """Use another rule from the first frame that ends after `sample`; open speech stays open."""
        self._changes.append(Change(sample, False, rule))

    def restart(self, sample: int) -> None:
        """Speech that is open at `sample` ends without an event; the next speech begins there at the earliest."""
        self._changes.append(Change(sample, True))

    def end_questions(self, sample: int) -> None:
        """No more questions in the pause that contains `sample`. The events of speech do not change."""
        if self._fell < sample:
            self._questions = 0

    def is_silence(self, probabilities: Sequence[float]) -> bool:
        """Fast path: whether these frames only continue a silence, so that nothing but the time changes."""
        if self.phase is not Phase.QUIET or self._changes or self._questions:
            return False
        gate, below = self.gate, self._silent_below
        if gate is not None and gate.state is not GateState.QUIET:
            return False
        for probability in probabilities:
            if not 0 <= probability < below:
                return False
        return True

    def add_frames(self, probabilities: Sequence[float], frame_samples: int) -> list[TrackEvent]:
        """Process the next frames. Returns events and decisions in order of time, with at most one Skip, at the end.

        Raises ValueError at the first frame whose probability is not between 0 and 1.
        """
        if frame_samples < 1:
            raise ValueError(f"a frame cannot have {frame_samples} samples")
        if self.is_silence(probabilities):
            samples = len(probabilities) * frame_samples
            self.sample += samples
            return [] if self.gate is None else [*self.gate.pass_silence(samples)]
        return self._add_each(probabilities, frame_samples)

    def _add_each(self, probabilities: Sequence[float], frame_samples: int) -> list[TrackEvent]:
        found: list[TrackEvent] = []
        gate = self.gate
        for probability in probabilities:
            if not 0 <= probability <= 1:
                raise ValueError(f"a speech probability lies in [0, 1], not {probability}")
            start = self.sample
            self.sample = end = start + frame_samples
            if self._changes:
                self._apply_changes(end)
            if probability >= SOUND:
                self._last_sound = end
                if probability >= SURELY_SPEECH and end > self._judged_before:
                    self._spoken += frame_samples
            events = self._judge(probability, start)
            if self._questions:
                events = self._ask(events)
            if gate is not None:
                found += self._drive(gate, probability, frame_samples)
            if events:
                if gate is not None and self._rule is not None and any(isinstance(e, SpeechEnded) for e in events):
                    found += gate.end_turn()
                found += events
        if gate is not None:
            found += gate.skip_silence()
        return found

    def take_spoken(self) -> int:
        """How many samples of the frames since the last call are surely speech."""
        spoken, self._spoken = self._spoken, 0
        return spoken

    def take_sounds(self) -> list[tuple[int, int]]:
        """Where the frames since the last call have sound, as (start, end)."""
        assert self._sounds is not None, "this track does not find sounds"
        sounds, self._sounds = self._sounds, []
        return sounds

    def save(self) -> Saved:
        """The state as plain data, without the gate's."""
        return {
            "state": (int(self.phase), self._start, self._fell, self._floor, self._questions),
            "sample": self.sample,
            "judged_before": self._judged_before,
            "turn_end": self.turn_end,
            "last_sound": self._last_sound,
            "rule": _plain(self._rule),
            "changes": [(change.sample, change.restarts, _plain(change.rule)) for change in self._changes],
        }

    def load(self, saved: Saved) -> None:
        """Continue from a saved state, with its rule."""
        phase, self._start, self._fell, self._floor, questions = saved["state"]
        self.phase = Phase(phase)
        self.sample, self._judged_before = saved["sample"], saved["judged_before"]
        self.turn_end, self._last_sound = saved["turn_end"], saved["last_sound"]
        self._use(_rule(saved["rule"]))
        self._questions = questions
        self._changes = deque(Change(sample, restarts, _rule(rule)) for sample, restarts, rule in saved["changes"])

    def _judge(self, probability: float, start: int) -> list[SpeechEvent]:
        """Judge the frame that begins at `start` and ends at `self.sample`."""
        phase, end = self.phase, self.sample
        # Most frames change nothing: silence in silence, and speech in speech.
        if phase is Phase.QUIET:
            if probability < self._loud:
                return _NO_EVENTS
        elif phase is Phase.SPEAKING and probability >= self._quiet:
            return _NO_EVENTS
        if end <= self._floor or end <= self._judged_before:
            return _NO_EVENTS
        start = max(start, self._floor)
        loud, quiet = probability >= self._loud, probability < self._quiet
        if phase is Phase.QUIET or phase is Phase.STARTING:
            return self._in_silence(start, loud, quiet)
        return self._in_speech(start, loud, quiet)

    def _drive(self, gate: SpeechGate, probability: float, frame_samples: int) -> list[Decision]:
        """Pass the last frame to the gate."""
        since = self._start if self.speaking and self.sample > self._judged_before else None
        if self._sounds is not None and probability >= gate.settings.stop_threshold:
            self._note_sound(self.sample - frame_samples, self.sample)
        return gate.add_frame(probability, frame_samples, since, since is not None and self.phase is Phase.SPEAKING)

    def _in_silence(self, start: int, loud: bool, quiet: bool) -> list[SpeechEvent]:
        """QUIET and STARTING."""
        if quiet:
            self.phase = Phase.QUIET
            return []
        if self.phase is Phase.QUIET:
            if not loud:
                return []
            self.phase = Phase.STARTING
            self._start = start
        if self.sample - self._start < self._min_speech:
            return []
        self.phase = Phase.SPEAKING
        self._questions = 0
        return [SpeechStarted(self._start, self.sample)]

    def _in_speech(self, start: int, loud: bool, quiet: bool) -> list[SpeechEvent]:
        """SPEAKING and PAUSED."""
        if loud:
            was, self.phase = self.phase, Phase.SPEAKING
            self._questions = 0
            return [SpeechResumed(start, self.sample)] if was is Phase.PAUSED else []
        events: list[SpeechEvent] = []
        if self.phase is Phase.SPEAKING:
            if not quiet:
                return []
            self.phase = Phase.PAUSED
            self._fell = start
            self._questions = len(self._asked_after)
            events.append(SpeechPaused(start, self.sample))
        silent_at = self._fell + self._silence
        if self.sample >= silent_at:
            # Where the silence became long enough, and not the end of the frame; but not before this frame, in case the
            # rule was changed.
            ended = max(silent_at, start)
            self.phase = Phase.QUIET
            self._floor = max(ended, self._floor)
            if self._rule is not None:
                self.turn_end = ended
            events.append(SpeechEnded(ended, self.sample, self._fell))
        return events

    def _ask(self, events: list[SpeechEvent]) -> list[SpeechEvent]:
        """Add the questions that are due in the last frame to its events, in order. In the possible start of speech
        they are asked too: it may be a click."""
        found = list(events)
        while self._questions and self.sample > self._judged_before:
            number = len(self._asked_after) - self._questions
            due = self._fell + self._asked_after[number]
            if due > self.sample:
                break
            self._questions -= 1
            last = found[-1] if found else None
            before = isinstance(last, SpeechEnded) and due <= last.sample
            found.insert(len(found) - before, TurnScored(due, self.sample, self._fell, number))
        return found

    def _apply_changes(self, end: int) -> None:
        """Apply the changes before `end`, the end of the next frame."""
        while self._changes and self._changes[0].sample < end:
            change = self._changes.popleft()
            if not change.restarts:
                self._use(change.rule)
            elif change.sample >= self._judged_before:
                # A change before that is part of the state that was continued.
                self.phase = Phase.QUIET
                self._questions = 0
                self._floor = max(change.sample, self._floor)

    def _use(self, rule: TurnRule | None) -> None:
        self._rule = rule
        # Samples of silence after which the turn detector is asked.
        self._asked_after = () if rule is None else rule.questions
        self._questions = min(self._questions, len(self._asked_after))
        effective = DEFAULT_RULE if rule is None else rule
        if not 0 < effective.threshold <= 1:
            raise ValueError(f"the threshold of speech must be above 0 and at most 1, not {effective.threshold}")
        if min(effective.min_speech_samples, effective.silence_samples) < 0:
            raise ValueError("the durations of a turn rule cannot be negative")
        self._loud, self._quiet = effective.threshold, stop_threshold(effective.threshold)
        # Frames below this probability are no sound, no speech and no evidence of speech.
        self._silent_below = min(SOUND, self._loud)
        if self.gate is not None:
            self._silent_below = min(self._silent_below, self.gate.settings.stop_threshold)
        self._min_speech, self._silence = effective.min_speech_samples, effective.silence_samples

    def _note_sound(self, start: int, end: int) -> None:
        assert self._sounds is not None
        if self._sounds and self._sounds[-1][1] == start:
            start = self._sounds.pop()[0]
        self._sounds.append((start, end))


def _plain(rule: TurnRule | None) -> tuple[float, int, int, tuple[int, ...]] | None:
    return None if rule is None else (rule.threshold, rule.min_speech_samples, rule.silence_samples, rule.questions)


def _rule(saved: Sequence[Any] | None) -> TurnRule | None:
    if saved is None:
        return None
    threshold, min_speech, silence, questions = saved
    return TurnRule(threshold, min_speech, silence, tuple(questions))
