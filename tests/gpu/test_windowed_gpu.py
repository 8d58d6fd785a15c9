"""Windowed models on a GPU: the recorded step against the eager one, and the words of real weights against a CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.whisper import Whisper, WhisperConfig
from engine.runner.load import windowed_on_device
from engine.runner.windowed.device_windows import DeviceWindows
from engine.runner.windowed.runner import WindowedRunner
from engine.weights.store import cache_folder
from tests.engine.runner.windowed.test_runner import Streams, speech

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REAL_MODEL, REAL_SPEECH = "moonshine-tiny", "sample-two-cities"


def small(family: str) -> Moonshine | Whisper:
    torch.manual_seed(5)
    if family == "moonshine":
        model: Moonshine | Whisper = Moonshine(
            MoonshineConfig(64, 128, 2, 2, 4, 12, 10_000.0, 60, start_token=1, end_token=2)
        )
    else:
        model = Whisper(WhisperConfig(80, 60, 1500, 64, 4, 2, 64, 4, 2))
        model.start_tokens, model.end_token, model.suppressed = [1], 2, [0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.1)
    return model.eval()


def runner_on_gpu(family: str, records: bool) -> WindowedRunner:
    pieces = [b"", b"", b""] + [b" w%d" % token for token in range(3, 60)]
    device = torch.device("cuda")
    runner, _ = windowed_on_device(family, small(family), pieces, device, torch.float16, 8 << 30, 8)
    # A random model does not believe its own words.
    runner._policy = replace(runner._policy, doubt=-100.0, agreed_margin=2.0, lone_margin=4.0)
    assert isinstance(runner._windows, DeviceWindows)
    stage = runner._windows._decoder._stage
    assert stage is not None and stage._records
    stage._records = records
    runner.warm_up()
    return runner


@pytest.mark.parametrize("family", ["moonshine", "whisper"])
def test_the_recorded_step_equals_the_eager_step(family: str) -> None:
    audio = {slot: speech(10 + slot, 45) for slot in range(5)}
    said = []
    for records in (True, False):
        streams = Streams(runner_on_gpu(family, records), audio)
        for step in range(9):
            streams.step(final=step in (3, 8), pause=step == 6)
        said.append([streams.tokens(slot) for slot in audio])
        streams.runner.close()
    assert said[0] == said[1] and sum(map(len, said[0])) > 20


def test_real_words_are_those_of_a_cpu(tmp_path: Path) -> None:
    from benchmarks.windowed_words import build, differing, live_texts, read_wav

    missing = [name for name in (REAL_MODEL, REAL_SPEECH) if not (cache_folder() / name).exists()]
    if missing:
        pytest.skip("not in the cache; run " + " and ".join(f"`tickertape pull {name}`" for name in missing))
    sound = read_wav(next((cache_folder() / REAL_SPEECH).glob("*.wav")))
    clips = [sound[start : start + 16_000 * 20] for start in range(0, len(sound), 16_000 * 4)]
    texts = [live_texts(build(REAL_MODEL, device, 8, 8, ample=True), clips, 8) for device in ("cpu", "cuda")]
    differ, words = differing(*texts)
    assert words > 100 and differ <= max(1, 0.003 * words)
