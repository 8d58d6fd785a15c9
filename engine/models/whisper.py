"""Whisper of any size, a windowed model: from OpenAI's `.pt` files and from transformers checkpoints.

Implements `SpeechModel` of `seq2seq.py`. Names follow OpenAI's files, with three exceptions: the three projections of
self-attention are one matrix, the cross-attention keys and values of all layers are computed when a window is encoded,
and the convolutions are matrix products (`FrameConv`).

Whisper was trained on windows padded to 30 seconds. `context_slack_seconds` reduces the padding to some silence after
the audio, which makes live use affordable. With little silence the model often does not find the end of the text and
repeats it: live passes tolerate that, and a window that must be read to its end has more silence (`END_SLACK_SECONDS`).
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
    DetectionTokens,
    Encoded,
    FrameConv,
    WithoutInitialValues,
    cross_keys_values,
    ints_on_device,
    join_heads,
    quantise_linears,
    run_to_end,
    split_heads,
)
from engine.options import TRANSLATE, Options
from engine.spec import ENGLISH_TEXT_TOKENS, ENGLISH_VOCABULARY, whisper_language_tokens, whisper_languages

# (pattern in transformers' names, OpenAI's name), applied in this order: some patterns contain others.
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


def fuse_tensors(tensors: dict[str, Tensor], width: int, audio_layers: int, text_layers: int) -> dict[str, Tensor]:
    """A state dict of either kind under this module's names, with fused matrices. `text_layers`: 0 for an encoder
    alone."""
    remaining = {_openai_name(name): value.float() for name, value in tensors.items() if name != "proj_out.weight"}

    def pop_parts(prefix: str, parts: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
        weights = [remaining.pop(f"{prefix}{part}.weight") for part in parts]
        # Keys have no bias in Whisper; the fuse_tensors matrix needs zeros there.
        biases = [remaining.pop(f"{prefix}{part}.bias", torch.zeros(width)) for part in parts]
        return weights, biases

    for convolution in ("encoder.conv1", "encoder.conv2"):
        remaining[f"{convolution}.linear.weight"] = FrameConv.matrix(remaining.pop(f"{convolution}.weight"))
        remaining[f"{convolution}.linear.bias"] = remaining.pop(f"{convolution}.bias")
    for side, layers in (("encoder", audio_layers), ("decoder", text_layers)):
        for layer in range(layers):
            prefix = f"{side}.blocks.{layer}.attn."
            weights, biases = pop_parts(prefix, ("query", "key", "value"))
            remaining[prefix + "qkv.weight"], remaining[prefix + "qkv.bias"] = torch.cat(weights), torch.cat(biases)
    cross_weights, cross_biases = [], []
    for part in ("key", "value"):
        for layer in range(text_layers):
            weights, biases = pop_parts(f"decoder.blocks.{layer}.cross_attn.", (part,))
            cross_weights += weights
            cross_biases += biases
    if text_layers:
        remaining["cross_kv.weight"], remaining["cross_kv.bias"] = torch.cat(cross_weights), torch.cat(cross_biases)
    return remaining


# Silence after a live window on a CPU; and after a window that is read to its end there: with 12 s the model finds the
# end of nearly all texts, with 8 s not of all.
LIVE_SLACK_SECONDS = 2.0
END_SLACK_SECONDS = 12.0

# The symbols that OpenAI suppresses, without the notes. The model marks music with notes, and an utterance with a note
# is dropped as noise (`is_noise` in `engine/runner/windowed/stability.py`).
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
    # Number of tokens.
    vocabulary: int
    # Encoder frames of the longest window, 30 seconds.
    audio_frames: int
    width: int
    audio_heads: int
    audio_layers: int
    # Most tokens of a text, start tokens included.
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
    def start_of_transcript(self) -> int:
        """The token that starts a text. After it come the languages, then translate, transcribe, and so on."""
        return self.end_token + 1

    @property
    def transcribe(self) -> int:
        return self.start_of_transcript + self.languages + 2

    @property
    def start_of_previous(self) -> int:
        """The token that starts the text that this one continues."""
        return self.transcribe + 2

    @property
    def no_speech(self) -> int:
        return self.transcribe + 3

    def start_tokens(self, language: int, translate: bool = False) -> list[int]:
        """The start of a text without time stamps. `language`: index of the language."""
        no_timestamps = self.transcribe + 4
        if not self.multilingual:
            return [self.start_of_transcript, no_timestamps]
        language_token = self.start_of_transcript + 1 + language
        return [self.start_of_transcript, language_token, self.transcribe - int(translate), no_timestamps]


def without_single_frame_peaks(attention: Tensor) -> Tensor:
    """[..., frames], each limited to the larger attention of its two neighbours.

    A word covers several frames. The first frame of a window and one frame in the silence after it attract attention
    for every token (attention sinks), in short windows more than the word itself. Without the limit, such a frame would
    seem to be the time of the word.
    """
    padded = pad(attention, (1, 1))
    return torch.minimum(attention, torch.maximum(padded[..., :-2], padded[..., 2:]))


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
        """[batch, mels, 2 * frames] -> [batch, frames, width]; `frames`: number of real frames per row. Yields between
        layers."""
        mask = None
        # Zeros as the padding of the convolution on both sides: [batch, 2 * frames + 2, mels].
        x = gelu(self.conv1(pad(mel.transpose(1, 2).to(self.positional_embedding.dtype), (0, 0, 1, 1))))
        if min(frames) * 2 < mel.shape[2]:
            lengths = ints_on_device(mel.device, frames)[:, None]
            # After its end a row must be zero: a row that is alone in its batch has the convolution's padding there.
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
        first = config.start_of_transcript + 1
        languages = tuple(range(first, first + config.languages)) if config.multilingual else ()
        self.detection_tokens: DetectionTokens | None = DetectionTokens(
            config.start_of_transcript, config.no_speech, languages
        )
        self.max_tokens = config.text_tokens
        self.suppressed = list(range(config.end_token + 1, config.vocabulary))
        # Sizes without published alignment heads use all heads of the upper half of the layers.
        upper_half = [
            (layer, head)
            for layer in range(config.text_layers // 2, config.text_layers)
            for head in range(config.text_heads)
        ]
        self.alignment_heads = _ALIGNMENT_HEADS.get((config.text_layers, config.vocabulary), upper_half)

    def log_mel(self, audio: Tensor) -> Tensor:
        """[batch, samples] -> [batch, mels, samples / 160]; the floor is 80 dB below each row's own peak."""
        spectrum = torch.stft(audio, FRAME_SAMPLES, HOP_SAMPLES, window=self._hann, return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log_mel = (self._filters.T @ power).clamp(min=1e-10).log10()
        floor = log_mel.amax(dim=(1, 2), keepdim=True) - 8.0
        return (torch.maximum(log_mel, floor) + 4.0) / 4.0

    def set_live_padding(self, full_padding: bool, ends_at_pause: bool = False) -> None:
        """Pad windows to 30 seconds with `full_padding`, else by `LIVE_SLACK_SECONDS` or `END_SLACK_SECONDS`."""
        slack = END_SLACK_SECONDS if ends_at_pause else LIVE_SLACK_SECONDS
        self.context_slack_seconds = None if full_padding else slack

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.to(device, dtype)
        self._filters, self._hann = self._filters.to(device), self._hann.to(device)

    def frames_of(self, samples: int) -> int:
        return self._context_frames(samples)

    @property
    def peak_values_per_frame(self) -> int:
        config = self.config
        # Residuals, queries, keys, values and the inner values of an MLP; cross-attention keys and values, and a copy.
        return 14 * config.width + 4 * config.text_layers * config.width

    def encode(self, audio: Tensor, lengths: list[int]) -> Encoded:
        return run_to_end(self.encode_in_pieces(audio, lengths))

    def encode_in_pieces(self, audio: Tensor, lengths: list[int]) -> Generator[None, None, Encoded]:
        frames = [self._context_frames(length) for length in lengths]
        samples = max(frames) * self.samples_per_frame
        mel = self.log_mel(pad(audio[:, :samples], (0, max(0, samples - audio.shape[1]))))
        if min(frames) < max(frames):
            ends = 2 * ints_on_device(mel.device, frames)[:, None]
            mel = mel * (torch.arange(mel.shape[2], device=mel.device) < ends)[:, None, :]
        hidden = yield from self.encoder.layer_by_layer(mel, frames)
        config = self.config
        keys, values = cross_keys_values(self.cross_kv(hidden), config.text_layers, config.text_heads)
        audio_frames = [min(-(-length // self.samples_per_frame), n) for length, n in zip(lengths, frames, strict=True)]
        return Encoded(keys, values, frames, audio_frames)

    def _context_frames(self, samples: int) -> int:
        """Number of encoder frames for a window of this many samples and the silence after it."""
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
        # At most half of the tokens may be text before this one, as in training.
        previous = before[-(config.text_tokens // 2 - 1) :]
        number = config.codes.index(language) if language else 0
        start = config.start_tokens(number, task == TRANSLATE)
        return [config.start_of_previous, *previous, *start] if previous else start

    def suppress_symbols(self, pieces: Sequence[bytes]) -> None:
        """Suppress symbols that are not spoken: brackets, and marks that occur only in written text."""
        symbols = {symbol.encode() for symbol in _SYMBOLS}
        self.suppressed += [token for token, piece in enumerate(pieces) if piece.removeprefix(b" ") in symbols]

    def new_state(self, batch: int, capacity: int) -> DecoderState:
        return DecoderState.empty(self.decoder_shape, batch, capacity, self.decoder.token_embedding.weight)

    def decode(self, tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        x = self.decoder.token_embedding(tokens) + self.decoder.positional_embedding[positions]
        run = DecoderPass.start(positions, state, encoded)
        alignment = []
        for index, block in enumerate(self.decoder.blocks):
            x, weights = block(x, index, run)
            alignment += [weights[:, head] for layer, head in self.alignment_heads if layer == index]
        return self.decoder.ln(x), without_single_frame_peaks(torch.stack(alignment).mean(dim=0))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.decoder.token_embedding.weight.T

    def quantise(self) -> None:
        """Use 8-bit weights where a whole window is multiplied at once: see `quantise_encoder`."""
        self.quantise_encoder()

    def quantise_encoder(self) -> None:
        """Use 8-bit weights in the encoder and for the cross-attention keys and values."""
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
        weights = fuse_tensors(tensors, config.width, config.audio_layers, config.text_layers)
        model.load_state_dict(weights, strict=True, assign=True)
        return model.eval()
