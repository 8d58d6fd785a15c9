"""Numbers from clients' texts: the checked value is the used value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.numbers import decimal_number, whole_number

# Digits of several scripts, and everything that Python's own parsers take beside digits.
LETTERS = st.text("0123456789٠١²½９.,+-_eExnaifNT \t\n\0", max_size=24)


@given(LETTERS | st.integers().map(str))
def test_a_whole_number_is_written_in_one_way_only(text: str) -> None:
    try:
        value = whole_number("n", text, 5, 48_000)
    except ValueError as error:
        assert str(error) == "'n' must be a whole number from 5 to 48000, in plain digits."
        assert text not in map(str, (5, 6, 999, 48_000))
    else:
        assert str(value) == text and 5 <= value <= 48_000


@given(LETTERS | st.floats().map(str) | st.decimals().map(str))
def test_a_decimal_number_is_finite_and_within_its_bounds(text: str) -> None:
    try:
        value = decimal_number("n", text, -1.5, 10)
    except ValueError as error:
        assert str(error) == "'n' must be a number from -1.5 to 10, in plain digits."
    else:
        assert math.isfinite(value) and -1.5 <= value <= 10 and value == float(text)
        assert text.isascii() and text == text.strip() and "_" not in text


@given(st.floats(0, 86_400))
def test_every_number_that_programs_write_is_read(value: float) -> None:
    assert decimal_number("n", repr(value), 0, 86_400) == value


@pytest.mark.parametrize("text", ["0.8", "1", ".5", "5.", "0", "1e-05", "0.30000000000000004"])
def test_ways_to_write_a_decimal_number(text: str) -> None:
    assert decimal_number("n", text, 0, 10) == float(text)


@pytest.mark.parametrize("length", [20, 5_000, 1_000_000])
def test_texts_of_any_length_are_refused_and_not_repeated(length: int) -> None:
    for read in (whole_number, decimal_number):
        with pytest.raises(ValueError, match="must be") as error:
            read("n", "1" * length, 0, 10**30)
        assert len(str(error.value)) < 120
