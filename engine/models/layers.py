"""The layers of Voxtral Realtime as functions of tensors: RMSNorm, SwiGLU, rotary positions, paged attention.

This is the torch implementation, for a CPU and as the reference of the Triton kernels (`kernels.py`), which compute the
same on CUDA; `voxtral_realtime.py` chooses between the two. The argument types of both come first: the shape of a
layer's heads (`Heads`), the pages of keys and values (`KvPages`), and the rows that a call computes (`Span`).

Keys and values are stored in pages, with one ring table per stream. A *row* is one encoder frame or one decoder token,
numbered from the beginning of its stream without a restart. Block b = row // page_rows of a stream is in the page at
index b % ring_pages of the stream's table. The pages belong to the runner (`engine/runner/frames/memory.py`); which
page belongs to which stream is decided in `engine/core/caches.py`. `attend_reference` gathers the ring and calls
torch's attention. It runs on a CPU, and for the fixed silence before every stream (its *opening*), which has more rows
than the kernels take at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

# Largest value of float8_e4m3fn.
FP8_MAX = 448.0
# Avoids division by zero for a row of zeros; far below the scale of real keys and values.
SMALLEST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one attention layer."""

    query_heads: int
    # Heads of the keys and of the values.
    kv_heads: int
    # Width of a head.
    dim: int
    # Most rows that a query attends to, its own row included.
    window: int

    @property
    def fused_width(self) -> int:
        """Width of a row of queries, keys and values side by side."""
        return (self.query_heads + 2 * self.kv_heads) * self.dim


@dataclass(frozen=True, slots=True)
class KvPages:
    """Key and value pages of one stack. With 8-bit storage every row of every head has its own scale."""

    # [layers, pages, 2 (key, value), heads, page_rows, dim]
    data: Tensor
    # [layers, pages, heads, page_rows, 2 (key, value)], so that both scales of a row are one 32-bit word. None without
    # 8-bit storage.
    scales: Tensor | None

    @classmethod
    def allocate(
        cls, layers: int, pages: int, page_rows: int, heads: Heads, dtype: torch.dtype, device: torch.device | str
    ) -> KvPages:
        shape = (layers, pages, 2, heads.kv_heads, page_rows, heads.dim)
        scales = None
        if dtype == torch.float8_e4m3fn:
            scales = torch.zeros(layers, pages, heads.kv_heads, page_rows, 2, dtype=torch.bfloat16, device=device)
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
    """The new rows that one call computes: the same number of consecutive rows for each stream."""

    # Ring tables of all slots, [slots, ring_pages] int32.
    tables: Tensor
    # Slot of each stream, [streams] int64.
    slots: Tensor
    # Row number of the first new row of each stream, [streams] int64.
    first: Tensor
    # New rows per stream.
    rows: int
    # Rotary angles of the new rows, [streams * rows, dim / 2].
    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True, slots=True)
class RowScale:
    """A factor per row: row i is multiplied by table[index[i]]. table: [kinds, width]; index: [rows]."""

    table: Tensor
    index: Tensor


def add_norm_reference(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, scale: RowScale | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (total, normed): total = residual + delta (None: residual), and the RMS norm of `total` times `weight`
    and `scale`. `total` is rounded to the type of `residual` before the norm.
    """
    total = residual if delta is None else residual + delta
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    if scale is not None:
        normed = normed * scale.table[scale.index].float()
    return total, normed.to(residual.dtype)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """[rows, 2 * width], gate first -> silu(gate) * up, [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """Rotary frequencies, [head_dim / 2] float64, in radians per row. Rounded to float32 once, as in training."""
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


def attend_reference(fused: Tensor, layer: int, pages: KvPages, span: Span, heads: Heads) -> Tensor:
    """Attention of the new rows, [streams * rows, query heads * dim]; stores their keys and values in the pages.

    fused: [streams * rows, queries | keys | values]. Any number of new rows, even more than the ring has.
    """
    total, streams = fused.shape[0], span.first.shape[0]
    query, values, scales = _rotate_and_pack(fused, pages, span, heads)

    past, past_rows = gather_ring(layer, pages, span, fused.dtype)
    # New rows are read back from their stored form, so that a chunk and single steps see the same keys and values.
    new = unpack(values, scales, fused.dtype).view(streams, span.rows, 2, heads.kv_heads, heads.dim)
    new_rows = _new_rows(span)
    keys_values = torch.cat([past, new], dim=1)  # [streams, ring + rows, 2, keys, dim]
    all_rows = torch.cat([past_rows, new_rows], dim=1)  # [streams, ring + rows]
    age = new_rows[:, :, None] - all_rows[:, None, :]  # [streams, rows, ring + rows]
    visible = (age >= 0) & (age < heads.window) & (all_rows >= 0)[:, None, :]
    out = scaled_dot_product_attention(
        query.view(streams, span.rows, heads.query_heads, heads.dim).transpose(1, 2),
        keys_values[:, :, 0].transpose(1, 2),
        keys_values[:, :, 1].transpose(1, 2),
        attn_mask=visible[:, None],
        enable_gqa=heads.query_heads != heads.kv_heads,
    )
    store_rows(layer, pages, span, new_rows, values, scales)
    return out.transpose(1, 2).reshape(total, heads.query_heads * heads.dim)


def store_reference(fused: Tensor, layer: int, pages: KvPages, span: Span, heads: Heads) -> None:
    """The part of `attend_reference` that stores keys and values."""
    _, values, scales = _rotate_and_pack(fused, pages, span, heads)
    store_rows(layer, pages, span, _new_rows(span), values, scales)


def _rotate_and_pack(fused: Tensor, pages: KvPages, span: Span, heads: Heads) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns rotated queries [streams * rows, queries, dim], and keys and values in their stored form,
    [streams * rows, 2, keys, dim] with their scales."""
    by_head = fused.view(fused.shape[0], heads.query_heads + 2 * heads.kv_heads, heads.dim)
    query = rotate(by_head[:, : heads.query_heads], span.cosine, span.sine)
    key = rotate(by_head[:, heads.query_heads : heads.query_heads + heads.kv_heads], span.cosine, span.sine)
    value = by_head[:, heads.query_heads + heads.kv_heads :]
    return query, *pack(torch.stack([key, value], dim=1), pages)


def _new_rows(span: Span) -> Tensor:
    """The numbers of the new rows, [streams, rows]."""
    return span.first[:, None] + torch.arange(span.rows, device=span.first.device)


def gather_ring(layer: int, pages: KvPages, span: Span, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stored keys and values [streams, ring, 2, heads, dim], and their row numbers [streams, ring]; -1: no row."""
    tables = span.tables[span.slots].long()  # [streams, ring_pages]
    ring_pages, page_rows = tables.shape[1], pages.page_rows
    last_block = (span.first[:, None] - 1).div(page_rows, rounding_mode="floor")
    index = torch.arange(ring_pages, device=tables.device)
    block = last_block - (last_block - index) % ring_pages  # newest block at each ring index
    rows = (block[:, :, None] * page_rows + torch.arange(page_rows, device=tables.device)).flatten(1)
    rows = torch.where(rows < span.first[:, None], rows, -1)  # rows from `first` on are not stored yet

    scales = None if pages.scales is None else pages.scales[layer][tables].movedim(-1, 2)
    stored = unpack(pages.data[layer][tables], scales, dtype)  # [streams, ring_pages, 2, heads, page_rows, dim]
    stored = stored.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)  # [streams, ring, 2, heads, dim]
    # A page may hold old data of another stream, even NaN, which a weight of zero would not remove.
    return stored.masked_fill((rows < 0)[:, :, None, None, None], 0.0), rows


def store_rows(layer: int, pages: KvPages, span: Span, rows: Tensor, values: Tensor, scales: Tensor | None) -> None:
    """Write packed rows [streams * rows, 2, heads, dim] to their pages; if they are more than the ring has, only the
    last rows. `rows` [streams, rows]: their row numbers."""
    ring_pages, page_rows = span.tables.shape[1], pages.page_rows
    kept = rows >= span.first[:, None] + span.rows - ring_pages * page_rows  # [streams, rows]
    ring_index = (rows // page_rows) % ring_pages
    page = span.tables[span.slots].long().gather(1, ring_index)[kept]
    offset = (rows % page_rows)[kept]
    pages.data[layer][page, :, :, offset] = values[kept.flatten()]
    if pages.scales is not None and scales is not None:
        pages.scales[layer][page, :, offset] = scales[kept.flatten()].transpose(1, 2)


def pack(rows: Tensor, pages: KvPages) -> tuple[Tensor, Tensor | None]:
    """Convert rows [..., dim] to their stored form: 8-bit values with bfloat16 scales [...], or the type of the pages.

    Values that are not finite become zero. The stream's logits of this step already show them, and they must not stay
    in a page: the kernels read whole pages and rely on zero times any stored value being zero.
    """
    rows = torch.where(rows.isfinite(), rows, 0.0)
    if pages.scales is None:
        return rows.to(pages.data.dtype), None
    scales = (rows.float().abs().amax(-1) / FP8_MAX).clamp(min=SMALLEST_SCALE).bfloat16()
    # With a scale that was rounded down, the largest value may exceed the format's range, where a cast gives NaN.
    scaled = (rows.float() / scales.float().unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), scales


def unpack(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack`."""
    if scales is None:
        return values.to(dtype)
    return (values.float() * scales.float().unsqueeze(-1)).to(dtype)
