"""What steps cost, measured as the engine runs: a part for the step and a part for each stream or position in it.

How busy an engine is says little about how many more streams it holds: a model that batches is busy all the time long
before it is full, and one that does not is full when it is busy. The two parts tell them apart. They come from least
squares over the last steps, older ones counting less and less: a machine that was busy with something else a while
ago is forgotten.
"""

from __future__ import annotations

# Steps that make a measurement.
ENOUGH_STEPS = 8
# How long steps are remembered, about; but not more of them than this, and the newest alone is never believed.
MEMORY_NS = 20e9
LEAST_SHARE_OF_NEWEST, MOST_SHARE_OF_NEWEST = 1 / 256, 1 / ENOUGH_STEPS
# Until batches of different sizes have run, a shared cost cannot be told from the streams' own, and all of it counts as
# the streams' own. At this variance of batch sizes, that assumption and the measured slope weigh the same.
DOUBT = 0.05
# No stream is free, whatever the steps say.
LEAST_SHARE_OF_MEAN = 0.01


class StepCost:
    """Splits the cost of steps of different sizes, in streams or in positions: a fixed part and a part for each."""

    def __init__(self) -> None:
        self._steps = 0
        self._last_ns = 0
        self.mean_size = 0.0
        self._ns = self._size_squared = self._product = 0.0

    def add(self, size: int, ns: float, now_ns: int) -> float:
        """A step of this size took so long. Returns the share that it has in what is known from now on."""
        self._steps += 1
        since_last = (now_ns - self._last_ns) / MEMORY_NS
        self._last_ns = now_ns
        share = max(1 / self._steps, min(max(LEAST_SHARE_OF_NEWEST, since_last), MOST_SHARE_OF_NEWEST))
        self.mean_size += share * (size - self.mean_size)
        self._ns += share * (ns - self._ns)
        self._size_squared += share * (size * size - self._size_squared)
        self._product += share * (size * ns - self._product)
        return share

    def parts(self) -> tuple[float, float] | None:
        """Nanoseconds that a step takes however small it is, and that each of its size adds; None while too little has
        been measured."""
        if self._steps < ENOUGH_STEPS:
            return None
        mean = self._ns / self.mean_size
        variance = max(0.0, self._size_squared - self.mean_size * self.mean_size)
        covariance = self._product - self.mean_size * self._ns
        slope = (covariance + DOUBT * mean) / (variance + DOUBT)
        each = min(max(slope, LEAST_SHARE_OF_MEAN * mean), mean)
        return self._ns - each * self.mean_size, each


class LiveCost:
    """What live streams cost, as shares of the engine's time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was measured so far is not how it will be."""
        self._cost = StepCost()
        self._audio_ns = 0.0

    def add(self, streams: int, ns: float, audio_ns: float, now_ns: int) -> None:
        """A step took so long for so many live streams, which heard so much new audio in it, all together."""
        self._audio_ns += self._cost.add(streams, ns, now_ns) * (audio_ns - self._audio_ns)

    def shares(self) -> tuple[float, float]:
        """Of the engine's time: what steps take however few streams there are, and what each stream adds.

        Both are 0 while too little has been measured.
        """
        parts = self._cost.parts()
        if parts is None:
            return 0.0, 0.0
        # How often a stream that speaks takes part in a step.
        period_ns = self._audio_ns / self._cost.mean_size
        return parts[0] / period_ns, parts[1] / period_ns
