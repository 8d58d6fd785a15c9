"""The memory plan: what fits, and what it says when something does not."""

from __future__ import annotations

import pytest
import torch

from engine.models.voxtral_realtime import voxtral_mini_4b
from engine.runner.device import GIB, NotEnoughMemory
from engine.runner.frames.memory import (
    MemoryPlan,
    kv_bytes_per_stream,
    plan_memory,
    plan_share,
    stack_layouts,
    voxtral_spec,
)

H200_GIB = 139


def plan(gib: float, streams: int | None = None, window: int = 1024, kv: torch.dtype = torch.bfloat16) -> MemoryPlan:
    return plan_memory(
        voxtral_mini_4b(),
        int(gib * GIB),
        decoder_window=window,
        dtype=torch.bfloat16,
        kv_dtype=kv,
        max_streams=streams,
    )


def test_too_little_for_the_model_says_how_much_is_needed() -> None:
    with pytest.raises(NotEnoughMemory, match=r"8\.3 GiB for its weights.*for each stream; 8\.0 GiB are free"):
        plan(8)


def test_too_many_streams_says_how_many_fit() -> None:
    with pytest.raises(NotEnoughMemory, match=r"500 streams need .*139\.0 GiB are free: 4\d\d streams fit"):
        plan(H200_GIB, 500)


@pytest.mark.parametrize("window", [0, 8193])
def test_windows_the_model_was_not_trained_for(window: int) -> None:
    with pytest.raises(ValueError, match=r"choose 1 to 8192"):
        plan(H200_GIB, window=window)


@pytest.mark.parametrize(
    ("window", "kv", "wanted"),
    [(1024, torch.bfloat16, 400), (1024, torch.float8_e4m3fn, 600), (8192, torch.bfloat16, 100)],
)
def test_an_h200_has_room_for_what_is_promised(window: int, kv: torch.dtype, wanted: int) -> None:
    fits = plan(H200_GIB, window=window, kv=kv)
    assert fits.streams >= wanted
    assert fits.total_bytes <= H200_GIB * GIB


def test_a_plan_gives_every_stream_whole_rings() -> None:
    fits = plan(40, 50)
    layouts = stack_layouts(voxtral_mini_4b(), 1024, torch.bfloat16)
    assert fits.streams == 50
    assert fits.group_pages == tuple(50 * layout.group.ring_pages for layout in layouts)
    assert fits.cache_embeds >= 50 * 16


def test_bytes_per_position_are_those_of_the_model() -> None:
    encoder, decoder = (layout.group for layout in stack_layouts(voxtral_mini_4b(), 1024, torch.bfloat16))
    assert decoder.bytes_per_position == 104 * 1024
    assert encoder.bytes_per_position == 4 * 256 * 1024
    # 750 frames reach into 189 positions: 187 whole ones and parts of two.
    assert encoder.window_positions == 189
    eight_bit = stack_layouts(voxtral_mini_4b(), 1024, torch.float8_e4m3fn)
    spec = voxtral_spec(voxtral_mini_4b(), eight_bit, "voxtral")
    assert kv_bytes_per_stream(spec) < 165 * 1024 * 1024


def shared_plan(total_gib: float, free_gib: float, engines: int, streams: int | None = None) -> MemoryPlan:
    free, total = int(free_gib * GIB), int(total_gib * GIB)
    options = {"decoder_window": 1024, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "max_streams": streams}
    return plan_share(voxtral_mini_4b(), free, total, engines, **options)  # type: ignore[arg-type]


def test_two_engines_on_one_device_take_equally_many_streams() -> None:
    first = shared_plan(H200_GIB, H200_GIB - 1, 2)
    second = shared_plan(H200_GIB, H200_GIB - first.total_bytes / GIB, 2)
    assert first == second and 2 * first.total_bytes <= H200_GIB * GIB
    assert first.streams < plan(H200_GIB).streams / 2 < shared_plan(H200_GIB, H200_GIB, 1).streams


def test_a_device_that_is_too_small_for_two_engines_says_so() -> None:
    assert plan(16).streams >= 1
    with pytest.raises(NotEnoughMemory, match=r"2 engines share the device.*16\.0 GiB \(model\.spare\): the model"):
        shared_plan(16, 16, 2)
    with pytest.raises(NotEnoughMemory, match=r"2 engines share.*300 streams need"):
        shared_plan(H200_GIB, H200_GIB, 2, streams=300)
    with pytest.raises(NotEnoughMemory, match=r"40\.0 GiB are free: set model\.max_streams below"):
        shared_plan(H200_GIB, 40, 2)
