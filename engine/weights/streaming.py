"""The file of a streaming encoder: what it was trained for, and its weights beside the published decoder.

Matrices are codes of a byte with a range per row, in the form the 8-bit layers compute with. The description travels in
the file, so an encoder cannot be run with blocks, a look-ahead or a norm it was not trained for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import SAMPLES_PER_FRAME, RunningNorm, StreamingSpec
from engine.models.seq2seq import SAFE_STEPS
from engine.weights.checkpoint import BadCheckpoint

_DESCRIPTION = "tickertape-streaming-encoder"
_FORMAT = 1
# What time is to the encoder. A file that does not say hears as the first ones did, which is this.
_CLOCK = {"sample_rate": 16_000, "samples_per_frame": SAMPLES_PER_FRAME}


def description(spec: StreamingSpec, base: str) -> dict[str, str]:
    """The file's metadata; `base` names the model whose decoder goes with it."""
    return {_DESCRIPTION: json.dumps({"format": _FORMAT, "base": base, **_CLOCK, **asdict(spec)})}


def _spec(metadata: dict[str, str] | None) -> StreamingSpec:
    stored = json.loads((metadata or {})[_DESCRIPTION])
    if stored["format"] != _FORMAT:
        raise ValueError(f"its format is {stored['format']!r}, and this version reads {_FORMAT}")
    for name, value in _CLOCK.items():
        if stored.get(name, value) != value:
            raise ValueError(f"it was trained with {name} {stored[name]!r}, and this engine hears with {value}")
    return StreamingSpec(
        blocks=tuple(stored["blocks"]),
        look_ahead=stored["look_ahead"],
        left=stored["left"],
        norm=RunningNorm(**stored["norm"]),
    )


def load_streaming_weights(model: Moonshine, file: Path) -> StreamingSpec:
    """Put the streaming encoder's weights in the place of the published ones; returns what they were trained for."""
    try:
        with safe_open(file, "pt") as stored:
            spec = _spec(stored.metadata())
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        weights = {name: value.float() for name, value in unpack_rows(tensors).items()}
        problems = model.load_state_dict(weights, strict=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise BadCheckpoint(f"{file} is not a streaming encoder for this model: {error}") from error
    replaced = ("encoder.", "cross_kv.")
    missing = [name for name in problems.missing_keys if name.startswith(replaced)]
    if missing or problems.unexpected_keys:
        raise BadCheckpoint(f"{file} lacks {missing} and has unknown {problems.unexpected_keys}")
    return spec


def pack_rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix as codes and the largest value of each row, the form in which `Int8Linear` computes with it.

    The steps are those of the processors that have the fewest, so that no other rounding follows there.
    """
    ranges = weight.abs().amax(dim=1).clamp(min=1e-12)
    codes = (weight / ranges[:, None] * SAFE_STEPS).round().to(torch.int8)
    return {f"{name}.codes": codes, f"{name}.range": ranges}


def unpack_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of `pack_rows` for every matrix; other tensors as they are."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(".codes"):
            matrix = name.removesuffix(".codes")
            plain[matrix] = value.float() / SAFE_STEPS * tensors[f"{matrix}.range"][:, None]
        elif not name.endswith(".range"):
            plain[name] = value
    return plain
