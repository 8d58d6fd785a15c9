from hypothesis import given
from hypothesis import strategies as st

from engine.core.caches import PagePool, RingTable
from engine.spec import KvGroup

GROUP = KvGroup("decoder", window_positions=64, page_positions=16, bytes_per_position=1)


def ring(pool: PagePool, group: KvGroup = GROUP) -> RingTable:
    pool.reserve(group.ring_pages)
    return RingTable(group, pool)


def test_a_ring_holds_its_window_and_the_page_being_written() -> None:
    assert GROUP.ring_pages == 5
    assert KvGroup("encoder", 188, 8, 1).ring_pages == 25


def test_a_ring_never_holds_more_than_one_window() -> None:
    pool = PagePool(10)
    table = ring(pool)
    changes = []
    for end in range(1, 10_000):
        if end > table.paged_until:
            changes += table.extend(end)
    assert [index for index, _ in changes] == [0, 1, 2, 3, 4]
    assert len(table.pages) == GROUP.ring_pages
    table.extend(50_000_000)
    assert len(table.pages) == GROUP.ring_pages and table.paged_until == 50_000_000
    table.close()
    pool.check_integrity([])


def test_a_jump_covers_everything_on_the_way() -> None:
    table = ring(PagePool(5))
    assert [index for index, _ in table.extend(33)] == [0, 1, 2]
    assert table.paged_until == 48


def test_reserving_is_refused_before_the_pool_is_exceeded() -> None:
    pool = PagePool(9)
    assert pool.can_reserve(9) and not pool.can_reserve(10)
    pool.reserve(5)
    assert not pool.can_reserve(5)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=60))
def test_pages_are_never_lost_or_shared(steps: list[tuple[int, int]]) -> None:
    pool = PagePool(20)
    rings = [ring(pool) for _ in range(4)]
    ends = [0] * 4
    for which, advance in steps:
        if advance == 0:
            rings[which].close()
            rings[which] = ring(pool)
            ends[which] = 0
        else:
            ends[which] += advance
            rings[which].extend(ends[which])
        pool.check_integrity([page for table in rings for page in table.pages])
