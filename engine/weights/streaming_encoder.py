"""The file of Moonshine's streaming encoder: reads it into a model, and packs weights for it.

The file is stored next to the published weights, which still provide the decoder. `engine/runner/load.py` reads it;
`training/distil.py` writes it. Its matrices are 8-bit codes with one range per row, the form in which the 8-bit layers
(`engine/models/int8.py`) compute. The file's metadata says what the encoder was trained for, so that it cannot be run
with other blocks, another look-ahead or another norm.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.int8 import SAFE_STEPS
from engine.models.moonshine import SAMPLES_PER_FRAME, Moonshine
from engine.models.moonshine_streaming import NormPrior, StreamingSpec
from engine.weights.checkpoint import BadCheckpoint

# The key of the description in the file's metadata, and the version of its format.
_DESCRIPTION = "tickertape-streaming-encoder"
_FORMAT = 1
# The encoder's sample rate and frame length. Files without these fields have these values.
_CLOCK = {"sample_rate": 16_000, "samples_per_frame": SAMPLES_PER_FRAME}


def description(spec: StreamingSpec, base: str) -> dict[str, str]:
    """The file's metadata. `base`: the name of the model whose decoder belongs to the encoder."""
    return {_DESCRIPTION: json.dumps({"format": _FORMAT, "base": base, **_CLOCK, **asdict(spec)})}


def _read_spec(metadata: dict[str, str] | None) -> StreamingSpec:
    stored = json.loads((metadata or {})[_DESCRIPTION])
    if stored["format"] != _FORMAT:
        raise ValueError(f"its format is {stored['format']!r}; this version reads {_FORMAT}")
    for name, value in _CLOCK.items():
        if stored.get(name, value) != value:
            raise ValueError(f"it was trained with {name} {stored[name]!r}; this engine uses {value}")
    return StreamingSpec(
        blocks=tuple(stored["blocks"]),
        look_ahead=stored["look_ahead"],
        left=stored["left"],
        norm=NormPrior(**stored["norm"]),
    )


def load_streaming_weights(model: Moonshine, file: Path) -> StreamingSpec:
    """Replace the weights of the model's encoder and cross-attention keys and values by those in the file.

    Returns what the encoder was trained for.

    Raises BadCheckpoint.
    """
    try:
        with safe_open(file, "pt") as stored:
            spec = _read_spec(stored.metadata())
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        weights = {name: value.float() for name, value in unpack_rows(tensors).items()}
        problems = model.load_state_dict(weights, strict=False, assign=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise BadCheckpoint(f"{file} is not a streaming encoder for this model: {error}") from error
    replaced = ("encoder.", "cross_kv.")
    missing = [name for name in problems.missing_keys if name.startswith(replaced)]
    if missing or problems.unexpected_keys:
        raise BadCheckpoint(f"{file} lacks {missing} and has unknown {problems.unexpected_keys}")
    return spec


def pack_rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix as 8-bit codes and the largest value of each row, the form in which `Int8Linear` computes.

    It uses the quantisation steps that are safe on every processor, so that no processor rounds again.
    """
    ranges = weight.abs().amax(dim=1).clamp(min=1e-12)
    codes = (weight / ranges[:, None] * SAFE_STEPS).round().to(torch.int8)
    return {f"{name}.codes": codes, f"{name}.range": ranges}


def unpack_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack_rows` for every matrix; other tensors are returned unchanged."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(".codes"):
            matrix = name.removesuffix(".codes")
            plain[matrix] = value.float() / SAFE_STEPS * tensors[f"{matrix}.range"][:, None]
        elif not name.endswith(".range"):
            plain[name] = value
    return plain
