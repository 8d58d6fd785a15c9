"""Input and output buffers of `VoxtralRunner` on the device: state by slot, numbers of a step, rows of encoder input.

A part of the frame-synchronous runner. A step uploads one small block of integers and the samples of the items to
encode. Everything else (each stream's last token, delay, number of blanks in a row, and page tables) is on the device
already; only changes to it are uploaded. Uploads do not wait for the device: the next step can be uploaded while it
computes this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.plan import SILENCE_ROW, EncodeTask
from engine.models.voxtral_realtime import STREAMING_PAD, VoxtralRealtime
from engine.runner.device import Download, staging, upload
from engine.spec import ModelSpec

NOT_FORCED = -1


class SlotState:
    """State of every stream, by slot; the last slot is used by the padding rows of a batch."""

    def __init__(self, streams: int, device: torch.device) -> None:
        self.tokens = torch.full((streams + 1,), STREAMING_PAD, dtype=torch.int64, device=device)
        self.delays = torch.ones(streams + 1, dtype=torch.int64, device=device)
        self.blank_runs = torch.zeros(streams + 1, dtype=torch.int64, device=device)

    def set(self, slots: Sequence[int], tokens: Sequence[int], delays: Sequence[int], runs: Sequence[int]) -> None:
        values = upload(np.array([slots, tokens, delays, runs], dtype=np.int64), self.tokens.device)
        self.tokens[values[0]] = values[1]
        self.delays[values[0]] = values[2]
        self.blank_runs[values[0]] = values[3]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Numbers of one batched step: one entry per stream in each list."""

    slots: Sequence[int]
    positions: Sequence[int]
    inputs: Sequence[int]
    forced: Sequence[int]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Payloads:
    """Positions to encode: the row of each, and its samples with look-back and look-ahead."""

    rows: list[int]
    samples: list[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The token of each row, the rows whose logits were not finite, and how often the blank guard changed a token."""

    tokens: list[int]
    failed: list[int]
    guarded: int


class StepBuffers:
    """Fixed buffers for a step's inputs and outputs, so that a recorded graph can read and write them."""

    def __init__(self, capacity: int, payload_samples: int, padding_slot: int, spare_row: int, device: torch.device):
        self.capacity = capacity
        self._device = device
        self._padding = (padding_slot, 0, 0, STREAMING_PAD, spare_row)
        self._numbers = torch.empty(5, capacity, dtype=torch.int64, device=device)
        self.samples = torch.zeros(capacity, payload_samples, dtype=torch.float32, device=device)
        self.results = torch.zeros(3, capacity, dtype=torch.int64, device=device)

    def upload(self, rows: StepRows, payloads: Payloads) -> None:
        """Upload a step's numbers, and the samples to encode."""
        numbers = staging((5, self.capacity), torch.int64, self._device)
        view = numbers.numpy()
        for line, values in enumerate((rows.slots, rows.positions, rows.inputs, rows.forced, payloads.rows)):
            view[line, : len(values)] = values
            view[line, len(values) :] = self._padding[line]
        self._numbers.copy_(numbers, non_blocking=True)
        count = len(payloads.samples)
        if count:
            samples = staging((count, self.samples.shape[1]), torch.float32, self._device)
            np.concatenate(payloads.samples, out=samples.numpy().reshape(-1))
            self.samples[:count].copy_(samples, non_blocking=True)

    def inputs_of_pass(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Slots, positions, input rows, forced tokens and encode targets of a batch padded to `size`."""
        slots, positions, inputs, forced, targets = self._numbers[:, :size].unbind()
        return slots, positions, inputs, forced, targets

    def download(self) -> Download:
        """Start the transfer of the step's results to the host."""
        return Download(self.results)


def outcome_of(results: Download, count: int) -> StepOutcome:
    """Return the results of the first `count` rows. Waits for the device."""
    tokens, failed, guarded = results.values()[:, :count]
    return StepOutcome(tokens.tolist(), np.flatnonzero(failed).tolist(), int(guarded.sum()))


# Positions encoded at once outside a batched pass.
ENCODE_BATCH = 1024


class EncoderInputs:
    """Encoder input of the positions that streams still need: one row each, written when the convolutions have run.

    Row 0 is the model's silence. The spare row after the last one is written by the padding rows of a batch.
    """

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
        """Return all samples to encode, by position, and the errors of bad items, by stream.

        Items that came as features, which are rare, do not fit into a batched pass and are encoded here.
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
        """Encode an item that came as log-mel features. Returns the error text if it is bad."""
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
        """Yield the samples of each of an item's positions, with look-back and look-ahead."""
        for position in positions:
            start = position * self._step_samples
            yield samples[start : start + self.payload_samples]

    def encode(self, payloads: Payloads) -> None:
        """Encode outside a batched pass."""
        device = self.rows.device
        for start in range(0, len(payloads.rows), ENCODE_BATCH):
            part = slice(start, start + ENCODE_BATCH)
            rows = upload(np.array(payloads.rows[part], dtype=np.int64), device)
            samples = staging((len(rows), self.payload_samples), torch.float32, device)
            np.stack(payloads.samples[part], out=samples.numpy())
            self.rows.index_copy_(0, rows, self._model.stem_rows(samples.to(device, non_blocking=True)))
