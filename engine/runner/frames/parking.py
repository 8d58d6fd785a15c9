"""Parking: moves the keys and values of silent streams to host memory and back (`ParkedPages`, `ParkingBuffers`).

Other streams use their pages meanwhile; the scheduler decides which streams are parked (`engine/core/scheduler.py`). A
stream's pages are gathered on the device into one buffer, which is copied to the host while the device computes. On the
way back the copy starts one step before the stream is computed, and its pages are written when that step is launched.
All copies are ordered by CUDA streams and events, so the engine's thread never waits for a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import MoveTask
from engine.core.scheduler import MAX_KEPT_FREE
from engine.host_memory import available_memory
from engine.models.layers import KvPages
from engine.runner.device import upload

logger = logging.getLogger(__name__)

# Most streams that are parked, and most that are restored, in one step. Parking needs one buffer on the device for
# each, restoring two.
MOVES = 4
# Host buffers needed beyond one per parked stream. Streams are parked early to keep pages free, for MAX_KEPT_FREE live
# streams and one upload. And a step parks up to MOVES streams before it frees the buffers of those that it restores.
SPARE_HOST_BUFFERS = MAX_KEPT_FREE + 1 + MOVES
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
        raise RuntimeError(f"pinning {memory.numel()} bytes failed with CUDA error {int(code)}")


@dataclass(slots=True)
class _Transfer:
    """A device buffer of the size of one stream, and the event after which it can be used again."""

    buffer: Tensor
    done: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Parked:
    """The host buffer of a parked stream, and the event after which its contents have arrived there."""

    buffer: Tensor
    arrived: torch.cuda.Event | None


class ParkedPages:
    """Moves the pages of streams to host memory and back. `moves`: most streams in one step, each way."""

    def __init__(self, stacks: Sequence[KvPages], host: ParkingBuffers, moves: int) -> None:
        self._views = [_as_integers(pages) for pages in stacks]
        self._device = stacks[0].data.device
        self._host = host
        self._free = list(host.buffers)
        self._parked: dict[int, _Parked] = {}
        # Pages to write at the next launch, by slot: the device buffer with their contents, and their page numbers.
        self._arriving: dict[int, tuple[_Transfer, list[list[int]]]] = {}
        size = host.buffers[0].numel()
        cuda = self._device.type == "cuda"
        self._park_stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        self._restore_stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        # Device buffers. Twice as many to restore: those of the last step are read while those of this step are filled.
        self._park_buffers = [
            _Transfer(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(moves)
        ]
        self._restore_buffers = [
            _Transfer(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(2 * moves)
        ]

    def begin_step(self, closed: Sequence[int], parked: Sequence[MoveTask], restored: Sequence[MoveTask]) -> None:
        """Free the buffers of closed streams, write the pages whose copies the last step has started, then start the
        moves of this step."""
        for slot in closed:
            self._arriving.pop(slot, None)
            if (parked_stream := self._parked.pop(slot, None)) is not None:
                self._free.append(parked_stream.buffer)
        for transfer, pages in self._arriving.values():
            self._finish_restore(transfer, pages)
        self._arriving.clear()
        for task in parked:
            self._start_park(task)
        for task in restored:
            self._start_restore(task)

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
        size = 0
        for view, pages, part in self._parts(transfer.buffer, task.pages):
            torch.index_select(view, 1, pages, out=part)
            size += part.nbytes
        host = self._free.pop()
        if self._park_stream is None:
            host[:size].copy_(transfer.buffer[:size])
            self._parked[task.slot] = _Parked(host, None)
            return
        gathered = torch.cuda.current_stream(self._device).record_event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._park_stream):
            self._park_stream.wait_event(gathered)
            host[:size].copy_(transfer.buffer[:size], non_blocking=True)
            transfer.done = self._park_stream.record_event()  # type: ignore[no-untyped-call]
        self._parked[task.slot] = _Parked(host, transfer.done)

    def _start_restore(self, task: MoveTask) -> None:
        """Start to copy a parked stream into a device buffer."""
        transfer = self._restore_buffers.pop(0)
        self._restore_buffers.append(transfer)
        parked = self._parked.pop(task.slot)
        size = sum(part.nbytes for _, _, part in self._parts(transfer.buffer, task.pages))
        if self._restore_stream is None:
            transfer.buffer[:size].copy_(parked.buffer[:size])
        else:
            with torch.cuda.stream(self._restore_stream):
                if transfer.done is not None:
                    self._restore_stream.wait_event(transfer.done)
                if parked.arrived is not None:
                    self._restore_stream.wait_event(parked.arrived)
                transfer.buffer[:size].copy_(parked.buffer[:size], non_blocking=True)
                transfer.done = self._restore_stream.record_event()  # type: ignore[no-untyped-call]
        # The next stream that is parked in this host buffer must not overwrite it before it is read.
        if self._park_stream is not None and transfer.done is not None:
            self._park_stream.wait_event(transfer.done)
        self._free.append(parked.buffer)
        self._arriving[task.slot] = transfer, task.pages

    def _finish_restore(self, transfer: _Transfer, pages: list[list[int]]) -> None:
        """Write the pages of a stream that is about to be computed."""
        compute = torch.cuda.current_stream(self._device) if self._restore_stream is not None else None
        if compute is not None and transfer.done is not None:
            compute.wait_event(transfer.done)
        for view, numbers, part in self._parts(transfer.buffer, pages):
            view.index_copy_(1, numbers, part)
        if compute is not None:
            transfer.done = compute.record_event()  # type: ignore[no-untyped-call]

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


def _as_integers(pages: KvPages) -> list[Tensor]:
    """Views of the pages and scales as int64 or int32: index_select is not implemented for float8."""
    parts = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    return [part.view(torch.int64 if part.shape[-1] * part.element_size() % 8 == 0 else torch.int32) for part in parts]
