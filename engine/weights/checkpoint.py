"""Reads checkpoints from disk: configuration, tensors and fingerprint, and Moonshine, Whisper and the turn detector.

`engine/runner/load.py` calls it when an engine starts, and puts the models on a device. `read_tensors` reads
safetensors files, in one file or shards, and checks every name and shape. Gateways compare `fingerprint`s, so that
engines with different weights under one name are not mixed. `load_speech_model` builds Moonshine or Whisper from its
files, with its vocabulary (`vocabularies.py`); `load_smart_turn` builds the turn detector's model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import EngineError
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.smart_turn import SmartTurn
from engine.models.whisper import Whisper, WhisperConfig
from engine.weights.vocabularies import load_pieces

CONFIG_FILE = "config.json"
# Names in older releases of the format: old prefix -> current prefix.
RENAMED_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "audio_tower.": "model.audio_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
# Most problems that an error text lists.
PROBLEMS_SHOWN = 8


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
    """Every tensor of `shapes`, by name. Raises BadCheckpoint, which names missing, extra and mis-shaped tensors.

    `tied` maps the name of a tensor that a file may have to the tensor that it must equal. It is compared and not
    returned.
    """

    tied = tied or {}
    sources: dict[str, tuple[Path, str]] = {}
    problems: list[str] = []
    for file in _tensor_files(directory):
        with safe_open(file, "pt") as tensors:
            for stored in tensors.keys():
                name = _current_name(stored)
                if name in sources:
                    problems.append(f"{name} is stored twice")
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

    loaded: dict[str, Tensor] = {}
    tied_tensors: dict[str, Tensor] = {}
    for file in sorted({file for file, _ in sources.values()}):
        with safe_open(file, "pt") as tensors:
            for name, (source, stored) in sources.items():
                if source == file:
                    target = loaded if name in shapes else tied_tensors
                    target[name] = tensors.get_tensor(stored).to(device, dtype)
    for name, tensor in tied_tensors.items():
        if not torch.equal(tensor, loaded[tied[name]]):
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
    shown = "; ".join(problems[:PROBLEMS_SHOWN])
    rest = len(problems) - PROBLEMS_SHOWN
    return f"{shown}; and {rest} more" if rest > 0 else shown


# Fingerprints, which distinguish two sets of weights whatever their names are.
#
# Reading a large checkpoint twice would make every start slower, so large files are sampled: their size, and blocks
# spread over the whole file. Trained weights differ nearly everywhere, so this finds a difference. It is no protection
# against deliberate collisions.

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ort", ".onnx")
# Size and largest number of the blocks that are read from a file.
BLOCK_BYTES = 1 << 16
MAX_BLOCKS = 256


def fingerprint(path: Path) -> str:
    """The fingerprint of a checkpoint: a file, or all weight files in a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in WEIGHT_FILES)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        # Blocks evenly spread from the first to the last.
        count = min(MAX_BLOCKS, -(-size // BLOCK_BYTES))
        last = max(0, size - BLOCK_BYTES)
        with file.open("rb") as data:
            for index in range(count):
                data.seek(last * index // max(1, count - 1))
                digest.update(data.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def load_smart_turn(file: Path) -> SmartTurn:
    """The turn detector's model in float32. Raises BadCheckpoint."""
    try:
        return SmartTurn.load(load_file(file))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadCheckpoint(
            f"{file} is not a turn detector that can be read: {error}. Fetch it again: tickertape pull turn-detector "
            "--fresh"
        ) from error


def load_speech_model(path: Path) -> tuple[Moonshine | Whisper, list[bytes]]:
    """A windowed model in float32, and the bytes of its tokens. Raises BadCheckpoint.

    `path` is a transformers checkpoint folder, a folder made by `tickertape pull`, or an OpenAI `.pt` file next to its
    `vocabulary.tiktoken`.
    """
    try:
        folder = path if path.is_dir() else path.parent
        openai_file = path / "model.pt" if path.is_dir() else path
        model = _load_openai(openai_file) if openai_file.is_file() else _load_transformers(folder)
        pieces = load_pieces(folder, model.config.vocabulary)
        if isinstance(model, Whisper):
            model.suppress_symbols(pieces)
        return model, pieces
    except (BadCheckpoint, MemoryError):
        raise
    except Exception as error:
        # A file that is not a checkpoint makes its parsers raise errors of many types: the unpickler raises IndexError
        # and struct.error.
        raise BadCheckpoint(f"{path} is not a checkpoint that can be read: {error}") from error


def _load_openai(file: Path) -> Whisper:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # Not torch's own text: it advises to load the file without protection.
        raise BadCheckpoint(f"{file} is not a checkpoint that can be read: it is no file of PyTorch") from error
    if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= content.keys():
        raise BadCheckpoint(f"{file} is not an OpenAI Whisper checkpoint (no dims and model_state_dict in it)")
    return Whisper.load(WhisperConfig.from_dims(content["dims"]), content["model_state_dict"])


def _load_transformers(folder: Path) -> Moonshine | Whisper:
    config = json.loads((folder / "config.json").read_text())
    family = config.get("model_type")
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise BadCheckpoint(f"{folder} has no model.safetensors")
    for file in files:
        tensors.update(load_file(file))
    if family == "moonshine":
        return Moonshine.load(MoonshineConfig.from_json(config), tensors)
    if family == "whisper":
        return Whisper.load(WhisperConfig.from_json(config), tensors)
    raise BadCheckpoint(f"{folder} holds a {family!r} model; windowed models are 'moonshine' and 'whisper'")
