"""Embeddings are computed outside of the caller's thread, one by one as together, and a damaged file is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models.campplus import SpeakerWeightsError, load_campplus
from engine.options import PIECE_SAMPLES
from engine.runner.speakers import SpeakerEmbedder
from engine.server.speakers import CutSettings
from engine.weights.registry import REGISTRY
from engine.weights.store import cache_folder

WEIGHTS = cache_folder() / "speakers" / REGISTRY["speakers"].single_file
with_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason="run `tickertape pull speakers` first")
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


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


@with_weights
def test_embeddings_are_those_of_the_model_on_any_thread_and_words_go_first() -> None:
    embedder = SpeakerEmbedder(WEIGHTS, PIECE_SAMPLES, CPU, threads=2)
    try:
        audio = pieces(4)
        found = [future.result(120) for future in [embedder.submit(one) for one in audio]]
        with torch.inference_mode():
            expected = load_campplus(WEIGHTS)(torch.from_numpy(np.stack(audio))).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4)
        niceness = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in embedder._running]
        assert max(niceness) > os.getpriority(os.PRIO_PROCESS, os.getpid())
    finally:
        embedder.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@with_weights
def test_a_batch_on_a_gpu_has_the_same_embeddings() -> None:
    embedder = SpeakerEmbedder(WEIGHTS, PIECE_SAMPLES, torch.device("cuda"))
    try:
        audio = pieces(40)
        found = [future.result(120) for future in [embedder.submit(one) for one in audio]]
        with torch.inference_mode():
            expected = load_campplus(WEIGHTS)(torch.from_numpy(np.stack(audio))).numpy()
        np.testing.assert_allclose(found, expected, atol=5e-3)
    finally:
        embedder.close()
