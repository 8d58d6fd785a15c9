"""Finds the start and end of speech in speech probabilities, with hysteresis. No I/O; time is a sample count.

A `Rise` begins a stretch of speech and a `Fall` ends it. `realtime.session.boundaries` makes turns of them.

A frame is loud (probability at or above `threshold`), quiet (below `stop_threshold`) or between, which changes nothing.

| state | loud | band | quiet |
|---|---|---|---|
| QUIET | STARTING | stay | stay |
| STARTING | stay; SPEAKING after `min_speech_samples` | the same | QUIET: a click, not speech |
| SPEAKING | stay | stay | STOPPING |
| STOPPING | SPEAKING | stay; QUIET after `silence_samples` | the same |

Edges depend on the probabilities over time and not on the length of frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# Difference between the thresholds for speech and for silence.
HYSTERESIS = 0.15
# Silence must be possible even with a very low threshold.
MIN_STOP_THRESHOLD = 0.01


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """What counts as speech and as silence. Durations are in samples."""

    threshold: float
    min_speech_samples: int
    silence_samples: int
    prefix_samples: int

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, not {self.threshold}")
        if min(self.min_speech_samples, self.silence_samples, self.prefix_samples) < 0:
            raise ValueError("speech, silence and prefix durations cannot be negative")

    @property
    def stop_threshold(self) -> float:
        return max(self.threshold - HYSTERESIS, min(MIN_STOP_THRESHOLD, self.threshold))


@dataclass(frozen=True, slots=True)
class Rise:
    """Speech begins at `sample`, which includes the prefix padding; never within the stretch before."""

    sample: int


@dataclass(frozen=True, slots=True)
class Fall:
    """The stretch ends at `sample`, which includes the trailing silence; the speech itself ended at
    `speech_end_sample`. Both are one past the last sample."""

    sample: int
    speech_end_sample: int


Edge = Rise | Fall


class EdgeState(Enum):
    QUIET = auto()
    STARTING = auto()
    SPEAKING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class EdgeMemory:
    """The state of an `EdgeDetector` as a value."""

    state: EdgeState
    sample: int
    floor: int
    speech_start: int
    speech_end: int


class EdgeDetector:
    """Finds the edges of one session. `settings` may be replaced at any time, and apply from the next frame on."""

    def __init__(self, settings: EdgeSettings) -> None:
        self.settings = settings
        self.state = EdgeState.QUIET
        # End of the last frame.
        self.sample = 0
        # Audio before this sample belongs to an earlier stretch or was dropped; a new stretch cannot include it.
        self._floor = 0
        self._speech_start = 0
        self._speech_end = 0

    def save(self) -> EdgeMemory:
        return EdgeMemory(self.state, self.sample, self._floor, self._speech_start, self._speech_end)

    def load(self, memory: EdgeMemory) -> None:
        """Continue from a saved state."""
        self.state, self.sample = memory.state, memory.sample
        self._floor, self._speech_start, self._speech_end = memory.floor, memory.speech_start, memory.speech_end

    @property
    def silent_samples(self) -> int:
        """Samples of silence so far that may end the open stretch; 0 if there is none."""
        return self.sample - self._speech_end if self.state is EdgeState.STOPPING else 0

    def judge(self, probability: float, frame_samples: int) -> Edge | None:
        """Take the next frame: its speech probability and its length."""
        if not 0 <= probability <= 1:
            raise ValueError(f"a speech probability lies in [0, 1], not {probability}")
        if frame_samples < 1:
            raise ValueError(f"a frame cannot have {frame_samples} samples")
        start = max(self.sample, self._floor)
        self.sample += frame_samples
        if self.sample <= self._floor:
            return None
        loud = probability >= self.settings.threshold
        quiet = probability < self.settings.stop_threshold
        if self.state in (EdgeState.QUIET, EdgeState.STARTING):
            return self._listen(start, loud, quiet)
        return self._follow(start, loud, quiet)

    def reset(self, sample: int | None = None) -> None:
        """Drop an open stretch without a Fall, for example because its audio is dropped. The sample count continues.

        `sample` is the end of the dropped audio, if it is after the last frame. Raises ValueError if it is before.
        """
        end = self.sample if sample is None else sample
        self._check_not_past(end)
        self._end_stretch(end)

    def _listen(self, start: int, loud: bool, quiet: bool) -> Rise | None:
        """QUIET and STARTING: no stretch is open."""
        if quiet:
            self.state = EdgeState.QUIET
            return None
        if self.state is EdgeState.QUIET:
            if not loud:
                return None
            self.state = EdgeState.STARTING
            self._speech_start = start
        if self.sample - self._speech_start < self.settings.min_speech_samples:
            return None
        self.state = EdgeState.SPEAKING
        return Rise(max(self._speech_start - self.settings.prefix_samples, self._floor))

    def _follow(self, start: int, loud: bool, quiet: bool) -> Fall | None:
        """SPEAKING and STOPPING: a stretch is open."""
        if loud:
            self.state = EdgeState.SPEAKING
            return None
        if self.state is EdgeState.SPEAKING:
            if not quiet:
                return None
            self.state = EdgeState.STOPPING
            self._speech_end = start
        silent_at = self._speech_end + self.settings.silence_samples
        if self.sample < silent_at:
            return None
        # The sample at which silence became long enough, and not the end of the frame; but not before this frame, in
        # case `silence_samples` was reduced.
        fall = Fall(max(silent_at, start), self._speech_end)
        self._end_stretch(fall.sample)
        return fall

    def _end_stretch(self, sample: int) -> None:
        self.state = EdgeState.QUIET
        self._floor = max(sample, self._floor)

    def _check_not_past(self, sample: int) -> None:
        if sample < self.sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self.sample} have been judged")
