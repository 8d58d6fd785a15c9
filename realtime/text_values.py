"""Strict parsers for numbers, URLs and host names from clients and operators, and writers of dates.

Used for query parameters, form fields, settings and command-line flags. They refuse what Python's own parsers accept in
addition, such as digits of other scripts, underscores and `nan`. The dates are valid even if the system's clock is set
beyond the year 9999.
"""

from __future__ import annotations

import email.utils
import re
import time
from datetime import UTC, datetime
from urllib.parse import SplitResult, urlsplit

# Numbers: ASCII digits only. Python's `int` and `float` also accept digits of other scripts, underscores, spaces,
# leading zeros, `nan` and strings of any length.

_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_DECIMAL = re.compile(r"-?(?:(?:0|[1-9][0-9]{0,18})(?:\.[0-9]{0,24})?|\.[0-9]{1,24})(?:[eE][+-]?[0-9]{1,3})?")


def plain_int(text: str) -> int:
    """Parse an integer. Raises ValueError, with a sentence that does not repeat the text."""
    if not _WHOLE.fullmatch(text):
        raise ValueError("must be a whole number in plain digits")
    return int(text)


def plain_float(text: str) -> float:
    """Parse a number that may have a fraction and an exponent; otherwise like `plain_int`. May return infinity."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError("must be a number in plain digits")
    return float(text)


def whole_number(name: str, text: str, low: int, high: int) -> int:
    """Parse an integer. Raises ValueError with a sentence that names the parameter and does not repeat the text."""
    if _WHOLE.fullmatch(text) and low <= (value := int(text)) <= high:
        return value
    raise ValueError(f"'{name}' must be a whole number from {low} to {high}, in plain digits.")


def decimal_number(name: str, text: str, low: float, high: float) -> float:
    """Parse a number that may have a fraction; otherwise like `whole_number`."""
    if _DECIMAL.fullmatch(text) and low <= (value := float(text)) <= high:
        return value
    raise ValueError(f"'{name}' must be a number from {low:g} to {high:g}, in plain digits.")


# Web addresses

# The schemes, with their ports.
WEB_PORTS = {"http": 80, "https": 443}


class OtherScheme(ValueError):
    """The URL is neither http nor https."""


def web_url(url: str) -> SplitResult:
    """The parts of an http or https URL without user name and password. Raises ValueError with the reason."""
    try:
        split = urlsplit(url)
        host, _ = split.hostname, split.port
        if host and url.isascii():
            host.encode("idna")  # as the lookup does; it refuses empty and long labels
    except ValueError:
        raise ValueError("the URL is not valid") from None
    if split.scheme not in WEB_PORTS:
        raise OtherScheme("the URL must be http or https")
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("the URL is not valid; write http://HOST/PATH with letters, digits and percent codes")
    if "@" in split.netloc:
        raise ValueError("the URL must not contain a user name or password")
    return split


def listed_host(entry: str) -> tuple[str, str]:
    """Host and port of an entry of a list of hosts: `a.example`, `a.example:8080`, `[::1]:8080`. The port is `*` for
    any port, and empty if the entry has none."""
    host, colon, port = entry.rpartition(":")
    is_number = port.isascii() and port.isdigit()
    if colon and (port == "*" or is_number) and (":" not in host or host.endswith("]")):
        return host.strip("[]"), port.lstrip("0") or "0" if is_number else port
    return entry.strip("[]"), ""


# Times. A clock that is set beyond the years that Python's dates have must not break the server.

# Seconds since 1970 of the first and the last second that `datetime` can express.
EARLIEST = -62_135_596_800
LATEST = 253_402_300_799

_format = email.utils.formatdate


def limited(seconds: float) -> float:
    """Seconds since 1970, limited to the years that `datetime` can express."""
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
