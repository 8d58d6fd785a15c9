"""The client's options for the text of finals (`Formatting`): what is formatted, replaced, searched and redacted.

Dialects and upload forms build them with `make_formatting`, which checks the lists that clients send; they are a part
of a session's `Settings`. The rules that these options switch on are in `formatting.py` and `redaction.py`, which
compare words with `words_of` and `bare_word`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from realtime.session.english import split_marks

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
