"""Audio kept for resending: only the bound drops audio, and no sample is counted twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realtime.client.resuming_session import UnacknowledgedAudio


def pcm(first: int, end: int) -> bytes:
    return np.arange(first, end).astype("<i2").tobytes()


def test_full_store_loses_the_oldest_and_counts_them() -> None:
    kept = UnacknowledgedAudio(100)
    kept.append(pcm(0, 80))
    kept.append(pcm(80, 130))
    assert (kept.first, kept.end, kept.lost, kept.room) == (30, 130, 30, 0)
    assert kept.since(30, 1000) == pcm(30, 130)


def test_one_chunk_larger_than_the_store_keeps_its_end() -> None:
    kept = UnacknowledgedAudio(10)
    kept.append(pcm(0, 25))
    assert kept.since(15, 100) == pcm(15, 25) and kept.lost == 15


@pytest.mark.parametrize("confirmed", [0, -5, 3])
def test_old_news_changes_nothing(confirmed: int) -> None:
    kept = UnacknowledgedAudio(100)
    kept.append(pcm(0, 10))
    kept.acknowledge(5)
    kept.acknowledge(confirmed)
    assert kept.first == 5


def test_more_confirmed_than_was_sent_empties_it() -> None:
    kept = UnacknowledgedAudio(100)
    kept.append(pcm(0, 10))
    kept.acknowledge(999)
    assert (kept.first, kept.end, kept.lost) == (10, 10, 0) and kept.since(10, 5) == b""


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=30))
def test_what_is_kept_is_always_the_sound_between_first_and_end(steps: list[tuple[int, int]]) -> None:
    kept, end = UnacknowledgedAudio(64), 0
    for length, confirmed in steps:
        kept.append(pcm(end, end + length))
        end += length
        kept.acknowledge(confirmed)
        assert kept.end == end and 0 <= end - kept.first <= 64
        for start in (kept.first, (kept.first + end) // 2):
            assert kept.since(start, 1000) == pcm(start, end)
            assert kept.since(start, 7) == pcm(start, min(end, start + 7))


def test_gap_keeps_its_place_and_takes_no_room() -> None:
    kept = UnacknowledgedAudio(100)
    kept.append(pcm(0, 40))
    kept.append_gap(1_000_000)
    kept.append_gap(500)
    kept.append(pcm(0, 60))
    assert (kept.end, kept.room, kept.lost) == (1_000_600, 0, 0)
    assert kept.since(10, 1000) == pcm(10, 40)
    assert kept.since(40, 1000) == 1_000_500 and kept.since(500, 10) == 1_000_040
    assert kept.since(1_000_540, 1000) == pcm(0, 60)
    # The oldest audio is dropped, and a gap at the front with it; only audio is lost.
    kept.append(pcm(60, 110))
    assert (kept.first, kept.lost) == (1_000_550, 50) and kept.since(1_000_550, 9) == pcm(10, 19)


def test_confirmation_within_a_gap_leaves_its_rest() -> None:
    kept = UnacknowledgedAudio(100)
    kept.append(pcm(0, 10))
    kept.append_gap(30)
    kept.append(pcm(0, 5))
    kept.acknowledge(25)
    assert (kept.first, kept.room) == (25, 95) and kept.since(25, 100) == 15
    kept.acknowledge(45)
    assert (kept.first, kept.room) == (45, 100) and kept.since(45, 100) == b""
