"""Recent audio is the same however it was cut into items, and keeps no more than it must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.messages import Item
from engine.server.recent_audio import RecentAudio
from engine.spec import ModelSpec

SPEC = ModelSpec("m", 16_000, 1280, rereads_window=True)


def items(cuts: list[tuple[int, bool]]) -> tuple[list[Item], NDArray[np.float32]]:
    """Items of so many samples each, silent or not, and the whole audio."""
    found, whole, at = [], [np.zeros(0, np.float32)], 0
    for position, (count, is_silent) in enumerate(cuts):
        audio = (np.arange(at, at + count) % 30_000 / 32768).astype(np.float32) * (not is_silent)
        found.append(Item(position, 1, at, payload=None if is_silent else audio, samples=count))
        whole.append(audio)
        at += count
    return found, np.concatenate(whole)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6000) | st.integers(16_000, 18_000), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 60_000),
    st.integers(0, 60_000),
    st.integers(0, 60_000),
)
def test_any_items_give_the_same_audio(cuts: list[tuple[int, bool]], dropped: int, start: int, length: int) -> None:
    parts, whole = items(cuts)
    kept = RecentAudio()
    for part in parts:
        kept.add([part], SPEC)
    kept.drop_before(dropped)
    assert kept.end == len(whole) and kept.start <= max(dropped, whole.size)
    expected: NDArray[np.float32] = np.zeros(length, np.float32)
    there = whole[start : start + length]
    expected[: len(there)] = there
    expected[: max(0, kept.start - start)] = 0
    assert kept.cut(start, start + length) == pytest.approx(expected, abs=2e-5)
    first = parts[kept.position or 0]
    assert first.sample == kept.start
    heard = [part for part in parts[first.offset :] if part.payload is not None]
    assert kept.kept_samples == sum(len(part.payload) for part in heard if part.payload is not None)
