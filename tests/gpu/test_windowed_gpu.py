"""Windowed models on a GPU: the recorded step against the eager one, and the words of real weights against a CPU's."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sounds import read_wav
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.seq2seq import DetectionTokens
from engine.models.whisper import Whisper, WhisperConfig
from engine.options import cache_folder
from engine.runner.load import windowed_on_device
from engine.runner.windowed.decoder import Row
from engine.runner.windowed.windows import DeviceWindows
from tests.cached_models import skip_unless_cached
from tests.gpu.windowed_words import build, differing, live_texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REAL_MODELS, REAL_SPEECH = ("moonshine-tiny", "whisper-tiny.en"), "sample-two-cities"


def small(family: str) -> Moonshine | Whisper:
    torch.manual_seed(5)
    if family == "moonshine":
        config = MoonshineConfig(64, 128, 2, 2, 4, 12, 10_000.0, 60, start_token=1, end_token=2)
        model: Moonshine | Whisper = Moonshine(config)
    else:
        model = Whisper(WhisperConfig(80, 60, 1500, 64, 4, 2, 64, 4, 2))
        model.start_tokens, model.end_token = [1], 2
        model.detection_tokens = DetectionTokens(1, 3, ())
    model.suppressed = [model.end_token]  # so that every row has as many tokens as it may
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.1)
    return model.eval()


@torch.inference_mode()
def rows_said(family: str, device: torch.device, dtype: torch.dtype, records: bool) -> list[Row]:
    """Five windows of different lengths, decoded behind known text and a draft."""
    model = small(family)
    runner, _ = windowed_on_device(family, model, [b" w"] * 60, device, dtype, 8 << 30, 8)
    windows = runner.windows
    assert isinstance(windows, DeviceWindows) and windows.decoder._buffers is not None
    windows.decoder._buffers._records = records
    if records:
        windows.decoder.record()
    lengths = [16_000 * seconds for seconds in (1, 2, 3, 5, 8)]
    audio = 0.3 * torch.randn(5, lengths[-1], generator=torch.Generator().manual_seed(1)).to(device)
    for row, length in zip(audio, lengths, strict=True):
        row[length:] = 0.0
    encoded = model.encode(audio, lengths)
    rows = [Row([5, 6], [7, 8], 12 + number, None, encoded.audio[number]) for number in range(5)]
    for _ in windows.decoder.recorded_passes(rows, [encoded]):
        pass
    runner.close()
    return rows


@pytest.mark.parametrize("family", ["moonshine", "whisper"])
def test_the_recorded_step_equals_the_eager_step(family: str) -> None:
    recorded, eager = (rows_said(family, torch.device("cuda"), torch.float16, records) for records in (True, False))
    for mine, wanted in zip(recorded, eager, strict=True):
        assert len(wanted.tokens) == wanted.max_tokens
        assert (mine.tokens, mine.peaks) == (wanted.tokens, wanted.peaks)
        assert mine.log_probabilities == pytest.approx(wanted.log_probabilities, abs=1e-2)


@pytest.mark.parametrize("model", REAL_MODELS)
def test_real_words_are_those_of_a_cpu(model: str) -> None:
    skip_unless_cached(model, REAL_SPEECH)
    sound = read_wav(next((cache_folder() / REAL_SPEECH).glob("*.wav")))
    clips = [sound[start : start + 16_000 * 20] for start in range(0, len(sound), 16_000 * 4)]
    texts = [live_texts(build(model, device, 8, 8, ample=True), clips, 8) for device in ("cpu", "cuda")]
    differ, words = differing(*texts)
    assert words > 100 and differ <= max(1, 0.003 * words)
