"""Final text as people write it: the table of sentences, times of words, parts of long texts, bounds of the options."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from realtime.dialects.base import SessionFacts, encode_json
from realtime.dialects.openai import OpenAIDialect
from realtime.session.core import Session
from realtime.session.english import is_plain
from realtime.session.events import Commit, Completed, Configure, TimedWord
from realtime.session.formatting import (
    MAX_FINAL_HITS,
    MAX_FORMATTED_WORDS,
    FinalFormatter,
    ends_sentence,
    format_final,
    format_words,
    mask,
    paragraph_end,
    search_words,
    sentence_parts,
    sentences_of,
    settled_words,
)
from realtime.session.settings import MAX_TERM_CHARACTERS, MAX_TERMS, Formatting, Settings, make_formatting
from realtime.session.turns import MAX_FORMATTED_SECONDS, MAX_FORMATTED_TURN_WORDS
from tests.realtime.session.test_core import RATE, Driver, append, counter, word

TABLE = Path(__file__).with_name("english_sentences.tsv")
SENTENCES = [tuple(line.split("\t")) for line in TABLE.read_text().splitlines()]
SMART = make_formatting(smart=True, profanity_filter=True)


def timed(text: str, language: str = "") -> list[TimedWord]:
    return [
        TimedWord(part, 100 * at, 100 * at + 90, ((f" {part}".encode(), -0.5),), 0.5, language)
        for at, part in enumerate(text.split())
    ]


def formatted(text: str, formatting: Formatting = SMART) -> str:
    return format_final(text, timed(text), formatting).text


def test_the_table_is_long_enough() -> None:
    assert len({said for said, _ in SENTENCES}) >= 200


@pytest.mark.parametrize(("said", "written"), SENTENCES)
def test_a_sentence_is_written_as_people_write_it(said: str, written: str) -> None:
    final = format_final(said, timed(said), SMART)
    assert final.text == written and final.raw == said
    assert " ".join(word.text for word in final.words) == written


@pytest.mark.parametrize(("said", "written"), SENTENCES)
def test_written_text_is_not_changed_again(said: str, written: str) -> None:
    assert formatted(written) == written


@given(st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_finals_that_are_cut_at_sentences_give_the_same_text(chosen: list[Any], data: st.DataObject) -> None:
    """A final with several sentences, and finals with one sentence each, have the same text."""
    ended = [said if ends_sentence(said.split()[-1]) else said + "." for said, _ in chosen]
    assert formatted(" ".join(ended)) == " ".join(map(formatted, ended))


@given(st.lists(st.sampled_from([word for said, _ in SENTENCES for word in said.split()]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_every_word_keeps_a_time_inside_the_turn(said: list[str]) -> None:
    words = timed(" ".join(said))
    final = format_final(" ".join(said), words, SMART)
    times = [(word.start, word.end) for word in final.words]
    assert times == sorted(times) and all(start < end for start, end in times)
    assert all(0 <= start and end <= words[-1].end for start, end in times)
    # No token is lost, so log-probabilities are those of the text before.
    assert [chance for word in final.words for chance in word.chances] == [c for word in words for c in word.chances]
    assert " ".join(word.text for word in final.words) == final.text


def test_a_merged_word_has_the_times_and_confidence_of_its_words() -> None:
    final = format_final("it took twenty five minutes", timed("it took twenty five minutes"), SMART)
    merged = final.words[2]
    assert (merged.text, merged.start, merged.end, merged.confidence) == ("25", 200, 390, 0.5)


def test_numerals_are_numbers_only() -> None:
    numerals = make_formatting(numerals=True)
    said = "We paid twenty five dollars at three thirty on May fifth."
    assert formatted(said, numerals) == "We paid 25 dollars at three thirty on May fifth."


def test_another_language_is_not_changed_by_english_rules() -> None:
    said = "Die Sonne scheint, ten twenty"
    assert format_final(said, timed(said, "de"), SMART).text == said


def test_a_language_without_rules_is_left_as_it_is() -> None:
    said = "To kosztuje twenty five złotych"
    assert format_final(said, timed(said, "pl"), SMART).text == said


def test_the_language_of_the_client_comes_before_that_of_the_words() -> None:
    """A model that translates reports the spoken language, and its text is English."""
    said = "It costs twenty five euros"
    assert format_final(said, timed(said, "de"), replace(SMART, language="en")).text == "It costs €25"
    german = "Es kostet fünfundzwanzig Euro"
    assert format_final(german, timed(german), replace(SMART, language="de")).text == "Es kostet 25\u00a0€"


def test_numbers_that_redaction_cannot_read_are_not_written_with_digits() -> None:
    said = "Meine Karte ist vier eins eins eins"
    asked = make_formatting(smart=True, redact=["card"])
    assert format_final(said, timed(said, "de"), asked).text == said


def test_each_word_follows_the_rules_of_its_language() -> None:
    words = [*timed("twenty five dogs,", "en"), *timed("vierundzwanzig Hunde", "de")]
    assert format_words(words, SMART)[0].split() == ["25", "dogs,", "24", "Hunde"]


def test_text_without_a_change_stays_as_the_model_wrote_it() -> None:
    final = format_final("  odd   spaces ", timed("odd spaces"), SMART)
    assert final.text == final.raw == "  odd   spaces "


def test_words_are_replaced_and_left_out() -> None:
    options = make_formatting(smart=True, replace=[("new york", "NYC"), ("um", ""), ("twenty five", "XXV")])
    assert formatted("Um, New York, um has twenty five bridges.", options) == "NYC, has XXV bridges."
    # A term does not cross the end of a sentence.
    assert formatted("It is new. York is old.", options) == "It is new. York is old."


def test_a_redacted_word_is_not_replaced() -> None:
    assert formatted("It is [REDACTED], yes.", make_formatting(replace=[("redacted", "x")])) == "It is [REDACTED], yes."


def test_a_search_finds_every_place_with_its_times() -> None:
    options = make_formatting(search=["new york", "York", "absent"])
    found = dict(search_words(timed("New York, I said new york."), options))
    assert [(hit.start, hit.end, hit.snippet) for hit in found["new york"]] == [
        (0, 190, "New York,"),
        (400, 590, "new york."),
    ]
    assert len(found["York"]) == 2 and found["absent"] == []


def test_terms_of_a_search_that_are_the_same_words_are_one() -> None:
    assert make_formatting(search=["the", "The", "the,", "new York", "New  York"]).search == ("the", "new York")


def test_a_search_does_not_multiply_a_final() -> None:
    """Each word is in a hit of each of eight terms: the first hits are listed, and the frame has a bounded size."""
    options = make_formatting(search=[" ".join(["the"] * length) for length in range(1, 9)] * 25)
    words = tuple(timed("the " * MAX_FORMATTED_WORDS))
    hits = [hit for _, hits in search_words(words, options) for hit in hits]
    assert len(hits) == MAX_FINAL_HITS and max(hit.start for hit in hits) <= 100 * (MAX_FINAL_HITS // 8)
    facts = SessionFacts("sess", 0, RATE, "m", frozenset({"m"}), lambda: "event")
    done = Completed("item", "the " * len(words), words, 0, 1, 1, 0.0)
    (shown,) = OpenAIDialect(facts).write(done, Settings(formatting=options))
    assert len(encode_json(shown)) < 40_000


def test_the_work_of_a_search_grows_with_the_words_only() -> None:
    """Calls are counted. Hits that would cross the end of a sentence cost no more than others."""

    def calls(text: str, words: int) -> int:
        options = make_formatting(search=[f"the {'the ' * length}" for length in range(8)])
        said = timed(text * words)
        search_words(said[:1], options)
        profile = cProfile.Profile()
        profile.runcall(search_words, said, options)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls("the. ", 500) < 60 * 500
    assert calls("the. ", 10 * MAX_FORMATTED_WORDS) < 60 * MAX_FORMATTED_WORDS


@pytest.mark.parametrize("word", ["Fuck", "shitty", "(bullshit)", "motherfucker!"])
def test_profanity_is_masked(word: str) -> None:
    assert mask(word).count("*") >= 3 and mask(word)[:2] == word[:2].replace(word[1], "*") or word.startswith("(")


@pytest.mark.parametrize("word", ["class", "Scunthorpe", "assess", "cocktail", "shiitake", "Dick", "passage"])
def test_innocent_words_are_not_masked(word: str) -> None:
    assert mask(word) == word


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"redact": ["pii"]}, "redact"),
        ({"search": ["x"] * (MAX_TERMS + 1)}, "search"),
        ({"names": ["x" * (MAX_TERM_CHARACTERS + 1)]}, "names"),
        ({"replace": [("a b c d e f g h i", "x")]}, "replace"),
        ({"replace": [("a", "x" * (MAX_TERM_CHARACTERS + 1))]}, "replace"),
        ({"search": [" , "]}, "search"),
        ({"search": ["\ud800"]}, "search"),
        # No word that is said is equal to what stands for a redacted one.
        ({"search": ["[REDACTED]"]}, "search"),
        ({"replace": [("([REDACTED])", "x")]}, "replace"),
        ({"names": ["x[REDACTED]"]}, "names"),
        ({"search": [f"{number:03}" + "y" * 90 for number in range(MAX_TERMS)]}, "together"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_formatting(**options)


def test_a_long_text_is_formatted_in_parts_with_the_same_result() -> None:
    said = " ".join(said if ends_sentence(said) else f"{said}." for said, _ in SENTENCES)
    words = timed(said)
    parts = list(sentence_parts(words))
    assert [start for start, _ in parts[1:]] == [end for _, end in parts[:-1]] and parts[-1][1] == len(words)
    assert max(end - start for start, end in parts) <= 128
    texts = [format_words(words[start:end], SMART)[0] for start, end in parts]
    assert "".join(texts).lstrip() == format_words(words, SMART)[0].lstrip()


def test_a_result_is_not_cut_within_a_number() -> None:
    words = timed("we have seen twenty")
    assert settled_words(words, SMART) == 2
    assert settled_words(timed("twenty five hundred"), SMART) == 0
    assert is_plain("dogs") and not is_plain("twenty-five")


def test_paragraphs_end_at_pauses_speakers_and_after_many_words() -> None:
    rate = 100
    words = [*timed("One sentence. Another one."), TimedWord("Later.", 1000, 1090)]
    assert paragraph_end(words, 0, rate) == 4
    assert list(sentences_of(words, 0, 4)) == [(0, 2), (2, 4)]
    assert paragraph_end(timed("word " * 1000), 0, rate) == 200
    two = [TimedWord("Hello.", 0, 50, speaker=0), TimedWord("Hi.", 60, 90, speaker=1)]
    assert paragraph_end(two, 0, rate) == 1


def test_the_work_does_not_grow_with_the_lists_or_faster_than_the_words() -> None:
    """Calls of the rules per word, counted: a text of numbers only, which every rule looks at."""

    def calls(words: int, terms: int) -> int:
        options = make_formatting(smart=True, replace=[(f"twenty x{at}", "y") for at in range(terms)])
        said = timed("twenty five hundred and " * (words // 4))
        profile = cProfile.Profile()
        profile.runcall(format_words, said, options)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    few = calls(400, 1)
    assert calls(4000, 1) < 11 * few
    # The table of the terms is made once.
    assert calls(400, MAX_TERMS) < few + 100 * MAX_TERMS


@pytest.mark.parametrize(
    ("said", "language"),
    [
        ("oh dash", "en"),
        ("oh dash oh at oh dot", "en"),
        ("oh dash oh dot com", "en"),
        ("una", "es"),
        ("een negenhonderdtweeennegentig", "nl"),
        ("soixante juin deux trente douze trois", "fr"),
    ],
)
def test_no_words_are_read_again_and_again(said: str, language: str) -> None:
    """Calls for each word of texts that begin an address, a number or digits at every word and never end one."""
    text = " ".join((said.split() * MAX_FORMATTED_WORDS)[:MAX_FORMATTED_WORDS])
    words = timed(text, language)
    format_final(text, words[:2], SMART)
    profile = cProfile.Profile()
    profile.runcall(format_final, text, words, SMART)
    assert pstats.Stats(profile).total_calls < 260 * MAX_FORMATTED_WORDS  # type: ignore[attr-defined]


def test_a_final_is_formatted_once_for_all_who_ask() -> None:
    said = "it took twenty five minutes"
    words, finals, others = tuple(timed(said)), FinalFormatter(), FinalFormatter()
    final = finals.format(said, words, SMART)
    # The final of another session in between changes nothing.
    assert others.format(said, tuple(timed(said, "de")), SMART).text == said
    assert finals.format(said, words, SMART) is final
    assert finals.format(said, words, Formatting()).text == said
    assert finals.format(said, tuple(timed(said, "de")), SMART).text == said


def test_a_formatted_turn_of_very_fast_speech_is_ended_after_a_number_of_words() -> None:
    drive = Driver(Session(Settings(turn_detection=None, formatting=SMART), RATE, counter()))
    drive(append(60.0))
    drive(*(word("twenty", at * 0.05, at * 0.05 + 0.04) for at in range(MAX_FORMATTED_TURN_WORDS + 10)))
    (done,) = [event for event in drive.sent if isinstance(event, Completed)]
    assert len(done.words) <= MAX_FORMATTED_TURN_WORDS + 1 < MAX_FORMATTED_WORDS


@pytest.mark.parametrize(
    ("formatting", "finals"),
    [(SMART, 1), (make_formatting(redact=["card"]), 1), (make_formatting(search=["well"]), 1), (Formatting(), 0)],
)
def test_the_work_for_one_final_is_bounded(formatting: Formatting, finals: int) -> None:
    drive = Driver(Session(Settings(turn_detection=None, formatting=formatting), RATE, counter()))
    drive(append(1.0))
    for second in range(MAX_FORMATTED_SECONDS + 2):
        drive(append(1.0), word("well", second, second + 0.5))
    done = [event for event in drive.sent if isinstance(event, Completed)]
    assert len(done) == finals and all(event.goes_on for event in done)


@pytest.mark.parametrize(
    ("words", "is_formatted"), [(MAX_FORMATTED_WORDS - 60, True), (4 * MAX_FORMATTED_WORDS, False)]
)
def test_formatting_that_is_turned_on_in_a_long_turn(words: int, is_formatted: bool) -> None:
    """Its final is made in one step of the event loop: a long one is redacted, but not formatted. Calls are counted."""
    sentence = "call five five five one two three four now and pay twenty dollars to him please "
    said = (sentence * (words // 15)).split()
    seconds = len(said) // 2
    drive = Driver(Session(Settings(turn_detection=None), RATE, counter()))
    drive(append(seconds), *(word(text, at * 0.5, at * 0.5 + 0.4) for at, text in enumerate(said)))
    new = Settings(turn_detection=None, formatting=make_formatting(smart=True, redact=["phone"]))
    drive(Configure(new))
    profile = cProfile.Profile()
    with profile:
        events = drive(Commit(), messages.Flushed("s", 1, seconds * RATE, False))
        (done,) = [event for event in events if isinstance(event, Completed)]
        facts = SessionFacts("sess", 0, RATE, "m", frozenset({"m"}), lambda: "event")
        (shown,) = OpenAIDialect(facts).write(done, new)
    pay = "$20" if is_formatted else "twenty dollars"
    expected = " ".join([f"call [REDACTED] now and pay {pay} to him please"] * (words // 15))
    assert shown["transcript"] == expected
    if not is_formatted:
        assert pstats.Stats(profile).total_calls < 20 * len(said)  # type: ignore[attr-defined]
