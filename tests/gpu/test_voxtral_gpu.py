"""The fast path on a GPU: kernels against the reference, the recorded step against the eager one.

`pytest tests/gpu -rP` prints the errors that were found.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor

from engine.models.layers import (
    KvPages,
    RowScale,
    add_norm_reference,
    attend_reference,
    inverse_frequencies,
    rotary_angles,
    swiglu_reference,
)
from engine.models.silero import STATE_SIZE, load_silero
from engine.runner.frames.memory import _pin
from tests.engine.runner.frames.test_memory_parking import RESIDENT, STREAMS, tokens_of
from tests.gpu.attention_inputs import attention_inputs, stacks
from tests.gpu.steps import (
    beside_detection,
    compare_overlap,
    compare_paths,
    detection_error,
    parking_runner,
    rebuilding_errors,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
DTYPE = torch.bfloat16
KV_TYPES = [torch.bfloat16, torch.float8_e4m3fn]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize(("splits", "positions"), [(1, 1), (3, 1), (5, 1), (None, 1), (None, 4), (None, 16)])
@torch.inference_mode()
def test_attention_kernel_equals_the_reference(stack: str, eight_bit: bool, splits: int | None, positions: int) -> None:
    """Against float32: young, wrapping and far-gone streams, a live step and chunks of known tokens; outputs and pages
    poisoned first."""
    from engine.models import kernels

    heads, rows = stacks(1024)[stack]
    rows *= positions
    window = heads.window
    firsts = torch.tensor([0, 4, 64, window - 4, window, window + 4, 5 * window + 8, 200_000_000], device="cuda")
    pages, span, fused = attention_inputs(heads, rows, 2, eight_bit, firsts)
    twin = KvPages(pages.data.clone(), None if pages.scales is None else pages.scales.clone())
    wanted = attend_reference(fused.float(), 1, twin, span, heads)
    # Freed memory that is not a number: whatever a kernel does not write shows up in the result.
    torch.full((64 << 20,), float("nan"), device="cuda")
    query = kernels.store(fused, 1, pages, span, heads)
    torch.full((64 << 20,), float("nan"), device="cuda")
    found = kernels.attend_stored(query, 1, pages, span, heads, splits=splits)
    error = relative(found, wanted)
    print(f"{stack} {'fp8' if eight_bit else 'bf16'} splits={splits} positions={positions}: relative error {error:.1e}")
    assert error < 1e-2
    assert relative(pages.data[1].float(), twin.data[1].float()) < 1e-2


@pytest.mark.parametrize("width", [1280, 3072])
@torch.inference_mode()
def test_the_norm_kernel_equals_the_reference(width: int) -> None:
    from engine.models import kernels

    residual, delta = torch.randn(2, 37, width, device="cuda", dtype=DTYPE)
    weight = torch.randn(width, device="cuda", dtype=DTYPE)
    scale = RowScale(torch.randn(31, width, device="cuda"), torch.randint(0, 31, (37,), device="cuda"))
    total, normed = kernels.add_norm(residual, delta, weight, 1e-5, scale)
    wanted = add_norm_reference(residual, delta, weight, 1e-5, scale)
    assert relative(total, wanted[0]) < 1e-2
    assert relative(normed, wanted[1]) < 1e-2


@torch.inference_mode()
def test_the_gate_kernel_equals_the_reference() -> None:
    from engine.models import kernels

    gate_up = torch.randn(37, 2 * 9216, device="cuda", dtype=DTYPE)
    assert relative(kernels.swiglu(gate_up), swiglu_reference(gate_up.float())) < 1e-2


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_the_recorded_step_equals_the_eager_step(kv_dtype: torch.dtype) -> None:
    outcome = compare_paths(kv_dtype, positions=80)
    assert outcome.recorded == outcome.eager
    # Random weights repeat themselves; what is said changes within each stream and differs between streams.
    assert min(len(set(tokens)) for tokens in outcome.eager.values()) > 2
    assert len({token for tokens in outcome.eager.values() for token in tokens}) > 5
    # Both paths round to bfloat16 in every layer, in different orders; 58 layers make a few hundredths of it.
    print(f"{kv_dtype}: logits, kernels against reference: worst relative error {max(outcome.logit_errors):.1e}")
    assert max(outcome.logit_errors) < 5e-2


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_streams_rebuilt_in_chunks_hold_what_the_reference_holds(kv_dtype: torch.dtype) -> None:
    """Keys and values behind two layers of full size; 8 bits have a mantissa of three."""
    errors = rebuilding_errors(kv_dtype)
    print(f"{kv_dtype}: keys and values, rebuilt on the device against the CPU: {errors}")
    assert len(errors) == 6 and max(errors.values()) < (2e-2 if kv_dtype == torch.bfloat16 else 5e-2)


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_steps_that_overlap_equal_steps_one_by_one(kv_dtype: torch.dtype) -> None:
    overlapping, one_by_one = compare_overlap(kv_dtype, positions=40)
    assert overlapping == one_by_one and len(overlapping["a"]) >= 40


@pytest.mark.parametrize(("streams", "frames"), [(1, 1), (512, 3), (32, 41)])
def test_the_recurrent_kernel_equals_the_reference(streams: int, frames: int) -> None:
    model, random = load_silero().to(DEVICE), torch.Generator(DEVICE).manual_seed(frames)
    gates = 2 * torch.randn(streams, frames, 4 * STATE_SIZE, generator=random, device=DEVICE)
    hidden, cell = (torch.randn(streams, STATE_SIZE, generator=random, device=DEVICE).tanh() for _ in range(2))
    due = torch.rand(streams, frames, generator=random, device=DEVICE) > 0.3
    found, wanted = (steps(gates, hidden, cell, due) for steps in (model.steps, model.steps_reference))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_speech_is_detected_on_the_device_as_on_the_cpu() -> None:
    error = detection_error("cuda")
    print(f"speech probabilities, device against CPU: worst difference {error:.1e}")
    assert error < 1e-4


@torch.inference_mode()
def test_steps_and_rounds_of_the_detector_beside_them_compute_what_they_compute_alone() -> None:
    """Both have products with a working memory of cuBLAS: if they shared it, they would be wrong or never end."""
    turns = [(turn * 3 % STREAMS, 3 + turn * 7 % 41) for turn in range(20)]
    with closing(parking_runner(torch.float8_e4m3fn, STREAMS, STREAMS)) as runner:
        alone, _ = tokens_of(runner, turns)
    with closing(parking_runner(torch.float8_e4m3fn, STREAMS, STREAMS)) as runner:
        beside, error = beside_detection(runner, turns)
    print(f"speech probabilities beside steps, device against CPU: worst difference {error:.1e}")
    assert beside == alone
    assert error < 1e-4


def test_angles_on_the_device_are_exact_at_position_50_000_000() -> None:
    rows = torch.tensor([5, 50_000_000, 200_000_003])
    wanted = rotary_angles(rows, inverse_frequencies(128, 1e6, "cpu"))
    found = rotary_angles(rows.cuda(), inverse_frequencies(128, 1e6, "cuda"))
    for mine, reference in zip(found, wanted, strict=True):
        assert (mine.cpu() - reference).abs().max() < 1e-6


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_parked_streams_say_what_they_would_have_said(kv_dtype: torch.dtype) -> None:
    """With copies beside the computation, and streams that move in nearly every step."""
    turns = [(turn * 3 % STREAMS, 3 + turn * 7 % 41) for turn in range(60)]
    with closing(parking_runner(kv_dtype, STREAMS, STREAMS)) as runner:
        expected, none = tokens_of(runner, turns)
    with closing(parking_runner(kv_dtype, STREAMS, RESIDENT)) as runner:
        found, moves = tokens_of(runner, turns)
    print(f"{moves} moves")
    assert none == 0 < 60 < moves
    assert found == expected


def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    _pin(memory)
    try:
        with pytest.raises(RuntimeError, match="pinning 1048576 bytes failed"):
            _pin(memory)
        assert int(torch.ones(8, device="cuda").sum()) == 8
    finally:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
