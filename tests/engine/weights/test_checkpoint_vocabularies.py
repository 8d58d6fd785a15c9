"""The tekken vocabulary file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from engine.core.words import Detokenizer
from engine.weights.checkpoint import read_tekken


def write(path: Path, pieces: list[bytes]) -> Path:
    entries = [{"rank": i, "token_bytes": base64.b64encode(piece).decode()} for i, piece in enumerate(pieces)]
    path.write_text(json.dumps({"vocab": entries}))
    return path


@pytest.mark.parametrize("text", ["", "[]", '{"vocab": [{"rank": 1}]}', '{"vocab": [{"token_bytes": "@@"}]}', "{}"])
def test_not_a_vocabulary(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a tekken vocabulary"):
        read_tekken(path, 1001)


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_tekken(tmp_path / "tekken.json", 1001)


def test_vocabulary_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 1001 tokens, the model has 1003"):
        read_tekken(write(tmp_path / "tekken.json", [b"a"]), 1003)


def test_text_comes_out_and_special_tokens_are_silent(tmp_path: Path) -> None:
    euro = "€".encode()
    vocabulary = read_tekken(write(tmp_path / "tekken.json", [b" hi", euro[:2], euro[2:], b"unused"]), 1003)
    assert len(vocabulary.pieces) == 1003
    assert vocabulary.word_marker == 33
    detokenizer = Detokenizer(vocabulary)
    assert "".join(map(detokenizer.push, [1, 32, 33, 1000, 1001, 32, 1002, 2])) == " hi€"
