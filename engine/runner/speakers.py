"""Computes speaker embeddings outside of the engine's loop (engine/runner/background.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.campplus import CamPlusPlus, load_campplus, traced
from engine.runner.background import BackgroundModel, Samples
from engine.runner.base import Embedder

# Sizes of batches on a GPU; a batch of another size is filled up with silence.
BATCHES = (1, 8, 32)


class SpeakerEmbedder(BackgroundModel[NDArray[np.float32]], Embedder):
    """All pieces have `piece_samples` samples."""

    def __init__(self, weights: Path, piece_samples: int, device: torch.device, threads: int = 1) -> None:
        super().__init__("speakers", device, threads, BATCHES[-1])
        self._weights = weights
        self._piece_samples = piece_samples
        self._loading = threading.Lock()
        self._model: CamPlusPlus | None = None
        self._calls: dict[int, Callable[[Tensor], Tensor]] = {}

    def prepare(self) -> None:
        if not self._running:
            # Loads the weights, on the first thread.
            self.submit(np.zeros(self._piece_samples, np.float32))

    def _compute(self, batch: list[Samples]) -> list[NDArray[np.float32]]:
        count = next(size for size in BATCHES if size >= len(batch))
        pieces = np.zeros((count, self._piece_samples), np.float32)
        np.stack(batch, out=pieces[: len(batch)])
        found: NDArray[np.float32] = self._embed(count)(torch.from_numpy(pieces).to(self._device)).cpu().numpy()
        return list(found[: len(batch)])

    def _embed(self, count: int) -> Callable[[Tensor], Tensor]:
        """The model for this many pieces at once, loaded when it is first needed."""
        with self._loading:
            if self._model is None:
                self._model = load_campplus(self._weights, self._device)
            if count not in self._calls:
                self._calls[count] = traced(self._model, self._piece_samples, count, self._device)
            return self._calls[count]
