"""Redaction: replaces card, phone and other numbers, e-mail addresses and listed names in a transcript by `[REDACTED]`.

The session core redacts words before they become events (`turns.py`), and uploads before they become a transcript, so
no dialect sees what was redacted. Text is streamed: `Redactor.settled` returns how many of the words so far cannot
become part of a redaction through later words; only those are sent. Text is divided only between two words that no rule
looks at together, so redacting the parts gives the same result as redacting the whole.

A speaker may pause within a number, and the pause may end a turn. The `carry` is the number of digits at the end of the
words before; the start of the next turn is judged together with them. At the end of a turn three digits or more are
redacted, because more may follow, except a lone year and an amount with `hundred` (`eight hundred and five`).

A redaction has the times of the audio: it begins with its first word and ends with its last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import normalize

from realtime.session.english import (
    MAGNITUDES,
    NUMBER_WORDS,
    ONES,
    REPEATS,
    TEENS,
    TENS,
    TOP_DOMAINS,
    ZEROS,
    split_marks,
)
from realtime.session.events import TimedWord
from realtime.session.settings import EMAIL, MIN_DIGITS, REDACTED, bare_word

# Digits at the end of a turn from which on more digits may follow in the next turn.
EDGE_DIGITS = 3
# Words that are held back at most. When there are more, they are redacted as at the end of a turn.
MAX_HELD = 200
# Words that do not interrupt a number. At most `MAX_FILLERS` of them stand between two digits.
FILLERS = frozenset(
    (
        *("uh", "um", "er", "erm", "ah", "eh", "hmm", "then", "dash", "hyphen", "space", "slash", "plus", "dot"),
        *("point", "comma", "minus", "-", "–", "—", "+", "/", ".", ",", "okay", "ok", "yes", "yeah", "right", "mhm"),
    )
)
# Other words for digits: `triple fours`, `nought`.
OTHER_DIGITS = frozenset(
    (
        *("ones", "twos", "threes", "fours", "fives", "sixes", "sevens", "eights", "nines", "zeros", "zeroes", "ohs"),
        *("nought", "naught", "null", "noughts"),
    )
)
MAX_FILLERS = 3
# Words as which a model may mishear a digit; they count only between two single digits.
MISHEARD = frozenset(("for", "to", "too", "won", "ate", "tree", "sex"))
# Joins two numbers, unless one is a year: `in 2019 and 2020`.
AND = "and"
# At the end and at the start of a turn these do not interrupt a number; `it` stands for `it's` too.
AT_TURN_END = FILLERS | MISHEARD | {AND, ""}
AT_TURN_START = AT_TURN_END | {"so", "it"}
AT_SIGNS = frozenset(("at", "@"))
# `at the rate` and `at sign` are other names of the at sign.
AT_WORDS = frozenset(("rate", "sign"))
# Ends of domains that are found without a dot before them: `gmail com`.
COMMON_ENDS = frozenset(("com", "net", "org"))
JOINERS = frozenset(("dot", "underscore", "dash", "hyphen", "plus", "minus", ".", "_", "-", "+"))
MONEY = ("$", "€", "£", "¥")
# The words for numbers; and all words that the rules for numbers and for addresses look at, beside digits.
SPOKEN = OTHER_DIGITS | NUMBER_WORDS | {*ZEROS, *REPEATS}
DIGIT_WORDS = FILLERS | MISHEARD | OTHER_DIGITS | {AND, *MAGNITUDES, *ZEROS, *REPEATS}
ADDRESS_WORDS = AT_SIGNS | JOINERS | AT_WORDS | COMMON_ENDS


class _ParsedWord(NamedTuple):
    """A word as the rules see it."""

    bare: str
    # Number of digits that the word stands for. Those of a magnitude (`thousand`) count only if all numbers are
    # redacted.
    digits: int
    magnitude: int
    # A single digit that was spoken or written alone.
    is_single: bool


class Redactor:
    """Redacts words for one set of options."""

    def __init__(self, kinds: Sequence[str], names: Sequence[str]) -> None:
        numbers = [MIN_DIGITS[kind] for kind in kinds if kind in MIN_DIGITS]
        self._least = min(numbers, default=0)
        self._all_numbers = "numbers" in kinds
        self._emails = EMAIL in kinds
        self._names = frozenset(tuple(map(_bare, normalize("NFC", name).split())) for name in names)
        self._name_words = frozenset(word for name in self._names for word in name)
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)

    def settled(self, words: Sequence[TimedWord]) -> int:
        """How many of the first words are not touched by any words that may follow."""
        for count in range(len(words) - 1, 0, -1):
            if len(words) - count > MAX_HELD:
                return len(words)
            if not self._may_join_redaction(words[count].text) and not self._may_join_redaction(words[count - 1].text):
                return count
        return len(words) if len(words) > MAX_HELD else 0

    def redact(self, words: Sequence[TimedWord], carry: int, *, ends: bool) -> tuple[list[TimedWord], int]:
        """The words with redactions, and the digits at their end. `carry`: the digits at the end of the words before.
        `ends`: the turn ends here, or more words follow than can be held."""
        # Words repeat in a long turn, so each text is parsed once.
        known = {text: self._parse(text) for text in {word.text for word in words}}
        parsed = [known[word.text] for word in words]
        spans, carry = self._numbers(parsed, carry, ends) if self._least else ([], 0)
        if self._emails:
            spans += _addresses(parsed)
        if self._names:
            spans += self._named(parsed)
        return _replaced(words, spans) if spans else list(words), carry

    def _parse(self, text: str) -> _ParsedWord:
        if REDACTED in text:
            # Redacted before: digits beside it belong to the redaction.
            return _ParsedWord(REDACTED, self._least, 0, is_single=True)
        bare = _bare(text)
        if bare.isalpha() and bare not in SPOKEN:
            return _ParsedWord(bare, 0, 0, is_single=False)
        written = sum(map(str.isdigit, bare))
        if written:
            is_amount = text.strip().startswith(MONEY) or text.rstrip(".,;:!?").endswith("%") or _has_thousands(bare)
            return _ParsedWord(bare, 0 if is_amount and not self._all_numbers else written, 0, written == 1)
        if bare in ONES or bare in ZEROS or bare in OTHER_DIGITS:
            return _ParsedWord(bare, 1, 0, is_single=True)
        if bare in REPEATS:
            return _ParsedWord(bare, REPEATS[bare] - 1, 0, is_single=True)
        parts = bare.split("-")
        digits = sum(_spoken_digits(part) for part in parts) if all(map(_spoken_digits, parts)) else 0
        magnitude = len(str(MAGNITUDES.get(bare, 1))) - 1
        return _ParsedWord(bare, digits, magnitude, is_single=False)

    def _may_join_redaction(self, text: str) -> bool:
        """Whether a rule may look at this word together with its neighbours."""
        bare = _bare(text)
        if bare in self._name_words or REDACTED in text:
            return True
        if self._emails and ("@" in text or len(bare) < 2 or bare in ADDRESS_WORDS):
            return True
        if not self._least and not self._emails:
            return False
        if bare in DIGIT_WORDS or not bare or any(map(str.isdigit, bare)):
            return True
        return all(part in ONES or _spoken_digits(part) for part in bare.split("-"))

    # Numbers

    def _numbers(self, parsed: list[_ParsedWord], carry: int, ends: bool) -> tuple[list[tuple[int, int]], int]:
        spans: list[tuple[int, int]] = []
        if not parsed:
            return spans, carry
        first = next((place for place, word in enumerate(parsed) if word.bare not in AT_TURN_START), len(parsed))
        last = next((place for place in range(len(parsed), 0, -1) if parsed[place - 1].bare not in AT_TURN_END), 0)
        if first == len(parsed):
            # A turn of fillers does not end a number.
            return spans, carry
        at, tail = 0, 0
        while at < len(parsed):
            if not self._digits(parsed[at]):
                at += 1
                continue
            start, end, digits = at, at + 1, self._digits(parsed[at])
            while (following := self._joined(parsed, end)) is not None:
                misheard = sum(word.bare in MISHEARD for word in parsed[end:following])
                digits, end = digits + misheard + self._digits(parsed[following]), following + 1
            leads, trails = start <= first, end >= last
            before = carry if leads else 0
            total = digits + before
            cut = ends and trails and digits >= EDGE_DIGITS and not _is_year_or_amount(parsed[start:end])
            continues = before and leads and trails and ends and total >= EDGE_DIGITS
            if total >= self._least or cut or continues:
                spans.append((start, end))
            tail = total if trails else 0
            at = end
        return spans, tail

    def _digits(self, word: _ParsedWord) -> int:
        return word.digits + (word.magnitude if self._all_numbers else 0)

    def _joined(self, parsed: list[_ParsedWord], end: int) -> int | None:
        """The next digits after a number, if nothing but fillers is between them."""
        for place in range(end, min(len(parsed), end + MAX_FILLERS + 1)):
            word = parsed[place]
            if self._digits(word):
                return place
            if word.bare == AND:
                after = parsed[place + 1] if place + 1 < len(parsed) else None
                if after is None or not self._digits(after) or _is_year(parsed[end - 1]) or _is_year(after):
                    return None
            elif word.bare in MISHEARD:
                after = parsed[place + 1] if place + 1 < len(parsed) else None
                if not (parsed[end - 1].is_single and after is not None and after.is_single):
                    return None
            elif word.bare and word.bare not in FILLERS:
                return None
        return None

    # Names

    def _named(self, parsed: list[_ParsedWord]) -> list[tuple[int, int]]:
        """Listed names, the longest first, also as a genitive."""
        spans, at = [], 0
        bare = [word.bare for word in parsed]
        while at < len(bare):
            step = 1
            for length in self._lengths if bare[at] in self._name_words else ():
                if at + length <= len(bare) and tuple(bare[at : at + length]) in self._names:
                    spans.append((at, at + length))
                    step = length
                    break
            at += step
        return spans


class RedactedStream:
    """Redacts the words of a file as they arrive."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held: list[TimedWord] = []
        self._carry = 0

    def take(self, words: Sequence[TimedWord], *, ends: bool = False) -> list[TimedWord]:
        """The words that can be shown now; `ends`: no more words come."""
        self._held += words
        count = len(self._held) if ends else self._redactor.settled(self._held)
        if not count:
            return []
        ends = ends or count == len(self._held)
        shown, self._carry = self._redactor.redact(self._held[:count], self._carry, ends=ends)
        del self._held[:count]
        return shown


def _bare(text: str) -> str:
    """A word for comparing, also without a genitive."""
    return bare_word(text).removesuffix("'s")


def _spoken_digits(word: str) -> int:
    if word in TEENS or word in TENS:
        return 2
    return 2 if word == "hundred" else int(word in ONES)


def _has_thousands(bare: str) -> bool:
    """`5,300,200`: an amount, and no number that identifies something."""
    parts = bare.split(",")
    return len(parts) > 1 and all(len(part.partition(".")[0]) == 3 for part in parts[1:])


def _is_year(word: _ParsedWord) -> bool:
    return len(word.bare) == 4 and word.bare.isdigit() and word.bare.startswith(("18", "19", "20"))


def _is_year_or_amount(parsed: list[_ParsedWord]) -> bool:
    words = [word.bare for word in parsed]
    if "hundred" in words:
        return _is_amount(words)
    if len(words) == 1 and words[0].isdigit():
        return _is_year(parsed[0])
    if len(words) not in (2, 3) or words[0] not in (*TEENS, "twenty") or words[1] not in (*TEENS, *TENS, *ZEROS):
        return False
    return len(words) == 2 or words[2] in ONES


def _is_amount(words: list[str]) -> bool:
    """`eight hundred and twenty five`: one number at most before and after `hundred`. More numbers are digits."""
    spoken = [part for word in words if word not in FILLERS | {"", AND} for part in word.split("-")]
    at = spoken.index("hundred")
    return _is_below_hundred(spoken[:at]) and _is_below_hundred(spoken[at + 1 :])


def _is_below_hundred(words: list[str]) -> bool:
    """Nothing, or one number below a hundred."""
    if len(words) == 2:
        return words[0] in TENS and words[1] in ONES
    if len(words) == 1:
        return len(words[0]) <= 2 if words[0].isdigit() else words[0] in (*ONES, *TEENS, *TENS)
    return not words


def _addresses(parsed: list[_ParsedWord]) -> list[tuple[int, int]]:
    """E-mail addresses: written ones, and `ada dot lovelace at example dot com`."""
    spans = []
    for at, word in enumerate(parsed):
        if "@" in word.bare and len(word.bare) > 1:
            start = _local_start(parsed, at) if word.bare.startswith("@") and at else at
            spans.append((start, min(len(parsed), at + 1 + word.bare.endswith("@"))))
        elif word.bare in AT_SIGNS and at and (end := _domain_end(parsed, _after_sign(parsed, at))):
            spans.append((_local_start(parsed, at), end))
    return spans


def _after_sign(parsed: list[_ParsedWord], at: int) -> int:
    """The place after an at sign, which may have a longer name."""
    following = [word.bare for word in parsed[at + 1 : at + 3]]
    if following[:1] == ["sign"]:
        return at + 2
    return at + 3 if following == ["the", "rate"] else at + 1


def _domain_end(parsed: list[_ParsedWord], at: int) -> int | None:
    """The end of a domain that begins here."""
    end, dotted = at + 1, False
    if at < len(parsed) and "." in parsed[at].bare.strip("."):
        return end
    if end < len(parsed) and parsed[end].bare in COMMON_ENDS:
        return end + 1
    while end + 1 < len(parsed) and parsed[end].bare in ("dot", "."):
        dotted = dotted or parsed[end + 1].bare in TOP_DOMAINS or len(parsed[end + 1].bare) >= 2
        end += 2
    return end if dotted else None


def _local_start(parsed: list[_ParsedWord], at: int) -> int:
    """The start of the part of an address before the at sign."""
    start = at - 1
    while start > 0:
        before = parsed[start - 1]
        if before.bare in JOINERS and start > 1:
            start -= 2
        elif _is_spelled(parsed[start]) or _is_spelled(before):
            start -= 1
        else:
            break
    return start


def _is_spelled(word: _ParsedWord) -> bool:
    """A letter or a number of a spelled address; `ada99` is a word."""
    return len(word.bare) < 2 or (word.digits > 0 and (word.bare.isdigit() or word.bare.isalpha()))


def _replaced(words: Sequence[TimedWord], spans: list[tuple[int, int]]) -> list[TimedWord]:
    """The words with every span, or chain of overlapping ones, as one word."""
    out: list[TimedWord] = []
    done = 0
    for start, end in _joined_spans(spans):
        out += words[done:start]
        lead, _, _ = _marks(words[start].text)
        _, _, mark = _marks(words[end - 1].text)
        first, last = words[start], words[end - 1]
        out.append(TimedWord(f"{lead}{REDACTED}{mark}", first.start, max(first.end, last.end), language=first.language))
        done = end
    return [*out, *words[done:]]


def _marks(text: str) -> tuple[str, str, str]:
    if REDACTED in text:
        return text.partition(REDACTED)
    return split_marks(text.strip())


def _joined_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without_hidden(words: Sequence[TimedWord]) -> list[TimedWord]:
    """The words without those that were said within a redaction of another one."""
    hidden = _joined_spans([(word.start, word.end) for word in words if is_redacted(word)])
    starts = [start for start, _ in hidden]
    shown = []
    for word in words:
        middle = (word.start + word.end) // 2
        place = bisect_right(starts, middle)
        if is_redacted(word) or not place or middle >= hidden[place - 1][1]:
            shown.append(word)
    return shown


def is_redacted(word: TimedWord) -> bool:
    return REDACTED in word.text
