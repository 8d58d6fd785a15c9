"""Where windows are read: what differs between a CPU and a device. The runner knows streams, text and plans; windows
turn audio into sounds, and rows into what was said.

On a CPU live streams are read side by side, each thread with one of them at a time. Two threads with a stream each are
never in each other's way, as two threads inside one product are. A window fills a core by itself, needs no padding
then, and a stream's text cannot depend on its neighbours.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from engine.core.plan import DecodeResult, DecodeTask, EncodeTask
from engine.models.compiled import Decode
from engine.models.seq2seq import Encoded, SpeechModel, make_plans, reader
from engine.runner.windowed.audio_slab import SAMPLES_PER_POSITION, AudioSlab
from engine.runner.windowed.ears import Ear, Sound, WindowEar
from engine.runner.windowed.greedy import GreedyDecoder, Row
from engine.runner.windowed.judge import Judgement, judge

Results = dict[int, DecodeResult]


class Windows(Protocol):
    """Audio of all streams, the ears that hear it, and the decoder. Slots stand for streams."""

    device: torch.device

    def write(self, tasks: Sequence[EncodeTask]) -> None:
        """New audio."""

    def audio(self, task: DecodeTask) -> Tensor:
        """[1, samples] of the task's whole window."""

    def is_broken(self, task: DecodeTask) -> bool:
        """Whether its audio holds values that are not numbers."""

    def ear(self, live: bool) -> Ear:
        """The one that remembers what live streams, or files, have heard."""

    def hear(
        self, tasks: Sequence[DecodeTask], live: bool, wanted: Set[int]
    ) -> Generator[None, None, dict[int, Sound]]:
        """Sounds by slot, a piece of work at a time; slots that are not wanted any more by then are left out."""

    def passes(self, rows: Sequence[Row], sounds: Sequence[Sound], live: bool) -> Iterator[None]:
        """Fill in what the rows say of these sounds, a pass at a time. Live ones are read without a break."""

    def judge(self, sounds: Sequence[Sound]) -> list[Judgement]:
        """What the model thinks of these sounds before it reads them."""

    def share_out(self, tasks: Sequence[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
        """Have `read` read the windows of live streams, in parts as large as can be read at once."""

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


class HostWindows:
    """See `Windows`; `threads` read side by side, of which the calling one is one. `decode` stands for the model's
    own."""

    def __init__(
        self,
        model: SpeechModel,
        ear: Ear,
        file_ear: WindowEar,
        cache_embeds: int,
        threads: int = 1,
        decode: Decode | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self._model = model
        self._slab = AudioSlab(cache_embeds)
        self._ear, self._file_ear = ear, file_ear
        self._decoder = GreedyDecoder(model, decode=decode)
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "read", _be_next_reader, (count(1),)) if threads > 1 else None
        self.write, self.audio, self.is_broken = self._slab.write, self._slab.audio, self._slab.is_broken

    def ear(self, live: bool) -> Ear:
        return self._ear if live else self._file_ear

    def hear(
        self, tasks: Sequence[DecodeTask], live: bool, wanted: Set[int]
    ) -> Generator[None, None, dict[int, Sound]]:
        sounds: dict[int, Sound] = {}
        for task in tasks:
            if task.slot not in wanted:
                continue
            if live:
                sounds[task.slot] = self._ear.hear(task, self.audio(task))
            else:
                sounds[task.slot] = yield from self._file_ear.hear_slowly(task, self.audio(task))
            yield
        return sounds

    def passes(self, rows: Sequence[Row], sounds: Sequence[Sound], live: bool) -> Iterator[None]:
        return self._decoder.passes(list(rows), Encoded.stack([sound.encoded for sound in sounds]))

    def judge(self, sounds: Sequence[Sound]) -> list[Judgement]:
        return judge(self._model, Encoded.stack([sound.encoded for sound in sounds]))

    def share_out(self, tasks: Sequence[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
        """A stream at a time, to whichever thread is free: shares that are fixed beforehand leave one thread waiting
        for the other. Nor are streams read as a batch, because products of floats round one row other than many."""
        waiting = deque(tasks)
        helpers = min(self._threads, len(tasks)) - 1
        given = [self._helpers.submit(_read_one_by_one, waiting, read) for _ in range(helpers) if self._helpers]
        results = _read_one_by_one(waiting, read)
        for part in given:
            results |= part.result()
        return results

    def warm_up(self) -> None:
        """Every reader at once, so that each of them is one of the threads that will read."""
        ready = threading.Barrier(self._threads)
        helpers = [] if self._helpers is None else [self._helpers] * (self._threads - 1)
        warming = [helper.submit(self._warm_up, ready) for helper in helpers]
        self._warm_up(ready)
        for helper in warming:
            helper.result()

    @torch.inference_mode()
    def _warm_up(self, ready: threading.Barrier) -> None:
        """A second of noise, so that the first utterance finds kernels and memory ready."""
        ready.wait()
        make_plans(self._model)
        noise = torch.randn(1, 12 * SAMPLES_PER_POSITION) * 0.01
        encoded = self._model.encode(noise, [noise.shape[1]])
        self._decoder.run([Row([], [], 8, None, encoded.audio[0])], encoded)

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()


def _read_one_by_one(waiting: deque[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
    """Read what nobody has begun to read, until nothing is left."""
    results: Results = {}
    while True:
        try:
            task = waiting.popleft()
        except IndexError:
            return results
        results |= read([task])


def _be_next_reader(numbers: Iterator[int]) -> None:
    """This thread has weights of its own from now on."""
    reader.number = next(numbers)
