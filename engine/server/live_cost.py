"""What a step costs live streams, measured as the engine runs: a part for the step and a part for each stream in it.

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


class LiveCost:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was measured so far is not how it will be."""
        self._steps = 0
        self._last_ns = 0
        self._streams = self._ns = self._audio_ns = self._streams_squared = self._product = 0.0

    def add(self, streams: int, ns: float, audio_ns: float, now_ns: int) -> None:
        """A step took so long for so many live streams, which heard so much new audio in it, all together."""
        self._steps += 1
        since_last = (now_ns - self._last_ns) / MEMORY_NS
        self._last_ns = now_ns
        share = max(1 / self._steps, min(max(LEAST_SHARE_OF_NEWEST, since_last), MOST_SHARE_OF_NEWEST))
        self._streams += share * (streams - self._streams)
        self._ns += share * (ns - self._ns)
        self._audio_ns += share * (audio_ns - self._audio_ns)
        self._streams_squared += share * (streams * streams - self._streams_squared)
        self._product += share * (streams * ns - self._product)

    def shares(self) -> tuple[float, float]:
        """Of the engine's time: what steps take however few streams there are, and what each stream adds.

        Both are 0 while too little has been measured.
        """
        if self._steps < ENOUGH_STEPS:
            return 0.0, 0.0
        mean = self._ns / self._streams
        variance = max(0.0, self._streams_squared - self._streams * self._streams)
        covariance = self._product - self._streams * self._ns
        slope = (covariance + DOUBT * mean) / (variance + DOUBT)
        per_stream = min(max(slope, LEAST_SHARE_OF_MEAN * mean), mean)
        per_step = self._ns - per_stream * self._streams
        # How often a stream that speaks takes part in a step.
        period_ns = self._audio_ns / self._streams
        return per_step / period_ns, per_stream / period_ns
