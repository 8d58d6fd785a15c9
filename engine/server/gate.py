"""Which stretches of a stream a windowed model should hear at all, from speech probabilities.

A model that rereads a window makes up words when nobody speaks, and a window without speech is wasted work. The gate
stands in front of it: it lets silence and noise go by unheard, holds audio back while it is in doubt, opens when it is
convinced, and says where an utterance has ended, so that its text becomes final.

    QUIET --evidence above zero--> DOUBTFUL --enough evidence--> OPEN --quiet for the hang-over--> QUIET
                                       `--evidence back at zero--> QUIET

An utterance of a file may be longer than what a model can hear at once. It is cut where it is quiet then, and goes on.

A pause in an utterance is told long before it has lasted for the hang-over. The model can hear the utterance up to
there meanwhile; if nobody speaks on, it ends at the pause, and its text is there without another look.

Evidence is a running sum of the frames' log-odds of speech, never below zero. Coughs and music reach high probabilities
now and then; people who speak reach very high ones and stay there, so their evidence mounts many times faster. How much
is enough depends on what went before: in a conversation a short "yes" is likely, and little evidence will do.

Pure: time is a count of samples, and the cut of the audio into calls changes nothing but when the caller hears of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

_SAMPLE_RATE = 16_000
_SAMPLES_PER_MS = _SAMPLE_RATE // 1000

# Log-odds that count neither for nor against speech (a probability of 0.73), and the most one frame can add or take.
_NEUTRAL_LOG_ODDS = 1.0
_MOST_FOR = 6.0
_MOST_AGAINST = -1.0
# Frames over which it must be calm where an utterance is cut.
_CALM_FRAMES = 8
# Keeps the odds finite.
_SURE = 1e-4


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Durations in samples at 16 kHz, evidence in log-odds times seconds. The defaults were measured."""

    # Evidence that opens the gate: a quarter of a second that leaves no doubt, or a second at a probability of 0.9.
    evidence: float = 1.5
    # Evidence that is enough if somebody spoke within the last `conversation_samples`.
    conversation_evidence: float = 0.2
    conversation_samples: int = 10_000 * _SAMPLES_PER_MS
    # Audio kept from before the first evidence: soft beginnings of words are noticed late.
    pre_roll_samples: int = 512 * _SAMPLES_PER_MS
    # Below this probability nobody speaks. Quiet of `pause_samples` is a pause of the utterance, and quiet of
    # `hang_over_samples` is its end.
    stop_threshold: float = 0.35
    pause_samples: int = 96 * _SAMPLES_PER_MS
    hang_over_samples: int = 608 * _SAMPLES_PER_MS
    # Audio is held back for doubt no longer than this.
    hold_samples: int = 5_000 * _SAMPLES_PER_MS
    # An utterance longer than this is cut where it was quietest since it was half as long (None: it is never cut).
    longest_samples: int | None = None

    def for_files(self, longest_samples: int) -> GateSettings:
        """Nobody waits for the next word of a file, so pauses stay in its windows: a model that hears a pause and what
        follows it knows best whether a sentence ended there. A long silence would be wasted work."""
        return replace(
            self,
            pre_roll_samples=1_000 * _SAMPLES_PER_MS,
            pause_samples=1_000 * _SAMPLES_PER_MS,
            hang_over_samples=3_000 * _SAMPLES_PER_MS,
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
    """Audio before `sample` need not be heard. The stream is held: what follows may turn out to be speech."""

    sample: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Somebody speaks. The model should hear the stream from `sample` on, until the utterance ends."""

    sample: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The utterance pauses: hear it up to `sample`, then hold. It will end there unless somebody speaks on soon."""

    sample: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The utterance goes on after a pause; at `sample` that became clear."""

    sample: int


@dataclass(frozen=True, slots=True)
class End:
    """The utterance is over: commit everything before `sample`, then hold. Speech itself ended at `speech_end`."""

    sample: int
    speech_end: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The utterance goes on behind `sample`, but it has become too long to be heard as one: commit what lies before."""

    sample: int


Decision = Skip | Begin | Pause | Resume | End | Cut


class GateState(Enum):
    QUIET = auto()
    DOUBTFUL = auto()
    OPEN = auto()


class SpeechGate:
    """Follows one stream, from the sample its first frame starts at."""

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
        # The last probabilities, and how loud and where the calmest place was at which the utterance could be cut.
        self._recent: list[float] = []
        self._calmest: tuple[float, int] | None = None

    def save(self) -> dict[str, Any]:
        """All that decides what comes next, as plain data."""
        return {**vars(self), "settings": None, "state": self.state.name}

    def resume(self, saved: dict[str, Any]) -> None:
        """Take over the state of a saved gate; the settings stay this gate's own."""
        vars(self).update(saved, settings=self.settings, state=GateState[saved["state"]])

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    def judge(self, probabilities: Iterable[float], frame_samples: int) -> list[Decision]:
        """Take the next frames. Decisions are in order of time, with at most one Skip, the last."""
        decisions: list[Decision] = []
        may_cut = self.settings.longest_samples is not None
        for probability in probabilities:
            self._sample += frame_samples
            if self.state is GateState.OPEN:
                found: Decision | None = self._follow(probability)
                cut = self._cut_if_long(probability, frame_samples) if may_cut else None
            else:
                found, cut = self._weigh(probability, frame_samples), None
            if found is not None:
                decisions.append(found)
            if cut is not None:
                decisions.append(cut)
        if not self.is_open:
            kept = self._held_from() if self.state is GateState.DOUBTFUL else self._sample
            decisions += self._skip(kept - self.settings.pre_roll_samples)
        return decisions

    def flush(self, sample: int) -> list[Decision]:
        """Text for everything before `sample` is wanted now: end what is open, give up what is doubtful.

        `sample` may lie ahead of the frames seen so far, which trail the audio by up to a frame. An utterance that
        pauses ends at the pause: nobody has spoken since.
        """
        if sample < self._sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self._sample} have been judged")
        if self.is_open:
            return [self._end(sample if self._paused_at is None else self._paused_at), *self._skip(sample)]
        self._rest()
        return self._skip(sample)

    def flush_at_pause(self) -> list[Decision]:
        """Text for what was said before the last pause is wanted now. What is doubtful may be the beginning of more."""
        if not self.is_open:
            return []
        return [self._end(self._sample if self._paused_at is None else self._paused_at)]

    @property
    def began(self) -> int:
        """Where there was the first sign of what is heard now, or was heard last."""
        return self._speech_start

    @property
    def certain_until(self) -> int | None:
        """Audio before this sample belongs to the utterance, whatever comes; None while nobody speaks."""
        return self._speech_end + self.settings.hang_over_samples if self.is_open else None

    @property
    def floor(self) -> int:
        """Audio before this sample has been dropped, or ended with an utterance."""
        return self._floor

    def _weigh(self, probability: float, frame_samples: int) -> Begin | None:
        """QUIET and DOUBTFUL: is this speech?"""
        probability = min(max(probability, _SURE), 1 - _SURE)
        odds = math.log(probability / (1 - probability)) - _NEUTRAL_LOG_ODDS
        self._evidence += min(max(odds, _MOST_AGAINST), _MOST_FOR) * frame_samples / _SAMPLE_RATE
        if self._evidence <= 0:
            self._rest()
            return None
        if self.state is GateState.QUIET:
            self.state = GateState.DOUBTFUL
            self._speech_start = self._sample - frame_samples
        if self._evidence < self._needed():
            return None
        self.state = GateState.OPEN
        self._speech_end = self._sample
        self._paused_at = None
        self._floor = max(self._floor, self._held_from() - self.settings.pre_roll_samples)
        return Begin(self._floor)

    def _follow(self, probability: float) -> Pause | Resume | End | None:
        """OPEN: does the utterance pause, go on, has it ended?"""
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

    def _cut_if_long(self, probability: float, frame_samples: int) -> Cut | None:
        """OPEN: an utterance that has become too long is cut where it was calmest since it was half as long."""
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
        return Cut(self._floor)

    def _needed(self) -> float:
        settings, last = self.settings, self._last_utterance_end
        in_conversation = last is not None and self._speech_start - last <= settings.conversation_samples
        return settings.conversation_evidence if in_conversation else settings.evidence

    def _held_from(self) -> int:
        return max(self._speech_start, self._sample - self.settings.hold_samples)

    def _end(self, sample: int) -> End:
        self._rest()
        self._floor = sample = max(sample, self._floor)
        self._last_utterance_end = self._speech_end
        return End(sample, self._speech_end)

    def _rest(self) -> None:
        self.state = GateState.QUIET
        self._calmest = None
        self._evidence = 0.0

    def _skip(self, sample: int) -> list[Decision]:
        if sample <= self._floor:
            return []
        self._floor = sample
        return [Skip(sample)]
