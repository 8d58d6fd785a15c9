"""Frames: what is no JSON object or no base64 is the client's fault, and what is comes out as it went in."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.dialects.json_frames import decode_base64, decode_json, encode_json
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
