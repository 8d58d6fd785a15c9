"""Shared parts of the windowed models Whisper and Moonshine: the `SpeechModel` interface, decoder caches, 8-bit layers.

The windowed runner (`engine/runner/windowed`) knows a model only by `SpeechModel`. Weights are shared, state is passed:
a pass has an `Encoded` (encoder output) and a `DecoderState` (keys and values of the text so far), both batched over
streams. Rows of a batch have different lengths; masks keep the rows independent.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from engine.options import Options

# 8-bit products in pieces of two sizes, for kernels that prepare a plan for each number of rows.
#
# On ARM such a plan reorders all weights, which takes as long as the product itself or, for few rows, much longer. Only
# two plans are kept per matrix, and live text has another length in every pass, so nearly every product would need a
# new one.

# Rows of the larger pieces; the smaller ones have 8, the number that kernels process at a time. A block of the encoder
# has 39 frames, and every piece has one more row that spans the range.
PIECE_ROWS = 40


def _product_in_pieces(
    level: Tensor,
    whole_range: Tensor,
    weights: torch.classes.quantized.LinearPackedParamsBase,  # type: ignore[name-defined]
) -> Tensor:
    """[rows, inputs] between -1 and 1, and filler rows that span this range -> [rows, outputs]"""
    rows, largest = level.size(0), whole_range.size(0)
    # For many rows the cost of a plan is small.
    if rows > 4 * largest:
        product: Tensor = torch.ops.quantized.linear_dynamic(torch.cat((level, whole_range[:1])), weights)
        return product[:rows]
    parts: list[Tensor] = []
    done = 0
    while done < rows or done == 0:
        # Two small pieces are cheaper than a large one.
        size = 8 if rows - done <= 2 * (8 - 1) else largest
        part = level[done : done + size - 1]
        piece = torch.cat((part, whole_range[: size - part.size(0)]))
        parts.append(torch.ops.quantized.linear_dynamic(piece, weights)[: part.size(0)])
        done += size - 1
    return parts[0] if len(parts) == 1 else torch.cat(parts)


with warnings.catch_warnings():
    # It is called from traces, which cannot contain loops. The replacement that torch recommends needs a C++ compiler.
    warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
    product_in_pieces = torch.jit.script(_product_in_pieces)


# The interface of encoder-decoder models, and their caches.

T = TypeVar("T")


def at_once(work: Generator[None, None, T]) -> T:
    """Run a generator of work to its end without interruption; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def counts_on(device: torch.device, values: list[int]) -> Tensor:
    """A few integers on a device, without waiting for its queue."""
    return torch.tensor(values).to(device, non_blocking=True)


@dataclass(slots=True)
class Encoded:
    """Encoder output: cross-attention keys and values of every decoder layer, padded to the longest row.

    keys: [layers, batch, heads, dim, frames], a layout in which a product with them is fast; values: [layers, batch,
    heads, frames, dim]; lengths: number of real frames per row.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    # Frames with audio, per row; silence may follow. Default: all real frames.
    audio: list[int] = field(default_factory=list)
    # [batch, 1, 1, frames], True where the frame is real; None if there is no padding.
    real: Tensor | None = None

    def __post_init__(self) -> None:
        self.audio = self.audio or self.lengths
        frames = self.keys.shape[4]
        if self.real is None and any(length < frames for length in self.lengths):
            lengths = counts_on(self.keys.device, self.lengths)
            self.real = (torch.arange(frames, device=self.keys.device) < lengths[:, None])[:, None, None, :]

    @classmethod
    def stack(cls, rows: list[Encoded]) -> Encoded:
        """One batch of several that were encoded separately."""
        if len(rows) == 1:
            return rows[0]
        lengths = [length for row in rows for length in row.lengths]
        audio = [frames for row in rows for frames in row.audio]
        frames = max(row.values.shape[3] for row in rows)
        keys = [pad(row.keys, (0, frames - row.keys.shape[4])) for row in rows]
        values = [pad(row.values, (0, 0, 0, frames - row.values.shape[3])) for row in rows]
        return cls(torch.cat(keys, dim=1), torch.cat(values, dim=1), lengths, audio)

    def rows(self, kept: list[int]) -> Encoded:
        """A batch of some of the rows."""
        if kept == list(range(len(self.lengths))):
            return self
        index = counts_on(self.keys.device, kept)
        lengths, audio = [self.lengths[row] for row in kept], [self.audio[row] for row in kept]
        return Encoded(self.keys[:, index], self.values[:, index], lengths, audio)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Dimensions of a decoder's self-attention caches."""

    layers: int
    heads: int
    dim: int


class DecoderState:
    """Self-attention keys and values, [layers, batch, heads, capacity, dim] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, shape: DecoderShape, batch: int, capacity: int, like: Tensor) -> DecoderState:
        size = (shape.layers, batch, shape.heads, capacity, shape.dim)
        return cls(like.new_zeros(size), like.new_zeros(size))

    def first(self, positions: int) -> DecoderState:
        """The state for the first `positions` tokens; the rest need not be read."""
        return DecoderState(self.keys[:, :, :, :positions], self.values[:, :, :, :positions])

    def extend(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write [batch, heads, count, dim] at each row's positions, `index` [batch, 1, count, 1]; returns all keys and
        values."""
        index = index.expand_as(value)
        keys, values = self.keys[layer], self.values[layer]
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys, values


@dataclass(slots=True)
class DecoderPass:
    """Arguments of every layer in one decoder call: positions of its tokens, caches, encoder output, causal mask."""

    index: Tensor
    state: DecoderState
    encoded: Encoded
    seen: Tensor

    @classmethod
    def start(cls, positions: Tensor, state: DecoderState, encoded: Encoded) -> DecoderPass:
        index = positions[:, None, :, None]
        # A token sees itself and the tokens before it: [batch, 1, count, capacity].
        seen = torch.arange(state.keys.shape[3], device=positions.device) <= index
        return cls(index, state, encoded, seen)

    def self_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Self-attention over the text so far; query is already scaled."""
        keys, values = self.state.extend(layer, self.index, key, value)
        return join_heads(scaled_dot_product_attention(query, keys, values, attn_mask=self.seen, scale=1.0))

    def cross_attention(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-attention over the audio, and its weights [batch, heads, count, frames]; query is already scaled."""
        mixed, weights = attend(query, self.encoded.keys[layer], self.encoded.values[layer], self.encoded.real)
        return join_heads(mixed), weights


@dataclass(frozen=True, slots=True)
class Judging:
    """Tokens with which a model judges a window before it is read: after `start` it predicts the token of a language
    or `no_speech`. Languages are in the order of the model's options."""

    start: int
    no_speech: int
    languages: tuple[int, ...]


class SpeechModel(Protocol):
    """An encoder-decoder model over audio windows."""

    # Samples per encoder frame; word times are counted in frames.
    samples_per_frame: int
    # Fewest samples that give a frame.
    min_samples: int
    max_tokens: int
    start_tokens: list[int]
    end_token: int
    # Tokens that are never text (markers, time stamps); they are never chosen.
    suppressed: list[int]
    options: Options
    # None: the model cannot judge windows.
    judging: Judging | None

    @property
    def decoder_shape(self) -> DecoderShape: ...

    def set_live_padding(self, full_padding: bool, to_end: bool = False) -> None:
        """Called once, before live use with many short windows. `full_padding`: pad windows as in the model's training,
        for a device that is fast enough. `to_end`: this instance reads windows that end at a pause, and must find the
        end of the text."""

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to a device; numbers have this type wherever it is precise enough."""

    def frames_of(self, samples: int) -> int:
        """Number of encoder frames for a window of this many samples."""

    @property
    def widest_frame(self) -> int:
        """Most numbers that the encoder holds at once per frame."""

    def encode(self, audio: Tensor, lengths: list[int]) -> Encoded:
        """[batch, samples] of 16 kHz audio, zero after each row's length -> encoder output."""

    def encode_slowly(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, Encoded]:
        """As `encode`, yielding between layers, so that the caller may interleave other work."""

    def prompt_tokens(self, language: str, task: str, before: Sequence[int]) -> list[int]:
        """The tokens that start a text. `language`: a code (empty: the model's first); `task`: empty to transcribe;
        `before`: tokens of the text before it. Without any of these: `start_tokens`."""

    def new_state(self, batch: int, capacity: int) -> DecoderState: ...

    def decode(self, tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """tokens, positions: [batch, count] -> hidden [batch, count, width], attention [batch, count, frames].

        The whole capacity of the state is read and masked, so it should not be longer than the text. A row may be
        padded by repeating positions after its end: what is written there is overwritten before it is visible.
        Attention is averaged over the heads that follow the audio, and sums to one over frames.
        """

    def logits(self, hidden: Tensor) -> Tensor: ...


class WithoutInitialValues(TorchFunctionMode):
    """Layers that are built within it have no random weights, which take time to draw. For models whose weights are
    then loaded."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return None if func in _DRAWS else func(*args, **(kwargs or {}))


_DRAWS = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}


def copy_weights(model: nn.Module) -> None:
    """Copy the weights into the memory of the process. Loaded weights are a mapped file: if another program shortened
    the file, the system would end this process."""
    for weight in model.parameters():
        weight.data = weight.data.clone()


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention with its weights: [batch, heads, count, dim] and [batch, heads, count, keys].

    query is already scaled; keys are [batch, heads, dim, keys]. Weights are float32 for every model type.
    """
    batch, heads, count, _ = query.shape
    # bmm on flattened heads: a four-dimensional matmul has more overhead, which matters for a single token.
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1)).view(batch, heads, count, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32)
    mixed = torch.bmm(weights.to(values.dtype).flatten(0, 1), values.flatten(0, 1))
    return mixed.view(batch, heads, count, -1), weights


def cross_keys_values(both: Tensor, layers: int, heads: int) -> tuple[Tensor, Tensor]:
    """[batch, frames, 2 * layers * width] -> keys [layers, batch, heads, dim, frames], values [.., frames, dim]"""
    batch, frames, width = both.shape
    parts = both.view(batch, frames, 2, layers, heads, width // (2 * layers * heads))
    keys = parts[:, :, 0].permute(2, 0, 3, 4, 1).contiguous()
    values = parts[:, :, 1].permute(2, 0, 3, 1, 4).contiguous()
    return keys, values


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, count, width] -> [batch, heads, count, dim]"""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[batch, heads, count, dim] -> [batch, count, width]"""
    return x.transpose(1, 2).flatten(2)


class FrameConv(nn.Module):
    """A convolution over [batch, frames, channels] as one matrix product: it is faster here, can be 8-bit, and needs no
    library plan for each new length on a GPU."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int, bias: bool = True) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.linear = nn.Linear(kernel * channels, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.unfold(1, self.kernel, self.stride)  # [batch, frames, channels, kernel]
        result: Tensor = self.linear(columns.transpose(2, 3).flatten(2))
        return result

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """[width, channels, kernel] of a Conv1d -> [width, kernel * channels]"""
        return weight.transpose(1, 2).flatten(1)


class Reader(threading.local):
    """The number of this thread among those that read in parallel."""

    number = 0


reader = Reader()


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and 8-bit activations.

    The fast kernels take one scale per matrix. So rows of weights and rows of input are first scaled to the same range
    and scaled back after the product, which is as exact as a scale per row. A last row that spans the range is added,
    so that rounding is always the same: sums of integers are exact, so the result of a row does not depend on the other
    rows, bit for bit. Weights have as many steps as the processor can add up (`weight_steps`).

    Kernels keep scratch data beside the weights, and two threads that share it crash. So each reader has its own copy
    of the weights. On ARM kernels also prepare a plan for every number of rows, which takes longer than the product,
    and keep only two: there a product is done in pieces of two sizes (`product_in_pieces`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        self.range = weight.abs().amax(dim=1).clamp(min=1e-12)
        self.bias = None if bias is None else bias.detach().float().clone()
        quantised = torch.quantize_per_tensor(weight / self.range[:, None], 1.0 / weight_steps(), 0, torch.qint8)
        # By the number of the reader.
        self._weights: dict[int, torch.ScriptObject] = {0: torch.ops.quantized.linear_prepack(quantised, None)}
        self._in_pieces = torch.backends.quantized.engine == "onednn"
        self._whole_range = torch.zeros(PIECE_ROWS if self._in_pieces else 1, weight.shape[1])
        self._whole_range[:, :2] = torch.tensor([-1.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        loudest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
        product = self._product(rows / loudest)
        scale = loudest * self.range
        product = product.mul_(scale) if self.bias is None else torch.addcmul(self.bias, product, scale)
        return product.view(*x.shape[:-1], product.shape[1])

    def _product(self, level: Tensor) -> Tensor:
        product: Tensor
        if self._in_pieces:
            product = product_in_pieces(level, self._whole_range, self._own_weights())
        else:
            level = torch.cat((level, self._whole_range))
            product = torch.ops.quantized.linear_dynamic(level, self._own_weights())[:-1]
        return product

    def make_plans(self) -> None:
        """Let the kernels prepare this reader's plans, which take as much memory as the weights."""
        for rows in {1, self._whole_range.shape[0]}:
            self(torch.zeros(rows, self._whole_range.shape[1]))

    def copy_for_reader(self, number: int) -> None:
        """Allow the thread with this number to compute at the same time as others."""
        if number not in self._weights:
            quantised, _ = torch.ops.quantized.linear_unpack(self._own_weights())
            self._weights[number] = torch.ops.quantized.linear_prepack(quantised, None)

    def weights_of(self, number: int) -> torch.ScriptObject:
        """The weights of the reader with this number."""
        return self._weights[number]

    def _own_weights(self) -> torch.ScriptObject:
        return self._weights[reader.number]


# Steps from zero to the largest weight: of a signed byte, and the safe number where pairs of products saturate.
_FULL_STEPS, SAFE_STEPS = 127, 63


# Fewest weights of a matrix for which 8 bits are worthwhile; scaling rows costs as much as a small product.
SMALLEST_8_BIT = 200_000


@cache
def weight_steps() -> int:
    """How many steps weights may have on this processor.

    Processors without 8-bit dot-product instructions add two products in 16 bits, which silently saturates for large
    weights. Half the range is safe. The processor's behaviour is tested, not looked up.
    """
    largest = torch.quantize_per_tensor(torch.ones(1, 64), 1.0 / _FULL_STEPS, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(largest, None)
    # The -1 sets the lower end of the range, so that the ones become the largest bytes.
    product = torch.ops.quantized.linear_dynamic(torch.tensor([[-1.0] + 63 * [1.0]]), packed)
    return _FULL_STEPS if abs(float(product) - 62.0) < 1.0 else SAFE_STEPS


def in_8_bits(weight: Tensor, bias: Tensor | None = None) -> Int8Linear | None:
    """An 8-bit linear layer; None if the matrix is too small for it."""
    if weight.numel() < SMALLEST_8_BIT:
        return None
    supported = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "x86" if "x86" in supported else "onednn"
    return Int8Linear(weight, bias)


def quantise_linears(module: nn.Module) -> None:
    """Replace every large linear layer in `module` by its 8-bit form."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            smaller = in_8_bits(child.weight, child.bias) if isinstance(child, nn.Linear) else None
            if smaller is not None:
                setattr(parent, name, smaller)


def allow_reader(model: nn.Module, number: int) -> None:
    """Allow the thread with this number to use a model at the same time as others."""
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.copy_for_reader(number)


def make_plans(model: SpeechModel) -> None:
    """Prepare this reader's plans before the first window."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, Int8Linear):
            module.make_plans()
