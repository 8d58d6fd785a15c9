"""The traffic and the arithmetic of the capacity of an engine, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.engine_capacity import POSITION_NS, Point, Step, Trace, Traffic, point_of
from benchmarks.sounds import speech, utterances
from engine.models.silero import load_silero
from engine.runner.speech import SpeechDetector

STEP = Step(whole=10.0, submit=0.1, plan=0.3, commit=0.2, device=8.0, tasks=4, speech=0.1)
NOISE = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)


def point(streams: int = 1, lag_ms: float = 5.0, late: int = 0) -> Point:
    trace = Trace()
    trace.lags, trace.steps, trace.late_frames = [lag_ms] * 100, [STEP] * 50, late
    return point_of(trace, streams, 60.0)


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


def test_a_point_holds_by_its_lag_and_the_frames_that_wait() -> None:
    assert point(lag_ms=80.0)["holds"]
    assert not point(lag_ms=80.1)["holds"]
    assert not point(late=1)["holds"]


def test_a_point_splits_host_and_device() -> None:
    result = point(3)
    assert result["lag_p50"] == result["lag_max"] == 5.0
    assert result["host_share"] == pytest.approx(0.2)
    assert (result["plan_p50"], result["commit_p50"]) == (0.3, 0.2)
    assert result["step_p50"] == 10.0


def test_utterances_are_parted_by_pauses() -> None:
    probabilities = [0.1, 0.9, 0.9, 0.1, 0.6, 0.1, 0.1, 0.1, 0.8, 0.2]
    assert utterances(probabilities, 0.25, pause_s=0.5) == [(0.25, 1.25), (2.0, 2.25)]
    assert utterances([0.1, 0.2], 0.25) == []


def test_the_detector_hears_speech_in_what_the_streams_send() -> None:
    detector = SpeechDetector(load_silero(), 1)
    detector.open("a")
    sound = speech()
    (heard,) = detector.detect([("a", sound[: 16 * 16_000])])
    share = np.mean(np.array(heard.probabilities) >= 0.5)
    assert 0.3 < share < 0.95, "speech and pauses"
