"""Where a windowed model runs, and what is said if it cannot run there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.runner.device import NoDevice
from engine.runner.load import BadDevice, load_runner, windowed_device
from engine.weights.registry import STREAMING_ENCODER


@pytest.mark.parametrize(
    ("has_gpu", "in_blocks", "chosen"),
    [(True, False, "cuda"), (False, False, "cpu"), (True, True, "cpu"), (False, True, "cpu")],
)
def test_auto_takes_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, in_blocks: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert windowed_device("auto", in_blocks).type == chosen
    assert windowed_device("cpu", in_blocks).type == "cpu"


def test_a_model_that_hears_in_blocks_says_what_to_use_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / STREAMING_ENCODER).touch()
    with pytest.raises(BadDevice, match="runs on the CPU, not on 'cuda'.*use moonshine-base"):
        load_runner(tmp_path, EngineConfig("m", "cuda", threads=1))


def test_no_gpu_is_said_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="no CUDA device is visible"):
        load_runner(tmp_path / "nothing", EngineConfig("m", "cuda", threads=1))
