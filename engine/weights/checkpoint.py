"""Reads checkpoint folders in safetensors format: configuration, tensors (checked by name and shape), and fingerprint.

Used when a model is loaded. Weights may be one file or shards. Gateways compare `fingerprint`s, so that engines with
different weights under one name are not mixed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError

CONFIG_FILE = "config.json"
# Names in older releases of the format: old prefix -> current prefix.
RENAMED_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "audio_tower.": "model.audio_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
NAMES_SHOWN = 8


class BadCheckpoint(EngineError):
    """The folder is not a checkpoint of this model; the text says what is wrong."""


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of config.json. Raises BadCheckpoint."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCheckpoint(f"{directory} has no readable {CONFIG_FILE}: {error.strerror}") from None
    except ValueError as error:
        raise BadCheckpoint(f"{directory / CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{directory / CONFIG_FILE} is not a JSON object")
    return config


def read_tensors(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    tied: dict[str, str] | None = None,
) -> dict[str, Tensor]:
    """Every tensor of `shapes`, by name. Raises BadCheckpoint that names missing, extra and mis-shaped tensors.

    `tied` maps an optional name to the tensor that it must equal; it is checked and then left out.
    """
    from safetensors import safe_open

    tied = tied or {}
    sources: dict[str, tuple[Path, str]] = {}
    problems: list[str] = []
    for file in _tensor_files(directory):
        with safe_open(file, "pt") as tensors:
            for stored in tensors.keys():
                name = _current_name(stored)
                if name in sources:
                    problems.append(f"{name} is there twice")
                sources[name] = (file, stored)
                found = tuple(tensors.get_slice(stored).get_shape())
                wanted = shapes.get(tied.get(name, name))
                if wanted is not None and found != wanted:
                    problems.append(f"{name} has shape {list(found)} instead of {list(wanted)}")
    problems += [f"{name} is missing" for name in shapes if name not in sources]
    problems += [f"{name} is not a tensor of this model" for name in sources if name not in shapes and name not in tied]
    if problems:
        raise BadCheckpoint(f"{directory} does not fit the model: {_shorten(problems)}")
    return _load(sources, shapes, dtype, device, tied)


def _load(
    sources: dict[str, tuple[Path, str]],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
    tied: dict[str, str],
) -> dict[str, Tensor]:
    from safetensors import safe_open

    loaded: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for file in sorted({file for file, _ in sources.values()}):
        with safe_open(file, "pt") as tensors:
            for name, (source, stored) in sources.items():
                if source == file:
                    target = loaded if name in shapes else copies
                    target[name] = tensors.get_tensor(stored).to(device, dtype)
    for name, copy in copies.items():
        if not torch.equal(copy, loaded[tied[name]]):
            raise BadCheckpoint(f"{name} differs from {tied[name]}, which the config says it is tied to")
    return loaded


def _tensor_files(directory: Path) -> list[Path]:
    """The shards listed in the index, or the single file."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadCheckpoint(f"{index} is not a weight index: {error}") from None
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise BadCheckpoint(f"{directory} lacks {_shorten(absent)}")
    return files


def _current_name(name: str) -> str:
    for old, new in RENAMED_PREFIXES.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _shorten(problems: list[str]) -> str:
    shown = "; ".join(problems[:NAMES_SHOWN])
    rest = len(problems) - NAMES_SHOWN
    return f"{shown}; and {rest} more" if rest > 0 else shown


# Fingerprints, which tell two sets of weights apart whatever their names are.
#
# Reading a large checkpoint twice would make every start slower, so large files are sampled: their size, and blocks
# spread over the whole file. Trained weights differ nearly everywhere, so this finds a difference. It is no protection
# against deliberate collisions.

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ort", ".onnx")
BLOCK_BYTES = 1 << 16
MOST_BLOCKS = 256


def fingerprint(path: Path) -> str:
    """The fingerprint of a checkpoint: a file, or all weight files in a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in WEIGHT_FILES)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        # Blocks evenly spread from the first to the last.
        count = min(MOST_BLOCKS, -(-size // BLOCK_BYTES))
        last = max(0, size - BLOCK_BYTES)
        with file.open("rb") as data:
            for index in range(count):
                data.seek(last * index // max(1, count - 1))
                digest.update(data.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
