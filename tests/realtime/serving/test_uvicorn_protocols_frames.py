"""The fast path for complete frames, and the fragments of long ones: the same result as from the parser."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from realtime.serving.uvicorn_protocols import PART_BYTES, FrameSplitter, text_of_whole_frame

payloads = st.binary(max_size=40) | st.integers(120, 300).map(bytes) | st.integers(65_530, 65_540).map(bytes)
frames = st.builds(
    lambda opcode, payload, fin, mask: Frame(opcode, payload, fin).serialize(mask=mask),
    st.sampled_from([Opcode.TEXT, Opcode.BINARY, Opcode.CONT]),
    payloads,
    st.booleans(),
    st.booleans(),
)


MAX_SIZE = 2**21


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(whole)]
    return [whole[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


@settings(deadline=None)
@given(st.lists(frames, min_size=1, max_size=6), st.data())
def test_a_splitter_knows_where_frames_begin(sent: list[bytes], data: st.DataObject) -> None:
    whole, starts, end = b"".join(sent), {0}, 0
    for frame in sent:
        end += len(frame)
        starts.add(end)
    cuts = data.draw(st.lists(st.integers(0, len(whole)) | st.sampled_from(sorted(starts)), max_size=12))
    splitter, place = FrameSplitter(MAX_SIZE), 0
    for piece in cut(whole, cuts):
        splitter.split(piece)
        place += len(piece)
        assert splitter.at_start == (place in starts)


def messages_of(data: bytes, max_size: int = MAX_SIZE) -> tuple[list[tuple[Opcode, bytes]], int | None, int]:
    """What the library's parser makes of it: messages and control frames, a close code, and its longest frame."""
    protocol = ServerProtocol(state=State.OPEN, max_size=max_size)
    protocol.receive_data(data)
    found: list[tuple[Opcode, bytes]] = []
    longest = 0
    for event in protocol.events_received():
        assert isinstance(event, Frame)
        longest = max(longest, len(event.data))
        if event.opcode is Opcode.CONT:
            found[-1] = (found[-1][0], found[-1][1] + event.data)
        else:
            found.append((event.opcode, bytes(event.data)))
    return found, None if protocol.parser_exc is None else protocol.close_sent.code, longest


long_payloads = st.integers(0, 300_000).map(lambda size: (bytes(range(251)) * (size // 251 + 1))[:size])
conversations = st.lists(
    st.tuples(st.sampled_from([Opcode.TEXT, Opcode.BINARY]), st.lists(long_payloads, min_size=1, max_size=3)),
    max_size=3,
)


@settings(deadline=None, max_examples=60)
@given(conversations, st.lists(st.integers(0, 900_000), max_size=8))
def test_the_parser_sees_the_same_messages_in_short_frames(
    conversation: list[tuple[Opcode, list[bytes]]], cuts: list[int]
) -> None:
    sent = b""
    for opcode, parts in conversation:
        for number, part in enumerate(parts):
            kind = Opcode.CONT if number else opcode
            sent += Frame(kind, part, fin=number == len(parts) - 1).serialize(mask=True)
            if number < len(parts) - 1:
                sent += Frame(Opcode.PING, b"between").serialize(mask=True)
    splitter = FrameSplitter(MAX_SIZE)
    seen = b"".join(splitter.split(piece) for piece in cut(sent, [place for place in cuts if place <= len(sent)]))
    expected, code, _ = messages_of(sent)
    found, found_code, longest = messages_of(seen)
    assert (found, found_code) == (expected, code)
    assert longest <= PART_BYTES


@pytest.mark.parametrize("before", [b"", Frame(Opcode.TEXT, b"x" * 400_000, fin=False).serialize(mask=True)])
def test_a_frame_that_is_too_long_is_refused_by_its_head(before: bytes) -> None:
    head = bytes([0x80 if before else 0x81, 0xFF]) + (700_000).to_bytes(8) + bytes(4)
    splitter = FrameSplitter(1_000_000 if before else 699_999)
    _, code, _ = messages_of(splitter.split(before) + splitter.split(head), 1_000_000 if before else 699_999)
    assert code == 1009


@pytest.mark.parametrize("first, second", [(0xC1, 0xFF), (0x89, 0xFF), (0x83, 0xFF), (0x81, 0x7F), (0x80, 0xFF)])
def test_a_long_frame_that_breaks_a_rule_breaks_it_in_fragments_too(first: int, second: int) -> None:
    splitter = FrameSplitter(MAX_SIZE)
    data = bytes([first, second]) + (200_000).to_bytes(8) + bytes(4) + bytes(PART_BYTES)
    assert messages_of(splitter.split(data))[1] == 1002, "after one fragment, not after all of them"


@pytest.mark.parametrize("length", [126, 127, 3000, 65_535])
def test_a_whole_text_is_what_was_sent(length: int) -> None:
    text = ("é" + "x" * length)[: length - 1]
    frame = Frame(Opcode.TEXT, text.encode()).serialize(mask=True)
    assert text_of_whole_frame(frame, MAX_SIZE) == text
    assert text_of_whole_frame(bytearray(frame), MAX_SIZE) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        Frame(Opcode.TEXT, b"x" * 125).serialize(mask=True),
        Frame(Opcode.TEXT, b"x" * 65_536).serialize(mask=True),
        Frame(Opcode.TEXT, b"x" * 200).serialize(mask=False),
        Frame(Opcode.TEXT, b"x" * 200, fin=False).serialize(mask=True),
        b"\xc1" + Frame(Opcode.TEXT, b"x" * 200).serialize(mask=True)[1:],
        Frame(Opcode.BINARY, b"x" * 200).serialize(mask=True),
        Frame(Opcode.TEXT, b"x" * 200).serialize(mask=True)[:-1],
        Frame(Opcode.TEXT, b"x" * 200).serialize(mask=True) + b"\x81",
        Frame(Opcode.TEXT, b"\xff" * 200).serialize(mask=True),
    ],
)
def test_anything_else_is_left_to_the_parser(data: bytes) -> None:
    assert text_of_whole_frame(data, MAX_SIZE) is None


def test_a_message_that_is_too_long_is_left_to_the_parser() -> None:
    data = Frame(Opcode.TEXT, b"x" * 1001).serialize(mask=True)
    assert text_of_whole_frame(data, 1000) is None and text_of_whole_frame(data, 1001) is not None
