"""A long append that is read piece by piece gives the same audio and errors as one that is parsed whole."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realtime.dialects.base import MAX_AUDIO_TEXTS, LongAppend, decode_base64, decode_json
from realtime.errors import ClientFault

APPEND = "input_audio_buffer.append"
OTHERS = 65_536


def pieces_of(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    return [data[begin:end] for begin, end in zip(places, places[1:], strict=False)]


def read(data: bytes, cuts: Iterable[int] = ()) -> tuple[bytes, dict[str, Any]]:
    reader = LongAppend(OTHERS)
    audio = b"".join(reader.read(piece) for piece in pieces_of(data, cuts))
    return audio, reader.end()


def read_whole(data: bytes) -> tuple[bytes, dict[str, Any]]:
    message = decode_json(data)
    if message.get("type") != APPEND or not isinstance(message.get("audio"), str):
        raise ClientFault("message_too_large", "")
    return decode_base64(message["audio"]), {**message, "audio": ""}


def escaped(text: str, how: str) -> str:
    """Ways in which JSON writers spell letters of base64."""
    spelt = {"plain": {}, "slashes": {"/": "\\/"}, "html": {"+": "\\u002B", "/": "\\u002f", "=": "\\u003d"}}[how]
    return "".join(spelt.get(letter, letter) for letter in text)


cuts = st.lists(st.integers(0, 400), max_size=12)
others = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in ("audio", "type")),
    st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=12), lambda inner: st.lists(inner, max_size=3)),
    max_size=3,
)


@settings(deadline=None)
@given(st.binary(max_size=90), others, st.sampled_from(["plain", "slashes", "html"]), st.randoms(), cuts)
def test_audio_is_what_the_whole_message_has_wherever_it_is_cut(
    audio: bytes, more: dict[str, Any], how: str, chance: Any, cuts: list[int]
) -> None:
    fields = [(json.dumps(name), json.dumps(value)) for name, value in {"type": APPEND, **more}.items()]
    fields.append(('"audio"', f'"{escaped(base64.b64encode(audio).decode(), how)}"'))
    chance.shuffle(fields)
    space = chance.choice(["", " ", "\r\n\t"])
    body = f"{space},{space}".join(f"{name}{space}:{space}{value}" for name, value in fields)
    data = f"{{{space}{body}{space}}}".encode()
    assert read(data, cuts) == read_whole(data)


LETTERS = [
    "{",
    "}",
    '"',
    ":",
    ",",
    "\\",
    "[",
    "]",
    " ",
    "A",
    "A",
    "A",
    "=",
    "/",
    "é",
    "\n",
    '"audio"',
    f'"{APPEND}"',
    '"type"',
]
SAMPLE = f'{{"type":"{APPEND}","audio":"AAECAAEC"}}'


@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("spelling", ["\\/", "\\/\\u002f", "\\u002f\\/\\/", "/\\/"])
def test_escapes_that_follow_each_other_may_be_cut_anywhere(spelling: str, step: int) -> None:
    """Silence in G.711 is all slashes in base64, and some writers of JSON escape every one of them."""
    audio = b"\xff" * 45
    text = spelling * (60 // (spelling.count("/") + spelling.count("u002f")))
    data = f'{{"type":"{APPEND}","audio":"{text}"}}'.encode()
    assert read_whole(data)[0] == audio
    assert read(data, range(step, len(data), step))[0] == audio


@settings(deadline=None)
@given(st.lists(st.sampled_from(LETTERS), max_size=30).map("".join) | st.just(SAMPLE), cuts, st.integers(0, 60))
@example('{"audio":"AA==AAAA","type":"input_audio_buffer.append"}', [], 0)
@example('{"audio":"AA==","type":"input_audio_buffer.append"}', [11], 0)
@example('{"audio":"AAA","type":"input_audio_buffer.append"}', [], 0)
@example('{"audio":"AAAA\\"","type":"input_audio_buffer.append"}', [14], 0)
@example('{"audio":"AAAA\\\\","type":"input_audio_buffer.append"}', [15], 0)
@example('{"x":{"audio":"AAAA"},"type":"input_audio_buffer.append"}', [15], 0)
@example('{"\\"audio":"AAAA","type":"input_audio_buffer.append","audio":"AAEC"}', [3], 0)
def test_whatever_is_read_is_what_the_whole_message_says(text: str, cuts: list[int], place: int) -> None:
    """A message that is refused when it is read whole is refused piece by piece, and the other way round."""
    mixed = SAMPLE[:place] + text + SAMPLE[place:] if place else text
    for data in (text.encode(), mixed.encode()):
        try:
            expected: Any = read_whole(data)
        except ClientFault as fault:
            expected = fault.code
        if data.count(b'"audio"') > 1:
            continue  # refused outright here; the last one counts in a short message
        try:
            found: Any = read(data, cuts)
        except ClientFault as fault:
            found = fault.code
        assert (
            (type(found), found) == (type(expected), expected) or isinstance(found, str) and isinstance(expected, str)
        )


@pytest.mark.parametrize(
    "message",
    [
        {"type": "session.update", "session": {"x": "y" * 70_000}},
        {"type": APPEND, "audio": "AAAA", "more": "x" * 70_000},
        {"type": APPEND, "audio": "AAAA", "more": [""] * (MAX_AUDIO_TEXTS + 1)},
        {"type": APPEND, "audio": ["AAAA"]},
        {"type": "input_audio_buffer.commit", "audio": "AAAA"},
        {"type": APPEND, "more": {"audio": "A" * 70_000}},
        {"session": {}, "event_id": "e" * 100},
    ],
)
def test_a_long_message_that_is_no_append_is_too_large(message: dict[str, Any]) -> None:
    with pytest.raises(ClientFault) as fault:
        read(json.dumps(message).encode(), range(0, 70_000, 1000))
    assert fault.value.code == "message_too_large" and "limits.control_bytes" in fault.value.message


def test_nothing_is_heard_of_a_message_of_another_type() -> None:
    reader = LongAppend(OTHERS)
    with pytest.raises(ClientFault):
        reader.read(b'{"type":"input_audio_buffer.commit","audio":"AAAA')


@pytest.mark.parametrize("message", [{"event_id": "mine", "audio": "AAAA?"}, {"audio": "AAAA", "event_id": "mine"}])
def test_a_mistake_names_the_message_if_its_name_came_before_the_mistake(message: dict[str, str]) -> None:
    reader = LongAppend(OTHERS)
    with pytest.raises(ClientFault):
        reader.read(json.dumps(message).encode())
        reader.end()
    assert reader.event_id == "mine"


def test_what_is_held_does_not_grow_with_the_message() -> None:
    reader, piece = LongAppend(OTHERS), b"A" * 65_536
    reader.read(b'{"type":"input_audio_buffer.append","audio":"')
    tracemalloc.start()
    try:
        for _ in range(4):
            reader.read(piece)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(300):
            reader.read(piece)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held - before < 2_000 and peak - before < 6 * len(piece)
