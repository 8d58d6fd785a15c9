"""Smart Turn v3, the turn detector's model: how likely a speaker's turn is complete, from the last 4 seconds of audio.

`SmartTurnDetector` in `engine/runner/background.py` runs it; its input is audio at 16 kHz.

    samples, silence before them -> zero mean, unit variance -> log-mel, 80 x 400 -> the encoder of Whisper tiny
    -> 200 rows of 384 -> one row, weighted by attention -> classifier -> probability

The model was trained with 8 seconds. The last 4, in their own places, cost half and tell ends from pauses nearly as
well (docs/turns.md).

A window is judged as a whole, so there is no state. On a CPU windows are judged one after the other: the result of a
window does not depend on the others, bit for bit. On a GPU they are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.models.mel import FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE, slaney_filters
from engine.models.seq2seq import at_once, quantise_linears
from engine.models.whisper import WhisperConfig, WhisperEncoder, fused

WINDOW_SECONDS = 4
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE

_MELS = 80
_ROWS = WINDOW_SAMPLES // (2 * HOP_SAMPLES)
_WIDTH, _HEADS, _LAYERS = 384, 6, 4
_PLACES = "encoder.positional_embedding"
_POOL_WIDTH, _CLASSIFIER_WIDTHS = 256, (256, 64)
# The variance of a window of digital silence is 0.
_LEAST_VARIANCE = 1e-7
# The floor is 80 dB below the window's peak.
_LOG_RANGE = 8.0


class SmartTurn(nn.Module):
    """Weights only."""

    def __init__(self) -> None:
        super().__init__()
        # Whisper's encoder for a shorter window; there is no decoder.
        config = WhisperConfig(_MELS, 0, _ROWS, _WIDTH, _HEADS, _LAYERS, 0, 0, 0)
        self.encoder = WhisperEncoder(config)
        self.pool_attention = nn.Sequential(nn.Linear(_WIDTH, _POOL_WIDTH), nn.Tanh(), nn.Linear(_POOL_WIDTH, 1))
        wide, narrow = _CLASSIFIER_WIDTHS
        # The numbers in the published names count a dropout layer.
        self.classifier = nn.Sequential(
            nn.Linear(_WIDTH, wide),
            nn.LayerNorm(wide),
            nn.GELU(),
            nn.Identity(),
            nn.Linear(wide, narrow),
            nn.GELU(),
            nn.Linear(narrow, 1),
        )
        self._filters = slaney_filters(_MELS).float()
        self._hann = torch.hann_window(FRAME_SAMPLES)

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> SmartTurn:
        """From the tensors of the published file. Raises RuntimeError if one is missing, unknown or misshapen."""
        model = cls()
        try:
            weights = fused(tensors, _WIDTH, _LAYERS, text_layers=0)
            # A window that is shorter than those of the training stands at their end.
            weights[_PLACES] = weights[_PLACES][-_ROWS:]
        except KeyError as error:
            raise RuntimeError(f"{error} is missing") from error
        model.load_state_dict(weights, strict=True)
        return model.eval()

    def quantise(self) -> None:
        """Use 8-bit layers, on a CPU."""
        quantise_linears(self.encoder)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.to(device, dtype)
        self._filters, self._hann = self._filters.to(device), self._hann.to(device)

    def log_mel(self, windows: Tensor) -> Tensor:
        """[batch, 64,000] -> [batch, 80, 400]"""
        variance, mean = torch.var_mean(windows, dim=1, correction=0, keepdim=True)
        level = (windows - mean) / (variance + _LEAST_VARIANCE).sqrt()
        spectrum = torch.stft(level, FRAME_SAMPLES, HOP_SAMPLES, window=self._hann, return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log_mel = (self._filters.T @ power).clamp(min=1e-10).log10()
        floor = log_mel.amax(dim=(1, 2), keepdim=True) - _LOG_RANGE
        return (torch.maximum(log_mel, floor) + 4.0) / 4.0

    def forward(self, windows: Tensor) -> Tensor:
        """Windows [batch, 64,000] -> probabilities [batch]"""
        rows = at_once(self.encoder.layer_by_layer(self.log_mel(windows), [_ROWS] * len(windows)))  # [batch, 200, 384]
        weights = self.pool_attention(rows).softmax(dim=1)  # [batch, 200, 1]
        probability: Tensor = self.classifier((rows * weights).sum(dim=1)).sigmoid().squeeze(1)
        return probability.float()

    @torch.inference_mode()
    def judge(self, audio: Sequence[NDArray[np.float32]]) -> list[float]:
        """The probability that a turn is complete, for the audio of each: its last 4 seconds, or all that there is."""
        windows = np.zeros((len(audio), WINDOW_SAMPLES), np.float32)
        for window, samples in zip(windows, audio, strict=True):
            kept = samples[-WINDOW_SAMPLES:]
            window[WINDOW_SAMPLES - len(kept) :] = kept
        batch = torch.from_numpy(windows).to(self._hann.device)
        size = 1 if batch.device.type == "cpu" else max(len(audio), 1)
        starts = range(0, len(audio), size)
        return [chance for start in starts for chance in self(batch[start : start + size]).tolist()]
