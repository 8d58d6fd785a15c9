"""Times as text, for any setting of the clock."""

from __future__ import annotations

import email.utils
import time

import pytest
import uvicorn.server
from hypothesis import given
from hypothesis import strategies as st

from realtime.app import limit_http_dates
from realtime.dates import EARLIEST, LATEST, http_date, now_text


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
