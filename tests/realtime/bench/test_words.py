"""Word errors: an edit distance over words that are written alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.bench.words import error_rate, word_errors


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_word_errors_are_an_edit_distance(left: list[str], right: list[str]) -> None:
    errors = word_errors(left, right)
    assert errors == word_errors(right, left)
    assert abs(len(left) - len(right)) <= errors <= max(len(left), len(right))
    assert (errors == 0) == (left == right)
    assert word_errors([*left, "x"], [*right, "x"]) == errors


def test_error_rate_is_pooled_and_normalised() -> None:
    pairs = [("It's twenty two, Mr. Smith!", "it is 22 mister smith"), ("a b c", "a c d"), ("", "")]
    assert error_rate(pairs) == pytest.approx(2 / 8)
    assert error_rate([("", "words from nowhere")]) is None
