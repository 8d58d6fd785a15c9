"""Which device, and how much of it is free."""

from __future__ import annotations

import pytest
import torch

from engine.runner.device import NoDevice, free_memory, require_device


@pytest.mark.parametrize(
    ("name", "text"), [("gpu", "is no device"), ("mps", "not supported"), ("meta", "not supported")]
)
def test_names_that_will_not_do(name: str, text: str) -> None:
    with pytest.raises(NoDevice, match=text):
        require_device(name)


def test_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="no CUDA device is visible"):
        require_device("cuda")


def test_no_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NoDevice, match="1 CUDA devices are visible"):
        require_device("cuda:1")


def test_the_cpu_has_memory() -> None:
    assert free_memory(require_device("cpu")) > 0
