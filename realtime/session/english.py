"""English inverse text normalization: rewrites spoken numbers, dates, times, money and addresses in written form.

`written_forms` takes a list of words and returns the groups of words that have another written form; `formatting.py`
applies them to finals. It is a scanner with one rule per kind: every rule looks at a bounded number of words, so the
time grows linearly. It has no state, and knows nothing of audio, sessions and clients.

The rules are cautious. Words from zero to nine stay words unless something beside them asks for a digit (a percent
sign, money, a clock time, a date, a heading such as `chapter`). Adjoining numbers that do not form a known pattern stay
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Punctuation that is removed around a word before it is compared.
LEADING, TRAILING = "\"'([{“‘«¿¡", "\"')]}”’»,.;:!?…"

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ONES = {word: value for value, word in enumerate(_ONES)}
TEENS = {word: value for value, word in enumerate(_TEENS, start=10)}
TENS = {word: value for value, word in zip(range(20, 100, 10), _TENS, strict=True)} | {"fourty": 40}
MAGNITUDES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Magnitudes that stay a word after a short number: `5 million`.
LONG_MAGNITUDES = ("million", "billion", "trillion")
ZEROS = ("oh", "o", "zero")
REPEATS = {"double": 2, "triple": 3}
NUMBER_WORDS = frozenset((*ONES, *TEENS, *TENS, *MAGNITUDES, "hundred"))

_ORDINAL_ONES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_ORDINAL_TEENS = (
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
)
ORDINAL_ONES = {word: value for value, word in enumerate(_ORDINAL_ONES, start=1)}
ORDINALS = (
    ORDINAL_ONES
    | {word: value for value, word in enumerate(_ORDINAL_TEENS, start=10)}
    | {word[:-1] + "ieth": value for word, value in TENS.items()}
)
DECADES = {word[:-1] + "ies": value for word, value in TENS.items()}
# After a number these words mean a decade, a fraction or a vague amount: the number stays a word.
PLURALS = frozenset(
    (
        *("hundreds", "thousands", "millions", "billions", "dozen", "dozens", "score", "halves", "thirds", "quarters"),
        *(word + "s" for word in ORDINALS if word not in ("first", "second")),
        *DECADES,
        *(word + "s" for word in (*_ONES, *_TEENS)),
    )
)

MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
# Months that are also other words.
DOUBTFUL_MONTHS = ("march", "may", "august")
# Before a number that may be a year.
YEAR_CONTEXT = frozenset(
    (
        *MONTHS,
        *("in", "since", "year", "years", "of", "from", "until", "till", "before", "after", "during", "by", "spring"),
        *("summer", "autumn", "fall", "winter", "around", "circa", "early", "late", "mid", "ad", "bc"),
    )
)
CLOCK_CONTEXT = frozenset(("at", "until", "till", "around"))
MERIDIEMS = {"am": "AM", "pm": "PM", "a.m": "a.m", "p.m": "p.m"}
# A single digit after one of these is written as a digit.
HEADINGS = frozenset(
    (
        *("chapter", "page", "section", "figure", "table", "version", "step", "room", "gate", "flight", "route"),
        *("highway", "channel", "channels", "platform", "article", "paragraph", "verse", "lesson", "episode"),
        *("volume", "level", "exit", "unit", "apartment", "suite", "terminal", "line", "item", "question"),
    )
)
CURRENCIES = {"dollar": "$", "dollars": "$", "euro": "€", "euros": "€"}
POSSESSIVES = ("my", "your", "his", "her", "our", "their", "its")
CENTS = frozenset(("cent", "cents"))
TOP_DOMAINS = frozenset("com org net edu gov io co uk de fr ai dev info us ca au eu ch nl app tv".split())
ADDRESS_MARKS = {"dot": ".", "underscore": "_", "dash": "-", "hyphen": "-"}
ADDRESS_CONTEXT = frozenset(("email", "e-mail", "emails", "mail", "address", "write", "contact"))
# Words that no address begins with.
NOT_IN_ADDRESSES = frozenset(
    (
        *("the", "a", "an", "this", "that", "these", "those", "and", "or", "of", "is", "was", "my", "your", "our"),
        *("at", "in", "on", "to", "for", "from", "with", "one", "every", "each", "some", "any", "with", "by", "dot"),
    )
)

ADDRESS_SECONDS = frozenset((*ADDRESS_MARKS, "at"))
# Words that a match may begin with, other than addresses and digits.
FIRST_WORDS = frozenset((*NUMBER_WORDS, *ORDINALS, *MONTHS, *REPEATS, *ZEROS, "a"))
# All words that the rules know.
RULE_WORDS = FIRST_WORDS | PLURALS | ADDRESS_SECONDS | TOP_DOMAINS | HEADINGS | CLOCK_CONTEXT | CENTS
RULE_WORDS |= {*CURRENCIES, *MERIDIEMS, "p", "m", "and", "or", "to", "point", "percent", "per", "cent", "of", "o'clock"}


@dataclass(frozen=True, slots=True)
class WrittenForm:
    """The words from index `first` up to `last` (not included) are written as `text`, without spaces."""

    first: int
    last: int
    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """A word, or a part of a word with hyphens (`twenty-five` has two), in small letters without punctuation."""

    bare: str
    # Index of its word, and whether the token is the first and the last one of the word.
    word: int
    is_first: bool
    is_last: bool
    # Punctuation after the word; only the last token of a word has it.
    mark: str
    # The word begins with a capital letter, or begins a sentence.
    is_capital: bool
    begins: bool


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read up to the token `end` (not included)."""

    value: int
    end: int
    # Its written form, without a currency sign; `long` is a magnitude that stays a word.
    text: str
    long: str = ""
    # The token where `long` stands.
    long_at: int = 0
    # Written with digits in the text already.
    is_digits: bool = False
    is_decimal: bool = False


def split_marks(text: str) -> tuple[str, str, str]:
    """The punctuation before a word, the word, and the punctuation after it."""
    core = text.lstrip(LEADING)
    lead = text[: len(text) - len(core)]
    bare = core.rstrip(TRAILING)
    return lead, bare, core[len(bare) :]


def ordinal(value: int) -> str:
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value}{ending}"


def is_plain(text: str) -> bool:
    """Whether this word cannot be part of a written form, whatever its neighbours are."""
    bare = split_marks(text.strip())[1].lower()
    return not any(map(str.isdigit, bare)) and not any(part in RULE_WORDS for part in (bare, *bare.split("-")))


def tokens_of(words: Sequence[str]) -> list[Token]:
    tokens = []
    begins = True
    for index, text in enumerate(words):
        _, bare, mark = split_marks(text.strip())
        lower = bare.lower().replace("’", "'")
        parts = lower.split("-")
        if len(parts) < 2 or not all(part in NUMBER_WORDS or part in ORDINALS for part in parts):
            parts = [lower]
        last = len(parts) - 1
        for place, part in enumerate(parts):
            after = mark if place == last else ""
            tokens.append(Token(part, index, place == 0, place == last, after, bare[:1].isupper(), begins))
        begins = any(sign in mark for sign in ".!?…")
    return tokens


def written_forms(words: Sequence[str], *, smart: bool) -> list[WrittenForm]:
    """The groups of words that have another written form, in order. Without `smart` only numbers are rewritten."""
    return _Scanner(tokens_of(words), smart).scan()


class _Scanner:
    """Reads tokens from left to right.

    A rule gets the index `at` of a token. If it matches there, it adds its written forms and returns the index after
    the match (`end`); otherwise it returns None.
    """

    def __init__(self, tokens: list[Token], smart: bool) -> None:
        self._tokens = tokens
        self._smart = smart
        self._forms: list[WrittenForm] = []
        # (first token, marks) -> end of the parts of an address.
        self._runs: dict[tuple[int, tuple[str, ...]], int] = {}

    def scan(self) -> list[WrittenForm]:
        at = 0
        rules = [self._clock, self._digits, self._year, self._ordinal, self._number]
        if self._smart:
            rules = [self._address, self._date, self._day_of_month, *rules]
        while at < len(self._tokens):
            for rule in rules if self._may_begin(at) else ():
                if (end := rule(at)) is not None:
                    at = end
                    break
            else:
                at += 1
        return self._forms

    # Helpers

    def _may_begin(self, at: int) -> bool:
        """Fast path: whether a rule may match at this token. Most words begin no match."""
        token = self._tokens[at]
        if not token.is_first:
            return False
        if token.bare in FIRST_WORDS or token.bare[:1].isdigit():
            return True
        return self._smart and not token.mark and self._bare(at + 1) in ADDRESS_SECONDS

    def _bare(self, at: int) -> str:
        return self._tokens[at].bare if 0 <= at < len(self._tokens) else ""

    def _before(self, at: int) -> str:
        """The word before a token, if no punctuation is between them."""
        return self._tokens[at - 1].bare if at > 0 and not self._tokens[at - 1].mark else ""

    def _is_open(self, at: int) -> bool:
        """Whether the token before this one continues into this one: there is one, and no punctuation between."""
        return 0 < at < len(self._tokens) and not self._tokens[at - 1].mark

    def _next(self, end: int) -> str:
        """The word that adjoins a match which ends before `end`."""
        return self._tokens[end].bare if self._is_open(end) else ""

    def _is_whole(self, end: int) -> bool:
        return self._tokens[end - 1].is_last

    def _add(self, start: int, end: int, text: str) -> None:
        self._forms.append(WrittenForm(self._tokens[start].word, self._tokens[end - 1].word + 1, text))

    def _adjoins_number(self, end: int) -> bool:
        """Whether another number follows directly, so that the match is a part of something unknown."""
        word = self._next(end)
        return word in NUMBER_WORDS or word in ORDINALS or word in PLURALS or word in ("oh", "point")

    # Reading numbers

    def _below_hundred(self, at: int) -> tuple[int, int] | None:
        """Value and end of a number up to 99."""
        word = self._bare(at)
        if word in TEENS:
            return TEENS[word], at + 1
        if word in TENS:
            following = ONES.get(self._next(at + 1), 0)
            return (TENS[word] + following, at + 2) if following else (TENS[word], at + 1)
        return (ONES[word], at + 1) if word in ONES else None

    def _below_thousand(self, at: int, between: bool) -> tuple[int, int] | None:
        """Value and end of a number with at most one `hundred`; also `eighteen hundred`."""
        read = self._below_hundred(at)
        if read is None or read[0] == 0 or self._next(read[1]) != "hundred":
            return read
        value, end = read[0] * 100, read[1] + 1
        rest_at = end
        if self._next(end) == "and":
            # `between one hundred and two hundred` has two numbers.
            if between or not self._is_open(end + 1):
                return value, end
            rest_at = end + 1
        elif not self._is_open(end):
            return value, end
        rest = self._below_hundred(rest_at)
        if rest is None or rest[0] == 0 or self._next(rest[1]) == "hundred":
            return value, end
        return value + rest[0], rest[1]

    def _cardinal(self, at: int) -> Number | None:
        """A whole number in words, with thousands and more."""
        between = self._before(at) == "between" or (self._before(at - 1) == "between" and bool(self._before(at)))
        lone = self._bare(at) == "a" and self._next(at + 1) in ("hundred", "thousand")
        if lone:
            return self._with_article(at)
        total, end, smallest, last = 0, at, 10**15, (0, 0)
        while True:
            start = end
            if total and self._next(end) == "and" and not between and self._is_open(end + 1):
                start = end + 1
            if total and not self._is_open(start):
                break
            part = self._below_thousand(start, between)
            if part is None or (start != end and part[0] >= 100):
                break
            magnitude = MAGNITUDES.get(self._next(part[1]), 1)
            if magnitude >= smallest or (part[0] >= 1000 and magnitude > 1) or (total and part[0] == 0):
                break
            if total and magnitude == 1 and part[0] < 100 and start == end and smallest > 1000:
                # `two million five` is no number that people say.
                break
            last = (part[0], part[1])
            total, end = total + part[0] * magnitude, part[1] + (magnitude > 1)
            smallest = magnitude
            if magnitude == 1:
                break
        if end == at:
            return None
        word = self._bare(end - 1)
        if word in LONG_MAGNITUDES and total == last[0] * MAGNITUDES[word]:
            return Number(total, end, f"{last[0]:,}", word, end - 1)
        plain = 2000 < total < 2100 or (self._bare(at) != "one" and 1000 <= total < 2100 and self._has_teens(at))
        return Number(total, end, str(total) if plain else f"{total:,}")

    def _has_teens(self, at: int) -> bool:
        """The number begins like `nineteen hundred`, which is written without a comma."""
        return self._bare(at) in TEENS and self._next(at + 1) == "hundred"

    def _with_article(self, at: int) -> Number | None:
        """`a hundred and twenty`; `a hundred` alone stays as it is, except before `percent`."""
        value, end = (100 if self._bare(at + 1) == "hundred" else 1000), at + 2
        rest_at = end + 1 if self._next(end) == "and" and self._is_open(end + 1) else end
        rest = self._below_hundred(rest_at) if self._is_open(rest_at) else None
        if rest is not None and rest[0] >= (1 if rest_at > end and value == 100 else 10):
            return Number(value + rest[0], rest[1], f"{value + rest[0]:,}")
        return Number(value, end, str(value)) if self._next(end) == "percent" and self._smart else None

    def _decimal(self, at: int) -> Number | None:
        """`three point one four`; `at one point five people came` is not a decimal."""
        whole = self._cardinal(at)
        if whole is None or whole.long or self._next(whole.end) != "point" or not self._is_open(whole.end + 1):
            return None
        if self._before(at) in ("at", "the") and whole.value == 1:
            return None
        end, digits = whole.end + 1, ""
        while end < len(self._tokens) and (not digits or self._is_open(end)) and len(digits) < 20:
            word = self._bare(end)
            if word in ZEROS or word in ONES:
                digits, end = digits + str(ONES.get(word, 0)), end + 1
            elif not digits and (pair := self._below_hundred(end)) is not None:
                digits, end = str(pair[0]), pair[1]
                break
            else:
                break
        if not digits:
            return None
        text = f"{whole.text}.{digits}"
        word = self._next(end)
        if word in LONG_MAGNITUDES:
            return Number(whole.value, end + 1, text, word, end, is_decimal=True)
        return Number(whole.value, end, text, is_decimal=True)

    def _digits_already(self, at: int) -> Number | None:
        """A number that the model wrote with digits, with the magnitude after it."""
        text = self._bare(at)
        if not text[:1].isdigit() or not text.replace(",", "").replace(".", "", 1).isdigit() or not text.isascii():
            return None
        long = self._next(at + 1)
        if long in LONG_MAGNITUDES:
            return Number(0, at + 2, text, long, at + 1, is_digits=True)
        return Number(0, at + 1, text, is_digits=True)

    # Rules

    def _digits(self, at: int) -> int | None:
        """Digits that are read out one by one: three or more. Seven, ten and eleven are written as phone numbers."""
        # Without the helpers: in a long row of digits each word is read many times.
        tokens, end, digits = self._tokens, at, ""
        while end < len(tokens) and (end == at or not tokens[end - 1].mark) and len(digits) < 40:
            word = tokens[end].bare
            if word in ONES or (word in ZEROS and end > at):
                digits, end = digits + str(ONES.get(word, 0)), end + 1
            elif word in REPEATS and self._next(end + 1) in (*ONES, *ZEROS):
                digits, end = digits + str(ONES.get(self._bare(end + 1), 0)) * REPEATS[word], end + 2
            elif word == "hundred" and end > at and digits[-1] != "0" and self._next(end + 1) in ONES:
                # `one eight hundred five five five ...`, but `two hundred five` is a number.
                digits, end = digits + "00", end + 1
            else:
                break
        if len(digits) < 10 and any(token.bare == "hundred" for token in tokens[at:end]):
            return None
        counts = digits == "123456789"[: len(digits)] or digits == "987654321"[-len(digits) :]
        if len(digits) < 3 or counts or not self._is_whole(end) or self._adjoins_number(end):
            return None
        if self._next(end) in ("point", "dot") or self._before(at) == "dot":
            return None
        self._add(at, end, _phone(digits) if self._smart else digits)
        return end

    def _clock(self, at: int) -> int | None:
        """`three thirty p.m.`, `at three thirty`, `three o'clock`."""
        if not self._smart:
            return None
        hour = self._below_hundred(at)
        if hour is None or not 1 <= hour[0] <= 12 or self._bare(at) in TENS:
            return None
        value, end = hour
        if self._next(end) == "o'clock":
            self._add(at, end, str(value))
            return end + 1
        minutes = self._minutes(end) if self._is_open(end) else None
        has_minutes = minutes is not None
        text = str(value)
        if minutes is not None:
            text, end = f"{value}:{minutes[0]:02}", minutes[1]
        meridiem, meridiem_end = self._meridiem(end)
        if meridiem:
            if self._before(at) in NUMBER_WORDS:
                return None
            self._add(at, end, text)
            if meridiem != self._bare(end):
                self._add(end, meridiem_end, meridiem)
            return meridiem_end
        is_time = has_minutes and self._before(at) in CLOCK_CONTEXT and not self._is_place(end)
        if is_time and not self._adjoins_number(end) and self._is_whole(end):
            self._add(at, end, text)
            return end
        return None

    def _is_place(self, at: int) -> bool:
        """Whether it is an address and no clock time: `at one twenty three Main Street`, where a name follows."""
        return (
            self._is_open(at) and self._tokens[at].is_capital and self._tokens[at].bare not in (*WEEKDAYS, *MONTHS, "i")
        )

    def _minutes(self, at: int) -> tuple[int, int] | None:
        if self._bare(at) in ("oh", "o") and self._next(at + 1) in ONES:
            return ONES[self._bare(at + 1)], at + 2
        read = self._below_hundred(at)
        return read if read is not None and 10 <= read[0] <= 59 else None

    def _meridiem(self, at: int) -> tuple[str, int]:
        word = self._next(at)
        if word in MERIDIEMS:
            # `five am I` is no clock time.
            return ("", at) if word == "am" and self._next(at + 1) == "i" else (MERIDIEMS[word], at + 1)
        if word in ("a", "p") and self._next(at + 1) == "m":
            return f"{word.upper()}M", at + 2
        return "", at

    def _read_year(self, at: int) -> tuple[int, int] | None:
        """Value and end of a year that is read as two numbers, or as two thousand and something."""
        first = self._below_hundred(at)
        if first is None or not self._is_open(first[1]):
            return None
        value, end = first
        if 11 <= value <= 20 and self._bare(at) not in ONES:
            if self._bare(end) in ("oh", "o") and self._next(end + 1) in ONES:
                return value * 100 + ONES[self._bare(end + 1)], end + 2
            second = self._below_hundred(end)
            if second is not None and second[0] >= 10:
                return value * 100 + second[0], second[1]
        number = self._cardinal(at)
        if number is not None and not number.long and 1000 <= number.value < 2100:
            return number.value, number.end
        return None

    def _year(self, at: int) -> int | None:
        first = self._below_hundred(at)
        if first is not None and 11 <= first[0] <= 20 and self._next(first[1]) in DECADES:
            self._add(at, first[1] + 1, f"{first[0] * 100 + DECADES[self._bare(first[1])]}s")
            return first[1] + 1
        if first is not None and 11 <= first[0] <= 20 and self._next(first[1]) == "hundreds":
            self._add(at, first[1] + 1, f"{first[0] * 100}s")
            return first[1] + 1
        if self._before(at) == "year" and (parted := self._parted_year(at)) is not None:
            self._add(at, parted[1], str(parted[0]))
            return parted[1]
        read = self._read_year(at)
        if read is None or self._adjoins_number(read[1]) or not self._is_whole(read[1]):
            return None
        value, end = read
        assert first is not None
        has_context = self._before(at) in YEAR_CONTEXT
        if value == 2000 and self._bare(at) == "two":
            is_year = has_context and (end == len(self._tokens) or bool(self._tokens[end - 1].mark))
        elif "hundred" in (self._bare(place) for place in range(at, end)) or self._bare(at) in ONES:
            return None
        else:
            step = value % 100 - value // 100
            is_year = has_context or not (value % 5 == 0 and 0 < step <= 10) and first[0] >= 13
        if not is_year or self._next(end) in ("percent", *CURRENCIES, *CENTS):
            return None
        self._add(at, end, str(value))
        return end

    def _ordinal_number(self, at: int) -> tuple[int, int] | None:
        """Value and end of an ordinal up to 99th."""
        word = self._bare(at)
        if word in TENS and self._next(at + 1) in ORDINAL_ONES:
            return TENS[word] + ORDINAL_ONES[self._bare(at + 1)], at + 2
        return (ORDINALS[word], at + 1) if word in ORDINALS else None

    def _ordinal(self, at: int) -> int | None:
        """Ordinals from the tenth on; `a tenth` and `one tenth` are fractions, `a thirty second break` is a number."""
        read = self._ordinal_number(at)
        if read is None:
            return None
        value, end = read
        before = self._before(at)
        doubtful = self._bare(end - 1) == "second" and before not in ("the", *POSSESSIVES)
        follows = before in ("a", "an") or before in NUMBER_WORDS
        follows = follows or (before == "and" and self._before(at - 1) in NUMBER_WORDS)
        if value < 10 or doubtful or follows or not self._is_whole(end):
            return end
        self._add(at, end, ordinal(value))
        return end

    def _number(self, at: int) -> int | None:
        number = self._decimal(at) or self._cardinal(at) or self._digits_already(at)
        if number is None:
            return None
        whole = self._ordinal_above(number)
        if whole is not None and self._is_whole(whole[1]):
            self._add(at, whole[1], ordinal(whole[0]))
            return whole[1]
        if self._smart and (end := self._percent(at, number) or self._money(at, number)) is not None:
            return end
        if number.is_digits:
            return None
        if self._adjoins_number(number.end) or not self._is_whole(number.end):
            return self._run_end(at, number)
        if self._is_vague(at, number) or self._before(at) in CURRENCIES:
            return number.end
        single = number.value < 10 and not number.is_decimal and not number.long
        if single and not (self._before(at) in HEADINGS and number.value) and not self._is_range(at, number.end):
            return number.end
        self._add(at, number.long_at if number.long else number.end, number.text)
        return number.end

    def _is_vague(self, at: int, number: Number) -> bool:
        """`two or three hundred`: the first digit belongs to the hundreds too."""
        return number.value >= 100 and self._before(at) in ("or", "to") and self._before(at - 1) in ONES

    def _is_range(self, at: int, end: int) -> bool:
        """Whether a digit stands beside a number of two digits or more: `nine to twelve`, `sixteen to nine`."""
        if self._before(at) in ("to", "or") and self._before(at - 1):
            return self._forms[-1:] != [] and self._forms[-1].last == self._tokens[at - 1].word
        if self._next(end) not in ("to", "or") or not self._is_open(end + 1):
            return False
        mate = self._below_hundred(end + 1)
        return mate is not None and mate[0] >= 10 and not self._adjoins_number(mate[1])

    def _run_end(self, at: int, number: Number) -> int:
        """The end of adjoining numbers that form no known pattern; `twenty four seven` is one."""
        if self._smart and number.value == 24 and self._next(number.end) == "seven":
            end = number.end + 1
            if not self._adjoins_number(end):
                self._add(at, end, "24/7")
                return end
        end = number.end
        while self._adjoins_number(end):
            end += 1
        return end

    def _ordinal_above(self, number: Number) -> tuple[int, int] | None:
        """`one hundred and first`: the value and end of an ordinal whose beginning was read as a number."""
        if number.value < 100 or number.is_digits or number.is_decimal or number.long:
            return None
        at = number.end + 1 if self._next(number.end) == "and" and self._is_open(number.end + 1) else number.end
        if number.value % 100 or not self._is_open(at) or (read := self._ordinal_number(at)) is None:
            return None
        return number.value + read[0], read[1]

    def _percent(self, at: int, number: Number) -> int | None:
        end = number.end
        if self._next(end) == "percent":
            end += 1
        elif self._next(end) == "per" and self._next(end + 1) == "cent":
            end += 2
        else:
            return None
        if number.long:
            return None
        self._add(at, end, f"{number.text}%")
        return end

    def _money(self, at: int, number: Number) -> int | None:
        word = self._next(number.end)
        if word in CENTS and number.value == 2 and self._before(at) in POSSESSIVES:
            return None
        if word in CENTS and not number.is_digits and not number.long:
            self._add(at, number.end, number.text)
            return number.end + 1
        if word not in CURRENCIES or self._before(at) in NUMBER_WORDS:
            return None
        end, sign = number.end + 1, CURRENCIES[word]
        if number.long:
            self._add(at, number.long_at, f"{sign}{number.text}")
            self._add(number.long_at, end, number.long)
            return end
        if number.is_decimal and len(number.text.partition(".")[2]) == 1:
            self._add(at, end, f"{sign}{number.text}0")
            return end
        cents = None if number.is_decimal else self._cents(end)
        if cents is not None:
            self._add(at, cents[1], f"{sign}{number.text}.{cents[0]:02}")
            return cents[1]
        self._add(at, end, f"{sign}{number.text}")
        return end

    def _cents(self, at: int) -> tuple[int, int] | None:
        """The cents after dollars: `and twenty cents`, or `fifty` before a pause."""
        start = at + 1 if self._next(at) == "and" and self._is_open(at + 1) else at
        read = self._below_hundred(start) if self._is_open(start) else None
        if read is None or read[0] == 0:
            return None
        if self._next(read[1]) in CENTS:
            return read[0], read[1] + 1
        pauses = read[1] == len(self._tokens) or bool(self._tokens[read[1] - 1].mark)
        return read if start == at and read[0] >= 10 and pauses else None

    def _date(self, at: int) -> int | None:
        """`march third nineteen twenty eight`, `January twenty`."""
        month = self._tokens[at]
        if month.bare not in MONTHS or not self._is_open(at + 1):
            return None
        if (year := self._whole_year(at + 1)) is not None:
            if month.bare in DOUBTFUL_MONTHS and not month.is_capital and self._before(at) not in ("in", "since", "of"):
                return None
            self._add_month(at)
            self._add(at + 1, year[1], str(year[0]))
            return year[1]
        by_rank = self._ordinal_number(at + 1)
        day = by_rank or self._below_hundred(at + 1)
        if day is None or not 1 <= day[0] <= 31 or not self._is_whole(day[1]):
            return None
        # A comma may stand before the year.
        mark = self._tokens[day[1] - 1].mark
        year = None
        if day[1] < len(self._tokens) and mark in ("", ","):
            year = self._whole_year(day[1]) or self._parted_year(day[1])
        if year is None and (self._adjoins_number(day[1]) or self._is_doubtful(month, by_rank is not None)):
            return None
        self._add_month(at)
        text = ordinal(day[0]) if by_rank else str(day[0])
        self._add(at + 1, day[1], text + ("," if year is not None and not mark else ""))
        if year is None:
            return day[1]
        self._add(day[1], year[1], str(year[0]))
        return year[1]

    def _whole_year(self, at: int) -> tuple[int, int] | None:
        year = self._read_year(at)
        if year is not None and year[0] == 2000 and self._is_open(year[1]):
            # `in May two thousand people came`
            return None
        return year if year is not None and not self._adjoins_number(year[1]) and self._is_whole(year[1]) else None

    def _parted_year(self, at: int) -> tuple[int, int] | None:
        """A year with a comma between its halves, as models write a slow speaker: `nineteen, twenty`."""
        first = self._below_hundred(at)
        if first is None or not 17 <= first[0] <= 19 or self._tokens[first[1] - 1].mark != ",":
            return None
        second = self._below_hundred(first[1])
        if second is None or second[0] < 10 or self._adjoins_number(second[1]) or not self._is_whole(second[1]):
            return None
        return first[0] * 100 + second[0], second[1]

    def _is_doubtful(self, month: Token, by_rank: bool) -> bool:
        """Whether the month may be a verb: `March first`, `may one ask`."""
        return month.bare in DOUBTFUL_MONTHS and (not by_rank or not month.is_capital or month.begins)

    def _add_month(self, at: int) -> None:
        if not self._tokens[at].is_capital:
            self._add(at, at + 1, self._tokens[at].bare.capitalize())

    def _day_of_month(self, at: int) -> int | None:
        """`the fifth of may`."""
        read = self._ordinal_number(at)
        if read is None or self._before(at) != "the" or self._next(read[1]) != "of":
            return None
        if self._next(read[1] + 1) not in MONTHS or not self._is_whole(read[1]):
            return None
        self._add(at, read[1], ordinal(read[0]))
        if self._tokens[read[1] + 1].bare in DOUBTFUL_MONTHS:
            self._add_month(read[1] + 1)
            return read[1] + 2
        return read[1] + 1

    def _address(self, at: int) -> int | None:
        """`ada dot lovelace at example dot com`, `example dot com`: an e-mail address or the name of a website."""
        local = self._atoms(at, (*ADDRESS_MARKS,))
        if local is None:
            return None
        text, end, top = local
        if self._next(end) == "at" and self._is_open(end + 1):
            domain = self._atoms(end + 1, ("dot",))
            marked = any(sign in text for sign in "._-") or any(map(str.isdigit, text))
            is_announced = self._is_announced(at)
            if domain is not None and domain[2] and (marked or is_announced):
                self._add(at, domain[1], f"{text}@{domain[0]}")
                return domain[1]
        if top and "_" not in text and "-" not in text:
            self._add(at, end, text)
            return end
        return None

    def _is_announced(self, at: int) -> bool:
        """Whether one of the last words of the sentence before this one speaks of an address."""
        for place in range(at - 1, max(-1, at - 5), -1):
            if any(sign in self._tokens[place].mark for sign in ".!?…"):
                return False
            if self._tokens[place].bare in ADDRESS_CONTEXT:
                return True
        return False

    def _atoms(self, at: int, marks: tuple[str, ...]) -> tuple[str, int, bool] | None:
        """Words with spoken punctuation between them: text, end, and whether they end with a top-level domain."""
        if not self._is_atom(at):
            return None
        end = self._atoms_end(at, marks)
        text = self._bare(at)
        for place in range(at + 1, end, 2):
            text += ADDRESS_MARKS[self._tokens[place].bare] + self._tokens[place + 1].bare
        return text, end, end > at + 1 and self._bare(end - 2) == "dot" and self._bare(end - 1) in TOP_DOMAINS

    def _atoms_end(self, at: int, marks: tuple[str, ...]) -> int:
        """Where the run of atoms from this word ends. The result is stored for every atom of the run, because each
        of them may be tried as the first one."""
        if (known := self._runs.get((at, marks))) is not None:
            return known
        end, length, atoms = at + 1, len(self._bare(at)), [at]
        while self._next(end) in marks and self._is_open(end + 1) and self._is_atom(end + 1) and length < 200:
            atoms.append(end + 1)
            length += 1 + len(self._bare(end + 1))
            end += 2
        self._runs.update(((atom, marks), end) for atom in atoms)
        return end

    def _is_atom(self, at: int) -> bool:
        word = self._bare(at)
        return word.isascii() and word.isalnum() and word not in NOT_IN_ADDRESSES and self._tokens[at].is_first


def _phone(digits: str) -> str:
    match len(digits):
        case 7:
            return f"{digits[:3]}-{digits[3:]}"
        case 10:
            return f"{digits[:3]}-{digits[3:6]}-{digits[6:]}"
        case 11 if digits[0] == "1":
            return f"1-{digits[1:4]}-{digits[4:7]}-{digits[7:]}"
    return digits
