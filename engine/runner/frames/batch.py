"""What a step reads: per-slot state that stays on the device, and the few numbers that change with every step.

A step uploads one small block of integers and the samples of the items to encode. Everything else (the last token of
each stream, its delay, its run of blanks, its ring tables) is on the device already and changes by deltas. Nothing here
waits for the device: the next step can be uploaded while it computes this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.voxtral_realtime import STREAMING_PAD
from engine.runner.device import Download, staging, upload

NOT_FORCED = -1


class SlotState:
    """State of every stream, by slot; the last slot belongs to the empty rows of a padded batch."""

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
    """Rows of one batched step, all of equal length; one entry per stream."""

    slots: Sequence[int]
    positions: Sequence[int]
    inputs: Sequence[int]
    forced: Sequence[int]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Payloads:
    """Positions to encode: the slab row each goes to, and its samples with the look-around that its frames need."""

    rows: list[int]
    samples: list[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The token of each row, the rows whose logits were broken, and how often the guard acted."""

    tokens: list[int]
    failed: list[int]
    guarded: int


class StepBuffers:
    """Fixed places for a step's inputs and outputs, so that a captured graph can read and write them."""

    def __init__(self, capacity: int, payload_samples: int, padding_slot: int, spare_row: int, device: torch.device):
        self.capacity = capacity
        self._device = device
        self._padding = (padding_slot, 0, 0, STREAMING_PAD, spare_row)
        self._numbers = torch.empty(5, capacity, dtype=torch.int64, device=device)
        self.samples = torch.zeros(capacity, payload_samples, dtype=torch.float32, device=device)
        self.results = torch.zeros(3, capacity, dtype=torch.int64, device=device)

    def upload(self, rows: StepRows, payloads: Payloads) -> None:
        """Send a step's numbers, and what it encodes."""
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

    def numbers(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Slots, positions, input rows, forced tokens and encode targets of a batch padded to `size`."""
        slots, positions, inputs, forced, targets = self._numbers[:, :size].unbind()
        return slots, positions, inputs, forced, targets

    def download(self) -> Download:
        """What becomes of the rows that were sent last, on its way to the host."""
        return Download(self.results)


def outcome_of(results: Download, count: int) -> StepOutcome:
    """What became of the first `count` rows. Waits for the device."""
    tokens, failed, guarded = results.values()[:, :count]
    return StepOutcome(tokens.tolist(), np.flatnonzero(failed).tolist(), int(guarded.sum()))
