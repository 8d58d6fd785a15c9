"""From what was trained to files: a checkpoint to go on from, and the file that ships."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import StreamingSpec
from engine.weights.windowed_models import description, pack_rows

# Products that the engine takes with 8 bits lose nothing by being stored so. The third convolution is not one of them.
_EIGHT_BIT = ("qkv_proj.weight", "o_proj.weight", "fc1.weight", "fc2.weight", "conv2.linear.weight", "cross_kv.weight")
_HALF = "conv3.linear.weight"


def trained_tensors(model: Moonshine) -> dict[str, Tensor]:
    """All that differs from the published model: the encoder and the inputs of cross-attention."""
    tensors = model.state_dict()
    return {name: value.cpu() for name, value in tensors.items() if name.startswith(("encoder.", "cross_kv."))}


def save_checkpoint(model: Moonshine, spec: StreamingSpec, base: str, file: Path) -> None:
    halves = {name: value.half() for name, value in trained_tensors(model).items()}
    save_file(halves, file, metadata=description(spec, base))


def export(model: Moonshine, spec: StreamingSpec, base: str, file: Path) -> str:
    """Write the file that ships; returns its sha256."""
    tensors: dict[str, Tensor] = {}
    for name, value in trained_tensors(model).items():
        if name.endswith(_EIGHT_BIT):
            tensors |= pack_rows(name, value.float())
        else:
            tensors[name] = value.to(torch.float16 if name.endswith(_HALF) else torch.float32)
    save_file(tensors, file, metadata=description(spec, base))
    return hashlib.sha256(file.read_bytes()).hexdigest()
