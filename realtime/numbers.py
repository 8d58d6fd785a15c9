"""Parses the numbers that clients write in queries and forms: plain ASCII digits only.

Python's `int` and `float` also accept digits of other scripts, underscores, spaces, leading zeros, `nan` and strings of
any length.
"""

from __future__ import annotations

import re

_WHOLE = re.compile(r"0|[1-9][0-9]{0,18}")
_DECIMAL = re.compile(r"-?(?:(?:0|[1-9][0-9]{0,18})(?:\.[0-9]{0,24})?|\.[0-9]{1,24})(?:[eE][+-]?[0-9]{1,3})?")


def whole_number(name: str, text: str, low: int, high: int) -> int:
    """Parse an integer. Raises ValueError with a sentence that names the parameter and does not repeat the text."""
    if _WHOLE.fullmatch(text):
        value = int(text)
        if low <= value <= high:
            return value
    raise ValueError(f"'{name}' must be a whole number from {low} to {high}, in plain digits.")


def decimal_number(name: str, text: str, low: float, high: float) -> float:
    """Parse a number that may have a fraction; otherwise like `whole_number`."""
    if _DECIMAL.fullmatch(text):
        value = float(text)
        if low <= value <= high:
            return value
    raise ValueError(f"'{name}' must be a number from {low:g} to {high:g}, in plain digits.")
