"""Words: each letter is given away once, and sentences end where readers would say so."""

from __future__ import annotations

import pytest

from engine import messages
from realtime.session.events import TimedWord
from realtime.session.words import WordCutter, ends_sentence


def test_cutter_gives_each_letter_once_whatever_the_deltas() -> None:
    cutter = WordCutter()
    assert cutter.cut_words(" He", [], 0) == []
    assert cutter.take_loose() == " He"
    assert cutter.take_loose() == ""
    (piece,) = cutter.cut_words("llo wor", [messages.Word("Hello", 0, 10)], 100)
    assert (piece.fresh, piece.continues, piece.word) == ("llo", True, TimedWord("Hello", 100, 110))
    assert cutter.cut_loose() == " wor" and cutter.cut_loose() == ""


def test_cutter_takes_what_there_is_for_a_word_that_is_not_in_the_text() -> None:
    cutter = WordCutter()
    (piece,) = cutter.cut_words(" 5", [messages.Word("five", 0, 10)], 0)
    assert piece.fresh == " 5" and cutter.cut_loose() == ""


@pytest.mark.parametrize(
    ("text", "ends"),
    [("It works.", True), ('"Really?"', True), ("Wait...", False), ("Well, ", False), ("", False), ("So …", False)],
)
def test_sentences_end_where_readers_would_say_so(text: str, ends: bool) -> None:
    assert ends_sentence(text) is ends
