"""A Voxtral Realtime of full or given dimensions with random weights, made on the device itself."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.operands import Heads
from engine.models.voxtral_realtime import (
    FIRST_TEXT_TOKEN,
    STREAMING_WORD,
    Stack,
    VoxtralConfig,
    VoxtralRealtime,
    tensor_shapes,
)
from engine.options import Keyword, keywords_text
from engine.vocabulary import Vocabulary


def tiny_config() -> VoxtralConfig:
    """Dimensions for a CPU that has other things to do."""
    audio = Stack(32, 2, 48, Heads(2, 2, 16, 42), 1e6, 1e-5, biased=True)
    text = Stack(48, 2, 64, Heads(4, 2, 16, 64), 1e6, 1e-5, biased=False)
    # Mostly tokens that are text: random weights must say something.
    vocabulary = 10 * FIRST_TEXT_TOKEN
    return VoxtralConfig(audio, text, mel_bins=16, rows_per_position=4, vocabulary=vocabulary, default_delay=6)


def random_tensors(config: VoxtralConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Norms near one and matrices that keep their input's scale, so that activations stay in a sensible range."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        if len(shape) == 1:
            tensors[name] = noise.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        else:
            fan_in = noise[0].numel()
            tensors[name] = noise.mul_(0.05 if "embed_tokens" in name else fan_in**-0.5)
    return tensors


def random_model(
    config: VoxtralConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[VoxtralRealtime, Vocabulary]:
    pieces = [b""] * FIRST_TEXT_TOKEN + [f" {index}".encode() for index in range(config.vocabulary - FIRST_TEXT_TOKEN)]
    return VoxtralRealtime(config, random_tensors(config, dtype, device, seed)), Vocabulary(pieces, STREAMING_WORD)


def random_keywords(count: int) -> dict[str, str]:
    """The option with so many words that the random model's vocabulary can spell; nothing for none."""
    words = [Keyword(str(10_000 + 97 * number)) for number in range(count)]
    return {"keywords": keywords_text(words)} if words else {}
