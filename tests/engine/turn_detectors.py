"""Turn detectors for tests: the answer depends on every sample of the audio."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from engine.runner.base import TurnDetector

WINDOW = 8 * 16_000


def answer_to(audio: NDArray[np.float32]) -> float:
    return zlib.crc32(audio[-WINDOW:].tobytes()) / 2**32


class Answers(TurnDetector):
    """Answers when it is told to; `instant`: at once. `always`: with this probability. `fails`: with an error."""

    window_samples = WINDOW

    def __init__(self, instant: bool = False, always: float | None = None, fails: bool = False) -> None:
        self.waiting: list[tuple[NDArray[np.float32], Future[float]]] = []
        self.asked = 0
        self.prepared = 0
        self._instant, self._always, self._fails = instant, always, fails

    def submit(self, task: Callable[[], NDArray[np.float32]]) -> Future[float]:
        found: Future[float] = Future()
        self.asked += 1
        if self._fails:
            found.set_exception(RuntimeError("broken"))
            return found
        self.waiting.append((task(), found))
        if self._instant:
            self.answer()
        return found

    def prepare(self) -> None:
        self.prepared += 1

    def answer(self, count: int | None = None) -> None:
        """Answer the oldest questions that were not given up."""
        for audio, future in self.waiting[:count]:
            if future.set_running_or_notify_cancel():
                future.set_result(answer_to(audio) if self._always is None else self._always)
        del self.waiting[:count]
