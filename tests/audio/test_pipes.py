"""The byte pipe, in which one side waits for the other, and MP4 boxes that arrive whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from audio.errors import CorruptAudio
from audio.pipes import MAX_BOX_BYTES, BytePipe, Mp4Boxes


def run(pieces: list[bytes], reader: Callable[[BytePipe], None]) -> BytePipe:
    """Feed the pieces and the end to a reader on another thread."""
    pipe = BytePipe()

    def read() -> None:
        try:
            reader(pipe)
        except Exception as error:
            pipe.finish(error)
        else:
            pipe.finish(None)

    thread = threading.Thread(target=read)
    thread.start()
    pipe.wait()
    for piece in [*pieces, None]:
        pipe.hand_over(piece)
    thread.join(timeout=5)
    assert not thread.is_alive()
    return pipe


def test_everybody_who_waits_is_let_go_when_the_reader_fails() -> None:
    """One thread is feeding while another one ends the stream: the reader has only one last turn to give."""
    pipe = BytePipe()
    feeders = [threading.Thread(target=pipe.hand_over, args=(piece,), daemon=True) for piece in (b"broken", None)]
    for feeder in feeders:
        feeder.start()
    while pipe._pieces.qsize() < 2:
        time.sleep(0.001)
    pipe.finish(CorruptAudio("broken"))
    for feeder in feeders:
        feeder.join(timeout=5)
    assert not any(feeder.is_alive() for feeder in feeders)


def parts_of(pieces: list[bytes], size: int = 1 << 16) -> list[bytes]:
    """What libav would read from these pieces of an MP4 stream."""
    parts: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        boxes = Mp4Boxes(pipe)
        while part := boxes.read(size):
            parts.append(part)

    failure = run(pieces, reader).failure
    if failure is not None:
        raise failure
    return parts


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


def one_by_one(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


HEADER = box(b"ftyp", b"M4A ") + box(b"moov", b"index")


def test_pieces_are_read_as_they_come_and_nothing_stays_behind() -> None:
    seen: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        while part := pipe.read(3):
            seen.append(part)

    run([b"abcde", b"f"], reader)
    assert seen == [b"abc", b"de", b"f"]


def test_a_piece_is_used_up_before_the_feeder_goes_on() -> None:
    pipe = BytePipe()
    seen: list[bytes] = []

    def reader() -> None:
        while part := pipe.read(2):
            seen.append(part)
        pipe.finish(None)

    threading.Thread(target=reader, daemon=True).start()
    pipe.wait()
    pipe.hand_over(b"abcde")
    assert seen == [b"ab", b"cd", b"e"]
    pipe.hand_over(None)


def test_peeking_takes_nothing() -> None:
    heads: list[bytes] = []
    seen: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        heads.extend([pipe.peek(4), pipe.peek(2)])
        seen.append(pipe.read_all(100))
        heads.append(pipe.peek(4))

    run([b"a", b"b", b"cdef", b"g"], reader)
    assert heads == [b"abcd", b"ab", b""]
    assert seen == [b"abcdefg"]


def test_nobody_waits_for_a_reader_that_is_done() -> None:
    failure = ValueError("no")

    def reader(pipe: BytePipe) -> None:
        pipe.read(1)
        raise failure

    pipe = run([b"a", b"b", b"c"], reader)
    assert pipe.failure is failure


def test_boxes_arrive_whole_and_media_as_they_come() -> None:
    media = b"media bytes"
    stream = HEADER + box(b"moof", b"fragment") + box(b"mdat", media)
    assert parts_of(one_by_one(stream)) == [
        box(b"ftyp", b"M4A "),
        box(b"moov", b"index"),
        box(b"moof", b"fragment"),
        box(b"mdat", media)[:8],
        *one_by_one(media),
    ]
    assert b"".join(parts_of([stream], size=5)) == stream


def test_long_sizes_and_media_up_to_the_end() -> None:
    long = (1).to_bytes(4, "big") + b"free" + (16 + 3).to_bytes(8, "big") + b"abc"
    endless = bytes(4) + b"mdat" + b"media"
    assert parts_of(one_by_one(HEADER + long + endless))[2:] == [long, endless[:8], *one_by_one(b"media")]


def test_a_box_too_large_to_wait_for_is_passed_on() -> None:
    large = box(b"free", bytes(MAX_BOX_BYTES + 1))
    parts = parts_of([HEADER + large[:1000], large[1000:]], size=1 << 30)
    assert parts[2:4] == [large[:8], large[8:1000]]
    assert b"".join(parts) == HEADER + large


def test_a_size_smaller_than_the_header_does_not_hang() -> None:
    broken = (3).to_bytes(4, "big") + b"free"
    assert parts_of([HEADER + broken])[2:] == [broken]


def test_media_before_the_index_cannot_be_streamed() -> None:
    with pytest.raises(CorruptAudio, match="faststart"):
        parts_of([box(b"ftyp", b"M4A "), box(b"mdat", b"media"), box(b"moov", b"index")])


@pytest.mark.parametrize("cut", [3, 12, 20, 40, 60])
def test_a_stream_may_end_anywhere(cut: int) -> None:
    stream = HEADER + box(b"moof", b"fragment") + box(b"mdat", b"media bytes")
    assert b"".join(parts_of([stream[:cut]])) == stream[:cut]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        # Flags: default-base-is-moof, an offset into the file, and no track header at all.
        (b"..tfhd\0\x02\0\0", [1, 2, 2]),
        (b"..tfhd\0\0\0\x01", [5]),
        (b"nothing", [5]),
    ],
)
def test_a_long_stream_ends_and_starts_over_with_its_header(
    content: bytes, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("audio.pipes.MAX_FRAGMENTS", 2)
    fragment = box(b"moof", content) + box(b"mdat", b"media")
    streams: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        boxes = Mp4Boxes(pipe)
        more = True
        while more:
            streams.append(b"")
            while part := boxes.read(1 << 16):
                streams[-1] += part
            more = boxes.start_over()

    run([HEADER, *[fragment] * 5], reader)
    assert sorted(stream.removeprefix(HEADER).count(fragment) for stream in streams) == parts
    assert all(stream == HEADER + fragment * stream.count(fragment) for stream in streams)
