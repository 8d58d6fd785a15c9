"""Inverse text normalization for German, Dutch, French, Spanish, Portuguese and Italian.

`written_forms` finds the groups of words that have another written form (numbers, ordinals, decimals, percent, money,
dates and clock times); `formatting.py` applies them to finals. One scanner reads all languages with their tables:
`RULES` at the end of this file has number words, months and currencies of each. English has rules of its own
(`english.py`). Every rule looks at a bounded number of words, so the time grows linearly.

The rules are as cautious as the English ones. Zero to nine stay words unless something beside them asks for a digit.
Articles (`ein`, `une`, `uno`) and round numbers alone (`tausend Dank`) stay words, and so do adjoining numbers that
form no known pattern. A number with a capital letter within a sentence is a name (`die Elf`). Words that can be read in
two ways are not changed, because a wrong number is worse than a number in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from unicodedata import combining, normalize

from realtime.session.english import WrittenForm, split_marks

# Words of the longest number below a million that is read: `neuf cent quatre vingt dix sept mille ...`.
MAX_NUMBER_WORDS = 7
MAX_DECIMALS = 20
MAX_DIGITS = 40
# From this value on the digits are grouped, so that years need no rule.
GROUPED_FROM = 10_000
# Words for one that are articles more often; `uno` and `eins` are numbers.
ARTICLES_ONLY = frozenset(("un", "una", "une", "um", "uma"))

# `ein Meter achtzig` stays words, as its first number does.
MEASURES = frozenset(
    "meter metern metre metres metro metros metri stunde stunden hora horas ora ore midi minuit".split()
)
# After a number and a link these keep the number a word: `treinta y tantos`, `a las once y media`.
AFTER_LINKS = frozenset(
    "tantos tantas pico poucos poucas quelques media medio cuarto meia meio mezza mezzo demi demie".split()
)
# German words with a capital letter that no ordinal counts: `am zwanzigsten Sie und ihn`.
NOT_COUNTED = frozenset("sie ihnen ihr ihre ihren ihrem ihrer ihres herr herrn frau".split())


@dataclass(frozen=True, slots=True)
class Token:
    """A word, or a part of a number with hyphens (`vingt-deux` has two)."""

    # As it was written, without punctuation; in small letters; and without accents.
    text: str
    bare: str
    folded: str
    # Index of its word, and whether the token is the first and the last one of the word.
    word: int
    is_first: bool
    is_last: bool
    # Punctuation after the word; only the last token of a word has it.
    mark: str
    # The word has a capital letter and does not begin a sentence.
    is_name: bool


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read up to the token `end` (not included)."""

    value: int
    end: int
    text: str
    # The token of a magnitude that stays a word (`5 Millionen`), or None.
    long_at: int | None = None
    is_article: bool = False
    is_round: bool = False
    is_decimal: bool = False
    # Written with digits in the text already.
    is_digits: bool = False

    @property
    def is_single(self) -> bool:
        return self.value < 10 and not self.is_decimal and self.long_at is None


def written_forms(words: Sequence[str], language: str, *, smart: bool) -> list[WrittenForm]:
    """The groups of words that have another written form, in order. Without `smart` only numbers are rewritten."""
    rules = RULES[language]
    return _Scanner(_tokens_of(words, rules), rules, smart).scan()


def is_plain(text: str, language: str) -> bool:
    """Whether this word cannot be part of a written form, whatever its neighbours are."""
    rules = RULES[language]
    bare = fold(split_marks(text.strip())[1])
    if any(map(str.isdigit, bare)) or rules.value(bare) is not None:
        return False
    parts = (bare, *bare.split("-"))
    return not any(part in rules.words or part in rules.beside for part in parts)


def _tokens_of(words: Sequence[str], rules: Rules) -> list[Token]:
    tokens = []
    begins = True
    for index, text in enumerate(words):
        _, whole, mark = split_marks(text.strip())
        whole = whole.replace("’", "'")
        parts = whole.split("-")
        if len(parts) < 2 or not all(fold(part) in rules.words for part in parts):
            parts = [whole]
        is_name, last = whole[:1].isupper() and not begins, len(parts) - 1
        for place, part in enumerate(parts):
            after = mark if place == last else ""
            lower = part.lower()
            tokens.append(Token(part, lower, fold(part), index, place == 0, place == last, after, is_name))
        begins = any(sign in mark for sign in ".!?…:")
    return tokens


class _Scanner:
    """Reads tokens from left to right.

    A rule gets the index `at` of a token. If it matches there, it adds its written forms and returns the index after
    the match (`end`); otherwise it returns None.
    """

    def __init__(self, tokens: list[Token], rules: Rules, smart: bool) -> None:
        self._tokens = tokens
        self._rules = rules
        self._smart = smart
        self._forms: list[WrittenForm] = []
        # Several rules read the number at one place: what was read is kept, and the end of the last run of digits.
        self._numbers: dict[int, tuple[int, int] | None] = {}
        self._run = 0

    def scan(self) -> list[WrittenForm]:
        at = 0
        while at < len(self._tokens):
            at = self._idiom(at) or self._ordinal(at) or self._read(at) or at + 1
        return self._forms

    # Helpers

    def _next(self, at: int) -> str:
        """The word at this place, if no punctuation is before it."""
        return self._tokens[at].folded if 0 < at < len(self._tokens) and not self._tokens[at - 1].mark else ""

    def _before(self, at: int) -> str:
        return self._tokens[at - 1].folded if 0 < at <= len(self._tokens) and not self._tokens[at - 1].mark else ""

    def _is_phrase(self, at: int, phrase: Phrase) -> bool:
        return all(self._next(at + place) == word for place, word in enumerate(phrase))

    def _pauses(self, end: int) -> bool:
        return end == len(self._tokens) or bool(self._tokens[end - 1].mark)

    def _add(self, start: int, end: int, text: str) -> None:
        self._forms.append(WrittenForm(self._tokens[start].word, self._tokens[end - 1].word + 1, text))

    def _is_whole(self, at: int, end: int) -> bool:
        return self._tokens[at].is_first and self._tokens[end - 1].is_last

    def _adjoins(self, end: int) -> bool:
        """Whether another number follows directly, so that the match is a part of something unknown."""
        word = self._next(end)
        if not word or word in self._rules.articles:
            return False
        return self._rules.value(word) is not None or word in self._rules.thousands or word[:1].isdigit()

    def _has_no_noun_after(self, end: int) -> bool:
        """Whether no noun follows here that the number before could count."""
        if self._pauses(end) or any(self._is_phrase(end, phrase) for phrase in self._rules.dayparts):
            return True
        word = self._next(end)
        if not self._rules.function_words:
            # German nouns have capital letters.
            return not self._tokens[end].is_name
        return word in self._rules.function_words or "'" in word

    def _ends_with_article(self, at: int, end: int) -> bool:
        """Whether the last word may be the article of the word after it: `im Jahr zweitausend ein Haus`."""
        rules, last = self._rules, self._tokens[end - 1]
        if end < at + 2 or not last.is_first or last.folded not in rules.articles or self._pauses(end):
            return False
        after, link, linked = self._next(end), self._tokens[end - 2].folded, self._tokens[end - 3].folded
        if after in rules.currencies and after.endswith("s"):
            # `cent un euros`
            return False
        if link == "ciento" and self._before(end - 2) != "por":
            # A hundred alone is `cien`.
            return False
        if link not in rules.cent_links or linked in rules.thousands:
            # `deux cents un`, `dois mil e um`
            return True
        # `vingt et un ans`, but not `tiene noventa y un gato`: a noun that is counted is a plural.
        is_counted = after.endswith(("s", "x")) or after in rules.months or self._has_no_noun_after(end)
        return last.folded != "uno" and not is_counted

    # Reading numbers

    def _longest(self, at: int) -> tuple[int, int] | None:
        """Value and end of the longest number that the table has here."""
        if at not in self._numbers:
            self._numbers[at] = self._find_longest(at)
        return self._numbers[at]

    def _find_longest(self, at: int) -> tuple[int, int] | None:
        rules, found, text = self._rules, None, ""
        for end in range(at, min(at + MAX_NUMBER_WORDS, len(self._tokens))):
            word = self._tokens[end].folded
            if end > at and not self._next(end):
                break
            if not rules.joint and text in rules.ambiguous:
                # `tu sei cento volte meglio`
                break
            # In a language that writes a number as one word, `vier und zwanzig` are two numbers.
            if word not in rules.words and (rules.joint or rules.value(word) is None):
                break
            text = text + rules.joint + word if text else word
            if (value := rules.value(text)) is not None:
                found = value, end + 1
        return found

    def _below_million(self, at: int) -> tuple[int, int] | None:
        rules = self._rules
        if rules.joint and self._tokens[at].folded in rules.thousands:
            read = (1, at)
        elif (longest := self._longest(at)) is None:
            return None
        else:
            read = longest
        value, end = read
        thousand = self._tokens[end].folded if end == at else self._next(end)
        if not rules.joint or thousand not in rules.thousands or not 0 < value < 1000:
            return read if end > at else None
        value, end = value * 1000, end + 1
        rest_at = end + 1 if self._next(end) in rules.thousand_links else end
        rest = self._longest(rest_at) if self._next(rest_at) else None
        if rest is None or not 0 < rest[0] < 1000 or self._next(rest[1]) in rules.thousands:
            return value, end
        return value + rest[0], rest[1]

    def _cardinal(self, at: int) -> Number | None:
        rules = self._rules
        read = self._below_million(at)
        if read is None:
            return None
        value, end = read
        is_one_word = end == at + 1
        is_article = is_one_word and self._tokens[at].folded in rules.articles and self._tokens[at].bare != "één"
        is_round = is_one_word and self._tokens[at].folded in rules.rounds
        many = rules.millions.get(self._next(end))
        if many is None or not value:
            return Number(value, end, _grouped(value, rules), None, is_article, is_round)
        rest = self._below_million(end + 1) if self._next(end + 1) else None
        if rest is not None and rest[0] >= 1000 and self._next(rest[1]) not in rules.millions:
            total = value * many + rest[0]
            return Number(total, rest[1], _grouped(total, rules))
        return Number(value * many, end + 1, _grouped(value, rules), end, is_article)

    def _decimal(self, at: int) -> Number | None:
        """`zwei Komma fünf`, `trois virgule quatorze`."""
        rules = self._rules
        whole = self._below_million(at)
        if whole is None or (sign := rules.points.get(self._next(whole[1]))) is None:
            return None
        value, end = whole
        if sign == "." and (self._tokens[at].folded in ARTICLES_ONLY or value >= GROUPED_FROM):
            # `en un punto cinco personas`; `10.000.5` cannot be read.
            return None
        digits, end = "", end + 1
        while self._next(end) and len(digits) < MAX_DECIMALS and (read := self._longest(end)) is not None:
            if read[0] >= 100 or (read[0] >= 10 and digits.strip("0")):
                break
            digits, end = digits + str(read[0]), read[1]
            if read[0] >= 10:
                break
        if not digits:
            return None
        text = f"{_grouped(value, rules)}{sign}{digits}"
        if self._next(end) in rules.millions:
            return Number(value, end + 1, text, end, is_decimal=True)
        return Number(value, end, text, is_decimal=True)

    def _digits_already(self, at: int) -> Number | None:
        """A number that the model wrote with digits."""
        text = self._tokens[at].bare
        if not text.isascii() or not text[:1].isdigit() or not text.replace(".", "").replace(",", "").isdigit():
            return None
        is_whole = text.isdigit() and len(text) < 10
        return Number(int(text) if is_whole else 0, at + 1, text, is_decimal=not is_whole, is_digits=True)

    # Rules

    def _idiom(self, at: int) -> int | None:
        for phrase in self._rules.idioms:
            if self._tokens[at].folded == phrase[0] and self._is_phrase(at + 1, phrase[1:]):
                return at + len(phrase)
        return None

    def _read(self, at: int) -> int | None:
        token = self._tokens[at]
        if not token.is_first or token.is_name:
            return None
        number = self._decimal(at) or self._cardinal(at) or self._digits_already(at)
        if number is None:
            return None
        if not self._is_whole(at, number.end) or self._ends_with_article(at, number.end):
            return number.end
        if (points_end := self._points_end(number.end)) > number.end:
            return points_end
        if self._is_vague(at, number):
            return number.end
        if self._smart:
            end = self._spoken_clock(at, number) or self._clock(at, number)
            end = end or self._percent(at, number) or self._money(at, number)
            if end is not None:
                return end
        if number.is_digits:
            return number.end
        return self._divided(at, number) or self._digits(at) or self._number(at, number)

    def _points_end(self, end: int) -> int:
        """The end of an address or a version after its first number, or decimal: `dos punto cero punto uno`."""
        while self._next(end) in self._rules.points and self._next(end + 1):
            if (read := self._below_million(end + 1)) is None:
                break
            end = read[1]
        return end

    def _divided(self, at: int, number: Number) -> int | None:
        """`hundert und zwölf`, `vier und zwanzig`: one number or two, so that all stays words."""
        rules, value, start = self._rules, number.value, number.end + 1
        if number.is_decimal or number.long_at is not None or self._next(number.end) not in rules.cent_links:
            return None
        if self._next(start) in AFTER_LINKS:
            return number.end
        second = self._below_million(start) if self._next(start) else None
        if second is None:
            return None
        unit = next((unit for unit in (1000, 100, 10) if value and value % unit == 0), 1)
        # `são dez e quinze`, `custa doze e noventa`: a clock time or a price.
        if 0 < second[0] < unit or (self._before(at) in rules.clock_verbs and second[0] < 100):
            return second[1]
        if self._before(at) in rules.betweens:
            return None
        ones_first = not rules.joint and bool(rules.thousand_links)
        if ones_first and 0 < value < 10 and second[0] in range(20, 100, 10):
            return second[1]
        # `hundert und zwanzigtausend`
        return second[1] if 100 <= unit and value < 1000 <= second[0] else None

    def _number(self, at: int, number: Number) -> int:
        before, end = self._before(at), number.end
        if number.is_article and (self._tokens[at].folded != "uno" or not self._adjoins(end)):
            # `un dos por ciento`: the article is no part of what follows.
            return end
        if self._adjoins(end):
            return self._run_end(end)
        if self._smart and 1 <= number.value <= 31 and self._is_before_month(end):
            self._add(at, end, number.text)
            return end
        stays = number.is_round or before in self._rules.roman or self._is_after_measure(at, end)
        asked = self._is_asked(at, number)
        if stays or (number.is_single and not asked):
            return end
        self._add(at, end if number.long_at is None else number.long_at, number.text)
        return end

    def _run_end(self, end: int) -> int:
        """The end of the numbers that follow here one after the other."""
        while True:
            if self._next(end) in self._rules.articles and self._adjoins(end + 1):
                end += 1
            if not self._adjoins(end):
                return end
            read = self._below_million(end)
            end = end + 1 if read is None else read[1]

    def _is_asked(self, at: int, number: Number) -> bool:
        """Whether something beside a single digit asks for it."""
        rules, before = self._rules, self._before(at)
        if self._tokens[at].folded in rules.ambiguous and before not in rules.range_from:
            # `in quale stanza sei`, `un vélo neuf à douze euros`
            return False
        # `il relit la page deux fois`
        is_heading = before in rules.headings and number.value > 0 and self._has_no_noun_after(number.end)
        return is_heading or self._is_range(at, number.end)

    def _is_before_month(self, end: int) -> bool:
        rules = self._rules
        if rules.month_links:
            return self._next(end) in rules.month_links and self._next(end + 1) in rules.months
        return self._next(end) in rules.months

    def _is_vague(self, at: int, number: Number) -> bool:
        """`zwei bis dreihundert`: the first digit belongs to the hundreds too."""
        if number.value < 100 or self._before(at) not in self._rules.ranges | self._rules.cent_links:
            return False
        if self._forms and self._forms[-1].last == self._tokens[at - 1].word:
            # The first number is written with digits: `von 35 bis 120`.
            return False
        return self._rules.numbers.get(self._before(at - 1).rstrip("-"), 10) < 10

    def _is_after_measure(self, at: int, end: int) -> bool:
        """`ein Meter achtzig`, `um metro e oitenta`; not `12 Meter fünfzig`, and not `dos horas y veinte minutos`."""
        if self._before(at) in self._rules.cent_links:
            if not self._has_no_noun_after(end):
                return False
            at -= 1
        if self._before(at) not in MEASURES:
            return False
        return not self._forms or self._forms[-1].last != self._tokens[at - 1].word

    def _is_range(self, at: int, end: int) -> bool:
        """Whether a digit stands beside a number of two digits or more: `neun bis zwölf`."""
        links = self._rules.ranges | self._rules.clock_before
        if self._before(at) in links and self._forms and self._forms[-1].last == self._tokens[at - 1].word:
            return True
        if self._next(end) not in links or not self._next(end + 1):
            return False
        mate = self._below_million(end + 1)
        return mate is not None and 10 <= mate[0] < 100 and not self._adjoins(mate[1])

    def _digits(self, at: int) -> int | None:
        """Write three or more digits that are read out one by one. Returns their end; None if they are a count."""
        rules = self._rules
        if at >= self._run:
            self._run = at
            while (self._run == at or self._next(self._run)) and self._digit(self._run) < 10:
                self._run += 1
        end = min(self._run, at + MAX_DIGITS)
        # After an article one digit more is needed: `un dos tres`.
        least = 4 if self._tokens[at].folded in rules.articles else 3
        if end - at < least or self._adjoins(end):
            return None
        if self._tokens[end - 1].folded in rules.articles and not self._pauses(end):
            return None
        digits = "".join(str(self._digit(place)) for place in range(at, end))
        if digits in "0123456789" or digits in "9876543210":
            return None
        self._add(at, end, digits)
        return end

    def _digit(self, at: int) -> int:
        """The digit that this word means; 10 if it is none."""
        return self._rules.numbers.get(self._tokens[at].folded, 10) if at < len(self._tokens) else 10

    def _ordinal(self, at: int) -> int | None:
        rules, token = self._rules, self._tokens[at]
        if not token.is_first or token.is_name:
            return None
        if self._smart and token.folded in rules.first_of_month and self._is_before_month(at + 1):
            self._add(at, at + 1, rules.first_of_month[token.folded])
            return at + 1
        if not rules.ordinal or (read := self._ordinal_number(at)) is None:
            return None
        value, end = read
        is_day = self._smart and value <= 31 and self._next(end) in rules.months
        before = rules.numbers.get(self._before(at))
        if not self._is_whole(at, end) or (not is_day and (value < 10 or before is not None)):
            return end
        if not rules.ordinal_needs_noun:
            self._add(at, end, str(value) if is_day else f"{value}{rules.ordinal}")
            return end
        if not self._next(end) or not self._tokens[end].is_name or not self._tokens[end].is_last:
            return end
        if self._tokens[end].folded in NOT_COUNTED:
            return end
        self._add(at, end + 1, f"{value}{rules.ordinal}{SPACE}{self._tokens[end].text}")
        return end + 1

    def _ordinal_number(self, at: int) -> tuple[int, int] | None:
        rules, found, text = self._rules, None, ""
        for end in range(at, min(at + 5, len(self._tokens))):
            if end > at and (not rules.joint or not self._next(end)):
                break
            text = text + rules.joint + self._tokens[end].folded if text else self._tokens[end].folded
            if (value := rules.ordinals.get(text)) is not None:
                found = value, end + 1
        return found

    def _percent(self, at: int, number: Number) -> int | None:
        for phrase in self._rules.percents:
            if number.long_at is None and self._is_phrase(number.end, phrase):
                end = number.end + len(phrase)
                if phrase[-1] in self._rules.words and self._adjoins(end):
                    # `cinquante pour cent mille habitants`
                    return self._run_end(end)
                self._add(at, end, number.text + self._rules.percent)
                return end
        return None

    def _is_percent(self, at: int) -> bool:
        return any(self._is_phrase(at, phrase) for phrase in self._rules.percents)

    def _money(self, at: int, number: Number) -> int | None:
        rules = self._rules
        sign = rules.currencies.get(self._next(number.end))
        if self._next(number.end) in rules.cents and not number.is_article and not number.is_digits:
            self._add(at, number.end, number.text)
            return number.end + 1
        if sign is None or number.long_at is not None:
            return None
        end = number.end + 1
        # `entre diez euros y veinte` are two amounts.
        has_cents = not number.is_decimal and self._before(at) not in rules.betweens
        cents = self._cents(end) if has_cents else None
        if cents is None and (number.is_article or number.is_round):
            return end
        amount = number.text
        if cents is not None:
            amount, end = f"{amount},{cents[0]:02}", cents[1]
        elif number.is_decimal and not number.is_digits and len(amount.partition(",")[2]) == 1:
            amount += "0"
        first = rules.sign_first or sign == "R$"
        self._add(at, end, f"{sign}{SPACE}{amount}" if first else f"{amount}{SPACE}{sign}")
        return end

    def _cents(self, at: int) -> tuple[int, int] | None:
        """The cents after an amount: `und zwanzig Cent`, or `fünfzig` alone."""
        rules = self._rules
        is_linked = self._next(at) in rules.cent_links
        start = at + 1 if is_linked else at
        read = self._longest(start) if self._next(start) else None
        if read is None or not 0 < read[0] < 100:
            return None
        if self._next(read[1]) in rules.cents:
            return read[0], read[1] + 1
        if self._ends_with_article(start, read[1]) or self._is_percent(read[1]):
            return None
        ends = self._pauses(read[1]) or self._next(read[1]) in rules.after_price
        # `fünf Euro und zwanzig` is doubtful; Romance languages say the cents so.
        return read if ends and read[0] >= 10 and (not is_linked or bool(rules.clock_before)) else None

    def _spoken_clock(self, at: int, number: Number) -> int | None:
        """`fünf vor zwölf`, `halb zwölf`, `las doce menos diez`: clock times that stay words."""
        rules = self._rules
        if number.is_decimal or number.value >= 30:
            return None
        if self._before(at) in rules.halves:
            return number.end
        # `Viertel nach zehn`, `cinq heures moins dix`
        if self._before(at) in rules.spoken_clock and self._before(at - 1) in rules.halves | rules.hours:
            return number.end
        if self._next(number.end) not in rules.spoken_clock:
            return None
        # `dez para as oito`, `zehn vor halb neun`
        hour_at = number.end + 1
        if self._next(hour_at) in rules.clock_before | rules.halves:
            hour_at += 1
        hour = self._longest(hour_at) if self._next(hour_at) else None
        return hour[1] if hour is not None and 1 <= hour[0] <= 30 else None

    def _clock(self, at: int, number: Number) -> int | None:
        rules = self._rules
        if number.value > 24 or number.is_decimal or number.is_digits or number.long_at is not None:
            return None
        if self._next(number.end) in rules.hours:
            return self._clock_with_hours(at, number)
        if self._before(at) not in rules.clock_before:
            return None
        start = number.end + 1 if self._next(number.end) in rules.clock_links else number.end
        minutes = self._minutes(start)
        is_strict = bool(rules.strict_hours & {self._tokens[at - 1].bare, self._tokens[max(at - 2, 0)].bare})
        if minutes is not None and (minutes[0] >= 10 or (is_strict and self._pauses(minutes[1]))):
            if self._is_time(at, start > number.end, is_strict, minutes[1]):
                self._add(at, minutes[1], rules.clock.format(hour=number.value, minute=minutes[0]))
            return minutes[1]
        if any(self._is_phrase(number.end, phrase) for phrase in rules.dayparts):
            self._add(at, number.end, number.text)
            return number.end
        return None

    def _is_time(self, at: int, is_linked: bool, is_strict: bool, end: int) -> bool:
        """Whether hour and minutes are no two numbers: `entre las nueve y diez`, `las tres y doce hombres`."""
        before = self._before(at - 1)
        if before in self._rules.betweens or self._next(end) in ("horas", "ore", "minuti"):
            return False
        if self._next(end) in self._rules.clock_links and self._adjoins(end + 1):
            # `a las cinco y veinte y cinco`
            return False
        if is_linked and (is_strict or before in self._rules.clock_verbs):
            # `a las nueve y diez personas`: words that end with s are plurals; Italian ones cannot be told from verbs.
            return self._has_no_noun_after(end) or (bool(self._rules.joint) and not self._next(end).endswith("s"))
        return self._has_no_noun_after(end)

    def _clock_with_hours(self, at: int, number: Number) -> int | None:
        """`sechs Uhr dreißig`, `um sechs Uhr`, `trois heures vingt`."""
        rules = self._rules
        minutes = self._minutes(number.end + 1)
        # `um acht Uhr zwanzig Kinder` has no minutes.
        if (
            minutes is not None
            and self._has_no_noun_after(minutes[1])
            and (minutes[0] >= 10 or self._pauses(minutes[1]))
        ):
            self._add(at, minutes[1], rules.clock.format(hour=number.value, minute=minutes[0]))
            return minutes[1]
        # `drie uur` and `trois heures` may be durations.
        if rules.strict_hours and self._before_bare(at) not in rules.strict_hours:
            return None
        self._add(at, number.end, number.text)
        return number.end + 1

    def _before_bare(self, at: int) -> str:
        return self._tokens[at - 1].bare if self._before(at) else ""

    def _minutes(self, at: int) -> tuple[int, int] | None:
        rules = self._rules
        if not self._next(at) or self._next(at) in rules.articles:
            return None
        read = self._longest(at)
        if read is None or not 1 <= read[0] <= 59 or self._adjoins(read[1]) or not self._tokens[read[1] - 1].is_last:
            return None
        # `sechs Uhr fünfzig Prozent`: the second number belongs to the word after it.
        after = self._next(read[1])
        taken = after in rules.currencies or after in rules.millions or after in rules.hours or after in rules.points
        taken = taken or self._is_percent(read[1]) or self._ends_with_article(at, read[1])
        return None if taken else read


def _grouped(value: int, rules: Rules) -> str:
    return f"{value:,}".replace(",", rules.group) if value >= GROUPED_FROM else str(value)


# Number words, months and currencies of each language

# No-break spaces: within a number and its sign, and between groups of digits.
SPACE, THIN_SPACE = "\u00a0", "\u202f"

Phrase = tuple[str, ...]


def fold(text: str) -> str:
    """Small letters without accents, for comparing number words: `fünf`, `funf`; `dreißig`, `dreissig`."""
    return "".join(c for c in normalize("NFD", text.lower().replace("ß", "ss")) if not combining(c))


@dataclass(frozen=True)
class Rules:
    """What the scanner must know of one language."""

    # The words for 0 to 999, and for 1100 to 1999 where people count in hundreds.
    numbers: dict[str, int]
    # Between the words of a number: a space, or nothing in languages that write a number as one word.
    joint: str
    thousands: frozenset[str]
    # `e` in `mil e quinhentos`.
    thousand_links: frozenset[str]
    millions: dict[str, int]
    # Words for one that are also articles, and words that stay words when they stand alone (`hundert`, `mille`).
    articles: frozenset[str]
    rounds: frozenset[str]
    # Between the parts of a decimal number, with the sign that is written.
    points: dict[str, str]
    group: str
    percents: tuple[Phrase, ...]
    percent: str
    currencies: dict[str, str]
    cents: frozenset[str]
    # Between an amount and its cents.
    cent_links: frozenset[str]
    # The sign of a currency stands before the amount.
    sign_first: bool
    months: frozenset[str]
    # `de` in `tres de mayo`.
    month_links: frozenset[str]
    # Words after a price without the word for cents: `acht Euro fünfzig pro Kilo`.
    after_price: frozenset[str]
    # Between two numbers of a range.
    ranges: frozenset[str]
    # Before two numbers with a link: `entre diez y veinte`.
    betweens: frozenset[str]
    headings: frozenset[str]
    # Words that follow a clock time or the number of a heading, and are no nouns that the number counts. German has
    # none: its nouns have capital letters.
    function_words: frozenset[str] = frozenset()
    # Digits that are other words too (`sei`, `neuf`), and the words before the first number of a range.
    ambiguous: frozenset[str] = frozenset()
    range_from: frozenset[str] = frozenset()
    ordinals: dict[str, int] = field(default_factory=dict)
    # How an ordinal is written; empty: ordinals stay words.
    ordinal: str = ""
    # The first day of a month.
    first_of_month: dict[str, str] = field(default_factory=dict)
    # A number that is written as an ordinal needs a noun after it (German).
    ordinal_needs_noun: bool = False
    # Clock times: words for the hour, words before an hour, words between hour and minutes; the written form.
    # `strict_hours` say that a clock time follows and no duration; they have accents (`à`, `às`).
    hours: frozenset[str] = frozenset()
    strict_hours: frozenset[str] = frozenset()
    clock_before: frozenset[str] = frozenset()
    clock_links: frozenset[str] = frozenset()
    # Verbs before a clock time or a price: `son las tres y veinte`.
    clock_verbs: frozenset[str] = frozenset()
    clock: str = ""
    dayparts: tuple[Phrase, ...] = ()
    # Clock times that stay words: `fünf vor zwölf`, `halb zwölf`.
    spoken_clock: frozenset[str] = frozenset()
    halves: frozenset[str] = frozenset()
    # Numbers after these words are not written with Arabic digits: centuries, kings and popes.
    roman: frozenset[str] = frozenset()
    idioms: tuple[Phrase, ...] = ()

    @cached_property
    def words(self) -> frozenset[str]:
        """All words that may be a part of a number."""
        known = {part for name in (*self.numbers, *self.ordinals) for part in name.split()}
        return frozenset(known | self.thousands)

    @cached_property
    def beside(self) -> frozenset[str]:
        """Words that may belong to a written form beside its number."""
        phrases = {part for phrase in (*self.percents, *self.dayparts, *self.idioms) for part in phrase}
        links = self.thousand_links | self.cent_links | self.clock_links | self.month_links | self.ranges
        # The word before `las` tells a clock time from two numbers.
        links |= self.clock_before
        return frozenset(
            phrases | links | {*self.currencies, *self.points, *self.millions, *self.months} | self.cents | self.hours
        )

    def value(self, text: str) -> int | None:
        """The value of a number below a million that is written as one word, or of one below 1000 in words."""
        if (value := self.numbers.get(text)) is not None or self.joint or len(text) > 60:
            return value
        for thousand in self.thousands:
            before, found, after = text.partition(thousand)
            if not found:
                continue
            many = self.numbers.get(before) if before else 1
            rest = self._rest(after)
            if many and many < 1000 and rest is not None and rest < 1000 and not (thousand == "mille" and before):
                return many * 1000 + rest
        return None

    def _rest(self, text: str) -> int | None:
        if not text:
            return 0
        for link in ("", *self.thousand_links):
            if text.startswith(link) and (value := self.numbers.get(text[len(link) :])):
                return value
        return None


def _table(pairs: Iterable[tuple[int, str]]) -> dict[str, int]:
    return {text: value for value, text in pairs}


def _list(text: str) -> list[str]:
    return fold(text).split()


def _words(text: str) -> frozenset[str]:
    return frozenset(map(fold, text.split()))


def _phrases(*texts: str) -> tuple[Phrase, ...]:
    return tuple(tuple(map(fold, text.split())) for text in texts)


# Numbers that are written as one word


def _german() -> Iterator[tuple[int, str]]:
    units = _list("null ein zwei drei vier fünf sechs sieben acht neun")
    teens = _list("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn")
    tens = _list("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
    small = [*enumerate(units), (1, "eins"), (2, "zwo"), *enumerate(teens, 10)]
    small += [(10 * ten + one, f"{units[one]}und{name}") for ten, name in enumerate(tens, 2) for one in range(1, 10)]
    small += [(10 * ten, name) for ten, name in enumerate(tens, 2)]
    yield from small
    hundreds = [(1, ""), *enumerate(units[1:], 1), *enumerate(teens[1:], 11)]
    yield from _hundreds(hundreds, "hundert", small, ("", "und"))


def _dutch() -> Iterator[tuple[int, str]]:
    units = _list("nul een twee drie vier vijf zes zeven acht negen")
    teens = _list("tien elf twaalf dertien veertien vijftien zestien zeventien achttien negentien")
    tens = _list("twintig dertig veertig vijftig zestig zeventig tachtig negentig")
    small = [*enumerate(units), *enumerate(teens, 10), *((10 * ten, name) for ten, name in enumerate(tens, 2))]
    small += [(10 * ten + one, f"{units[one]}en{name}") for ten, name in enumerate(tens, 2) for one in range(1, 10)]
    yield from small
    hundreds = [(1, ""), *enumerate(units[1:], 1), *enumerate(teens[1:], 11)]
    yield from _hundreds(hundreds, "honderd", small, ("", "en"))


def _italian() -> Iterator[tuple[int, str]]:
    units = _list("zero uno due tre quattro cinque sei sette otto nove")
    teens = _list("dieci undici dodici tredici quattordici quindici sedici diciassette diciotto diciannove")
    tens = _list("venti trenta quaranta cinquanta sessanta settanta ottanta novanta")
    small = [*enumerate(units), (1, "un"), (1, "una"), *enumerate(teens, 10)]
    for ten, name in enumerate(tens, 2):
        small.append((10 * ten, name))
        small.append((10 * ten + 1, f"{name[:-1]}un"))
        small += [(10 * ten + one, (name[:-1] if one in (1, 8) else name) + units[one]) for one in range(1, 10)]
    yield from small
    hundreds = [(1, ""), *enumerate(units[2:], 2)]
    yield from _hundreds(hundreds, "cento", small, ("",))
    yield from (
        (value, text.replace("cento", "cent", 1))
        for value, text in _hundreds(hundreds, "cento", small, ("",))
        if text.partition("cento")[2][:1] == "o"
    )


def _hundreds(
    hundreds: Iterable[tuple[int, str]], name: str, small: list[tuple[int, str]], links: Phrase
) -> Iterator[tuple[int, str]]:
    for many, prefix in hundreds:
        yield 100 * many, prefix + name
        yield from ((100 * many + rest, prefix + name + link + text) for rest, text in small if rest for link in links)


# Numbers of several words


def _french() -> Iterator[tuple[int, str]]:
    units = _list("zéro un deux trois quatre cinq six sept huit neuf")
    teens = [*_list("dix onze douze treize quatorze quinze seize"), "dix sept", "dix huit", "dix neuf"]
    small = [*enumerate(units), (1, "une"), *enumerate(teens, 10)]
    tens = [(20, "vingt"), (30, "trente"), (40, "quarante"), (50, "cinquante"), (60, "soixante")]
    for value, name in (*tens, (70, "septante"), (80, "huitante"), (80, "octante"), (90, "nonante")):
        small += [(value, name), (value + 1, f"{name} et un"), (value + 1, f"{name} et une")]
        small += [(value + one, f"{name} {units[one]}") for one in range(2, 10)]
    small += [(60 + teen, f"soixante {name}") for teen, name in enumerate(teens, 10)] + [(71, "soixante et onze")]
    small += [(80, "quatre vingts"), (80, "quatre vingt"), (81, "quatre vingt une")]
    small += [(80 + one, f"quatre vingt {name}") for one, name in enumerate((*units[1:], *teens), 1)]
    yield from small
    hundreds = [(1, ""), *((many, f"{name} ") for many, name in enumerate(units[2:], 2))]
    hundreds += [(many, f"{name} ") for many, name in enumerate(teens[1:], 11)]
    yield from ((100 * many, f"{prefix}cents") for many, prefix in hundreds if many > 1)
    yield from _hundreds(hundreds, "cent", small, (" ",))


def _french_ordinals() -> Iterator[tuple[int, str]]:
    yield from ((1, "premiere"), (2, "second"), (2, "seconde"))
    for value, text in _french():
        if 2 <= value < 100 and not text.endswith("une"):
            stem = text.removesuffix("s") if text.endswith("vingts") else text.removesuffix("e")
            stem = f"{stem}u" if stem.endswith("cinq") else f"{stem[:-1]}v" if stem.endswith("neuf") else stem
            yield value, f"{stem}ieme"


def _spanish() -> Iterator[tuple[int, str]]:
    units = _list("cero uno dos tres cuatro cinco seis siete ocho nueve")
    teens = _list("diez once doce trece catorce quince dieciséis diecisiete dieciocho diecinueve")
    tens = _list("treinta cuarenta cincuenta sesenta setenta ochenta noventa")
    ones = [(1, "un"), (1, "una"), *enumerate(units[1:], 1)]
    small = [(0, "cero"), *ones, *enumerate(teens, 10), (20, "veinte")]
    small += [(20 + one, f"veinti{name}") for one, name in ones]
    for ten, name in enumerate(tens, 3):
        small += [(10 * ten, name), *((10 * ten + one, f"{name} y {unit}") for one, unit in ones)]
    yield from small
    names = _list("doscient trescient cuatrocient quinient seiscient setecient ochocient novecient")
    yield 100, "cien"
    hundreds = [(1, "ciento"), *((many, name + end) for many, name in enumerate(names, 2) for end in ("os", "as"))]
    yield from _hundreds(hundreds, "", small, (" ",))


def _portuguese() -> Iterator[tuple[int, str]]:
    units = _list("zero um dois três quatro cinco seis sete oito nove")
    teens = _list("dez onze doze treze catorze quinze dezesseis dezessete dezoito dezenove")
    tens = _list("vinte trinta quarenta cinquenta sessenta setenta oitenta noventa")
    ones = [(1, "uma"), (2, "duas"), *enumerate(units[1:], 1)]
    small = [(0, "zero"), *ones, *enumerate(teens, 10)]
    small += [(14, "quatorze"), (16, "dezasseis"), (17, "dezassete"), (19, "dezanove")]
    for ten, name in enumerate(tens, 2):
        small += [(10 * ten, name), *((10 * ten + one, f"{name} e {unit}") for one, unit in ones)]
    yield from small
    names = _list("duzent trezent quatrocent quinhent seiscent setecent oitocent novecent")
    yield 100, "cem"
    hundreds = [(1, "cento"), *((many, name + end) for many, name in enumerate(names, 2) for end in ("os", "as"))]
    yield from _hundreds(hundreds, "", small, (" e ",))


def _german_ordinals() -> Iterator[tuple[int, str]]:
    odd = {1: "erst", 2: "zweit", 3: "dritt", 7: "siebt", 8: "acht"}
    for value, text in _german():
        if 1 <= value < 100 and text != "ein":
            stem = odd.get(value) or text + ("t" if value < 20 else "st")
            yield from ((value, f"{stem}{end}") for end in ("e", "en", "er", "es", "em"))


def _dutch_ordinals() -> Iterator[tuple[int, str]]:
    odd = {1: "eerste", 3: "derde", 8: "achtste"}
    for value, text in _dutch():
        if 1 <= value < 100:
            yield value, odd.get(value) or text + ("de" if value < 20 else "ste")


_EURO_SIGNS = {"euro": "€", "euros": "€"}

RULES: dict[str, Rules] = {
    "de": Rules(
        numbers=_table(_german()),
        joint="",
        thousands=_words("tausend"),
        thousand_links=_words("und"),
        millions={"million": 10**6, "millionen": 10**6, "milliarde": 10**9, "milliarden": 10**9},
        articles=_words("ein"),
        rounds=_words("hundert tausend"),
        points={"komma": ","},
        group=".",
        percents=_phrases("prozent"),
        percent=f"{SPACE}%",
        currencies={**_EURO_SIGNS, "dollar": "$"},
        cents=_words("cent cents"),
        cent_links=_words("und"),
        sign_first=False,
        months=_words("Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember"),
        month_links=frozenset(),
        after_price=_words("pro je das die den der im am für und oder"),
        ranges=_words("bis oder"),
        betweens=_words("zwischen"),
        headings=_words("Kapitel Seite Zimmer Raum Gleis Linie Version Artikel Absatz Frage Nummer Kanal"),
        ordinals=_table(_german_ordinals()),
        ordinal=".",
        ordinal_needs_noun=True,
        hours=_words("uhr"),
        clock="{hour}:{minute:02}" + SPACE + "Uhr",
        spoken_clock=_words("vor nach"),
        halves=_words("halb viertel dreiviertel"),
        idioms=_phrases("null acht fünfzehn", "null acht fuffzehn"),
    ),
    "nl": Rules(
        numbers=_table(_dutch()),
        joint="",
        thousands=_words("duizend"),
        thousand_links=_words("en"),
        millions={"miljoen": 10**6, "miljard": 10**9},
        articles=_words("een"),
        rounds=_words("honderd duizend"),
        points={"komma": ","},
        group=".",
        percents=_phrases("procent"),
        percent="%",
        currencies={**_EURO_SIGNS, "dollar": "$"},
        cents=_words("cent"),
        cent_links=_words("en"),
        sign_first=True,
        months=_words("januari februari maart april mei juni juli augustus september oktober november december"),
        month_links=frozenset(),
        after_price=_words("per het de voor en of"),
        ranges=_words("tot of"),
        betweens=_words("tussen"),
        function_words=_words(
            "de het en of maar op in aan bij voor van met naar uit tot ga gaat is was zijn waren heb hebben had moet "
            "moeten kan ben wordt begint vertrekt komt ik je jij u hij zij ze we wij dan precies morgen niet ook"
        ),
        headings=_words("hoofdstuk pagina bladzijde kamer spoor lijn versie artikel aflevering deel vraag nummer"),
        ordinals=_table(_dutch_ordinals()),
        ordinal="e",
        first_of_month={"eerste": "1"},
        strict_hours=frozenset("om".split()),
        hours=_words("uur"),
        clock="{hour}:{minute:02}" + SPACE + "uur",
        spoken_clock=_words("voor over"),
        halves=_words("half kwart"),
        idioms=_phrases("zeven sloten"),
    ),
    "fr": Rules(
        numbers=_table(_french()),
        joint=" ",
        thousands=_words("mille mil"),
        thousand_links=frozenset(),
        millions={"million": 10**6, "millions": 10**6, "milliard": 10**9, "milliards": 10**9},
        articles=_words("un une"),
        rounds=_words("cent mille mil"),
        points={"virgule": ","},
        group=THIN_SPACE,
        percents=_phrases("pour cent"),
        percent=f"{SPACE}%",
        currencies={**_EURO_SIGNS, "dollar": "$", "dollars": "$"},
        cents=_words("centime centimes"),
        cent_links=_words("et"),
        sign_first=False,
        months=_words("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
        month_links=frozenset(),
        after_price=_words("le la les l par pour et ou au chacun"),
        ranges=_words("à ou"),
        betweens=_words("entre"),
        function_words=_words(
            "le la les de du des à au aux et ou mais pour par sur dans en avec chez devant je tu il elle on nous vous "
            "ils elles ce est sont était pile précises environ demain ne que qui car donc plus"
        ),
        headings=_words("chapitre page chambre salle quai ligne version article épisode tome question numéro"),
        ambiguous=_words("neuf"),
        range_from=_words("de entre"),
        ordinals=_table(_french_ordinals()),
        ordinal="e",
        first_of_month={"premier": "1er"},
        strict_hours=frozenset("à dès vers".split()),
        hours=_words("heure heures"),
        clock="{hour}" + SPACE + "h" + SPACE + "{minute:02}",
        spoken_clock=_words("moins"),
        roman=_words("louis charles henri françois philippe napoléon benoît pie"),
        idioms=_phrases(
            "son trente et un", "trente six chandelles", "quatre cents coups", "trente six du mois", "vingt dieux"
        ),
    ),
    "es": Rules(
        numbers=_table(_spanish()),
        joint=" ",
        thousands=_words("mil"),
        thousand_links=frozenset(),
        millions={"millón": 10**6, "millon": 10**6, "millones": 10**6, "billón": 10**12, "billones": 10**12},
        articles=_words("un una uno"),
        rounds=_words("cien ciento mil"),
        points={"coma": ",", "punto": "."},
        group=".",
        percents=_phrases("por ciento"),
        percent=f"{SPACE}%",
        currencies={**_EURO_SIGNS, "dólar": "$", "dolar": "$", "dólares": "$", "dolares": "$"},
        cents=_words("céntimo céntimos centavo centavos"),
        cent_links=_words("con y"),
        sign_first=False,
        months=_words(
            "enero febrero marzo abril mayo junio julio agosto septiembre setiembre octubre noviembre diciembre"
        ),
        month_links=_words("de"),
        after_price=_words("el la los las por y o cada"),
        ranges=_words("a o"),
        betweens=_words("entre"),
        function_words=_words(
            "el la los las de del a al y o pero para por en con sobre yo tú él ella nos me te se no que es son está "
            "están era hay mañana hoy"
        ),
        headings=_words("capítulo página habitación sala andén línea versión artículo episodio tomo número canal"),
        clock_before=_words("las la"),
        strict_hours=frozenset("a desde hasta sobre".split()),
        clock_links=_words("y"),
        clock_verbs=_words("son es eran era cuesta cuestan vale valen"),
        clock="{hour}:{minute:02}",
        dayparts=_phrases("de la mañana", "de la tarde", "de la noche", "de la madrugada"),
        spoken_clock=_words("menos"),
        roman=_words("siglo luis juan alfonso benedicto pío fernando león"),
        idioms=_phrases("sus trece", "las mil y una"),
    ),
    "pt": Rules(
        numbers=_table(_portuguese()),
        joint=" ",
        thousands=_words("mil"),
        thousand_links=_words("e"),
        millions={
            **dict.fromkeys(("milhão", "milhao", "milhões", "milhoes"), 10**6),
            **dict.fromkeys(("bilhão", "bilhao", "bilhões", "bilhoes"), 10**9),
        },
        articles=_words("um uma"),
        rounds=_words("cem cento mil"),
        points={"vírgula": ",", "virgula": ",", "ponto": "."},
        group=".",
        percents=_phrases("por cento"),
        percent="%",
        currencies={**_EURO_SIGNS, "real": "R$", "reais": "R$"},
        cents=_words("cêntimo cêntimos centavo centavos"),
        cent_links=_words("e"),
        sign_first=False,
        months=_words("janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro"),
        month_links=_words("de"),
        after_price=_words("o os as por e ou cada"),
        ranges=_words("a ou"),
        betweens=_words("entre"),
        function_words=_words(
            "o a os as de do da dos das ao à em no na nos nas e ou mas para por com eu ele ela nós eles elas me se não "
            "que é são está estão era há amanhã hoje"
        ),
        headings=_words("capítulo página quarto sala linha versão artigo episódio volume questão número canal"),
        first_of_month={"primeiro": "1º"},
        clock_before=_words("às as das"),
        strict_hours=frozenset("às".split()),
        clock_links=_words("e"),
        clock_verbs=_words("são é eram era custa custam custou vale"),
        clock="{hour}h{minute:02}",
        dayparts=_phrases("da manhã", "da tarde", "da noite", "da madrugada"),
        spoken_clock=_words("para"),
        roman=_words("século luís joão pio bento leão"),
        idioms=_phrases("trinta por uma linha", "mil e uma"),
    ),
    "it": Rules(
        numbers=_table(_italian()),
        joint="",
        thousands=_words("mille mila"),
        thousand_links=frozenset(),
        millions={"milione": 10**6, "milioni": 10**6, "miliardo": 10**9, "miliardi": 10**9},
        articles=_words("un uno una"),
        rounds=_words("cento mille"),
        points={"virgola": ","},
        group=".",
        percents=_phrases("per cento", "percento"),
        percent="%",
        currencies={"euro": "€", "dollaro": "$", "dollari": "$"},
        cents=_words("centesimo centesimi"),
        cent_links=_words("e"),
        sign_first=False,
        months=_words("gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre"),
        month_links=frozenset(),
        after_price=_words("il la per e o l'uno ciascuno"),
        ranges=_words("a o"),
        betweens=_words("tra fra"),
        function_words=_words(
            "il lo la i gli le di del della da dal a al alla in nel nella e o ma per con su io lui lei noi ci mi ti si "
            "non che è sono era c'è domani oggi"
        ),
        headings=_words("capitolo pagina camera stanza sala binario linea versione articolo episodio numero canale"),
        clock_before=_words("alle le dalle delle ore"),
        strict_hours=frozenset("alle dalle".split()),
        clock_links=_words("e"),
        clock_verbs=_words("sono erano costa costano"),
        ambiguous=_words("sei"),
        range_from=_words("da dal dalle tra fra"),
        clock="{hour}:{minute:02}",
        dayparts=_phrases("di mattina", "del mattino", "di sera", "del pomeriggio", "di notte"),
        spoken_clock=_words("meno"),
        roman=_words("secolo luigi pio leone giovanni benedetto carlo"),
        idioms=_phrases("un quarantotto", "mille e una"),
    ),
}
