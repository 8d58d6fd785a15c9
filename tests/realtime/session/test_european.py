"""Numbers, money, dates and times of German, French, Spanish, Portuguese, Italian and Dutch, as people write them.

The table has the language, what was said and how it is written; `~` is a no-break space, `^` a thin one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.session.european import RULES, SPACE, THIN_SPACE, is_plain
from realtime.session.events import TimedWord
from realtime.session.formatting import Final, format_final, settled_words
from realtime.session.settings import make_formatting

TABLE = Path(__file__).with_name("european_sentences.tsv")
SENTENCES = [
    tuple(line.replace("~", SPACE).replace("^", THIN_SPACE).split("\t")) for line in TABLE.read_text().splitlines()
]
LEAST = {"de": 40, "fr": 40, "es": 40, "pt": 20, "it": 20, "nl": 20}


def timed(text: str) -> list[TimedWord]:
    return [
        TimedWord(part, 100 * at, 100 * at + 90, ((f" {part}".encode(), -0.5),), 0.5)
        for at, part in enumerate(text.split(" "))
    ]


def final(text: str, language: str, *, numerals: bool = False) -> Final:
    formatting = make_formatting(smart=not numerals, numerals=numerals, language=language)
    return format_final(text, timed(text), formatting)


def test_the_table_is_long_enough() -> None:
    counted = Counter(language for language, _, _ in SENTENCES)
    assert set(counted) == set(RULES) and all(counted[code] >= least for code, least in LEAST.items())


@pytest.mark.parametrize(("language", "said", "written"), SENTENCES)
def test_a_sentence_is_written_as_people_write_it(language: str, said: str, written: str) -> None:
    formatted = final(said, language)
    assert formatted.text == written and formatted.raw == said
    assert " ".join(word.text for word in formatted.words) == written


@pytest.mark.parametrize(("language", "said", "written"), SENTENCES)
def test_written_text_is_not_changed_again(language: str, said: str, written: str) -> None:
    assert final(written, language).text == written


@given(st.sampled_from(list(RULES)), st.data())
@settings(max_examples=150, deadline=None)
def test_every_word_keeps_a_time_and_its_tokens(language: str, data: st.DataObject) -> None:
    known = [word for code, said, _ in SENTENCES if code == language for word in said.split()]
    said = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=40))
    words = timed(" ".join(said))
    formatted = final(" ".join(said), language)
    times = [(word.start, word.end) for word in formatted.words]
    assert times == sorted(times) and all(start < end for start, end in times)
    assert [c for word in formatted.words for c in word.chances] == [c for word in words for c in word.chances]


@pytest.mark.parametrize("language", list(RULES))
def test_every_number_word_is_read_as_its_value(language: str) -> None:
    """All spellings below 1000, and years; articles and round numbers stay words."""
    rules = RULES[language]
    for text, value in rules.numbers.items():
        if value >= 10 and text not in rules.rounds:
            assert final(text, language).text == str(value), text


def test_merged_words_have_the_times_of_all_their_words() -> None:
    merged = final("Das kostet acht Euro fünfzig pro Kilo.", "de").words[2]
    assert (merged.text, merged.start, merged.end) == (f"8,50{SPACE}€", 200, 490)


def test_numerals_are_numbers_only() -> None:
    said = "Sie zahlt fünfundzwanzig Euro um sechs Uhr dreißig am dritten Mai."
    assert final(said, "de", numerals=True).text == "Sie zahlt 25 Euro um sechs Uhr 30 am dritten Mai."


def test_no_rule_crosses_the_end_of_a_sentence() -> None:
    assert final("Es waren hundert. Zwanzig Leute kamen.", "de").text == "Es waren hundert. 20 Leute kamen."
    assert final("Il est dix heures. Trente personnes.", "fr").text == "Il est 10 heures. 30 personnes."


def test_a_number_is_not_divided_between_two_results() -> None:
    formatting = make_formatting(smart=True, language="fr")
    assert settled_words(timed("nous avons dit quatre vingt dix"), formatting) == 2
    spanish = make_formatting(smart=True, language="es")
    assert settled_words(timed("vienen todos entre las nueve"), spanish) == 2
    assert is_plain("livre", "fr") and not is_plain("vingt-deux", "fr") and not is_plain("zweitausendzwei", "de")


@pytest.mark.parametrize("language", list(RULES))
def test_hostile_words_take_bounded_time(language: str) -> None:
    """Endless numbers, hyphens and long words: the text comes back, and nothing is raised."""
    rules = RULES[language]
    number = next(text for text, value in rules.numbers.items() if value == 20)
    thousand = next(iter(rules.thousands))
    for said in (f"{number} " * 500, f"{thousand} " * 500, "-".join([number] * 500), thousand * 5000, "9" * 5000):
        assert final(said.strip(), language).raw == said.strip()
