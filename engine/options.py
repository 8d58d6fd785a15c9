"""Settings of an engine (`EngineConfig`, `cache_folder`) and options of a stream (`Options`, keywords, voices).

Plain data that gateway and engine share, and that commands use before they import slow modules. The gateway fills
`EngineConfig` from the configuration and starts an engine with it. `Options` says which options of a stream a model
accepts; the gateway and the runner check a stream's options with it. Keywords and enrolled voices are sent as strings,
which are written and parsed here.
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple
from unicodedata import bidirectional, category

DEFAULT_MODEL = "moonshine-base-streaming"
# A stream counts against capacity for this long after it was opened and after its last speech: longer than the pauses
# of a conversation, so that capacity is not given to new streams while a speaker is silent for a moment.
COUNTED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings that an engine process is started with."""

    # A name that `tickertape pull` knows, or the path of a checkpoint.
    model: str = DEFAULT_MODEL
    # auto, cpu, cuda or cuda:N.
    device: str = "auto"
    # Most concurrent streams; 0: as many as the device allows.
    max_streams: int = 0
    # CPU threads for the model; 0: one per core. A windowed model on a CPU decodes this many streams in parallel.
    threads: int = 0
    # Frame-synchronous models: the decoder's attention window in tokens.
    decoder_window: int = 1024
    # Frame-synchronous models: store keys and values with 8 bits.
    kv_8bit: bool = False
    # Frame-synchronous models: make blank tokens less likely when the model has produced only blanks during speech.
    blank_guard: bool = True
    # Number of engines on the device; each uses an equal share of the memory.
    share_of: int = 1
    # Frame-synchronous models: seconds of silence to compute before the rest of it is skipped until speech; 0: never.
    cut_silence_s: float = 3.0
    # Frame-synchronous models on a GPU: host memory for streams whose silence is skipped, as a share of the memory that
    # is free at the start; 0: their keys and values stay on the device.
    parked_share: float = 0.7
    # Offer speaker labels, if their weights are in the cache.
    speakers: bool = True
    # Ask the turn detector where a turn ends, if its weights are in the cache.
    turn_detector: bool = True
    # The engine serves uploads only, one file at a time: what only live streams need is not loaded, so that the engine
    # starts sooner. Without speaker labels the encoder then uses several threads.
    files_only: bool = False

    @classmethod
    def from_settings(cls, model: str, settings: object) -> EngineConfig:
        """Build from an object with attributes of the same names, such as a section of the configuration."""
        return cls(model, **{name: getattr(settings, name) for name in cls.setting_names()})

    @classmethod
    def setting_names(cls) -> list[str]:
        """The fields that come from the configuration: all but `model`, `share_of` and `files_only`."""
        return [field.name for field in fields(cls) if field.name not in ("model", "share_of", "files_only")]


# Options of a stream, in addition to its delay. They are sent as strings under these names: `language` (a code),
# `languages` (codes of the languages to choose from, separated by commas), `task` (`translate`), `prompt`, `keywords`
# (one per line: the keyword, a tab, its boost), `speakers` (labels that say who speaks, see `speakers_text`), and
# `revised` (`yes`: utterances are decoded again at their end).

MAX_PROMPT_CHARACTERS = 16_384
MAX_KEYWORDS = 500
MAX_KEYWORD_CHARACTERS = 64
# UTF-8 bytes of all keywords of a stream. Bounds the size of the decoder's bias table and the time that other streams
# wait while it is built (engine/runner/bias.py).
MAX_KEYWORDS_BYTES = 7_000
MIN_BOOST, MAX_BOOST = 0.1, 10.0
TRANSLATE = "translate"
SPEAKERS = "speakers"
REVISED = "revised"
# Most enrolled voices of a stream, and the longest name of one.
MAX_ENROLLED = 16
MAX_NAME_CHARACTERS = 64
# A speaker embedding is a unit vector of this many numbers, each rounded to a multiple of `ROUNDING`.
EMBEDDING_SIZE = 192
ROUNDING = 1 / 1024
# An embedding is computed of a piece of speech of this many samples: 31 frames of the speech detector.
PIECE_SAMPLES = 31 * 512
# Another one is computed of each of its parts: 0.16 s each, a new one every 0.08 s.
PART_HOP_SAMPLES = 1280
PART_SAMPLES = 2 * PART_HOP_SAMPLES
# Unicode categories that a keyword or a name must not contain: control characters, surrogates, line and paragraph
# separators.
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
# Bidirectional classes of the characters that reverse or isolate the text after them. A name stands before the words of
# its speaker, and must not change how these are shown.
_REORDERING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


class Keyword(NamedTuple):
    """A word or short phrase to expect. A larger boost makes the model more likely to recognise it; 1 is usual."""

    text: str
    boost: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """The stream options that an engine accepts with its model."""

    # Codes of the languages that the model can be set to. Empty: the language cannot be set.
    languages: tuple[str, ...] = ()
    # The model detects which of its languages is spoken.
    detects_language: bool = False
    # The model can translate speech in another language into English.
    translates: bool = False
    # The model can be given a text that precedes the transcript.
    prompt: bool = False
    # Most keywords of a stream; 0: none are accepted.
    keywords: int = 0
    # Live text is decoded again at the end of an utterance, with fewer errors.
    revises: bool = False
    # The engine has the weights for speaker labels. Engines of one model may differ in this.
    speakers: bool = field(default=False, compare=False)
    # The engine has a turn detector. Engines of one model may differ in this too.
    turn_detector: bool = field(default=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the options that steer the model's text. `check` also accepts `languages`, `speakers` and `revised`
        where the engine supports them."""
        accepted = {
            "language": bool(self.languages),
            "task": self.translates,
            "prompt": self.prompt,
            "keywords": self.keywords > 0,
        }
        return tuple(name for name, is_accepted in accepted.items() if is_accepted)

    @property
    def only_language(self) -> str:
        """The code of the model's language if it has exactly one, else empty."""
        return self.languages[0] if len(self.languages) == 1 else ""

    def check(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the engine does not accept these options of a stream."""
        accepted = (*self.names, "languages") if self.detects_language else self.names
        accepted = (*accepted, SPEAKERS) if self.speakers else accepted
        accepted = (*accepted, REVISED) if self.revises else accepted
        for name in options:
            if name not in accepted:
                raise ValueError(f"this model takes no option {name[:40]!r}")
        languages = options["languages"].split(",") if "languages" in options else []
        for language in (*languages, *([options["language"]] if "language" in options else [])):
            if language not in self.languages:
                raise ValueError(f"this model has no language {language[:40]!r}; it has {', '.join(self.languages)}")
        if options.get("task", TRANSLATE) != TRANSLATE:
            raise ValueError(f"the task can be {TRANSLATE!r}, not {options['task'][:40]!r}")
        if len(options.get("prompt", "")) > MAX_PROMPT_CHARACTERS:
            raise ValueError(f"a prompt has at most {MAX_PROMPT_CHARACTERS} characters")
        if "keywords" in options:
            check_keywords(read_keywords(options["keywords"]), self.keywords)


def keywords_text(keywords: Iterable[Keyword]) -> str:
    """The option for keywords: a line for each, with the keyword, a tab, and its boost."""
    return "\n".join(f"{word.text}\t{word.boost:g}" for word in keywords)


def read_keywords(text: str) -> list[Keyword]:
    """Parse the format of `keywords_text`. Raises ValueError if a boost is not a number."""
    words = []
    for line in text.split("\n"):
        word, _, boost = line.partition("\t")
        try:
            words.append(Keyword(word, float(boost)))
        except ValueError:
            raise ValueError(f"keyword {word[:40]!r} has a boost that is not a number") from None
    return words


def check_keywords(keywords: Iterable[Keyword], max_keywords: int = MAX_KEYWORDS) -> None:
    """Raises ValueError if a keyword or the list is out of bounds; the text says which bound."""
    size = 0
    for number, word in enumerate(keywords):
        if number == max_keywords:
            raise ValueError(f"at most {max_keywords} keywords can be given")
        if not word.text.strip():
            raise ValueError("a keyword is empty")
        if len(word.text) > MAX_KEYWORD_CHARACTERS:
            raise ValueError(f"a keyword has at most {MAX_KEYWORD_CHARACTERS} characters: {word.text[:40]!r} is longer")
        if any(category(letter) in _FORBIDDEN_CATEGORIES for letter in word.text):
            raise ValueError(f"keyword {word.text[:40]!r} holds control characters")
        if not MIN_BOOST <= word.boost <= MAX_BOOST:
            raise ValueError(
                f"the boost of a keyword lies between {MIN_BOOST:g} and {MAX_BOOST:g}, not at {word.boost:g}"
            )
        size += len(word.text.encode())
        if size > MAX_KEYWORDS_BYTES:
            bound = f"all keywords together have at most {MAX_KEYWORDS_BYTES} bytes"
            raise ValueError(f"{bound}; give fewer or shorter ones")


# An enrolled voice: its name, and the mean embedding of a reference recording minus the mean of all voices, as 16-bit
# integers in multiples of `ROUNDING`.
Enrolled = tuple[str, bytes]
# First line of the option for speaker labels.
_LABELS = "labels"


def speakers_text(enrolled: Iterable[Enrolled] = ()) -> str:
    """The option for speaker labels: a line `labels`, then a line for each enrolled voice with its name, a tab, and its
    embedding as base64 of 16-bit integers."""
    voices = (f"{name}\t{b64encode(vector).decode()}" for name, vector in enrolled)
    return "\n".join((_LABELS, *voices))


def read_speakers(text: str) -> list[Enrolled]:
    """Parse the format of `speakers_text`. Raises ValueError."""
    first, *lines = text.split("\n")
    if first != _LABELS:
        raise ValueError(f"the option {SPEAKERS!r} must begin with {_LABELS!r}")
    enrolled = []
    for line in lines:
        name, _, encoded = line.partition("\t")
        try:
            vector = b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            vector = b""
        if len(vector) != 2 * EMBEDDING_SIZE or not any(vector):
            raise ValueError(f"the embedding of the speaker {name[:40]!r} is not {EMBEDDING_SIZE} 16-bit integers")
        enrolled.append((name, vector))
    check_names([name for name, _ in enrolled])
    return enrolled


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError if there are too many names of enrolled speakers, or if one is invalid or occurs twice."""
    if len(names) > MAX_ENROLLED:
        raise ValueError(f"at most {MAX_ENROLLED} speakers can be enrolled")
    for number, name in enumerate(names):
        if not name.strip() or len(name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"the name of a speaker has 1 to {MAX_NAME_CHARACTERS} characters")
        if any(category(letter) in _FORBIDDEN_CATEGORIES or bidirectional(letter) in _REORDERING for letter in name):
            raise ValueError(f"the name of the speaker {name[:40]!r} holds control characters")
        if name in names[:number]:
            raise ValueError(f"two speakers are named {name[:40]!r}")


def cache_folder() -> Path:
    """The folder of downloaded weights: `TICKERTAPE_CACHE`, or `tickertape` in the user's cache folder."""
    if folder := os.environ.get("TICKERTAPE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tickertape"
