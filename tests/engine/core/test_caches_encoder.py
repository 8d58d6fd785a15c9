from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.caches import CachedRows, EncoderCache, StreamEntries


def put(cache: EncoderCache, held: StreamEntries, index: int, key: bytes, rows: int = 1) -> CachedRows:
    assert cache.lookup(held, index, key) is None
    entry = cache.allocate(held, index, key, rows)
    assert entry is not None
    return entry


def room(cache: EncoderCache) -> int:
    """Rows that `allocate` could assign: free ones and those of entries without references."""
    return cache.capacity - sum(len(entry) for entry in cache.entries.values() if entry.references)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        EncoderCache(0)


def test_the_silence_row_is_never_handed_out() -> None:
    cache = EncoderCache(4)
    assert sorted(put(cache, cache.open("a"), 0, b"x", 4)) == [1, 2, 3, 4]


def test_a_hit_shares_the_rows_between_requests() -> None:
    cache = EncoderCache(4)
    a, b = cache.open("a"), cache.open("b")
    rows = put(cache, a, 0, b"x", 2)
    assert cache.lookup(b, 7, b"x") is rows
    assert (cache.queries, cache.hits) == (2, 1)
    cache.close("a")
    assert room(cache) == 2, "b still holds the entry"
    cache.close("b")
    assert room(cache) == 4
    cache.check_integrity()


def test_a_hit_takes_an_entry_out_of_the_evictable_ones() -> None:
    cache = EncoderCache(2)
    a = cache.open("a")
    put(cache, a, 0, b"x", 2)
    cache.release(a, 0)
    assert room(cache) == 2
    cache.lookup(a, 1, b"x")
    assert room(cache) == 0
    assert cache.allocate(a, 2, b"y", 1) is None


def test_released_entries_stay_until_their_rows_are_needed() -> None:
    cache = EncoderCache(3)
    a = cache.open("a")
    put(cache, a, 0, b"x", 2)
    cache.release(a, 0)
    put(cache, a, 1, b"y", 1)
    assert cache.lookup(a, 2, b"x") is not None


def test_the_oldest_released_goes_first_and_only_as_many_as_needed() -> None:
    cache = EncoderCache(3)
    a = cache.open("a")
    for index, key in enumerate((b"x", b"y", b"z")):
        put(cache, a, index, key)
    for index in (1, 0, 2):
        cache.release(a, index)
    put(cache, a, 3, b"new")
    assert set(cache.entries) == {b"x", b"z", b"new"}
    assert cache.lookup(a, 4, b"x") is not None and cache.lookup(a, 5, b"z") is not None


def test_an_entry_released_again_counts_from_its_last_release() -> None:
    cache = EncoderCache(2)
    a = cache.open("a")
    for index, key in enumerate((b"x", b"y")):
        put(cache, a, index, key)
        cache.release(a, index)
    put(cache, a, 2, b"z")  # evicts x; y is the only one released
    cache.release(a, 2)
    cache.lookup(a, 3, b"y")
    cache.release(a, 3)  # now z is the older one
    put(cache, a, 4, b"w")
    assert set(cache.entries) == {b"y", b"w"}
    cache.check_integrity()


def test_two_equal_inputs_of_one_request_hold_two_references() -> None:
    cache = EncoderCache(1)
    a = cache.open("a")
    put(cache, a, 0, b"silence")
    cache.lookup(a, 1, b"silence")
    cache.release(a, 0)
    assert room(cache) == 0, "the second input still needs it"
    cache.release(a, 1)
    assert room(cache) == 1


def test_looking_the_same_input_up_twice_holds_one_reference() -> None:
    cache = EncoderCache(1)
    a = cache.open("a")
    put(cache, a, 0, b"x")
    cache.lookup(a, 0, b"x")
    cache.release(a, 0)
    assert room(cache) == 1
    cache.check_integrity()


def test_releasing_twice_or_never_held_is_harmless() -> None:
    cache = EncoderCache(1)
    a = cache.open("a")
    put(cache, a, 0, b"x")
    assert cache.release(a, 0) == 1
    assert cache.release(a, 0) == 0
    assert cache.release(a, 99) == 0
    cache.check_integrity()


def test_releasing_cleans_the_index_even_when_the_entry_is_gone() -> None:
    cache = EncoderCache(1)
    a, b = cache.open("a"), cache.open("b")
    put(cache, a, 0, b"x")
    cache.close("a")
    put(cache, b, 0, b"y")
    assert cache.release(a, 0) == 0 or 0 not in a
    assert list(b) == [0]
    cache.close("a")
    cache.close("b")
    cache.check_integrity()


def test_an_evicted_entry_can_be_reserved_again() -> None:
    cache = EncoderCache(1)
    a = cache.open("a")
    put(cache, a, 0, b"x")
    cache.release(a, 0)
    put(cache, a, 1, b"y")
    cache.release(a, 1)
    put(cache, a, 2, b"x")
    assert set(cache.entries) == {b"x"}
    cache.check_integrity()


def test_evicting_for_ever_leaves_nothing_behind() -> None:
    cache = EncoderCache(64)
    a = cache.open("a")
    for index in range(20_000):
        put(cache, a, index, b"%d" % index)
        cache.release(a, index)
    assert len(cache.entries) <= 64 and len(cache._released_new) + len(cache._released_old) <= 2 * 64
    silence = put(cache, a, -1, b"silence")
    for index in range(20_000):
        assert cache.lookup(a, index, b"silence") is silence
        cache.release(a, index)
    assert len(cache._released_new) + len(cache._released_old) <= 2 * 64


class CacheMachine(RuleBasedStateMachine):
    """Any order of operations keeps every counter right."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(12)
        self.held: dict[str, StreamEntries] = {}
        self.next_index = 0

    requests = st.sampled_from(["a", "b", "c"])
    keys = st.sampled_from([bytes([letter]) * (1 + letter % 5) for letter in range(10)])

    @rule(request=requests)
    def open(self, request: str) -> None:
        if request not in self.held:
            self.held[request] = self.cache.open(request)

    @rule(request=requests)
    def close(self, request: str) -> None:
        self.cache.close(request)
        self.held.pop(request, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=keys)
    def fetch(self, data: st.DataObject, key: bytes) -> None:
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        index = data.draw(st.sampled_from([*held, self.next_index]))
        self.next_index += 1
        if self.cache.lookup(held, index, key) is None and index not in held:
            fits = len(key) <= room(self.cache)
            entry = self.cache.allocate(held, index, key, len(key))
            assert (entry is not None) == fits
            assert entry is None or len(entry) == len(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        self.cache.release(held, data.draw(st.sampled_from([*held, 10_000])))

    @invariant()
    def is_whole(self) -> None:
        self.cache.check_integrity()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCacheMachine = CacheMachine.TestCase
