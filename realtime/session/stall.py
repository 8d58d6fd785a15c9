"""The stall guard notices that speech is heard and no text comes, although everything looks healthy. Pure.

It keeps the audio since the last text, bounded, so that a fresh engine stream can hear it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from engine import messages
from realtime.session.events import Reanchor, Samples

SPEECH_PROBABILITY = 0.6
# Kept before the last sure point, so that a replay does not begin inside a word.
MARGIN_SECONDS = 1.0
# Shorter pieces of audio are kept together.
JOINED_SAMPLES = 1600


@dataclass(frozen=True, slots=True)
class SavedStall:
    """A guard as a value: of the kept audio, only where it lies."""

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
        # Audio and declared gaps (a plain count) in order, from sample `_kept_from` on.
        self._kept: deque[Samples | int] = deque()
        self._kept_from = 0
        self._kept_samples = 0
        self._speech_samples = 0
        self._last_sign: float | None = None
        # The guard waits twice as long after each firing that brought no text: music is not speech that got lost.
        self._patience = 1

    @property
    def kept_samples(self) -> int:
        return self._kept_samples

    def save(self) -> SavedStall:
        return SavedStall(self._kept_from, self._kept_samples, self._speech_samples, self._last_sign, self._patience)

    def load(self, saved: SavedStall, shift: float) -> None:
        """Go on where another guard stopped, on a clock that shows `shift` more."""
        self._kept = deque([saved.kept_samples] if saved.kept_samples else [])
        self._kept_from, self._kept_samples = saved.kept_from, saved.kept_samples
        self._speech_samples, self._patience = saved.speech_samples, saved.patience
        self._last_sign = None if saved.last_sign is None else saved.last_sign + shift

    def keep(self, start: int, audio: Samples | int) -> None:
        """Audio that begins at sample `start` is on its way to the engine; a plain count is declared silence."""
        if not self._kept:
            self._kept_from = start
        self._kept_samples += _length(audio)
        self._kept.append(_joined(self._kept.pop(), audio) if self._kept and _fit(self._kept[-1], audio) else audio)
        if self._kept_samples > self._keep_samples:
            self.forget_before(self._kept_from + self._kept_samples - self._keep_samples)

    def heard_speech(self, probability: float, samples: int, now: float) -> None:
        if probability >= SPEECH_PROBABILITY:
            if self._speech_samples == 0:
                self._last_sign = now
            self._speech_samples += samples

    def heard_text(self, text: messages.Text, base: int, now: float) -> None:
        """Text came: everything up to its last word is dealt with."""
        self._speech_samples = 0
        self._last_sign = now
        self._patience = 1
        if text.words:
            self.forget_before(base + text.words[-1].end_sample)

    def quiet(self, covered: int) -> None:
        """Nobody speaks at sample `covered`; if no text is owed either, older audio is of no use."""
        if self._speech_samples == 0:
            self.forget_before(covered - self._margin_samples)

    def stalled(self, now: float) -> bool:
        limit = self._stall_seconds * self._patience
        if self._stall_seconds <= 0 or self._last_sign is None:
            return False
        return self._speech_samples >= limit * self._rate and now - self._last_sign >= limit

    def reanchor(self, appended: int, now: float) -> Reanchor:
        """Start over from the kept audio, which stays kept: the new stream may stall too."""
        self._speech_samples = 0
        self._last_sign = now
        self._patience *= 2
        base = self._kept_from if self._kept else appended
        return Reanchor(base, tuple(self._kept))

    def forget_before(self, sample: int) -> None:
        """Audio before this sample is dealt with, to the sample."""
        while self._kept and self._kept_from < sample:
            oldest = self._kept.popleft()
            dropped = min(_length(oldest), sample - self._kept_from)
            self._kept_from += dropped
            self._kept_samples -= dropped
            if dropped < _length(oldest):
                self._kept.appendleft(oldest - dropped if isinstance(oldest, int) else oldest[dropped:])


def _fit(last: Samples | int, audio: Samples | int) -> bool:
    """Whether two pieces may become one: tiny ones must not cost more than the samples in them."""
    if isinstance(last, int) or isinstance(audio, int):
        return isinstance(last, int) and isinstance(audio, int)
    return len(last) + len(audio) <= JOINED_SAMPLES


def _joined(last: Samples | int, audio: Samples | int) -> Samples | int:
    if isinstance(last, int) or isinstance(audio, int):
        return _length(last) + _length(audio)
    return np.concatenate((last, audio))


def _length(audio: Samples | int) -> int:
    return audio if isinstance(audio, int) else len(audio)
