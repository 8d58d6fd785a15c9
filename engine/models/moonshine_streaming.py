"""Moonshine's streaming encoder: encodes a live stream in blocks of frames, with bounded context on both sides.

`BlockEncoder` in `engine/runner/windowed/encoders.py` runs it in place of the published encoder (`moonshine.py`), whose
layers it uses; the decoder is the published one. The weights are Moonshine's, fine-tuned for this (`docs/training.md`).

A block of frames attends to at most `left` frames before it and `look_ahead` frames after it. The look-ahead frames go
through all layers together with the block, so the look-ahead does not add up over the layers. Their provisional output
can be used until they are computed again with their own block. The published norm over the whole utterance becomes a
running norm. Weights are shared, and the state of a stream is passed in: `step(audio, state)` updates the state in
place and returns it. Audio is processed in portions that depend only on the position in the stream, so the results do
not depend on how the input is split, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from engine.errors import EngineError
from engine.models.moonshine import MIN_SAMPLES, SAMPLES_PER_FRAME, EncoderLayer, MoonshineEncoder, frames_after
from engine.models.seq2seq import join_heads

# Frames of the first convolution per encoder frame.
_CONV1_PER_FRAME = 6


class UntrainedBlock(EngineError):
    """The encoder was asked to use a block size that it was not trained for."""


@dataclass(frozen=True, slots=True)
class NormPrior:
    """Prior of the running norm: the expected statistics of the first convolution's output.

    The fields are stored in the encoder's file.
    """

    mean: float
    log_variance: float
    # Weight of the prior: it counts as much as this many frames of the first convolution.
    frames: float


@dataclass(frozen=True, slots=True)
class StreamingSpec:
    """The block sizes, context and norm that an encoder was trained with and must be run with, in frames of 24 ms.

    The fields are stored in the encoder's file.
    """

    # Sizes of a block; each engine uses one of them.
    blocks: tuple[int, ...]
    # Frames after a block that it attends to.
    look_ahead: int
    # Most frames before a block that it attends to (left context).
    left: int
    norm: NormPrior


@dataclass(slots=True)
class NormSums:
    """Sums over the frames of the first convolution so far: of their means and of their mean squares."""

    frames: int = 0
    mean: float = 0.0
    square: float = 0.0


@dataclass(slots=True)
class EncoderState:
    """The state of one stream between two steps, which update it in place."""

    # [samples] that the next frame of the convolutions depends on, and all after them.
    audio: Tensor
    sums: NormSums
    # [1, frames, width]: output of the convolutions for frames whose block is not complete.
    waiting: Tensor
    # Number of frames returned so far.
    position: int
    # [frames, width]: provisional output for the look-ahead frames after those, computed with the last block.
    ahead: Tensor
    # [layers, 2, 1, heads, slots, dim]. The first slots are those of a block and its look-ahead, right-aligned. After
    # them comes a ring of the `left` frames before the block. The slots in use are always contiguous.
    keys_values: Tensor


class StreamingEncoder:
    """Runs the layers of `encoder`, 8-bit or not, for one stream at a time, in blocks of `block` frames."""

    def __init__(self, encoder: MoonshineEncoder, spec: StreamingSpec, block: int) -> None:
        if block not in spec.blocks:
            trained = " and ".join(map(str, spec.blocks))
            raise UntrainedBlock(f"this encoder was trained for blocks of {trained} frames, not of {block}")
        self.spec = spec
        self.block = block
        self._encoder = encoder
        self._layers = [cast(EncoderLayer, layer) for layer in encoder.layers]
        self._heads = self._layers[0].self_attn.heads
        self._width = encoder.layer_norm.weight.shape[0]
        # Frames that pass through the layers together.
        self._span = block + spec.look_ahead

    @property
    def delay_samples(self) -> int:
        """Samples of audio needed after the end of a block's last frame before the block can be computed."""
        return self.spec.look_ahead * SAMPLES_PER_FRAME + MIN_SAMPLES - SAMPLES_PER_FRAME

    def samples_to_next(self, state: EncoderState) -> int:
        """Samples since the start of the stream at which the next block is complete."""
        return _samples_for(state.position + self._span)

    def start(self) -> EncoderState:
        layers, dim = len(self._layers), self._width // self._heads
        like = self._encoder.layer_norm.weight
        return EncoderState(
            audio=like.new_zeros(0),
            sums=NormSums(),
            waiting=like.new_zeros(1, 0, self._width),
            position=0,
            ahead=like.new_zeros(0, self._width),
            keys_values=like.new_zeros(layers, 2, 1, self._heads, self._span + self.spec.left, dim),
        )

    @torch.inference_mode()
    def step(self, audio: Tensor, state: EncoderState) -> tuple[Tensor, EncoderState]:
        """[samples] of 16 kHz audio -> [frames, width] of the blocks that are now complete, often none; and `state`."""
        self._append_audio(audio, state)
        blocks = []
        while True:
            missing = self._span - state.waiting.shape[1]
            if len(state.audio) < _samples_for(missing):
                break
            self._run_convolutions(missing, state)
            blocks.append(self._next_block(state))
        return self._joined(blocks), state

    @torch.inference_mode()
    def finish(self, state: EncoderState) -> Tensor:
        """The remaining frames at the end of the stream, [frames, width]; the last blocks have less look-ahead."""
        remaining = frames_after(len(state.audio), 3) if len(state.audio) >= MIN_SAMPLES else 0
        if remaining:
            self._run_convolutions(remaining, state)
        blocks = []
        while state.waiting.shape[1]:
            blocks.append(self._next_block(state))
        return self._joined(blocks)

    def _joined(self, blocks: list[Tensor]) -> Tensor:
        return torch.cat(blocks) if blocks else self._encoder.layer_norm.weight.new_zeros(0, self._width)

    @staticmethod
    def _append_audio(audio: Tensor, state: EncoderState) -> None:
        # The norm's sums accumulate: one NaN would make all later frames NaN.
        if not bool(torch.isfinite(audio).all()):
            raise ValueError("the audio contains NaN or infinite values")
        state.audio = torch.cat((state.audio, audio))

    def _run_convolutions(self, frames: int, state: EncoderState) -> None:
        """Append `frames` more frames of the convolutions to `state.waiting`."""
        encoder = self._encoder
        samples = state.audio[None, : _samples_for(frames), None]
        state.audio = state.audio[frames * SAMPLES_PER_FRAME :]
        x = torch.tanh(encoder.conv1(samples))  # [1, conv-1 frames, width]
        x, means, squares = running_norm(x, state.sums, self.spec.norm)
        # Frames of the first convolution after these overlap the next encoder frames: they are computed again with
        # those and are added to the sums then.
        counted = frames * _CONV1_PER_FRAME
        state.sums = NormSums(state.sums.frames + counted, float(means[0, counted - 1]), float(squares[0, counted - 1]))
        x = x * encoder.groupnorm.weight + encoder.groupnorm.bias
        x = gelu(encoder.conv3(gelu(encoder.conv2(x))))  # [1, frames, width]
        state.waiting = torch.cat((state.waiting, x), dim=1)

    def _next_block(self, state: EncoderState) -> Tensor:
        """Encode the next block together with its look-ahead -> [frames, width]"""
        encoder, span = self._encoder, self._span
        x = state.waiting[:, :span]  # [1, count, width]
        count = x.shape[1]
        final = min(self.block, count)
        state.waiting = state.waiting[:, final:]
        in_use = slice(span - count, span + min(self.spec.left, state.position))
        angles = encoder.rotary.angles(torch.arange(state.position, state.position + count, device=x.device)[None])
        for layer, (keys, values) in zip(self._layers, state.keys_values, strict=True):
            query, key, value = layer.self_attn.project(layer.input_layernorm(x), encoder.rotary, angles)
            keys[:, :, span - count : span] = key  # [1, heads, count, dim]
            values[:, :, span - count : span] = value
            # Keys include their positions, so their order in the ring does not matter.
            mixed = scaled_dot_product_attention(query, keys[:, :, in_use], values[:, :, in_use])
            x = x + layer.self_attn.o_proj(join_heads(mixed))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self._move_to_ring(span - count, final, state)
        encoded: Tensor = encoder.layer_norm(x[0])
        state.ahead = encoded[final:]
        return encoded[:final]

    def _move_to_ring(self, first: int, final: int, state: EncoderState) -> None:
        """Move keys and values of the block's `final` frames, from slot `first` on, into the ring. The look-ahead stays
        out: it will be computed again."""
        slots, left = state.keys_values, self.spec.left
        ring_index = state.position % left
        before_wrap = min(final, left - ring_index)
        for source, target, count in ((0, ring_index, before_wrap), (before_wrap, 0, final - before_wrap)):
            source, target = first + source, self._span + target
            slots[..., target : target + count, :] = slots[..., source : source + count, :]
        state.position += final


def running_norm(x: Tensor, before: NormSums, prior: NormPrior) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise [batch, conv-1 frames, width] by the running statistics up to each frame, starting from `before`.

    Also returns the running sums of means and of mean squares, [batch, conv-1 frames] each.
    """
    means = x.mean(dim=2).double().cumsum(dim=1) + before.mean
    squares = x.square().mean(dim=2).double().cumsum(dim=1) + before.square
    count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=torch.float64) + before.frames
    mean = means / count
    variance = (squares / count - mean.square()).clamp(min=1e-8)
    weight = count / (count + prior.frames)
    mean = weight * mean + (1 - weight) * prior.mean
    variance = torch.exp(weight * variance.log() + (1 - weight) * prior.log_variance)
    normal = (x - mean[..., None].float()) * torch.rsqrt(variance + 1e-5)[..., None].float()
    return normal, means, squares


def _samples_for(frames: int) -> int:
    """The number of samples that `frames` encoder frames depend on."""
    return (frames - 1) * SAMPLES_PER_FRAME + MIN_SAMPLES
