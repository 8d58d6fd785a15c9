"""Real weights give the same words, whether windows are decoded one by one or as batches of a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sounds import read_wav
from engine.options import cache_folder
from tests.cached_models import skip_unless_cached
from tests.gpu.windowed_words import build, differing, live_texts

REAL_SPEECH = "sample-two-cities"


@pytest.mark.parametrize("model", ["moonshine-tiny", "whisper-tiny.en"])
def test_batches_say_what_windows_say_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is 8-bit, and the device of the batches is the CPU: all that differs is the order of sums."""
    skip_unless_cached(model, REAL_SPEECH)
    monkeypatch.setattr("engine.runner.windowed.windows.DeviceWindows.warm_up", lambda windows: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sound = read_wav(next((cache_folder() / REAL_SPEECH).glob("*.wav")))
    clips = [sound[start : start + 16_000 * 5] for start in (0, 16_000 * 12)]
    texts = [live_texts(build(model, device, 2, 1, ample=False), clips, 2) for device in ("cpu", "batches")]
    torch.set_num_threads(threads)
    differ, words = differing(*texts)
    assert words > 15 and differ <= 0.003 * words


def test_differing_words_are_counted_over_all_clips() -> None:
    assert differing(["red green blue", "black"], ["Red, green blue.", "white"]) == (1, 4)
