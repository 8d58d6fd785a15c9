"""Answers of the turn detector are computed outside of the caller's thread; a missing or damaged file is told once."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.smart_turn import SmartTurn
from engine.options import EngineConfig
from engine.runner import load
from engine.runner.load import load_turns
from engine.runner.turns import SmartTurnDetector
from engine.weights.checkpoint import BadCheckpoint
from engine.weights.registry import TURN_DETECTOR, TURN_DETECTOR_FILE
from engine.weights.store import WeightsError, cache_folder
from engine.weights.windowed_models import load_turn_detector
from tests.engine import fakes

WEIGHTS = cache_folder() / TURN_DETECTOR / TURN_DETECTOR_FILE
with_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason=f"run `tickertape pull {TURN_DETECTOR}` first")
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_file_that_cannot_be_read_is_told_once_and_no_question_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / TURN_DETECTOR_FILE
    file.write_bytes(b"nothing")
    detector = SmartTurnDetector(file, CPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(BadCheckpoint, match="tickertape pull turn-detector --fresh"):
                detector.submit(np.zeros(1000, np.float32)).result(60)
    detector.close()
    assert len(caplog.records) == 1 and "text and silence" in caplog.text


def test_an_engine_whose_streams_do_not_ask_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    detector = SmartTurnDetector(tmp_path / "missing", CPU)
    assert threading.active_count() == before
    detector.close()


@with_weights
def test_answers_are_those_of_the_model_and_words_go_first() -> None:
    detector = SmartTurnDetector(WEIGHTS, CPU)
    sounds = [0.1 * np.random.default_rng(seed).standard_normal(30_000 * seed).astype(np.float32) for seed in (1, 5)]
    try:
        detector.prepare()
        found = [future.result(120) for future in [detector.submit(sound) for sound in sounds]]
        expected: SmartTurn = load_turn_detector(WEIGHTS)
        expected.quantise()
        assert found == expected.judge(sounds)
        niceness = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in detector._running]
        assert min(niceness) > os.getpriority(os.PRIO_PROCESS, os.getpid())
    finally:
        detector.close()


def damaged(name: str) -> Path:
    raise WeightsError(f"the cached copy of {name} is damaged")


@pytest.mark.parametrize(
    ("cached", "told"), [(lambda name: None, "tickertape pull turn-detector"), (damaged, "damaged")]
)
def test_without_the_file_an_engine_starts_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cached: object, told: str
) -> None:
    monkeypatch.setattr(load, "cached", cached)
    with caplog.at_level(logging.WARNING):
        assert load_turns(fakes.FakeFrames(), EngineConfig("m")) is None
    assert len(caplog.records) == 1 and told in caplog.text
    caplog.clear()
    assert load_turns(fakes.FakeFrames(), EngineConfig("m", turn_detector=False)) is None
    assert not caplog.records
