"""Reads models from disk: a checkpoint's configuration, tensors, fingerprint and vocabulary, and whole models.

The engine calls it when it starts, mostly from `engine/runner/load.py`, which puts the models on a device. `training/`
uses `pack_rows` and `description` to write the files of a streaming encoder. `read_tensors` reads safetensors files, in
one file or shards, and checks every name and shape. Gateways compare `fingerprint`s, so that engines with different
weights under one name are not mixed. Vocabularies are Moonshine's tokenizer.bin, tiktoken and tokenizer.json
(`load_pieces`), and Voxtral's tekken.json (`read_tekken`).

`load_speech_model` builds Moonshine or Whisper from its files, `load_streaming_weights` gives Moonshine the weights of
its streaming encoder, and `load_smart_turn` builds the turn detector's model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import EngineError
from engine.models.moonshine import SAMPLES_PER_FRAME, Moonshine, MoonshineConfig
from engine.models.moonshine_streaming import NormPrior, StreamingSpec
from engine.models.seq2seq import SAFE_STEPS
from engine.models.smart_turn import SmartTurn
from engine.models.voxtral_realtime import FIRST_TEXT_TOKEN, STREAMING_WORD
from engine.models.whisper import Whisper, WhisperConfig
from engine.spec import Vocabulary

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


# Fingerprints, which distinguish two sets of weights whatever the name of the model is.
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


# Vocabularies (token number -> bytes of the token), in the four formats of the models. Nothing here encodes text into
# tokens.

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


# Moonshine's streaming encoder, in a file next to the published weights, which still provide the decoder.
#
# Its matrices are 8-bit codes with one range per row, the form in which the 8-bit layers (`Int8Linear`) compute. The
# file's metadata says what the encoder was trained for, so that it cannot be run with other blocks, another look-ahead
# or another norm. `training/distil.py` writes the file.

# The key of the description in the file's metadata, and the version of its format.
_DESCRIPTION = "tickertape-streaming-encoder"
_FORMAT = 1
# The encoder's sample rate and frame length. Files without these fields have these values.
_CLOCK = {"sample_rate": 16_000, "samples_per_frame": SAMPLES_PER_FRAME}


def description(spec: StreamingSpec, base: str) -> dict[str, str]:
    """The file's metadata. `base`: the name of the model whose decoder belongs to the encoder."""
    return {_DESCRIPTION: json.dumps({"format": _FORMAT, "base": base, **_CLOCK, **asdict(spec)})}


def _read_spec(metadata: dict[str, str] | None) -> StreamingSpec:
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
        norm=NormPrior(**stored["norm"]),
    )


def load_streaming_weights(model: Moonshine, file: Path) -> StreamingSpec:
    """Replace the weights of the model's encoder and cross-attention keys and values by those in the file.

    Returns what the encoder was trained for.

    Raises BadCheckpoint.
    """
    try:
        with safe_open(file, "pt") as stored:
            spec = _read_spec(stored.metadata())
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

    It uses the quantisation steps that are safe on every processor, so that no processor rounds again.
    """
    ranges = weight.abs().amax(dim=1).clamp(min=1e-12)
    codes = (weight / ranges[:, None] * SAFE_STEPS).round().to(torch.int8)
    return {f"{name}.codes": codes, f"{name}.range": ranges}


def unpack_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack_rows` for every matrix; other tensors are returned unchanged."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(".codes"):
            matrix = name.removesuffix(".codes")
            plain[matrix] = value.float() / SAFE_STEPS * tensors[f"{matrix}.range"][:, None]
        elif not name.endswith(".range"):
            plain[name] = value
    return plain


# From a folder or file to a model: its family, its weights, its vocabulary.


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
