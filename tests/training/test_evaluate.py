from __future__ import annotations

import numpy as np

from audio.containers import read_file
from engine.models.moonshine_streaming import StreamingEncoder
from engine.weights.store import pull
from tests.cached_models import skip_unless_cached
from tests.training.tiny import SPEC, tiny_model
from training.evaluate import Clip, cut_where_quiet, hear_blocks, hear_masked, score, utterance_cut


def test_masked_and_block_by_block_evaluation_agree() -> None:
    model = tiny_model()
    rng = np.random.default_rng(0)
    clips = [
        Clip("read", "seven eight", [(rng.standard_normal(length) * 0.1).astype(np.float32)])
        for length in (9_000, 16_000, 12_345)
    ]
    pieces = [f" w{number}".encode() for number in range(40)]
    blocks = hear_blocks(StreamingEncoder(model.encoder, SPEC, 5))
    results = [score(model, pieces, clips, hear, str.split, batch=2) for hear in (blocks, hear_masked(model, SPEC, 5))]
    assert results[0] == results[1]
    assert results[0]["all"].words == 6


def test_clips_are_cut_where_live_streams_are() -> None:
    skip_unless_cached("sample-two-cities")
    spoken = np.concatenate(list(read_file(pull("sample-two-cities"))))[: 4 * 16_000]
    silence = np.zeros(3 * 16_000, np.float32)
    cut = utterance_cut()
    assert cut(silence) == []
    pieces = cut(np.concatenate([spoken, silence, spoken]))
    assert len(pieces) == 2 * len(cut(spoken))
    assert all(len(piece) <= len(spoken) + 16_000 for piece in pieces)
    # A whole clip has no ends of utterances.
    assert [len(piece) for piece in cut_where_quiet(np.concatenate([spoken, silence, spoken]))] == [11 * 16_000]
