"""Computes the answers of the turn detector outside of the engine's loop (engine/runner/background.py)."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import torch

from engine.models.smart_turn import WINDOW_SAMPLES, SmartTurn
from engine.runner.background import BackgroundModel, Samples
from engine.runner.base import TurnDetector
from engine.weights.windowed_models import load_turn_detector

logger = logging.getLogger(__name__)

# Most questions in a batch on a GPU.
LARGEST_BATCH = 32


class SmartTurnDetector(BackgroundModel[float], TurnDetector):
    """Smart Turn, on one thread: 8-bit layers on a CPU, float32 on a GPU."""

    window_samples = WINDOW_SAMPLES

    def __init__(self, weights: Path, device: torch.device) -> None:
        super().__init__("turns", device, 1, LARGEST_BATCH)
        self._weights = weights
        self._loading = threading.Lock()
        self._model: SmartTurn | None = None
        self._warned = False

    def prepare(self) -> None:
        if not self._running:
            # Loads the weights, on the thread.
            self.submit(np.zeros(WINDOW_SAMPLES, np.float32))

    def _compute(self, batch: list[Samples]) -> list[float]:
        try:
            return self._loaded().judge(batch)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("the turn detector failed, so turns end by text and silence: %s", error)
            raise

    def _loaded(self) -> SmartTurn:
        with self._loading:
            if self._model is None:
                model = load_turn_detector(self._weights)
                if self._device.type == "cpu":
                    model.quantise()
                else:
                    model.move(self._device, torch.float32)
                self._model = model
            return self._model
