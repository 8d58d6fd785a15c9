"""Packets of SCTP that the library would compute for long are refused before it sees them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from aiortc.rtcsctptransport import (
    Chunk,
    ErrorChunk,
    HeartbeatChunk,
    InitChunk,
    ReconfigChunk,
    SackChunk,
    serialize_packet,
)
from hypothesis import given
from hypothesis import strategies as st

from realtime.webrtc.peer_connection import MAX_NAMED_CHUNKS, RefusedPacket, check_packet


def packet(chunk: Chunk) -> bytes:
    return serialize_packet(5000, 5000, 1, chunk)


def acknowledgement(*gaps: tuple[int, int]) -> bytes:
    chunk = SackChunk()
    chunk.gaps = list(gaps)
    return packet(chunk)


def with_parameters(kind: type[Chunk], parameters: bytes) -> bytes:
    body = bytes(16) + parameters if kind is InitChunk else parameters
    return bytes(12) + bytes([kind.type, 0]) + (len(body) + 4).to_bytes(2, "big") + body


@pytest.mark.parametrize("kind", [InitChunk, ErrorChunk, HeartbeatChunk, ReconfigChunk])
@pytest.mark.parametrize("length", [0, 3])
def test_a_parameter_without_a_length_is_refused(kind: type[Chunk], length: int) -> None:
    with pytest.raises(RefusedPacket, match="parameter"):
        check_packet(with_parameters(kind, b"\x00\x01" + length.to_bytes(2, "big") + bytes(8)))


def test_an_acknowledgement_of_more_than_was_sent_is_refused() -> None:
    check_packet(acknowledgement((2, 10), (12, MAX_NAMED_CHUNKS - 100)))
    with pytest.raises(RefusedPacket, match="acknowledgement"):
        check_packet(acknowledgement(*[(0, 65_535)] * 290))
    with pytest.raises(RefusedPacket, match="acknowledgement"):
        check_packet(acknowledgement(*[(1, 100)] * 290))


def test_ordinary_packets_pass() -> None:
    heartbeat = HeartbeatChunk()
    heartbeat.params.append((1, b"12345"))
    for chunk in (heartbeat, InitChunk(), SackChunk(), ErrorChunk()):
        check_packet(packet(chunk))


@given(st.binary(max_size=200))
def test_any_bytes_are_passed_on_or_refused(data: bytes) -> None:
    with suppress(RefusedPacket):
        check_packet(data)
