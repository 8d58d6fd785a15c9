"""The runner against `transformers`, and against itself: chunkings, batches, neighbours, gaps, replays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    VoxtralRealtimeConfig,
    VoxtralRealtimeFeatureExtractor,
    VoxtralRealtimeForConditionalGeneration,
)

from engine.runner.frames.runner import Chunk
from tests.engine.runner.frames.voxtral_driver import (
    SMALL,
    STEP,
    WINDOW,
    Driver,
    Feed,
    LogitsTap,
    random_tensors,
    small_runner,
    speech_like,
)

# A slow machine takes a while for all of them.
pytestmark = pytest.mark.timeout(400)

# The windows, of 11 positions and of 24 tokens, wrap 45 and 20 times.
POSITIONS = 500
PREFIX = 32
BOS, PAD = 1, 32


def reference_logits(audio: np.ndarray, outputs: list[int], delay: int) -> Tensor:
    """The full forward of `transformers` over the whole recording, fed with the tokens that were put out."""
    stacks = []
    for stack, window in ((SMALL.audio, SMALL.audio.heads.window), (SMALL.text, WINDOW)):
        stacks.append(
            {
                "hidden_size": stack.width,
                "intermediate_size": stack.ffn,
                "num_hidden_layers": stack.layers,
                "num_attention_heads": stack.heads.query_heads,
                "head_dim": stack.heads.dim,
                "sliding_window": window,
                "rope_parameters": {"rope_type": "default", "rope_theta": stack.theta},
            }
        )
    text = {**stacks[1], "num_key_value_heads": SMALL.text.heads.kv_heads, "vocab_size": SMALL.vocabulary}
    config = VoxtralRealtimeConfig(audio_config={**stacks[0], "num_mel_bins": SMALL.mel_bins}, text_config=text)
    model = VoxtralRealtimeForConditionalGeneration(config).eval()
    tensors = random_tensors(SMALL)
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.language_model.embed_tokens.weight"]})
    padded = np.concatenate([np.zeros(PREFIX * STEP, np.float32), audio])
    extractor = VoxtralRealtimeFeatureExtractor(feature_size=SMALL.mel_bins)
    features = extractor([padded], sampling_rate=16_000, return_tensors="pt").input_features
    tokens = torch.tensor([[BOS] + [PAD] * PREFIX + outputs[:-1]])
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens, input_features=features, num_delay_tokens=delay).logits
    return logits[0, PREFIX:]


@dataclass
class Recording:
    audio: np.ndarray
    tokens: list[int]
    logits: Tensor
    reference: Tensor


@pytest.fixture(scope="module")
def recording() -> Recording:
    """All positions frame by frame, and the reference's view of the same tokens."""
    runner = small_runner()
    tap = LogitsTap(runner)
    feed = Feed(0, speech_like(POSITIONS, seed=1))
    driver = Driver(runner)
    for _ in range(POSITIONS):
        driver.step([(feed, 1)])
    return Recording(
        feed.audio, feed.tokens, torch.cat(tap.rows), reference_logits(feed.audio, feed.tokens, feed.delay)
    )


def test_frame_by_frame_equals_the_reference(recording: Recording) -> None:
    assert len(set(recording.tokens)) > 5, "a test on one token would prove little"
    assert (recording.logits - recording.reference).abs().max() < 1e-4
    greedy = recording.reference.argmax(-1).tolist()
    delay = SMALL.default_delay
    assert recording.tokens == [PAD] * delay + greedy[delay:]


@pytest.mark.parametrize("largest", [POSITIONS, 64, 9])
def test_chunks_equal_the_reference(recording: Recording, largest: int) -> None:
    """One chunk, then random chunkings, with the tokens forced as in a replay; then on by itself."""
    forced = POSITIONS - 20
    runner = small_runner(embeds=POSITIONS + 1)
    passes = runner.passes
    prefix, computed = runner.spec.prefix_positions, torch.full_like(recording.reference, float("nan"))
    compute, logits_of = passes.chunks, passes.model.logits

    def tapped(chunks: Sequence[Chunk]) -> Tensor:
        """A position that is computed twice must be the same both times."""
        hidden, start = compute(chunks), chunks[0].position - prefix
        logits = logits_of(hidden)
        assert (logits - recording.reference[start : start + len(logits)]).abs().max() < 1e-4
        computed[start : start + len(logits)] = logits
        return hidden

    passes.chunks = tapped  # type: ignore[method-assign]
    passes.model.remember = passes.model.decode  # type: ignore[method-assign]
    tap = LogitsTap(runner)
    feed = Feed(0, recording.audio, forced=recording.tokens[:forced])
    driver = Driver(runner)
    choice = random.Random(largest)
    while feed.done < forced:
        count = min(largest if largest == POSITIONS else choice.randint(1, largest), forced - feed.done)
        driver.step([(feed, count)])
    while feed.done < POSITIONS:
        driver.step([(feed, 1)])
    # The others were computed one by one.
    computed[computed.isnan().any(1)] = torch.cat(tap.rows)
    assert (computed - recording.reference).abs().max() < 1e-4
    assert feed.tokens == recording.tokens


def test_known_tokens_leave_the_keys_and_values_that_decoding_leaves(recording: Recording) -> None:
    """`remember` computes less than `decode`: nothing behind the keys and values of the last layer."""
    rings = []
    for computes_all in (False, True):
        runner = small_runner(embeds=POSITIONS + 1)
        if computes_all:
            runner.passes.model.remember = runner.passes.model.decode  # type: ignore[method-assign]
        Driver(runner).step([(Feed(0, recording.audio, forced=recording.tokens), POSITIONS)])
        rings.append([cache.pages.data for cache in runner._caches])
    for found, wanted in zip(*rings, strict=True):
        assert found.abs().sum() > 0
        assert torch.equal(found, wanted)


def test_streams_that_are_rebuilt_together_go_on_as_if_alone() -> None:
    """Known tokens of unequal number, other delays and gaps, in one plan beside a stream that is live already."""
    positions = 70
    feeds = [
        Feed(slot, speech_like(positions, 40 + slot), delay=delay, gaps=gaps)
        for slot, (delay, gaps) in enumerate([(6, set()), (3, {7, 8, 30}), (9, set()), (6, {1}), (2, set())])
    ]
    calm = [alone(feed, positions)[0] for feed in feeds]
    known = [40, 33, 1, 50, 17]
    together = small_runner(streams=6, embeds=6 * 64 + 1)
    driver = Driver(together)
    live = Feed(5, speech_like(positions, 60))
    feeds = [replace(feed, forced=tokens[:count]) for feed, tokens, count in zip(feeds, calm, known, strict=True)]
    for _ in range(3):
        driver.step([(live, 1)])
    while any(feed.done < positions for feed in feeds):
        work = [(live, 1)] if live.done < positions else []
        for feed, count in zip(feeds, known, strict=True):
            if feed.done < positions:
                work.append((feed, min(23, count - feed.done) if feed.done < count else 1))
        driver.step(work)
    assert [feed.tokens for feed in feeds] == calm
    assert live.tokens == alone(live, live.done)[0]


def alone(feed: Feed, positions: int) -> tuple[list[int], Tensor]:
    runner = small_runner()
    tap = LogitsTap(runner)
    feed = replace(feed, slot=0, tokens=[], blocks=[0, 0], done=0, opened=False)
    driver = Driver(runner)
    for _ in range(positions):
        driver.step([(feed, 1)])
    return feed.tokens, torch.cat(tap.rows)


def test_a_batch_of_17_gives_each_stream_what_it_gets_alone() -> None:
    """Different ages, delays and gaps; streams join, leave, and leave their slots to others."""
    choice = random.Random(3)
    positions = 60
    runner = small_runner(17)
    tap = LogitsTap(runner)
    driver = Driver(runner)

    def new_feed(slot: int) -> Feed:
        gaps = {index for index in range(positions) if choice.random() < 0.15}
        return Feed(slot, speech_like(positions, seed=choice.randrange(10_000)), choice.randint(1, 30), gaps)

    running = {slot: new_feed(slot) for slot in range(9)}
    logits: dict[int, list[Tensor]] = {id(feed): [] for feed in running.values()}
    ended: list[Feed] = []
    closed: list[int] = []
    for step in range(150):
        free = [slot for slot in range(17) if slot not in running]
        if free and step < 110 and choice.random() < 0.5:
            running[free[0]] = new_feed(free[0])
            logits[id(running[free[0]])] = []
        # Some streams have no frame in this step.
        due = [feed for feed in running.values() if choice.random() < 0.9]
        tap.rows.clear()
        driver.step([(feed, 1) for feed in due], closed)
        for feed, row in zip(due, tap.rows[0] if tap.rows else [], strict=True):
            logits[id(feed)].append(row)
        closed = []
        for slot, feed in list(running.items()):
            if feed.done == positions or (feed.done > 20 and choice.random() < 0.01):
                ended.append(running.pop(slot))
                closed.append(slot)
    assert len(ended) >= 17
    for feed in choice.sample(ended, 6):
        tokens, rows = alone(feed, feed.done)
        assert (torch.stack(logits[id(feed)]) - rows).abs().max() < 1e-5
        assert feed.tokens == tokens


def test_backlog_of_several_positions_equals_single_steps(recording: Recording) -> None:
    """Sampled positions cannot run as a chunk; they take turns inside one plan."""
    feed = Feed(0, recording.audio)
    driver = Driver(small_runner())
    choice = random.Random(5)
    while feed.done < 60:
        driver.step([(feed, min(choice.randint(1, 8), 60 - feed.done))])
    assert feed.tokens == recording.tokens[:60]


def test_items_of_several_positions_with_masks() -> None:
    gaps = {3, 4, 9, 17}
    audio = speech_like(24, seed=8)
    one, many = Feed(0, audio, gaps=gaps), Feed(0, audio, gaps=gaps)
    driver = Driver(small_runner())
    for _ in range(24):
        driver.step([(one, 1)])
    driver = Driver(small_runner())
    for _ in range(4):
        driver.step([(many, 6)])
    assert many.tokens == one.tokens


def test_delays_differ_in_what_the_model_hears() -> None:
    """The delay conditions every layer: two delays over the same audio give different logits."""
    audio = speech_like(40, seed=9)
    rows = [alone(Feed(0, audio, delay), 40)[1] for delay in (2, 12)]
    assert (rows[0] - rows[1]).abs().max() > 1e-2
