"""`SpeechTrack` and `SpeechGate`: where one stream has speech and silence, and which of its audio the model gets.

A track turns speech probabilities into events at exact samples. `Listener` (`engine/server/speech.py`) has one per
stream, in the engine loop. No other module compares a speech probability with a threshold. These use its results:

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

If the turn rule asks the turn detector (`TurnRule.questions`: lengths of silence), the track adds a `TurnScored`
without a score when the silence reaches each of these lengths; `engine/server/turn_questions.py` gets the score from
the detector.

A `SpeechGate` decides which audio the model gets. For each frame the track tells it the probability, and where the
track's current speech began. A windowed model makes up words in noise, so its gate needs more evidence than the track
needs for a turn; a turn without that evidence gets an empty text. Before a frame-synchronous model, silence is skipped
only where the track has found no speech: its gate opens with every `SpeechStarted` at the latest, and its hang-over
begins at the earliest when the speech has paused (`GateSettings.follows_track`).

A track is a pure function of the frames, the rule, and the samples at which the rule was changed or the open speech was
ended. Events depend on the probabilities over time, not on the length of frames or on how they are split into calls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby
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

# Which audio the model gets.

SAMPLE_RATE = 16_000
SAMPLES_PER_MS = SAMPLE_RATE // 1000

# From this probability on a frame has sound, perhaps of a word that fades.
SOUND = 0.35
# Log-odds that count neither for nor against speech (a probability of 0.73), and the most a frame can add or subtract.
_NEUTRAL_LOG_ODDS = 1.0
_MOST_FOR = 6.0
_MOST_AGAINST = -1.0
# Frames over which the probability is averaged to find where a long utterance is split.
_CALM_FRAMES = 8
# Probabilities are clamped this far from 0 and 1, so that the log-odds stay finite.
_SURE = 1e-4


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Settings of a `SpeechGate`. Durations are samples at 16 kHz, evidence is log-odds times seconds."""

    # Evidence that opens the gate: a quarter of a second that leaves no doubt, or a second at a probability of 0.9.
    evidence: float = 1.5
    # Evidence that is enough if there was speech within the last `conversation_samples`.
    conversation_evidence: float = 0.2
    conversation_samples: int = 10_000 * SAMPLES_PER_MS
    # Audio kept from before the first evidence: soft beginnings of words are detected late.
    pre_roll_samples: int = 512 * SAMPLES_PER_MS
    # A frame below this probability is silence. Silence of `pause_samples` is a pause of the utterance; silence of
    # `hang_over_samples` ends it.
    stop_threshold: float = SOUND
    pause_samples: int = 96 * SAMPLES_PER_MS
    hang_over_samples: int = 608 * SAMPLES_PER_MS
    # Doubtful audio is held back no longer than this.
    hold_samples: int = 5_000 * SAMPLES_PER_MS
    # A longer utterance is split at the quietest point in its second half (None: it is never split).
    longest_samples: int | None = None
    # The gate opens with any speech that the track has found, and does not close before that speech has paused.
    follows_track: bool = False

    def for_files(self, longest_samples: int) -> GateSettings:
        """Return the settings for uploads. Latency does not matter there, so pauses stay in the windows: a model that
        gets a pause and the audio after it decides better whether a sentence ended. Long silences are skipped."""
        return replace(
            self,
            pre_roll_samples=1_000 * SAMPLES_PER_MS,
            pause_samples=1_000 * SAMPLES_PER_MS,
            hang_over_samples=3_000 * SAMPLES_PER_MS,
            longest_samples=longest_samples,
        )

    def __post_init__(self) -> None:
        if not 0 < self.stop_threshold < 1:
            raise ValueError(f"stop_threshold is a probability between 0 and 1, not {self.stop_threshold}")
        if min(self.evidence, self.conversation_evidence) <= 0:
            raise ValueError("the evidence that opens the speech gate must be above zero")
        if not 0 < self.pause_samples < self.hang_over_samples:
            raise ValueError("a pause of an utterance must be shorter than the hang-over that ends it")
        if min(self.conversation_samples, self.pre_roll_samples, self.hold_samples) < 0:
            raise ValueError("durations of the speech gate cannot be negative")


@dataclass(frozen=True, slots=True)
class Skip:
    """The model does not need audio before `sample`. The stream is held: the audio after it may be speech."""

    sample: int


@dataclass(frozen=True, slots=True)
class Begin:
    """An utterance begins: the model gets the audio from `sample` on, until the utterance ends."""

    sample: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The utterance pauses: compute it up to `sample`, then hold. It ends there unless speech follows soon."""

    sample: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The utterance continues after a pause; this was detected at `sample`."""

    sample: int


@dataclass(frozen=True, slots=True)
class End:
    """The utterance has ended: commit everything before `sample`, then hold. Speech itself ended at `speech_end`."""

    sample: int
    speech_end: int


@dataclass(frozen=True, slots=True)
class SplitUtterance:
    """The utterance continues after `sample`, but is too long for one window: commit everything before `sample`."""

    sample: int


Decision = Skip | Begin | Pause | Resume | End | SplitUtterance


class GateState(Enum):
    """The states of a `SpeechGate`."""

    QUIET = auto()
    DOUBTFUL = auto()
    OPEN = auto()


class SpeechGate:
    """Decides from speech probabilities which audio of one stream the model gets.

    A windowed model needs it most: it makes up words in silence, and a window without speech is wasted work. The gate
    skips silence and noise, holds doubtful audio back, opens when there is enough evidence of speech, and ends
    utterances, so that their text becomes final:

        QUIET --evidence above zero--> DOUBTFUL --enough evidence--> OPEN --silence for the hang-over--> QUIET
                                           `--evidence back at zero--> QUIET

    Evidence is a running sum of the frames' log-odds of speech, never below zero. Coughs and music reach high
    probabilities for short times; speech reaches very high ones and stays there, so its evidence grows many times
    faster. In a conversation, where a short "yes" is likely, less evidence is enough.

    A pause is reported long before it has lasted for the hang-over, so that the model can already compute the utterance
    up to it. If no speech follows, the utterance ends at the pause, and its text is ready.

    Time is a count of samples from the first frame on. The decisions do not depend on how frames are split into calls.
    """

    def __init__(self, settings: GateSettings, sample: int = 0, is_open: bool = False) -> None:
        self.settings = settings
        self.state = GateState.OPEN if is_open else GateState.QUIET
        # End of the last frame.
        self._sample = sample
        # Audio before this has been dropped or committed.
        self._floor = sample
        self._evidence = 0.0
        self._speech_start = sample
        self._speech_end = sample
        self._paused_at: int | None = None
        self._last_utterance_end: int | None = None
        # The last probabilities; (sum of probabilities, sample) of the best point to split the utterance.
        self._recent: list[float] = []
        self._calmest: tuple[float, int] | None = None

    def save(self) -> dict[str, Any]:
        """Return the state as plain data. The names of the attributes are part of its format."""
        return {**vars(self), "settings": None, "state": self.state.name}

    def resume(self, saved: dict[str, Any]) -> None:
        """Restore a saved state; the settings stay this gate's own."""
        vars(self).update(saved, settings=self.settings, state=GateState[saved["state"]])

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    def judge(self, probabilities: Iterable[float], frame_samples: int) -> list[Decision]:
        """Judge the next frames alone, without a track. Returns decisions in order of time, with at most one Skip."""
        decisions: list[Decision] = []
        for probability in probabilities:
            decisions += self.add_frame(probability, frame_samples, None, False)
        return decisions + self.skip_silence()

    def add_frame(self, probability: float, frame_samples: int, since: int | None, is_certain: bool) -> list[Decision]:
        """Judge the next frame. `since`: the first sample of the track's current speech; None: it has none.
        `is_certain`: the track is SPEAKING, not only STARTING. Call `skip_silence` after the last frame."""
        self._sample += frame_samples
        if not self.settings.follows_track:
            since, is_certain = None, False
        if self.state is not GateState.OPEN:
            begin = self._weigh(probability, frame_samples, since, is_certain)
            return [] if begin is None else [begin]
        change = self._follow(probability if since is None else 1.0)
        decisions: list[Decision] = [] if change is None else [change]
        if self.settings.longest_samples is not None:
            split = self._split_if_long(probability, frame_samples)
            if split is not None:
                decisions.append(split)
        return decisions

    @property
    def speech_changes_nothing(self) -> bool:
        """Whether more speech of the track changes nothing but the time (`pass_speech`)."""
        settings = self.settings
        return self.state is GateState.OPEN and self._paused_at is None and settings.longest_samples is None

    def pass_speech(self, samples: int) -> None:
        """In OPEN, without a pause: the next frames are speech. As `add_frame` for each."""
        self._sample += samples
        self._speech_end = self._sample

    def skip_silence(self) -> list[Decision]:
        """To be called after frames: returns a Skip if there is more audio that the model certainly does not need."""
        if self.is_open:
            return []
        kept = self._held_from() if self.state is GateState.DOUBTFUL else self._sample
        return self._skip(kept - self.settings.pre_roll_samples)

    def pass_silence(self, samples: int) -> list[Decision]:
        """In QUIET: the next frames are so quiet that none of them is evidence. As `add_frame` and `skip_silence`."""
        self._sample += samples
        return self.skip_silence()

    def flush(self, sample: int) -> list[Decision]:
        """Text for everything before `sample` is wanted now: end an open utterance, skip doubtful audio.

        `sample` may lie ahead of the frames seen so far, which trail the audio by up to a frame. An utterance that
        pauses ends at the pause, because there has been no speech since.
        """
        if sample < self._sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self._sample} have been judged")
        if self.is_open:
            return [self._end(sample if self._paused_at is None else self._paused_at), *self._skip(sample)]
        self._rest()
        return self._skip(sample)

    def end_turn(self) -> list[Decision]:
        """Speech has ended by the rule for turns: the text of a windowed model ends too."""
        return [] if self.settings.follows_track else self.flush_at_pause()

    def flush_at_pause(self) -> list[Decision]:
        """Text before the last pause is wanted now. Doubtful audio is kept: it may be the beginning of an utterance."""
        if not self.is_open:
            return []
        return [self._end(self._sample if self._paused_at is None else self._paused_at)]

    @property
    def began(self) -> int:
        """Sample of the first evidence of the current or last utterance."""
        return self._speech_start

    @property
    def certain_until(self) -> int | None:
        """Audio before this sample certainly belongs to the utterance; None while the gate is not open."""
        return self._speech_end + self.settings.hang_over_samples if self.is_open else None

    @property
    def speech_end(self) -> int:
        """End of the last frame with speech in the current or last utterance."""
        return self._speech_end

    @property
    def floor(self) -> int:
        """Audio before this sample was skipped, or belongs to an utterance that has ended."""
        return self._floor

    def _weigh(self, probability: float, frame_samples: int, since: int | None, is_certain: bool) -> Begin | None:
        """In QUIET and DOUBTFUL: add the frame's evidence; returns Begin if there is enough, or if the track has found
        speech."""
        probability = min(max(probability, _SURE), 1 - _SURE)
        odds = math.log(probability / (1 - probability)) - _NEUTRAL_LOG_ODDS
        self._evidence += min(max(odds, _MOST_AGAINST), _MOST_FOR) * frame_samples / SAMPLE_RATE
        if self._evidence <= 0 and since is None:
            self._rest()
            return None
        self._evidence = max(self._evidence, 0.0)
        if self.state is GateState.QUIET:
            self.state = GateState.DOUBTFUL
            self._speech_start = self._sample - frame_samples if since is None else since
        elif since is not None:
            self._speech_start = min(self._speech_start, since)
        if self._evidence < self._needed() and not is_certain:
            return None
        self.state = GateState.OPEN
        self._speech_end = self._sample
        self._paused_at = None
        self._floor = max(self._floor, self._held_from() - self.settings.pre_roll_samples)
        return Begin(self._floor)

    def _follow(self, probability: float) -> Pause | Resume | End | None:
        """In OPEN: return whether the utterance pauses, continues after a pause, or ends."""
        if probability >= self.settings.stop_threshold:
            self._speech_end = self._sample
            paused, self._paused_at = self._paused_at is not None, None
            return Resume(self._sample) if paused else None
        quiet = self._sample - self._speech_end
        if self._paused_at is None:
            if quiet < self.settings.pause_samples:
                return None
            self._paused_at = self._sample
            return Pause(self._sample)
        return self._end(self._paused_at) if quiet >= self.settings.hang_over_samples else None

    def _split_if_long(self, probability: float, frame_samples: int) -> SplitUtterance | None:
        """In OPEN: split an utterance that is too long at the quietest point in its second half."""
        longest = self.settings.longest_samples
        if longest is None or not self.is_open:
            return None
        self._recent = [*self._recent, probability][-_CALM_FRAMES:]
        middle = self._sample - frame_samples * _CALM_FRAMES // 2
        if middle - self._floor >= longest // 2 and (self._calmest is None or sum(self._recent) <= self._calmest[0]):
            self._calmest = sum(self._recent), middle
        if self._sample - self._floor < longest or self._calmest is None:
            return None
        self._floor, self._calmest = self._calmest[1], None
        return SplitUtterance(self._floor)

    def _needed(self) -> float:
        """The evidence that opens the gate now."""
        settings, last = self.settings, self._last_utterance_end
        in_conversation = last is not None and self._speech_start - last <= settings.conversation_samples
        return settings.conversation_evidence if in_conversation else settings.evidence

    def _held_from(self) -> int:
        """In DOUBTFUL: the first sample that is held back."""
        return max(self._speech_start, self._sample - self.settings.hold_samples)

    def _end(self, sample: int) -> End:
        self._rest()
        self._floor = sample = max(sample, self._floor)
        self._last_utterance_end = self._speech_end
        return End(sample, self._speech_end)

    def _rest(self) -> None:
        """Return to QUIET."""
        self.state = GateState.QUIET
        self._calmest = None
        self._evidence = 0.0

    def _skip(self, sample: int) -> list[Decision]:
        if sample <= self._floor:
            return []
        self._floor = sample
        return [Skip(sample)]


# Where speech is.

# Difference between the thresholds for speech and for silence; silence must be possible with a very low threshold too.
HYSTERESIS = 0.15
MIN_STOP_THRESHOLD = 0.01
# From this probability on a frame has enough of a voice to tell whose it is, whatever the threshold of the turns.
VOICE = 0.5
# From this probability on a frame is surely speech: a model that stays silent on much of it has stalled.
SURELY_SPEECH = 0.6

# A live stream has no more frames at a time. More, as in a replay, are divided into runs.
FEW_FRAMES = 5

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
        self._silence_start = 0
        # How many more times the turn detector is asked in this pause.
        self._questions = 0
        # End of the last frame with sound, and of the last speech that ended by a rule for turns.
        self._last_sound = 0
        self.turn_end = 0
        # The track of another engine has processed the frames up to this sample; here they are for the gate only.
        self._judged_before = 0
        # Samples of the frames since `take_spoken` that are surely speech.
        self._spoken = 0
        self._sounds: list[tuple[int, int]] | None = [] if finds_sounds else None
        self._changes: deque[Change] = deque()
        self._use(rule)

    @property
    def state(self) -> TrackState:
        return TrackState(self.phase, self._start, self._silence_start, self._floor, self.sample, self._questions)

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
        """In speech, or in what may be its start."""
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
        """Another track has processed the frames up to `state.sample`. They may come once more, for the gate only."""
        self.phase = state.phase
        self._start, self._silence_start, self._floor = state.start, state.fell, state.floor
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
        if self._silence_start < sample:
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

    def is_speech(self, probabilities: Sequence[float], frame_samples: int) -> bool:
        """Fast path: whether these frames only continue speech, so that nothing but the time changes."""
        if not probabilities or not self._speech_changes_nothing(len(probabilities) * frame_samples):
            return False
        above = self._speech_above
        for probability in probabilities:
            if not above <= probability <= 1:
                return False
        return True

    def _speech_changes_nothing(self, samples: int) -> bool:
        """Whether so many more samples that are surely speech change nothing but the time."""
        if self._changes or (self.gate is not None and not self.gate.speech_changes_nothing):
            return False
        if self.sample < self._judged_before:
            return self.sample + samples <= self._judged_before
        return self.phase is Phase.SPEAKING and not self._questions

    def split(self, probabilities: Sequence[float], frame_samples: int) -> Iterator[Sequence[float]]:
        """Divide the next frames into runs of speech in which nothing but the time changes, and single frames. Each
        part must be added before the next one is taken."""
        # A change of the rule within the frames would change what is surely speech.
        above = math.inf if self._changes else self._speech_above
        for is_loud, frames in groupby(probabilities, lambda probability: above <= probability <= 1):
            run = tuple(frames)
            start = 0
            while start < len(run) and not (
                is_loud and self._speech_changes_nothing((len(run) - start) * frame_samples)
            ):
                yield run[start : start + 1]
                start += 1
            if start < len(run):
                yield run[start:]

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
        if self.is_speech(probabilities, frame_samples):
            self._pass_speech(len(probabilities) * frame_samples)
            return []
        found: list[TrackEvent] = []
        if len(probabilities) <= FEW_FRAMES:
            self._add_each(probabilities, frame_samples, found)
        else:
            for part in self.split(probabilities, frame_samples):
                if len(part) > 1:
                    self._pass_speech(len(part) * frame_samples)
                else:
                    self._add_each(part, frame_samples, found)
        if self.gate is not None:
            found += self.gate.skip_silence()
        return found

    def _add_each(self, probabilities: Sequence[float], frame_samples: int, found: list[TrackEvent]) -> None:
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
            events = self._step(probability, start)
            if self._questions:
                events = self._ask(events)
            if gate is not None:
                found += self._drive(gate, probability, frame_samples)
            if events:
                if gate is not None and self._rule is not None and any(isinstance(e, SpeechEnded) for e in events):
                    found += gate.end_turn()
                found += events

    def _pass_speech(self, samples: int) -> None:
        start = self.sample
        self.sample = self._last_sound = start + samples
        if start >= self._judged_before:
            self._spoken += samples
        if self.gate is not None:
            if self._sounds is not None:
                self._note_sound(start, self.sample)
            self.gate.pass_speech(samples)

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
            "state": (int(self.phase), self._start, self._silence_start, self._floor, self._questions),
            "sample": self.sample,
            "judged_before": self._judged_before,
            "turn_end": self.turn_end,
            "last_sound": self._last_sound,
            "rule": _plain(self._rule),
            "changes": [(change.sample, change.restarts, _plain(change.rule)) for change in self._changes],
        }

    def load(self, saved: Saved) -> None:
        """Continue from a saved state, with its rule."""
        phase, self._start, self._silence_start, self._floor, questions = saved["state"]
        self.phase = Phase(phase)
        self.sample, self._judged_before = saved["sample"], saved["judged_before"]
        self.turn_end, self._last_sound = saved["turn_end"], saved["last_sound"]
        self._use(_rule(saved["rule"]))
        self._questions = questions
        self._changes = deque(Change(sample, restarts, _rule(rule)) for sample, restarts, rule in saved["changes"])

    def _step(self, probability: float, start: int) -> list[SpeechEvent]:
        """Change the phase by the frame that begins at `start` and ends at `self.sample`; returns the events."""
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
            self._silence_start = start
            self._questions = len(self._asked_after)
            events.append(SpeechPaused(start, self.sample))
        silent_at = self._silence_start + self._silence
        if self.sample >= silent_at:
            # Where the silence became long enough, and not the end of the frame; but not before this frame, in case the
            # rule was changed.
            ended = max(silent_at, start)
            self.phase = Phase.QUIET
            self._floor = max(ended, self._floor)
            if self._rule is not None:
                self.turn_end = ended
            events.append(SpeechEnded(ended, self.sample, self._silence_start))
        return events

    def _ask(self, events: list[SpeechEvent]) -> list[SpeechEvent]:
        """Add the questions that are due in the last frame to its events, in order. In the possible start of speech
        they are asked too: it may be a click."""
        found = list(events)
        while self._questions and self.sample > self._judged_before:
            number = len(self._asked_after) - self._questions
            due = self._silence_start + self._asked_after[number]
            if due > self.sample:
                break
            self._questions -= 1
            last = found[-1] if found else None
            before = isinstance(last, SpeechEnded) and due <= last.sample
            found.insert(len(found) - before, TurnScored(due, self.sample, self._silence_start, number))
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
        # Frames from this probability on are sound, and surely speech.
        self._speech_above = max(SOUND, SURELY_SPEECH, self._quiet)
        if self.gate is not None:
            self._silent_below = min(self._silent_below, self.gate.settings.stop_threshold)
            self._speech_above = max(self._speech_above, self.gate.settings.stop_threshold)
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
