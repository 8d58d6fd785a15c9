"""Frames: invalid JSON objects and base64 are client errors, and valid ones are decoded exactly."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.dialects.base import audio_of_append, decode_base64, decode_json, encode_json
from realtime.errors import ClientFault


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "1", "null", '{"a":', "[" * 100_000, b"\xff\xfe", '{"a": NaN}'])
def test_what_is_no_json_object_is_a_clients_fault(text: str | bytes) -> None:
    with pytest.raises(ClientFault) as fault:
        decode_json(text)
    assert fault.value.code == "invalid_json"


@pytest.mark.parametrize("text", ["A", "AAA", "A===", "AA=A", "A A=", "ÄÄÄÄ", "AAAA\n", "-_-_", "\x00AAA"])
def test_what_is_no_base64_is_a_clients_fault(text: str) -> None:
    with pytest.raises(ClientFault) as fault:
        decode_base64(text)
    assert (fault.value.code, fault.value.param) == ("invalid_audio", "audio")


@given(st.binary(max_size=200))
def test_base64_round_trip(data: bytes) -> None:
    assert decode_base64(base64.b64encode(data).decode()) == data


def test_json_round_trip_keeps_other_alphabets() -> None:
    assert decode_json(encode_json({"text": "žluťoučký 🐎"})) == {"text": "žluťoučký 🐎"}


APPEND = '{"type":"input_audio_buffer.append","audio":"AAEC"}'
ODD_APPENDS = [
    '{"type":"input_audio_buffer.append"}',
    '{"type":"input_audio_buffer.append","audio":""}',
    '{"type":"input_audio_buffer.append","audio":7}',
    '{"type":"input_audio_buffer.append","audio":"A"}',
    '{"type":"input_audio_buffer.append","audio":"AAEC "}',
    '{"type":"input_audio_buffer.commit","audio":"AAEC"}',
    '{"type":"input_audio_buffer.append","audio":"AAEC"',
    '{"type":"input_audio_buffer.append","audio":"AAEC"} 7',
    '{"type":"input_audio_buffer.append","audio":"AAEC","event_id":7}',
    '{"type":"input_audio_buffer.append","audio":"AAEC","event_id":"' + 513 * "e" + '"}',
    '{"type":"input_audio_buffer.append","audio":"AAEC","x":' + 3000 * "[" + 3000 * "]" + "}",
    "[]",
    "",
]


@pytest.mark.parametrize("text", ODD_APPENDS)
def test_an_odd_append_is_left_to_those_who_look_closely(text: str) -> None:
    assert audio_of_append(text) == b""


@pytest.mark.parametrize(
    "text",
    [
        APPEND,
        ' { "audio" : "AAEC" , "type" : "input_audio_buffer.append" } ',
        '{"type":"input_audio_buffer.append","audio":"\\u0041AEC","event_id":"é"}',
        '{"type":"input_audio_buffer.append","audio":"\\/\\/\\/\\/","more":{"a":[1,"é",null]}}',
        '{"audio":"AAAA","type":"input_audio_buffer.append","audio":"AAEC"}',
        '{"type":"input_audio_buffer.append","audio":"AA=="}',
    ],
)
def test_a_plain_append_is_read_as_those_who_look_closely_read_it(text: str) -> None:
    message = decode_json(text)
    assert message["type"] == "input_audio_buffer.append"
    assert audio_of_append(text) == decode_base64(message["audio"])


@given(st.text(alphabet=[*APPEND, " ", "\\", "=", "/", "é"], max_size=90) | st.sampled_from([APPEND, *ODD_APPENDS]))
def test_what_is_read_in_one_go_is_what_the_long_way_reads(text: str) -> None:
    audio = audio_of_append(text)
    if audio:
        assert decode_base64(decode_json(text)["audio"]) == audio
