from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.stream import SampleClock, Timeline
from engine.messages import Item


def item(offset: int, length: int = 1, mask: list[bool] | None = None) -> Item:
    return Item(offset, length, offset * 1280, b"k", b"pcm", mask)


def timeline(*spans: tuple[int, int]) -> Timeline:
    row = Timeline()
    for offset, length in spans:
        row.append(item(offset, length))
    return row


class TestWindow:
    def test_no_items(self) -> None:
        assert timeline().window(0, 10) == (0, 0)

    def test_an_item_that_ends_exactly_at_start_is_out(self) -> None:
        assert timeline((0, 4), (4, 4)).window(4, 6) == (1, 2)

    def test_an_item_that_starts_exactly_at_end_is_out(self) -> None:
        assert timeline((0, 4), (4, 4)).window(2, 4) == (0, 1)

    def test_past_the_last_item(self) -> None:
        lo, hi = timeline((0, 4)).window(4, 9)
        assert lo == hi == 1

    def test_inside_a_gap(self) -> None:
        lo, hi = timeline((0, 2), (8, 2)).window(3, 7)
        assert lo == hi == 1

    def test_empty_and_inverted_windows(self) -> None:
        row = timeline((0, 4), (4, 4))
        for start, end in ((2, 2), (6, 2), (100, 0)):
            lo, hi = row.window(start, end)
            assert lo == hi

    def test_a_zero_length_item_inside_a_window_is_in_it(self) -> None:
        row = timeline((0, 3), (3, 0), (3, 3))
        assert row.window(1, 5) == (0, 3)
        assert row.window(3, 5) == (2, 3)

    def test_pruned_indices_stay_absolute(self) -> None:
        row = Timeline()
        for offset in range(200):
            row.append(item(offset))
        row.prune(150)
        assert row.first == 150 and len(row) == 200
        assert row.window(0, 1000) == (150, 200)
        assert row.window(180, 182) == (180, 182)
        assert row.item(199).offset == 199

    def test_positions_beyond_ten_million(self) -> None:
        row = Timeline(10_000_000)
        for offset in range(10_000_000, 10_000_050):
            row.append(item(offset))
        assert row.window(10_000_020, 10_000_023) == (20, 23)


class Counting(int):
    """An int that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: Any) -> bool:
        Counting.comparisons += 1
        return int.__lt__(self, other)


@pytest.mark.parametrize("count", [1_000, 30_000, 1_000_000])
def test_comparisons_per_lookup_grow_with_the_logarithm(count: int) -> None:
    row = Timeline()
    row._offsets = [Counting(index) for index in range(count)]
    row._ends = [Counting(index + 1) for index in range(count)]
    bound = 2 * math.log2(count) + 4
    for start in (0, count // 3, count - 2):
        Counting.comparisons = 0
        lo, hi = row.window(Counting(start), Counting(start + 1))  # type: ignore[arg-type]
        assert (lo, hi) == (start, start + 1)
        assert 0 < Counting.comparisons <= bound


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Item(1, 1, 0), "positions before 4 are covered"),
        (Item(3, 4, 0), "positions before 4 are covered"),
        (Item(-1, 1, 0), "positions before 4 are covered"),
        (Item(4, -2, 0), "item of -2 positions"),
        (Item(4, 2, 0, mask=[True]), "1 entries for a range of 2"),
    ],
)
def test_a_bad_item_changes_nothing(bad: Item, complaint: str) -> None:
    row = timeline((0, 4))
    with pytest.raises(ValueError, match=complaint):
        row.append(bad)
    assert len(row) == 1 and row.end == 4
    row.check_integrity()


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=120),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 60)), min_size=1, max_size=8),
    st.integers(0, 500),
)
def test_window_equals_a_scan(
    steps: list[tuple[int, int, bool]], windows: list[tuple[int, int]], prune_at: int
) -> None:
    row = Timeline()
    spans = []
    for gap, length, masked in steps:
        spans.append((row.end + gap, length))
        row.append(item(row.end + gap, length, [False] * length if masked else None))
    row.prune(prune_at)
    row.check_integrity()
    for start, length in windows:
        end = start + length
        lo, hi = row.window(start, end)
        expected = [
            index
            for index, (offset, size) in enumerate(spans)
            if index >= row.first and offset + size > start and offset < end and end > start
        ]
        assert list(range(lo, hi)) == expected
        for index in range(lo, hi):
            assert (row.positions(index).offset, row.positions(index).length) == spans[index]


def test_memory_of_a_pruned_timeline_is_bounded() -> None:
    row = Timeline()
    for offset in range(50_000):
        row.append(item(offset, 1, [False] if offset % 3 == 0 else None))
        row.prune(offset - 64)
    assert len(row._items) == len(row._ends) == len(row._offsets) <= 200
    assert len(row._masked) <= 100


def test_arrival_is_that_of_the_first_item_not_yet_computed() -> None:
    row = Timeline()
    for offset in range(3):
        entry = item(offset)
        entry.arrival = 100 + offset
        row.append(entry)
    assert row.arrival_at(0) == 100
    assert row.arrival_at(2) == 102
    assert row.arrival_at(3) is None


class TestSampleClock:
    def test_positions_and_samples_run_together(self) -> None:
        clock = SampleClock(1280, first_position=32)
        clock.append(Item(32, 10, 0))
        assert clock.sample_at(32) == 0
        assert clock.sample_at(34.5) == 3200
        assert clock.sample_at(0) == 0
        assert clock.position_at(3200) == 34

    def test_silence_inserted_by_a_flush_takes_no_audio_time(self) -> None:
        clock = SampleClock(100, first_position=0)
        clock.append(Item(0, 1, 0))
        clock.append(Item(1, 1, 100, samples=30))  # padded to a whole position
        clock.append(Item(2, 5, 130, samples=0))  # inserted
        clock.append(Item(7, 1, 130))
        assert clock.sample_at(1) == 100
        assert [clock.sample_at(position) for position in (2, 4, 6, 7)] == [130] * 4
        assert clock.sample_at(7.5) == 180
        assert clock.position_at(99) == 0 and clock.position_at(130) == 7
        assert clock.end_sample == 230

    def test_samples_must_not_run_backwards(self) -> None:
        clock = SampleClock(100, 0)
        clock.append(Item(0, 2, 0))
        with pytest.raises(ValueError, match="samples before 200 are already covered"):
            clock.append(Item(2, 1, 150))

    def test_flushes_do_not_accumulate(self) -> None:
        clock = SampleClock(100, 0)
        for turn in range(1_000):
            position = turn * 10
            clock.append(Item(position, 4, turn * 400))
            clock.append(Item(position + 4, 6, turn * 400 + 400, samples=0))
            clock.prune(position - 20)
        assert len(clock._positions) < 12
        assert clock.sample_at(9_990 + 2) == 999 * 400 + 200
