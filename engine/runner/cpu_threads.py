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
