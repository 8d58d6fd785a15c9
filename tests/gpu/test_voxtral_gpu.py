"""The fast path on a GPU: kernels against the reference, the recorded step against the eager one."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("splits", [1, 3, None])
@torch.inference_mode()
def test_attention_kernel_equals_the_reference(stack: str, eight_bit: bool, splits: int | None) -> None:
    from benchmarks.gpu_kernels import check_attention, stacks

    heads, rows = stacks(1024)[stack]
    assert check_attention(stack, heads, rows, eight_bit, splits) < 1e-2


@torch.inference_mode()
def test_small_kernels_equal_the_reference() -> None:
    from benchmarks.gpu_kernels import small_kernel_errors

    for name, error in small_kernel_errors().items():
        assert error < 1e-2, name


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_recorded_step_equals_the_eager_step(kv_dtype: torch.dtype) -> None:
    from benchmarks.gpu_checks import compare_paths

    outcome = compare_paths(kv_dtype, positions=80)
    assert outcome.recorded == outcome.eager
    # Both paths round to bfloat16 in every layer, in different orders; 58 layers make a few hundredths of it.
    assert max(outcome.logit_errors) < 5e-2


def test_steps_that_overlap_equal_steps_one_by_one() -> None:
    from benchmarks.gpu_checks import compare_overlap

    overlapping, one_by_one = compare_overlap(torch.float8_e4m3fn, positions=40)
    assert overlapping == one_by_one and len(overlapping["a"]) >= 40


def test_speech_is_detected_on_the_device_as_on_the_cpu() -> None:
    from benchmarks.gpu_checks import detection_error

    assert detection_error("cuda") < 1e-4


def test_angles_on_the_device_are_exact_at_position_50_000_000() -> None:
    from engine.models.layers import inverse_frequencies, rotary_angles

    rows = torch.tensor([5, 50_000_000, 200_000_003])
    wanted = rotary_angles(rows, inverse_frequencies(128, 1e6, "cpu"))
    found = rotary_angles(rows.cuda(), inverse_frequencies(128, 1e6, "cuda"))
    for mine, reference in zip(found, wanted, strict=True):
        assert (mine.cpu() - reference).abs().max() < 1e-6
