"""The last audio of one stream, for what is computed beside the model: revisions, speaker labels and turn questions.

Samples are kept with 16 bits, declared silence as a number of samples, each with the position of its item: a saved
state tells from which position on its audio must be sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.messages import Item
from engine.spec import ModelSpec

Samples = NDArray[np.float32]


def _new_samples(item: Item, spec: ModelSpec) -> Samples | int:
    """The samples that an item adds to its stream; a number if they are silence, or prepared and not audio."""
    count = item.covered_samples(spec.samples_per_position)
    if item.payload is None or item.payload.ndim > 1:
        return count
    samples: Samples = item.payload[spec.look_back_samples : spec.look_back_samples + count]
    return samples


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    end: int
    position: int
    # None: silence.
    samples: NDArray[np.int16] | None


class RecentAudio:
    """Parts are added at the end and dropped at the beginning."""

    def __init__(self) -> None:
        self._parts: deque[_Part] = deque()
        # The sample after the last one that was added.
        self.end = 0

    def add(self, items: Iterable[Item], spec: ModelSpec) -> None:
        for item in items:
            audio = _new_samples(item, spec)
            if isinstance(audio, int):
                part = _Part(item.sample, item.sample + audio, item.offset, None)
            else:
                kept = np.clip(np.rint(audio * 32768), -32768, 32767).astype(np.int16)
                part = _Part(item.sample, item.sample + len(kept), item.offset, kept)
            self._parts.append(part)
            self.end = part.end

    def drop_before(self, sample: int) -> None:
        """Drop parts that end before this sample. The last part stays: it tells where the stream is."""
        while len(self._parts) > 1 and self._parts[0].end <= sample:
            self._parts.popleft()

    def cut(self, start: int, end: int) -> Samples:
        """[start, end); silence where nothing is kept."""
        found = np.zeros(max(0, end - start), np.float32)
        for part in self._parts:
            low, high = max(start, part.start), min(end, part.end)
            if low < high and part.samples is not None:
                found[low - start : high - start] = part.samples[low - part.start : high - part.start]
        found /= 32768
        return found

    @property
    def start(self) -> int:
        """The first sample that is kept."""
        return self._parts[0].start if self._parts else self.end

    @property
    def position(self) -> int | None:
        """The position of the first item that is kept; None if there is none."""
        return self._parts[0].position if self._parts else None

    @property
    def kept_samples(self) -> int:
        """Samples in memory; silence takes none."""
        return sum(len(part.samples) for part in self._parts if part.samples is not None)
