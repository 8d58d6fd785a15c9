"""Raw audio formats (PCM, mu-law, A-law): decodes to float32 mono in [-1, 1] (`Decoder`), and resamples (`Resampler`).

The gateway has one of each per session with raw audio (`realtime/serving/audio_intake.py`). A piece may end within a
sample, so a `Decoder` keeps the bytes of an incomplete sample for the next piece. Whole samples are read as views of
the caller's bytes, except after an incomplete sample; only the conversion to float32 allocates.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import soxr
from numpy.typing import NDArray

from audio.errors import BadSamples, UnsupportedRate

# Encoders and resamplers exceed full scale by a few dB. Larger values are not audio: usually integers that were not
# scaled, or bytes that are misaligned.
MAX_OVERSHOOT = 4.0

PCM16_SCALE = np.float32(1 / 32768)

# Made once, because numpy takes longer to parse a type's name than to convert a short piece of audio.
_INT16, _FLOAT32, _BYTE = np.dtype("<i2"), np.dtype("<f4"), np.dtype(np.uint8)


class Encoding(StrEnum):
    """The raw formats; all are little-endian and mono."""

    PCM16 = "pcm16"
    FLOAT32 = "float32"
    ULAW = "g711_ulaw"
    ALAW = "g711_alaw"

    @property
    def sample_bytes(self) -> int:
        return _SAMPLE_BYTES[self]


_SAMPLE_BYTES = {Encoding.PCM16: 2, Encoding.FLOAT32: 4, Encoding.ULAW: 1, Encoding.ALAW: 1}


def _ulaw_table() -> NDArray[np.float32]:
    """G.711 u-law: complemented byte of sign, 3-bit exponent and 4-bit mantissa over a bias of 33 (14-bit scale)."""
    code = ~np.arange(256, dtype=np.uint8)
    exponent = (code >> 4 & 7).astype(np.int32)
    mantissa = (code & 15).astype(np.int32)
    magnitude = ((2 * mantissa + 33) << exponent) - 33
    # 14-bit values become 16-bit ones with a factor of 4.
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32) * 4 * PCM16_SCALE


def _alaw_table() -> NDArray[np.float32]:
    """G.711 A-law: every other bit inverted, sign bit set for positive values, exponent 0 without the leading one."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent = (code >> 4 & 7).astype(np.int32)
    mantissa = (code & 15).astype(np.int32)
    magnitude = np.where(exponent == 0, 2 * mantissa + 1, (2 * mantissa + 33) << np.maximum(exponent - 1, 0))
    # 13-bit values become 16-bit ones with a factor of 8.
    return np.where(code & 0x80, magnitude, -magnitude).astype(np.float32) * 8 * PCM16_SCALE


_G711_TABLES = {Encoding.ULAW: _ulaw_table(), Encoding.ALAW: _alaw_table()}


def checked_samples(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same array if all samples are in [-1, 1]; a clipped copy if some exceed it a little. Raises BadSamples.

    A slight overshoot must not end a session, because an integer format would have clipped it too. NaN, infinity and
    values far out of range are not audio, and would corrupt all later results.
    """
    if not len(samples):
        return samples
    # Both reductions return NaN if there is one, and comparisons with NaN are False.
    lowest, highest = samples.min(), samples.max()
    if lowest >= -1 and highest <= 1:
        return samples
    if lowest >= -MAX_OVERSHOOT and highest <= MAX_OVERSHOOT:
        return np.clip(samples, -1, 1)
    if np.isfinite(samples).all():
        peak = max(-lowest, highest)
        raise BadSamples(
            f"float32 audio must lie in [-1, 1] but holds {peak:.6g}; divide integer samples by their full scale "
            "(32768 for 16 bits), and make sure the bytes are little-endian float32"
        )
    raise BadSamples("float32 audio holds NaN or infinity; make sure the bytes are little-endian float32")


class Decoder:
    """Decodes one stream of raw samples, in pieces of any size."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = Encoding(encoding)
        self._sample_bytes = self.encoding.sample_bytes
        self._carry = b""

    def decode(self, data: bytes | memoryview) -> NDArray[np.float32]:
        """The samples that `data` completes. The result may be a view of `data`, which must not change afterwards.

        Raises BadSamples, and then ignores the piece.
        """
        if self._carry:
            data = self._carry + data
        count, extra = divmod(len(data), self._sample_bytes)
        samples = self._decode(data, count)
        self._carry = bytes(data[len(data) - extra :]) if extra else b""
        return samples

    def flush(self) -> int:
        """End the stream. Returns the number of dropped bytes of an incomplete sample."""
        dangling = len(self._carry)
        self._carry = b""
        return dangling

    def _decode(self, data: bytes | memoryview, count: int) -> NDArray[np.float32]:
        if self.encoding is Encoding.PCM16:
            scaled: NDArray[np.float32] = np.multiply(np.frombuffer(data, _INT16, count), PCM16_SCALE, dtype=_FLOAT32)
            return scaled
        if self.encoding is Encoding.FLOAT32:
            return checked_samples(np.frombuffer(data, _FLOAT32, count))
        return _G711_TABLES[self.encoding][np.frombuffer(data, _BYTE, count)]


MODEL_RATE = 16_000
MIN_RATE = 8_000
# Live audio has at most 48 kHz; recordings may have more.
MAX_RATE = 192_000

# For telephone audio (8 kHz) soxr's variable-rate filter is used: at a ratio of 2 it is exact in phase and length, and
# delays the audio by 30 ms instead of 116 ms.
_DOUBLING_RATE = MODEL_RATE // 2


class Resampler:
    """Resamples float32 mono from `rate` to 16 kHz, with soxr.

    n input samples give round(n * 16000 / rate) output samples, halves rounded up, after a flush. soxr works in its own
    blocks, so the output does not depend on how the input is cut. But it comes in bursts: 30 to 84 ms of input are held
    back until the next burst or a flush, depending on the rate.
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
        """The samples that can be computed so far; the same array if the rates are equal."""
        if self._stream is None:
            return samples
        resampled: NDArray[np.float32] = self._stream.resample_chunk(samples)
        return resampled

    def flush(self) -> NDArray[np.float32]:
        """The remaining samples. The next sample starts a new signal at the same rate."""
        nothing = np.empty(0, np.float32)
        if self._stream is None:
            return nothing
        rest: NDArray[np.float32] = self._stream.resample_chunk(nothing, last=True)
        self._stream.clear()
        return rest
