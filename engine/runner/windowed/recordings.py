"""The decoder's step on a device, one token for every row, in places that do not move: on CUDA it is a recording.

The places are sized for the largest batch, the longest window and the longest text. A batch uses the beginning of them,
in one of a few shapes: rows, frames and tokens are rounded up to the next recorded size, because what a recording reads
it always reads, used or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.models.seq2seq import DecoderState, Encoded, SpeechModel
from engine.runner.device import upload
from engine.runner.windowed.greedy import Answer, Speaker, answers_of


def sizes_up_to(largest: int, smallest: int, growth: float) -> list[int]:
    """Sizes worth a recording, each so much larger than the one before."""
    sizes = [largest]
    while sizes[-1] / growth >= smallest:
        sizes.append(int(sizes[-1] / growth))
    return sizes[::-1]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of batches that a step can have, smallest first."""

    rows: Sequence[int]
    frames: Sequence[int]
    tokens: Sequence[int]

    @classmethod
    def up_to(cls, rows: int, frames: int, tokens: int, least_frames: int = 200) -> Shapes:
        return cls(sizes_up_to(rows, 1, 2.0), sizes_up_to(frames, least_frames, 1.6), sizes_up_to(tokens, 60, 2.0))

    def fit(self, rows: int, frames: int, tokens: int) -> Shape:
        return Shape(_next(self.rows, rows), _next(self.frames, frames), _next(self.tokens, tokens))

    def all(self) -> list[Shape]:
        """The largest first: recordings share one pool of memory."""
        return [Shape(*sizes) for sizes in product(self.rows[::-1], self.frames[::-1], self.tokens[::-1])]


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    frames: int
    tokens: int


def _next(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


class Stage:
    """The places, and the recordings that work on them."""

    def __init__(
        self,
        model: SpeechModel,
        barred: Tensor,
        shapes: Shapes,
        dtype: torch.dtype,
        tokens_at_once: int,
        records: bool,
    ) -> None:
        self._model = model
        self.barred = barred
        self.shapes = shapes
        # Known text that is read at once, over all rows.
        self.tokens_at_once = tokens_at_once
        device, decoder = barred.device, model.decoder_shape
        rows, frames, tokens = shapes.rows[-1], shapes.frames[-1], shapes.tokens[-1]
        heard = decoder.layers, rows * decoder.heads * decoder.dim * frames
        said = decoder.layers, rows * decoder.heads * decoder.dim * tokens
        self._cross_keys, self._cross_values = torch.zeros(2, *heard, dtype=dtype, device=device)
        self._keys, self._values = torch.zeros(2, *said, dtype=dtype, device=device)
        self.real = torch.zeros(rows * frames, dtype=torch.bool, device=device)
        self.audio = torch.ones(rows, dtype=torch.int64, device=device)
        self.given = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(3, rows, device=device)
        # [rows, vocabulary], for rows that favour keywords; made by the first step.
        self.logits: Tensor | None = None
        self._records = records
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def encoded(self, shape: Shape) -> Encoded:
        """What a batch of this shape hears, to be written into."""
        layers, heads, dim = self._sizes()
        keys = self._cut(self._cross_keys, layers, shape.rows, heads, dim, shape.frames)
        values = self._cut(self._cross_values, layers, shape.rows, heads, shape.frames, dim)
        real = self.real[: shape.rows * shape.frames].view(shape.rows, 1, 1, shape.frames)
        return Encoded(keys, values, [shape.frames] * shape.rows, real=real)

    def state(self, shape: Shape) -> DecoderState:
        layers, heads, dim = self._sizes()
        sizes = layers, shape.rows, heads, shape.tokens, dim
        return DecoderState(self._cut(self._keys, *sizes), self._cut(self._values, *sizes))

    def record(self) -> None:
        """Once, before the first batch."""
        if not self._records:
            return
        pool = torch.cuda.graph_pool_handle()
        self.real.fill_(True)
        for shape in self.shapes.all():
            # The first run lets the libraries choose algorithms, which a recording cannot hold.
            self._step(shape)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(shape)
            self._graphs[shape] = graph

    def run(self, shape: Shape) -> None:
        if self._records:
            self._graphs[shape].replay()
        else:
            self._step(shape)

    def _step(self, shape: Shape) -> None:
        """Reads and writes fixed places only."""
        speaker = Speaker(self._model, self.barred, self.encoded(shape), self.audio[: shape.rows], self.state(shape))
        self.chosen[:, : shape.rows] = speaker.next(self.given[: shape.rows], shape.tokens)
        if self.logits is None:
            self.logits = speaker.logits.new_zeros(self.shapes.rows[-1], speaker.logits.shape[1])
        self.logits[: shape.rows] = speaker.logits

    def _sizes(self) -> tuple[int, int, int]:
        decoder = self._model.decoder_shape
        return decoder.layers, decoder.heads, decoder.dim

    @staticmethod
    def _cut(whole: Tensor, layers: int, *sizes: int) -> Tensor:
        """The beginning of every layer's part, as a tensor of this shape."""
        count = torch.Size(sizes).numel()
        return whole[:, :count].view(layers, *sizes)


class StagedSpeaker(Speaker):
    """A batch on a stage: known text runs as it comes, and what is said token by token runs as a recording."""

    def __init__(self, model: SpeechModel, stage: Stage, heard: Sequence[Encoded], audio: list[int], text: int) -> None:
        rows, frames = len(audio), max(part.values.shape[3] for part in heard)
        self._stage = stage
        self._shape = shape = stage.shapes.fit(rows, frames, text)
        whole, state = stage.encoded(shape), stage.state(shape)
        _copy(heard, whole)
        # What is masked still has to be numbers.
        state.keys.zero_()
        state.values.zero_()
        stage.audio[:rows].copy_(upload(np.array(audio, np.int64), stage.barred.device))
        super().__init__(model, stage.barred, whole, stage.audio[: shape.rows], state)

    def say(self, last: list[tuple[int, int]]) -> list[Answer]:
        stage, rows = self._stage, len(last)
        stage.given[:rows].copy_(upload(np.array(last, np.int64), stage.barred.device))
        stage.run(self._shape)
        assert stage.logits is not None
        self.logits = stage.logits
        return answers_of(stage.chosen[:, :rows])

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        """A few rows at a time: attention to all frames of all rows, for all tokens, would take much memory."""
        count = max(1, self._stage.tokens_at_once // max(map(len, known)))
        chosen, logits, wanted = [], [], set(kept)
        for first in range(0, len(known), count):
            part = slice(first, min(first + count, len(known)))
            numbers = [number for number, (row, _) in enumerate(places) if part.start <= row < part.stop]
            own = [(places[number][0] - first, places[number][1]) for number in numbers]
            speaker = self._rows(part)
            own_kept = [place for place, number in enumerate(numbers) if number in wanted]
            chosen.append(speaker._read(known[part], own, own_kept))
            logits.append(speaker.logits)
        self.logits = torch.cat(logits)
        return torch.cat(chosen, dim=1)

    def _rows(self, part: slice) -> Speaker:
        whole, state = self._encoded, self._state
        assert whole.real is not None
        lengths = whole.lengths[part]
        encoded = Encoded(whole.keys[:, part], whole.values[:, part], lengths, real=whole.real[part])
        state = DecoderState(state.keys[:, part], state.values[:, part])
        return Speaker(self._model, self._barred, encoded, self._audio[part], state)


def _copy(heard: Sequence[Encoded], whole: Encoded) -> None:
    """Batches that were encoded one after the other, as one. Rows that nobody hears listen to something all the same:
    an empty row would have no attention at all."""
    assert whole.real is not None
    whole.real.zero_()
    whole.real[..., 0] = True
    first = 0
    for part in heard:
        rows, frames = slice(first, first + len(part.lengths)), part.values.shape[3]
        whole.keys[:, rows, :, :, :frames] = part.keys
        whole.values[:, rows, :, :frames] = part.values
        whole.values[:, rows, :, frames:] = 0.0  # what is masked still has to be numbers
        whole.real[rows, ..., :frames] = True if part.real is None else part.real
        first = rows.stop
