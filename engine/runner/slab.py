"""Encoder input of every position that some stream still needs: one row each, filled by encoding items.

Row 0 is the model's silence. The row behind the last one takes what the empty rows of a padded batch encode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.plan import SILENCE_ROW, EncodeTask
from engine.models.voxtral_realtime import VoxtralRealtime
from engine.spec import ModelSpec

# Items encoded at once outside a batched pass.
ENCODE_BATCH = 256


class Payload(NamedTuple):
    """Samples of one position, with the look-back and look-ahead its frames need, and the row they go to."""

    row: int
    samples: NDArray[np.float32]


class EncoderSlab:
    def __init__(self, model: VoxtralRealtime, spec: ModelSpec, embeds: int) -> None:
        config = model.config
        self._model = model
        self._step_samples = spec.samples_per_position
        self.payload_samples = spec.look_back_samples + spec.samples_per_position + spec.look_ahead_samples
        self.spare_row = embeds + 1
        width = config.audio.width * config.rows_per_position
        self.rows = torch.zeros(embeds + 2, width, dtype=model.dtype, device=model.device)

    def write_silence(self) -> None:
        silence = torch.zeros(1, self.payload_samples, device=self.rows.device)
        self.rows[SILENCE_ROW] = self._model.stem_rows(silence)[0]

    def payloads(self, task: EncodeTask) -> list[Payload]:
        """An item, one position at a time. Raises ValueError if it is not what its mask and rows say."""
        samples, rows, mask = task.payload, task.rows, task.mask
        length = len(rows) if mask is None else len(mask)
        expected = self.payload_samples + (length - 1) * self._step_samples
        if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.shape != (expected,):
            raise ValueError(f"an item of {length} positions must have {expected} samples of float32")
        if length == 1:
            return [Payload(rows[0], samples)]
        heard = range(length) if mask is None else [position for position in range(length) if mask[position]]
        step, size = self._step_samples, self.payload_samples
        return [
            Payload(row, samples[position * step : position * step + size])
            for row, position in zip(rows, heard, strict=True)
        ]

    def encode(self, payloads: list[Payload]) -> None:
        """Encode outside a batched pass."""
        device = self.rows.device
        for start in range(0, len(payloads), ENCODE_BATCH):
            part = payloads[start : start + ENCODE_BATCH]
            samples = torch.from_numpy(np.stack([payload.samples for payload in part])).to(device)
            rows = torch.tensor([payload.row for payload in part], dtype=torch.int64).to(device)
            self.rows.index_copy_(0, rows, self._model.stem_rows(samples))
