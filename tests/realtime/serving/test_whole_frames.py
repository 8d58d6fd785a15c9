"""The short way for a frame that came whole: it sees what the parser would, and only between two frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from realtime.serving.whole_frames import FrameTrack, text_of_whole_frame

payloads = st.binary(max_size=40) | st.integers(120, 300).map(bytes) | st.integers(65_530, 65_540).map(bytes)
frames = st.builds(
    lambda opcode, payload, fin, mask: Frame(opcode, payload, fin).serialize(mask=mask),
    st.sampled_from([Opcode.TEXT, Opcode.BINARY, Opcode.CONT]),
    payloads,
    st.booleans(),
    st.booleans(),
)


@given(st.lists(frames, min_size=1, max_size=6), st.data())
def test_a_track_knows_where_frames_begin(sent: list[bytes], data: st.DataObject) -> None:
    whole, starts, end = b"".join(sent), {0}, 0
    for frame in sent:
        end += len(frame)
        starts.add(end)
    cuts = data.draw(st.lists(st.integers(0, len(whole)) | st.sampled_from(sorted(starts)), max_size=12))
    track, place = FrameTrack(), 0
    for cut in [*sorted(cuts), len(whole)]:
        track.pass_over(whole[place:cut])
        place = cut
        assert track.at_start == (place in starts)


def test_a_track_is_given_up_rather_than_followed_through_a_flood() -> None:
    tiny = Frame(Opcode.PING, b"").serialize(mask=True)
    track = FrameTrack()
    track.pass_over(tiny * 50)
    assert track.at_start
    track.pass_over(tiny * 50_000)
    track.pass_over(tiny)
    assert not track.at_start


@pytest.mark.parametrize("length", [126, 127, 3000, 65_535])
def test_a_whole_text_is_what_was_sent(length: int) -> None:
    text = ("é" + "x" * length)[: length - 1]
    frame = Frame(Opcode.TEXT, text.encode()).serialize(mask=True)
    assert text_of_whole_frame(frame) == text
    assert text_of_whole_frame(bytearray(frame)) == text  # type: ignore[arg-type]


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
    assert text_of_whole_frame(data) is None
