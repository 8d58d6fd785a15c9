"""Items that come as log-mel features instead of samples: the same words, and clear refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from engine.boundary.items import hash_payload, make_cutter, prepare
from engine.client.client import EngineClient
from engine.client.engine_handles import EngineThread
from engine.client.link import ItemRefused
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Closed, Item
from engine.models.mel import item_features
from engine.runner.frames.runner import VoxtralRunner
from engine.server.loop import EngineLoop
from engine.spec import Vocabulary
from tests.engine import fakes
from tests.engine.runner.frames.voxtral_driver import SMALL, Driver, Feed, small_runner, speech_like

POSITIONS = 30


def features_for_samples(runner: VoxtralRunner, change: Callable[[NDArray[np.float32]], object] = lambda x: x) -> None:
    """Let all that the runner is given to encode be features of the samples."""
    execute = runner.execute

    def changed(plan: StepPlan) -> list[DecodeResult]:
        for task in plan.encode:
            task.payload = change(item_features(task.payload, SMALL.mel_bins))
        return execute(plan)

    runner.execute = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("count", [1, 3])
def test_features_of_the_samples_give_the_tokens_of_the_samples(count: int) -> None:
    audio = speech_like(POSITIONS, 5)
    tokens = []
    for with_features in (False, True):
        runner = small_runner()
        if with_features:
            features_for_samples(runner)
        driver, feed = Driver(runner), Feed(0, audio, gaps={4, 5, 11})
        for _ in range(POSITIONS // count):
            driver.step([(feed, count)])
        tokens.append(feed.tokens)
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 3


@pytest.mark.parametrize(
    "change",
    [
        lambda features: features[:, :-1],
        lambda features: features.T.copy(),
        lambda features: features.astype(np.float64),
    ],
)
def test_malformed_features_end_their_stream_alone(change: Callable[[NDArray[np.float32]], object]) -> None:
    runner = small_runner(streams=2)
    driver = Driver(runner)
    good, bad = Feed(0, speech_like(3, 1)), Feed(1, speech_like(3, 2))
    driver.step([(good, 1)])
    execute = runner.execute

    def changed(plan: StepPlan) -> list[DecodeResult]:
        for task in plan.encode:
            if task.stream == bad.name:
                task.payload = change(item_features(task.payload, SMALL.mel_bins))
        return execute(plan)

    runner.execute = changed  # type: ignore[method-assign]
    first, second = driver.step([(good, 1), (bad, 1)])
    assert first.error is None and len(first.tokens) == 1
    assert second.error is not None and "must be float32 of shape (16, 11)" in second.error


def build() -> EngineLoop:
    runner = small_runner(streams=2)
    runner.vocabulary = Vocabulary([b" w%d" % token for token in range(SMALL.vocabulary)])
    memory = runner.memory
    limits = Limits(2, memory.cache_embeds, memory.group_pages, step_positions=2, step_embeds=2)
    return EngineLoop(Scheduler(runner.spec, limits, runner.vocabulary), runner, fakes.FakeDetector(frame=512))


async def said(client: EngineClient, name: str, items: list[Item]) -> fakes.Transcript:
    stream, transcript = await client.open(name), fakes.Transcript()
    reader = asyncio.create_task(transcript.collect(stream))
    await stream.feed_items(items)
    await stream.finish()
    await reader
    return transcript


async def test_features_prepared_elsewhere_cross_to_the_engine_and_are_transcribed() -> None:
    async with fakes.running(EngineThread(build, warm=False)) as client:
        cutter = make_cutter(client.spec)
        items = prepare(cutter, cutter.cut(speech_like(POSITIONS, 6)), client.spec)
        items += prepare(cutter, cutter.flush(client.spec.flush_positions_for(6)), client.spec)
        prepared = []
        for item in items:
            features = None if item.payload is None else item_features(item.payload, SMALL.mel_bins)
            key = b"" if features is None else hash_payload(features)
            prepared.append(structs.replace(item, payload=features, key=key))
        expected = await said(client, "samples", items)
        heard = await said(client, "features", prepared)
        assert heard.text == expected.text != "" and heard.words == expected.words
        assert isinstance(heard.last, Closed)
        assert await client.inject(prepared) == sum(item.payload is not None for item in prepared)
        # What was injected needs no data any more.
        sent = client.metrics().input_cache.bytes_sent
        bare = [structs.replace(item, payload=None) for item in prepared]
        assert (await said(client, "hashes", bare)).text == expected.text
        assert client.metrics().input_cache.bytes_sent == sent
        with pytest.raises(ItemRefused, match="NaN"):
            broken = np.full_like(prepared[0].payload, np.nan)
            await client.inject([structs.replace(prepared[0], payload=broken, key=hash_payload(broken))])
        with pytest.raises(ItemRefused, match=r"takes \(16, 11\)"):
            narrow = prepared[0].payload[:8].copy()
            await client.inject([structs.replace(prepared[0], payload=narrow, key=hash_payload(narrow))])
        with pytest.raises(ItemRefused, match="not the hash"):
            await client.inject([structs.replace(prepared[0], key=items[0].key)])
