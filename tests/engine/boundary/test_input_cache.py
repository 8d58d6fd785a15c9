"""The mirrored caches agree after any sequence of messages, or repair what they disagree about."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boundary.input_cache import ByteLru, CacheStats, ReceiverCache, SenderCache

CAPACITY = 40
# Key i always has the same size, as a hash has the same content; sizes include one larger than the whole cache.
SIZES = [0, 1, 3, 5, 8, 8, 13, 20, 40, 41]


def key(index: int) -> bytes:
    return b"key-%d" % index


class Pair:
    """Both ends with a perfect wire between them, unless a test cuts it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.sender = SenderCache(capacity)
        self.receiver: ReceiverCache[str] = ReceiverCache(capacity)
        self.crossed = 0

    def pack(self, indices: list[int]) -> list[tuple[bytes, int, str | None]]:
        with_data = self.sender.plan_send([(key(i), SIZES[i]) for i in indices])
        return [(key(i), SIZES[i], f"data-{i}" if data else None) for i, data in zip(indices, with_data, strict=True)]

    def deliver(self, message: list[tuple[bytes, int, str | None]]) -> list[str | None]:
        self.crossed += sum(size for _, size, data in message if data is not None)
        repaired: dict[bytes, str] = {}
        lost = self.receiver.missing(message, repaired)
        if lost:
            self.sender.repair({name: SIZES[int(name[4:])] for name in lost})
            repaired = {name: f"data-{int(name[4:])}" for name in lost}
            self.crossed += sum(SIZES[int(name[4:])] for name in lost)
            assert not self.receiver.missing(message, repaired)
        return self.receiver.resolve(message, repaired)

    def send(self, indices: list[int]) -> None:
        assert self.deliver(self.pack(indices)) == [f"data-{i}" for i in indices]
        self.sender.check_integrity()
        self.receiver.check_integrity()


messages = st.lists(st.integers(0, len(SIZES) - 1), max_size=8)
faults = st.sampled_from(["sender forgets", "receiver forgets", "both reset", "message lost"])


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        ByteLru[None](-1)


@given(st.lists(messages, max_size=20))
@settings(max_examples=150, deadline=None)
def test_without_faults_both_sides_hold_the_same_and_nothing_is_repaired(sequence: list[list[int]]) -> None:
    pair = Pair()
    for indices in sequence:
        pair.send(indices)
        assert pair.sender.keys() == pair.receiver.keys()
    stats = pair.sender.stats
    assert stats.repairs == 0
    assert stats.queries == sum(map(len, sequence))
    assert stats.bytes_sent == pair.crossed
    assert stats.bytes_sent + stats.bytes_saved == sum(SIZES[i] for indices in sequence for i in indices)


@given(st.lists(st.one_of(messages, faults), max_size=30))
@settings(max_examples=300, deadline=None)
def test_after_any_fault_every_item_still_arrives(sequence: list[list[int] | str]) -> None:
    pair = Pair()
    for event in sequence:
        if event == "sender forgets":
            pair.sender.clear()
        elif event == "receiver forgets":
            pair.receiver.clear()
        elif event == "both reset":
            pair.sender.clear()
            pair.receiver.clear()
        elif event == "message lost":
            pair.pack([1, 4, 9])
        else:
            assert isinstance(event, list)
            pair.send(event)
    assert pair.sender.stats.bytes_sent >= pair.crossed
    pair.sender.clear()
    pair.receiver.clear()
    pair.send([1, 2, 3])
    assert pair.sender.keys() == pair.receiver.keys()


@given(st.lists(st.tuples(messages, st.booleans()), max_size=20))
@settings(deadline=None)
def test_messages_on_the_way_when_a_hash_is_missed_are_answered_too(
    sequence: list[tuple[list[int], bool]],
) -> None:
    """The sender packs ahead; repair of one message must not break those behind it."""
    pair = Pair()
    flying: list[tuple[list[int], list[tuple[bytes, int, str | None]]]] = []
    for indices, land in sequence:
        flying.append((indices, pair.pack(indices)))
        if land:
            pair.receiver.clear()
            for sent, message in flying:
                assert pair.deliver(message) == [f"data-{i}" for i in sent]
            flying.clear()


def test_touch_comes_before_store_so_a_later_item_cannot_evict_an_earlier_one() -> None:
    pair = Pair(capacity=20)
    pair.send([7])
    pair.send([4, 7])
    # 7 (20 bytes) was a hit; storing 4 (8 bytes) then pushed it out on both sides alike.
    assert pair.sender.stats.hits == 1
    assert pair.sender.keys() == pair.receiver.keys() == [key(4)]


def test_an_item_larger_than_the_cache_crosses_every_time_and_evicts_nothing() -> None:
    pair = Pair()
    pair.send([1, 2])
    pair.send([9])
    pair.send([9, 9])
    assert pair.sender.stats.bytes_sent == 1 + 3 + 41 + 41
    assert pair.sender.keys() == pair.receiver.keys() == [key(1), key(2)]


def test_equal_items_of_one_message_cross_once() -> None:
    pair = Pair()
    pair.send([5, 5, 5])
    assert pair.sender.stats == CacheStats(queries=3, hits=2, bytes_sent=8, bytes_saved=16)


def test_repair_forgets_exactly_what_is_missing_and_names_all_of_it() -> None:
    pair = Pair()
    pair.send([1, 2, 3])
    pair.receiver._cached.forget(key(1))
    pair.receiver._cached.forget(key(3))
    message = pair.pack([1, 2, 3])
    assert pair.receiver.missing(message, {}) == [key(1), key(3)]
    assert pair.receiver.keys() == [key(2)]
    pair.deliver(message)
    assert pair.sender.stats.repairs == 2
    assert set(pair.sender.keys()) == set(pair.receiver.keys())


def test_data_nobody_can_repair_is_reported_and_the_rest_arrives() -> None:
    pair = Pair()
    pair.send([1, 2])
    pair.receiver.clear()
    message = [*pair.pack([1]), *pair.pack([3])]
    assert pair.receiver.resolve(message, {}) == [None, "data-3"]


def test_without_a_cache_all_data_travels_and_nothing_is_counted() -> None:
    pair = Pair(capacity=0)
    pair.send([5, 5])
    assert pair.sender.stats == CacheStats(bytes_sent=16)
    assert pair.receiver.keys() == []


def test_two_senders_have_two_mirrors() -> None:
    first, second = Pair(), Pair()
    first.send([1])
    second.send([1])
    assert first.sender.stats.hits == second.sender.stats.hits == 0


def test_what_had_to_be_sent_again_was_no_hit() -> None:
    sender = SenderCache(1000)
    sender.plan_send([(b"a", 10), (b"b", 20)])
    sender.plan_send([(b"a", 10), (b"b", 20), (b"a", 10)])
    assert (sender.stats.hits, sender.stats.bytes_saved, sender.stats.bytes_sent) == (3, 40, 30)
    sender.repair({b"a": 10})
    # The second "a" of the message is still one: its data crossed with the first.
    assert (sender.stats.hits, sender.stats.bytes_saved, sender.stats.bytes_sent) == (2, 30, 40)
    sender.forget([b"b", b"never seen"])
    assert (sender.stats.queries, sender.stats.hits, sender.stats.bytes_saved) == (5, 1, 10)
