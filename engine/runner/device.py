"""Which device the model runs on, and how much of its memory is free: clear answers before anything is loaded."""

from __future__ import annotations

import os

import torch

from engine.errors import EngineError


class NoDevice(EngineError):
    """The device that was asked for is not there. The text says what to do."""


def require_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise NoDevice(f"{name!r} is no device; use 'cuda', 'cuda:1' or 'cpu'") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise NoDevice("no CUDA device is visible; install its driver, or use a model that runs on the CPU")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise NoDevice(f"{name!r} is not there; {torch.cuda.device_count()} CUDA devices are visible")
    elif device.type != "cpu":
        raise NoDevice(f"{name!r} is not supported; use 'cuda' or 'cpu'")
    return device


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has taken yet."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
