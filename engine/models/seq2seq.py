"""What Whisper and Moonshine share: the `SpeechModel` interface with its caches and attention, and 8-bit linear layers.

The windowed runner (`engine/runner/windowed`) uses a model through `SpeechModel`; only tracing (`decoder.py`) and the
block encoder (`encoders.py`) need the class. Weights are shared, and state is passed in: a decoder pass gets an
`Encoded` (encoder output) and a `DecoderState` (keys and values of the text so far), both batched over streams. Rows of
a batch have different lengths; masks keep the rows independent.

On a CPU, Whisper, Moonshine and the turn detector replace their large linear layers by `Int8Linear`
(`quantise_linears`): weights and activations in 8 bits, with one copy of the weights per inference thread.
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

T = TypeVar("T")


def run_to_end(work: Generator[None, None, T]) -> T:
    """Run a generator to its end without interruption; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def ints_on_device(device: torch.device, values: list[int]) -> Tensor:
    """A tensor of a few integers on a device; does not wait for the device."""
    return torch.tensor(values).to(device, non_blocking=True)


@dataclass(slots=True)
class Encoded:
    """Encoder output: cross-attention keys and values of every decoder layer, padded to the longest row.

    A row has three parts: frames with audio, frames of silence that the model needs after the audio, and padding to the
    longest row. The first two are its *real* frames.
    """

    # [layers, batch, heads, dim, frames], a layout in which a product with the keys is fast.
    keys: Tensor
    # [layers, batch, heads, frames, dim]
    values: Tensor
    # Number of real frames per row.
    lengths: list[int]
    # Number of frames with audio per row. Default: all real frames.
    audio: list[int] = field(default_factory=list)
    # Mask [batch, 1, 1, frames], True where the frame is real; None if no row has padding.
    real: Tensor | None = None

    def __post_init__(self) -> None:
        self.audio = self.audio or self.lengths
        frames = self.keys.shape[4]
        if self.real is None and any(length < frames for length in self.lengths):
            lengths = ints_on_device(self.keys.device, self.lengths)
            self.real = (torch.arange(frames, device=self.keys.device) < lengths[:, None])[:, None, None, :]

    @classmethod
    def stack(cls, batches: list[Encoded]) -> Encoded:
        """Joins batches that were encoded separately to one batch."""
        if len(batches) == 1:
            return batches[0]
        lengths = [length for batch in batches for length in batch.lengths]
        audio = [frames for batch in batches for frames in batch.audio]
        frames = max(batch.values.shape[3] for batch in batches)
        keys = [pad(batch.keys, (0, frames - batch.keys.shape[4])) for batch in batches]
        values = [pad(batch.values, (0, 0, 0, frames - batch.values.shape[3])) for batch in batches]
        return cls(torch.cat(keys, dim=1), torch.cat(values, dim=1), lengths, audio)

    def select(self, rows: list[int]) -> Encoded:
        """The batch of these rows."""
        if rows == list(range(len(self.lengths))):
            return self
        index = ints_on_device(self.keys.device, rows)
        lengths, audio = [self.lengths[row] for row in rows], [self.audio[row] for row in rows]
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
        """A view of the state for the first `positions` tokens."""
        return DecoderState(self.keys[:, :, :, :positions], self.values[:, :, :, :positions])

    def extend(self, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value [batch, heads, count, dim] at the positions [batch, 1, count, 1] of each row. Returns all
        keys and values of the layer."""
        index = positions.expand_as(value)
        keys, values = self.keys[layer], self.values[layer]
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys, values


@dataclass(slots=True)
class DecoderPass:
    """Arguments of every layer in one decoder call."""

    # Positions of the call's tokens, [batch, 1, count, 1].
    positions: Tensor
    state: DecoderState
    encoded: Encoded
    # [batch, 1, count, capacity]: a token attends to itself and to the tokens before it.
    causal_mask: Tensor

    @classmethod
    def start(cls, positions: Tensor, state: DecoderState, encoded: Encoded) -> DecoderPass:
        positions = positions[:, None, :, None]
        causal_mask = torch.arange(state.keys.shape[3], device=positions.device) <= positions
        return cls(positions, state, encoded, causal_mask)

    def self_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Self-attention over the text so far; query is already scaled."""
        keys, values = self.state.extend(layer, self.positions, key, value)
        return join_heads(scaled_dot_product_attention(query, keys, values, attn_mask=self.causal_mask, scale=1.0))

    def cross_attention(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-attention over the audio, and its weights [batch, heads, count, frames]; query is already scaled."""
        mixed, weights = attend(query, self.encoded.keys[layer], self.encoded.values[layer], self.encoded.real)
        return join_heads(mixed), weights


@dataclass(frozen=True, slots=True)
class DetectionTokens:
    """Tokens for the detection of language and speech: after `start` the model predicts a language or `no_speech`.
    `languages` are in the order of the model's options."""

    start: int
    no_speech: int
    languages: tuple[int, ...]


class SpeechModel(Protocol):
    """An encoder-decoder model over audio windows."""

    # Samples per encoder frame. The decoder reports word times in frames.
    samples_per_frame: int
    # Fewest samples that give a frame.
    min_samples: int
    # Most tokens of a text, start tokens included.
    max_tokens: int
    # Tokens that start every text.
    start_tokens: list[int]
    end_token: int
    # Tokens that are never text (markers, time stamps); they are never chosen.
    suppressed: list[int]
    options: Options
    # None: the model cannot detect language and speech.
    detection_tokens: DetectionTokens | None

    @property
    def decoder_shape(self) -> DecoderShape: ...

    def set_live_padding(self, full_padding: bool, ends_at_pause: bool = False) -> None:
        """Called once, before live use with many short windows. `full_padding`: pad windows as in the model's training,
        for a device that is fast enough. `ends_at_pause`: this instance reads windows that end at a pause, and must
        find the end of the text."""

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to a device; weights and activations have this type wherever it is precise enough."""

    def frames_of(self, samples: int) -> int:
        """Number of encoder frames for a window of this many samples."""

    @property
    def peak_values_per_frame(self) -> int:
        """Most values per encoder frame that are in memory at once during encoding."""

    def encode(self, audio: Tensor, lengths: list[int]) -> Encoded:
        """[batch, samples] of 16 kHz audio, zero after each row's length -> encoder output."""

    def encode_in_pieces(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, Encoded]:
        """As `encode`, yielding between layers, so that the caller may interleave other work."""

    def prompt_tokens(self, language: str, task: str, before: Sequence[int]) -> list[int]:
        """The tokens that start a text. `language`: a code (empty: the model's first). `task`: empty to transcribe.
        `before`: tokens of a text that this one continues. If all three are empty: `start_tokens`."""

    def new_state(self, batch: int, capacity: int) -> DecoderState: ...

    def decode(self, tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """tokens, positions: [batch, count] -> hidden [batch, count, width], attention [batch, count, frames].

        The whole capacity of the state is read and masked, so it should not be longer than the text. A row may be
        padded by repeating positions after its end: what is written there is overwritten before it is visible.
        Attention is averaged over the alignment heads, whose attention follows the audio, and sums to one over frames.
        """

    def logits(self, hidden: Tensor) -> Tensor: ...


class WithoutInitialValues(TorchFunctionMode):
    """A context in which layers are built without drawing random weights, which takes time. For models whose weights
    are loaded afterwards."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return None if func in _INITIALISERS else func(*args, **(kwargs or {}))


_INITIALISERS = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}


def copy_weights(model: nn.Module) -> None:
    """Copy the weights into the memory of the process. Loaded weights are a memory-mapped file: if another program
    truncated the file, the system would kill this process."""
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


def cross_keys_values(keys_values: Tensor, layers: int, heads: int) -> tuple[Tensor, Tensor]:
    """[batch, frames, 2 * layers * width] -> keys [layers, batch, heads, dim, frames], values [.., frames, dim]"""
    batch, frames, width = keys_values.shape
    parts = keys_values.view(batch, frames, 2, layers, heads, width // (2 * layers * heads))
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
    """A convolution over [batch, frames, channels] as one matrix product. It is faster here, and it can be 8-bit. On a
    GPU, cuDNN would choose an algorithm anew for each length."""

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


# 8-bit linear layers on a CPU.
#
# oneDNN, the kernel library on ARM, prepares each matrix for every number of input rows. The preparation reorders all
# weights, which takes as long as the product itself or, for few rows, much longer. Only two preparations are kept per
# matrix, and live text has another length in every pass, so nearly every product would need a new one. So a product is
# computed in pieces of two fixed sizes (`product_in_pieces`).

# Rows of the large pieces. A block of the streaming encoder and its look-ahead have 39 frames, and every piece has at
# least one filler row. Small pieces have 8 rows, the number that the kernels process at a time; the script below needs
# it as a literal.
PIECE_ROWS = 40
# Fewest weights of a matrix for which 8 bits are worthwhile; scaling its rows costs as much as a small product.
SMALLEST_8_BIT = 200_000
# Quantisation steps from zero to the largest weight: all of a signed byte, or half of them where the processor adds two
# products in 16 bits and saturates.
_FULL_STEPS, SAFE_STEPS = 127, 63


def _product_in_pieces(
    scaled: Tensor,
    filler: Tensor,
    weights: torch.classes.quantized.LinearPackedParamsBase,  # type: ignore[name-defined]
) -> Tensor:
    """[rows, inputs] with values between -1 and 1 -> [rows, outputs].

    `filler` [PIECE_ROWS, inputs] has rows that contain -1 and 1, so that the scale is the same for every piece.
    """
    rows, largest = scaled.size(0), filler.size(0)
    # For many rows the preparation costs little in comparison.
    if rows > 4 * largest:
        product: Tensor = torch.ops.quantized.linear_dynamic(torch.cat((scaled, filler[:1])), weights)
        return product[:rows]
    parts: list[Tensor] = []
    done = 0
    while done < rows or done == 0:
        # Two small pieces (8 rows each, one of them a filler row) are cheaper than a large one.
        size = 8 if rows - done <= 2 * (8 - 1) else largest
        part = scaled[done : done + size - 1]
        piece = torch.cat((part, filler[: size - part.size(0)]))
        parts.append(torch.ops.quantized.linear_dynamic(piece, weights)[: part.size(0)])
        done += size - 1
    return parts[0] if len(parts) == 1 else torch.cat(parts)


with warnings.catch_warnings():
    # Traces call this function. A trace cannot contain a loop, so the function is a script. The replacement for scripts
    # that torch recommends needs a C++ compiler.
    warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
    product_in_pieces = torch.jit.script(_product_in_pieces)


class InferenceThread(threading.local):
    """The number of the current thread among those that run a model in parallel; each number has its own weights."""

    number = 0


inference_thread = InferenceThread()


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and 8-bit activations.

    The fast kernels take one scale per matrix. So each row of weights and each row of input is divided by its largest
    magnitude, and the product is multiplied by both, which is as exact as a scale per row. A filler row with the values
    -1 and 1 is added to the input, so that the kernel always chooses the same scale. Sums of integers are exact, so the
    result of a row does not depend on the other rows, bit for bit. Weights have `weight_steps` quantisation steps.

    Kernels keep scratch data with the weights, and two threads that share it crash. So each inference thread has its
    own copy of the weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        # Largest magnitude of each row of weights.
        self.range = weight.abs().amax(dim=1).clamp(min=1e-12)
        self.bias = None if bias is None else bias.detach().float().clone()
        quantised = torch.quantize_per_tensor(weight / self.range[:, None], 1.0 / weight_steps(), 0, torch.qint8)
        # By the number of the inference thread.
        self._weights: dict[int, torch.ScriptObject] = {0: torch.ops.quantized.linear_prepack(quantised, None)}
        self._in_pieces = torch.backends.quantized.engine == "onednn"
        self._filler = torch.zeros(PIECE_ROWS if self._in_pieces else 1, weight.shape[1])
        self._filler[:, :2] = torch.tensor([-1.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
        product = self._product(rows / largest)
        scale = largest * self.range
        product = product.mul_(scale) if self.bias is None else torch.addcmul(self.bias, product, scale)
        return product.view(*x.shape[:-1], product.shape[1])

    def _product(self, scaled: Tensor) -> Tensor:
        product: Tensor
        if self._in_pieces:
            product = product_in_pieces(scaled, self._filler, self._thread_weights())
        else:
            with_filler = torch.cat((scaled, self._filler))
            product = torch.ops.quantized.linear_dynamic(with_filler, self._thread_weights())[:-1]
        return product

    def prepare_kernels(self) -> None:
        """Let the kernels prepare this thread's weights, which takes as much memory as the weights."""
        for rows in {1, self._filler.shape[0]}:
            self(torch.zeros(rows, self._filler.shape[1]))

    def copy_for_thread(self, number: int) -> None:
        """Allow the inference thread with this number to compute at the same time as others."""
        if number not in self._weights:
            quantised, _ = torch.ops.quantized.linear_unpack(self._thread_weights())
            self._weights[number] = torch.ops.quantized.linear_prepack(quantised, None)

    def weights_of(self, number: int) -> torch.ScriptObject:
        """The weights of the inference thread with this number."""
        return self._weights[number]

    def _thread_weights(self) -> torch.ScriptObject:
        return self._weights[inference_thread.number]


@cache
def weight_steps() -> int:
    """Quantisation steps from zero to the largest weight that are safe on this processor.

    Processors without 8-bit dot-product instructions add two products in 16 bits, which silently saturates for large
    weights. Half the range is safe. A product is computed to find out which processor this is.
    """
    largest = torch.quantize_per_tensor(torch.ones(1, 64), 1.0 / _FULL_STEPS, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(largest, None)
    # The -1 sets the lower end of the range, so that the ones become the largest bytes.
    product = torch.ops.quantized.linear_dynamic(torch.tensor([[-1.0] + 63 * [1.0]]), packed)
    return _FULL_STEPS if abs(float(product) - 62.0) < 1.0 else SAFE_STEPS


def in_8_bits(weight: Tensor, bias: Tensor | None = None) -> Int8Linear | None:
    """An 8-bit linear layer; None if the matrix is too small for it. Chooses torch's kernel library for the process."""
    if weight.numel() < SMALLEST_8_BIT:
        return None
    supported = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "x86" if "x86" in supported else "onednn"
    return Int8Linear(weight, bias)


def quantise_linears(module: nn.Module) -> None:
    """Replace every large linear layer in `module` by its 8-bit form."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            int8 = in_8_bits(child.weight, child.bias) if isinstance(child, nn.Linear) else None
            if int8 is not None:
                setattr(parent, name, int8)


def copy_for_thread(model: nn.Module, number: int) -> None:
    """Allow the inference thread with this number to use a model at the same time as others."""
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.copy_for_thread(number)


def prepare_kernels(model: object) -> None:
    """Prepare all 8-bit layers of a model for this thread, before its first window."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, Int8Linear):
            module.prepare_kernels()
