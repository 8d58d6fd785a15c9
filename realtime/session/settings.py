"""What a client may choose for its session, as one frozen value. Dialects build it from their own shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unicodedata import normalize

from engine.options import (
    MAX_KEYWORD_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    TRANSLATE,
    Keyword,
    Options,
    check_keywords,
    keywords_text,
)
from engine.spec import ModelSpec, language_code
from realtime.errors import ClientFault

MIN_RATE = 8_000
MAX_RATE = 48_000
G711_RATE = 8_000

# Values of `include` that switch something on.
INCLUDE_LOGPROBS = "item.input_audio_transcription.logprobs"
INCLUDE_WORDS = "item.input_audio_transcription.words"
INCLUDE_ACKS = "input_audio_buffer.acks"
INCLUDE_RESUME = "session.resume"
INCLUDED = (INCLUDE_LOGPROBS, INCLUDE_WORDS, INCLUDE_ACKS, INCLUDE_RESUME)

# Settings that the model may refuse.
MODEL_OPTIONS = ("language", "languages", "prompt", "keywords", "task")

# A term has at most so many words; what is longer between two commas, or than a keyword may be, is prose.
TERM_WORDS = 4

# Each with its boost.
Words = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """How the client's audio bytes are to be read. `binary` says that binary frames carry audio, not JSON."""

    type: str = "audio/pcm"
    rate: int = 24_000
    binary: bool = False

    @property
    def container(self) -> bool:
        """The bytes are a file format that says its own rate and packet sizes."""
        return self.type in ("audio/webm", "audio/ogg")


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Server-side turn detection. `semantic` ends a turn by the text and the pause, otherwise by the pause alone."""

    semantic: bool = False
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: str = "auto"
    # Silence that lasts so long is committed as an empty item, and the client is told; None turns that off.
    idle_timeout_ms: int | None = None
    # Sub-fields that change nothing here (create_response, ...) but are echoed as the client sent them.
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective configuration of a session."""

    format: AudioFormat = field(default_factory=AudioFormat)
    model: str | None = None
    # Of the model's options from here on, None: not asked for, or the model does not take it.
    language: str | None = None
    prompt: str | None = ""
    # Those that may be spoken, where the model finds out which.
    languages: tuple[str, ...] | None = ()
    # Words to expect, each with its boost.
    keywords: Words | None = ()
    # Words of the prompt, where the model takes them as keywords. The prompt is kept: another one replaces them.
    prompt_words: Words = ()
    task: str | None = None
    # A name of the OpenAI scale (minimal .. xhigh) or a number of milliseconds.
    delay: str | int | None = None
    noise_reduction: Any = None
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    # The client has said what it wants of turn detection; until then a default may depend on the model's name.
    turns_chosen: bool = False
    include: tuple[str, ...] | None = None
    # OpenAI items are shown with a trimmed start; vLLM promises the raw concatenation.
    trim_start: bool = True
    # Tell the client when no word followed the last one for so long; None leaves that to turns.
    utterance_end_ms: int | None = None
    # Least audio a commit must find in the buffer; vLLM closes empty utterances too.
    minimum_commit_ms: int = 100

    def wants(self, value: str) -> bool:
        return self.include is not None and value in self.include

    def in_force(self, spec: ModelSpec) -> Settings:
        """These settings as this model takes them. What it does not take is None.

        Raises ClientFault for what no model could take, and for a language or a task that this one lacks: a client that
        goes on without it would get other words than it asked for. `param` is the option's name.
        """
        options = spec.options
        words = _keywords(self.keywords or ())
        listed = listed_words(self.prompt or "") if options.keywords and not options.prompt else ()
        if listed:
            _check((*words, *listed), "prompt")
        return replace(
            self,
            language=_language(self.language, options),
            languages=_languages(self.languages or (), options),
            prompt=_prompt(self.prompt or "") if options.prompt or listed else None,
            prompt_words=listed,
            keywords=words if options.keywords or not words else None,
            task=_task(self.task, options),
            delay=self.delay if spec.max_delay_positions else None,
            # Nobody reduces noise here: the models were trained on what microphones hear.
            noise_reduction=None,
            include=None if self.include is None else tuple(name for name in self.include if name in INCLUDED),
        )

    def in_force_after(self, current: Settings, spec: ModelSpec) -> tuple[Settings, list[ClientFault]]:
        """The same for a change of settings that are in force: an option that is refused stays as it was."""
        asked, faults = self, list[ClientFault]()
        kept: set[str] = set()
        while True:
            try:
                return asked.in_force(spec), faults
            except ClientFault as fault:
                faults.append(fault)
                # One that is refused as it was does not go together with another that is new.
                refused = MODEL_OPTIONS if fault.param in kept or fault.param is None else (fault.param,)
                kept.update(refused)
                asked = replace(asked, **{name: getattr(current, name) for name in refused})

    def untaken(self, taken: Settings) -> list[str]:
        """What was asked for here and is not in force there."""
        asked = ("prompt", "keywords", "noise_reduction")
        return [name for name in asked if getattr(self, name) and getattr(taken, name) is None]

    @property
    def all_keywords(self) -> Words | None:
        """Those of settings that are in force, with the words of the prompt that are not among them."""
        if not self.prompt_words or self.keywords is None:
            return self.keywords
        given = {word for word, _ in self.keywords}
        return (*self.keywords, *(word for word in self.prompt_words if word[0] not in given))

    @property
    def shown_prompt(self) -> str | None:
        """The prompt that the model is told as such."""
        return "" if self.prompt_words else self.prompt

    def engine_options(self) -> dict[str, str]:
        """Options for the model, of settings that are in force."""
        options = {
            "language": self.language,
            "languages": None if self.language else ",".join(self.languages or ()),
            "task": self.task,
            "prompt": self.shown_prompt,
            "keywords": keywords_text(Keyword(*word) for word in self.all_keywords or ()),
        }
        return {name: value for name, value in options.items() if value}


def _language(written: str | None, options: Options) -> str | None:
    if not written or not options.languages:
        return None
    try:
        code = language_code(written)
    except ValueError as error:
        raise _fault("language", f"{error}. {_what_there_is(options)}") from None
    if code is not None and code not in options.languages:
        raise _fault("language", f"The model has no language {code!r}. {_what_there_is(options)}")
    return code


def _languages(written: Sequence[str], options: Options) -> tuple[str, ...] | None:
    """Those of them that the model has: the others are not what it hears."""
    if not written:
        return ()
    if not options.languages:
        return None
    try:
        codes = dict.fromkeys(language_code(name) for name in written)
    except ValueError as error:
        raise _fault("languages", f"{error}. {_what_there_is(options)}") from None
    known = tuple(code for code in codes if code in options.languages)
    if not known and None not in codes:
        raise _fault("languages", f"The model has none of these languages. {_what_there_is(options)}")
    return known if options.detects_language else None


def _prompt(text: str) -> str:
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise _fault("prompt", f"A prompt may have at most {MAX_PROMPT_CHARACTERS} characters.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _fault("prompt", "The prompt holds half a character.")
    return text


def listed_words(prompt: str) -> Words:
    """The words of a prompt that is a list and nothing else, with a heading or without; none of one that is prose."""
    heading, colon, rest = prompt.partition(":")
    headed = bool(colon) and heading.strip().replace(" ", "").isalpha() and len(heading.split()) <= TERM_WORDS
    words = [word.strip().removesuffix(".") for word in re.split("[,;\n]", rest if headed else prompt)]
    words = [_plain(word) for word in words if word]
    if (len(words) < 2 and not headed) or not all(map(_is_term, words)):
        return ()
    return tuple((word, 1.0) for word in words)


def _is_term(word: str) -> bool:
    return len(word.split()) <= TERM_WORDS and len(word) <= MAX_KEYWORD_CHARACTERS


def _keywords(words: Words) -> Words:
    _check(words, "keywords")
    plain = tuple((_plain(word), boost) for word, boost in words)
    # Some letters are longer then.
    _check(plain, "keywords")
    return plain


def _check(words: Words, option: str) -> None:
    try:
        check_keywords(Keyword(*word) for word in words)
    except ValueError as error:
        raise _fault(option, f"{error}.") from None


def _plain(word: str) -> str:
    """As models write it: single spaces between words, and each letter one character with its accent."""
    return normalize("NFC", " ".join(word.split()))


def _task(task: str | None, options: Options) -> str | None:
    if task in (None, "", "transcribe"):
        return None
    if task != TRANSLATE:
        raise _fault("task", f"The task can be transcribe or {TRANSLATE}.")
    if not options.translates:
        raise _fault("task", "The model writes what is said, in the language it is said in; it does not translate.")
    return task


def _what_there_is(options: Options) -> str:
    return f"There is {', '.join(options.languages)}."


def _fault(option: str, message: str) -> ClientFault:
    return ClientFault("invalid_value", message[:1].upper() + message[1:], param=option)
