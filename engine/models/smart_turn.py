"""Smart Turn v3, the turn detector's model: the probability that a turn is complete, from the last 4 seconds of audio.

`SmartTurnDetector` in `engine/runner/background.py` runs it; its input is audio at 16 kHz.

    samples (shorter audio: zeros before it) -> zero mean, unit variance -> log-mel, 80 x 400
    -> the encoder of Whisper tiny -> 200 rows of 384 -> their average, weighted by attention
    -> classifier -> probability

The model was trained with windows of 8 seconds. The last 4 seconds, with the positional embeddings of seconds 4 to 8,
cost half as much and tell ends of turns from pauses nearly as well (docs/turns.md).

A window is classified as a whole, so there is no state. On a CPU windows are computed one after the other, so that the
result of a window does not depend on the others, bit for bit. On a GPU all windows are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.models.mel import FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE, slaney_filters
from engine.models.seq2seq import quantise_linears, run_to_end
from engine.models.whisper import WhisperConfig, WhisperEncoder, fuse_tensors

WINDOW_SECONDS = 4
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE

_MELS = 80
_ROWS = WINDOW_SAMPLES // (2 * HOP_SAMPLES)
_WIDTH, _HEADS, _LAYERS = 384, 6, 4
_POSITIONS = "encoder.positional_embedding"
_POOL_WIDTH, _CLASSIFIER_WIDTHS = 256, (256, 64)
# Added to the variance, which is 0 for a window of digital silence.
_MIN_VARIANCE = 1e-7
# Powers of ten from the window's peak down to the floor: 80 dB.
_LOG_RANGE = 8.0


class SmartTurn(nn.Module):
    """The network and its log-mel front end: weights and constants, no state."""

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
            weights = fuse_tensors(tensors, _WIDTH, _LAYERS, text_layers=0)
            # The window takes the last positions of the 8 seconds used in training.
            weights[_POSITIONS] = weights[_POSITIONS][-_ROWS:]
        except KeyError as error:
            raise RuntimeError(f"{error} is missing") from error
        model.load_state_dict(weights, strict=True)
        return model.eval()

    def quantise(self) -> None:
        """Use 8-bit layers in the encoder; for a CPU."""
        quantise_linears(self.encoder)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.to(device, dtype)
        self._filters, self._hann = self._filters.to(device), self._hann.to(device)

    def log_mel(self, windows: Tensor) -> Tensor:
        """[batch, 64,000] -> [batch, 80, 400]"""
        variance, mean = torch.var_mean(windows, dim=1, correction=0, keepdim=True)
        normalised = (windows - mean) / (variance + _MIN_VARIANCE).sqrt()
        spectrum = torch.stft(normalised, FRAME_SAMPLES, HOP_SAMPLES, window=self._hann, return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log_mel = (self._filters.T @ power).clamp(min=1e-10).log10()
        floor = log_mel.amax(dim=(1, 2), keepdim=True) - _LOG_RANGE
        return (torch.maximum(log_mel, floor) + 4.0) / 4.0

    def forward(self, windows: Tensor) -> Tensor:
        """Windows [batch, 64,000] -> probabilities [batch]"""
        rows = run_to_end(
            self.encoder.layer_by_layer(self.log_mel(windows), [_ROWS] * len(windows))
        )  # [batch, 200, 384]
        weights = self.pool_attention(rows).softmax(dim=1)  # [batch, 200, 1]
        probability: Tensor = self.classifier((rows * weights).sum(dim=1)).sigmoid().squeeze(1)
        return probability.float()

    @torch.inference_mode()
    def judge(self, audio: Sequence[NDArray[np.float32]]) -> list[float]:
        """The probability that the turn is complete, for each piece of audio. The last 4 seconds of a piece are used;
        a shorter one gets zeros before it."""
        windows = np.zeros((len(audio), WINDOW_SAMPLES), np.float32)
        for window, samples in zip(windows, audio, strict=True):
            end = samples[-WINDOW_SAMPLES:]
            window[WINDOW_SAMPLES - len(end) :] = end
        batch = torch.from_numpy(windows).to(self._hann.device)
        size = 1 if batch.device.type == "cpu" else max(len(audio), 1)
        starts = range(0, len(audio), size)
        return [probability for start in starts for probability in self(batch[start : start + size]).tolist()]
