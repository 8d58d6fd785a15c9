"""What a model takes beside the sound, by its name or its checkpoint's configuration: no weights are read, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.languages import ENGLISH_TEXT_TOKENS, ENGLISH_VOCABULARY, whisper_languages
from engine.options import MAX_KEYWORDS, Options
from engine.weights.registry import REGISTRY


def _moonshine(config: Mapping[str, Any]) -> Options:
    return Options(languages=("en",), keywords=MAX_KEYWORDS)


def _whisper(config: Mapping[str, Any]) -> Options:
    codes = whisper_languages(int(config["vocab_size"]))
    return Options(codes, len(codes) > 1, len(codes) > 1, prompt=True, keywords=MAX_KEYWORDS)


def _voxtral(config: Mapping[str, Any]) -> Options:
    return Options(keywords=MAX_KEYWORDS)


# By the `model_type` of a checkpoint.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], Options]] = {
    "moonshine": _moonshine,
    "whisper": _whisper,
    "voxtral_realtime": _voxtral,
}


def options_of(model: str) -> Options | None:
    """What the model of this name or path takes; None if that can only be known when it is loaded."""
    entry = REGISTRY.get(model)
    if entry is not None:
        if entry.vocabulary:
            return _whisper({"vocab_size": entry.vocabulary})
        return _moonshine({}) if model.startswith("moonshine-") else None
    path = Path(model)
    folder = path if path.is_dir() else path.parent
    try:
        if not path.is_dir() or not (folder / "config.json").is_file():
            return _openai_options(folder / "vocabulary.tiktoken")
        config = json.loads((folder / "config.json").read_text())
        return FAMILIES[config["model_type"]](config)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _openai_options(vocabulary: Path) -> Options | None:
    """An OpenAI file has its size inside, beside the weights. The number of its texts tells an English one; how many
    languages another one has is not told."""
    if len(vocabulary.read_bytes().splitlines()) != ENGLISH_TEXT_TOKENS:
        return None
    return _whisper({"vocab_size": ENGLISH_VOCABULARY})
