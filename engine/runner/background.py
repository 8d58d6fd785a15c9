"""Models that are computed beside the engine's loop, so that words never wait for them: `BackgroundModel`, the speaker
embeddings (`SpeakerEmbedder`) and the turn detector (`SmartTurnDetector`).

On a CPU, threads of low priority compute task by task: the operating system gives them the time that the readers of
words leave free. On a GPU, one thread computes all tasks that wait as one batch on a stream of its own. The weights
are loaded when the threads start, with the first task or before it: an engine whose streams do not need the model does
not hold them.
"""

from __future__ import annotations

import atexit
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor, nn

from engine.models.campplus import load_campplus, traced
from engine.models.smart_turn import WINDOW_SAMPLES
from engine.runner.base import Background, Embedder, Result, Samples, Task, TurnDetector
from engine.runner.device import give_way
from engine.weights.windowed_models import load_turn_detector

logger = logging.getLogger(__name__)

# Sizes of batches on a GPU; a batch of another size is filled up with silence.
BATCHES = (1, 8, 32)


class BackgroundModel(Background[Task, Result]):
    """`most` is the number of tasks in a batch on a GPU. `name` is that of the threads."""

    def __init__(self, name: str, device: torch.device, threads: int, most: int) -> None:
        self._name = name
        self._device = device
        self._threads = threads if device.type == "cpu" else 1
        self._most = most if device.type != "cpu" else 1
        # Sizes of batches to get ready for.
        self._sizes = [size for size in BATCHES if size <= self._most]
        self._queue: SimpleQueue[tuple[Task, Future[Result]] | None] = SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self.running: list[threading.Thread] = []

    def prepare(self) -> None:
        """Start the threads, if they do not run; each loads what it needs."""
        if self.running:
            return
        self.running = [
            threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
            for number in range(self._threads)
        ]
        for thread in self.running:
            thread.start()
        # A thread that computes must not outlive the interpreter.
        atexit.register(self.close)

    def submit(self, task: Task) -> Future[Result]:
        """Start on one task. The future has an exception if the weights cannot be loaded or the model fails."""
        found: Future[Result] = Future()
        self._queue.put((task, found))
        self.prepare()
        return found

    def close(self) -> None:
        atexit.unregister(self.close)
        with suppress(Empty):
            while (task := self._queue.get_nowait()) is not None:
                task[1].cancel()
        for _ in self.running:
            self._queue.put(None)
        for thread in self.running:
            thread.join()
        self.running = []

    @abstractmethod
    def _load(self, number: int) -> None:
        """Load what thread `number` needs, and do the slow work of a first task. Other threads may load meanwhile."""

    @abstractmethod
    def _compute(self, batch: list[Task]) -> list[Result]:
        """The results of a batch, on one of the threads."""

    def _work(self, number: int) -> None:
        is_loaded = False

        def load() -> None:
            nonlocal is_loaded
            if not is_loaded:
                with self._on_device():
                    self._load(number)
                give_way()
                is_loaded = True

        with suppress(Exception):  # the first task tries again, and has the error
            load()
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
                load()
                with self._on_device():
                    found = self._compute([task for task, _ in tasks])
            except Exception as error:
                for _, future in tasks:
                    future.set_exception(error)
                continue
            for (_, future), result in zip(tasks, found, strict=True):
                future.set_result(result)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._device.type == "cpu":
                yield
                return
            if self._stream is None:
                # The lowest priority: steps of the model go first.
                self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield


class FixedBatches:
    """A model [pieces, samples] -> [pieces, ...], traced for each size of a batch when that is first needed."""

    def __init__(self, model: nn.Module, samples: int, device: torch.device) -> None:
        self._model = model
        self._samples = samples
        self._device = device
        self._tracing = threading.Lock()
        self._calls: dict[int, Callable[[Tensor], Tensor]] = {}

    def __call__(self, batch: list[Samples]) -> Samples:
        """The results of these pieces; a piece that is shorter than `samples` has silence before it."""
        count = next(size for size in BATCHES if size >= len(batch))
        pieces = np.zeros((count, self._samples), np.float32)
        for row, piece in zip(pieces, batch, strict=False):
            row[self._samples - len(piece) :] = piece
        with self._tracing:
            if count not in self._calls:
                self._calls[count] = traced(self._model, self._samples, count, self._device)
        found: Samples = self._calls[count](torch.from_numpy(pieces).to(self._device)).cpu().numpy()
        return found[: len(batch)]


class SpeakerEmbedder(BackgroundModel[Samples, Samples], Embedder):
    """CAM++. All pieces have `piece_samples` samples."""

    def __init__(self, weights: Path, piece_samples: int, device: torch.device, threads: int = 1) -> None:
        super().__init__("speakers", device, threads, BATCHES[-1])
        self.on_gpu = device.type != "cpu"
        self._weights = weights
        self._piece_samples = piece_samples
        self._loading = threading.Lock()
        self._batches: FixedBatches | None = None

    def _load(self, number: int) -> None:
        with self._loading:
            if self._batches is None:
                model = load_campplus(self._weights, self._device)
                self._batches = FixedBatches(model, self._piece_samples, self._device)
        for size in self._sizes:
            self._batches([np.zeros(self._piece_samples, np.float32)] * size)

    def _compute(self, batch: list[Samples]) -> list[Samples]:
        assert self._batches is not None
        return list(self._batches(batch))


class SmartTurnDetector(BackgroundModel[Samples, float], TurnDetector):
    """Smart Turn, on one thread: 8-bit layers on a CPU, float32 on a GPU."""

    window_samples = WINDOW_SAMPLES

    def __init__(self, weights: Path, device: torch.device) -> None:
        super().__init__("turns", device, 1, BATCHES[-1])
        self._weights = weights
        self._judge: Callable[[list[Samples]], list[float]] | None = None
        self._warned = False

    def _load(self, number: int) -> None:
        with self._warning_once():
            model = load_turn_detector(self._weights)
            if self._device.type == "cpu":
                model.quantise()
                self._judge = model.judge
            else:
                model.move(self._device, torch.float32)
                batches = FixedBatches(model, WINDOW_SAMPLES, self._device)
                self._judge = lambda batch: batches(batch).tolist()
            for size in self._sizes:
                self._judge([np.zeros(WINDOW_SAMPLES, np.float32)] * size)

    def _compute(self, batch: list[Samples]) -> list[float]:
        assert self._judge is not None
        with self._warning_once():
            return self._judge(batch)

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("the turn detector failed, so turns end by text and silence: %s", error)
            raise
