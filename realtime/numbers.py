"""Parses numbers that people and programs write as text, in queries, forms, settings and flags: ASCII digits only.

Python's `int` and `float` also accept digits of other scripts, underscores, spaces, leading zeros, `nan` and strings of
any length.
"""

from __future__ import annotations

import re

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
