"""Live audio for benchmarks of engines: frames of many streams, in the order in which they become complete."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.messages import Feed, Item

POSITION_NS = 80_000_000
JOIN_EVERY_NS = 5_000_000


class Traffic:
    """N streams, each with its own phase and its own place in the sound; they join one after the other."""

    def __init__(
        self,
        streams: int,
        first_position: int,
        seed: int,
        sound: NDArray[np.float32],
        payload_samples: int = 2000,
        join_every_ns: int = JOIN_EVERY_NS,
    ) -> None:
        random = np.random.default_rng(seed)
        self.names = [f"stream {index}" for index in range(streams)]
        self._phases = np.sort(random.integers(0, POSITION_NS, streams)).tolist()
        # Frames that a stream misses at the beginning because it has not joined yet.
        self._missed = (random.permutation(streams) * join_every_ns // POSITION_NS).tolist()
        self.joined_ns = (max(self._missed) + 1) * POSITION_NS
        # It goes round; a frame reads a little further.
        self._length = len(sound)
        self._sound = np.concatenate([sound, sound[:payload_samples]])
        self._payload_samples = payload_samples
        self._starts = random.integers(0, self._length, streams).tolist()
        self._first = first_position
        self._next = 0  # frames are numbered over all streams, in order of arrival

    def due(self, elapsed_ns: int) -> list[Feed]:
        feeds = []
        while self.next_arrival() <= elapsed_ns:
            frame, index = divmod(self._next, len(self.names))
            self._next += 1
            frame -= self._missed[index]
            if frame < 0:
                continue
            start = (self._starts[index] + frame * 1280) % self._length
            item = Item(
                offset=self._first + frame,
                length=1,
                sample=frame * 1280,
                key=b"%d/%d" % (index, frame),
                payload=self._sound[start : start + self._payload_samples],
            )
            feeds.append(Feed(self.names[index], [item]))
        return feeds

    def next_arrival(self) -> int:
        frame, index = divmod(self._next, len(self.names))
        return int((frame + 1) * POSITION_NS + self._phases[index])

    def arrival(self, index: int, position: int) -> int:
        return int((position - self._first + self._missed[index] + 1) * POSITION_NS + self._phases[index])
