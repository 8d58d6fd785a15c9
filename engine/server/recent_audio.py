"""`RecentAudio`: the last seconds of one stream's audio in the engine, for second pass, turn detector and labels.

Second passes (`revisions.py`), turn questions (`turn_questions.py`) and speaker labels (`speakers.py`) have one each
for each stream. The audio with which a stream is rebuilt is elsewhere: `engine/boundary/replay.py`. Audio is kept in
parts of one second, into which items are written one after the other, so that a turn is joined from few parts. Items
without samples (declared silence, features) are kept as a length. Each part has the position of its first item, from
which a saved state computes the position from which audio must be sent again. `cut` rounds to 16 bits: audio that a
gateway kept with 16 bits and sends again gives the same samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from engine.messages import Item
from engine.spec import ModelSpec

Samples = NDArray[np.float32]

# Size of a part; a longer item has a part of its own length.
PART_SAMPLES = 16_000


def new_samples(item: Item, spec: ModelSpec) -> Samples | int:
    """The samples that an item adds to its stream; their number if they are silence or the item has features."""
    count = item.covered_samples(spec.samples_per_position)
    if item.payload is None or item.payload.ndim > 1:
        return count
    samples: Samples = item.payload[spec.look_back_samples : spec.look_back_samples + count]
    return samples


def rounded_to_16_bits(samples: Samples) -> Samples:
    """The samples as they would be after a transport with 16 bits. Changes the array in place."""
    samples *= 32768
    np.rint(samples, out=samples)
    np.clip(samples, -32768, 32767, out=samples)
    samples /= 32768
    return samples


@dataclass(slots=True)
class _Part:
    # First sample and end, and the position of the first item.
    start: int
    end: int
    position: int
    # The array for the part's samples, written up to `end`. None: silence.
    samples: Samples | None


def _joined(parts: Iterable[_Part], start: int, end: int) -> Samples:
    joined = np.zeros(max(0, end - start), np.float32)
    for part in parts:
        low, high = max(start, part.start), min(end, part.end)
        if low < high and part.samples is not None:
            joined[low - start : high - start] = part.samples[low - part.start : high - part.start]
    return rounded_to_16_bits(joined)


class RecentAudio:
    """The audio from `start` to `end`, in samples of the stream: added at the end, dropped at the beginning."""

    def __init__(self) -> None:
        self._parts: deque[_Part] = deque()
        # The sample after the last one that was added.
        self.end = 0

    def add(self, items: Iterable[Item], spec: ModelSpec) -> None:
        for item in items:
            self.add_part(item.sample, item.offset, new_samples(item, spec))

    def add_part(self, sample: int, position: int, audio: Samples | int) -> None:
        """Audio from this sample and position on; a number of samples is silence."""
        if isinstance(audio, int):
            self._parts.append(_Part(sample, sample + audio, position, None))
            self.end = sample + audio
            return
        end = sample + len(audio)
        part = self._parts[-1] if self._parts else None
        if part is None or part.samples is None or part.end != sample or end - part.start > len(part.samples):
            part = _Part(sample, end, position, np.empty(max(PART_SAMPLES, len(audio)), np.float32))
            self._parts.append(part)
        assert part.samples is not None
        part.samples[sample - part.start : end - part.start] = audio
        # The end is set last: another thread may read the part meanwhile.
        part.end = self.end = end

    def drop_before(self, sample: int) -> None:
        """Drop parts that end at or before this sample, except the last one: it has the position of the stream."""
        while len(self._parts) > 1 and self._parts[0].end <= sample:
            self._parts.popleft()

    def cut(self, start: int, end: int) -> Samples:
        """The audio of the samples [start, end); silence where nothing is kept."""
        return self.later_cut(start, end)()

    def later_cut(self, start: int, end: int) -> Callable[[], Samples]:
        """A function that returns the same audio as `cut` and can be called later, on any thread."""
        # From the end, because mostly the newest audio is wanted.
        return partial(_joined, list(takewhile(lambda part: part.end > start, reversed(self._parts))), start, end)

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
        return sum(part.end - part.start for part in self._parts if part.samples is not None)
