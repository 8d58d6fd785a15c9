"""The words of the engine without a model are a function of the audio, wherever its positions begin."""

from __future__ import annotations

import numpy as np

from benchmarks.engines import null_loop
from engine.boundary.items import make_cutter, prepare
from engine.messages import Feed, Flush, Open, Text
from engine.server.loop import EngineLoop


def tokens_of(loop: EngineLoop, stream: str, samples: np.ndarray) -> list[int]:
    spec = loop.scheduler.spec
    cutter = make_cutter(spec)
    items = [*prepare(cutter, cutter.cut(samples), spec), *prepare(cutter, cutter.flush(0), spec)]
    loop.submit([Open(stream), Feed(stream, items), Flush(stream, 1)], 0)
    tokens: list[int] = []
    while loop.has_work():
        step = loop.step()
        texts = [output for output in (step.outputs if step else []) if isinstance(output, Text)]
        tokens += [token for text in texts for token in text.tokens]
    return tokens


def test_a_word_follows_from_its_audio_alone() -> None:
    loop = null_loop(streams=4, by_audio=True)
    spec = loop.scheduler.spec
    sound = np.random.default_rng(7).uniform(-1, 1, 100 * spec.samples_per_position).astype(np.float32)
    whole = tokens_of(loop, "whole", sound)
    # As after a move: an engine that is sent the second half counts it from nothing. The first piece has no context.
    half = tokens_of(loop, "half", sound[50 * spec.samples_per_position :])
    assert len(whole) > 90 and half[1:] == whole[51:]
    assert 10 < sum(token > 0 for token in whole) < 40
