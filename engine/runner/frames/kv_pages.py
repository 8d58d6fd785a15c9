"""Pages of keys and values on the device, for one stack of layers (`StackCache`), and how they are laid out.

The scheduler decides which stream has which page (`engine/core/caches.py`): it assigns pages [0, pages) and slots [0,
streams). Higher numbers belong to no stream: one page and one slot for the padding rows of a batch, and the pages and
slots of the shared openings. An *opening* is the silence before every stream; its keys and values are computed once and
copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.models.layers import Heads, KvPages, Span, rotary_angles
from engine.models.voxtral_realtime import PagedAttention, VoxtralConfig
from engine.runner.device import upload
from engine.spec import KvGroup

# Rows of a page. One page is one iteration of the attention kernel. Smaller pages waste less of a ring (it has up to
# one page more than its window) but cost the kernel up to half of its speed with 8-bit storage.
PAGE_ROWS = 64
# Openings copied at once; each takes about 40 MB of scratch memory with the full-size model.
STREAMS_PER_COPY = 4


@dataclass(frozen=True, slots=True)
class StackLayout:
    """How the keys and values of one stack (encoder or decoder) are stored."""

    group: KvGroup
    layers: int
    heads: Heads
    rows_per_position: int

    @property
    def page_rows(self) -> int:
        return self.group.page_positions * self.rows_per_position


def stack_layouts(config: VoxtralConfig, decoder_window: int, kv_dtype: torch.dtype) -> tuple[StackLayout, StackLayout]:
    """Return the layouts of the encoder and the decoder; only the decoder's window is configurable."""
    audio, text = config.audio, config.text
    if not 1 <= decoder_window <= text.heads.window:
        raise ValueError(
            f"decoder window of {decoder_window} tokens; the model was trained with {text.heads.window}, "
            f"choose 1 to {text.heads.window}"
        )
    step = config.rows_per_position
    # The first row of a position attends to window - 1 rows before it.
    audio_positions = 1 + -(-(audio.heads.window - 1) // step)
    text_heads = replace(text.heads, window=decoder_window)
    return (
        _layout("encoder", audio.layers, audio.heads, step, audio_positions, kv_dtype),
        _layout("decoder", text.layers, text_heads, 1, decoder_window, kv_dtype),
    )


def _layout(
    name: str, layers: int, heads: Heads, rows_per_position: int, window_positions: int, dtype: torch.dtype
) -> StackLayout:
    scale_bytes = torch.bfloat16.itemsize if dtype == torch.float8_e4m3fn else 0
    row_bytes = layers * 2 * heads.kv_heads * (heads.dim * dtype.itemsize + scale_bytes)
    page_positions = PAGE_ROWS // rows_per_position
    group = KvGroup(name, window_positions, page_positions, row_bytes * rows_per_position)
    return StackLayout(group, layers, heads, rows_per_position)


class StackCache:
    """Pages and ring tables of one stack.

    A ring table has the page numbers of one slot. Slots: one per stream, then the padding slot, then one per shared
    opening.
    """

    def __init__(
        self,
        layout: StackLayout,
        pages: int,
        streams: int,
        openings: int,
        opening_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        ring_pages = layout.group.ring_pages
        opening_pages = min(ring_pages, -(-opening_positions // layout.group.page_positions))
        total = pages + 1 + openings * opening_pages
        self.pages = KvPages.allocate(layout.layers, total, layout.page_rows, layout.heads, dtype, device)
        self.padding_slot = streams
        self.opening_slot = streams + 1
        self.host_table = np.full((streams + 1 + openings, ring_pages), pages, dtype=np.int32)
        for opening in range(openings):
            start = pages + 1 + opening * opening_pages
            self.host_table[self.opening_slot + opening, :opening_pages] = np.arange(start, start + opening_pages)
        self._opening_pages = opening_pages
        # `.copy()`, also if the device is the CPU: the two tables must not share memory, because the host's is ahead.
        self.table = torch.from_numpy(self.host_table.copy()).to(device)

    def update_table(self, entries: list[tuple[int, int, int]]) -> None:
        """Set table entries, given as (slot, ring index, page)."""
        if not entries:
            return
        values = np.array(entries, dtype=np.int64).T
        self.host_table[values[0], values[1]] = values[2]
        slots, indices, pages = upload(values, self.table.device)
        self.table[slots, indices] = pages.int()

    def open_streams(self, openings: list[int], slots: list[int]) -> None:
        """Copy the keys and values of openings into the pages of new streams."""
        count = self._opening_pages
        sources = self.host_table[self.opening_slot + np.array(openings), :count]
        targets = self.host_table[np.array(slots), :count]
        pages = upload(np.stack([sources, targets]).astype(np.int64), self.table.device)
        for start in range(0, len(slots), STREAMS_PER_COPY):
            part = pages[:, start : start + STREAMS_PER_COPY].flatten(1)
            self.pages.copy_pages(part[0], part[1])

    def opening_attention(self, openings: Tensor, count: int, frequencies: Tensor) -> PagedAttention:
        """Attention for the first `count` positions of openings. Their tables have only these positions."""
        table = self.table[self.opening_slot :, : self._opening_pages]
        return self._attention(table, openings, torch.zeros_like(openings), count, frequencies, use_kernels=False)

    def attention(
        self, slots: Tensor, positions: Tensor, count: int, frequencies: Tensor, use_kernels: bool
    ) -> PagedAttention:
        """Attention for `count` positions of each stream, from `positions` [streams] on."""
        return self._attention(self.table, slots, positions, count, frequencies, use_kernels)

    def _attention(
        self, table: Tensor, slots: Tensor, positions: Tensor, count: int, frequencies: Tensor, use_kernels: bool
    ) -> PagedAttention:
        rows = count * self.layout.rows_per_position
        first = positions * self.layout.rows_per_position
        numbers = (first[:, None] + torch.arange(rows, device=first.device)).flatten()
        cosine, sine = rotary_angles(numbers, frequencies)
        span = Span(table, slots, first, rows, cosine, sine)
        return PagedAttention(self.layout.heads, self.pages, span, use_kernels)
