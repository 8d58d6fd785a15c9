"""The same model in `transformers`, streaming one position at a time: what the engine is compared with."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from engine.models.voxtral_realtime import STREAMING_PAD, VoxtralConfig, voxtral_mini_4b


def reference_config(config: VoxtralConfig) -> Any:
    """The same dimensions as a `transformers` config."""
    from transformers import VoxtralRealtimeConfig

    def stack(part: Any) -> dict[str, Any]:
        return {
            "hidden_size": part.width,
            "num_hidden_layers": part.layers,
            "intermediate_size": part.ffn,
            "num_attention_heads": part.heads.queries,
            "head_dim": part.heads.dim,
            "sliding_window": part.heads.window,
            "rms_norm_eps": part.epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": part.theta},
        }

    text = {**stack(config.text), "num_key_value_heads": config.text.heads.keys, "vocab_size": config.vocabulary}
    return VoxtralRealtimeConfig(
        audio_config={**stack(config.audio), "num_mel_bins": config.mel_bins},
        text_config=text,
        downsample_factor=config.rows_per_position,
    )


@torch.inference_mode()
def streaming_step_ms(history: int = 200, steps: int = 30) -> float:
    """Median milliseconds of one streaming step at batch 1, `history` positions into a stream."""
    from transformers import VoxtralRealtimeForConditionalGeneration

    config = voxtral_mini_4b()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = VoxtralRealtimeForConditionalGeneration(reference_config(config)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    mel_per_position = 2 * config.rows_per_position

    def step(positions: int, caches: dict[str, Any]) -> dict[str, Any]:
        features = torch.randn(1, config.mel_bins, positions * mel_per_position, device="cuda", dtype=torch.bfloat16)
        tokens = torch.full((1, positions), STREAMING_PAD, device="cuda")
        out = model(input_ids=tokens, input_features=features, num_delay_tokens=6, use_cache=True, **caches)
        out.logits[:, -1].argmax(-1).item()
        return {
            "past_key_values": out.past_key_values,
            "encoder_past_key_values": out.encoder_past_key_values,
            "padding_cache": out.padding_cache,
        }

    caches = step(history, {})
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        caches = step(1, caches)
        times.append((time.perf_counter() - began) * 1000)
    return float(np.median(times))
