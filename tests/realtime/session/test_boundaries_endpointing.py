"""When turns begin and end: by the pause alone, or by the pause and the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Speech
from engine.server.speech import TurnEnds
from realtime.session.boundaries import Paused, Started, Stopped, TurnWatch, turn_rule
from realtime.session.settings import TurnDetection

RATE = 16_000


def frames(watch: TurnWatch, probability: float, count: int, text: str = "") -> list[object]:
    return [sign for _ in range(count) for sign in watch.watch(probability, 512, text)]


def test_plain_detection_ends_after_its_silence() -> None:
    watch = TurnWatch(TurnDetection(silence_duration_ms=320), RATE, 0, first_frame=0)
    assert frames(watch, 0.9, 10) == [Started(0)]
    assert frames(watch, 0.0, 12) == [Stopped(5120 + 5120, 5120)]


def test_semantic_detection_asks_for_text_once_per_pause_and_judges_it() -> None:
    watch = TurnWatch(TurnDetection(semantic=True, eagerness="low"), RATE, 0, first_frame=0)
    frames(watch, 0.9, 10)
    assert frames(watch, 0.0, 20, "and then") == [Paused()]
    frames(watch, 0.9, 3)
    assert frames(watch, 0.0, 20, "It works.") == [Paused()]
    assert len(frames(watch, 0.0, 15, "It works.")) == 1


@pytest.mark.parametrize(("eagerness", "seconds"), [("high", 2), ("auto", 4), ("medium", 4), ("low", 8)])
def test_semantic_detection_waits_no_longer_than_its_cap(eagerness: str, seconds: int) -> None:
    watch = TurnWatch(TurnDetection(semantic=True, eagerness=eagerness), RATE, 0, first_frame=0)
    frames(watch, 0.9, 10)
    signs = frames(watch, 0.0, 300, "unfinished")
    assert signs == [Paused(), Stopped(5120 + seconds * RATE, 5120)]


def test_turns_begin_no_earlier_than_told() -> None:
    watch = TurnWatch(TurnDetection(), RATE, 5000, first_frame=1024)
    assert frames(watch, 0.9, 20) == [Started(5000)]
    watch.restart(30_000)
    assert frames(watch, 0.9, 100)[0] == Started(30_000)


FRAMES = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.95]), st.integers(1, 30)), max_size=30)


@given(FRAMES, st.sampled_from([0.3, 0.5, 0.8]), st.sampled_from([200, 500, 1500]), st.integers(1, 40))
def test_the_engine_ends_turns_where_the_session_does(
    runs: list[tuple[float, int]], threshold: float, silence_ms: int, batch: int
) -> None:
    detection = TurnDetection(threshold=threshold, silence_duration_ms=silence_ms)
    rule = turn_rule(detection, 16_000)
    assert rule is not None and turn_rule(None, 16_000) is None
    probabilities = [probability for probability, count in runs for _ in range(count)]
    watch, ends, stopped, ended = TurnWatch(detection, 16_000, 0, first_frame=0), TurnEnds(rule), [], []
    for probability in probabilities:
        for sign in watch.watch(probability, 512, ""):
            if isinstance(sign, Stopped):
                stopped.append(sign.sample)
                watch.restart(sign.sample)
    for start in range(0, len(probabilities), batch):
        speech = Speech("s", start * 512, 512, probabilities[start : start + batch])
        parts = list(ends.split(speech))
        assert [probability for part, _ in parts for probability in part] == speech.probabilities
        # In the midst of it, the engine is replaced.
        ends = TurnEnds.resumed(ends.save())
        ended += [ends.last] * any(is_end for _, is_end in parts)
    assert set(ended) <= set(stopped) and ended[-1:] == stopped[-1:]
    if batch == 1:
        assert ended == stopped
