"""Parses a long JSON list of prepared items in pieces, so that the event loop runs in between.

`items_of` is for the bodies of `POST /v1/audio/inject` (`prepared_audio_routes.py`). The JSON decoder keeps the
interpreter's lock, so a long body is cut between its items, and each piece is decoded in a call of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from engine.client.prepared_audio import parse_items
from engine.messages import Item
from realtime.dialects.base import decode_body
from realtime.errors import Refusal

# Bytes of items that are decoded in one call; a longer item is decoded alone.
PIECE_BYTES = 64 * 1024
# The longest item, in bytes and in JSON values, and the number of items in a long body.
MAX_ITEM_BYTES = 2 * 1024 * 1024
MAX_ITEM_VALUES = 20_000
MAX_ITEMS = 100_000
ITEMS_KEY = b'"items"'
QUOTE, COMMA, LIST_START = b'",['
_BRACKETS = re.compile(rb'["{}\[\]]')
_WITH_COMMAS = re.compile(rb'["{}\[\],]')


def items_of(body: bytes) -> list[Item | None]:
    """Parse the items of a body. Raises Refusal, ClientFault and ItemRefused.

    The JSON decoder keeps the interpreter's lock, so a long body is decoded in pieces: the event loop runs in between.
    """
    body = body.strip()
    if len(body) <= PIECE_BYTES:
        return _parsed(decode_body(body).get("items"))
    start = end = _start_of_items(body)
    items: list[Item | None] = []
    for begin, end in _pieces(body, start):
        items += _parsed(decode_body(b'{"items":[' + body[begin:end] + b"]}").get("items"))
        if len(items) > MAX_ITEMS:
            raise Refusal(413, "too_many_items", f"Send at most {MAX_ITEMS} items at once.", param="items")
    rest = body[: start + 1] + body[end:]
    if len(rest) > PIECE_BYTES or decode_body(rest).get("items") != []:
        raise _not_items()
    return items


def _parsed(items: Any) -> list[Item | None]:
    if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
        raise _not_items()
    return parse_items(items)


def _not_items() -> Refusal:
    return Refusal(400, "invalid_value", "'items' must be a list of items as render returns them.", param="items")


def _start_of_items(body: bytes) -> int:
    """The place of the bracket before the items. Raises Refusal."""
    last_text = b""
    for place, depth in _structure(body[:PIECE_BYTES]):
        if body[place] == QUOTE:
            last_text = body[place : place + len(ITEMS_KEY)]
        elif depth == 2 and body[place] == LIST_START and last_text == ITEMS_KEY:
            return place
    raise _not_items()


def _pieces(body: bytes, start: int) -> Iterator[tuple[int, int]]:
    """The list of items that starts here, cut between items; without its brackets. Raises Refusal."""
    begin = last = start + 1
    for place, depth in _structure(body, start, with_commas=True):
        is_end = depth == 0
        is_item = is_end or (depth == 1 and body[place] == COMMA)
        if place - last > PIECE_BYTES:
            _check_long_item(body, last, place, is_item)
        if not is_item:
            continue
        if is_end or place - begin >= PIECE_BYTES:
            if begin > start + 1 and not body[begin:place].strip():
                raise _not_items()
            yield begin, place
            begin = place + 1
        last = place + 1
        if is_end:
            return
    raise _not_items()


def _check_long_item(body: bytes, start: int, end: int, is_complete: bool) -> None:
    if end - start > MAX_ITEM_BYTES or (
        is_complete and sum(body.count(mark, start, end) for mark in (b",", b"{", b"[")) > MAX_ITEM_VALUES
    ):
        text = f"An item has at most {MAX_ITEM_BYTES} bytes and {MAX_ITEM_VALUES} values."
        raise Refusal(400, "item_refused", text, param="items")


def _structure(body: bytes, place: int = 0, with_commas: bool = False) -> Iterator[tuple[int, int]]:
    """Places of brackets and starts of texts, with the depth behind them; and of commas at depth 1, if wanted."""
    depth = 0
    while place < len(body):
        found = (_WITH_COMMAS if with_commas and depth == 1 else _BRACKETS).search(body, place, place + PIECE_BYTES)
        if found is None:
            place += PIECE_BYTES
            continue
        place, mark = found.start(), found[0]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
        yield place, depth
        place = _end_of_text(body, place) if mark == b'"' else place + 1


def _end_of_text(body: bytes, start: int) -> int:
    """The place behind a text that starts with a quote here."""
    begin = start + 1
    while (quote := body.find(b'"', begin)) >= 0:
        text = body[begin:quote]
        begin = quote + 1
        if (len(text) - len(text.rstrip(b"\\"))) % 2 == 0:
            return begin
    return len(body)
