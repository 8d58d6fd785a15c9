"""The search for the largest number of streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from realtime.bench.load_test import largest


@given(capacity=st.integers(0, 300), most=st.integers(1, 300))
def test_search_finds_the_largest_with_few_runs(capacity: int, most: int) -> None:
    asked: list[int] = []

    def meets(streams: int) -> bool:
        asked.append(streams)
        return streams <= capacity

    assert largest(meets, most) == min(capacity, most)
    assert len(asked) == len(set(asked)) <= 20 and all(1 <= streams <= most for streams in asked)
