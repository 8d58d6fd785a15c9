"""Helpers for the device that a model runs on: choice, free memory, transfers, CUDA graphs, and threads of the CPU.

Runners, background models, benchmarks and training use them; none keeps state of streams. `StepGraphs` records a step
as CUDA graphs for some batch sizes (`batch_sizes`). `compute_on_threads` sets how many threads one operation on a CPU
uses, and `lower_priority` is for a thread whose work may wait.

A host that runs ahead of its device must neither wait for it by accident nor overwrite memory that the device has not
read yet. So each transfer allocates its own host memory (`staging`). On CUDA this memory is pinned, and torch uses it
again only when the transfer is over.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineError

logger = logging.getLogger(__name__)

GIB = 1 << 30
# Memory of a GPU that the driver takes for a process and its kernels: 0.76 GiB of an H200.
PROCESS_BYTES = 768 * 2**20


class NotEnoughMemory(EngineError):
    """The model, or the model with this many streams, does not fit into the memory of the device."""


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
            raise NoDevice(f"{name!r} does not exist; {torch.cuda.device_count()} CUDA devices are visible")
        if device.index is not None:
            torch.cuda.set_device(device)  # graphs and events belong to the current device
    elif device.type != "cpu":
        raise NoDevice(f"{name!r} is not supported; use 'cuda' or 'cpu'")
    return device


def shared_memory(device: torch.device, engines: int) -> int:
    """Bytes of memory, used or not, that engines which share the device have together: all but what the driver takes
    for each of their processes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] - engines * PROCESS_BYTES
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
    """Copy values to the device without waiting for the device. On CUDA the values are first copied to pinned memory,
    which torch keeps until the device has read it, so the caller may change `values` at once."""
    host = staging(values.shape, torch.from_numpy(values).dtype, device)
    np.copyto(host.numpy(), values)
    return host.to(device, non_blocking=True)


@cache
def _queue_of(device: torch.device, purpose: str, priority: int) -> torch.cuda.Stream:
    """Torch has 32 queues of each priority and gives them out in turn. A process that asked for more would share one
    with the recorded steps, and with it the working memory of cuBLAS."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


class SideQueue:
    """Another queue of a CUDA device, for work that runs beside the steps in the main queue. A device of another kind
    has one queue: work is done at once, and nothing waits."""

    def __init__(self, device: torch.device, purpose: str, priority: int = 0) -> None:
        """Queues of the same purpose are one. Of queues that wait, the one with the lower number of `priority` goes
        first."""
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = _queue_of(device, purpose, priority)
            self.wait_for_main()

    def used(self) -> AbstractContextManager[object]:
        """Within this context the device's work goes to this queue."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait_for_main(self) -> None:
        """Later work in this queue begins when the present work in the main queue is done."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def keep_main_waiting(self) -> None:
        """Later work in the main queue begins when the present work in this queue is done."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Download:
    """A transfer of a tensor to the host; `values` waits for it and for all work of the device before it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = staging(tuple(tensor.shape), tensor.dtype, tensor.device)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.current_stream(tensor.device).record_event()  # type: ignore[no-untyped-call]

    def values(self) -> NDArray[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def batch_sizes(largest: int) -> list[int]:
    """Batch sizes to record: padding is at most a third of a small batch and about an eighth of a large one."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 128, 144, 160, 176, 192]
    sizes += range(224, largest, 32)
    return [size for size in sizes if size < largest] + [largest]


class StepGraphs:
    """Runs `step(size)` as a recorded CUDA graph, so that a step is one launch instead of many.

    `step` must read and write fixed buffers only. There is one graph per batch size: `sizes`, or
    `batch_sizes(largest)`. The caller pads a batch to the next recorded size. The graphs share one memory pool, because
    only one of them runs at a time; the largest is recorded first, so that the others fit into its memory. Graphs of
    another step may share the pool, too.
    """

    def __init__(self, step: Callable[[int], None], largest: int, sizes: Sequence[int] = ()) -> None:
        self._step = step
        self._sizes = sorted(sizes) or batch_sizes(largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, pool_of: StepGraphs | None = None, queue: SideQueue | None = None) -> None:
        """Record the step for every size, in the memory pool of the graphs `pool_of` if they have one.

        Graphs that run beside others are recorded in the queue in which they run: cuBLAS has one working memory for
        each queue, which a recorded product goes on using.
        """
        stream = None if queue is None else queue.stream
        pool = torch.cuda.graph_pool_handle()
        if pool_of is not None and pool_of._graphs:
            pool = next(iter(pool_of._graphs.values())).pool()
        for size in reversed(self._sizes):
            # The first run compiles kernels and lets libraries choose algorithms, which cannot be done while recording.
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._step(size)
            self._graphs[size] = graph

    def run(self, count: int) -> None:
        """Run the graph of the next size from `count` on."""
        self._graphs[self._sizes[bisect_left(self._sizes, count)]].replay()


# Threads on the CPU: how many one operation uses, and the priority of a thread whose work may wait.

# Added to the nice value of threads whose work may wait.
NICE_INCREMENT = 10


def lower_priority() -> None:
    """Lower the priority of this thread. Does nothing on a system without priorities of threads."""
    with suppress(OSError, AttributeError):
        nice = os.getpriority(os.PRIO_PROCESS, 0) + NICE_INCREMENT
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def compute_on_one_thread() -> None:
    """Make every CPU operation of this process run on the thread that calls it. See `compute_on_threads`."""
    if not compute_on_threads(1):
        logger.warning("cannot set the number of threads of Arm's Compute Library; streams will cost more")


def compute_on_threads(count: int) -> bool:
    """Set how many threads one CPU operation uses. Returns False if the number cannot be set for all operations.

    On ARM, 8-bit matrix products and some other operations use Arm's Compute Library, which starts a thread per core
    whatever torch's setting is. Its threads spin while they wait, which multiplies the processor time on a busy
    machine. Torch has no setting for that, so the library is called directly. The library's setting applies to the
    whole process.
    """
    torch.set_num_threads(count)
    library = Path(torch.__file__).parent / "lib" / "libarm_compute.so"
    if not library.is_file():
        return True
    arm = ctypes.CDLL(str(library))
    try:
        set_scheduler, scheduler = arm._ZN11arm_compute9Scheduler3setENS0_4TypeE, arm._ZN11arm_compute9Scheduler3getEv
        set_threads = arm._ZN11arm_compute12OMPScheduler15set_num_threadsEj
    except AttributeError:
        return False
    if count == 1:
        set_scheduler(0)  # the scheduler without threads
    else:
        set_scheduler(2)  # the scheduler that uses OpenMP, as torch does
        scheduler.restype = ctypes.c_void_p
        set_threads(ctypes.c_void_p(scheduler()), count)
    return True
