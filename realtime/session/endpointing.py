"""When a turn begins and ends, from speech probabilities and, for semantic detection, from what was said. Pure.

Semantic detection ends a turn soon after a sentence that reads as finished, and gives an unfinished one time to go on,
up to the caps of the OpenAI interface: 8, 4 and 2 seconds of silence for low, medium (auto) and high eagerness.
"""

from __future__ import annotations

from dataclasses import dataclass

from audio.speech_edges import EdgeDetector, EdgeMemory, EdgeSettings, EdgeState, Fall, Rise
from engine.messages import TurnRule
from realtime.session.settings import TurnDetection
from realtime.session.words import ends_sentence

# Shorter sounds are clicks, not speech.
MIN_SPEECH_MS = 64
# After a pause this long the model is asked for all it has heard, so that the text can be judged.
PROBE_MS = 250
FINISHED_MS = {"high": 300, "medium": 500, "auto": 500, "low": 900}
UNFINISHED_MS = {"high": 2000, "medium": 4000, "auto": 4000, "low": 8000}


@dataclass(frozen=True, slots=True)
class Started:
    sample: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The speaker paused inside a turn; the model's whole text is wanted now."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The turn ends at `sample`, with the silence in which nobody has spoken since `speech_end`."""

    sample: int
    speech_end: int


TurnSign = Started | Paused | Stopped


@dataclass(frozen=True, slots=True)
class SavedWatch:
    """A watch as a value."""

    base: int
    edges: EdgeMemory
    silent_samples: int
    probed: bool


def turn_rule(detection: TurnDetection | None, sample_rate: int) -> TurnRule | None:
    """What the engine takes for the end of a turn: silence after which the watch asks for the text."""
    if detection is None:
        return None
    silence_ms = PROBE_MS if detection.semantic else detection.silence_duration_ms
    return TurnRule(detection.threshold, MIN_SPEECH_MS * sample_rate // 1000, silence_ms * sample_rate // 1000)


class TurnWatch:
    """Follows the turns of one session from sample `start` on."""

    def __init__(self, detection: TurnDetection, sample_rate: int, start: int, *, first_frame: int) -> None:
        """`first_frame` is where the next frame begins; turns begin at `start`, which may lie ahead of it."""
        self._detection = detection
        self._rate = sample_rate
        self._base = first_frame
        self._detector = EdgeDetector(self._settings(""))
        self._detector.reset(max(0, start - first_frame))
        self._silent_samples = 0
        self._probed = False

    def save(self) -> SavedWatch:
        return SavedWatch(self._base, self._detector.save(), self._silent_samples, self._probed)

    def load(self, saved: SavedWatch) -> None:
        """Go on where another watch stopped."""
        self._base, self._silent_samples, self._probed = saved.base, saved.silent_samples, saved.probed
        self._detector.load(saved.edges)

    def watch(self, probability: float, samples: int, text: str) -> list[TurnSign]:
        """Take the next frame; `text` is the end of what the open turn says so far."""
        if self._detection.semantic:
            self._detector.settings = self._settings(text)
        found = self._detector.judge(probability, samples)
        signs: list[TurnSign] = []
        if isinstance(found, Rise):
            signs.append(Started(self._base + found.sample))
        elif isinstance(found, Fall):
            signs.append(Stopped(self._base + found.sample, self._base + found.speech_end_sample))
        if self._detection.semantic and self._pause_needs_text(samples):
            signs.append(Paused())
        return signs

    def change(self, detection: TurnDetection) -> None:
        """Judge by other settings from the next frame on; an open turn stays open."""
        self._detection = detection
        self._detector.settings = self._settings("")

    @property
    def quiet(self) -> bool:
        """Nobody speaks, and nobody may just have begun to."""
        return self._detector.state is EdgeState.QUIET

    def may_have_stopped(self, samples: int) -> bool:
        """Whether the open turn may have ended in so many samples that were not judged yet."""
        chosen = self._detection
        silence_ms = FINISHED_MS[chosen.eagerness] if chosen.semantic else chosen.silence_duration_ms
        return samples > 0 and (self._detector.silent_samples + samples) * 1000 >= silence_ms * self._rate

    def resume_turn(self) -> None:
        """A turn is open that another watch heard begin."""
        self._detector.state = EdgeState.SPEAKING

    def restart(self, sample: int) -> None:
        """Forget an open turn; the next one begins at `sample` at the earliest."""
        self._detector.reset(max(sample - self._base, self._detector.sample))

    def _pause_needs_text(self, samples: int) -> bool:
        """True once in every pause inside a turn."""
        if self._detector.state is not EdgeState.STOPPING:
            self._silent_samples, self._probed = 0, False
            return False
        self._silent_samples += samples
        if self._probed or self._silent_samples < PROBE_MS * self._rate // 1000:
            return False
        self._probed = True
        return True

    def _settings(self, text: str) -> EdgeSettings:
        chosen = self._detection
        silence_ms = chosen.silence_duration_ms
        if chosen.semantic:
            silence_ms = (FINISHED_MS if ends_sentence(text) else UNFINISHED_MS)[chosen.eagerness]
        return EdgeSettings(
            threshold=chosen.threshold,
            min_speech_samples=MIN_SPEECH_MS * self._rate // 1000,
            silence_samples=silence_ms * self._rate // 1000,
            prefix_samples=chosen.prefix_padding_ms * self._rate // 1000,
        )
