"""Punctuation and capitals between utterances, on hand-made words: the next word decides, and no word is doubled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.plan import TimedToken
from engine.runner.windowed.stability import HypothesisToken, UtteranceJoiner, before_marks, is_mark

PIECES = [b" we", b" We", b" what", b" What", b" I", b"'m", b",", b".", b"?", b" rare", b" Mary"]
TOKENS = {piece.decode(): token for token, piece in enumerate(PIECES)}
SEAMS = UtteranceJoiner(PIECES)


def heard(*pieces: str) -> list[HypothesisToken]:
    return [HypothesisToken(TOKENS[piece], 10.0 + place) for place, piece in enumerate(pieces)]


def timed(*pieces: str) -> list[TimedToken]:
    return [TimedToken(TOKENS[piece], 9.0, 9.5) for piece in pieces]


def joined(marks: list[TimedToken], new: list[HypothesisToken], pending: bool, heard_on: bool) -> str:
    kept, words = SEAMS.join(marks, new, pending, heard_on)
    said = [timed.token for timed in kept] if pending else []
    return b"".join(PIECES[token] for token in said + [word.token for word in words]).decode()


@pytest.mark.parametrize(
    ("marks", "new", "text"),
    [
        (".", [" what", " we"], " what we"),  # a pause inside a sentence is no full stop
        (".", [".", " What"], ". What"),
        (".", [",", " what"], ", what"),
        (",", [".", " We"], ". We"),
        (".", [" What", " we"], ". What we"),  # a sentence begins: the last one has ended
        (".", [" Mary"], " Mary"),  # written so in the middle of a sentence as well
        (".", [" I", "'m"], " I'm"),
    ],
)
def test_the_model_that_heard_both_sides_decides(marks: str, new: list[str], text: str) -> None:
    assert joined(timed(marks), heard(*new), pending=True, heard_on=True) == text


@pytest.mark.parametrize(
    ("marks", "new", "text"),
    [
        ([".",], [" what"], ". What"),
        (["?"], [" I", "'m"], "? I'm"),
        (["."], [" rare"], ". rare"),  # there is no token for it
        (["?"], [" what"], "? what"),
        ([","], [" what"], ", what"),
        ([], [" what"], " what"),
    ],
)  # fmt: skip
def test_without_the_end_of_the_last_utterance_its_marks_stand(marks: list[str], new: list[str], text: str) -> None:
    assert joined(timed(*marks), heard(*new), pending=True, heard_on=False) == text


@pytest.mark.parametrize("heard_on", [True, False])
def test_a_sentence_begins_behind_a_turn_that_ended_one(heard_on: bool) -> None:
    assert joined(timed("."), heard(" what"), pending=False, heard_on=heard_on) == " What"
    assert joined(timed(","), heard(" what"), pending=False, heard_on=heard_on) == " what"


def test_the_decoder_goes_on_from_words_and_from_marks_that_were_said() -> None:
    we, what, stop = TOKENS[" we"], TOKENS[" what"], TOKENS["."]
    assert SEAMS.prefix([we], timed("."), [what]) == [we, stop, what]
    assert SEAMS.prefix([we], [], [what]) == [we, what]
    assert SEAMS.prefix([], timed("."), [stop, what]) == [what], "a text does not begin with a mark"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(sorted(TOKENS)), max_size=8), st.integers(0, 8))
def test_a_mark_goes_out_with_the_word_behind_it(pieces: list[str], count: int) -> None:
    new = heard(*pieces)
    kept = before_marks(new, min(count, len(new)), PIECES)
    assert kept <= count and (kept == 0 or not is_mark(PIECES[new[kept - 1].token]))
    assert all(is_mark(PIECES[word.token]) for word in new[kept : min(count, len(new))])
