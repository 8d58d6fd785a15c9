"""Moonshine, a windowed model: an encoder over raw audio and a small decoder, as published.

`Moonshine` implements `SpeechModel` of `seq2seq.py`. Encoder and decoder use rotary positions. The encoder takes a
whole window without padding it to 30 seconds. Layout and names follow the published checkpoints, with three exceptions:
the three projections of self-attention are one matrix, the cross-attention keys and values of all layers are computed
together when a window is encoded, and the convolutions are matrix products (`FrameConv`).
`moonshine_streaming.py` has the variant of the encoder for live streams.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from engine.models.seq2seq import (
    DecoderPass,
    DecoderShape,
    DecoderState,
    DetectionTokens,
    Encoded,
    FrameConv,
    WithoutInitialValues,
    cross_keys_values,
    in_8_bits,
    ints_on_device,
    join_heads,
    quantise_linears,
    run_to_end,
    split_heads,
)
from engine.options import Options

# Kernel and stride of the three convolutions that turn samples into frames.
_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
# An encoder frame starts this many samples after the one before: the product of the strides.
SAMPLES_PER_FRAME = 64 * 3 * 2
# Samples that one encoder frame depends on (its receptive field), and so the shortest input.
MIN_SAMPLES = 64 * (3 * (3 - 1) + 7 - 1) + 127
# Most tokens of a text, the start token included: the default of the published checkpoints' generation settings.
_MAX_TOKENS = 194

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
            raise ValueError(
                "Moonshine checkpoints with different head counts in encoder and decoder are not supported"
            )
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
        frequencies = 1.0 / config.rope_theta**exponent
        # The last pairs of a head are not rotated.
        self._frequencies = torch.zeros(config.width // config.heads // 2)
        self._frequencies[: len(frequencies)] = frequencies

    def move(self, device: torch.device) -> None:
        self._frequencies = self._frequencies.to(device)

    def angles(self, positions: Tensor) -> Tensor:
        """[batch, count] -> complex [batch, 1, count, dim / 2]"""
        # In float64: after an hour of a stream the angles would be too coarse in float32.
        angle = positions[:, None, :, None].double() * self._frequencies.to(positions.device)
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
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
        query, key = rotary.rotate(parts[:2], angles)
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
    """Self-attention over all frames, then an MLP with GELU."""

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
        return run_to_end(self.layer_by_layer(audio, lengths))

    def layer_by_layer(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, tuple[Tensor, list[int]]]:
        """[batch, samples] -> [batch, frames, width] and real frames per row. Yields before each layer."""
        x = torch.tanh(self.conv1(audio[:, :, None]))
        x = self._normalise(x, [frames_after(length, 1) for length in lengths]).to(self.layer_norm.weight.dtype)
        x = gelu(self.conv3(gelu(self.conv2(x))))  # [batch, frames, width]
        frames = [frames_after(length, 3) for length in lengths]
        mask = None
        if min(frames) < x.shape[1]:
            mask = torch.arange(x.shape[1], device=x.device) < ints_on_device(x.device, frames)[:, None]
            mask = mask[:, None, None, :]
        angles = self.rotary.angles(torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            yield
            x = layer(x, self.rotary, angles, mask)
        return self.layer_norm(x), frames

    def _normalise(self, x: Tensor, frames: list[int]) -> Tensor:
        """The group norm of each row over its real frames; `frames`: their number per row."""
        if min(frames) == x.shape[1]:
            normalised = layer_norm(x, x.shape[1:], eps=self.groupnorm.eps)
        else:
            ends = ints_on_device(x.device, frames)[:, None, None]
            real = torch.arange(x.shape[1], device=x.device)[:, None] < ends  # [batch, frames, 1]
            count = ends * x.shape[2]
            mean = (x * real).sum(dim=(1, 2), keepdim=True) / count
            centred = (x - mean) * real
            variance = centred.square().sum(dim=(1, 2), keepdim=True) / count
            normalised = centred * torch.rsqrt(variance + self.groupnorm.eps)
        return normalised * self.groupnorm.weight + self.groupnorm.bias


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

    samples_per_frame = SAMPLES_PER_FRAME
    min_samples = MIN_SAMPLES
    suppressed: list[int] = []
    options = Options(languages=("en",))
    detection_tokens: DetectionTokens | None = None

    def __init__(self, config: MoonshineConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = MoonshineEncoder(config)
        # Keys, then values, of the cross-attention of every decoder layer.
        self.cross_kv = nn.Linear(config.width, 2 * config.decoder_layers * config.width, bias=False)
        self.decoder = MoonshineDecoder(config)
        self._rotary = Rotary(config)
        self.max_tokens = _MAX_TOKENS
        self.start_tokens = [config.start_token]
        self.end_token = config.end_token
        # [decoder layer, head] pairs whose attention follows the audio; all heads for sizes that were not measured.
        self.alignment_heads = _ALIGNMENT_HEADS.get(config.width) or [
            (layer, head) for layer in range(config.decoder_layers) for head in range(config.heads)
        ]

    def set_live_padding(self, full_padding: bool, ends_at_pause: bool = False) -> None:
        """Nothing to change: the model was trained for short windows."""

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.to(device, dtype)
        # These stay in float32: audio may be very quiet, and the norm is a sum over a whole window.
        self.encoder.conv1.float()
        self.encoder.groupnorm.float()
        self.encoder.rotary.move(device)
        self._rotary.move(device)

    def frames_of(self, samples: int) -> int:
        return frames_after(max(samples, self.min_samples), 3)

    @property
    def peak_values_per_frame(self) -> int:
        config = self.config
        # Input and output of the norm: six frames per encoder frame, in float32, which count twice.
        stem, block = 2 * 12 * config.width, 6 * config.width + 2 * config.inner
        return max(stem, block) + 4 * config.decoder_layers * config.width

    def encode(self, audio: Tensor, lengths: list[int]) -> Encoded:
        return run_to_end(self.encode_in_pieces(audio, lengths))

    def encode_in_pieces(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, Encoded]:
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
        alignment = []
        for index, layer in enumerate(self.decoder.layers):
            x, weights = layer(x, index, run, self._rotary, angles)
            alignment += [weights[:, head] for layer_index, head in self.alignment_heads if layer_index == index]
        return self.decoder.norm(x), torch.stack(alignment).mean(dim=0)

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
        """Use 8-bit weights in the encoder and for the cross-attention keys and values."""
        quantise_linears(self.encoder.layers)
        quantise_linears(self.encoder.conv2)
        holder = nn.ModuleDict({"cross_kv": self.cross_kv})
        quantise_linears(holder)
        self.cross_kv = holder["cross_kv"]  # type: ignore[assignment]

    def quantise_decoder(self) -> None:
        """Use 8-bit weights in the decoder."""
        quantise_linears(self.decoder.layers)
        self.decoder.head = in_8_bits(self.decoder.embed_tokens.weight)

    def with_shared_decoder(self) -> Moonshine:
        """A model that shares this decoder (also when the decoder is quantised later) and has a separate encoder. The
        encoder has the same weights until others are loaded."""
        shared = [self.decoder, *self.parameters()]
        return deepcopy(self, {id(part): part for part in shared})

    @classmethod
    def load(cls, config: MoonshineConfig, tensors: dict[str, Tensor]) -> Moonshine:
        """From a transformers state dict, whose tensors it shares. Raises if a tensor is missing or unused."""
        with WithoutInitialValues():
            model = cls(config)
        model.load_state_dict(_fuse_tensors(tensors, config), strict=True, assign=True)
        return model.eval()


def _fuse_tensors(tensors: dict[str, Tensor], config: MoonshineConfig) -> dict[str, Tensor]:
    """A transformers state dict under this module's names, with fused matrices."""
    remaining = {name.removeprefix("model."): value.float() for name, value in tensors.items()}
    remaining.pop("proj_out.weight", None)  # the same matrix as the embedding
    for name in ("conv1.weight", "conv2.weight", "conv3.weight", "conv2.bias", "conv3.bias"):
        convolution, part = name.split(".")
        value = remaining.pop(f"encoder.{name}")
        remaining[f"encoder.{convolution}.linear.{part}"] = FrameConv.matrix(value) if part == "weight" else value
    stacks = [("encoder", layer) for layer in range(config.encoder_layers)]
    stacks += [("decoder", layer) for layer in range(config.decoder_layers)]
    for side, layer in stacks:
        prefix = f"{side}.layers.{layer}.self_attn."
        parts = [remaining.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
        remaining[prefix + "qkv_proj.weight"] = torch.cat(parts)
    cross = [
        remaining.pop(f"decoder.layers.{layer}.encoder_attn.{part}_proj.weight")
        for part in "kv"
        for layer in range(config.decoder_layers)
    ]
    remaining["cross_kv.weight"] = torch.cat(cross)
    return remaining
