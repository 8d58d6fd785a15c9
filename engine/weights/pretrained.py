"""From a folder or file on disk to a model that can run: which family it is, its weights, its vocabulary."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.whisper import Whisper, WhisperConfig
from engine.weights.checkpoint import BadCheckpoint
from engine.weights.vocabularies import load_pieces


def load_speech_model(path: Path) -> tuple[Moonshine | Whisper, list[bytes]]:
    """A windowed model in float32 and the bytes of its tokens.

    `path` is a transformers checkpoint folder, a folder made by `tickertape pull`, or an OpenAI `.pt` file with its
    `vocabulary.tiktoken` beside it.
    """
    try:
        folder = path if path.is_dir() else path.parent
        openai_file = path / "model.pt" if path.is_dir() else path
        model = _load_openai(openai_file) if openai_file.is_file() else _load_transformers(folder)
        pieces = load_pieces(folder, model.config.vocabulary)
        if isinstance(model, Whisper):
            model.bar_symbols(pieces)
        return model, pieces
    except BadCheckpoint:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise BadCheckpoint(f"{path} is not a checkpoint that can be read: {error}") from error


def _load_openai(file: Path) -> Whisper:
    content = torch.load(file, map_location="cpu", weights_only=True)
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
