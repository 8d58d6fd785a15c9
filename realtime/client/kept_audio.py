"""Audio that a server may not have yet, kept within a bound so that it can be sent again; no I/O."""

from __future__ import annotations

from collections import deque

BYTES_PER_SAMPLE = 2


class KeptAudio:
    """16-bit samples from `first` to `end`, counted from the beginning of the sound. The oldest go when it is full."""

    def __init__(self, most_samples: int) -> None:
        self.first = 0
        self.end = 0
        # Samples that went although nobody had confirmed them.
        self.lost = 0
        self._most = most_samples
        self._chunks: deque[bytes] = deque()

    @property
    def room(self) -> int:
        """Samples that can come before the oldest go."""
        return self._most - (self.end - self.first)

    def append(self, pcm16: bytes) -> None:
        self._chunks.append(pcm16)
        self.end += len(pcm16) // BYTES_PER_SAMPLE
        excess = self.end - self.first - self._most
        if excess > 0:
            self.lost += excess
            self._drop(excess)

    def confirm(self, sample: int) -> None:
        """Everything before this sample is safe and need not be kept."""
        self._drop(min(sample, self.end) - self.first)

    def since(self, sample: int, most_samples: int) -> bytes:
        """Up to so many samples from this one on, which must not lie before `first`."""
        found = bytearray()
        at = self.first
        for chunk in self._chunks:
            length = len(chunk) // BYTES_PER_SAMPLE
            if at + length > sample:
                found += chunk[BYTES_PER_SAMPLE * max(0, sample - at) :]
                if len(found) >= BYTES_PER_SAMPLE * most_samples:
                    break
            at += length
        return bytes(found[: BYTES_PER_SAMPLE * most_samples])

    def _drop(self, samples: int) -> None:
        """Forget the oldest."""
        while samples > 0:
            chunk = self._chunks.popleft()
            length = len(chunk) // BYTES_PER_SAMPLE
            if length > samples:
                self._chunks.appendleft(chunk[BYTES_PER_SAMPLE * samples :])
                length = samples
            self.first += length
            samples -= length
