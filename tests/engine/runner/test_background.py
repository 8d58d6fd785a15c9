"""Background models are computed outside of the caller's thread, one by one as together, at low priority; a missing or
damaged file is told."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models.campplus import SpeakerWeightsError, load_campplus
from engine.models.smart_turn import SmartTurn
from engine.options import PIECE_SAMPLES, EngineConfig, cache_folder
from engine.runner import load
from engine.runner.background import BackgroundModel, SmartTurnDetector, SpeakerEmbedder
from engine.runner.load import load_turn_detector
from engine.server.speech_pieces import CutSettings
from engine.weights.checkpoint import BadCheckpoint, load_smart_turn
from engine.weights.registry import REGISTRY, TURN_DETECTOR, TURN_DETECTOR_FILE
from engine.weights.store import WeightsError
from tests.engine import fakes

SPEAKER_WEIGHTS = cache_folder() / "speakers" / REGISTRY["speakers"].single_file
with_speakers = pytest.mark.skipif(not SPEAKER_WEIGHTS.exists(), reason="run `tickertape pull speakers` first")
TURN_WEIGHTS = cache_folder() / TURN_DETECTOR / TURN_DETECTOR_FILE
with_turns = pytest.mark.skipif(not TURN_WEIGHTS.exists(), reason=f"run `tickertape pull {TURN_DETECTOR}` first")
CPU = torch.device("cpu")


class Doubles(BackgroundModel[int, int]):
    """Doubles numbers; cannot load `failures` times, and fails for a negative number."""

    def __init__(self, failures: int = 0, threads: int = 1) -> None:
        super().__init__("doubles", CPU, threads, 1)
        self.failures = failures
        self.loaded: list[int] = []
        self.may_go_on = threading.Event()

    def _load(self, number: int) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("no weights")
        self.loaded.append(number)

    def _compute(self, batch: list[int]) -> list[int]:
        self.may_go_on.wait(60)
        if min(batch) < 0:
            raise ValueError("negative")
        return [2 * number for number in batch]


def test_a_failed_task_and_a_failed_load_are_told_to_their_task_alone() -> None:
    # The first attempt is that of the thread, before it has a task.
    model = Doubles(failures=2)
    model.may_go_on.set()
    with pytest.raises(OSError, match="no weights"):
        model.submit(1).result(60)
    with pytest.raises(ValueError, match="negative"):
        model.submit(-1).result(60)
    assert model.submit(3).result(60) == 6
    model.close()
    assert model.loaded == [0] and not model.running


def test_each_thread_loads_before_the_first_task() -> None:
    model = Doubles(threads=2)
    model.may_go_on.set()
    assert not model.running
    model.prepare()
    model.prepare()
    assert len(model.running) == 2
    model.close()
    assert sorted(model.loaded) == [0, 1]


def test_tasks_that_wait_at_the_end_are_cancelled() -> None:
    model = Doubles()
    running, waiting = model.submit(1), model.submit(2)
    while not running.running():
        threading.Event().wait(0.01)
    closing = threading.Thread(target=model.close)
    closing.start()
    while not waiting.cancelled():
        threading.Event().wait(0.01)
    model.may_go_on.set()
    closing.join(60)
    assert running.result(60) == 2 and not model.running


# Speaker embeddings


def pieces(count: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(1)
    return [0.1 * random.standard_normal(PIECE_SAMPLES, dtype=np.float32) for _ in range(count)]


def test_pieces_have_the_length_that_the_cutter_gives_them() -> None:
    assert PIECE_SAMPLES == CutSettings().piece_frames * 512


def test_weights_that_cannot_be_read_are_told_with_every_piece(tmp_path: Path) -> None:
    file = tmp_path / "campplus.pt"
    file.write_bytes(b"nothing")
    embedder = SpeakerEmbedder(file, PIECE_SAMPLES, CPU)
    for audio in pieces(2):
        with pytest.raises(SpeakerWeightsError, match="tickertape pull speakers --fresh"):
            embedder.submit(audio).result(60)
    embedder.close()


def test_an_engine_without_labelled_streams_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    embedder = SpeakerEmbedder(tmp_path / "missing", PIECE_SAMPLES, CPU, threads=4)
    assert threading.active_count() == before
    embedder.close()


def check_embeddings(embedder: SpeakerEmbedder, audio: list[NDArray[np.float32]], atol: float) -> None:
    """They are those of the model itself, on the CPU in float32."""
    found = [future.result(120) for future in [embedder.submit(one) for one in audio]]
    with torch.inference_mode():
        expected = load_campplus(SPEAKER_WEIGHTS)(torch.from_numpy(np.stack(audio))).numpy()
    np.testing.assert_allclose(found, expected, atol=atol)


@with_speakers
def test_embeddings_are_those_of_the_model_on_any_thread_and_words_go_first() -> None:
    embedder = SpeakerEmbedder(SPEAKER_WEIGHTS, PIECE_SAMPLES, CPU, threads=2)
    try:
        check_embeddings(embedder, pieces(4), atol=1e-4)
        niceness = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in embedder.running]
        assert max(niceness) > os.getpriority(os.PRIO_PROCESS, os.getpid())
    finally:
        embedder.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@with_speakers
def test_a_batch_on_a_gpu_has_the_same_embeddings() -> None:
    embedder = SpeakerEmbedder(SPEAKER_WEIGHTS, PIECE_SAMPLES, torch.device("cuda"))
    try:
        check_embeddings(embedder, pieces(40), atol=5e-3)
    finally:
        embedder.close()


# The turn detector


def test_a_turn_detector_that_cannot_be_read_is_told_once_and_no_question_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / TURN_DETECTOR_FILE
    file.write_bytes(b"nothing")
    detector = SmartTurnDetector(file, CPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(BadCheckpoint, match="tickertape pull turn-detector --fresh"):
                detector.submit(lambda: np.zeros(1000, np.float32)).result(60)
    detector.close()
    assert len(caplog.records) == 1 and "text and silence" in caplog.text


def test_an_engine_whose_streams_do_not_ask_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    detector = SmartTurnDetector(tmp_path / "missing", CPU)
    assert threading.active_count() == before
    detector.close()


@with_turns
def test_answers_are_those_of_the_model_and_words_go_first() -> None:
    detector = SmartTurnDetector(TURN_WEIGHTS, CPU)
    sounds = [0.1 * np.random.default_rng(seed).standard_normal(30_000 * seed).astype(np.float32) for seed in (1, 5)]
    try:
        detector.prepare()
        found = [future.result(120) for future in [detector.submit(sound.copy) for sound in sounds]]
        expected: SmartTurn = load_smart_turn(TURN_WEIGHTS)
        expected.quantise()
        assert found == expected.judge(sounds)
        niceness = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in detector.running]
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
        assert load_turn_detector(fakes.FakeFrames(), EngineConfig("m")) is None
    assert len(caplog.records) == 1 and told in caplog.text
    caplog.clear()
    assert load_turn_detector(fakes.FakeFrames(), EngineConfig("m", turn_detector=False)) is None
    assert not caplog.records
