"""The memory plan of windowed models on a device: what fits, and what it says when something does not."""

from __future__ import annotations

import pytest
import torch

from engine.models.whisper import Whisper, WhisperConfig
from engine.runner.device import GIB, NotEnoughMemory
from engine.runner.windowed.runner import windowed_spec
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import MAX_ROWS, MAX_STREAMS, WindowMemory, longest_window, plan_windows

SPEC = windowed_spec("whisper", 192, 10, 350)
# Wide in its decoder and light to make.
CONFIG = WhisperConfig(80, 1000, 1500, 256, 4, 1, 448, 4, 24)


@pytest.fixture(scope="module")
def model() -> Whisper:
    return Whisper(CONFIG)


def plan(model: Whisper, gib: float, streams: int | None = None) -> WindowMemory:
    longest = longest_window(SPEC, Policy())
    room = int(gib * GIB)
    return plan_windows(model, SPEC, room, dtype=torch.float16, longest=longest, max_streams=streams)


@pytest.mark.parametrize("gib", [2, 4, 8, 24, 139])
def test_what_is_planned_fits(model: Whisper, gib: float) -> None:
    memory = plan(model, gib)
    assert memory.total_bytes <= gib * GIB
    assert 1 <= memory.rows <= MAX_ROWS and 1 <= memory.streams <= MAX_STREAMS
    assert memory.windows_per_step * SPEC.window_positions >= SPEC.window_for(live=False)


def test_a_large_device_has_room_for_whole_batches(model: Whisper) -> None:
    memory = plan(model, 139)
    assert (memory.rows, memory.streams) == (MAX_ROWS, MAX_STREAMS)


def test_streams_that_were_asked_for_come_first(model: Whisper) -> None:
    few, many = plan(model, 8, 4), plan(model, 8, 2000)
    assert (few.streams, many.streams) == (4, 2000) and many.rows < few.rows
    assert many.total_bytes <= 8 * GIB


def test_too_little_memory_says_how_much_is_needed(model: Whisper) -> None:
    with pytest.raises(NotEnoughMemory, match=r"for its weights, .* to read windows .* a stream; 1\.0 GiB are free"):
        plan(model, 1)
    with pytest.raises(NotEnoughMemory, match=r"for 5000 streams; 8\.0 GiB are free"):
        plan(model, 8, 5000)
