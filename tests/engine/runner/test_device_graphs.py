"""Batch sizes that are recorded."""

from __future__ import annotations

import pytest

from engine.runner.device import batch_sizes


@pytest.mark.parametrize("largest", [1, 2, 5, 64, 193, 410, 512])
def test_sizes_rise_to_the_largest(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == 1


def test_padding_stays_small() -> None:
    sizes = batch_sizes(512)
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert larger - smaller <= max(1, larger // 3)
        if smaller >= 64:
            assert larger - smaller <= larger // 7 + 1
