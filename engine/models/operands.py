"""Argument types of paged attention and of the Triton kernels: head shape, pages of keys and values, spans of rows.

Plain dataclasses over tensors, for `layers.py`, `kernels.py` and the frame-synchronous runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
# Avoids division by zero for a row of zeros; far below the scale of real keys and values.
SMALLEST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one attention layer; `window` counts rows, the query's own included."""

    queries: int
    keys: int
    dim: int
    window: int

    @property
    def fused_width(self) -> int:
        return (self.queries + 2 * self.keys) * self.dim


@dataclass(frozen=True, slots=True)
class KvPages:
    """Key and value pages of one stack. With 8-bit storage every row of every head has its own scale.

    data: [layers, pages, 2 (key, value), heads, page_rows, dim]; scales: [layers, pages, heads, page_rows, 2] or None,
    so that both scales of a row are one 32-bit word.
    """

    data: Tensor
    scales: Tensor | None

    @classmethod
    def allocate(
        cls, layers: int, pages: int, page_rows: int, heads: Heads, dtype: torch.dtype, device: torch.device | str
    ) -> KvPages:
        shape = (layers, pages, 2, heads.keys, page_rows, heads.dim)
        scales = None
        if dtype == torch.float8_e4m3fn:
            scales = torch.zeros(layers, pages, heads.keys, page_rows, 2, dtype=torch.bfloat16, device=device)
        return cls(torch.zeros(shape, dtype=dtype, device=device), scales)

    @property
    def page_rows(self) -> int:
        return self.data.shape[4]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in every layer."""
        self.data[:, targets] = self.data[:, sources]
        if self.scales is not None:
            self.scales[:, targets] = self.scales[:, sources]


@dataclass(frozen=True, slots=True)
class Span:
    """The rows that one call computes: `rows` new ones for each stream, starting at row number `first`.

    tables: [slots, ring_pages] int32; slots, first: [streams] int64; cosine, sine: [streams * rows, dim / 2].
    """

    tables: Tensor
    slots: Tensor
    first: Tensor
    rows: int
    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True, slots=True)
class RowScale:
    """A factor per row: row i is multiplied by table[index[i]]. table: [kinds, width]; index: [rows]."""

    table: Tensor
    index: Tensor
