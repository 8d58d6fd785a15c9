"""Memory of `VoxtralRunner`: pages of keys and values on the device, parked streams in host memory, and how many fit.

A part of the frame-synchronous runner. `plan_memory` computes how many streams fit, and `voxtral_spec` makes the
`ModelSpec` of a checkpoint, which the gateways get. The scheduler decides which stream
has which page (`engine/core/caches.py`), and which streams are parked (`engine/core/scheduler.py`).

`StackCache` has the pages. The scheduler assigns pages [0, pages) and slots [0, streams). Higher numbers belong to no
stream: one page and one slot for the padding rows of a batch, and the pages and slots of the shared openings. An
opening is the silence before every stream; its keys and values are computed once and copied.

`ParkedPages` copies the keys and values of silent streams to host memory and back; others use their pages meanwhile. A
stream's pages are gathered on the device into one buffer, which is copied to the host beside the computation. On the
way back the copy starts one step before the stream is computed, and its pages are written when that step is launched.
Everything is ordered by the device's own queues, so the engine's thread never waits for a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import MoveTask
from engine.core.scheduler import MOST_KEPT_FREE
from engine.host_memory import available_memory
from engine.models.layers import Heads, KvPages, Span, rotary_angles
from engine.models.voxtral_realtime import (
    FLUSH_POSITIONS,
    LEFT_PAD_POSITIONS,
    MAX_DELAY_POSITIONS,
    PagedAttention,
    VoxtralConfig,
    weight_bytes,
)
from engine.options import MAX_KEYWORDS, Options
from engine.runner.bias import BYTES_PER_ROW, BYTES_PER_SLOT
from engine.runner.device import GIB, NotEnoughMemory, gib, upload
from engine.spec import FeatureShape, KvGroup, ModelSpec

logger = logging.getLogger(__name__)

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
# Host memory is pinned in pieces of this many bytes: one that cannot be had costs no more than itself.
PIECE_BYTES = 1 << 30
# Host memory that is left to everything else.
KEPT_FREE_BYTES = 1 << 30


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


class ParkingBuffers:
    """Buffers of equal size in pinned memory, from which a device copies without waiting for the processor."""

    def __init__(self, buffers: int, buffer_bytes: int, pinned: bool) -> None:
        per_piece = max(1, PIECE_BYTES // buffer_bytes)
        self._pieces: list[Tensor] = []
        self._pinned = pinned
        self.buffers: list[Tensor] = []
        while len(self.buffers) < buffers:
            count = min(per_piece, buffers - len(self.buffers))
            try:
                # Linux overcommits memory, and its OOM killer ends the process that touches it.
                if (available_memory() or 0) < count * buffer_bytes + KEPT_FREE_BYTES:
                    raise RuntimeError("it would use up the memory of the machine or the container")
                piece = torch.empty(count, buffer_bytes, dtype=torch.uint8)
                piece.zero_()
                if pinned:
                    _pin(piece)
            except RuntimeError as error:
                logger.warning(
                    "there is host memory for %d parked streams, not for %d (%s); lower model.parked_share",
                    len(self.buffers),
                    buffers,
                    error,
                )
                break
            self._pieces.append(piece)
            self.buffers += piece.unbind()

    def close(self) -> None:
        """Unpin and free the memory. Memory that is freed while it is pinned cannot be pinned again. Idempotent."""
        self.buffers = []
        for piece in self._pieces if self._pinned else ():
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())  # type: ignore[no-untyped-call]
        self._pieces = []


def _pin(memory: Tensor) -> None:
    """Pin memory in place: torch's own pinned allocations are rounded up to powers of two. Raises RuntimeError."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        raise RuntimeError(f"pinning {memory.numel()} bytes failed with CUDA error {int(code)}")


@dataclass(slots=True)
class _Transfer:
    """A device buffer of the size of one stream, and the event after which it can be used again."""

    buffer: Tensor
    done: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Parked:
    """The host buffer of a parked stream, and the event after which its contents are there."""

    buffer: Tensor
    there: torch.cuda.Event | None


class ParkedPages:
    """Moves the pages of streams to host memory and back."""

    def __init__(self, stacks: Sequence[KvPages], host: ParkingBuffers, moves: int) -> None:
        self._views = [_words(pages) for pages in stacks]
        self._device = stacks[0].data.device
        self._host = host
        self._free = list(host.buffers)
        self._parked: dict[int, _Parked] = {}
        # Pages to write at the next launch, by slot: where they are, and which pages they become.
        self._arriving: dict[int, tuple[_Transfer, list[list[int]]]] = {}
        size = host.buffers[0].numel()
        cuda = self._device.type == "cuda"
        self._outward = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        self._inward = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        # Twice as many for the way back: those of the last step are read while those of this step are filled.
        self._out = [_Transfer(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(moves)]
        self._in = [_Transfer(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(2 * moves)]

    def begin_step(self, closed: Sequence[int], parked: Sequence[MoveTask], restored: Sequence[MoveTask]) -> None:
        """Free the buffers of closed streams, write the pages whose copies the last step has started, then start the
        moves of this step."""
        for slot in closed:
            self._arriving.pop(slot, None)
            if (gone := self._parked.pop(slot, None)) is not None:
                self._free.append(gone.buffer)
        for transfer, pages in self._arriving.values():
            self._write(transfer, pages)
        self._arriving.clear()
        for task in parked:
            self._park(task)
        for task in restored:
            self._send_for(task)

    def close(self) -> None:
        """Free the host memory. Waits for copies that are under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._free, self._views = [], []
        self._parked.clear()
        self._arriving.clear()
        self._out, self._in = [], []
        self._host.close()

    def _park(self, task: MoveTask) -> None:
        transfer = self._out.pop(0)
        self._out.append(transfer)
        if transfer.done is not None:
            torch.cuda.current_stream(self._device).wait_event(transfer.done)
        size = 0
        for view, pages, part in self._parts(transfer.buffer, task.pages):
            torch.index_select(view, 1, pages, out=part)
            size += part.nbytes
        host = self._free.pop()
        if self._outward is None:
            host[:size].copy_(transfer.buffer[:size])
            self._parked[task.slot] = _Parked(host, None)
            return
        gathered = torch.cuda.current_stream(self._device).record_event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._outward):
            self._outward.wait_event(gathered)
            host[:size].copy_(transfer.buffer[:size], non_blocking=True)
            transfer.done = self._outward.record_event()  # type: ignore[no-untyped-call]
        self._parked[task.slot] = _Parked(host, transfer.done)

    def _send_for(self, task: MoveTask) -> None:
        transfer = self._in.pop(0)
        self._in.append(transfer)
        parked = self._parked.pop(task.slot)
        size = sum(part.nbytes for _, _, part in self._parts(transfer.buffer, task.pages))
        if self._inward is None:
            transfer.buffer[:size].copy_(parked.buffer[:size])
        else:
            with torch.cuda.stream(self._inward):
                if transfer.done is not None:
                    self._inward.wait_event(transfer.done)
                if parked.there is not None:
                    self._inward.wait_event(parked.there)
                transfer.buffer[:size].copy_(parked.buffer[:size], non_blocking=True)
                transfer.done = self._inward.record_event()  # type: ignore[no-untyped-call]
        # The next stream that is parked in this host buffer must not overwrite it before it is read.
        if self._outward is not None and transfer.done is not None:
            self._outward.wait_event(transfer.done)
        self._free.append(parked.buffer)
        self._arriving[task.slot] = transfer, task.pages

    def _write(self, transfer: _Transfer, pages: list[list[int]]) -> None:
        """Write the pages of a stream that is about to be computed."""
        compute = torch.cuda.current_stream(self._device) if self._inward is not None else None
        if compute is not None and transfer.done is not None:
            compute.wait_event(transfer.done)
        for view, numbers, part in self._parts(transfer.buffer, pages):
            view.index_copy_(1, numbers, part)
        if compute is not None:
            transfer.done = compute.record_event()  # type: ignore[no-untyped-call]

    def _parts(self, buffer: Tensor, pages: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each tensor of pages, the numbers of a stream's pages in it, and their place in a buffer."""
        start = 0
        for views, numbers in zip(self._views, pages, strict=True):
            there = upload(np.array(numbers, np.int64), self._device)
            for view in views:
                shape = (view.shape[0], len(numbers), *view.shape[2:])
                size = prod(shape) * view.element_size()
                yield view, there, buffer[start : start + size].view(view.dtype).view(shape)
                start += size


def _words(pages: KvPages) -> list[Tensor]:
    """The pages as whole words, whatever they hold: indexing is not implemented for every type."""
    parts = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    return [part.view(torch.int64 if part.shape[-1] * part.element_size() % 8 == 0 else torch.int32) for part in parts]
