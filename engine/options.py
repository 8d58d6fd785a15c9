"""How an engine is to be built, and what gateway and engine must agree on: plain data for both processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple
from unicodedata import category

DEFAULT_MODEL = "moonshine-base-streaming"
# A stream counts as speaking for so long after it came, and after speech was last heard in it. Long enough for the
# pauses of a conversation: a speaker who falls silent for a moment finds the room still there.
COUNTED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Travels to the process that runs the engine; weights and torch are loaded there, from what it says."""

    # A name that `tickertape pull` knows, or the path of a checkpoint.
    model: str = DEFAULT_MODEL
    # auto, cpu, cuda or cuda:N.
    device: str = "auto"
    # Streams at once; 0 takes what the device allows.
    max_streams: int = 0
    # CPU threads for the model, 0: as many as there are cores. A windowed model reads so many streams side by side.
    threads: int = 0
    # Frame-synchronous models: tokens the decoder looks back on, 8-bit keys and values, the guard against blank ruts.
    decoder_window: int = 1024
    kv_8bit: bool = False
    blank_guard: bool = True
    # Engines that share the device: each plans with its part of the memory.
    share_of: int = 1
    # Frame-synchronous models: so many seconds of silence are computed, and what follows until speech is not; 0: all.
    cut_silence_s: float = 3.0

    @classmethod
    def from_settings(cls, model: str, settings: object) -> EngineConfig:
        """A model and settings from an object that has them under the same names, such as a part of a configuration."""
        return cls(model, **{name: getattr(settings, name) for name in cls.setting_names()})

    @classmethod
    def setting_names(cls) -> list[str]:
        """What a configuration says: not the model itself, nor what follows from the others."""
        return [field.name for field in fields(cls) if field.name not in ("model", "share_of")]


# What a stream may be opened with beside its delay: which of it a model takes, and the bounds of all of it.
#
# Options travel as texts under these names: `language` (a code), `languages` (codes that may be spoken, with commas
# between them), `task` (`translate`), `prompt`, and `keywords` (one in a line, its boost behind a tab).

MAX_PROMPT_CHARACTERS = 16_384
MAX_KEYWORDS = 500
MAX_KEYWORD_CHARACTERS = 64
# Of all keywords together, in UTF-8: so many that there is room for what the decoder needs of them, and so few that
# others do not wait long until it has that (engine/runner/bias.py).
MAX_KEYWORDS_BYTES = 7_000
MIN_BOOST, MAX_BOOST = 0.1, 10.0
TRANSLATE = "translate"
# Categories of what no word holds: control characters, halves of characters, ends of lines and paragraphs.
_NO_LETTERS = frozenset({"Cc", "Cs", "Zl", "Zp"})


class Keyword(NamedTuple):
    """A word or a few to expect. A larger boost makes the model readier to hear it; 1 is usual."""

    text: str
    boost: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a model takes."""

    # Codes of the languages that it can be told; of a model with one, that one. Empty: it cannot be told.
    languages: tuple[str, ...] = ()
    # It finds out by itself which of them is spoken.
    detects_language: bool = False
    # It can answer in English what is said in another language.
    translates: bool = False
    prompt: bool = False
    # Most keywords of a stream.
    keywords: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that a client can set."""
        taken = {
            "language": bool(self.languages),
            "task": self.translates,
            "prompt": self.prompt,
            "keywords": self.keywords > 0,
        }
        return tuple(name for name, takes in taken.items() if takes)

    @property
    def only_language(self) -> str:
        """Of a model that has one language; else empty."""
        return self.languages[0] if len(self.languages) == 1 else ""

    def check(self, given: Mapping[str, str]) -> None:
        """Raises ValueError if the model does not take these."""
        known = (*self.names, "languages") if self.detects_language else self.names
        for name in given:
            if name not in known:
                raise ValueError(f"this model takes no option {name[:40]!r}")
        spoken = given["languages"].split(",") if "languages" in given else []
        for language in (*spoken, *([given["language"]] if "language" in given else [])):
            if language not in self.languages:
                raise ValueError(f"this model has no language {language[:40]!r}; it has {', '.join(self.languages)}")
        if given.get("task", TRANSLATE) != TRANSLATE:
            raise ValueError(f"the task can be {TRANSLATE!r}, not {given['task'][:40]!r}")
        if len(given.get("prompt", "")) > MAX_PROMPT_CHARACTERS:
            raise ValueError(f"a prompt has at most {MAX_PROMPT_CHARACTERS} characters")
        if "keywords" in given:
            check_keywords(read_keywords(given["keywords"]), self.keywords)


def keywords_text(keywords: Iterable[Keyword]) -> str:
    return "\n".join(f"{word.text}\t{word.boost:g}" for word in keywords)


def read_keywords(text: str) -> list[Keyword]:
    """Raises ValueError for what `keywords_text` does not write."""
    words = []
    for line in text.split("\n"):
        word, _, boost = line.partition("\t")
        try:
            words.append(Keyword(word, float(boost)))
        except ValueError:
            raise ValueError(f"keyword {word[:40]!r} has a boost that is no number") from None
    return words


def check_keywords(keywords: Iterable[Keyword], most: int = MAX_KEYWORDS) -> None:
    """Raises ValueError for keywords that nobody can mean. The text says which and why."""
    size = 0
    for number, word in enumerate(keywords):
        if number == most:
            raise ValueError(f"at most {most} keywords can be given")
        if not word.text.strip():
            raise ValueError("a keyword is empty")
        if len(word.text) > MAX_KEYWORD_CHARACTERS:
            raise ValueError(f"a keyword has at most {MAX_KEYWORD_CHARACTERS} characters: {word.text[:40]!r} is longer")
        if any(category(letter) in _NO_LETTERS for letter in word.text):
            raise ValueError(f"keyword {word.text[:40]!r} holds control characters")
        if not MIN_BOOST <= word.boost <= MAX_BOOST:
            raise ValueError(
                f"the boost of a keyword lies between {MIN_BOOST:g} and {MAX_BOOST:g}, not at {word.boost:g}"
            )
        size += len(word.text.encode())
        if size > MAX_KEYWORDS_BYTES:
            bound = f"all keywords together have at most {MAX_KEYWORDS_BYTES} bytes"
            raise ValueError(f"{bound}; give fewer or shorter ones")
