"""Reads vocabularies from disk (token number -> bytes of the token), in the four formats of the models.

They are Moonshine's tokenizer.bin, tiktoken and tokenizer.json (`load_pieces`), and Voxtral's tekken.json
(`read_tekken`). Nothing here encodes text into tokens.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from engine.models.voxtral_realtime import FIRST_TEXT_TOKEN, STREAMING_WORD
from engine.spec import Vocabulary

# Sentencepiece's character for a space.
_SPACE = "\u2581"


def load_pieces(folder: Path, size: int) -> list[bytes]:
    """The bytes of each of `size` tokens, leading space included; empty for special tokens and for tokens that the file
    does not have. Raises ValueError or FileNotFoundError."""
    for name, read in (
        ("tokenizer.json", _from_tokenizer_json),
        ("tokenizer.bin", _from_tokenizer_bin),
        ("vocabulary.tiktoken", _from_tiktoken),
    ):
        file = folder / name
        if file.exists():
            pieces = read(file)
            if len(pieces) > size:
                raise ValueError(
                    f"{file} names {len(pieces)} tokens, the model has {size}: they do not belong together"
                )
            return pieces + [b""] * (size - len(pieces))
    raise FileNotFoundError(
        f"no vocabulary in {folder}: it needs tokenizer.json (transformers) or vocabulary.tiktoken (OpenAI Whisper)"
    )


def _from_tokenizer_bin(file: Path) -> list[bytes]:
    """Each token is its length (low seven bits first, one or two bytes) and its bytes."""
    data = file.read_bytes()
    pieces: list[bytes] = []
    offset = 0
    while offset < len(data):
        length, offset = data[offset], offset + 1
        if length >= 0x80:
            length, offset = (length & 0x7F) | data[offset] << 7, offset + 1
        pieces.append(_sentencepiece_bytes(data[offset : offset + length]))
        offset += length
    return pieces


def _sentencepiece_bytes(piece: bytes) -> bytes:
    # The first letter is compared before the pattern, which takes longer, because there are tens of thousands of
    # tokens.
    if piece.startswith(b"<") and re.fullmatch(rb"<(unk|s|/s)>|<<ST_\d+>>", piece):
        return b""
    return piece.replace(_SPACE.encode(), b" ")


def _from_tiktoken(file: Path) -> list[bytes]:
    """Each line has a token in base64 and its rank."""
    pieces: list[bytes] = []
    for number, line in enumerate(file.read_bytes().splitlines()):
        text, rank = line.split()
        if int(rank) != number:
            raise ValueError(f"{file}: line {number + 1} has rank {int(rank)}, expected {number}")
        pieces.append(base64.b64decode(text))
    return pieces


def _from_tokenizer_json(file: Path) -> list[bytes]:
    content: dict[str, Any] = json.loads(file.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    byte_level = _byte_level(content)
    specials = {token["id"] for token in content.get("added_tokens", ())}
    size = 1 + max([*vocabulary.values(), *specials])
    pieces = [b""] * size
    letters = _byte_letters() if byte_level else {}
    for token, number in vocabulary.items():
        if number in specials:
            continue
        if byte_level:
            pieces[number] = bytes(letters[letter] for letter in token)
        elif match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            pieces[number] = bytes([int(match[1], 16)])
        else:
            pieces[number] = token.replace(_SPACE, " ").encode()
    return pieces


def _byte_level(content: dict[str, Any]) -> bool:
    steps = [content.get("pre_tokenizer"), content.get("decoder")]
    steps += [part for step in steps if step for part in step.get("pretokenizers", []) + step.get("decoders", [])]
    return any(step and step.get("type") == "ByteLevel" for step in steps)


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others are letters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return letters


def read_tekken(path: Path, size: int) -> Vocabulary:
    """Mistral's tekken.json. Tokens below 1000 are special tokens without text; text token i of the file has the number
    1000 + i. Tokens from `size` on are left out. Raises ValueError.
    """
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
