"""The item cutter against a naive offline one, for any order and any chunking of audio, gaps and flushes."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.boundary.items import AudioItem, ItemCutter

# Voxtral Realtime: 80 ms positions, three mel frames of look-back.
VOXTRAL = (1280, 680, 40)

# An operation: samples to cut (by seed and count), a gap, or a flush with so many pad positions.
Operation = tuple[str, int]
# offset, length, sample, pcm
Row = tuple[int, int, int, bytes | None]
Shape = tuple[int, int, int]
Session = tuple[Shape, int, int, list[Operation]]


def sound(count: int, start: int = 0) -> NDArray[np.float32]:
    """Samples that are all different and none zero, so that a misplaced one shows."""
    return np.arange(start + 1, start + count + 1, dtype=np.float32)


class NaiveCutter:
    """Cuts whole segments at their end, position by position, with all of the audio at hand."""

    def __init__(self, position: int, look_back: int, look_ahead: int, per_item: int, first_offset: int) -> None:
        self.position, self.look_back, self.look_ahead = position, look_back, look_ahead
        self.per_item = per_item
        self.offset, self.sample = first_offset, 0
        # Gaps one position at a time.
        self.items: list[Row] = []

    def segment(self, samples: NDArray[np.float32], pad_positions: int) -> None:
        """Zeros in `samples` are declared silence."""
        own_positions = -(-len(samples) // self.position)
        total = own_positions + pad_positions
        row = np.zeros(self.look_back + total * self.position + self.look_ahead, np.float32)
        row[self.look_back : self.look_back + len(samples)] = samples
        run: list[int] = []
        for p in range(total):
            silent = not self.cut(row, p, 1).any()
            if run and (silent or p == own_positions or len(run) == self.per_item):
                self.emit(run, row, own_positions, len(samples))
            if silent:
                self.emit([p], None, own_positions, len(samples))
            else:
                run.append(p)
        if run:
            self.emit(run, row, own_positions, len(samples))
        self.offset += total
        self.sample += len(samples)

    def cut(self, row: NDArray[np.float32], p: int, positions: int) -> NDArray[np.float32]:
        size = self.look_back + positions * self.position + self.look_ahead
        return row[p * self.position : p * self.position + size]

    def emit(self, run: list[int], row: NDArray[np.float32] | None, own_positions: int, samples: int) -> None:
        p = run[0]
        inside = p * self.position if p < own_positions else samples
        pcm = None if row is None else self.cut(row, p, len(run)).tobytes()
        self.items.append((self.offset + p, len(run), self.sample + inside, pcm))
        run.clear()


def apply(cutter: ItemCutter, operations: list[Operation], chunk: int | None = None) -> list[AudioItem]:
    """Run the operations; with `chunk`, audio and gaps come in pieces of that many samples."""
    items: list[AudioItem] = []
    for kind, count in operations:
        if kind == "flush":
            items += cutter.flush(count)
            continue
        step = chunk or max(count, 1)
        for done in range(0, count, step):
            size = min(step, count - done)
            if kind == "cut":
                items += cutter.cut(sound(size, cutter.samples_in))
            else:
                items += cutter.cut_gap(size)
    return items


def offline(shape: Shape, per_item: int, first_offset: int, operations: list[Operation]) -> NaiveCutter:
    naive = NaiveCutter(*shape, per_item, first_offset)
    segment: list[NDArray[np.float32]] = []
    total = 0
    for kind, count in operations:
        if kind == "flush":
            if sum(map(len, segment)):
                naive.segment(np.concatenate(segment), count)
            segment = []
            continue
        segment.append(sound(count, total) if kind == "cut" else np.zeros(count, np.float32))
        total += count
    assert not segment
    return naive


def assert_same(items: list[AudioItem], expected: list[Row]) -> None:
    """Equal, except that gaps are bundled: how, depends on when they were declared."""
    rows = iter(expected)
    for item in items:
        pcm = None if item.pcm is None else item.pcm.tobytes()
        if pcm is not None:
            assert next(rows) == (item.offset, item.length, item.sample, pcm)
            continue
        for i in range(item.length):
            offset, _, sample, silence = next(rows)
            assert (offset, silence) == (item.offset + i, None)
            assert i > 0 or sample == item.sample
    assert next(rows, None) is None


def exact(items: list[AudioItem]) -> list[Row]:
    return [(i.offset, i.length, i.sample, None if i.pcm is None else i.pcm.tobytes()) for i in items]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ItemCutter(0, 0, 0)
    with pytest.raises(ValueError, match="at least one"):
        ItemCutter(4, 0, 0, positions_per_item=0)
    for shape in ((4, -1, 0), (4, 0, -1)):
        with pytest.raises(ValueError, match="negative"):
            ItemCutter(*shape)
    with pytest.raises(ValueError, match="negative"):
        ItemCutter(4, 0, 0, first_offset=-1)


def test_bad_samples_gaps_and_padding_are_refused_and_change_nothing() -> None:
    cutter = ItemCutter(4, 2, 1)
    cutter.cut(sound(3))
    with pytest.raises(ValueError, match="float32"):
        cutter.cut(np.zeros(4, np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one-dimensional"):
        cutter.cut(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="-1 samples"):
        cutter.cut_gap(-1)
    with pytest.raises(ValueError, match="-1 positions"):
        cutter.flush(-1)
    assert cutter.samples_in == 3
    assert exact(cutter.cut(sound(2, 3))) == exact(ItemCutter(4, 2, 1).cut(sound(5)))


def test_an_item_waits_for_its_look_ahead() -> None:
    cutter = ItemCutter(*VOXTRAL, first_offset=32)
    assert cutter.cut(sound(1280 + 39)) == []
    (item,) = cutter.cut(sound(1, 1319))
    assert (item.offset, item.length, item.sample) == (32, 1, 0)
    assert item.pcm is not None and item.pcm.flags.c_contiguous
    assert not item.pcm[:680].any()
    assert item.pcm[680:].tolist() == sound(1320).tolist()
    (item,) = cutter.cut(sound(1280, 1320))
    assert item.pcm is not None
    assert (item.offset, item.sample, item.pcm[0]) == (33, 1280, 1280 - 680 + 1)
    assert cutter.next_offset == 34
    assert cutter.samples_in == 2600


def test_flush_pads_the_last_position_and_then_whole_positions() -> None:
    cutter = ItemCutter(*VOXTRAL)
    cutter.cut(sound(1280))
    last, pad, gap = cutter.flush(10)
    assert last.pcm is not None and pad.pcm is not None and gap.pcm is None
    assert not last.pcm[680 + 1280 :].any()
    # The first padding position still looks back at sound; the others are silent throughout.
    assert pad.pcm[:680].tolist() == sound(1280)[600:].tolist() and not pad.pcm[680:].any()
    assert [(i.offset, i.length, i.sample) for i in (last, pad, gap)] == [(0, 1, 0), (1, 1, 1280), (2, 9, 1280)]


def test_a_look_back_over_several_positions_keeps_as_many_padding_positions_real() -> None:
    cutter = ItemCutter(10, 25, 0)
    cutter.cut(sound(10))
    items = cutter.flush(5)
    assert [(i.offset, i.length, i.pcm is None) for i in items] == [
        (1, 1, False),
        (2, 1, False),
        (3, 1, False),
        (4, 2, True),
    ]


def test_a_segment_after_a_flush_does_not_see_the_one_before() -> None:
    cutter = ItemCutter(*VOXTRAL)
    cutter.cut(sound(1000))
    cutter.flush(2)
    assert cutter.next_offset == 3
    (item,) = cutter.cut(sound(1320, 1000))
    assert item.pcm is not None
    assert (item.offset, item.sample) == (3, 1000)
    assert not item.pcm[:680].any()


def test_flush_does_nothing_when_nothing_came_since_the_last() -> None:
    cutter = ItemCutter(*VOXTRAL)
    assert cutter.flush(3) == []
    cutter.cut(sound(10))
    assert cutter.flush(3)
    assert cutter.flush(3) == []
    assert cutter.cut(sound(0)) == [] and cutter.cut_gap(0) == [] and cutter.flush(3) == []
    assert cutter.next_offset == 4


def test_a_long_gap_costs_no_audio_and_is_one_item() -> None:
    cutter = ItemCutter(*VOXTRAL)
    cutter.cut(sound(1280))
    hours = 1280 * 45_000 * 24
    items = cutter.cut_gap(hours)
    real = [item for item in items if item.pcm is not None]
    assert len(items) == 3
    # The position before, and the one that looks back at it.
    assert [item.offset for item in real] == [0, 1]
    # The last position waits: sound may yet follow within its look-ahead.
    assert sum(item.length for item in items) == cutter.next_offset == 1 + 45_000 * 24 - 1
    assert cutter.samples_in == 1280 + hours


def test_sound_after_a_gap_is_seen_by_the_position_before_it() -> None:
    cutter = ItemCutter(10, 0, 4)
    assert [item.pcm for item in cutter.cut_gap(30)] == [None]
    (item,) = cutter.cut(sound(4))
    assert item.pcm is not None
    assert (item.offset, item.sample, item.pcm.tolist()) == (2, 20, [0.0] * 10 + [1.0, 2.0, 3.0, 4.0])


def test_items_of_several_positions_end_early_at_silence_and_at_the_end() -> None:
    cutter = ItemCutter(10, 0, 0, positions_per_item=4)
    items = apply(cutter, [("cut", 60), ("gap", 20), ("cut", 15), ("flush", 1)])
    assert [(i.offset, i.length, i.sample, i.pcm is None) for i in items] == [
        (0, 4, 0, False),
        (4, 2, 40, False),
        (6, 2, 60, True),
        (8, 2, 80, False),
        (10, 1, 95, True),
    ]
    assert [None if i.pcm is None else i.pcm.size for i in items] == [40, 20, None, 20, None]


def test_a_short_item_does_not_keep_a_whole_window_alive() -> None:
    cutter = ItemCutter(10, 0, 0, positions_per_item=1000)
    cutter.cut(sound(10))
    (item,) = cutter.flush(0)
    assert item.pcm is not None and item.pcm.base is None and item.pcm.size == 10


SHAPES = st.one_of(
    st.tuples(st.integers(1, 12), st.integers(0, 30), st.integers(0, 30)),
    st.sampled_from([VOXTRAL, (1280, 0, 0)]),
)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    shape = draw(SHAPES)
    longest = 5 * shape[0] + shape[1] + shape[2]
    samples = st.integers(0, longest)
    operation = st.one_of(
        st.tuples(st.just("cut"), samples),
        st.tuples(st.just("gap"), samples),
        st.tuples(st.just("flush"), st.integers(0, 70)),
    )
    operations = [*draw(st.lists(operation, max_size=12)), ("flush", draw(st.integers(0, 5)))]
    return shape, draw(st.integers(1, 4)), draw(st.integers(0, 50)), operations


@settings(max_examples=150, deadline=None)
@given(session=sessions(), chunk=st.integers(1, 50))
def test_any_order_and_any_chunking_equals_offline(session: Session, chunk: int) -> None:
    shape, per_item, first_offset, operations = session
    naive = offline(shape, per_item, first_offset, operations)
    for pieces in (None, chunk if shape[0] < 100 else chunk * 37):
        cutter = ItemCutter(*shape, per_item, first_offset)
        items = apply(cutter, operations, pieces)
        assert_same(items, naive.items)
        assert cutter.samples_in == naive.sample
        assert cutter.next_offset == naive.offset


@settings(max_examples=60, deadline=None)
@given(session=sessions())
def test_offsets_are_contiguous_and_samples_never_run_ahead(session: Session) -> None:
    shape, per_item, first_offset, operations = session
    cutter = ItemCutter(*shape, per_item, first_offset)
    items = apply(cutter, operations)
    offsets = [first_offset, *(item.offset + item.length for item in items)]
    assert [item.offset for item in items] == offsets[:-1]
    assert offsets[-1] == cutter.next_offset
    assert all(a.sample <= b.sample for a, b in pairwise(items))
    assert all(item.sample <= cutter.samples_in for item in items)
    for item in items:
        if item.pcm is None:
            assert item.length >= 1
        else:
            assert item.length <= per_item
            assert item.pcm.dtype == np.float32
            assert len(item.pcm) == shape[1] + item.length * shape[0] + shape[2]


@pytest.mark.parametrize("shape", [VOXTRAL, (1280, 0, 0), (7, 20, 3)])
@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 6000), cuts=st.lists(st.integers(0, 6000), max_size=20))
def test_any_split_gives_identical_items_whose_own_samples_are_the_input(
    shape: Shape, count: int, cuts: list[int]
) -> None:
    samples = sound(count)
    whole = ItemCutter(*shape)
    expected = exact(whole.cut(samples) + whole.flush(0))
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    for pieces in (edges, list(range(count + 1))):
        cutter = ItemCutter(*shape)
        items = [item for a, b in pairwise(pieces) for item in cutter.cut(samples[a:b])] + cutter.flush(0)
        assert exact(items) == expected
    position, look_back, _ = shape
    own = b"".join(pcm[4 * look_back : 4 * (look_back + position)] for _, _, _, pcm in expected if pcm is not None)
    padding = -count % position
    assert own == samples.tobytes() + bytes(4 * padding)


def test_a_long_push_costs_what_its_items_hold() -> None:
    cutter = ItemCutter(*VOXTRAL)
    # A view of one number, so that only the items take memory; a backlog that is joined again would show.
    ten_minutes = np.broadcast_to(np.float32(0.5), 16_000 * 600)
    tracemalloc.start()
    items = cutter.cut(ten_minutes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(items) == 16_000 * 600 // 1280 - 1
    assert peak < 1.1 * len(items) * 4 * sum(VOXTRAL)


def test_pushed_silence_is_audio_and_not_a_gap() -> None:
    cutter = ItemCutter(*VOXTRAL)
    items = cutter.cut(np.zeros(1280 * 3, np.float32)) + cutter.flush(0)
    assert [item.pcm is None for item in items] == [False] * 3


def test_memory_does_not_grow_with_the_session() -> None:
    cutter = ItemCutter(*VOXTRAL)
    chunk = np.full(320, 0.5, np.float32)

    def held_after(chunks: int) -> int:
        for _ in range(chunks):
            cutter.cut(chunk)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    early = held_after(100)
    late = held_after(20_000)
    tracemalloc.stop()
    assert late <= early + 5_000, "a byte for four chunks at most: what others do in this process is counted too"


def test_positions_beyond_ten_million_work() -> None:
    cutter = ItemCutter(*VOXTRAL, first_offset=10_000_000)
    cutter.cut_gap(10_000_000 * 1280)
    (item,) = cutter.cut(sound(40))
    assert (item.offset, item.sample) == (19_999_999, 9_999_999 * 1280)
