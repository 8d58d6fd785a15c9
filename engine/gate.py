"""Which stretches of a stream a windowed model should hear at all, from speech probabilities.

A model that rereads a window makes up words when nobody speaks, and a window without speech is wasted work. The gate
stands in front of it: it lets silence and noise go by unheard, holds audio back while it is unsure, opens when it is
sure, and says where an utterance has ended, so that its text becomes final.

    QUIET --frame of speech--> DOUBTFUL --enough evidence--> OPEN --quiet for the hang-over--> QUIET
                                   `--quiet for the hang-over, or doubtful for too long--> QUIET

What is enough depends on what went before. A stream that has been silent must bring frames the detector has no doubt
about: coughs and music reach high probabilities, but rarely the highest, and not for long. In a conversation a short
"yes" is likely, and a few ordinary frames will do.

Pure: time is a count of samples, and the cut of the audio into calls changes nothing but when the caller hears of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

_SAMPLES_PER_MS = 16


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Durations in samples at 16 kHz. The defaults come from measurements on read, spoken and recorded speech."""

    # A frame at or above this is speech; below the second it is quiet; between the two it changes nothing.
    threshold: float = 0.5
    stop_threshold: float = 0.35
    # A frame at or above this leaves no doubt, and so much of it opens the gate after silence.
    sure_threshold: float = 0.98
    sure_samples: int = 256 * _SAMPLES_PER_MS
    # This much ordinary speech opens the gate if somebody spoke not longer ago than `conversation_samples`.
    brief_samples: int = 96 * _SAMPLES_PER_MS
    conversation_samples: int = 10_000 * _SAMPLES_PER_MS
    # Audio kept from before the first frame of speech: soft beginnings of words are heard late.
    pre_roll_samples: int = 320 * _SAMPLES_PER_MS
    # Quiet that ends an utterance.
    hang_over_samples: int = 320 * _SAMPLES_PER_MS
    # Audio is held back for doubt no longer than this.
    patience_samples: int = 5_000 * _SAMPLES_PER_MS

    def __post_init__(self) -> None:
        if not 0 < self.stop_threshold <= self.threshold <= self.sure_threshold <= 1:
            raise ValueError("speech thresholds must rise from stop to start to sure, above 0 and up to 1")
        durations = (self.sure_samples, self.brief_samples, self.hang_over_samples, self.patience_samples)
        if min(durations) < 1 or min(self.pre_roll_samples, self.conversation_samples) < 0:
            raise ValueError("durations of the speech gate must be positive")


@dataclass(frozen=True, slots=True)
class Skip:
    """Audio before `sample` need not be heard. The stream is held: what follows may turn out to be speech."""

    sample: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Somebody speaks. The model should hear the stream from `sample` on, until the utterance ends."""

    sample: int


@dataclass(frozen=True, slots=True)
class End:
    """The utterance is over: commit everything before `sample`, then hold. Speech itself ended at `speech_end`."""

    sample: int
    speech_end: int


Decision = Skip | Begin | End


class GateState(Enum):
    QUIET = auto()
    DOUBTFUL = auto()
    OPEN = auto()


class SpeechGate:
    """Follows one stream, from the sample its first frame starts at."""

    def __init__(self, settings: GateSettings, sample: int = 0) -> None:
        self.settings = settings
        self.state = GateState.QUIET
        # End of the last frame.
        self._sample = sample
        # Audio before this has been dropped or committed.
        self._floor = sample
        self._speech_start = sample
        self._speech_end = sample
        self._spoken_samples = 0
        self._sure_samples = 0
        self._last_utterance_end: int | None = None

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    def push(self, probabilities: Iterable[float], frame_samples: int) -> list[Decision]:
        """Take the next frames. Decisions are in order of time, with at most one Skip, the last."""
        decisions: list[Decision] = []
        for probability in probabilities:
            self._sample += frame_samples
            decision = self._follow(probability, frame_samples)
            if decision is not None:
                decisions.append(decision)
        if not self.is_open:
            kept = self._speech_start if self.state is GateState.DOUBTFUL else self._sample
            decisions += self._skip(kept - self.settings.pre_roll_samples)
        return decisions

    def flush(self, sample: int) -> list[Decision]:
        """Text for everything before `sample` is wanted now: end what is open, give up what is doubtful.

        `sample` may lie ahead of the frames seen so far, which trail the audio by up to a frame.
        """
        if sample < self._sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self._sample} have been judged")
        if self.is_open:
            return [self._end(sample)]
        self.state = GateState.QUIET
        return self._skip(sample)

    def _follow(self, probability: float, frame_samples: int) -> Decision | None:
        settings = self.settings
        start = self._sample - frame_samples
        if self.state is GateState.QUIET:
            if probability < settings.threshold:
                return None
            self._doubt(start)
        if probability >= settings.stop_threshold:
            self._speech_end = self._sample
        elif self._sample - self._speech_end >= settings.hang_over_samples:
            if self.is_open:
                return self._end(self._sample)
            self.state = GateState.QUIET
        if self.state is not GateState.DOUBTFUL:
            return None
        self._spoken_samples += frame_samples if probability >= settings.threshold else 0
        self._sure_samples += frame_samples if probability >= settings.sure_threshold else 0
        if self._is_speech():
            return self._begin()
        if self._sample - self._speech_start >= settings.patience_samples:
            self.state = GateState.QUIET
        return None

    def _is_speech(self) -> bool:
        settings, last = self.settings, self._last_utterance_end
        if last is not None and self._speech_start - last <= settings.conversation_samples:
            return self._spoken_samples >= settings.brief_samples
        return self._sure_samples >= settings.sure_samples

    def _doubt(self, start: int) -> None:
        self.state = GateState.DOUBTFUL
        self._speech_start = start
        self._spoken_samples = self._sure_samples = 0

    def _begin(self) -> Begin:
        self.state = GateState.OPEN
        self._floor = max(self._floor, self._speech_start - self.settings.pre_roll_samples)
        return Begin(self._floor)

    def _end(self, sample: int) -> End:
        self.state = GateState.QUIET
        self._floor = sample
        self._last_utterance_end = self._speech_end
        return End(sample, self._speech_end)

    def _skip(self, sample: int) -> list[Decision]:
        if sample <= self._floor:
            return []
        self._floor = sample
        return [Skip(sample)]
