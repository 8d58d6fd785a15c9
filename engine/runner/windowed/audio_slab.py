"""The audio of all streams, a row for each position, where the model runs; row 0 is silence and is never written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import DecodeTask, EncodeTask
from engine.messages import Item
from engine.runner.device import upload

SAMPLES_PER_POSITION = 1_280


class AudioSlab:
    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.rows = torch.zeros(rows + 1, SAMPLES_PER_POSITION, device=device)
        self._device = self.rows.device
        # Rows with values that are not numbers.
        self._broken: set[int] = set()

    def write(self, tasks: Sequence[EncodeTask]) -> None:
        """The samples of some items, in one copy."""
        if not tasks:
            return
        samples = np.concatenate([_samples(task) for task in tasks])
        rows = [row for task in tasks for row in task.rows]
        for row, finite in zip(rows, np.isfinite(samples).all(axis=1).tolist(), strict=True):
            (self._broken.discard if finite else self._broken.add)(row)
        self.rows[upload(np.array(rows, np.int64), self._device)] = upload(samples, self._device)

    def is_broken(self, task: DecodeTask) -> bool:
        return bool(self._broken) and not self._broken.isdisjoint(task.rows)

    def audio(self, task: DecodeTask) -> Tensor:
        """[1, samples] of the task's whole window."""
        return self.gather([task.rows])

    def gather(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """[windows, samples] of so many rows each, with silence behind the shorter ones."""
        length = max(map(len, windows))
        rows = np.zeros((len(windows), length), np.int64)
        for place, window in zip(rows, windows, strict=True):
            place[: len(window)] = window
        return self.rows[upload(rows, self._device)].view(len(windows), -1)


def _samples(task: EncodeTask) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    samples: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.asarray(task.payload, np.float32)
    samples = samples.reshape(-1, SAMPLES_PER_POSITION)
    return samples if task.mask is None else samples[np.array(task.mask)]


def audio_of(items: Sequence[Item], start: int, end: int) -> Tensor:
    """[1, samples] of positions [start, end); silence where no item has any."""
    audio = torch.zeros(end - start, SAMPLES_PER_POSITION)
    for item in items:
        if item.payload is None:
            continue
        rows = torch.from_numpy(np.array(item.payload)).view(-1, SAMPLES_PER_POSITION)
        for index, row in enumerate(rows):
            place = item.offset + index - start
            if 0 <= place < end - start and (item.mask is None or item.mask[index]):
                audio[place] = row
    return audio.view(1, -1)
