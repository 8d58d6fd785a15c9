"""Whisper of any size, a windowed model: from OpenAI's `.pt` files and from transformers checkpoints.

Implements `SpeechModel` of `seq2seq.py`. Names follow OpenAI's files, with two exceptions: the three projections of
self-attention are one matrix, and the cross-attention keys and values of all layers are computed when a window is
encoded. Whisper was trained on windows padded to 30 seconds; `context_slack_seconds` reduces the padding to some
silence after the audio, which makes live use affordable. With little silence the model does not find the end of the
text and repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from engine.models.mel import FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE, slaney_filters
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
    join_heads,
    quantise_linears,
    split_heads,
)
from engine.options import TRANSLATE, Options
from engine.spec import ENGLISH_TEXT_TOKENS, ENGLISH_VOCABULARY, whisper_language_tokens, whisper_languages

# transformers' names, part by part; the order matters where one contains another.
_RENAMES = [
    (r"^model\.", ""),
    (r"\.layers\.", ".blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
    (r"\.embed_tokens\.", ".token_embedding."),
]


def _openai_name(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def fused(tensors: dict[str, Tensor], width: int, audio_layers: int, text_layers: int) -> dict[str, Tensor]:
    """A state dict of either kind under this module's names, with fused matrices. An encoder alone: no text layers."""
    left = {_openai_name(name): value.float() for name, value in tensors.items() if name != "proj_out.weight"}

    def take(prefix: str, parts: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
        weights = [left.pop(f"{prefix}{part}.weight") for part in parts]
        # Keys have no bias in Whisper; the fused matrix needs zeros there.
        biases = [left.pop(f"{prefix}{part}.bias", torch.zeros(width)) for part in parts]
        return weights, biases

    for convolution in ("encoder.conv1", "encoder.conv2"):
        left[f"{convolution}.linear.weight"] = FrameConv.matrix(left.pop(f"{convolution}.weight"))
        left[f"{convolution}.linear.bias"] = left.pop(f"{convolution}.bias")
    for side, layers in (("encoder", audio_layers), ("decoder", text_layers)):
        for layer in range(layers):
            prefix = f"{side}.blocks.{layer}.attn."
            weights, biases = take(prefix, ("query", "key", "value"))
            left[prefix + "qkv.weight"], left[prefix + "qkv.bias"] = torch.cat(weights), torch.cat(biases)
    cross_weights, cross_biases = [], []
    for part in ("key", "value"):
        for layer in range(text_layers):
            weights, biases = take(f"decoder.blocks.{layer}.cross_attn.", (part,))
            cross_weights += weights
            cross_biases += biases
    if text_layers:
        left["cross_kv.weight"], left["cross_kv.bias"] = torch.cat(cross_weights), torch.cat(cross_biases)
    return left


# The model.

LIVE_SLACK_SECONDS = 2.0
# Silence after a window that is read to its end, on a CPU: with 12 s nearly all texts end, with 8 s some do not.
END_SLACK_SECONDS = 12.0

# The symbols that OpenAI suppresses, except notes: these indicate music, whose words are left out.
_SYMBOLS = [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』', "<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("']
_SYMBOLS += ["((", "))", "(((", ")))", "[[", "]]", "{{", "}}"]

# (decoder layers, vocabulary) -> [layer, head] pairs that OpenAI found to follow the audio.
_ALIGNMENT_HEADS: dict[tuple[int, int], list[tuple[int, int]]] = {
    (4, 51864): [(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)],
    (4, 51865): [(2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)],
    (4, 51866): [(2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)],
    (6, 51864): [(3, 3), (4, 7), (5, 1), (5, 5), (5, 7)],
    (6, 51865): [(3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)],
    (12, 51865): [(5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)],
    (24, 51865): [(13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)],
    (32, 51866): [(7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6)],
}


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Dimensions of a checkpoint."""

    mels: int
    vocabulary: int
    audio_frames: int
    width: int
    audio_heads: int
    audio_layers: int
    text_tokens: int
    text_heads: int
    text_layers: int

    @classmethod
    def from_dims(cls, dims: dict[str, int]) -> WhisperConfig:
        """From the `dims` of an OpenAI file."""
        return cls(
            dims["n_mels"],
            dims["n_vocab"],
            dims["n_audio_ctx"],
            dims["n_audio_state"],
            dims["n_audio_head"],
            dims["n_audio_layer"],
            dims["n_text_ctx"],
            dims["n_text_head"],
            dims["n_text_layer"],
        )

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> WhisperConfig:
        """From a transformers config.json."""
        return cls(
            config["num_mel_bins"],
            config["vocab_size"],
            config["max_source_positions"],
            config["d_model"],
            config["encoder_attention_heads"],
            config["encoder_layers"],
            config["max_target_positions"],
            config["decoder_attention_heads"],
            config["decoder_layers"],
        )

    @property
    def multilingual(self) -> bool:
        return self.vocabulary > ENGLISH_VOCABULARY

    @property
    def end_token(self) -> int:
        return ENGLISH_TEXT_TOKENS + int(self.multilingual)

    @property
    def languages(self) -> int:
        """Number of language tokens; they follow the start token, also in English models."""
        return whisper_language_tokens(self.vocabulary)

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of the languages that can be set."""
        return whisper_languages(self.vocabulary)

    @property
    def start(self) -> int:
        """The token that starts a text. After it come the languages, then translate, transcribe, and so on."""
        return self.end_token + 1

    @property
    def transcribe(self) -> int:
        return self.start + self.languages + 2

    @property
    def previous(self) -> int:
        """The token that starts the text before this one."""
        return self.transcribe + 2

    @property
    def no_speech(self) -> int:
        return self.transcribe + 3

    def start_tokens(self, language: int, translate: bool = False) -> list[int]:
        """The start of a text without time stamps. `language`: index of the language."""
        no_timestamps = self.transcribe + 4
        if not self.multilingual:
            return [self.start, no_timestamps]
        return [self.start, self.start + 1 + language, self.transcribe - int(translate), no_timestamps]


def without_lone_frames(attention: Tensor) -> Tensor:
    """[..., frames], each limited to the larger attention of its two neighbours.

    A word covers several frames. The first frame of a window, and one in the silence after it, get attention at any
    token, in short windows more than the word itself; the word would seem to be at the beginning.
    """
    beside = pad(attention, (1, 1))
    return torch.minimum(attention, torch.maximum(beside[..., :-2], beside[..., 2:]))


class _Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        return query, key, value


class _EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_ln = nn.LayerNorm(width)
        self.attn = _SelfAttention(width, heads)
        self.mlp_ln = nn.LayerNorm(width)
        self.mlp = _Mlp(width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.attn.project(self.attn_ln(x))
        x = x + self.attn.out(join_heads(scaled_dot_product_attention(query, key, value, attn_mask=mask)))
        result: Tensor = x + self.mlp(self.mlp_ln(x))
        return result


class WhisperEncoder(nn.Module):
    """Two convolutions over log-mel frames, then layers of self-attention."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.conv1 = FrameConv(config.mels, config.width, kernel=3, stride=1)
        self.conv2 = FrameConv(config.width, config.width, kernel=3, stride=2)
        self.positional_embedding = nn.Parameter(torch.empty(config.audio_frames, config.width))
        self.blocks = nn.ModuleList(_EncoderBlock(config.width, config.audio_heads) for _ in range(config.audio_layers))
        self.ln_post = nn.LayerNorm(config.width)

    def layer_by_layer(self, mel: Tensor, frames: list[int]) -> Generator[None, None, Tensor]:
        """[batch, mels, 2 * frames] -> [batch, frames, width]; `frames`: real ones per row. Yields between layers."""
        mask = None
        # One frame of silence on both sides: [batch, 2 * frames + 2, mels].
        x = gelu(self.conv1(pad(mel.transpose(1, 2).to(self.positional_embedding.dtype), (0, 0, 1, 1))))
        if min(frames) * 2 < mel.shape[2]:
            lengths = counts_on(mel.device, frames)[:, None]
            # After its end a row must have zeros, with which a single row would be padded.
            x = x * (torch.arange(mel.shape[2], device=mel.device) < 2 * lengths)[:, :, None]
            mask = (torch.arange(mel.shape[2] // 2, device=mel.device) < lengths)[:, None, None, :]
        x = gelu(self.conv2(pad(x, (0, 0, 1, 1))))
        x = x + self.positional_embedding[: x.shape[1]]
        for block in self.blocks:
            yield
            x = block(x, mask)
        result: Tensor = self.ln_post(x)
        return result


class _CrossAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(width, width)


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_ln = nn.LayerNorm(width)
        self.attn = _SelfAttention(width, heads)
        self.cross_attn_ln = nn.LayerNorm(width)
        self.cross_attn = _CrossAttention(width)
        self.mlp_ln = nn.LayerNorm(width)
        self.mlp = _Mlp(width)
        self._scale = (width // heads) ** -0.5

    def forward(self, x: Tensor, layer: int, run: DecoderPass) -> tuple[Tensor, Tensor]:
        query, key, value = self.attn.project(self.attn_ln(x))
        x = x + self.attn.out(run.self_attention(layer, query * self._scale, key, value))
        query = split_heads(self.cross_attn.query(self.cross_attn_ln(x)), self.attn.heads)
        mixed, weights = run.cross_attention(layer, query * self._scale)
        x = x + self.cross_attn.out(mixed)
        return x + self.mlp(self.mlp_ln(x)), weights


class WhisperDecoder(nn.Module):
    """Token and position embeddings and layers; `Whisper.decode` runs them."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.positional_embedding = nn.Parameter(torch.empty(config.text_tokens, config.width))
        self.blocks = nn.ModuleList(_DecoderBlock(config.width, config.text_heads) for _ in range(config.text_layers))
        self.ln = nn.LayerNorm(config.width)


class Whisper(nn.Module):
    """See `seq2seq.SpeechModel`."""

    samples_per_frame = 2 * HOP_SAMPLES
    min_samples = FRAME_SAMPLES

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.context_slack_seconds: float | None = None
        self.encoder = WhisperEncoder(config)
        # Keys, then values, of the cross-attention of every decoder layer.
        self.cross_kv = nn.Linear(config.width, 2 * config.text_layers * config.width)
        self.decoder = WhisperDecoder(config)
        self._filters = slaney_filters(config.mels).float()
        self._hann = torch.hann_window(FRAME_SAMPLES)
        self.start_tokens = config.start_tokens(language=0)
        self.end_token = config.end_token
        self.options = Options(config.codes, config.multilingual, config.multilingual, prompt=True)
        first = config.start + 1
        spoken = tuple(range(first, first + config.languages)) if config.multilingual else ()
        self.judging: Judging | None = Judging(config.start, config.no_speech, spoken)
        self.max_tokens = config.text_tokens
        self.suppressed = list(range(config.end_token + 1, config.vocabulary))
        upper = [
            (layer, head)
            for layer in range(config.text_layers // 2, config.text_layers)
            for head in range(config.text_heads)
        ]
        self.alignment_heads = _ALIGNMENT_HEADS.get((config.text_layers, config.vocabulary), upper)

    def log_mel(self, audio: Tensor) -> Tensor:
        """[batch, samples] -> [batch, mels, samples / 160]; the floor is 80 dB below each row's own peak."""
        spectrum = torch.stft(audio, FRAME_SAMPLES, HOP_SAMPLES, window=self._hann, return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log_mel = (self._filters.T @ power).clamp(min=1e-10).log10()
        floor = log_mel.amax(dim=(1, 2), keepdim=True) - 8.0
        return (torch.maximum(log_mel, floor) + 4.0) / 4.0

    def set_live_padding(self, full_padding: bool, to_end: bool = False) -> None:
        """Read the window and some silence after it, unless 30 seconds are affordable."""
        slack = END_SLACK_SECONDS if to_end else LIVE_SLACK_SECONDS
        self.context_slack_seconds = None if full_padding else slack

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.to(device, dtype)
        self._filters, self._hann = self._filters.to(device), self._hann.to(device)

    def frames_of(self, samples: int) -> int:
        return self._context_frames(samples)

    @property
    def widest_frame(self) -> int:
        config = self.config
        return 14 * config.width + 4 * config.text_layers * config.width

    def encode(self, audio: Tensor, lengths: list[int]) -> Encoded:
        return at_once(self.encode_slowly(audio, lengths))

    def encode_slowly(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, Encoded]:
        frames = [self._context_frames(length) for length in lengths]
        samples = max(frames) * self.samples_per_frame
        mel = self.log_mel(pad(audio[:, :samples], (0, max(0, samples - audio.shape[1]))))
        if min(frames) < max(frames):
            ends = 2 * counts_on(mel.device, frames)[:, None]
            mel = mel * (torch.arange(mel.shape[2], device=mel.device) < ends)[:, None, :]
        hidden = yield from self.encoder.layer_by_layer(mel, frames)
        config = self.config
        keys, values = cross_keys_values(self.cross_kv(hidden), config.text_layers, config.text_heads)
        held = [min(-(-length // self.samples_per_frame), most) for length, most in zip(lengths, frames, strict=True)]
        return Encoded(keys, values, frames, held)

    def _context_frames(self, samples: int) -> int:
        if self.context_slack_seconds is None:
            return self.config.audio_frames
        wanted = samples + round(self.context_slack_seconds * SAMPLE_RATE)
        return min(-(-wanted // self.samples_per_frame), self.config.audio_frames)

    @property
    def decoder_shape(self) -> DecoderShape:
        config = self.config
        return DecoderShape(config.text_layers, config.text_heads, config.width // config.text_heads)

    def prompt_tokens(self, language: str, task: str, before: Sequence[int]) -> list[int]:
        if not (language or task or before):
            return self.start_tokens
        config = self.config
        # At most half of the text may be text before it, as in training.
        kept = before[-(config.text_tokens // 2 - 1) :]
        number = config.codes.index(language) if language else 0
        start = config.start_tokens(number, task == TRANSLATE)
        return [config.previous, *kept, *start] if kept else start

    def bar_symbols(self, pieces: Sequence[bytes]) -> None:
        """Suppress symbols that are not spoken: brackets, and marks that occur only in written text."""
        symbols = {symbol.encode() for symbol in _SYMBOLS}
        self.suppressed += [token for token, piece in enumerate(pieces) if piece.removeprefix(b" ") in symbols]

    def new_state(self, batch: int, capacity: int) -> DecoderState:
        return DecoderState.empty(self.decoder_shape, batch, capacity, self.decoder.token_embedding.weight)

    def decode(self, tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        x = self.decoder.token_embedding(tokens) + self.decoder.positional_embedding[positions]
        run = DecoderPass.start(positions, state, encoded)
        followed = []
        for index, block in enumerate(self.decoder.blocks):
            x, weights = block(x, index, run)
            followed += [weights[:, head] for at, head in self.alignment_heads if at == index]
        return self.decoder.ln(x), without_lone_frames(torch.stack(followed).mean(dim=0))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.decoder.token_embedding.weight.T

    def quantise(self) -> None:
        """Use 8-bit weights where a whole window is multiplied at once: in the encoder and for cross-attention."""
        self.quantise_encoder()

    def quantise_encoder(self) -> None:
        """Use 8-bit weights in the encoder and for cross-attention."""
        quantise_linears(self.encoder.blocks)
        holder = nn.ModuleDict({"cross_kv": self.cross_kv})
        quantise_linears(holder)
        self.cross_kv = holder["cross_kv"]  # type: ignore[assignment]

    def quantise_decoder(self) -> None:
        """Nothing to change: the decoder stays in float32."""

    @classmethod
    def load(cls, config: WhisperConfig, tensors: dict[str, Tensor]) -> Whisper:
        """From either kind of state dict, whose tensors it shares. Raises if a tensor is missing or unused."""
        with WithoutInitialValues():
            model = cls(config)
        weights = fused(tensors, config.width, config.audio_layers, config.text_layers)
        model.load_state_dict(weights, strict=True, assign=True)
        return model.eval()
