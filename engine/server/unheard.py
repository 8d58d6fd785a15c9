"""Audio that waits for the speech detector. A silence that was declared is a number, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.messages import Item
from engine.spec import ModelSpec

Samples = NDArray[np.float32]

# So much of a declared silence is listened to: by then speech has ended and the detector's answer does not change.
SETTLING_SECONDS = 2


@dataclass(slots=True)
class Stretch:
    """Samples to listen to, and how long a silence follows them that need not be."""

    pieces: list[Samples] = field(default_factory=list)
    silence: int = 0
    # Samples of silence at the end of the pieces.
    settling: int = 0

    def samples(self) -> Samples:
        if len(self.pieces) == 1:
            return self.pieces[0]  # most live streams, most of the time
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)


class Unheard:
    """What has come of one stream since it was listened to."""

    def __init__(self, spec: ModelSpec) -> None:
        self.stretches = [Stretch()]
        self.length = 0  # samples to listen to
        self._spec = spec
        self._settling = SETTLING_SECONDS * spec.sample_rate

    def add(self, items: Sequence[Item]) -> int:
        """Returns where the audio ends that has come."""
        spec, end = self._spec, 0
        for item in items:
            count = item.length * spec.samples_per_position if item.samples is None else item.samples
            if item.payload is None or item.payload.ndim > 1:
                self._add_silence(count)  # features cannot be listened to
            else:
                # Without look-around and padding.
                self._add_samples(item.payload[spec.look_back_samples : spec.look_back_samples + count])
            end = item.sample + count
        return end

    def _add_samples(self, samples: Samples) -> None:
        if self.stretches[-1].silence:
            self.stretches.append(Stretch())
        self.stretches[-1].pieces.append(samples)
        self.length += len(samples)
        self.stretches[-1].settling = 0

    def _add_silence(self, count: int) -> None:
        stretch = self.stretches[-1]
        listened = min(count, self._settling - stretch.settling)
        if listened:
            stretch.pieces.append(np.zeros(listened, np.float32))
            self.length += listened
            stretch.settling += listened
        stretch.silence += count - listened
