"""Models that compute beside the engine's steps, on threads of their own, so that words never wait for them.

`BackgroundModel` has the queue, the threads and the batches. Its models are `SpeakerEmbedder` (speaker labels),
`SmartTurnDetector` (turn detector) and `UtteranceReviser` (second pass for finals). The engine loop submits tasks and
polls the results; with a frame-synchronous model on a GPU, the background process
(`engine/server/background_process.py`) does. On a CPU, low-priority threads compute one task at a time; they load the
weights when they start, with the first task or before it. On a GPU one thread waits a little for more tasks and
computes them as one batch (`Batches`), on its own CUDA stream. Weights are loaded and CUDA graphs captured before the
engine serves, because both stall all streams.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad

from engine.core.plan import TimedToken
from engine.models.campplus import load_campplus, trace_for
from engine.models.seq2seq import SpeechModel, inference_thread, prepare_kernels
from engine.models.smart_turn import WINDOW_SAMPLES
from engine.runner.base import Background, Embedder, EndedUtterance, Result, Reviser, Samples, Task, TurnDetector
from engine.runner.bias import KeywordTrees
from engine.runner.device import Download, StepGraphs, lower_priority, staging
from engine.runner.windowed.decoder import SPARE_TOKENS, Decode, GreedyDecoder, Row
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION
from engine.runner.windowed.stability import (
    HypothesisToken,
    Policy,
    Progress,
    is_noise,
    loop_start,
    spans,
    starts_word,
    steady,
    without_second_mark,
)
from engine.weights.checkpoint import load_smart_turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a model on a GPU."""

    # Batch sizes with a recorded CUDA graph; a batch is padded to the next one. The last is the largest batch.
    sizes: tuple[int, ...]
    # Seconds that the first task waits for more: a small batch takes nearly as much GPU time from the main model as a
    # large one.
    wait_s: float


ONE_BY_ONE = Batches((1,), 0.0)
# A short wait, because the end of a turn waits for the result.
TURN_BATCHES = Batches((1, 4, 8, 16, 32), 0.04)
# A longer wait: a label comes a second after its word at the earliest.
SPEAKER_BATCHES = Batches((1, 8, 32, 64, 128), 0.12)


class BackgroundModel(Background[Task, Result]):
    """A model with a queue of tasks, and threads that compute them: one by one on a CPU, in batches on a GPU.

    `threads` counts on a CPU, `batches` on a GPU. `name`: name of the threads.
    """

    def __init__(self, name: str, device: torch.device, threads: int, batches: Batches) -> None:
        self._name = name
        self._device = device
        self.threads = threads if device.type == "cpu" else 1
        self._batches = batches if device.type != "cpu" else ONE_BY_ONE
        self._queue: SimpleQueue[tuple[Task, Future[Result]] | None] = SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self.running: list[threading.Thread] = []
        # The first attempt to load is over, successful or not.
        self._load_attempted = threading.Event()

    def warm_up(self) -> None:
        if self._device.type != "cpu":
            self.prepare()
            self._load_attempted.wait()

    def prepare(self) -> None:
        """Start the threads if they are not running; each loads what it needs."""
        if self.running:
            return
        self.running = [
            threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
            for number in range(self.threads)
        ]
        for thread in self.running:
            thread.start()
        # A thread that computes must not outlive the interpreter.
        atexit.register(self.close)

    def submit(self, task: Task) -> Future[Result]:
        """Queue one task. The future has an exception if the weights cannot be loaded or the model fails."""
        future: Future[Result] = Future()
        self._queue.put((task, future))
        self.prepare()
        return future

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
        """Load what thread `number` needs, and warm it up. Other threads may load at the same time."""

    @abstractmethod
    def _compute(self, batch: list[Task]) -> list[Result]:
        """Compute a batch, on one of the threads."""

    def _work(self, number: int) -> None:
        is_loaded = False

        def load() -> None:
            nonlocal is_loaded
            if not is_loaded:
                with self._on_device():
                    self._load(number)
                lower_priority()
                is_loaded = True

        with suppress(Exception):  # the first task tries again, and its future gets the error
            load()
        self._load_attempted.set()
        while (task := self._queue.get()) is not None:
            tasks = self._gather(task)
            tasks = [task for task in tasks if task[1].set_running_or_notify_cancel()]
            if not tasks:
                continue
            try:
                load()
                with self._on_device():
                    results = self._compute([task for task, _ in tasks])
            except Exception as error:
                self.consecutive_failures += is_loaded
                for _, future in tasks:
                    future.set_exception(error)
                continue
            self.consecutive_failures = 0
            for (_, future), result in zip(tasks, results, strict=True):
                future.set_result(result)

    def _gather(self, first: tuple[Task, Future[Result]]) -> list[tuple[Task, Future[Result]]]:
        """The first task and those that arrive within the waiting time, up to the largest batch."""
        tasks, until = [first], time.monotonic() + self._batches.wait_s
        while len(tasks) < self._batches.sizes[-1]:
            try:
                following = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            if following is None:
                self._queue.put(None)
                break
            tasks.append(following)
        return tasks

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._device.type == "cpu":
                yield
                return
            if self._stream is None:
                # 0 is the lowest priority of CUDA: steps of the main model go first.
                self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield


class GraphedModel:
    """A model [pieces, samples] -> [pieces, ...] on a GPU, recorded as one CUDA graph per batch size."""

    def __init__(self, model: nn.Module, samples: int, device: torch.device, sizes: Sequence[int]) -> None:
        self._model = model
        self._pieces = torch.zeros(sizes[-1], samples, device=device)
        self._results = torch.zeros_like(model(self._pieces))
        self._graphs = StepGraphs(self._step, sizes[-1], sizes)
        self._graphs.capture()

    def __call__(self, batch: list[Samples]) -> Samples:
        """The results of these pieces; a piece that is shorter than `samples` has silence before it."""
        pieces = staging((len(batch), self._pieces.shape[1]), torch.float32, self._pieces.device)
        for row, piece in zip(pieces.numpy(), batch, strict=True):
            row[: len(row) - len(piece)] = 0.0
            row[len(row) - len(piece) :] = piece
        self._pieces[: len(batch)].copy_(pieces, non_blocking=True)
        self._graphs.run(len(batch))
        results: Samples = Download(self._results[: len(batch)]).values()
        return results

    def _step(self, size: int) -> None:
        self._results[:size] = self._model(self._pieces[:size])


class SpeakerEmbedder(BackgroundModel[Samples, Samples], Embedder):
    """Runs CAM++ on pieces of speech of `piece_samples` samples. On a CPU the threads share one traced model."""

    def __init__(self, weights: Path, piece_samples: int, device: torch.device, threads: int = 1) -> None:
        super().__init__("speakers", device, threads, SPEAKER_BATCHES)
        if device.type != "cpu":
            self.recipe = partial(SpeakerEmbedder, weights, piece_samples, device)
        self._weights = weights
        self._piece_samples = piece_samples
        self._loading = threading.Lock()
        self._embed: Callable[[list[Samples]], Iterable[Samples]] | None = None

    def _load(self, number: int) -> None:
        with self._loading:
            if self._embed is not None:
                return
            model = load_campplus(self._weights, self._device)
            if self._device.type != "cpu":
                self._embed = GraphedModel(model, self._piece_samples, self._device, self._batches.sizes)
            else:
                embed = trace_for(model, self._piece_samples)
                self._embed = lambda batch: [embed(torch.from_numpy(piece)[None])[0].numpy() for piece in batch]

    def _compute(self, batch: list[Samples]) -> list[Samples]:
        assert self._embed is not None
        return list(self._embed(batch))


class SmartTurnDetector(BackgroundModel[Callable[[], Samples], float], TurnDetector):
    """Runs Smart Turn on one thread: with 8-bit layers on a CPU, in float16 on a GPU."""

    window_samples = WINDOW_SAMPLES

    def __init__(self, weights: Path, device: torch.device) -> None:
        super().__init__("turns", device, 1, TURN_BATCHES)
        if device.type != "cpu":
            self.recipe = partial(SmartTurnDetector, weights, device)
        self._weights = weights
        self._judge: Callable[[list[Samples]], list[float]] | None = None
        self._warned = False

    def _load(self, number: int) -> None:
        with self._warning_once():
            model = load_smart_turn(self._weights)
            if self._device.type == "cpu":
                model.quantise()
                model.judge([np.zeros(WINDOW_SAMPLES, np.float32)])
                self._judge = model.judge
            else:
                model.move(self._device, torch.float16)
                graphed = GraphedModel(model, WINDOW_SAMPLES, self._device, self._batches.sizes)
                self._judge = lambda batch: graphed(batch).tolist()

    def _compute(self, batch: list[Callable[[], Samples]]) -> list[float]:
        assert self._judge is not None
        with self._warning_once():
            return self._judge([audio() for audio in batch])

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("the turn detector failed, so turns end by text and silence: %s", error)
            raise


# The second pass: decodes an utterance again after its end, with all of its audio, for a final text with fewer errors.
#
# Streamed words are decoded with little audio after them, by an encoder with bounded context per frame. The published
# encoder used here sees the whole utterance. The streamed tokens are the draft: one pass of the decoder checks them,
# and decoding continues from the first one that differs, so a draft without errors costs one pass. The result depends
# on the audio, and on the draft only where two tokens are so close that rounding decides.

SAMPLE_RATE = 16_000


class UtteranceReviser(BackgroundModel[EndedUtterance, list[TimedToken]], Reviser):
    """Decodes utterances again after their end, on low-priority threads.

    `thread_numbers`: numbers of its threads, under which the model has weight copies (`inference_thread`).
    `decode`: a traced pass in place of `model.decode`.
    """

    def __init__(
        self,
        model: SpeechModel,
        pieces: list[bytes],
        policy: Policy,
        keywords: KeywordTrees,
        thread_numbers: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        super().__init__("revise", torch.device("cpu"), len(thread_numbers), ONE_BY_ONE)
        self._model = model
        self._pieces = pieces
        self._policy = policy
        self._keywords = keywords
        self._thread_numbers = thread_numbers
        self._decoder = GreedyDecoder(model, decode=decode)
        self.prepare()

    def _load(self, number: int) -> None:
        inference_thread.number = self._thread_numbers[number]
        prepare_kernels(self._model)

    def _compute(self, batch: list[EndedUtterance]) -> list[list[TimedToken]]:
        return [self.revise(utterance) for utterance in batch]

    @torch.inference_mode()
    def revise(self, utterance: EndedUtterance) -> list[TimedToken]:
        """The tokens of an utterance. Positions are counted from the start of its audio, which is the context if it has
        one. Empty if the text is too long for the model, repeats itself, or is noise."""
        model, context_tokens = self._model, list(utterance.context_tokens)
        samples = torch.from_numpy(utterance.samples)[None]
        samples = pad(samples, (0, max(0, model.min_samples - samples.shape[1])))
        encoded = model.encode(samples, [samples.shape[1]])
        room = model.max_tokens - len(model.start_tokens) - len(context_tokens) - 1
        if room < 1:
            return []
        seconds = len(utterance.samples) / SAMPLE_RATE
        # Speech has a limited number of tokens per second; a few more allow for a very short utterance.
        speech_tokens = round(seconds * self._policy.tokens_per_second) + SPARE_TOKENS
        max_tokens = max(1, min(room, speech_tokens - len(context_tokens)))
        tree = self._keywords.lazy_tree(utterance.options)
        row = Row(
            committed=context_tokens,
            draft=list(utterance.draft[:max_tokens]),
            max_tokens=max_tokens,
            stop_frame=None,
            frames=encoded.audio[0],
            progress=Progress(-inf, inf),
            keywords=None if tree is None else tree.tree,
            retries_draft=True,
        )
        self._decoder.run([row], encoded)
        return self._timed(row, utterance)

    def _context_token_count(self, tokens: list[int], peaks: list[float], start: float) -> int:
        """How many leading tokens are words of the context that its streamed text did not have. The context ends at the
        position `start`.

        One token alone may attend to anything, so it counts only together with the next one.
        """
        count = 0
        while count + 1 < len(tokens) and max(peaks[count : count + 2]) < start:
            count += 1
        # Punctuation and the rest of a word at the beginning belong to the context, too.
        while start and count < len(tokens) and not starts_word(self._pieces[tokens[count]]):
            count += 1
        return count

    def _timed(self, row: Row, utterance: EndedUtterance) -> list[TimedToken]:
        """The tokens of a decoded row with their times; empty if the row is not a text of the utterance."""
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        start, end = utterance.context_samples / SAMPLES_PER_POSITION, len(utterance.samples) / SAMPLES_PER_POSITION
        if not row.ended or loop_start(row.committed + row.tokens) is not None:
            return []  # the text was not decoded to its end, or ends in a repeated phrase
        peaks = [peak * scale for peak in row.peaks]
        first = self._context_token_count(row.tokens, peaks, start)
        steady_peaks = steady(peaks[first:], start)
        new = [
            HypothesisToken(*each)
            for each in zip(row.tokens[first:], steady_peaks, row.log_probabilities[first:], strict=True)
        ]
        new = without_second_mark(row.committed, new, self._pieces)
        text = b"".join(self._pieces[token] for token in row.tokens)
        if is_noise(text, row.log_probabilities, self._policy.doubt):
            return []
        return [
            TimedToken(token.token, first, last, token.log_probability)
            for token, (first, last) in zip(new, spans(new, start, end), strict=True)
        ]
