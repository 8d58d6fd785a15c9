"""Which streams a speech detector listens to, each with a slot of the detector's state; the same for every detector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import AtCapacity, BadItem, DuplicateStream, UnknownStream

Samples = NDArray[np.float32]


class HasSlot(Protocol):
    slot: int


Ear = TypeVar("Ear", bound=HasSlot)


class DetectorSlots(Generic[Ear]):
    """An ear is what the detector knows of one stream, on the host."""

    def __init__(self, max_streams: int) -> None:
        self.ears: dict[str, Ear] = {}
        self._free = list(range(max_streams - 1, -1, -1))

    def open(self, stream: str, ear_in: Callable[[int], Ear]) -> int:
        """The slot that the stream has from now on. What its last stream left there is the caller's to clear."""
        if stream in self.ears:
            raise DuplicateStream(stream, "is open in the speech detector already")
        if not self._free:
            raise AtCapacity(stream, f"the speech detector listens to {len(self.ears)} streams, its maximum")
        slot = self._free.pop()
        self.ears[stream] = ear_in(slot)
        return slot

    def close(self, stream: str) -> None:
        ear = self.ears.pop(stream, None)
        if ear is None:
            raise UnknownStream(stream, "is not open in the speech detector")
        self._free.append(ear.slot)

    def check(self, batch: list[tuple[str, Samples]]) -> None:
        """Raises for what cannot be listened to, before anything of the batch is heard."""
        if len(dict(batch)) < len(batch):
            ((twice, _),) = Counter(stream for stream, _ in batch).most_common(1)
            raise BadItem(twice, "comes twice in one batch of the speech detector")
        for stream, samples in batch:
            if stream not in self.ears:
                raise UnknownStream(stream, "is not open in the speech detector")
            if samples.dtype != np.float32 or samples.ndim != 1:
                raise BadItem(stream, f"speech detection takes one row of float32 samples, not {samples.dtype}")
