"""The bodies of inject requests: long ones are decoded in pieces, with the same result as in one go."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boundary.items import hash_payload
from engine.client.link import ItemRefused
from realtime.dialects.base import decode_body
from realtime.errors import ClientFault, Refusal
from realtime.http import prepared_audio_routes
from realtime.http.prepared_audio_routes import MAX_ITEM_BYTES, PIECE_BYTES, items_of

SOUND = np.linspace(-0.5, 0.5, 1280, dtype=np.float32)
ITEM = {
    **{"offset": 3, "length": 1, "sample": 0, "hash": hash_payload(SOUND).hex(), "shape": [1280], "mask": [True]},
    "data": base64.b64encode(SOUND.tobytes()).decode(),
    'a "quoted\\" [key], {': '\\" ] } , [ {',
}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every piece that the JSON decoder is given."""
    lengths: list[int] = []

    def noted(data: bytes) -> Any:
        lengths.append(len(data))
        return decode_body(data)

    monkeypatch.setattr(prepared_audio_routes, "decode_body", noted)
    return lengths


@pytest.mark.parametrize("indent", [None, 2])
def test_a_long_body_is_decoded_in_pieces(decoded: list[int], indent: int | None) -> None:
    items = [ITEM, None] * 500
    body = json.dumps({"model": "m", "items": items, "more": {"items": [1, "]"]}}, indent=indent).encode()
    found = items_of(body)
    assert len(found) == 1000 and len(decoded) > 50 and max(decoded) < PIECE_BYTES + 2 * len(json.dumps(ITEM, indent=2))
    assert all(item is None for item in found[1::2])
    for item in found[::2]:
        assert item is not None and item.offset == 3 and item.key == hash_payload(SOUND)
        assert item.payload is not None and np.array_equal(item.payload, SOUND)


@pytest.mark.parametrize(
    "inner",
    [b"{}", b"null", b"[]", b"{", b"]", b'"', b'"\\"', b"1", b" ", b",", b'{"a":{}}', b"[[", b'{"x":' + b"[" * 9],
)
def test_no_call_of_the_decoder_gets_more_than_a_piece_or_one_item(
    decoded: list[int], inner: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times the longest item of anything: the decoder keeps the interpreter's lock for as long as a call lasts."""
    piece, item = 4 * 1024, 32 * 1024
    monkeypatch.setattr(prepared_audio_routes, "PIECE_BYTES", piece)
    monkeypatch.setattr(prepared_audio_routes, "MAX_ITEM_BYTES", item)
    count = 8 * item // len(inner)
    for separator, most in ((b",", piece), (b"", item)):
        body = b'{"items":[' + separator.join([inner] * count) + b"]}"
        try:
            items_of(body)
        except (ItemRefused, Refusal, ClientFault):
            pass
        assert max(decoded, default=0) < most + 100


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"items":[%s,]}',
        b'{"items":[,%s]}',
        b'{"items":[%s,,null]}',
        b'{"items":[%s}}',
        b'{"items":[%s]',
        b'{"items":[%s]]',
        b'{"items":[%s],"items":[null]}',
        b'{"items":[%s],"items":5}',
        b'{"a":"items",[%s]}',
        b'{"item":[%s]}',
        b'[{"items":[%s]}]',
        b'{"items":{"items":[%s]}}',
        b'{"items":[%s]} {}',
    ],
)
def test_a_long_body_that_is_wrong_is_refused(wrong: bytes) -> None:
    long = b",".join([b"null"] * 50_000)
    with pytest.raises((Refusal, ClientFault)):
        items_of(wrong % long)


def test_an_item_longer_than_any_model_has_is_refused() -> None:
    for item in (b'"%s"' % (b"x" * MAX_ITEM_BYTES), b"[%s]" % b",".join([b"{}"] * 50_000)):
        with pytest.raises(Refusal, match="An item has at most"):
            items_of(b'{"items":[{"data":%s}]}' % item)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(st.dictionaries(st.text() | st.just("items"), JSON | st.lists(st.none() | st.just(ITEM)), max_size=4))
def test_pieces_and_the_whole_have_the_same_result(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()

    def result(piece_bytes: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared_audio_routes, "PIECE_BYTES", piece_bytes)
            try:
                return [None if item is None else (item.offset, item.key) for item in items_of(data)]
            except (ItemRefused, Refusal, ClientFault):
                return "refused"

    whole = result(10**9)
    rest = len(json.dumps({**body, "items": []}).encode())
    # The rest of the body has to fit into a piece.
    assert result(rest) == whole
