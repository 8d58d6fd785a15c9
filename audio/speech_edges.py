"""Speech probabilities -> the samples at which speech rises and falls, with hysteresis. Pure; time is a sample count.

A rise begins a stretch of speech and a fall ends it. What a client calls a turn is made of them elsewhere.

A frame is loud (at or over `threshold`), quiet (below `stop_threshold`) or in the band between, which changes nothing.

| state | loud | band | quiet |
|---|---|---|---|
| QUIET | STARTING | stay | stay |
| STARTING | stay; SPEAKING after `min_speech_samples` | the same | QUIET: a click, not speech |
| SPEAKING | stay | stay | STOPPING |
| STOPPING | SPEAKING | stay; QUIET after `silence_samples` | the same |

Edges depend on the probabilities over time, not on how time is cut into frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# How far below the starting threshold speech may fall before it counts as silence.
HYSTERESIS = 0.15
# With a very low threshold, stopping must still be possible.
MIN_STOP_THRESHOLD = 0.01


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """What counts as speech and as silence; durations in samples."""

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
    """`sample`: where the stretch begins, prefix padding included; never inside the stretch before."""

    sample: int


@dataclass(frozen=True, slots=True)
class Fall:
    """`sample`: where the stretch ends, trailing silence included. `speech_end_sample`: where speech itself ended.

    Both are one past the last sample.
    """

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
    """All that a detector remembers."""

    state: EdgeState
    sample: int
    floor: int
    speech_start: int
    speech_end: int


class EdgeDetector:
    """Follows one session. `settings` may be replaced at any time; the next frame is judged by the new ones."""

    def __init__(self, settings: EdgeSettings) -> None:
        self.settings = settings
        self.state = EdgeState.QUIET
        # End of the last frame.
        self.sample = 0
        # Audio before this belongs to an earlier stretch or was dropped; it is not judged again.
        self._floor = 0
        self._speech_start = 0
        self._speech_end = 0

    def save(self) -> EdgeMemory:
        return EdgeMemory(self.state, self.sample, self._floor, self._speech_start, self._speech_end)

    def load(self, memory: EdgeMemory) -> None:
        """Go on where another detector stopped."""
        self.state, self.sample = memory.state, memory.sample
        self._floor, self._speech_start, self._speech_end = memory.floor, memory.speech_start, memory.speech_end

    @property
    def silent_samples(self) -> int:
        """How long the silence has lasted that may end the open stretch."""
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
        """Forget an open stretch without a fall, as when its audio is dropped. Time goes on.

        `sample` is the end of what is dropped, if it lies ahead of the frames seen so far.
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
        # Where silence became long enough, not where the frame happens to end. A shortened setting applies from now on.
        fall = Fall(max(silent_at, start), self._speech_end)
        self._end_stretch(fall.sample)
        return fall

    def _end_stretch(self, sample: int) -> None:
        self.state = EdgeState.QUIET
        self._floor = max(sample, self._floor)

    def _check_not_past(self, sample: int) -> None:
        if sample < self.sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self.sample} have been judged")
