"""Voxtral Realtime, the frame-synchronous model: a causal audio encoder and a decoder with one token per 80 ms.

The frame-synchronous runner (`engine/runner/frames`) runs it. The file has, in this order: dimensions, weights, the
layer functions (Triton kernels on CUDA, else `layers.py`), convolutions, the model, one stack of layers. The model has
only weights. The keys and values of streams are in pages that the caller passes in with `PagedAttention`, so one model
serves all streams.

Time: one position (80 ms) = 8 mel frames = 4 encoder rows = 1 decoder row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad

from engine.models.layers import (
    Heads,
    KvPages,
    RowScale,
    Span,
    add_norm_reference,
    attend_reference,
    inverse_frequencies,
    store_reference,
    swiglu_reference,
)
from engine.models.mel import HOP_SAMPLES, MelFrontEnd

ARCHITECTURE = "voxtral_realtime"
# Token numbers: start of a text, no word at this position (a *blank*), start of a word, first token with text.
BOS = 1
STREAMING_PAD = 32
STREAMING_WORD = 33
FIRST_TEXT_TOKEN = 1000
# Positions of silence before every stream.
LEFT_PAD_POSITIONS = 32
# Positions of silence after a stream: one position, and ten in which the model was trained to produce its last words.
FLUSH_POSITIONS = 11
# The *delay* is how many positions after the audio its token comes. A stream chooses it.
MAX_DELAY_POSITIONS = 30
CONV_KERNEL = 3
# Of the network that scales the decoder's norms by the delay: its inner width, and the base of its sinusoids.
DELAY_RANK = 32
DELAY_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Stack:
    """Dimensions of one stack of layers (encoder or decoder)."""

    width: int
    layers: int
    # Inner width of the feed-forward network.
    ffn: int
    # `heads.window` is the window of the training.
    heads: Heads
    # Base of the rotary frequencies.
    theta: float
    # Of the norms.
    epsilon: float
    # The projections (except that of the keys) have a bias.
    biased: bool


@dataclass(frozen=True, slots=True)
class VoxtralConfig:
    """Dimensions of a checkpoint."""

    audio: Stack
    text: Stack
    mel_bins: int
    # Encoder rows per position.
    rows_per_position: int
    # Number of tokens.
    vocabulary: int
    # In positions.
    default_delay: int
    # The output layer is the token embedding.
    tied: bool = True

    @property
    def samples_per_position(self) -> int:
        return 2 * self.rows_per_position * HOP_SAMPLES

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> VoxtralConfig:
        """From a checkpoint's config.json. Raises ValueError, which names the settings that are not supported."""
        if config.get("model_type") != ARCHITECTURE:
            raise ValueError(f"model_type is {config.get('model_type')!r}; this loader takes {ARCHITECTURE!r}")
        try:
            return cls._from_fields(config, config["audio_config"], config["text_config"])
        except KeyError as error:
            raise ValueError(f"the model's config lacks {error}") from None

    @classmethod
    def _from_fields(cls, config: dict[str, Any], audio: dict[str, Any], text: dict[str, Any]) -> VoxtralConfig:
        expected = {
            "audio_config.hidden_act": (audio.get("hidden_act", "silu"), "silu"),
            "audio_config.activation_function": (audio.get("activation_function", "gelu"), "gelu"),
            "text_config.hidden_act": (text.get("hidden_act", "silu"), "silu"),
            "projector_hidden_act": (config.get("projector_hidden_act", "gelu"), "gelu"),
            "audio_config.rope_type": (_rope(audio)[0], "default"),
            "text_config.rope_type": (_rope(text)[0], "default"),
        }
        wrong = [f"{name} = {found!r}" for name, (found, supported) in expected.items() if found != supported]
        if wrong:
            raise ValueError(f"this loader does not implement {', '.join(wrong)}")
        audio_heads, text_heads = audio["num_attention_heads"], text["num_attention_heads"]
        return cls(
            audio=_stack(audio, audio_heads, audio_heads, biased=True),
            text=_stack(text, text_heads, text.get("num_key_value_heads") or text_heads, biased=False),
            mel_bins=audio["num_mel_bins"],
            rows_per_position=config.get("downsample_factor", 4),
            vocabulary=text["vocab_size"],
            default_delay=config.get("default_num_delay_tokens", 6),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        )


def _rope(stack: dict[str, Any]) -> tuple[str, float]:
    """Kind and base of a stack's rotary embedding; older files have the base next to the other fields."""
    rope = stack.get("rope_parameters") or {}
    return rope.get("rope_type", "default"), float(rope.get("rope_theta", stack.get("rope_theta", 1e6)))


def _stack(stack: dict[str, Any], query_heads: int, kv_heads: int, *, biased: bool) -> Stack:
    width = stack["hidden_size"]
    dim = stack.get("head_dim") or width // query_heads
    return Stack(
        width=width,
        layers=stack["num_hidden_layers"],
        ffn=stack["intermediate_size"],
        heads=Heads(query_heads, kv_heads, dim, stack["sliding_window"]),
        theta=_rope(stack)[1],
        epsilon=stack.get("rms_norm_eps", 1e-5),
        biased=biased,
    )


def voxtral_mini_4b() -> VoxtralConfig:
    """Dimensions of Voxtral-Mini-4B-Realtime-2602."""
    audio = Stack(1280, 32, 5120, Heads(32, 32, 64, 750), 1e6, 1e-5, biased=True)
    text = Stack(3072, 26, 9216, Heads(32, 8, 128, 8192), 1e6, 1e-5, biased=False)
    return VoxtralConfig(audio, text, mel_bins=128, rows_per_position=4, vocabulary=131_072, default_delay=6)


# Weights.


def tensor_shapes(config: VoxtralConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in `transformers`) and shape of every tensor of a checkpoint."""
    audio, text = config.audio, config.text
    shapes: dict[str, tuple[int, ...]] = {
        "model.audio_tower.embedder.conv1.weight": (audio.width, config.mel_bins, CONV_KERNEL),
        "model.audio_tower.embedder.conv1.bias": (audio.width,),
        "model.audio_tower.embedder.conv2.weight": (audio.width, audio.width, CONV_KERNEL),
        "model.audio_tower.embedder.conv2.bias": (audio.width,),
        "model.audio_tower.norm.weight": (audio.width,),
        "model.language_model.norm.weight": (text.width,),
        "model.language_model.embed_tokens.weight": (config.vocabulary, text.width),
        "model.multi_modal_projector.linear_1.weight": (text.width, audio.width * config.rows_per_position),
        "model.multi_modal_projector.linear_2.weight": (text.width, text.width),
    }
    for layer in range(audio.layers):
        prefix = f"model.audio_tower.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(audio).items()}
        shapes[prefix + "self_attn_layer_norm.weight"] = (audio.width,)
        shapes[prefix + "final_layer_norm.weight"] = (audio.width,)
    for layer in range(text.layers):
        prefix = f"model.language_model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(text).items()}
        shapes[prefix + "input_layernorm.weight"] = (text.width,)
        shapes[prefix + "post_attention_layernorm.weight"] = (text.width,)
        shapes[prefix + "ada_rms_norm.linear1.weight"] = (DELAY_RANK, text.width)
        shapes[prefix + "ada_rms_norm.linear2.weight"] = (text.width, DELAY_RANK)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, text.width)
    return shapes


def _layer_shapes(stack: Stack) -> dict[str, tuple[int, ...]]:
    inner, keys = stack.heads.query_heads * stack.heads.dim, stack.heads.kv_heads * stack.heads.dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (inner, stack.width),
        "self_attn.k_proj.weight": (keys, stack.width),
        "self_attn.v_proj.weight": (keys, stack.width),
        "self_attn.o_proj.weight": (stack.width, inner),
        "mlp.gate_proj.weight": (stack.ffn, stack.width),
        "mlp.up_proj.weight": (stack.ffn, stack.width),
        "mlp.down_proj.weight": (stack.width, stack.ffn),
    }
    if stack.biased:
        shapes["self_attn.q_proj.bias"] = (inner,)
        shapes["self_attn.v_proj.bias"] = (keys,)
        shapes["self_attn.o_proj.bias"] = (stack.width,)
        shapes["mlp.down_proj.bias"] = (stack.width,)
    return shapes


def weight_bytes(config: VoxtralConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights in this type."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values()) * dtype.itemsize


# The layer functions: Triton kernels on CUDA, torch code elsewhere.


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, scale: RowScale | None = None
) -> tuple[Tensor, Tensor]:
    """residual + delta, and its RMS norm times `weight` (and times `scale`), as a pair.

    residual, delta: [rows, width]; weight: [width].
    """
    if residual.is_cuda:
        from engine.models import kernels

        return kernels.add_norm(residual, delta, weight, epsilon, scale)
    return add_norm_reference(residual, delta, weight, epsilon, scale)


def swiglu(gate_up: Tensor) -> Tensor:
    """[rows, 2 * width], gate first -> silu(gate) * up, [rows, width]."""
    if gate_up.is_cuda:
        from engine.models import kernels

        return kernels.swiglu(gate_up)
    return swiglu_reference(gate_up)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """What the attention layers of one stack need during one call: pages, and the rows to compute."""

    heads: Heads
    pages: KvPages
    span: Span
    use_kernels: bool

    def attend(self, layer: int, fused: Tensor) -> Tensor:
        """Rotate, store and attend: fused [streams * rows, q | k | v] -> [streams * rows, queries * dim]."""
        if self.use_kernels:
            from engine.models import kernels

            return kernels.attend(fused, layer, self.pages, self.span, self.heads)
        return attend_reference(fused, layer, self.pages, self.span, self.heads)

    def store(self, layer: int, fused: Tensor) -> None:
        """Rotate and store keys and values, as `attend` does, and compute nothing else."""
        if self.use_kernels:
            from engine.models import kernels

            kernels.store(fused, layer, self.pages, self.span, self.heads)
        else:
            store_reference(fused, layer, self.pages, self.span, self.heads)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; projections with the same input are fused into one matrix."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    down_bias: Tensor | None


def _pop_layer(tensors: dict[str, Tensor], prefix: str, norms: tuple[str, str], biased: bool) -> Layer:
    """Remove the tensors of one layer from `tensors`, and fuse them."""

    def pop(name: str) -> Tensor:
        return tensors.pop(prefix + name)

    key = pop("self_attn.k_proj.weight")
    qkv = torch.cat([pop("self_attn.q_proj.weight"), key, pop("self_attn.v_proj.weight")])
    qkv_bias = None
    if biased:
        no_bias = key.new_zeros(key.shape[0])
        qkv_bias = torch.cat([pop("self_attn.q_proj.bias"), no_bias, pop("self_attn.v_proj.bias")])
    return Layer(
        attention_norm=pop(f"{norms[0]}.weight"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=pop("self_attn.o_proj.weight"),
        out_bias=pop("self_attn.o_proj.bias") if biased else None,
        ffn_norm=pop(f"{norms[1]}.weight"),
        gate_up=torch.cat([pop("mlp.gate_proj.weight"), pop("mlp.up_proj.weight")]),
        down=pop("mlp.down_proj.weight"),
        down_bias=pop("mlp.down_proj.bias") if biased else None,
    )


# The convolutions before the encoder.


class ConvStem:
    """Mel frames -> encoder input rows: two convolutions, written as matrix products over shifted frames."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        prefix = "model.audio_tower.embedder."
        # [out, in, kernel] -> [out, kernel * in]: the frames of a kernel are adjacent in memory
        self._first = tensors.pop(prefix + "conv1.weight").transpose(1, 2).flatten(1).contiguous()
        self._first_bias = tensors.pop(prefix + "conv1.bias")
        self._second = tensors.pop(prefix + "conv2.weight").transpose(1, 2).flatten(1).contiguous()
        self._second_bias = tensors.pop(prefix + "conv2.bias")

    def item(self, mel: Tensor) -> Tensor:
        """[items, 3 + 8 n, bins] with look-back -> [items, 4 n, width]; without padding."""
        hidden = gelu(linear(_shifted(mel, stride=1), self._first, self._first_bias))  # [items, 1 + 8 n, width]
        return gelu(linear(_shifted(hidden, stride=2), self._second, self._second_bias))

    def offline(self, mel: Tensor) -> Tensor:
        """[batch, frames, bins] from the start of a stream -> [batch, frames / 2, width]; each conv pads with zeros."""
        hidden = gelu(linear(_shifted(pad(mel, (0, 0, 2, 0)), stride=1), self._first, self._first_bias))
        hidden = pad(hidden, (0, 0, 1, 0))
        return gelu(linear(_shifted(hidden, stride=2), self._second, self._second_bias))


def _shifted(frames: Tensor, stride: int) -> Tensor:
    """[batch, frames, channels] -> [batch, outputs, kernel * channels]: the inputs of each output of a convolution."""
    return frames.unfold(1, CONV_KERNEL, stride).transpose(2, 3).flatten(2)


# The model.


class VoxtralRealtime:
    """All weights of the model, and the forward passes. Rows of different streams are independent."""

    def __init__(self, config: VoxtralConfig, tensors: dict[str, Tensor]) -> None:
        """Removes every tensor from `tensors` (see `tensor_shapes`), so that each tensor that is fused can be freed."""
        self.config = config
        embedding = tensors.pop("model.language_model.embed_tokens.weight")
        self.device, self.dtype = embedding.device, embedding.dtype
        self.mel = MelFrontEnd(config.mel_bins, self.device)
        self.stem = ConvStem(tensors)
        self._audio_layers = [
            _pop_layer(tensors, f"model.audio_tower.layers.{i}.", ("self_attn_layer_norm", "final_layer_norm"), True)
            for i in range(config.audio.layers)
        ]
        self._text_layers = [
            _pop_layer(
                tensors, f"model.language_model.layers.{i}.", ("input_layernorm", "post_attention_layernorm"), False
            )
            for i in range(config.text.layers)
        ]
        self._audio_norm = tensors.pop("model.audio_tower.norm.weight")
        self._text_norm = tensors.pop("model.language_model.norm.weight")
        self._project_in = tensors.pop("model.multi_modal_projector.linear_1.weight")
        self._project_out = tensors.pop("model.multi_modal_projector.linear_2.weight")
        self._embedding = embedding
        self._head = embedding if config.tied else tensors.pop("lm_head.weight")
        self._delay_scales = self._scales_of_delays(tensors)
        self.audio_frequencies = inverse_frequencies(config.audio.heads.dim, config.audio.theta, self.device)
        self.text_frequencies = inverse_frequencies(config.text.heads.dim, config.text.theta, self.device)
        if tensors:
            raise ValueError(f"tensors that are not part of the model: {', '.join(sorted(tensors))}")

    def _scales_of_delays(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Per layer [delays, width]: 1 + mlp(sinusoid(delay)) for every delay, computed once; a step looks them up."""
        width = self.config.text.width
        frequency = torch.exp(-math.log(DELAY_THETA) * torch.arange(width // 2, dtype=torch.float32) / (width // 2))
        angle = torch.arange(MAX_DELAY_POSITIONS + 1, dtype=torch.float32)[:, None] * frequency
        sinusoid = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.device)  # [delays, width]
        scales = []
        for layer in range(self.config.text.layers):
            prefix = f"model.language_model.layers.{layer}.ada_rms_norm."
            down, up = tensors.pop(prefix + "linear1.weight"), tensors.pop(prefix + "linear2.weight")
            scales.append(1.0 + linear(gelu(linear(sinusoid, down.float())), up.float()))
        return scales

    def stem_rows(self, samples: Tensor) -> Tensor:
        """Items of one position with look-back and look-ahead, [items, 680 + 1280 + 40] samples -> encoder input of one
        position each, [items, 4 * width]."""
        return self.feature_rows(self.mel.frames(samples))

    def feature_rows(self, mel: Tensor) -> Tensor:
        """As `stem_rows`, from the log-mel frames of the samples, [items, 11, bins]."""
        return self.stem.item(mel.to(self.dtype)).flatten(1)

    def opening_rows(self, positions: int) -> Tensor:
        """Encoder input [positions, 4 * width] of the silence before every stream (its opening)."""
        silence = torch.zeros(1, positions * self.config.samples_per_position, device=self.device)
        rows = self.stem.offline(self.mel.offline(silence).to(self.dtype))
        return rows.view(positions, -1)

    def encode(self, rows: Tensor, attention: PagedAttention) -> Tensor:
        """Encoder input [positions, 4 * width] -> audio embeddings [positions, text width]."""
        audio = self.config.audio
        residual, delta = _run_layers(rows.view(-1, audio.width), self._audio_layers, audio, attention, None)
        hidden = add_norm(residual, delta, self._audio_norm, audio.epsilon)[1]
        joined = hidden.view(rows.shape[0], -1)  # the 4 rows of a position side by side
        return linear(gelu(linear(joined, self._project_in)), self._project_out)

    def decode(self, audio: Tensor, tokens: Tensor, delays: Tensor, attention: PagedAttention) -> Tensor:
        """Audio embeddings [positions, width], the input token and the delay of each -> hidden rows [positions,
        width]."""
        residual, delta = self._decoder_layers(self._text_layers, audio, tokens, delays, attention)
        return add_norm(residual, delta, self._text_norm, self.config.text.epsilon)[1]

    def remember(self, audio: Tensor, tokens: Tensor, delays: Tensor, attention: PagedAttention) -> Tensor:
        """As `decode` for positions whose next tokens are known: stores keys and values in all layers, and leaves out
        what follows them in the last one. Returns the projections of the last layer."""
        *layers, last = self._text_layers
        residual, delta = self._decoder_layers(layers, audio, tokens, delays, attention)
        hidden = add_norm(residual, delta, last.attention_norm, self.config.text.epsilon)[1]
        fused = linear(hidden, last.qkv, last.qkv_bias)
        attention.store(len(layers), fused)
        return fused

    def _decoder_layers(
        self, layers: list[Layer], audio: Tensor, tokens: Tensor, delays: Tensor, attention: PagedAttention
    ) -> tuple[Tensor, Tensor | None]:
        scales = [RowScale(table, delays) for table in self._delay_scales]
        return _run_layers(self._embedding[tokens] + audio, layers, self.config.text, attention, scales)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._head)


def _run_layers(
    rows: Tensor, layers: list[Layer], stack: Stack, attention: PagedAttention, scales: list[RowScale] | None
) -> tuple[Tensor, Tensor | None]:
    """[rows, width] through layers of a stack. Returns two parts whose sum is the result: `add_norm` does each residual
    addition with the next norm."""
    residual, delta = rows, None
    for index, layer in enumerate(layers):
        residual, hidden = add_norm(residual, delta, layer.attention_norm, stack.epsilon)
        mixed = attention.attend(index, linear(hidden, layer.qkv, layer.qkv_bias))
        delta = linear(mixed, layer.out, layer.out_bias)
        scale = None if scales is None else scales[index]
        residual, hidden = add_norm(residual, delta, layer.ffn_norm, stack.epsilon, scale)
        delta = linear(swiglu(linear(hidden, layer.gate_up)), layer.down, layer.down_bias)
    return residual, delta
