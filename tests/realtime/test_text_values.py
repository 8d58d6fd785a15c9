"""Values as text: the checked number and URL is the used one; any time can be written."""

from __future__ import annotations

import email.utils
import math
import time

import pytest
import uvicorn.server
from hypothesis import given
from hypothesis import strategies as st

from realtime.app import limit_http_dates
from realtime.text_values import (
    EARLIEST,
    LATEST,
    OtherScheme,
    decimal_number,
    http_date,
    now_text,
    web_url,
    whole_number,
)

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


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://a b/",
        "http://a/\n",
        "http://u@a/",
        "http://@a/",
        "http://a:99999/",
        "http://[::1/",
        "http://ä/",
        "",
    ],
)
def test_a_bad_web_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the URL must|not valid"):
        web_url(url)


def test_a_web_address_is_http_or_https() -> None:
    assert (web_url("https://A.example:8443/x?y").hostname, web_url("http://[::1]/").hostname) == ("a.example", "::1")
    with pytest.raises(OtherScheme):
        web_url("ftp://a.example/")


@given(st.floats(-1e18, 1e18))
def test_any_time_can_be_written(seconds: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: seconds)
        assert now_text().endswith("Z")
        assert http_date(usegmt=True) == http_date(seconds, usegmt=True)


def test_times_that_have_a_date_are_written_as_before() -> None:
    for seconds in (EARLIEST, -1, 0, 1_800_000_000.5, LATEST):
        assert http_date(seconds, usegmt=True).endswith(" GMT")
    assert http_date(0, usegmt=True) == "Thu, 01 Jan 1970 00:00:00 GMT"
    assert http_date(LATEST + 1, usegmt=True) == "Fri, 31 Dec 9999 23:59:59 GMT"


def test_the_libraries_have_the_names_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (email.utils, uvicorn.server):
        monkeypatch.setattr(module, "formatdate", module.formatdate)
    limit_http_dates()
    assert email.utils.formatdate is uvicorn.server.formatdate is http_date  # type: ignore[comparison-overlap]
