"""Streaming resampling to the model's rate (soxr), one ratio for life.

soxr works in blocks of its own, so its output does not depend on how the input is cut: any split gives the same bits.
The price is delay: output arrives in bursts, and until the next burst some input is held back; a flush releases it.

| rate (Hz) | 8000 | 11025 | 22050 | 24000 | 32000 | 44100 | 48000 |
|---|---|---|---|---|---|---|---|
| held back at most (input samples) | 240 | 925 | 886 | 878 | 1853 | 1773 | 1757 |
| the same in ms | 30 | 84 | 40 | 37 | 58 | 40 | 37 |
"""

from __future__ import annotations

import numpy as np
import soxr
from numpy.typing import NDArray

from audio.errors import UnsupportedRate

MODEL_RATE = 16_000
MIN_RATE = 8_000
# Live audio comes at 48 kHz at most; recordings go beyond it.
MAX_RATE = 192_000

# Doubling the rate is the one case in which soxr's variable-rate filter is exact in phase and length, and it holds back
# 30 ms where the block filter holds back 116 ms. Telephone audio comes at this rate, and its listeners wait for us.
_DOUBLING_RATE = MODEL_RATE // 2


class Resampler:
    """float32 mono from `rate` to 16 kHz.

    n samples in give round(n * 16000 / rate) samples out, halves rounded up, once they are flushed.
    """

    def __init__(self, rate: int) -> None:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise UnsupportedRate(f"sample rate {rate} Hz is not supported; send {MIN_RATE} to {MAX_RATE} Hz")
        self.rate = rate
        self._stream: soxr.ResampleStream | None = None
        if rate != MODEL_RATE:
            self._stream = soxr.ResampleStream(
                rate, MODEL_RATE, 1, dtype="float32", quality="HQ", vr=rate == _DOUBLING_RATE
            )

    def resample(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The samples that can be computed so far; the same array when the rates are equal."""
        if self._stream is None:
            return samples
        resampled: NDArray[np.float32] = self._stream.resample_chunk(samples)
        return resampled

    def flush(self) -> NDArray[np.float32]:
        """The rest of what has come. The next sample starts a new signal at the same ratio."""
        nothing = np.empty(0, np.float32)
        if self._stream is None:
            return nothing
        rest: NDArray[np.float32] = self._stream.resample_chunk(nothing, last=True)
        self._stream.clear()
        return rest
