"""Device memory of `VoxtralRunner`: the pages of keys and values (`StackCache`), and how many streams fit
(`plan_memory`).

A part of the frame-synchronous runner; the scheduler decides which stream has which page (`engine/core/kv_pages.py`).
It assigns pages [0, pages) and slots [0, streams). Higher numbers belong to no stream: one page and one slot for the
padding rows of a batch, and the pages and slots of the shared openings. An opening is the silence before every stream;
its keys and values are computed once and copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.core.scheduler import MOST_KEPT_FREE
from engine.models.attention import PagedAttention
from engine.models.layers import rotary_angles
from engine.models.operands import Heads, KvPages, Span
from engine.models.voxtral_realtime import (
    FLUSH_POSITIONS,
    LEFT_PAD_POSITIONS,
    MAX_DELAY_POSITIONS,
    VoxtralConfig,
    weight_bytes,
)
from engine.options import MAX_KEYWORDS, Options
from engine.runner.bias import BYTES_PER_ROW, BYTES_PER_SLOT
from engine.runner.device import GIB, NotEnoughMemory, gib, upload
from engine.spec import FeatureShape, KvGroup, ModelSpec

# One page is one iteration of the attention kernel. Smaller pages waste less of a ring (it holds up to one page more
# than its window) but cost the kernel up to half of its speed with 8-bit storage.
PAGE_ROWS = 64
# Openings copied at once; each takes about 40 MB of scratch memory with the full-size model.
STREAMS_PER_COPY = 4
# Streams that are parked, and streams that are brought back, in one step. Each needs a buffer on the device, and two on
# the way back.
MOVES = 4
# Host buffers beside those of the parked streams: pages are kept free for live streams and for one upload, and a step
# parks streams before it frees the buffers of those that it brings back.
SPARE_HOST_BUFFERS = MOST_KEPT_FREE + 1 + MOVES


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
    row_bytes = layers * 2 * heads.keys * (heads.dim * dtype.itemsize + scale_bytes)
    page_positions = PAGE_ROWS // rows_per_position
    group = KvGroup(name, window_positions, page_positions, row_bytes * rows_per_position)
    return StackLayout(group, layers, heads, rows_per_position)


class StackCache:
    """Pages and ring tables of one stack.

    Slots: one per stream, then the padding slot, then one per shared opening.
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
        # A copy on the CPU too: the host's table runs ahead of the device's.
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
        """Attention for the first `count` positions of openings. Their tables hold only these positions."""
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


# The memory plan: made before anything large is allocated.

LOOK_BACK_SAMPLES = 680
LOOK_AHEAD_SAMPLES = 40
# The same in mel frames: frames of the position itself, and frames before it that its convolutions read.
FRAMES_PER_POSITION = 8
CONTEXT_FRAMES = 3
# Encoder-cache rows beyond those that streams hold: room for shared and recently released audio.
SPARE_EMBEDS = 1024
# Encoder-cache rows that a stream may hold: the most positions of a rebuild in one step.
EMBEDS_PER_STREAM = 64
# Libraries, kernels, graphs and fragmentation: measured, plus a reserve.
FIXED_WORKSPACE_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a device is used. `group_pages` is for the scheduler, in the order of `spec.kv_groups`.

    `streams` includes the `parked` ones, whose pages are in host memory."""

    streams: int
    group_pages: tuple[int, ...]
    cache_embeds: int
    weight_bytes: int
    stream_bytes: int
    workspace_bytes: int
    parked: int = 0

    @property
    def resident(self) -> int:
        """Number of streams whose pages fit into the device's memory."""
        return self.streams - self.parked

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.resident * self.stream_bytes


def voxtral_spec(config: VoxtralConfig, layouts: tuple[StackLayout, StackLayout], name: str) -> ModelSpec:
    """The facts about the model for scheduler and gateway."""
    return ModelSpec(
        name=name,
        sample_rate=16_000,
        samples_per_position=config.samples_per_position,
        look_back_samples=LOOK_BACK_SAMPLES,
        look_ahead_samples=LOOK_AHEAD_SAMPLES,
        prefix_positions=LEFT_PAD_POSITIONS,
        flush_positions=FLUSH_POSITIONS,
        embeds_per_stream=EMBEDS_PER_STREAM,
        replay_positions=EMBEDS_PER_STREAM,
        default_delay_positions=config.default_delay,
        max_delay_positions=MAX_DELAY_POSITIONS,
        kv_groups=tuple(layout.group for layout in layouts),
        features=FeatureShape(config.mel_bins, FRAMES_PER_POSITION, CONTEXT_FRAMES),
        options=Options(keywords=MAX_KEYWORDS),
    )


def stream_bytes(spec: ModelSpec) -> int:
    """Bytes of the keys and values of one stream with full rings."""
    return sum(group.ring_pages * group.page_positions * group.bytes_per_position for group in spec.kv_groups)


def plan_memory(
    config: VoxtralConfig,
    free_bytes: int,
    *,
    decoder_window: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_streams: int | None,
    parked_bytes: int = 0,
) -> MemoryPlan:
    """Fit `max_streams` streams (None: as many as possible) into `free_bytes`, weights included. Raises
    NotEnoughMemory.

    With `parked_bytes` of host memory there can be more streams than fit, at most twice as many: silent streams are
    parked there.
    """
    layouts = stack_layouts(config, decoder_window, kv_dtype)
    spec = voxtral_spec(config, layouts, "voxtral")
    per_stream = stream_bytes(spec) + _activation_bytes(config, dtype, spec) + BYTES_PER_SLOT + BYTES_PER_ROW
    weights, shared = weight_bytes(config, dtype), FIXED_WORKSPACE_BYTES + _opening_bytes(spec)
    room = free_bytes - weights - shared
    fits = room // per_stream
    if fits < 1:
        raise NotEnoughMemory(
            f"the model needs {gib(weights)} for its weights, {gib(shared)} to work in and {gib(per_stream)} for "
            f"each stream; {gib(free_bytes)} are free"
        )
    parked, beside = 0, 0
    if parked_bytes and (max_streams is None or max_streams > fits):
        parked = max(0, min(parked_bytes // stream_bytes(spec) - SPARE_HOST_BUFFERS, fits))
        # Buffers of the moves, and what a parked stream has on the device beside its pages.
        beside = 3 * MOVES * stream_bytes(spec) + parked * (per_stream - stream_bytes(spec))
        if parked == 0 or beside + per_stream > room:
            parked, beside = 0, 0
    fits = (room - beside) // per_stream + parked
    streams = fits if max_streams is None else max_streams
    if streams > fits:
        raise NotEnoughMemory(
            f"{streams} streams need {gib(weights + shared + streams * per_stream)}, {gib(free_bytes)} are free: "
            f"{fits} streams fit with a decoder window of {decoder_window} tokens; a smaller window, 8-bit keys and "
            "values or host memory for silent streams (model.parked_share) make room for more"
        )
    resident = min(streams, fits - parked)
    return MemoryPlan(
        streams=streams,
        group_pages=tuple(resident * group.ring_pages for group in spec.kv_groups),
        cache_embeds=streams * spec.embeds_per_stream + SPARE_EMBEDS,
        weight_bytes=weights,
        stream_bytes=per_stream,
        workspace_bytes=shared + beside,
        parked=streams - resident,
    )


def plan_share(
    config: VoxtralConfig,
    free_bytes: int,
    total_bytes: int,
    share_of: int,
    *,
    decoder_window: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_streams: int | None,
    parked_bytes: int = 0,
) -> MemoryPlan:
    """Return the plan of one of `share_of` engines on a device. Raises NotEnoughMemory.

    Each engine plans with its part of the whole device, not with the free memory, so that all take the same number of
    streams and can replace one another.
    """
    room = free_bytes if share_of == 1 else total_bytes // share_of
    try:
        plan = plan_memory(
            config,
            room,
            decoder_window=decoder_window,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_streams=max_streams,
            parked_bytes=parked_bytes // share_of,
        )
    except NotEnoughMemory as error:
        if share_of == 1:
            raise
        text = f"{share_of} engines share the device and its {gib(total_bytes)} (model.spare): {error}"
        raise NotEnoughMemory(text) from error
    if plan.total_bytes > free_bytes:
        raise NotEnoughMemory(
            f"this engine would take {gib(plan.total_bytes)}, its part of {gib(total_bytes)} for {share_of} engines "
            f"(model.spare), and {gib(free_bytes)} are free: set model.max_streams below {plan.streams}"
        )
    return plan


def _opening_bytes(spec: ModelSpec) -> int:
    """Bytes of pages that no stream owns: one opening of the encoder, one of the decoder per delay, and padding."""
    total = 0
    for group, openings in zip(spec.kv_groups, (1, MAX_DELAY_POSITIONS), strict=True):
        pages = 1 + openings * -(-spec.prefix_positions // group.page_positions)
        total += pages * group.page_positions * group.bytes_per_position
    return total


def _activation_bytes(config: VoxtralConfig, dtype: torch.dtype, spec: ModelSpec) -> int:
    """Bytes of the largest tensors of a step for one stream, and of its rows of the encoder cache."""
    cached = (spec.embeds_per_stream + 1) * config.audio.width * config.rows_per_position
    feed_forward = 3 * config.audio.ffn * config.rows_per_position + 3 * config.text.ffn
    return (cached + config.vocabulary + feed_forward) * dtype.itemsize
