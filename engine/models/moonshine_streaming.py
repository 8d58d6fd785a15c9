"""Moonshine's streaming encoder: works in blocks and encodes every frame once, with bounded context on both sides.

`engine/runner/windowed/encoders.py` runs it in place of the encoder in `moonshine.py`; the decoder stays. The weights
are Moonshine's, trained further for this (`docs/training.md`). A block of frames sees up to `left` frames before it and
`look_ahead` frames after it. The look-ahead frames are computed with the block in every layer and again with their own
block, so the context of a frame does not grow with the layers; until then the first result for them can be used. The
norm over the whole utterance becomes a running norm.

Weights are shared, state is passed: `step(audio, state) -> (frames, state)`. Audio is processed in portions that depend
only on the position in the stream, so the results do not depend on how the input is split, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from engine.errors import EngineError
from engine.models.moonshine import EncoderLayer, MoonshineEncoder, frames_after
from engine.models.seq2seq import join_heads

SAMPLES_PER_FRAME = 384
# Frames of the first convolution per encoder frame; a frame depends on 895 samples and starts 384 after the one before.
_CONV1_PER_FRAME = 6
_FRAME_REACH = 64 * (3 * (3 - 1) + 7 - 1) + 127


class UntrainedBlock(EngineError):
    """The encoder was asked to use a block size that it was not trained for."""


@dataclass(frozen=True, slots=True)
class RunningNorm:
    """Prior of the running norm: an expected level that has the weight of `frames` frames."""

    mean: float
    log_variance: float
    frames: float


@dataclass(frozen=True, slots=True)
class StreamingSpec:
    """What an encoder was trained for, and must be run with. Lengths are in frames of 24 ms."""

    blocks: tuple[int, ...]
    look_ahead: int
    left: int
    norm: RunningNorm


@dataclass(slots=True)
class NormSums:
    """Sums over the frames of the first convolution so far: of each frame's mean and mean square."""

    frames: int = 0
    mean: float = 0.0
    square: float = 0.0


@dataclass(slots=True)
class EncoderState:
    """The state of one stream between two steps. A step consumes the state it is given and returns the next one.

    audio: [samples] not yet turned into frames, including those of the last frames that the next ones overlap;
    waiting: [1, frames, width] of the convolutions whose block is not complete; position: number of frames returned;
    ahead: [frames, width] look-ahead frames after those, as computed with the last block;
    keys_values: [layers, 2, 1, heads, slots, dim]. The first slots belong to a block and its look-ahead, aligned at
    their end; after them comes a ring of the `left` frames before the block. The slots in use are always contiguous.
    """

    audio: Tensor
    sums: NormSums
    waiting: Tensor
    position: int
    ahead: Tensor
    keys_values: Tensor


class StreamingEncoder:
    """Runs the layers of `encoder`, 8-bit or not, for one stream at a time."""

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
        return self.spec.look_ahead * SAMPLES_PER_FRAME + _FRAME_REACH - SAMPLES_PER_FRAME

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
        """[samples] of 16 kHz audio -> [frames, width] of the blocks that are now complete, often none."""
        self._take(audio, state)
        blocks = []
        while True:
            missing = self._span - state.waiting.shape[1]
            if len(state.audio) < _samples_for(missing):
                break
            self._hear(missing, state)
            blocks.append(self._next_block(state))
        return self._joined(blocks), state

    @torch.inference_mode()
    def finish(self, state: EncoderState) -> Tensor:
        """The remaining frames at the end of the stream, [frames, width], with the look-ahead that is there."""
        rest = frames_after(len(state.audio), 3) if len(state.audio) >= _FRAME_REACH else 0
        if rest:
            self._hear(rest, state)
        blocks = []
        while state.waiting.shape[1]:
            blocks.append(self._next_block(state))
        return self._joined(blocks)

    def _joined(self, blocks: list[Tensor]) -> Tensor:
        return torch.cat(blocks) if blocks else self._encoder.layer_norm.weight.new_zeros(0, self._width)

    @staticmethod
    def _take(audio: Tensor, state: EncoderState) -> None:
        # The norm accumulates: one NaN would spoil the rest of the stream.
        if not bool(torch.isfinite(audio).all()):
            raise ValueError("audio with values that are not numbers")
        state.audio = torch.cat((state.audio, audio))

    def _hear(self, frames: int, state: EncoderState) -> None:
        """Run the convolutions: `frames` more frames after those that wait."""
        encoder = self._encoder
        heard = state.audio[None, : _samples_for(frames), None]
        state.audio = state.audio[frames * SAMPLES_PER_FRAME :]
        x = torch.tanh(encoder.conv1(heard))  # [1, conv-1 frames, width]
        x, means, squares = running_norm(x, state.sums, self.spec.norm)
        # The overlap with the next frames is processed again with them and counts only then.
        own = frames * _CONV1_PER_FRAME
        state.sums = NormSums(state.sums.frames + own, float(means[0, own - 1]), float(squares[0, own - 1]))
        x = x * encoder.groupnorm.weight + encoder.groupnorm.bias
        x = gelu(encoder.conv3(gelu(encoder.conv2(x))))  # [1, frames, width]
        state.waiting = torch.cat((state.waiting, x), dim=1)

    def _next_block(self, state: EncoderState) -> Tensor:
        """Encode the next block together with its look-ahead -> [frames, width]"""
        encoder, span = self._encoder, self._span
        x = state.waiting[:, :span]  # [1, count, width]
        count = x.shape[1]
        settled = min(self.block, count)
        state.waiting = state.waiting[:, settled:]
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
        self._keep(span - count, settled, state)
        heard: Tensor = encoder.layer_norm(x[0])
        state.ahead = heard[settled:]
        return heard[:settled]

    def _keep(self, first: int, settled: int, state: EncoderState) -> None:
        """Move the block's keys and values into the ring; those of the look-ahead will be computed again."""
        slots, left = state.keys_values, self.spec.left
        at = state.position % left
        before_wrap = min(settled, left - at)
        for source, target, count in ((0, at, before_wrap), (before_wrap, 0, settled - before_wrap)):
            source, target = first + source, self._span + target
            slots[..., target : target + count, :] = slots[..., source : source + count, :]
        state.position += settled


def running_norm(x: Tensor, before: NormSums, norm: RunningNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise [batch, conv-1 frames, width] by the running statistics up to each frame, starting from `before`.

    Also returns the running sums of means and of mean squares, [batch, conv-1 frames] each.
    """
    means = x.mean(dim=2).double().cumsum(dim=1) + before.mean
    squares = x.square().mean(dim=2).double().cumsum(dim=1) + before.square
    count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=torch.float64) + before.frames
    mean = means / count
    variance = (squares / count - mean.square()).clamp(min=1e-8)
    share = count / (count + norm.frames)
    mean = share * mean + (1 - share) * norm.mean
    variance = torch.exp(share * variance.log() + (1 - share) * norm.log_variance)
    normal = (x - mean[..., None].float()) * torch.rsqrt(variance + 1e-5)[..., None].float()
    return normal, means, squares


def _samples_for(frames: int) -> int:
    return (frames - 1) * SAMPLES_PER_FRAME + _FRAME_REACH
