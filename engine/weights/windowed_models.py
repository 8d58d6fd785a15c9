"""Loads windowed models (Moonshine, Whisper), Moonshine's streaming encoder, and the turn detector from disk.

`engine/runner/load.py` calls it, and puts the models on a device. A streaming encoder is a file of its own beside the
published weights, which still provide the decoder. Its matrices are 8-bit codes with one range per row, the form in
which the 8-bit layers compute. The file's metadata says what the encoder was trained for, so that it cannot be run with
other blocks, another look-ahead or another norm.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.models.moonshine import SAMPLES_PER_FRAME, Moonshine, MoonshineConfig, RunningNorm, StreamingSpec
from engine.models.seq2seq import SAFE_STEPS
from engine.models.smart_turn import SmartTurn
from engine.models.whisper import Whisper, WhisperConfig
from engine.weights.checkpoint import BadCheckpoint, load_pieces

_DESCRIPTION = "tickertape-streaming-encoder"
_FORMAT = 1
# The encoder's sample rate and frame length. Files without these fields have these values.
_CLOCK = {"sample_rate": 16_000, "samples_per_frame": SAMPLES_PER_FRAME}


def description(spec: StreamingSpec, base: str) -> dict[str, str]:
    """The file's metadata; `base` is the model whose decoder belongs to it."""
    return {_DESCRIPTION: json.dumps({"format": _FORMAT, "base": base, **_CLOCK, **asdict(spec)})}


def _spec(metadata: dict[str, str] | None) -> StreamingSpec:
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
        norm=RunningNorm(**stored["norm"]),
    )


def load_streaming_weights(model: Moonshine, file: Path) -> StreamingSpec:
    """Replace the model's encoder weights by those in the file; returns what they were trained for.

    Raises BadCheckpoint.
    """
    try:
        with safe_open(file, "pt") as stored:
            spec = _spec(stored.metadata())
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

    It uses as few steps as the least capable processors have, so that no further rounding happens there.
    """
    ranges = weight.abs().amax(dim=1).clamp(min=1e-12)
    codes = (weight / ranges[:, None] * SAFE_STEPS).round().to(torch.int8)
    return {f"{name}.codes": codes, f"{name}.range": ranges}


def unpack_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack_rows` for every matrix; other tensors unchanged."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(".codes"):
            matrix = name.removesuffix(".codes")
            plain[matrix] = value.float() / SAFE_STEPS * tensors[f"{matrix}.range"][:, None]
        elif not name.endswith(".range"):
            plain[name] = value
    return plain


def load_turn_detector(file: Path) -> SmartTurn:
    """The learnt detector of ends of turns, in float32. Raises BadCheckpoint."""
    try:
        return SmartTurn.load(load_file(file))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadCheckpoint(
            f"{file} is not a turn detector that can be read: {error}. Fetch it again: tickertape pull turn-detector "
            "--fresh"
        ) from error


# From a folder or file to a model: its family, its weights, its vocabulary.


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
            model.bar_symbols(pieces)
        return model, pieces
    except (BadCheckpoint, MemoryError):
        raise
    except Exception as error:
        # A file that is no checkpoint can make its parsers raise anything, the unpickler IndexError and struct.error.
        raise BadCheckpoint(f"{path} is not a checkpoint that can be read: {error}") from error


def _load_openai(file: Path) -> Whisper:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # torch's own text advises to load the file unsafely.
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
