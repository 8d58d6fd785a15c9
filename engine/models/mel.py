"""Log-mel features of 16 kHz audio: for Voxtral Realtime (`MelFrontEnd`) and speaker embeddings (`KaldiFrontEnd`).

`MelFrontEnd` consists of matrix products, so that a CUDA graph can record it. Frame t is centred on sample 160 t and
spans 400 samples. Splitting the audio into items must not shift this grid. So an item includes the samples before and
after its own frames, and `MelFrontEnd.frames` serves both a live item and a whole file. `KaldiFrontEnd` follows Kaldi's
definition. Whisper and the turn detector compute their features in their own files, and import only constants and the
mel filters from here.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 400
HOP_SAMPLES = 160
MAX_FREQUENCY_HZ = 8_000.0
# Log-mel values, as powers of ten. Voxtral was trained with a fixed maximum instead of the maximum of each file, which
# makes streaming possible. Values below maximum - range are raised to that floor.
LOG_MEL_CEILING = 1.5
LOG_MEL_RANGE = 8.0
# Kaldi's defaults. Pre-emphasis: each sample is reduced by this part of the sample before it.
PRE_EMPHASIS = 0.97
KALDI_FFT_SAMPLES = 512
KALDI_MIN_FREQUENCY_HZ = 20.0


class MelFrontEnd:
    """Samples -> log-mel frames. Holds only constants."""

    def __init__(self, bins: int, device: torch.device | str = "cpu") -> None:
        self._basis = _windowed_fourier_basis().to(device)
        self._filters = slaney_filters(bins).to(device)

    def frames(self, samples: Tensor) -> Tensor:
        """[..., samples] -> [..., 1 + (samples - 400) // 160, bins], without padding."""
        windows = samples.unfold(-1, FRAME_SAMPLES, HOP_SAMPLES)  # [..., frames, 400]
        # In float64: the rounding errors of float32 beside a loud tone would hide bins near the floor.
        spectrum = windows.double() @ self._basis  # [..., frames, 2 * 201]
        real, imaginary = spectrum.chunk(2, dim=-1)
        power = real.square() + imaginary.square()
        log_mel = (power @ self._filters).float().clamp(min=1e-10).log10()
        return (log_mel.clamp(min=LOG_MEL_CEILING - LOG_MEL_RANGE) + 4.0) / 4.0

    def offline(self, samples: Tensor) -> Tensor:
        """[batch, samples] of a whole recording -> [batch, samples // 160, bins], padded by reflection."""
        half = FRAME_SAMPLES // 2
        padded = torch.nn.functional.pad(samples.unsqueeze(1), (half, half), mode="reflect").squeeze(1)
        return self.frames(padded)[:, :-1]


class KaldiFrontEnd:
    """Samples -> log-mel frames as Kaldi computes them without dither. Holds only constants.

    Each frame of 400 samples starts at a multiple of 160: its mean is subtracted, 0.97 times the sample before is
    subtracted from each sample, and Kaldi's "Povey" window is applied (a Hann window to the power of 0.85).
    """

    def __init__(self, bins: int, device: torch.device | str = "cpu") -> None:
        sample = torch.arange(FRAME_SAMPLES, dtype=torch.float64)
        hann = 0.5 - 0.5 * torch.cos(2 * math.pi * sample / (FRAME_SAMPLES - 1))
        self._window = hann.pow(0.85).to(device, torch.float32)
        self._filters = kaldi_filters(bins).to(device, torch.float32)

    def frames(self, samples: Tensor) -> Tensor:
        """[..., samples] -> [..., 1 + (samples - 400) // 160, bins], without padding."""
        windows = samples.unfold(-1, FRAME_SAMPLES, HOP_SAMPLES)  # [..., frames, 400]
        windows = windows - windows.mean(dim=-1, keepdim=True)
        before = torch.cat([windows[..., :1], windows[..., :-1]], dim=-1)
        spectrum = torch.fft.rfft((windows - PRE_EMPHASIS * before) * self._window, KALDI_FFT_SAMPLES)
        power = torch.view_as_real(spectrum).square().sum(dim=-1)  # [..., frames, 257]
        return (power @ self._filters).clamp(min=torch.finfo(torch.float32).eps).log()


def item_features(samples: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """Log-mel features of an item, [bins, frames], from its samples with look-back and look-ahead. Another process may
    compute these features and send them to the engine instead of the samples."""
    return MelFrontEnd(bins).frames(torch.from_numpy(samples)).T.contiguous().numpy()


def _windowed_fourier_basis() -> Tensor:
    """[400, 2 * 201] float64: Hann window times cosine, then times sine, of every bin."""
    sample = torch.arange(FRAME_SAMPLES, dtype=torch.float64)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * sample / FRAME_SAMPLES)
    frequency = torch.arange(FRAME_SAMPLES // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi / FRAME_SAMPLES * sample[:, None] * frequency[None, :]
    return torch.cat([angle.cos(), angle.sin()], dim=1) * window[:, None]


def slaney_filters(bins: int) -> Tensor:
    """[201, bins] float64: triangular filters of equal area, equally spaced on Slaney's mel scale."""
    top = _hz_to_mel(MAX_FREQUENCY_HZ)
    corners = _mel_to_hz(torch.linspace(0.0, top, bins + 2, dtype=torch.float64))
    lower, centre, upper = corners[:-2], corners[1:-1], corners[2:]
    frequency = torch.linspace(0.0, SAMPLE_RATE / 2, FRAME_SAMPLES // 2 + 1, dtype=torch.float64)[:, None]
    rising = (frequency - lower) / (centre - lower)
    falling = (upper - frequency) / (upper - centre)
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    return triangles * (2.0 / (upper - lower))


def kaldi_filters(bins: int) -> Tensor:
    """[257, bins] float64: triangular filters of height 1, equally spaced on HTK's mel scale from 20 Hz to 8 kHz."""

    def mel(hz: Tensor) -> Tensor:
        return 1127.0 * torch.log1p(hz / 700.0)

    low, high = mel(torch.tensor([KALDI_MIN_FREQUENCY_HZ, MAX_FREQUENCY_HZ], dtype=torch.float64)).tolist()
    corners = torch.linspace(low, high, bins + 2, dtype=torch.float64)
    lower, centre, upper = corners[:-2], corners[1:-1], corners[2:]
    frequency = mel(torch.linspace(0.0, SAMPLE_RATE / 2, KALDI_FFT_SAMPLES // 2 + 1, dtype=torch.float64))[:, None]
    rising, falling = (frequency - lower) / (centre - lower), (upper - frequency) / (upper - centre)
    filters = torch.minimum(rising, falling).clamp(min=0.0)
    # Kaldi leaves the highest frequency out.
    filters[-1] = 0.0
    return filters


# Slaney's scale is linear (200/3 Hz per mel) up to 1 kHz and logarithmic above: 27 mels per factor of 6.4.
_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1_000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27.0


def _hz_to_mel(hz: float) -> float:
    if hz < _LOG_START_HZ:
        return hz / _LINEAR_HZ_PER_MEL
    return _LOG_START_MEL + math.log(hz / _LOG_START_HZ) / _LOG_STEP


def _mel_to_hz(mel: Tensor) -> Tensor:
    logarithmic = _LOG_START_HZ * torch.exp(_LOG_STEP * (mel - _LOG_START_MEL))
    return torch.where(mel < _LOG_START_MEL, mel * _LINEAR_HZ_PER_MEL, logarithmic)
