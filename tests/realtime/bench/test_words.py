"""Word errors: a shortest edit path over words that are written alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.bench.words import Errors, align, edit_distance, english_normaliser, error_rate, word_errors

some_words = st.lists(st.sampled_from("abc"), max_size=5)


def distance(reference: list[str], hypothesis: list[str]) -> int:
    """Edit distance by definition."""
    if not reference or not hypothesis:
        return len(reference) + len(hypothesis)
    return min(
        distance(reference[1:], hypothesis[1:]) + (reference[0] != hypothesis[0]),
        distance(reference[1:], hypothesis) + 1,
        distance(reference, hypothesis[1:]) + 1,
    )


@settings(max_examples=60, deadline=None)
@given(reference=some_words, hypothesis=some_words)
def test_an_alignment_is_complete_in_order_and_shortest(reference: list[str], hypothesis: list[str]) -> None:
    pairs = align(reference, hypothesis)
    assert [i for i, _ in pairs if i is not None] == list(range(len(reference)))
    assert [j for _, j in pairs if j is not None] == list(range(len(hypothesis)))
    shortest = distance(reference, hypothesis)
    assert word_errors(reference, hypothesis).total == edit_distance(reference, hypothesis) == shortest


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("", "", Errors()),
        ("one two three", "one two three", Errors(hits=3)),
        ("one two three", "", Errors(deletions=3)),
        ("", "one two", Errors(insertions=2)),
        ("one two three", "one too three", Errors(hits=2, substitutions=1)),
        ("one two three", "one three", Errors(hits=2, deletions=1)),
        ("one two three", "one two two three", Errors(hits=3, insertions=1)),
        ("the cat sat on the mat", "cat sat on a mat today", Errors(4, substitutions=1, deletions=1, insertions=1)),
    ],
)
def test_errors_are_counted(reference: str, hypothesis: str, expected: Errors) -> None:
    assert word_errors(reference.split(), hypothesis.split()) == expected


def test_error_rate_is_pooled_and_normalised() -> None:
    pairs = [("It's twenty two, Mr. Smith!", "it is 22 mister smith"), ("a b c", "a c d"), ("", "")]
    assert error_rate(pairs) == pytest.approx(2 / 8)
    assert error_rate([("", "words from nowhere")]) is None
    assert (Errors(hits=9, deletions=1) + Errors(substitutions=1)).rate == pytest.approx(2 / 11)
    assert Errors(insertions=3).rate is None


def test_both_sides_are_normalised_as_whisper_does() -> None:
    normalise = english_normaliser({"colour": "color"})
    assert normalise("Um, the COLOUR isn't twenty-five percent!") == ["the", "color", "is", "not", "25%"]
    assert normalise(" ...  ") == []
