"""Memory of `VoxtralRunner`: pages of keys and values on the device, how many streams fit, parked streams on the host.

`StackCache` has the pages of one stack of layers. The scheduler decides which stream has which page
(`engine/core/scheduler.py`): it assigns pages [0, pages) and slots [0, streams). Higher numbers belong to no stream:
one page and one slot for the padding rows of a batch, and the pages and slots of the shared openings. An *opening* is
the silence before every stream; its keys and values are computed once and copied.

`plan_memory` computes how many streams fit on a device and in host memory, before anything large is allocated.
`voxtral_spec` makes the `ModelSpec` of a checkpoint, from which the plan, the scheduler and the gateways take the
model's sizes.

`ParkedPages` moves the keys and values of silent streams to host memory and back; other streams use their pages
meanwhile. The scheduler decides which streams are parked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import Moves, MoveTask
from engine.core.scheduler import MAX_KEPT_FREE
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

# Pages of keys and values on the device.

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


# The memory plan.

# Samples before and after a position that its convolutions and mel frames read.
LOOK_BACK_SAMPLES = 680
LOOK_AHEAD_SAMPLES = 40
# In mel frames: frames of the position itself, and frames before it that its convolutions read.
FRAMES_PER_POSITION = 8
CONTEXT_FRAMES = 3
# Encoder-cache rows beyond those of the streams: room for shared and recently released audio.
SPARE_EMBEDS = 1024
# Most positions of a stream that a rebuild computes in one step.
REPLAY_POSITIONS = 64
# Most encoder-cache rows of a stream: those of two such steps, which may be under way at once, and of the item before
# them, which may not be finished. An item of a replay has a quarter as many positions.
EMBEDS_PER_STREAM = 2 * REPLAY_POSITIONS + REPLAY_POSITIONS // 4
# Memory for libraries, kernels, graphs and fragmentation: measured, plus a reserve.
FIXED_WORKSPACE_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a device is used."""

    # Most open streams, the `parked` ones included.
    streams: int
    # Pages of each group of layers, in the order of `spec.kv_groups`, for the scheduler.
    group_pages: tuple[int, ...]
    # Encoder-cache rows.
    cache_embeds: int
    weight_bytes: int
    # Device memory of a stream whose pages are on the device: pages, activations and keyword tables.
    bytes_per_stream: int
    workspace_bytes: int
    # Streams whose pages are in host memory, and how many are parked, and begin to be restored, in one step.
    parked: int = 0
    moves: int = 0

    @property
    def resident(self) -> int:
        """Number of streams whose pages fit into the device's memory."""
        return self.streams - self.parked

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.resident * self.bytes_per_stream


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
        replay_positions=REPLAY_POSITIONS,
        default_delay_positions=config.default_delay,
        max_delay_positions=MAX_DELAY_POSITIONS,
        kv_groups=tuple(layout.group for layout in layouts),
        features=FeatureShape(config.mel_bins, FRAMES_PER_POSITION, CONTEXT_FRAMES),
        options=Options(keywords=MAX_KEYWORDS),
    )


def kv_bytes_per_stream(spec: ModelSpec) -> int:
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
    parked there. A device with room for less than `STREAMS_PER_MOVE` streams parks only if `max_streams` asks for more
    than fit.
    """
    layouts = stack_layouts(config, decoder_window, kv_dtype)
    spec = voxtral_spec(config, layouts, "voxtral")
    kv_bytes = kv_bytes_per_stream(spec)
    per_stream = kv_bytes + _activation_bytes(config, dtype, spec) + BYTES_PER_SLOT + BYTES_PER_ROW
    weights, shared = weight_bytes(config, dtype), FIXED_WORKSPACE_BYTES + _opening_bytes(spec)
    room = free_bytes - weights - shared
    fits_on_device = room // per_stream
    if fits_on_device < 1:
        raise NotEnoughMemory(
            f"the model needs {gib(weights)} for its weights, {gib(shared)} to work in and {gib(per_stream)} for "
            f"each stream; {gib(free_bytes)} are free"
        )
    parked, parking_overhead = 0, 0
    moves = min(MAX_MOVES, fits_on_device // STREAMS_PER_MOVE)
    if max_streams is not None:
        moves = max(1, moves) if max_streams > fits_on_device else 0
    if parked_bytes and moves:
        parked = max(0, min(parked_bytes // kv_bytes - SPARE_HOST_BUFFERS, fits_on_device))
        # Device buffers of the moves, and what a parked stream has on the device besides its pages.
        parking_overhead = BUFFERS_PER_MOVE * moves * kv_bytes + parked * (per_stream - kv_bytes)
        if parked == 0 or parking_overhead + per_stream > room:
            parked, parking_overhead = 0, 0
    fits_in_all = (room - parking_overhead) // per_stream + parked
    streams = fits_in_all if max_streams is None else max_streams
    if streams > fits_in_all:
        raise NotEnoughMemory(
            f"{streams} streams need {gib(weights + shared + streams * per_stream)} on the device, "
            f"{gib(free_bytes)} are free: {fits_in_all} streams fit with a decoder window of {decoder_window} tokens; "
            "a smaller window, 8-bit keys and values or host memory for silent streams (model.parked_share) help"
        )
    resident = min(streams, fits_in_all - parked)
    return MemoryPlan(
        streams=streams,
        group_pages=tuple(resident * group.ring_pages for group in spec.kv_groups),
        cache_embeds=streams * spec.embeds_per_stream + SPARE_EMBEDS,
        weight_bytes=weights,
        bytes_per_stream=per_stream,
        workspace_bytes=shared + parking_overhead,
        parked=streams - resident,
        moves=moves if parked else 0,
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
    """Return the plan of one of `share_of` engines that share a device. Raises NotEnoughMemory.

    Each engine plans with an equal part of the device's total memory, not with the free memory, so that all plan the
    same number of streams and can replace one another.
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
    """Bytes of pages that belong to no stream: one opening of the encoder, one of the decoder per delay, and
    padding."""
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


# Parking: the pages of silent streams in host memory.
#
# A stream's pages are gathered on the device into one buffer, which is copied to the host while the device computes. On
# the way back a copy fills another buffer, and the pages are written when it is complete; the scheduler asks for that
# before it plans the stream. Copies run in CUDA streams of their own. Neither the engine's thread nor the streams that
# the device computes wait for one. A device has one copy engine for each direction, which a step needs for its own
# small transfers: a stream is copied in pieces, so that these come in between.

# Most streams that are parked, and most that begin to be restored, in one step. Parking has one buffer on the device
# for each, restoring two.
MAX_MOVES, BUFFERS_PER_MOVE = 4, 3
# The device must have room for this many streams per move, so that the buffers take an eighth of its room at most:
# fewer streams can speak at the same time by as many as there are buffers.
STREAMS_PER_MOVE = 8 * BUFFERS_PER_MOVE
# Host buffers needed beyond one per parked stream. Streams are parked early to keep pages free, for MAX_KEPT_FREE live
# streams and one upload. And a step parks up to MAX_MOVES streams before it frees the buffers of those that it
# restores.
SPARE_HOST_BUFFERS = MAX_KEPT_FREE + 1 + MAX_MOVES
# Bytes of a piece of a copy: about 0.6 ms on PCIe 5. Each piece costs the engine's thread as much as a small transfer.
COPY_BYTES = 32 << 20
# Host memory is allocated and pinned in pieces of this size: if one fails, only that one is lost.
PIECE_BYTES = 1 << 30
# Host memory that is left free for everything else.
HOST_RESERVE_BYTES = 1 << 30


class ParkingBuffers:
    """Buffers of equal size in host memory. `pinned`: for CUDA, which copies pinned memory without the processor.

    There may be fewer than `count`, if memory is short; that is logged.
    """

    def __init__(self, count: int, buffer_bytes: int, pinned: bool) -> None:
        per_piece = max(1, PIECE_BYTES // buffer_bytes)
        self._pieces: list[Tensor] = []
        self._pinned = pinned
        self.buffers: list[Tensor] = []
        while len(self.buffers) < count:
            in_piece = min(per_piece, count - len(self.buffers))
            try:
                # Linux overcommits memory, and its OOM killer ends the process that touches it.
                if (available_memory() or 0) < in_piece * buffer_bytes + HOST_RESERVE_BYTES:
                    raise RuntimeError("it would use up the memory of the machine or the container")
                piece = torch.empty(in_piece, buffer_bytes, dtype=torch.uint8)
                piece.zero_()
                if pinned:
                    _pin(piece)
            except RuntimeError as error:
                logger.warning(
                    "there is host memory for %d parking buffers, not for %d (%s); lower model.parked_share",
                    len(self.buffers),
                    count,
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
        # CUDA keeps the error for the next kernel, which has nothing to do with it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise RuntimeError(f"pinning {memory.numel()} bytes failed with CUDA error {int(code)}")


@dataclass(slots=True)
class _Transfer:
    """A device buffer of the size of one stream, and the event after which its copy is complete."""

    buffer: Tensor
    done: torch.cuda.Event | None = None

    @property
    def is_complete(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Parked:
    """The host buffer of a parked stream, and the event after which its contents have arrived there."""

    buffer: Tensor
    arrived: torch.cuda.Event | None


class ParkedPages(Moves):
    """Moves the pages of streams to host memory and back. `moves`: most streams in one step, each way."""

    def __init__(self, stacks: Sequence[KvPages], host: ParkingBuffers, moves: int) -> None:
        self._views = [_as_integers(pages) for pages in stacks]
        self._device = stacks[0].data.device
        self._host = host
        self._free = list(host.buffers)
        self._parked: dict[int, _Parked] = {}
        # Streams that are being restored, by slot: the device buffer for their pages, and their page numbers.
        self._arriving: dict[int, tuple[_Transfer, list[list[int]]]] = {}
        size = host.buffers[0].numel()
        cuda = self._device.type == "cuda"
        self._park_stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        self._restore_stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        # Device buffers: all that are for parking, the one used longest ago first, and the free ones for restoring.
        self._park_buffers = [
            _Transfer(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(moves)
        ]
        self._restore_buffers = [
            _Transfer(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(2 * moves)
        ]

    def begin_step(self, closed: Sequence[int], parked: Sequence[MoveTask], restored: Sequence[MoveTask]) -> None:
        """Free the buffers of closed streams, then start the moves of this step."""
        for slot in closed:
            if (arriving := self._arriving.pop(slot, None)) is not None:
                self._restore_buffers.append(arriving[0])
            if (parked_stream := self._parked.pop(slot, None)) is not None:
                self._free.append(parked_stream.buffer)
        for task in parked:
            self._start_park(task)
        for task in restored:
            self._start_restore(task)

    @torch.inference_mode()
    def is_restored(self, slot: int) -> bool:
        """Whether the pages of a slot are on the device. If their copy is complete, they are written now."""
        if slot not in self._arriving:
            return True
        transfer, pages = self._arriving[slot]
        if not transfer.is_complete:
            return False
        del self._arriving[slot]
        self._finish_restore(transfer, pages)
        self._restore_buffers.append(transfer)
        return True

    def parking_room(self) -> int:
        """How many streams the next step can park without waiting for the copies of those before."""
        return sum(transfer.is_complete for transfer in self._park_buffers)

    def close(self) -> None:
        """Free the host memory. Waits for copies that are under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._free, self._views = [], []
        self._parked.clear()
        self._arriving.clear()
        self._park_buffers, self._restore_buffers = [], []
        self._host.close()

    def _start_park(self, task: MoveTask) -> None:
        """Gather the pages of a stream into a device buffer, and start to copy it to the host."""
        transfer = self._park_buffers.pop(0)
        self._park_buffers.append(transfer)
        if transfer.done is not None:
            torch.cuda.current_stream(self._device).wait_event(transfer.done)
        for view, pages, part in self._parts(transfer.buffer, task.pages):
            torch.index_select(view, 1, pages, out=part)
        size = self._bytes_of(task.pages)
        host = self._free.pop()
        if self._park_stream is None:
            _copy(host, transfer.buffer, size)
            self._parked[task.slot] = _Parked(host, None)
            return
        gathered = torch.cuda.current_stream(self._device).record_event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._park_stream):
            self._park_stream.wait_event(gathered)
            _copy(host, transfer.buffer, size)
            transfer.done = self._park_stream.record_event()  # type: ignore[no-untyped-call]
        self._parked[task.slot] = _Parked(host, transfer.done)

    def _start_restore(self, task: MoveTask) -> None:
        """Start to copy a parked stream into a device buffer."""
        transfer = self._restore_buffers.pop(0)
        parked = self._parked.pop(task.slot)
        size = self._bytes_of(task.pages)
        if self._restore_stream is None:
            _copy(transfer.buffer, parked.buffer, size)
        else:
            with torch.cuda.stream(self._restore_stream):
                if transfer.done is not None:
                    self._restore_stream.wait_event(transfer.done)
                if parked.arrived is not None:
                    self._restore_stream.wait_event(parked.arrived)
                _copy(transfer.buffer, parked.buffer, size)
                transfer.done = self._restore_stream.record_event()  # type: ignore[no-untyped-call]
        # The next stream that is parked in this host buffer must not overwrite it before it is read.
        if self._park_stream is not None and transfer.done is not None:
            self._park_stream.wait_event(transfer.done)
        self._free.append(parked.buffer)
        self._arriving[task.slot] = transfer, task.pages

    def _finish_restore(self, transfer: _Transfer, pages: list[list[int]]) -> None:
        """Write the pages of a stream whose copy is complete."""
        for view, numbers, part in self._parts(transfer.buffer, pages):
            view.index_copy_(1, numbers, part)
        if self._restore_stream is not None:
            # The buffer must not be filled again before the device has read it.
            transfer.done = torch.cuda.current_stream(self._device).record_event()  # type: ignore[no-untyped-call]

    def _bytes_of(self, pages: list[list[int]]) -> int:
        """Bytes of these pages in all tensors."""
        sizes = zip(self._views, pages, strict=True)
        return sum(len(numbers) * view[:, 0].nbytes for views, numbers in sizes for view in views)

    def _parts(self, buffer: Tensor, pages: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each tensor of pages, the numbers of a stream's pages in it, and the part of a buffer for them."""
        start = 0
        for views, numbers in zip(self._views, pages, strict=True):
            page_numbers = upload(np.array(numbers, np.int64), self._device)
            for view in views:
                shape = (view.shape[0], len(numbers), *view.shape[2:])
                size = prod(shape) * view.element_size()
                yield view, page_numbers, buffer[start : start + size].view(view.dtype).view(shape)
                start += size


def _copy(target: Tensor, source: Tensor, size: int) -> None:
    """Copy the first `size` bytes, in pieces. Between host and device this does not wait."""
    for start in range(0, size, COPY_BYTES):
        piece = slice(start, min(start + COPY_BYTES, size))
        target[piece].copy_(source[piece], non_blocking=True)


def _as_integers(pages: KvPages) -> list[Tensor]:
    """Views of the pages and scales as int64 or int32: index_select is not implemented for float8."""
    parts = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    return [part.view(torch.int64 if part.shape[-1] * part.element_size() % 8 == 0 else torch.int32) for part in parts]
