"""Formatting of final text: numbers and dates in written form, profanity masks, replacements, search, paragraphs.

`format_final` is a pure function of the words and the text of a final. Each session has a `FinalFormatter`, which
keeps its newest final, so that the dialect, published sessions and webhooks share one result; uploads call
`format_words`. The options are `Formatting` in `settings.py`. Deltas are never formatted. Words keep their times: a
word that replaces several begins with the first and ends with the last of them. Redaction comes before
(`redaction.py`), and formatting does not change a redacted word.

Words are matched with tables, without regular expressions, so the time for a word does not depend on the length of the
client's lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from msgspec.structs import replace

from realtime.session import english, european
from realtime.session.english import WrittenForm, split_marks
from realtime.session.european import RULES
from realtime.session.events import TimedWord
from realtime.session.redaction import Redactor, is_redacted
from realtime.session.settings import Formatting, bare_word, words_of
from realtime.session.words import spelled, text_of

# A final of more words stays as it was spoken, because a final is formatted within one step of the event loop. Turns
# that are formatted are ended before; only one during which formatting was turned on has more.
MAX_FORMATTED_WORDS = 400
# Hits of a search that one final, or one part of a file, lists: hits may overlap, so they would multiply a final.
MAX_FINAL_HITS = 500
# Words of a long text that are formatted at once; the cut is at the next end of a sentence, or at twice as many.
WORDS_AT_ONCE = 64

# A sentence does not end after these.
ABBREVIATIONS = frozenset(("mr", "mrs", "ms", "dr", "st", "prof", "vs", "etc", "no", "jr", "sr", "a.m", "p.m"))
# The stems of masked words. A word is masked if it is a stem with one of these endings.
_PROFANE_STEMS = (
    "fuck",
    "motherfuck",
    "shit",
    "bullshit",
    "bitch",
    "asshole",
    "arsehole",
    "bastard",
    "cunt",
    "dickhead",
    "wank",
    "cocksuck",
    "goddamn",
    "pussy",
    "slut",
    "whore",
    "twat",
    "bollock",
    "jackass",
    "dumbass",
    "piss",
    "nigger",
    "nigga",
    "faggot",
    "retard",
)
_PROFANE_ENDINGS = ("", "s", "es", "ed", "er", "ers", "in", "ing", "y", "ty", "ting", "head", "heads")
PROFANITIES = frozenset(stem + ending for stem in _PROFANE_STEMS for ending in _PROFANE_ENDINGS)


@dataclass(frozen=True, slots=True)
class Hit:
    """A place where a search term was spoken; `start` and `end` are samples."""

    start: int
    end: int
    confidence: float | None
    snippet: str


@dataclass(frozen=True, slots=True)
class Final:
    """A formatted final. `raw` is the text before formatting, which is redacted too."""

    text: str
    words: tuple[TimedWord, ...]
    raw: str


@lru_cache(maxsize=64)
def redactor_of(formatting: Formatting) -> Redactor:
    return Redactor(formatting.redact, formatting.names)


@lru_cache(maxsize=64)
def _formatter_of(formatting: Formatting) -> _Formatter:
    return _Formatter(formatting)


class FinalFormatter:
    """Formats the finals of one session. The client, the viewers and the webhooks of a session ask for the same final
    one after the other: the newest final is kept, and is formatted once for all of them."""

    def __init__(self) -> None:
        # Words, text and options of the newest final, and the result.
        self._newest: tuple[tuple[TimedWord, ...], str, Formatting, Final] | None = None

    def format(self, text: str, words: tuple[TimedWord, ...], formatting: Formatting) -> Final:
        """As `format_final`. The same tuple of words with the same text and options is formatted once."""
        if not formatting.changes_finals:
            return format_final(text, words, formatting)
        newest = self._newest
        if newest is None or newest[0] is not words or newest[1] != text or newest[2] != formatting:
            newest = self._newest = words, text, formatting, format_final(text, words, formatting)
        return newest[3]


def format_final(text: str, words: Sequence[TimedWord], formatting: Formatting) -> Final:
    """Format a final. Without a change, and with too many words, the text stays exactly as it is."""
    if not formatting.changes_finals or not words or len(words) > MAX_FORMATTED_WORDS:
        return Final(text, tuple(words), text)
    parts = _formatter_of(formatting).parts(words)
    if all(part.text is None for part in parts):
        return Final(text, tuple(words), text)
    raw = text_of(words).lstrip()
    # Text after the last word that has no time; models seldom write such text.
    rest = text[len(raw) :] if text.startswith(raw) else ""
    written = "".join(map(_spelled, parts)).lstrip()
    return Final(written + rest, tuple(word for part in parts if (word := part.as_word()) is not None), text)


def format_words(words: Sequence[TimedWord], formatting: Formatting) -> tuple[str, list[TimedWord]]:
    """The text of these words, with the white space before it, and the words; for long texts in parts."""
    if not formatting.changes_finals:
        return text_of(words), list(words)
    parts = _formatter_of(formatting).parts(words)
    return "".join(map(_spelled, parts)), [word for part in parts if (word := part.as_word()) is not None]


def settled_words(words: Sequence[TimedWord], formatting: Formatting) -> int:
    """How many of the first words can become final without the rest: up to a place between two words outside
    numbers."""
    for count in range(len(words) - 1, 0, -1):
        if _is_plain(words[count - 1], formatting) and _is_plain(words[count], formatting):
            return count
    return 0


def _language_of(word: TimedWord, formatting: Formatting) -> str:
    return formatting.language or word.language or "en"


def _is_plain(word: TimedWord, formatting: Formatting) -> bool:
    language = _language_of(word, formatting)
    if language == "en":
        return english.is_plain(word.text)
    return language not in RULES or european.is_plain(word.text, language)


def _written_forms(texts: Sequence[str], language: str, smart: bool) -> list[WrittenForm]:
    """The groups of words that have another written form; none in a language without rules."""
    if language == "en":
        return english.written_forms(texts, smart=smart)
    return european.written_forms(texts, language, smart=smart) if language in RULES else []


def sentence_parts(words: Sequence[TimedWord]) -> Iterator[tuple[int, int]]:
    """Cut a long text at ends of sentences into parts that can be formatted one by one, as (start, end)."""
    start = 0
    for end in range(1, len(words) + 1):
        length = end - start
        if length >= WORDS_AT_ONCE and (ends_sentence(words[end - 1].text) or length >= 2 * WORDS_AT_ONCE):
            yield start, end
            start = end
    if start < len(words):
        yield start, len(words)


def ends_sentence(text: str) -> bool:
    """Whether a sentence ends after this word. Nothing that is formatted crosses the end of a sentence."""
    _, bare, mark = split_marks(text.strip())
    if "!" in mark or "?" in mark or "…" in mark:
        return True
    return "." in mark and bare.lower() not in ABBREVIATIONS and (len(bare) > 1 or not bare.isalpha())


@dataclass(frozen=True, slots=True)
class _Part:
    """Words that are written as one; `text` is None if they stay as they are, and empty if they are left out."""

    words: Sequence[TimedWord]
    text: str | None = None

    def as_word(self) -> TimedWord | None:
        if self.text is None:
            return self.words[0]
        return merged(self.words, self.text) if self.text else None


def _spelled(part: _Part) -> str:
    text = spelled(part.words[0])
    if part.text is None:
        # A redacted word has no tokens, so its text is spelled.
        return text
    return text[: len(text) - len(text.lstrip())] + part.text if part.text else ""


def merged(words: Sequence[TimedWord], text: str) -> TimedWord:
    """One word for several: from the start of the first to the end of the last, with the mean confidence."""
    confidences = [word.confidence for word in words if word.confidence is not None]
    return replace(
        words[0],
        text=text,
        end=max(word.end for word in words),
        chances=tuple(chance for word in words for chance in word.chances),
        confidence=sum(confidences) / len(confidences) if confidences else None,
    )


class _Formatter:
    """The tables for one set of options."""

    def __init__(self, formatting: Formatting) -> None:
        self._formatting = formatting
        self._replaced = _Terms(find for find, _ in formatting.replace)
        self._texts = {words_of(find): text for find, text in reversed(formatting.replace)}
        # The words of each search term, with the term as the client wrote it.
        self.searched = {words_of(query): query for query in formatting.search}

    def parts(self, words: Sequence[TimedWord]) -> list[_Part]:
        """The words in order, grouped where several are written as one."""
        texts = [word.text for word in words]
        changes = self._replacements(texts)
        taken = {place for start, end, _ in changes for place in range(start, end)}
        if self._formatting.smart or self._formatting.numerals:
            for form in self._numbers(words, taken):
                lead, _, _ = split_marks(texts[form.first].strip())
                _, _, mark = split_marks(texts[form.last - 1].strip())
                if any(split_marks(text.strip())[0] for text in texts[form.first + 1 : form.last]):
                    # `five "percent"`: the opening quote would be lost.
                    continue
                changes.append((form.first, form.last, lead + form.text + mark))
                taken.update(range(form.first, form.last))
        if self._formatting.profanity_filter:
            for place, text in enumerate(texts):
                if place not in taken and (masked := mask(text)) != text:
                    changes.append((place, place + 1, masked))
        out: list[_Part] = []
        done = 0
        for start, end, text in sorted(changes):
            out += [_Part((word,)) for word in words[done:start]]
            out.append(_Part(words[start:end], text))
            done = end
        return out + [_Part((word,)) for word in words[done:]]

    def _numbers(self, words: Sequence[TimedWord], taken: set[int]) -> list[WrittenForm]:
        """The written forms, by the rules of each word's language."""
        languages = [_language_of(word, self._formatting) for word in words]
        forms = []
        for language in dict.fromkeys(languages):
            if self._formatting.redact and language != "en":
                # Redaction reads number words of English only: it has not hidden what would be digits now.
                continue
            # A word that must stay as it is ends a number, like a word that is no number.
            readable = [
                word.text if languages[place] == language and place not in taken and not is_redacted(word) else "-"
                for place, word in enumerate(words)
            ]
            forms += _written_forms(readable, language, self._formatting.smart)
        return forms

    def _replacements(self, texts: Sequence[str]) -> list[tuple[int, int, str]]:
        changes = []
        for start, end, term in self._replaced.found(texts):
            lead, _, _ = split_marks(texts[start].strip())
            _, _, mark = split_marks(texts[end - 1].strip())
            text = self._texts[term]
            changes.append((start, end, lead + text + mark if text else ""))
        return changes


def mask(text: str) -> str:
    """The word with asterisks after its first letter if it is profane."""
    lead, bare, mark = split_marks(text)
    return f"{lead}{bare[0]}{'*' * (len(bare) - 1)}{mark}" if bare.lower() in PROFANITIES else text


class _Terms:
    """Finds terms of one or more words; the longest one at each place."""

    def __init__(self, terms: Iterable[str]) -> None:
        self._terms = frozenset(map(words_of, terms))
        self._lengths = sorted({len(term) for term in self._terms}, reverse=True)

    def found(self, texts: Sequence[str]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """(start, end, term) of each match, which do not overlap and do not cross the end of a sentence."""
        if not self._terms:
            return
        bare = [bare_word(text) for text in texts]
        place = 0
        while place < len(bare):
            for length in self._lengths:
                term = tuple(bare[place : place + length])
                if (
                    len(term) == length
                    and term in self._terms
                    and not any(map(ends_sentence, texts[place : place + length - 1]))
                ):
                    yield place, place + length, term
                    place += length
                    break
            else:
                place += 1


def search_words(words: Sequence[TimedWord], formatting: Formatting) -> list[tuple[str, list[Hit]]]:
    """The first places where each search term was said, in the order of the terms."""
    # At each word, one lookup for each length of a term: the time does not depend on the number of terms.
    terms = _formatter_of(formatting).searched
    found: dict[tuple[str, ...], list[Hit]] = {term: [] for term in terms}
    lengths = sorted({len(term) for term in terms})
    words = words[:MAX_FORMATTED_WORDS]
    bare = [bare_word(word.text) for word in words]
    # The number of each word's sentence: a term does not cross the end of one.
    sentences = list(accumulate((ends_sentence(word.text) for word in words[:-1]), initial=0))
    room = MAX_FINAL_HITS
    for start in range(len(bare)):
        for end in (start + length for length in lengths):
            if not room or end > len(bare) or sentences[start] != sentences[end - 1]:
                break
            if (hits := found.get(tuple(bare[start:end]))) is not None:
                hits.append(_hit(words[start:end]))
                room -= 1
    return [(query, found[term]) for term, query in terms.items()]


def _hit(words: Sequence[TimedWord]) -> Hit:
    confidences = [word.confidence for word in words if word.confidence is not None]
    snippet = " ".join(word.text.strip() for word in words)
    return Hit(
        words[0].start,
        max(word.end for word in words),
        sum(confidences) / len(confidences) if confidences else None,
        snippet,
    )


def redacted_times(words: Iterable[TimedWord]) -> list[tuple[int, int]]:
    """The audio of each redaction, as (start, end) in samples."""
    return [(word.start, word.end) for word in words if is_redacted(word)]


# Paragraphs

PARAGRAPH_PAUSE_S = 1.5
PARAGRAPH_WORDS = 80
# A text without punctuation is cut here.
MAX_PARAGRAPH_WORDS = 200


def sentences_of(words: Sequence[TimedWord], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The sentences of a paragraph as (start, end)."""
    for place in range(start + 1, end + 1):
        if place == end or ends_sentence(words[place - 1].text):
            yield start, place
            start = place


def paragraph_end(words: Sequence[TimedWord], start: int, sample_rate: int) -> int:
    """The end of the paragraph that begins at this word: before another speaker, after a sentence with a pause or with
    enough words, or after too many words."""
    for end in range(start + 1, len(words)):
        if words[end].speaker != words[end - 1].speaker or end - start >= MAX_PARAGRAPH_WORDS:
            return end
        if ends_sentence(words[end - 1].text):
            pause = words[end].start - words[end - 1].end
            if pause >= PARAGRAPH_PAUSE_S * sample_rate or end - start >= PARAGRAPH_WORDS:
                return end
    return len(words)
