"""Moonshine, a windowed model: an encoder over raw audio, the same encoder for streams, and a small decoder.

`Moonshine` implements `SpeechModel` of `seq2seq.py`; both parts use rotary positions. Its encoder takes a whole window
without padding it to 30 seconds. Layout and names follow the published checkpoints, with two exceptions: the three
projections of self-attention are one matrix, and the cross-attention keys and values of all layers are computed
together when a window is encoded.

`StreamingEncoder` works in blocks and encodes every frame once, with bounded context on both sides.
`engine/runner/windowed/encoders.py` runs it in place of the published encoder; the decoder stays. The weights are
Moonshine's, fine-tuned for this (`docs/training.md`). A block of frames sees up to `left` frames before it and
`look_ahead` frames after it. The look-ahead frames are computed with the block in every layer and again with their own
block, so the look-ahead does not grow with the layers; until their own block is computed, the first result can be used.
The norm over the whole utterance becomes a running norm. Weights are shared, state is passed: `step(audio, state) ->
(frames, state)`. Audio is processed in portions that depend only on the position in the stream, so the results do not
depend on how the input is split, bit for bit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from engine.errors import EngineError
from engine.models.seq2seq import (
    DecoderPass,
    DecoderShape,
    DecoderState,
    Encoded,
    FrameConv,
    Judging,
    WithoutInitialValues,
    at_once,
    counts_on,
    cross_keys_values,
    in_8_bits,
    join_heads,
    quantise_linears,
    split_heads,
)
from engine.options import Options

# Kernel and stride of the three convolutions that turn samples into frames.
_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))

# Width of a published size -> [layer, head] pairs whose attention peaks were measured to follow the audio.
_ALIGNMENT_HEADS = {
    288: [(3, 0), (3, 2), (3, 5), (4, 2), (4, 3), (4, 7)],
    416: [(4, 2), (4, 6), (5, 3), (5, 5), (5, 6), (6, 1)],
}


@dataclass(frozen=True, slots=True)
class MoonshineConfig:
    """Dimensions and special tokens of a checkpoint."""

    width: int
    inner: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    rotary_dim: int
    rope_theta: float
    vocabulary: int
    start_token: int
    end_token: int

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> MoonshineConfig:
        """From a checkpoint's config.json, as transformers writes it."""
        heads = config["decoder_num_attention_heads"]
        if config["encoder_num_attention_heads"] != heads:
            raise ValueError("a Moonshine checkpoint with different head counts in encoder and decoder")
        if config.get("decoder_num_key_value_heads") not in (None, heads):
            raise ValueError("Moonshine checkpoints with grouped key heads are not supported")
        rope = config.get("rope_parameters") or config
        width = config["hidden_size"]
        return cls(
            width=width,
            inner=config["intermediate_size"],
            encoder_layers=config["encoder_num_hidden_layers"],
            decoder_layers=config["decoder_num_hidden_layers"],
            heads=heads,
            rotary_dim=int(width // heads * rope.get("partial_rotary_factor", 0.9)),
            rope_theta=rope.get("rope_theta", 10000.0),
            vocabulary=config["vocab_size"],
            start_token=config.get("decoder_start_token_id", 1),
            end_token=config.get("eos_token_id", 2),
        )


class Rotary:
    """Rotary positions: rotates pairs of neighbouring dimensions by an angle that grows with the position."""

    def __init__(self, config: MoonshineConfig) -> None:
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        turning = 1.0 / config.rope_theta**exponent
        # The last pairs of a head are not rotated.
        self._frequencies = torch.zeros(config.width // config.heads // 2)
        self._frequencies[: len(turning)] = turning

    def move(self, device: torch.device) -> None:
        self._frequencies = self._frequencies.to(device)

    def angles(self, positions: Tensor) -> Tensor:
        """[batch, count] -> complex [batch, 1, count, dim / 2]"""
        # In double precision: after an hour float32 would round the angles.
        angle = positions[:, None, :, None].double() * self._frequencies.to(positions.device)
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate [..., heads, count, dim] as complex numbers of neighbouring dimensions."""
        pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


class _SelfAttention(nn.Module):
    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv_proj = nn.Linear(config.width, 3 * config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def project(self, x: Tensor, rotary: Rotary, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, count, width] -> query, key and value, [batch, heads, count, dim] each"""
        batch, count, width = x.shape
        parts = self.qkv_proj(x).view(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key = rotary.turn(parts[:2], angles)
        return query, key, parts[2]


class _EncoderMlp(nn.Module):
    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.inner)
        self.fc2 = nn.Linear(config.inner, config.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(gelu(self.fc1(x)))
        return result


class EncoderLayer(nn.Module):
    """Self-attention over all frames, then a gelu MLP."""

    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.width, bias=False)
        self.self_attn = _SelfAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.width, bias=False)
        self.mlp = _EncoderMlp(config)

    def forward(self, x: Tensor, rotary: Rotary, angles: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.self_attn.project(self.input_layernorm(x), rotary, angles)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.self_attn.o_proj(join_heads(mixed))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class MoonshineEncoder(nn.Module):
    """Three convolutions over raw audio, then layers of self-attention."""

    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        width = config.width
        (k1, s1), (k2, s2), (k3, s3) = _CONVOLUTIONS
        self.conv1 = FrameConv(1, width, k1, s1, bias=False)
        self.groupnorm = nn.GroupNorm(1, width, eps=1e-5)
        self.conv2 = FrameConv(width, 2 * width, k2, s2)
        self.conv3 = FrameConv(2 * width, width, k3, s3)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(width, bias=False)
        self.rotary = Rotary(config)

    def forward(self, audio: Tensor, lengths: list[int]) -> tuple[Tensor, list[int]]:
        return at_once(self.layer_by_layer(audio, lengths))

    def layer_by_layer(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, tuple[Tensor, list[int]]]:
        """[batch, samples] -> [batch, frames, width] and real frames per row. Yields before each layer."""
        x = torch.tanh(self.conv1(audio[:, :, None]))
        x = self._normalise(x, [frames_after(length, 1) for length in lengths]).to(self.layer_norm.weight.dtype)
        x = gelu(self.conv3(gelu(self.conv2(x))))  # [batch, frames, width]
        frames = [frames_after(length, 3) for length in lengths]
        mask = None
        if min(frames) < x.shape[1]:
            mask = torch.arange(x.shape[1], device=x.device) < counts_on(x.device, frames)[:, None]
            mask = mask[:, None, None, :]
        angles = self.rotary.angles(torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            yield
            x = layer(x, self.rotary, angles, mask)
        return self.layer_norm(x), frames

    def _normalise(self, x: Tensor, frames: list[int]) -> Tensor:
        """The group norm over each row, without its padding."""
        if min(frames) == x.shape[1]:
            alone = layer_norm(x, x.shape[1:], eps=self.groupnorm.eps)
        else:
            ends = counts_on(x.device, frames)[:, None, None]
            real = torch.arange(x.shape[1], device=x.device)[:, None] < ends  # [batch, frames, 1]
            count = ends * x.shape[2]
            mean = (x * real).sum(dim=(1, 2), keepdim=True) / count
            centred = (x - mean) * real
            variance = centred.square().sum(dim=(1, 2), keepdim=True) / count
            alone = centred * torch.rsqrt(variance + self.groupnorm.eps)
        return alone * self.groupnorm.weight + self.groupnorm.bias


def frames_after(samples: int, convolutions: int) -> int:
    """The number of frames that the first convolutions make of this many samples."""
    for kernel, stride in _CONVOLUTIONS[:convolutions]:
        samples = (samples - kernel) // stride + 1
    return samples


class _CrossAttention(nn.Module):
    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)


class _DecoderMlp(nn.Module):
    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 2 * config.inner)
        self.fc2 = nn.Linear(config.inner, config.width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.fc1(x).chunk(2, dim=-1)
        result: Tensor = self.fc2(silu(gate) * value)
        return result


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the audio, then a gated MLP."""

    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.width, bias=False)
        self.self_attn = _SelfAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.width, bias=False)
        self.encoder_attn = _CrossAttention(config)
        self.final_layernorm = nn.LayerNorm(config.width, bias=False)
        self.mlp = _DecoderMlp(config)
        self._scale = (config.width // config.heads) ** -0.5

    def forward(self, x: Tensor, layer: int, run: DecoderPass, rotary: Rotary, angles: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.self_attn.project(self.input_layernorm(x), rotary, angles)
        x = x + self.self_attn.o_proj(run.self_attention(layer, query * self._scale, key, value))
        query = split_heads(self.encoder_attn.q_proj(self.post_attention_layernorm(x)), self.self_attn.heads)
        mixed, weights = run.cross_attention(layer, query * self._scale)
        x = x + self.encoder_attn.o_proj(mixed)
        return x + self.mlp(self.final_layernorm(x)), weights


class MoonshineDecoder(nn.Module):
    """Token embeddings and layers; `Moonshine.decode` runs them."""

    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        # The embedding as an 8-bit output layer; None before `quantise_decoder`.
        self.head: nn.Module | None
        # Registered now, because another thread may read this module's names while the decoder is quantised.
        self.register_module("head", None)


class Moonshine(nn.Module):
    """See `seq2seq.SpeechModel`."""

    samples_per_frame = 384
    # Samples for one frame of the last convolution.
    min_samples = 64 * (3 * (3 - 1) + 7 - 1) + 127
    suppressed: list[int] = []
    options = Options(languages=("en",))
    judging: Judging | None = None

    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = MoonshineEncoder(config)
        # Keys, then values, of the cross-attention of every decoder layer.
        self.cross_kv = nn.Linear(config.width, 2 * config.decoder_layers * config.width, bias=False)
        self.decoder = MoonshineDecoder(config)
        self._rotary = Rotary(config)
        self.max_tokens = 194
        self.start_tokens = [config.start_token]
        self.end_token = config.end_token
        # [decoder layer, head] pairs whose attention follows the audio; all heads for sizes that were not measured.
        self.alignment_heads = _ALIGNMENT_HEADS.get(config.width) or [
            (layer, head) for layer in range(config.decoder_layers) for head in range(config.heads)
        ]

    def set_live_padding(self, full_padding: bool, to_end: bool = False) -> None:
        """Nothing to change: the model was trained for short windows."""

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.to(device, dtype)
        # In float32: audio may be very quiet, and its norm is a sum over a whole window.
        self.encoder.conv1.float()
        self.encoder.groupnorm.float()
        self.encoder.rotary.move(device)
        self._rotary.move(device)

    def frames_of(self, samples: int) -> int:
        return frames_after(max(samples, self.min_samples), 3)

    @property
    def widest_frame(self) -> int:
        config = self.config
        # The first convolution has six frames per encoder frame, in float32: as many bytes as twelve.
        stem, block = 2 * 12 * config.width, 6 * config.width + 2 * config.inner
        return max(stem, block) + 4 * config.decoder_layers * config.width

    def encode(self, audio: Tensor, lengths: list[int]) -> Encoded:
        return at_once(self.encode_slowly(audio, lengths))

    def encode_slowly(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, Encoded]:
        hidden, frames = yield from self.encoder.layer_by_layer(audio, lengths)
        return self.cross(hidden, frames)

    def cross(self, hidden: Tensor, frames: list[int]) -> Encoded:
        """[batch, frames, width] from the encoder and the number of real frames per row -> the decoder's input."""
        keys, values = cross_keys_values(self.cross_kv(hidden), self.config.decoder_layers, self.config.heads)
        return Encoded(keys, values, frames)

    @property
    def decoder_shape(self) -> DecoderShape:
        config = self.config
        return DecoderShape(config.decoder_layers, config.heads, config.width // config.heads)

    def prompt_tokens(self, language: str, task: str, before: Sequence[int]) -> list[int]:
        return self.start_tokens

    def new_state(self, batch: int, capacity: int) -> DecoderState:
        return DecoderState.empty(self.decoder_shape, batch, capacity, self.decoder.embed_tokens.weight)

    def decode(self, tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        x = self.decoder.embed_tokens(tokens)
        angles = self._rotary.angles(positions)
        run = DecoderPass.start(positions, state, encoded)
        followed = []
        for index, layer in enumerate(self.decoder.layers):
            x, weights = layer(x, index, run, self._rotary, angles)
            followed += [weights[:, head] for at, head in self.alignment_heads if at == index]
        return self.decoder.norm(x), torch.stack(followed).mean(dim=0)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.decoder.head is None:
            return hidden @ self.decoder.embed_tokens.weight.T
        result: Tensor = self.decoder.head(hidden)
        return result

    def quantise(self) -> None:
        """Use 8-bit weights for large matrices: the encoder multiplies many rows at once, and the decoder reads all of
        its weights for each token."""
        self.quantise_encoder()
        self.quantise_decoder()

    def quantise_encoder(self) -> None:
        """Use 8-bit weights in the encoder and for cross-attention alone."""
        quantise_linears(self.encoder.layers)
        quantise_linears(self.encoder.conv2)
        holder = nn.ModuleDict({"cross_kv": self.cross_kv})
        quantise_linears(holder)
        self.cross_kv = holder["cross_kv"]  # type: ignore[assignment]

    def quantise_decoder(self) -> None:
        """Use 8-bit weights in the decoder alone."""
        quantise_linears(self.decoder.layers)
        self.decoder.head = in_8_bits(self.decoder.embed_tokens.weight)

    def with_shared_decoder(self) -> Moonshine:
        """A model with the same decoder, also when that is quantised later, and with an encoder of its own that has the
        same weights until others are loaded."""
        shared = [self.decoder, *self.parameters()]
        return deepcopy(self, {id(part): part for part in shared})

    @classmethod
    def load(cls, config: MoonshineConfig, tensors: dict[str, Tensor]) -> Moonshine:
        """From a transformers state dict, whose tensors it shares. Raises if a tensor is missing or unused."""
        with WithoutInitialValues():
            model = cls(config)
        model.load_state_dict(_fused(tensors, config), strict=True, assign=True)
        return model.eval()


def _fused(tensors: dict[str, Tensor], config: MoonshineConfig) -> dict[str, Tensor]:
    left = {name.removeprefix("model."): value.float() for name, value in tensors.items()}
    left.pop("proj_out.weight", None)  # the same matrix as the embedding
    for name in ("conv1.weight", "conv2.weight", "conv3.weight", "conv2.bias", "conv3.bias"):
        convolution, part = name.split(".")
        value = left.pop(f"encoder.{name}")
        left[f"encoder.{convolution}.linear.{part}"] = FrameConv.matrix(value) if part == "weight" else value
    stacks = [("encoder", layer) for layer in range(config.encoder_layers)]
    stacks += [("decoder", layer) for layer in range(config.decoder_layers)]
    for side, layer in stacks:
        prefix = f"{side}.layers.{layer}.self_attn."
        parts = [left.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
        left[prefix + "qkv_proj.weight"] = torch.cat(parts)
    cross = [
        left.pop(f"decoder.layers.{layer}.encoder_attn.{part}_proj.weight")
        for part in "kv"
        for layer in range(config.decoder_layers)
    ]
    left["cross_kv.weight"] = torch.cat(cross)
    return left


# The streaming encoder, in place of `MoonshineEncoder`.

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
    """The block sizes, context and norm that an encoder was trained with and must be run with, in frames of 24 ms."""

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
            raise ValueError("the audio contains NaN or infinite values")
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
