"""A Moonshine of a few thousand random weights, and recordings of noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile
import torch

from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.moonshine_streaming import NormPrior, StreamingSpec

TINY = MoonshineConfig(
    width=16,
    inner=32,
    encoder_layers=2,
    decoder_layers=2,
    heads=2,
    rotary_dim=6,
    rope_theta=10000.0,
    vocabulary=40,
    start_token=1,
    end_token=2,
)
SPEC = StreamingSpec(blocks=(5, 10), look_ahead=5, left=20, norm=NormPrior(0.0, -5.0, 75.0))


def tiny_model(seed: int = 0) -> Moonshine:
    torch.manual_seed(seed)
    model = Moonshine(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
    return model.eval()


def write_corpus(folder: Path, name: str, files: int, seconds: float) -> None:
    rng = np.random.default_rng(7)
    entries = []
    for number in range(files):
        samples = (rng.standard_normal(int(seconds * 16_000)) * 3000).astype(np.int16)
        file = f"{name}-{number}.flac"
        soundfile.write(folder / file, samples, 16_000)
        half = len(samples) // 2
        entries.append({"file": file, "utts": [[f"{number}-a", 0, half], [f"{number}-b", half, len(samples)]]})
    (folder / f"index.{name}.json").write_text(json.dumps(entries))
