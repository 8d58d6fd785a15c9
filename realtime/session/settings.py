"""The settings of a session: audio format, turn detection, language, keywords and formatting, as one frozen value.

Dialects and uploads build a `Settings` from their own messages; `Settings.in_force` checks it against the model, and
the session core and the engine stream work with the result. The server's own configuration is `realtime/config.py`.

`Formatting` has the options for the text of finals: what is formatted, replaced, searched and redacted. Dialects and
upload forms build it with `make_formatting`, which checks the lists that clients send. The rules that these options
switch on are in `formatting.py` and `redaction.py`, which compare words with `words_of` and `bare_word`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unicodedata import normalize

from engine import end_of_turn
from engine.options import (
    MAX_ENROLLED,
    MAX_KEYWORD_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    REVISED,
    SPEAKERS,
    TRANSLATE,
    Enrolled,
    Keyword,
    Options,
    check_keywords,
    keywords_text,
    speakers_text,
)
from engine.spec import ModelSpec, language_code
from realtime.errors import ClientFault
from realtime.session.english import split_marks

# Options for the text of finals

# The kinds of numbers that may be redacted, with the smallest number of digits that a number of the kind has.
MIN_DIGITS = {"card": 12, "ssn": 9, "phone": 7, "numbers": 3}
EMAIL = "email"
REDACTED = "[REDACTED]"
KINDS = (*MIN_DIGITS, EMAIL)

# Bounds of the lists: terms of one list, the length of a term, and all terms of one client together.
MAX_TERMS = 200
MAX_TERM_CHARACTERS = 100
MAX_TERM_WORDS = 8
MAX_TERMS_BYTES = 8000


@dataclass(frozen=True, slots=True)
class Formatting:
    """The client's options for final text, checked. Made by `make_formatting`."""

    # Numbers, dates, times, money, percent, ordinals and addresses as people write them; `numerals`: numbers only.
    smart: bool = False
    numerals: bool = False
    profanity_filter: bool = False
    # Files only.
    paragraphs: bool = False
    # Kinds of `KINDS`; and names to redact.
    redact: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    # (words to find, text in their place, which may be empty)
    replace: tuple[tuple[str, str], ...] = ()
    search: tuple[str, ...] = ()
    # Code of the language whose rules `smart` and `numerals` follow; empty: the language that the model reports for a
    # word, or else English.
    language: str = ""

    @property
    def redacts(self) -> bool:
        return bool(self.redact or self.names)

    @property
    def changes_finals(self) -> bool:
        return self.smart or self.numerals or self.profanity_filter or bool(self.replace)


NO_FORMATTING = Formatting()


def make_formatting(
    *,
    smart: bool = False,
    numerals: bool = False,
    profanity_filter: bool = False,
    paragraphs: bool = False,
    redact: Iterable[str] = (),
    names: Iterable[str] = (),
    replace: Iterable[tuple[str, str]] = (),
    search: Iterable[str] = (),
    language: str = "",
) -> Formatting:
    """The options after a check. Raises ValueError with a sentence that names the option and its bound."""
    kinds, listed, replaced, sought = tuple(redact), tuple(names), tuple(replace), tuple(search)
    for kind in dict.fromkeys(kinds):
        if kind not in KINDS:
            raise ValueError(f"'redact' cannot be '{kind[:40]}'; it can be {', '.join(KINDS)}")
    _check_terms("names", listed)
    _check_terms("replace", [find for find, _ in replaced])
    _check_terms("search", sought)
    if any(len(text) > MAX_TERM_CHARACTERS for _, text in replaced):
        raise ValueError(f"a text of 'replace' may have at most {MAX_TERM_CHARACTERS} characters")
    texts = (*listed, *sought, *(text for pair in replaced for text in pair))
    if sum(len(text.encode(errors="surrogatepass")) for text in texts) > MAX_TERMS_BYTES:
        raise ValueError(f"'names', 'replace' and 'search' together may have at most {MAX_TERMS_BYTES} bytes")
    chosen = tuple(dict.fromkeys(kinds))
    # Terms with the same words have the same hits, so the first of them stands for all.
    first: dict[tuple[str, ...], str] = {}
    for term in sought:
        first.setdefault(words_of(term), term)
    unlike = tuple(first.values())
    return Formatting(smart, numerals, profanity_filter, paragraphs, chosen, listed, replaced, unlike, language)


def _check_terms(option: str, terms: Sequence[str]) -> None:
    if len(terms) > MAX_TERMS:
        raise ValueError(f"'{option}' may have at most {MAX_TERMS} terms")
    for term in terms:
        if not any(map(str.isalnum, term)) or len(term) > MAX_TERM_CHARACTERS or len(term.split()) > MAX_TERM_WORDS:
            raise ValueError(
                f"a term of '{option}' must have 1 to {MAX_TERM_CHARACTERS} characters with a letter or digit, "
                f"and at most {MAX_TERM_WORDS} words"
            )
        if REDACTED in term:
            # It has no words to compare, so it would match nothing, everywhere.
            raise ValueError(f"a term of '{option}' contains {REDACTED}, which stands for words that are not kept")
        if any("\ud800" <= letter <= "\udfff" for letter in term):
            raise ValueError(f"a term of '{option}' contains half of a surrogate pair")


def words_of(term: str) -> tuple[str, ...]:
    """The words of a term for comparing."""
    return tuple(word for word in map(bare_word, term.split()) if word)


def bare_word(text: str) -> str:
    """A word for comparing: small letters, without punctuation around it; empty for a redacted word."""
    if REDACTED in text:
        return ""
    return split_marks(text.strip())[1].lower().replace("’", "'")


# The settings

MIN_RATE = 8_000
MAX_RATE = 48_000
G711_RATE = 8_000

# Values of `include` that have an effect.
INCLUDE_LOGPROBS = "item.input_audio_transcription.logprobs"
INCLUDE_WORDS = "item.input_audio_transcription.words"
INCLUDE_ACKS = "input_audio_buffer.acks"
INCLUDE_RESUME = "session.resume"
INCLUDE_SPEAKERS = "item.input_audio_transcription.speakers"
INCLUDE_END_OF_TURN = "input_audio_buffer.end_of_turn"
INCLUDED = (INCLUDE_LOGPROBS, INCLUDE_WORDS, INCLUDE_ACKS, INCLUDE_RESUME, INCLUDE_SPEAKERS, INCLUDE_END_OF_TURN)

# Names under which sessions are published; they are parts of addresses.
PUBLISHED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "A name has 1 to 64 letters, digits, dots, hyphens and underscores, and begins with a letter or a digit."

# Longest URL of a webhook.
MAX_URL_CHARACTERS = 2000

# Enrolled voices of a session, and characters of a name.
MAX_KNOWN_SPEAKERS, MAX_SPEAKER_NAME = MAX_ENROLLED, MAX_NAME_CHARACTERS

# Values of `finals`.
BETTER_FINALS, STREAMED_FINALS = "better", "streamed"
NO_SPEAKERS = (
    "the server has no weights for speaker labels; its operator can fetch them with `tickertape pull speakers` and a "
    "restart."
)
NO_LABELS_TO_ENROL = f"known_speakers needs speaker labels: add '{INCLUDE_SPEAKERS}' to 'include'."
NO_LABELS_TO_CUT = f"turn_detection.speaker_change needs speaker labels: add '{INCLUDE_SPEAKERS}' to 'include'."

# Settings that the model may refuse.
MODEL_OPTIONS = ("language", "languages", "prompt", "keywords", "task")

# A prompt counts as a list of keywords if no entry has more words than this (or characters than a keyword may have).
TERM_WORDS = 4

# Ranges and defaults of thresholds for the end of a turn, for dialects that take them as numbers.
EOT_THRESHOLDS, DEFAULT_EOT_THRESHOLD = end_of_turn.EOT_THRESHOLDS, end_of_turn.DEFAULT_EOT_THRESHOLD
EAGER_EOT_THRESHOLDS = end_of_turn.EAGER_EOT_THRESHOLDS
EOT_TIMEOUTS_MS, DEFAULT_EOT_TIMEOUT_MS = end_of_turn.EOT_TIMEOUTS_MS, end_of_turn.DEFAULT_EOT_TIMEOUT_MS

# (word, boost)
Words = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of the client's audio. `binary`: binary frames carry audio, and not JSON."""

    type: str = "audio/pcm"
    rate: int = 24_000
    binary: bool = False

    @property
    def container(self) -> bool:
        """The audio is in a container, which has its own sample rate and packets."""
        return self.type in ("audio/webm", "audio/ogg")


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Server-side turn detection. `scored` ends a turn by a probability and `semantic` by text and pause; otherwise the
    pause alone ends it."""

    semantic: bool = False
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: str = "auto"
    # Ends a turn at a probability (engine/end_of_turn.py); with `scored.eager`, probable ends are announced before.
    scored: end_of_turn.Eagerness | None = None
    # Silence of this length is committed as an empty item; None turns that off.
    idle_timeout_ms: int | None = None
    # A turn ends where the speaker changes. Needs speaker labels.
    speaker_change: bool = False
    # Sub-fields without effect (create_response, ...), echoed as the client sent them.
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def judges_pauses(self) -> bool:
        """Whether turns end by a score or by the text, and not by the length of the pause alone."""
        return self.semantic or self.scored is not None

    def with_thresholds(self, threshold: float, eager: float | None, timeout_ms: int) -> TurnDetection:
        """Scored turn detection with these numbers. Raises ValueError, with a sentence for the client."""
        return replace(self, scored=end_of_turn.numeric_eagerness(threshold, eager, timeout_ms))


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of a session, as the client asked for it or as it is in force (`in_force`)."""

    format: AudioFormat = field(default_factory=AudioFormat)
    model: str | None = None
    # Options of the model. None: not requested, or not supported by the model.
    language: str | None = None
    prompt: str | None = ""
    # Candidate languages for a model that detects the language.
    languages: tuple[str, ...] | None = ()
    keywords: Words | None = ()
    # Words of the prompt that the model gets as keywords. The prompt is kept, because a new prompt replaces them.
    prompt_words: Words = ()
    task: str | None = None
    # A name of the OpenAI API (minimal .. xhigh) or milliseconds.
    delay: str | int | None = None
    noise_reduction: Any = None
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    # Whether the client has set turn detection. Until then the default may depend on the model's name.
    turns_chosen: bool = False
    include: tuple[str, ...] | None = None
    # Remove white space at the start of an item, as OpenAI does; vLLM promises the raw concatenation.
    trim_start: bool = True
    # Send an event when no word followed the last one for this time; None: only turns are reported.
    utterance_end_ms: int | None = None
    # Least audio in the buffer for a commit; vLLM accepts empty ones.
    minimum_commit_ms: int = 100
    # Label words with their speakers. Sockets of the OpenAI API ask for it with `include`.
    speakers: bool = False
    # Finals have the words of a second pass over the whole utterance (`better`), or those that were streamed. None: not
    # requested, or the model has no second pass.
    finals: str | None = None
    # Enrolled speakers: name, and the embedding of a reference recording as bytes.
    known_speakers: tuple[Enrolled, ...] = ()
    # The speakers that the client asks for: names, each with a data URL of a recording, or None for a voice that is
    # enrolled already. `realtime/serving/inbox.py` enrols them; settings that are in force have None here.
    asked_speakers: tuple[tuple[str, str | None], ...] | None = None
    # The name under which viewers may read the session.
    publish: str | None = None
    # The URL that gets the finals of the session, beside those that the operator has set for the key.
    on_final: str | None = None
    # What is done with the text of finals; redaction is done with all text.
    formatting: Formatting = NO_FORMATTING
    # The language that the client named, also if the model cannot be set to one: finals are formatted by its rules.
    text_language: str = ""

    def wants(self, value: str) -> bool:
        return self.include is not None and value in self.include

    @property
    def labels_speakers(self) -> bool:
        return self.speakers or self.wants(INCLUDE_SPEAKERS)

    @property
    def cuts_speakers(self) -> bool:
        """Whether a turn ends where the speaker changes."""
        return self.labels_speakers and self.turn_detection is not None and self.turn_detection.speaker_change

    @property
    def revises(self) -> bool:
        """Whether finals have the words of a second pass. That comes after a pause, which is too late for a turn that
        ends where the speaker changes."""
        return self.finals == BETTER_FINALS and not self.cuts_speakers

    @property
    def lists_words(self) -> bool:
        """Whether a final has something for each of its words: times, log-probabilities or speakers."""
        return self.labels_speakers or self.wants(INCLUDE_WORDS) or self.wants(INCLUDE_LOGPROBS)

    @property
    def speaker_names(self) -> tuple[str, ...]:
        """The names of the enrolled speakers, who have the first numbers."""
        return tuple(name for name, _ in self.known_speakers)

    def in_force(self, spec: ModelSpec) -> Settings:
        """These settings as this model supports them; an option that it does not support becomes None.

        Raises ClientFault for an invalid value, and for a language or task that the model lacks, because without it the
        client would get a different text than it asked for. `param` of the fault is the option's name.
        """
        options = spec.options
        if self.labels_speakers and not options.speakers:
            raise _fault("speakers" if self.speakers else "include", NO_SPEAKERS)
        if self.turn_detection is not None and self.turn_detection.speaker_change and not self.labels_speakers:
            raise ClientFault("invalid_value", NO_LABELS_TO_CUT, param="turn_detection")
        if self.asked_speakers is not None:
            raise _fault("known_speakers", "known_speakers is set with session.update on the socket, before the audio.")
        words = _keywords(self.keywords or ())
        listed = listed_words(self.prompt or "") if options.keywords and not options.prompt else ()
        if listed:
            _check((*words, *listed), "prompt")
        language = text_language(self.language, self.task)
        if not language and not options.languages:
            # The model keeps no language, so the client named it in an earlier message.
            language = self.text_language
        # Without formatting the value is that of a session that asked for none.
        formatting = replace(self.formatting, language=language) if self.formatting.changes_finals else self.formatting
        return replace(
            self,
            formatting=formatting,
            text_language=language,
            language=_language(self.language, options),
            languages=_languages(self.languages or (), options),
            prompt=_prompt(self.prompt or "") if options.prompt or listed else None,
            prompt_words=listed,
            keywords=words if options.keywords or not words else None,
            task=_task(self.task, options),
            delay=self.delay if spec.max_delay_positions else None,
            # Not implemented: the models were trained on noisy microphone audio.
            noise_reduction=None,
            finals=(self.finals or BETTER_FINALS) if options.revises else None,
            include=None if self.include is None else tuple(name for name in self.include if name in INCLUDED),
        )

    def in_force_after(self, current: Settings, spec: ModelSpec) -> tuple[Settings, list[ClientFault]]:
        """Like `in_force`, for a change of `current`: a refused option keeps its current value and gives a fault.

        A current value may be refused too. It may conflict with another new option: then all options of the model keep
        their values. Or the session came from an engine that has more than this one: then the option is cleared.
        """
        asked, faults = replace(self, asked_speakers=None), list[ClientFault]()
        refusals = Counter[str]()
        while True:
            try:
                return asked.in_force(spec), faults
            except ClientFault as fault:
                name = fault.param or ""
                refusals[name] += 1
                if refusals[name] == 1:
                    faults.append(fault)
                    asked = replace(asked, **{name: getattr(current, name)})
                elif refusals[name] == 2 and name in MODEL_OPTIONS:
                    asked = replace(asked, **{option: getattr(current, option) for option in MODEL_OPTIONS})
                elif refusals[name] == 2 and name == "turn_detection":
                    # It needs the labels that another new option takes away.
                    asked = replace(asked, include=current.include)
                else:
                    asked = asked._without(name)

    def _without(self, option: str) -> Settings:
        """These settings without the part of an option that a model can refuse."""
        if option == "include":
            return replace(self, include=tuple(name for name in self.include or () if name != INCLUDE_SPEAKERS))
        if option == "turn_detection" and self.turn_detection is not None:
            return replace(self, turn_detection=replace(self.turn_detection, speaker_change=False))
        return replace(self, **{option: getattr(Settings(), option)})

    def ignored_options(self, taken: Settings) -> list[str]:
        """The names of options that are set here and not in `taken`, because the model does not support them."""
        asked = ("prompt", "keywords", "noise_reduction")
        return [name for name in asked if getattr(self, name) and getattr(taken, name) is None]

    @property
    def all_keywords(self) -> Words | None:
        """The keywords of settings that are in force, together with the words of the prompt."""
        if not self.prompt_words or self.keywords is None:
            return self.keywords
        given = {word for word, _ in self.keywords}
        return (*self.keywords, *(word for word in self.prompt_words if word[0] not in given))

    @property
    def shown_prompt(self) -> str | None:
        """The prompt for the model; empty if its words are given as keywords."""
        return "" if self.prompt_words else self.prompt

    def engine_options(self) -> dict[str, str]:
        """The options for the engine; only for settings that are in force."""
        options = {
            "language": self.language,
            "languages": None if self.language else ",".join(self.languages or ()),
            "task": self.task,
            "prompt": self.shown_prompt,
            "keywords": keywords_text(Keyword(*word) for word in self.all_keywords or ()),
            SPEAKERS: speakers_text(self.known_speakers) if self.labels_speakers else None,
            REVISED: "yes" if self.revises else None,
        }
        return {name: value for name, value in options.items() if value}


def text_language(language: str | None, task: str | None) -> str:
    """The code of the language that the text will have, if the client has named it; else empty."""
    if task == TRANSLATE:
        return "en"
    try:
        return (language_code(language) if language else None) or ""
    except ValueError:
        # A model that cannot be set to a language ignores it.
        return ""


def _language(written: str | None, options: Options) -> str | None:
    if not written or not options.languages:
        return None
    try:
        code = language_code(written)
    except ValueError as error:
        raise _fault("language", f"{error}. {_supported_languages(options)}") from None
    if code is not None and code not in options.languages:
        raise _fault("language", f"The model does not support the language {code!r}. {_supported_languages(options)}")
    return code


def _languages(written: Sequence[str], options: Options) -> tuple[str, ...] | None:
    """The codes of those languages that the model supports; None if it cannot choose among languages."""
    if not written:
        return ()
    if not options.languages:
        return None
    try:
        codes = dict.fromkeys(language_code(name) for name in written)
    except ValueError as error:
        raise _fault("languages", f"{error}. {_supported_languages(options)}") from None
    known = tuple(code for code in codes if code in options.languages)
    if not known and None not in codes:
        raise _fault("languages", f"The model supports none of these languages. {_supported_languages(options)}")
    return known if options.detects_language else None


def _prompt(text: str) -> str:
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise _fault("prompt", f"A prompt may have at most {MAX_PROMPT_CHARACTERS} characters.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _fault("prompt", "The prompt contains half of a surrogate pair.")
    return text


def listed_words(prompt: str) -> Words:
    """The words of a prompt that is only a list, with or without a heading such as `Names:`; empty for prose."""
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
    # Normalization may make a word longer.
    _check(plain, "keywords")
    return plain


def _check(words: Words, option: str) -> None:
    try:
        check_keywords(Keyword(*word) for word in words)
    except ValueError as error:
        raise _fault(option, f"{error}.") from None


def _plain(word: str) -> str:
    """The spelling that models use: single spaces, and Unicode normal form NFC."""
    return normalize("NFC", " ".join(word.split()))


def _task(task: str | None, options: Options) -> str | None:
    if task in (None, "", "transcribe"):
        return None
    if task != TRANSLATE:
        raise _fault("task", f"The task must be transcribe or {TRANSLATE}.")
    if not options.translates:
        raise _fault("task", "The model transcribes in the language that is spoken; it does not translate.")
    return task


def _supported_languages(options: Options) -> str:
    return f"It supports {', '.join(options.languages)}."


def _fault(option: str, message: str) -> ClientFault:
    return ClientFault("invalid_value", message[:1].upper() + message[1:], param=option)
