"""Detects that the engine reports speech but sends no text (`StallGuard`), and keeps the audio for another attempt.

A part of the session core (`core.py`), without I/O. The guard owns the audio since the last text, up to a limit. When
the engine stalls, the session abandons its engine stream and opens a new one, which gets this audio again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from engine import messages
from realtime.session.events import Reanchor, Samples

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
