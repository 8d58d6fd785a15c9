"""Which device the model runs on, how much of its memory is free, and how numbers get there and back.

A host that runs ahead of its device must neither wait for it by accident nor write over what the device has yet to
read. So transfers go through memory that is taken for each of them: on CUDA it is pinned, and torch gives it out again
only when the transfer is over.
"""

from __future__ import annotations

import ctypes
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineError

logger = logging.getLogger(__name__)

GIB = 1 << 30


class NotEnoughMemory(EngineError):
    """The device cannot hold the model, or not for that many streams. The text says what would fit."""


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


class NoDevice(EngineError):
    """The device that was asked for is not there. The text says what to do."""


def require_device(name: str) -> torch.device:
    """The device of this name, current from now on."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise NoDevice(f"{name!r} is no device; use 'cuda', 'cuda:1' or 'cpu'") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise NoDevice("no CUDA device is visible; install its driver, or use a model that runs on the CPU")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise NoDevice(f"{name!r} is not there; {torch.cuda.device_count()} CUDA devices are visible")
        if device.index is not None:
            torch.cuda.set_device(device)  # recordings and events belong to the device that is current
    elif device.type != "cpu":
        raise NoDevice(f"{name!r} is not supported; use 'cuda' or 'cpu'")
    return device


def compute_on_one_thread() -> None:
    """Every operation on a CPU runs on the thread that calls it, whichever library computes it.

    On ARM, 8-bit products and some others are Arm's Compute Library's, which has as many threads as there are cores,
    whatever torch is told. They wait for each other busily: on a busy machine a product took ten times the processor
    time. Torch has no word for that, so the library is told itself.
    """
    torch.set_num_threads(1)
    library = Path(torch.__file__).parent / "lib" / "libarm_compute.so"
    if library.is_file():
        set_scheduler = getattr(ctypes.CDLL(str(library)), "_ZN11arm_compute9Scheduler3setENS0_4TypeE", None)
        if set_scheduler is None:
            logger.warning("%s does not take its number of threads; streams will cost more", library.name)
        else:
            set_scheduler(0)  # the scheduler without threads


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, whoever uses them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has taken yet."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory for one transfer to or from the device."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, without waiting for what it is busy with."""
    host = staging(values.shape, torch.from_numpy(values).dtype, device)
    np.copyto(host.numpy(), values)
    return host.to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host; `values` waits until it and all that the device did before it are there."""

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


# CUDA graphs: one recording of the whole step per batch size, so that a step is one launch instead of a thousand.
#
# Batches are padded up to the next recorded size. All recordings share one memory pool, largest first, because only
# one of them runs at a time; those of another step may share it too.


def batch_sizes(largest: int) -> list[int]:
    """Sizes worth a recording: padding costs at most a third of a small batch and about an eighth of a large one."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 128, 144, 160, 176, 192]
    sizes += range(224, largest, 32)
    return [size for size in sizes if size < largest] + [largest]


class StepGraphs:
    """Runs `step(size)` by replaying its recording. `step` must read and write fixed places only."""

    def __init__(self, step: Callable[[int], None], largest: int, sizes: Sequence[int] = ()) -> None:
        self._step = step
        self._sizes = sorted(sizes) or batch_sizes(largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, beside: StepGraphs | None = None) -> None:
        """Record the step for every size, in the memory of the recordings `beside`, if there are any."""
        pool = torch.cuda.graph_pool_handle()
        if beside is not None and beside._graphs:
            pool = next(iter(beside._graphs.values())).pool()
        for size in reversed(self._sizes):
            # The first run compiles kernels and lets the libraries choose algorithms, which a recording cannot hold.
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(size)
            self._graphs[size] = graph

    def run(self, count: int) -> None:
        self._graphs[self._sizes[bisect_left(self._sizes, count)]].replay()
