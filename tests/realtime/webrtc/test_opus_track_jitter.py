"""The jitter buffer: order, loss, bounds, and senders that lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from realtime.webrtc.opus_track import MAX_JUMP, MAX_WAITING_PACKETS, WAIT_S, JitterBuffer, OrderedPacket, Packet


def packet(sequence: int) -> Packet:
    return Packet(sequence % 65536, sequence * 960 % 2**32, b"x")


def numbers(arrived: list[OrderedPacket]) -> list[tuple[int, bool]]:
    return [(each.packet.sequence, each.after_loss) for each in arrived]


def play(sequences: list[int], step_s: float = 0.02) -> list[tuple[int, bool]]:
    buffer, found = JitterBuffer(), []
    for number, sequence in enumerate(sequences):
        found += numbers(list(buffer.add(packet(sequence), number * step_s)))
    return found


def test_packets_in_order_pass_at_once_also_where_numbers_begin_again() -> None:
    assert play([65534, 65535, 65536, 65537]) == [(65534, False), (65535, False), (0, False), (1, False)]


def test_packets_that_overtake_others_are_put_in_order() -> None:
    assert play([5, 7, 8, 6]) == [(5, False), (6, False), (7, False), (8, False)]


def test_copies_and_packets_that_are_too_late_are_dropped() -> None:
    assert play([5, 6, 6, 5, 7]) == [(5, False), (6, False), (7, False)]
    assert play([5, 7, 7, 6, 7]) == [(5, False), (6, False), (7, False)]


def test_a_missing_packet_is_waited_for_and_then_told() -> None:
    buffer = JitterBuffer()
    assert numbers(list(buffer.add(packet(5), 0.0))) == [(5, False)]
    assert not list(buffer.add(packet(7), 0.02)) and buffer.is_waiting
    assert not list(buffer.expired(WAIT_S))
    assert numbers(list(buffer.expired(0.02 + WAIT_S))) == [(7, True)]
    assert not buffer.is_waiting
    assert not list(buffer.add(packet(6), 0.5))


def test_so_many_packets_are_held_and_no_more() -> None:
    sequences = [5, *range(7, 7 + MAX_WAITING_PACKETS + 1)]
    found = play(sequences, step_s=0.0)
    assert found[:3] == [(5, False), (7, True), (8, False)] and len(found) == len(sequences)


def test_a_jump_of_the_numbers_begins_a_new_count() -> None:
    far = 10 + MAX_JUMP + 1
    assert play([5, 7, far, far + 1]) == [(5, False), (7, True), (far, True), (far + 1, False)]
    assert play([40_000, 100, 101]) == [(40_000, False), (100, True), (101, False)]


@given(some.lists(some.integers(0, 65535), max_size=300))
def test_no_sequence_makes_it_hold_more_or_pass_a_packet_twice_in_a_row(sequences: list[int]) -> None:
    buffer, found = JitterBuffer(), []
    for sequence in sequences:
        found += list(buffer.add(packet(sequence), 0.0))
        assert len(buffer._waiting) <= MAX_WAITING_PACKETS
    found += list(buffer.expired(WAIT_S + 1))
    assert len(found) <= len(sequences)
    assert all(
        (later.packet.sequence - earlier.packet.sequence) % 65536 == 1 or later.after_loss
        for earlier, later in zip(found, found[1:], strict=False)
    )
