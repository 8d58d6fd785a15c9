"""The device of a windowed model, errors if it cannot run there, and the length of its windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from audio.containers import read_file
from engine.boundary.items import make_cutter, prepare
from engine.core.plan import DecodeTask
from engine.messages import Closed, Feed, Finish, Open, Output, Text
from engine.models.moonshine import Moonshine
from engine.models.seq2seq import Int8Linear
from engine.models.whisper import Whisper, WhisperConfig
from engine.options import DEFAULT_MODEL, EngineConfig
from engine.runner.device import NoDevice
from engine.runner.load import BadDevice, load_runner, windowed_device, windowed_on_cpu
from engine.runner.windowed.encoders import BlockEncoder, WindowEncoder
from engine.runner.windowed.runner import WindowedRunner
from engine.server.main import build_loop
from engine.weights.checkpoint import BadCheckpoint
from engine.weights.registry import STREAMING_ENCODER
from engine.weights.store import pull
from tests.cached_models import skip_unless_cached

RECORDING = "sample-two-cities"


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


def test_an_engine_for_files_alone_has_no_streaming_encoder_and_the_same_words_on_one_core_and_two() -> None:
    skip_unless_cached(DEFAULT_MODEL, RECORDING)
    sound = np.concatenate(list(read_file(pull(RECORDING))))[: 5 * 16_000]
    texts = []
    for files_only, threads in ((False, 1), (True, 1), (True, 2)):
        config = EngineConfig(DEFAULT_MODEL, "cpu", max_streams=1, threads=threads, files_only=files_only)
        loop = build_loop(replace(config, speakers=False))
        assert (loop.runner.reviser is None) == files_only == (not loop.scheduler.spec.options.revises)
        spec = loop.scheduler.spec
        cutter = make_cutter(spec)
        items = prepare(cutter, cutter.cut(sound), spec)
        items += prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)
        loop.submit([Open("file", live=False), Feed("file", items), Finish("file")], 0)
        outputs: list[Output] = []
        while not any(isinstance(output, Closed) for output in outputs):
            step = loop.step()
            outputs += [] if step is None else step.outputs
        loop.close()
        texts.append("".join(output.delta for output in outputs if isinstance(output, Text)))
    assert texts[0] == texts[1] == texts[2] != ""


def test_every_thread_that_reads_has_the_weights_for_live_streams_and_for_uploads() -> None:
    skip_unless_cached(DEFAULT_MODEL)
    runner, _ = load_runner(pull(DEFAULT_MODEL), EngineConfig(DEFAULT_MODEL, "cpu", max_streams=1, threads=2))
    assert isinstance(runner, WindowedRunner)
    for live in (True, False):
        encoder = runner.windows.stream_encoder(live)
        assert isinstance(encoder, (BlockEncoder, WindowEncoder)) and isinstance(encoder._model, Moonshine)
        layers = [layer for layer in encoder._model.modules() if isinstance(layer, Int8Linear)]
        assert layers and all(layer.weights_of(number) is not None for layer in layers for number in range(2))
    runner.close()
