"""Encoder input of every position that some stream still needs: one row each, filled by encoding items.

Row 0 is the model's silence. The row behind the last one takes what the empty rows of a padded batch encode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.plan import SILENCE_ROW, EncodeTask
from engine.models.voxtral_realtime import VoxtralRealtime
from engine.runner.device import upload
from engine.runner.frames.batch import Payloads
from engine.spec import ModelSpec

# Items encoded at once outside a batched pass.
ENCODE_BATCH = 256


class EncoderSlab:
    def __init__(self, model: VoxtralRealtime, spec: ModelSpec, embeds: int) -> None:
        config = model.config
        self._model = model
        assert spec.features is not None, "the model's front end is log-mel frames"
        self._features = spec.features
        self._step_samples = spec.samples_per_position
        self.payload_samples = spec.look_back_samples + spec.samples_per_position + spec.look_ahead_samples
        self.spare_row = embeds + 1
        width = config.audio.width * config.rows_per_position
        self.rows = torch.zeros(embeds + 2, width, dtype=model.dtype, device=model.device)

    def write_silence(self) -> None:
        silence = torch.zeros(1, self.payload_samples, device=self.rows.device)
        self.rows[SILENCE_ROW] = self._model.stem_rows(silence)[0]

    def payloads(self, tasks: list[EncodeTask]) -> tuple[Payloads, dict[str, str]]:
        """All samples there are to encode, one position at a time; and what is wrong with an item, by its stream.

        Features, which are rare, do not fit into a batched pass and are encoded at once.
        """
        payloads = Payloads([], [])
        broken: dict[str, str] = {}
        for task in tasks:
            samples, rows, mask = task.payload, task.rows, task.mask
            length = len(rows) if mask is None else len(mask)
            if isinstance(samples, np.ndarray) and samples.ndim == 2:
                problem = self._encode_features(task, length)
                if problem is not None:
                    broken[task.stream] = problem
                continue
            expected = self.payload_samples + (length - 1) * self._step_samples
            if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.shape != (expected,):
                broken[task.stream] = f"an item of {length} positions must have {expected} samples of float32"
            elif length == 1:
                payloads.rows.append(rows[0])
                payloads.samples.append(samples)
            else:
                payloads.rows.extend(rows)
                payloads.samples.extend(self._cut(samples, range(length) if mask is None else np.flatnonzero(mask)))
        return payloads, broken

    def _encode_features(self, task: EncodeTask, length: int) -> str | None:
        """Encode an item that came as log-mel features; what is wrong with it, if anything."""
        shape = self._features.of(length)
        if task.payload.dtype != np.float32 or task.payload.shape != shape:
            return f"features of an item of {length} positions must be float32 of shape {shape}"
        frames = torch.from_numpy(np.array(task.payload.T)).to(self.rows.device)
        step, span = self._features.frames_per_position, self._features.of(1)[1]
        items = frames.unfold(0, span, step).transpose(1, 2)  # [positions, frames, bins]
        if task.mask is not None:
            items = items[torch.tensor(task.mask, device=items.device)]
        rows = torch.tensor(task.rows, dtype=torch.int64).to(self.rows.device)
        self.rows.index_copy_(0, rows, self._model.feature_rows(items))
        return None

    def _cut(self, samples: NDArray[np.float32], positions: Iterable[int]) -> Iterator[NDArray[np.float32]]:
        """The samples of each of an item's positions, with their look-around."""
        for position in positions:
            start = position * self._step_samples
            yield samples[start : start + self.payload_samples]

    def encode(self, payloads: Payloads) -> None:
        """Encode outside a batched pass."""
        device = self.rows.device
        for start in range(0, len(payloads.rows), ENCODE_BATCH):
            part = slice(start, start + ENCODE_BATCH)
            samples = upload(np.stack(payloads.samples[part]), device)
            rows = upload(np.array(payloads.rows[part], dtype=np.int64), device)
            self.rows.index_copy_(0, rows, self._model.stem_rows(samples))
