"""Computes speaker embeddings outside of the engine's loop, so that words never wait for them.

On a CPU, threads of low priority compute piece by piece: the operating system gives them the time that the readers of
words leave free. On a GPU, one thread computes all pieces that wait as one batch on a stream of its own. The weights
are loaded with the first labelled stream: an engine without labelled streams does not hold them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.campplus import CamPlusPlus, load_campplus, traced
from engine.runner.base import Embedder
from engine.runner.device import give_way

Samples = NDArray[np.float32]
# Sizes of batches on a GPU; a batch of another size is filled up with silence.
BATCHES = (1, 8, 32)


class SpeakerEmbedder(Embedder):
    """All pieces have `piece_samples` samples."""

    def __init__(self, weights: Path, piece_samples: int, device: torch.device, threads: int = 1) -> None:
        self._weights = weights
        self._piece_samples = piece_samples
        self._device = device
        self._threads = threads if device.type == "cpu" else 1
        self._running: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[Samples, Future[NDArray[np.float32]]] | None] = SimpleQueue()
        self._loading = threading.Lock()
        self._model: CamPlusPlus | None = None
        self._calls: dict[int, Callable[[Tensor], Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None

    def submit(self, audio: Samples) -> Future[NDArray[np.float32]]:
        found: Future[NDArray[np.float32]] = Future()
        self._queue.put((audio, found))
        if not self._running:
            self._running = [
                threading.Thread(target=self._work, name=f"speakers-{number}", daemon=True)
                for number in range(self._threads)
            ]
            for thread in self._running:
                thread.start()
        return found

    def prepare(self) -> None:
        if not self._running:
            # Loads the weights, on the first thread.
            self.submit(np.zeros(self._piece_samples, np.float32))

    def close(self) -> None:
        for _ in self._running:
            self._queue.put(None)
        for thread in self._running:
            thread.join()
        self._running = []

    def _work(self) -> None:
        is_first = True
        while (task := self._queue.get()) is not None:
            tasks = [task]
            while self._device.type != "cpu" and len(tasks) < BATCHES[-1] and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    self._queue.put(None)
                    break
                tasks.append(following)
            tasks = [task for task in tasks if task[1].set_running_or_notify_cancel()]
            if not tasks:
                continue
            try:
                found = self._compute([audio for audio, _ in tasks])
            except Exception as error:
                for _, future in tasks:
                    future.set_exception(error)
                continue
            if is_first:
                # Now that the weights are loaded.
                is_first = False
                give_way()
            for (_, future), embedding in zip(tasks, found, strict=True):
                future.set_result(embedding)

    @torch.inference_mode()
    def _compute(self, pieces: list[Samples]) -> NDArray[np.float32]:
        if self._device.type == "cpu":
            alone: NDArray[np.float32] = self._embed(1)(torch.from_numpy(pieces[0])[None]).numpy()
            return alone
        with torch.cuda.device(self._device), torch.cuda.stream(self._own_stream()):
            count = next(size for size in BATCHES if size >= len(pieces))
            batch = np.zeros((count, self._piece_samples), np.float32)
            np.stack(pieces, out=batch[: len(pieces)])
            found: NDArray[np.float32] = self._embed(count)(torch.from_numpy(batch).to(self._device)).cpu().numpy()
        return found[: len(pieces)]

    def _embed(self, count: int) -> Callable[[Tensor], Tensor]:
        """The model for this many pieces at once, loaded when it is first needed."""
        with self._loading:
            if self._model is None:
                self._model = load_campplus(self._weights, self._device)
            if count not in self._calls:
                self._calls[count] = traced(self._model, self._piece_samples, count, self._device)
            return self._calls[count]

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            # The lowest priority: steps of the model go first.
            self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        return self._stream
