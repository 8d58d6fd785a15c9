"""What may stand in a header that the gateway sends: one line of plain text, whatever a client has put into it."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A header is no place for long texts: proxies refuse answers with large heads.
MAX_HEADER_CHARACTERS = 500

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")

RawHeaders = Iterable[tuple[bytes, bytes]]


def header_text(text: str) -> str:
    """A text that may repeat a client's words, as the value of a header."""
    return _escaped(text[:MAX_HEADER_CHARACTERS].encode("ascii", "backslashreplace")).decode("ascii")


def clean_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """All headers of an answer, right before it is sent: no value of any of them can begin another line."""
    return [(name, _escaped(value)) for name, value in headers]


def _escaped(value: bytes) -> bytes:
    return _CONTROL.sub(lambda found: b"\\x%02x" % found[0][0], value)
