"""Helpers of all runners for the device that a model runs on: choice, free memory, transfers, CUDA graphs, CPU threads.

`StepGraphs` records a step as CUDA graphs for some batch sizes (`batch_sizes`), and `give_way` lowers the priority of a
thread whose work may wait. None of them keeps state of streams.

A host that runs ahead of its device must neither wait for it by accident nor overwrite memory that the device has yet
to read. So each transfer allocates its own host memory: on CUDA it is pinned, and torch reuses it only when the
transfer is over.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineError

logger = logging.getLogger(__name__)

GIB = 1 << 30


class NotEnoughMemory(EngineError):
    """The device cannot hold the model, or not with this many streams. The text says what would fit."""


def gib(size: int) -> str:
    """The size as text in GiB."""
    return f"{size / GIB:.1f} GiB"


class NoDevice(EngineError):
    """The requested device does not exist. The text says what to do."""


def require_device(name: str) -> torch.device:
    """Return the device of this name and make it current. Raises NoDevice."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise NoDevice(f"{name!r} is not a device; use 'cuda', 'cuda:1' or 'cpu'") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise NoDevice("no CUDA device is visible; install its driver, or use a model that runs on the CPU")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise NoDevice(f"{name!r} is not there; {torch.cuda.device_count()} CUDA devices are visible")
        if device.index is not None:
            torch.cuda.set_device(device)  # graphs and events belong to the current device
    elif device.type != "cpu":
        raise NoDevice(f"{name!r} is not supported; use 'cuda' or 'cpu'")
    return device


def total_memory(device: torch.device) -> int:
    """Bytes of memory of the device, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """Bytes of memory that are not in use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory for one transfer to or from the device."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy values to the device without waiting for its work. The copy reads pinned memory that torch keeps until it is
    done: the device may read memory that is not pinned after this returns."""
    host = staging(values.shape, torch.from_numpy(values).dtype, device)
    np.copyto(host.numpy(), values)
    return host.to(device, non_blocking=True)


class Download:
    """A transfer of a tensor to the host; `values` waits for it and for all work of the device before it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = staging(tuple(tensor.shape), tensor.dtype, tensor.device)
        self._host.copy_(tensor, non_blocking=True)
        self._there: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._there = torch.cuda.current_stream(tensor.device).record_event()  # type: ignore[no-untyped-call]

    def values(self) -> NDArray[Any]:
        if self._there is not None:
            self._there.synchronize()
        return self._host.numpy()


def batch_sizes(largest: int) -> list[int]:
    """Batch sizes to record: padding is at most a third of a small batch and about an eighth of a large one."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 128, 144, 160, 176, 192]
    sizes += range(224, largest, 32)
    return [size for size in sizes if size < largest] + [largest]


class StepGraphs:
    """Runs `step(size)` as a recorded CUDA graph, so that a step is one launch instead of many.

    `step` must read and write fixed buffers only. There is one graph per batch size; batches are padded to the next
    recorded size. All graphs share one memory pool, recorded largest first, because only one of them runs at a time;
    the graphs of another step may share it too.
    """

    def __init__(self, step: Callable[[int], None], largest: int, sizes: Sequence[int] = ()) -> None:
        self._step = step
        self._sizes = sorted(sizes) or batch_sizes(largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, beside: StepGraphs | None = None) -> None:
        """Record the step for every size, in the memory pool of the graphs `beside`, if there are any."""
        pool = torch.cuda.graph_pool_handle()
        if beside is not None and beside._graphs:
            pool = next(iter(beside._graphs.values())).pool()
        for size in reversed(self._sizes):
            # The first run compiles kernels and lets libraries choose algorithms, which cannot be done while recording.
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(size)
            self._graphs[size] = graph

    def run(self, count: int) -> None:
        self._graphs[self._sizes[bisect_left(self._sizes, count)]].replay()
