"""Words: each letter belongs to one word, and sentences end where readers expect it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import messages
from realtime.session.events import TimedWord
from realtime.session.words import (
    WordCutter,
    ends_sentence,
    first_word,
    languages_of,
    timed_word,
    timed_words,
    token_logprobs,
    word_fields,
)


def said(delta: str, *words: messages.Word, language: str = "", no_speech: float | None = None) -> messages.Text:
    return messages.Text("s", delta, list(words), [], 0, language, no_speech)


def test_words_say_their_language_and_how_likely_nobody_spoke() -> None:
    words = timed_words(said(" Hallo du", messages.Word("Hallo", 0, 9), language="de", no_speech=0.25), 100)
    assert [(word.text, word.start, word.language, word.no_speech) for word in words] == [("Hallo", 100, "de", 0.25)]
    assert languages_of(words * 2) == ["de"] and languages_of(timed_words(said("x", messages.Word("x", 0, 1)))) == []


def test_cutter_gives_each_letter_once_whatever_the_deltas() -> None:
    cutter = WordCutter()
    assert cutter.cut_words(said(" He"), 0) == []
    assert cutter.take_partial() == " He"
    assert cutter.take_partial() == ""
    (piece,) = cutter.cut_words(said("llo wor", messages.Word("Hello", 0, 10)), 100)
    assert (piece.fresh, piece.continues, piece.word) == ("llo", True, TimedWord("Hello", 100, 110))
    assert cutter.end_partial() == " wor" and cutter.end_partial() == ""


def test_cutter_takes_what_there_is_for_a_word_that_is_not_in_the_text() -> None:
    cutter = WordCutter()
    (piece,) = cutter.cut_words(said(" 5", messages.Word("five", 0, 10)), 0)
    assert piece.fresh == " 5" and cutter.end_partial() == ""


def test_confidence_is_of_the_word_and_not_of_the_mark_behind_it() -> None:
    word = messages.Word("straße,", 160, 320, [(b" stra", -0.2), (b"\xc3\x9fe", -0.3), (b",", -4.0)])
    timed = timed_word(word, 160)
    assert timed.confidence == pytest.approx(math.exp(-0.5))
    assert word_fields(timed, 16_000) == {"word": "straße,", "start": 0.02, "end": 0.03, "confidence": 0.6065}
    assert token_logprobs([timed]) == [
        {"token": " stra", "logprob": -0.2, "bytes": list(b" stra")},
        {"token": "ße", "logprob": -0.3, "bytes": [0xC3, 0x9F, 0x65]},
        {"token": ",", "logprob": -4.0, "bytes": [0x2C]},
    ]


def test_a_model_that_tells_no_chances_is_not_sure_of_anything() -> None:
    timed = timed_word(messages.Word("hi", 0, 16))
    assert timed.confidence is None and token_logprobs([timed]) is None
    assert word_fields(timed, 16_000) == {"word": "hi", "start": 0.0, "end": 0.001}


@pytest.mark.parametrize(
    ("text", "ends"),
    [("It works.", True), ('"Really?"', True), ("Wait...", False), ("Well, ", False), ("", False), ("So …", False)],
)
def test_sentences_end_where_readers_would_say_so(text: str, ends: bool) -> None:
    assert ends_sentence(text) is ends


@given(before=st.text(" \t\n\u00a0\u3000", max_size=4), word=st.text("aé漢", min_size=1), data=st.data())
def test_the_tokens_of_a_first_word_are_the_text_however_it_is_cut(before: str, word: str, data: st.DataObject) -> None:
    """Models cut inside of letters, and some spaces are letters of several bytes."""
    spelled = (before + word).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(spelled)))))
    pieces = [spelled[start:end] for start, end in pairwise([0, *cuts, len(spelled)])]
    written = first_word(TimedWord(word, 0, 1, tuple((piece, -0.5) for piece in pieces)))
    assert b"".join(piece for piece, _ in written.chances).decode() == word
    assert all(piece for piece, _ in written.chances)
