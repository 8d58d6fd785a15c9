"""Commands are encoded and decoded one by one; one that cannot be decoded fails its stream if the stream is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from engine.boundary.codec import UnreadableCommand, WireError, decode, decode_commands, encode_command
from engine.messages import Item, StreamState

ITEM = Item(3, 1, 128, data=0, samples=100)
COMMANDS: list[messages.Command] = [
    messages.Open(
        "s",
        False,
        3,
        {"language": "en"},
        [1, messages.SKIPPED, 2],
        StreamState("s", 1, 2, 3, {"a": {"b": [1, b"c"]}}),
        [],
        7,
        (1, 2),
    ),
    messages.Feed("s", []),
    messages.Flush("s", 4, 100),
    messages.Finish("s"),
    messages.Abort("s"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_what_is_written_is_read(command: messages.Command) -> None:
    (read,) = decode_commands([encode_command(command, [ITEM])])
    assert read.stream == "s"
    if isinstance(read, messages.Open):
        assert msgspec.structs.replace(read, items=[]) == command and read.items == [ITEM]


@pytest.mark.parametrize(
    ("parts", "stream", "opens"),
    [
        (["feed", "s", [[2**53, 1, 0]]], "s", False),
        (["feed", "s", [[0, 1, 0, b"", None, [1]]]], "s", False),
        (["feed", "s", [[0, 1]]], "s", False),
        (["open", "s", True, None, {"language": ["en"]}, [], None, [], 0, None, None], "s", True),
        (["open", "s", True, None, {}, [-2], None, [], 0, None, None], "s", True),
        (["open", "s", True, None, {}, [], None, [], 0, None, [0.0, 1, 1]], "s", True),
        (["turns", "s", [0.5, -1, 1]], "s", False),
        (["flush", "s", 1, -1], "s", False),
        (["dance", "s"], "s", False),
        (["feed", 7, []], None, False),
        (["feed"], None, False),
        ({"feed": "s"}, None, False),
        (None, None, False),
    ],
)
def test_of_what_cannot_be_read_the_stream_is_told(parts: Any, stream: str | None, opens: bool) -> None:
    good = encode_command(messages.Flush("t", 1), [])
    before, unread, behind = decode_commands([good, msgspec.Raw(msgspec.msgpack.encode(parts)), good])
    assert isinstance(unread, UnreadableCommand) and (unread.stream, unread.opens) == (stream, opens)
    assert before == behind == messages.Flush("t", 1, None)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_spoilt_bytes_are_read_or_refused(data: st.DataObject) -> None:
    spoilt = bytearray(encode_command(data.draw(st.sampled_from(COMMANDS)), [ITEM]))
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(spoilt)))
    assert len(decode_commands([msgspec.Raw(bytes(spoilt[:cut]))])) == 1


def test_a_map_with_an_unhashable_key_is_refused() -> None:
    key = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"x"))
    command = b"\x92\xa4open\x81" + key + b"\x01"
    (unread,) = decode_commands([msgspec.Raw(command)])
    assert isinstance(unread, UnreadableCommand)
    with pytest.raises(WireError):
        decode([command], to_engine=True)


def test_nesting_that_would_exhaust_the_stack_is_refused() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    head = b"\x9a" + b"".join(map(msgspec.msgpack.encode, ["open", "s", True, None, {}, []]))
    state = b"\x96" + b"".join(map(msgspec.msgpack.encode, ["state", "s", 0, 0, 0])) + b"\x81\xa1a\x81\xa1b" + deep
    (read,) = decode_commands([msgspec.Raw(head + state)])
    assert isinstance(read, UnreadableCommand)
