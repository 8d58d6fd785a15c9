"""Threads on the CPU: how many one operation uses, and the priority of a thread whose work may wait.

Used by everything that runs a model on a CPU: the runners, the background models, benchmarks and training.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Added to the nice value of threads whose work may wait.
LESS_PRIORITY = 10


def give_way() -> None:
    """Lower the priority of this thread; a system without priorities of threads leaves it as it is."""
    with suppress(OSError, AttributeError):
        lower = os.getpriority(os.PRIO_PROCESS, 0) + LESS_PRIORITY
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lower)


def compute_on_one_thread() -> None:
    """Make every CPU operation run on the calling thread, whichever library computes it. See `compute_on_threads`."""
    if not compute_on_threads(1):
        logger.warning("cannot set the number of threads of Arm's Compute Library; streams will cost more")


def compute_on_threads(count: int) -> bool:
    """Make CPU operations that the calling thread begins run on this many threads. Returns whether that is possible.

    On ARM, 8-bit matrix products and some other operations use Arm's Compute Library, which starts a thread per core
    whatever torch's setting is. Its threads spin while they wait, which multiplies the processor time on a busy
    machine. Torch has no setting for that, so the library is called directly. Its setting is that of all threads.
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
        set_scheduler(2)  # that of OpenMP, as in torch
        scheduler.restype = ctypes.c_void_p
        set_threads(ctypes.c_void_p(scheduler()), count)
    return True
