"""Norm, gate (SwiGLU) and rotary functions of Voxtral Realtime: plain functions of tensors without state.

On CUDA each element-wise function is one Triton kernel (`kernels.py`). Elsewhere the torch code below is the
implementation; the kernels are tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.models.operands import RowScale


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, scale: RowScale | None = None
) -> tuple[Tensor, Tensor]:
    """residual + delta, and its RMS norm times `weight` (and times `scale`), as a pair.

    residual, delta: [rows, width]; weight: [width].
    """
    if residual.is_cuda:
        from engine.models import kernels

        return kernels.add_norm(residual, delta, weight, epsilon, scale)
    return add_norm_reference(residual, delta, weight, epsilon, scale)


def add_norm_reference(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, scale: RowScale | None = None
) -> tuple[Tensor, Tensor]:
    total = residual if delta is None else residual + delta
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    if scale is not None:
        normed = normed * scale.table[scale.index].float()
    return total, normed.to(residual.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[rows, 2 * width], gate first -> silu(gate) * up, [rows, width]."""
    if gate_up.is_cuda:
        from engine.models import kernels

        return kernels.swiglu(gate_up)
    return swiglu_reference(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """[head_dim / 2] float64. Rounded to float32 once, as in training, then widened."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (1.0 / theta**exponent).double().to(device)


def rotary_angles(rows: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [rows, head_dim / 2], of absolute row numbers (int64).

    The angle is computed in float64: its error is below 1e-7 radian at row 200,000,000 (position 50,000,000 of the
    encoder), where float32 would be wrong by whole turns.
    """
    angle = rows.double()[:, None] * frequencies
    return angle.cos().float(), angle.sin().float()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate [rows, heads, head_dim] by the angles [rows, head_dim / 2]; the halves of a head are the components."""
    low, high = heads.float().chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).to(heads.dtype)
