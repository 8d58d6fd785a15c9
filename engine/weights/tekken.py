"""The vocabulary of Mistral's tekken tokenizer, read from tekken.json: which bytes each token stands for."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from engine.models.voxtral_realtime import FIRST_TEXT_TOKEN, STREAMING_WORD
from engine.vocabulary import Vocabulary


def read_tekken(path: Path, size: int) -> Vocabulary:
    """Ids below 1000 are special and carry no text; text token i of the file has id 1000 + i, up to `size` ids."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["vocab"]
        pieces = [b""] * FIRST_TEXT_TOKEN + [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; a checkpoint needs its vocabulary") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a tekken vocabulary: {type(error).__name__}: {error}") from None
    if len(pieces) < size:
        raise ValueError(f"{path} has {len(pieces)} tokens, the model has {size}; the file belongs to another model")
    return Vocabulary(pieces[:size], word_marker=STREAMING_WORD)
