"""Runs a model outside of the engine's loop, so that words never wait for it (`BackgroundModel`).

On a CPU, threads of low priority compute task by task: the operating system gives them the time that the readers of
words leave free. On a GPU, one thread computes all tasks that wait as one batch on a stream of its own. The weights
are loaded with the first task: an engine whose streams do not need the model does not hold them.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.runner.device import give_way

Samples = NDArray[np.float32]
Result = TypeVar("Result")


class BackgroundModel(Generic[Result]):
    """`most` is the number of tasks in a batch on a GPU. `name` is that of the threads."""

    def __init__(self, name: str, device: torch.device, threads: int, most: int) -> None:
        self._name = name
        self._device = device
        self._threads = threads if device.type == "cpu" else 1
        self._most = most if device.type != "cpu" else 1
        self._running: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[Samples, Future[Result]] | None] = SimpleQueue()
        self._stream: torch.cuda.Stream | None = None

    def submit(self, audio: Samples) -> Future[Result]:
        """Start on one task. The future has an exception if the weights cannot be loaded or the model fails."""
        found: Future[Result] = Future()
        self._queue.put((audio, found))
        if not self._running:
            self._running = [
                threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
                for number in range(self._threads)
            ]
            for thread in self._running:
                thread.start()
        return found

    def close(self) -> None:
        """Stop; tasks that wait are not computed."""
        with suppress(Empty):
            while (task := self._queue.get_nowait()) is not None:
                task[1].cancel()
        for _ in self._running:
            self._queue.put(None)
        for thread in self._running:
            thread.join()
        self._running = []

    @abstractmethod
    def _compute(self, batch: list[Samples]) -> list[Result]:
        """The results of a batch, on one of the threads. Loads the weights if they are not loaded."""

    def _work(self) -> None:
        is_first = True
        while (task := self._queue.get()) is not None:
            tasks = [task]
            while len(tasks) < self._most and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    self._queue.put(None)
                    break
                tasks.append(following)
            tasks = [task for task in tasks if task[1].set_running_or_notify_cancel()]
            if not tasks:
                continue
            try:
                found = self._compute_here([audio for audio, _ in tasks])
            except Exception as error:
                for _, future in tasks:
                    future.set_exception(error)
                continue
            if is_first:
                # Now that the weights are loaded.
                is_first = False
                give_way()
            for (_, future), result in zip(tasks, found, strict=True):
                future.set_result(result)

    @torch.inference_mode()
    def _compute_here(self, batch: list[Samples]) -> list[Result]:
        if self._device.type == "cpu":
            return self._compute(batch)
        if self._stream is None:
            # The lowest priority: steps of the model go first.
            self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._compute(batch)
