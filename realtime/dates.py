"""The time of day as text. A clock that is set beyond the years that Python's dates have must not break the server."""

from __future__ import annotations

import email.utils
import time
from datetime import UTC, datetime

# Seconds since 1970 of the first and the last second that `datetime` can express.
EARLIEST = -62_135_596_800
LATEST = 253_402_300_799

_format = email.utils.formatdate


def limited(seconds: float) -> float:
    return min(max(seconds, EARLIEST), LATEST)


def now_text() -> str:
    """The time in ISO 8601, with milliseconds."""
    return date_text(time.time())


def date_text(seconds: float) -> str:
    """Seconds since 1970 in ISO 8601, with milliseconds."""
    moment = datetime.fromtimestamp(limited(seconds), UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def http_date(timeval: float | None = None, localtime: bool = False, usegmt: bool = False) -> str:
    """As `email.utils.formatdate`, for any time. `realtime/app.py` has the HTTP libraries use it for Date headers."""
    return _format(limited(time.time() if timeval is None else timeval), localtime, usegmt)
