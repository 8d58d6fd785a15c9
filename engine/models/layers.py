"""The layers of Voxtral Realtime as functions of tensors: RMSNorm, SwiGLU, rotary positions, paged attention.

This is the torch implementation, for a CPU and as the reference of the Triton kernels (`kernels.py`), which compute the
same on CUDA; `voxtral_realtime.py` chooses between the two. The argument types of both come first: the shape of a
layer's heads (`Heads`), the pages of keys and values (`KvPages`), and the rows that a call computes (`Span`).

Keys and values are stored in pages, with one ring table per stream. A *row* is one encoder frame or one decoder token,
numbered from the beginning of its stream without a restart. Block b = row // page_rows of a stream is in the page at
index b % ring_pages of the stream's table. The pages belong to the runner (`engine/runner/frames/memory.py`); which
page is whose is decided in `engine/core/kv_pages.py`. A CPU, and the fixed silence before every stream (its opening,
which is longer than a kernel takes), gather the ring and call torch's attention (`attend_reference`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

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


def add_norm_reference(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, scale: RowScale | None = None
) -> tuple[Tensor, Tensor]:
    total = residual if delta is None else residual + delta
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    if scale is not None:
        normed = normed * scale.table[scale.index].float()
    return total, normed.to(residual.dtype)


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


def attend_reference(fused: Tensor, layer: int, pages: KvPages, span: Span, heads: Heads) -> Tensor:
    """Gather the ring, append the new rows, attend under a mask, store. Any number of rows, even beyond the ring."""
    total, streams = fused.shape[0], span.first.shape[0]
    by_head = fused.view(total, heads.queries + 2 * heads.keys, heads.dim)
    query = rotate(by_head[:, : heads.queries], span.cosine, span.sine)
    key = rotate(by_head[:, heads.queries : heads.queries + heads.keys], span.cosine, span.sine)
    value = by_head[:, heads.queries + heads.keys :]
    values, scales = pack(torch.stack([key, value], dim=1), pages)  # [streams * rows, 2, keys, dim]

    past, past_rows = gather_ring(layer, pages, span, fused.dtype)
    # New rows are read back from their stored form, so that a chunk and single steps see the same keys and values.
    new = unpack(values, scales, fused.dtype).view(streams, span.rows, 2, heads.keys, heads.dim)
    new_rows = span.first[:, None] + torch.arange(span.rows, device=fused.device)  # [streams, rows]
    both = torch.cat([past, new], dim=1)  # [streams, ring + rows, 2, keys, dim]
    all_rows = torch.cat([past_rows, new_rows], dim=1)  # [streams, ring + rows]
    age = new_rows[:, :, None] - all_rows[:, None, :]  # [streams, rows, ring + rows]
    visible = (age >= 0) & (age < heads.window) & (all_rows >= 0)[:, None, :]
    out = scaled_dot_product_attention(
        query.view(streams, span.rows, heads.queries, heads.dim).transpose(1, 2),
        both[:, :, 0].transpose(1, 2),
        both[:, :, 1].transpose(1, 2),
        attn_mask=visible[:, None],
        enable_gqa=heads.queries != heads.keys,
    )
    store_rows(layer, pages, span, new_rows, values, scales)
    return out.transpose(1, 2).reshape(total, heads.queries * heads.dim)


def gather_ring(layer: int, pages: KvPages, span: Span, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [streams, ring, 2, heads, dim] and the row number of each, negative where there is none."""
    tables = span.tables[span.slots].long()  # [streams, ring_pages]
    ring_pages, page_rows = tables.shape[1], pages.page_rows
    last_block = (span.first[:, None] - 1).div(page_rows, rounding_mode="floor")
    index = torch.arange(ring_pages, device=tables.device)
    block = last_block - (last_block - index) % ring_pages  # newest block at each ring index
    rows = (block[:, :, None] * page_rows + torch.arange(page_rows, device=tables.device)).flatten(1)
    rows = torch.where(rows < span.first[:, None], rows, -1)  # older rows, not overwritten yet

    scales = None if pages.scales is None else pages.scales[layer][tables].movedim(-1, 2)
    held = unpack(pages.data[layer][tables], scales, dtype)  # [streams, ring_pages, 2, heads, page_rows, dim]
    held = held.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)  # [streams, ring, 2, heads, dim]
    # A page may hold old data of another stream, even NaN, which a weight of zero would not remove.
    return held.masked_fill((rows < 0)[:, :, None, None, None], 0.0), rows


def store_rows(layer: int, pages: KvPages, span: Span, rows: Tensor, values: Tensor, scales: Tensor | None) -> None:
    """Write packed rows [streams * rows, 2, heads, dim] to their pages; of a chunk longer than the ring, its end."""
    ring_pages, page_rows = span.tables.shape[1], pages.page_rows
    kept = rows >= span.first[:, None] + span.rows - ring_pages * page_rows  # [streams, rows]
    ring_index = (rows // page_rows) % ring_pages
    page = span.tables[span.slots].long().gather(1, ring_index)[kept]
    offset = (rows % page_rows)[kept]
    pages.data[layer][page, :, :, offset] = values[kept.flatten()]
    if pages.scales is not None and scales is not None:
        pages.scales[layer][page, :, offset] = scales[kept.flatten()].transpose(1, 2)


def pack(rows: Tensor, pages: KvPages) -> tuple[Tensor, Tensor | None]:
    """Convert rows [..., dim] to the stored form: 8-bit values with bfloat16 scales [...], or the pages' own type.

    Values that are not finite become zero. The stream's logits of this step already show them, and they must not stay
    in a page: the kernels read whole pages and rely on zero times any stored value being zero.
    """
    rows = torch.where(rows.isfinite(), rows, 0.0)
    if pages.scales is None:
        return rows.to(pages.data.dtype), None
    scales = (rows.float().abs().amax(-1) / FP8_MAX).clamp(min=SMALLEST_SCALE).bfloat16()
    # A scale that was rounded down may push the largest value out of the format's range, where a cast gives NaN.
    scaled = (rows.float() / scales.float().unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), scales


def unpack(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack`."""
    if scales is None:
        return values.to(dtype)
    return (values.float() * scales.float().unsqueeze(-1)).to(dtype)
