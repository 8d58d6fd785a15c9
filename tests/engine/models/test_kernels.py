"""Every Triton kernel compiles for an H200, which needs no GPU. `tests/gpu` compares their results with the reference.

Triton compiles a kernel when it is first called, so a mistake in one would be found only on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.models.layers import RowScale
from engine.models.silero import STATE_SIZE
from tests.gpu.attention_inputs import DTYPE, attention_inputs, stacks

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from engine.models import kernels  # noqa: E402

H200 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class CompilingKernel:
    """In place of a kernel: compiles it for the arguments of each call, and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled = 0

    def __getitem__(self, grid: tuple[int, ...]) -> CompilingKernel:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(self._kernel.arg_names, arguments, strict=False))
        signature = {name: type_name(value) for name, value in values.items()} | dict.fromkeys(named, "constexpr")
        constants = {(self._kernel.arg_names.index(name),): value for name, value in named.items()}
        source = ASTSource(self._kernel, signature, constants)
        assert triton.compile(source, H200, options).asm["ptx"]
        self.compiled += 1


def type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> dict[str, CompilingKernel]:
    """All kernels of the module that are launched, by name."""
    names = [name for name in vars(kernels) if name.startswith("_") and name.endswith("_kernel")]
    found = {name: CompilingKernel(getattr(kernels, name)) for name in names}
    for name, kernel in found.items():
        monkeypatch.setattr(kernels, name, kernel)
    return found


def test_every_kernel_compiles(compiling: dict[str, CompilingKernel]) -> None:
    """Both stacks with 16-bit and 8-bit storage, for a live step and for a chunk of known tokens."""
    for heads, rows in stacks(64).values():
        for eight_bit in (False, True):
            for positions in (1, 16):
                pages, span, fused = attention_inputs(heads, rows * positions, 1, eight_bit, torch.tensor([0, 64]))
                kernels.attend(fused, 0, pages, span, heads)
                if positions == 1:
                    kernels.attend(fused, 0, pages, span, heads, splits=3)
    residual, weight = torch.zeros(2, 128, dtype=DTYPE), torch.zeros(128, dtype=DTYPE)
    scale = RowScale(torch.zeros(3, 128), torch.zeros(2, dtype=torch.int64))
    kernels.add_norm(residual, residual, weight, 1e-5, scale)
    kernels.add_norm(residual, None, weight, 1e-5, None)
    kernels.swiglu(torch.zeros(2, 256, dtype=DTYPE))
    state = torch.zeros(2, STATE_SIZE)
    due = torch.zeros(2, 3, dtype=torch.bool)
    kernels.recurrent(torch.zeros(2, 3, 4 * STATE_SIZE), torch.zeros(STATE_SIZE, 4 * STATE_SIZE), state, state, due)
    assert all(kernel.compiled for kernel in compiling.values()), "a kernel that no call above launches"
