"""The device of a windowed model, errors if it cannot run there, and the length of its windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.plan import DecodeTask
from engine.models.whisper import Whisper, WhisperConfig
from engine.options import EngineConfig
from engine.runner.device import NoDevice
from engine.runner.load import BadDevice, load_runner, windowed_device, windowed_on_cpu
from engine.weights.checkpoint import BadCheckpoint
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


@pytest.mark.usefixtures("one_thread")
def test_on_a_cpu_a_file_is_heard_as_whisper_was_trained_to_and_a_live_window_for_less() -> None:
    """With two seconds of silence behind a short window, whisper-tiny said sentences again and again to their end."""
    heard: list[list[int]] = []
    torch.manual_seed(5)
    model = Whisper(WhisperConfig(80, 51_865, 1500, 16, 2, 1, 64, 2, 2)).eval()
    runner, _ = windowed_on_cpu("small", model, [b""] * 51_865, max_streams=1, threads=1)
    for live, final, pause in ((True, False, False), (True, False, True), (True, True, False), (False, True, False)):
        task = DecodeTask(0, "s", 0, 0, 25, [], [], final=final, pause=pause)
        with torch.inference_mode():
            heard.append(runner.windows.stream_encoder(live).encode(task, torch.zeros(1, 2 * 16_000)).encoded.lengths)
    assert heard == [[200], [700], [700], [1500]]


@pytest.mark.parametrize(("free", "lines"), [(500 * 2**20, 1), (700 * 2**20, 0), (None, 0)])
def test_too_little_memory_is_said_before_weights_are_read(
    free: int | None, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.runner.load.available_memory", lambda: free)
    with pytest.raises(BadCheckpoint):
        load_runner(tmp_path, EngineConfig(str(tmp_path), "cpu"))
    said = [line for line in caplog.messages if "the model needs about 0.6 GiB of memory, and 0.5 GiB are free" in line]
    assert len(said) == lines and all("choose a smaller model" in line for line in said)
