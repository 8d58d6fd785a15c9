"""The traffic and the arithmetic of the GPU benchmark, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_streams import Bench, Point, Step, _summary, bisect
from benchmarks.random_runner import build_runner
from benchmarks.speech_sound import speech
from benchmarks.traffic import POSITION_NS, Traffic
from engine.models.silero import load_silero
from engine.runner.speech import SpeechDetector

STEP = Step(whole=10.0, submit=0.1, plan=0.3, commit=0.2, device=8.0, streams=4, speech=0.1)
NOISE = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)


def point(streams: int, lag_p99: float = 20.0, late: int = 0) -> Point:
    measured = _summary(streams, 60.0, [5_000_000] * 100, [STEP] * 50, late, 0.02, 0.0, 0.6)
    return replace(measured, lag_p99=lag_p99)


def test_every_stream_sends_every_frame_once_and_in_order() -> None:
    traffic = Traffic(7, first_position=100, seed=1, sound=NOISE)
    seen: dict[str, list[int]] = {name: [] for name in traffic.names}
    for tick in range(0, 20 * POSITION_NS, POSITION_NS // 3):
        for feed in traffic.due(tick):
            seen[feed.stream].append(feed.items[0].offset)
            assert traffic.arrival(traffic.names.index(feed.stream), feed.items[0].offset) <= tick
        assert traffic.next_arrival() > tick
    for offsets in seen.values():
        assert offsets == list(range(100, 100 + len(offsets)))
        assert len(offsets) > 15


def test_streams_join_one_after_the_other_and_carry_distinct_audio() -> None:
    traffic = Traffic(200, first_position=0, seed=2, sound=NOISE)
    first = {feed.stream for feed in traffic.due(2 * POSITION_NS)}
    assert 0 < len(first) < 50
    feeds = traffic.due(traffic.joined_ns + POSITION_NS)
    assert {feed.stream for feed in feeds} == set(traffic.names)
    assert len({feed.items[0].key for feed in feeds}) == len(feeds)
    assert len({feed.items[0].payload.tobytes() for feed in feeds}) == len(feeds)


def test_a_point_holds_by_its_lag_and_its_backlog() -> None:
    assert point(1, lag_p99=80.0).holds
    assert not point(1, lag_p99=80.1).holds
    assert not point(1, late=1).holds


def test_the_summary_splits_host_and_device() -> None:
    result = point(3)
    assert result.lag_p50 == result.lag_max == 5.0
    assert abs(result.host_share - 0.2) < 1e-9
    assert abs(result.plan_commit_p99 - 0.5) < 1e-9


def test_the_search_closes_in_on_the_largest_that_holds() -> None:
    bench: Any = SimpleNamespace(measure=lambda streams, seconds: point(streams, 20.0 if streams <= 333 else 99.0))
    holding = [result.streams for result in bisect(bench, 100, 1000, 1.0) if result.holds]
    assert 320 <= max(holding) <= 333


def test_the_detector_hears_speech_in_what_the_streams_send() -> None:
    detector = SpeechDetector(load_silero(), 1)
    detector.open("a")
    sound = speech()
    (heard,) = detector.detect([("a", sound[: 16 * 16_000])])
    share = np.mean(np.array(heard.probabilities) >= 0.5)
    assert 0.3 < share < 0.95, "somebody speaks, and pauses"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_tiny_model_on_the_cpu_goes_through_all_of_it(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_streams.SETTLE_S", 0)
    bench = Bench(build_runner("bf16", 1024, 2, small=True), overlaps=overlaps)
    measured = bench.measure(2, seconds=0.5)
    assert measured.steps > 0 and measured.batch_p50 >= 1 and measured.device_share > 0
