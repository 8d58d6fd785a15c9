"""Decoding of a batch in fixed buffers, so that CUDA graphs can record it: one token per row and step.

`DeviceWindows` decodes live windows with it (`RecordedDecoderBatch` in place of `DecoderBatch`). The buffers are sized
for the largest batch, the longest window and the longest text. A batch uses the beginning of them in one of a few
shapes: rows, frames and tokens are rounded up to the next recorded size, because a graph always reads everything it was
recorded with. Without CUDA the same steps run without a recording.
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
from engine.runner.windowed.decoder import DecodedToken, DecoderBatch, choices_of


def sizes_up_to(largest: int, smallest: int, growth: float) -> list[int]:
    """Sizes to record up to `largest`, each `growth` times the one before."""
    sizes = [largest]
    while sizes[-1] / growth >= smallest:
        sizes.append(int(sizes[-1] / growth))
    return sizes[::-1]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The recorded sizes of each dimension, smallest first."""

    rows: Sequence[int]
    frames: Sequence[int]
    tokens: Sequence[int]

    @classmethod
    def up_to(cls, rows: int, frames: int, tokens: int, least_frames: int = 200) -> Shapes:
        return cls(sizes_up_to(rows, 1, 2.0), sizes_up_to(frames, least_frames, 1.6), sizes_up_to(tokens, 60, 2.0))

    def fit(self, rows: int, frames: int, tokens: int) -> Shape:
        """The smallest recorded shape for a batch of this size."""
        return Shape(_next(self.rows, rows), _next(self.frames, frames), _next(self.tokens, tokens))

    def all(self) -> list[Shape]:
        """All shapes, the largest first, because recordings share one memory pool."""
        return [Shape(*sizes) for sizes in product(self.rows[::-1], self.frames[::-1], self.tokens[::-1])]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a batch in the buffers: rows, encoder frames per row, tokens per text."""

    rows: int
    frames: int
    tokens: int


def _next(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


class DecoderBuffers:
    """The buffers of a decoding batch, and the recorded graphs that work on them. `records`: the device is a CUDA
    device."""

    def __init__(
        self,
        model: SpeechModel,
        suppressed: Tensor,
        shapes: Shapes,
        dtype: torch.dtype,
        tokens_at_once: int,
        records: bool,
    ) -> None:
        self._model = model
        self.suppressed = suppressed
        self.shapes = shapes
        # Most tokens of known text read in one pass, over all rows.
        self.tokens_at_once = tokens_at_once
        device, decoder = suppressed.device, model.decoder_shape
        rows, frames, tokens = shapes.rows[-1], shapes.frames[-1], shapes.tokens[-1]
        audio_size = decoder.layers, rows * decoder.heads * decoder.dim * frames
        text_size = decoder.layers, rows * decoder.heads * decoder.dim * tokens
        self._cross_keys, self._cross_values = torch.zeros(2, *audio_size, dtype=dtype, device=device)
        self._keys, self._values = torch.zeros(2, *text_size, dtype=dtype, device=device)
        # Mask of real frames; number of frames with audio per row.
        self.real = torch.zeros(rows * frames, dtype=torch.bool, device=device)
        self.audio_frames = torch.ones(rows, dtype=torch.int64, device=device)
        # Input of a step: token and position per row. Output: token, log-probability and peak per row.
        self.inputs = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(3, rows, device=device)
        # [rows, vocabulary], for rows with keywords; allocated by the first step.
        self.logits: Tensor | None = None
        self._records = records
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def encoded(self, shape: Shape) -> Encoded:
        """The encoder-output buffer of a batch of this shape, to be written into."""
        layers, heads, dim = self._sizes()
        keys = self._view(self._cross_keys, layers, shape.rows, heads, dim, shape.frames)
        values = self._view(self._cross_values, layers, shape.rows, heads, shape.frames, dim)
        real = self.real[: shape.rows * shape.frames].view(shape.rows, 1, 1, shape.frames)
        return Encoded(keys, values, [shape.frames] * shape.rows, real=real)

    def state(self, shape: Shape) -> DecoderState:
        """The text buffers of a batch of this shape."""
        layers, heads, dim = self._sizes()
        sizes = layers, shape.rows, heads, shape.tokens, dim
        return DecoderState(self._view(self._keys, *sizes), self._view(self._values, *sizes))

    def record(self) -> None:
        """Record a graph for every shape; call once, before the first batch."""
        if not self._records:
            return
        pool = torch.cuda.graph_pool_handle()
        self.real.fill_(True)
        for shape in self.shapes.all():
            # The first run lets the libraries choose algorithms, which cannot be recorded.
            self._step(shape)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(shape)
            self._graphs[shape] = graph

    def run(self, shape: Shape) -> None:
        """Decode one token per row."""
        if self._records:
            self._graphs[shape].replay()
        else:
            self._step(shape)

    def _step(self, shape: Shape) -> None:
        """One token per row; reads and writes fixed buffers only."""
        decoder_batch = DecoderBatch(
            self._model, self.suppressed, self.encoded(shape), self.audio_frames[: shape.rows], self.state(shape)
        )
        self.chosen[:, : shape.rows] = decoder_batch.next(self.inputs[: shape.rows], shape.tokens)
        if self.logits is None:
            self.logits = decoder_batch.logits.new_zeros(self.shapes.rows[-1], decoder_batch.logits.shape[1])
        self.logits[: shape.rows] = decoder_batch.logits

    def _sizes(self) -> tuple[int, int, int]:
        decoder = self._model.decoder_shape
        return decoder.layers, decoder.heads, decoder.dim

    @staticmethod
    def _view(buffer: Tensor, layers: int, *sizes: int) -> Tensor:
        """The beginning of every layer's part of a buffer, as a tensor of this shape."""
        count = torch.Size(sizes).numel()
        return buffer[:, :count].view(layers, *sizes)


class RecordedDecoderBatch(DecoderBatch):
    """A batch in fixed buffers: known text is read directly, new tokens are decoded by recorded graphs."""

    def __init__(
        self,
        model: SpeechModel,
        buffers: DecoderBuffers,
        encoded: Sequence[Encoded],
        audio_frames: list[int],
        text_tokens: int,
    ) -> None:
        rows, frames = len(audio_frames), max(part.values.shape[3] for part in encoded)
        self._buffers = buffers
        self._shape = shape = buffers.shapes.fit(rows, frames, text_tokens)
        buffer, state = buffers.encoded(shape), buffers.state(shape)
        _copy(encoded, buffer)
        # Masked entries must be finite, too.
        state.keys.zero_()
        state.values.zero_()
        buffers.audio_frames[:rows].copy_(upload(np.array(audio_frames, np.int64), buffers.suppressed.device))
        super().__init__(model, buffers.suppressed, buffer, buffers.audio_frames[: shape.rows], state)

    def next_tokens(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        buffers, rows = self._buffers, len(last)
        buffers.inputs[:rows].copy_(upload(np.array(last, np.int64), buffers.suppressed.device))
        buffers.run(self._shape)
        assert buffers.logits is not None
        self.logits = buffers.logits
        return choices_of(buffers.chosen[:, :rows])

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        """Read a few rows at a time: attention of all tokens to all frames of all rows would take much memory."""
        count = max(1, self._buffers.tokens_at_once // max(map(len, known)))
        chosen, logits, wanted = [], [], set(kept)
        for first in range(0, len(known), count):
            part = slice(first, min(first + count, len(known)))
            numbers = [number for number, (row, _) in enumerate(places) if part.start <= row < part.stop]
            part_places = [(places[number][0] - first, places[number][1]) for number in numbers]
            decoder_batch = self._rows(part)
            part_kept = [index for index, number in enumerate(numbers) if number in wanted]
            chosen.append(decoder_batch._read(known[part], part_places, part_kept))
            logits.append(decoder_batch.logits)
        self.logits = torch.cat(logits)
        return torch.cat(chosen, dim=1)

    def _rows(self, part: slice) -> DecoderBatch:
        """A batch of some of the rows."""
        batch, state = self._encoded, self._state
        assert batch.real is not None
        encoded = Encoded(batch.keys[:, part], batch.values[:, part], batch.lengths[part], real=batch.real[part])
        state = DecoderState(state.keys[:, part], state.values[:, part])
        return DecoderBatch(self._model, self._suppressed, encoded, self._audio_frames[part], state)


def _copy(encoded: Sequence[Encoded], target: Encoded) -> None:
    """Copy batches that were encoded one after the other into one. Unused rows get one real frame, because attention
    over no frame is undefined."""
    assert target.real is not None
    target.real.zero_()
    target.real[..., 0] = True
    first = 0
    for part in encoded:
        rows, frames = slice(first, first + len(part.lengths)), part.values.shape[3]
        target.keys[:, rows, :, :, :frames] = part.keys
        target.values[:, rows, :, :frames] = part.values
        target.values[:, rows, :, frames:] = 0.0  # masked entries must be finite, too
        target.real[rows, ..., :frames] = True if part.real is None else part.real
        first = rows.stop
