"""`SpeechGate`: decides from speech probabilities which audio of one stream the model gets.

The stream's `SpeechTrack` (`engine/server/speech_track.py`) drives the gate: it passes each frame to it, and with it
where the track has found speech. A windowed model makes up words in noise, so its gate needs more evidence than the
speech track needs for a turn; a turn without that evidence gets an empty text. Before a frame-synchronous model,
silence is skipped only where the track has found no speech: its gate opens with every `SpeechStarted` at the latest,
and does not close before the speech has ended (`GateSettings.follows_track`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

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
    # The gate opens with any speech that the track has found, and does not close before it has fallen.
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
    """Decides from speech probabilities which audio of one stream a windowed model gets.

    A windowed model makes up words in silence, and a window without speech is wasted work. The gate skips silence and
    noise, holds doubtful audio back, opens when there is enough evidence of speech, and ends utterances, so that their
    text becomes final:

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
        """Judge the next frame. `since`: where the speech began that the track has found (`is_certain`) or whose
        possible start it has found; None: there is none. Call `skip_silence` after the last frame."""
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
