"""Turn detection: every transition, and events that do not depend on how time is cut into frames."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from audio.speech_edges import (
    HYSTERESIS,
    Edge,
    EdgeDetector,
    EdgeSettings,
    EdgeState,
    Fall,
    Rise,
)

FRAME = 512
SETTINGS = EdgeSettings(threshold=0.5, min_speech_samples=2 * FRAME, silence_samples=3 * FRAME, prefix_samples=FRAME)
LOUD, BAND, QUIET = 0.9, 0.4, 0.1


def run(detector: EdgeDetector, *probabilities: float) -> list[Edge]:
    events = [detector.judge(probability, FRAME) for probability in probabilities]
    return [event for event in events if event is not None]


def speaking() -> EdgeDetector:
    """In a turn in which speech began with frame 5."""
    detector = EdgeDetector(SETTINGS)
    assert run(detector, *[QUIET] * 5, LOUD, LOUD) == [Rise(4 * FRAME)]
    return detector


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.1, float("nan")])
def test_an_impossible_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        replace(SETTINGS, threshold=threshold)


@pytest.mark.parametrize("field", ["min_speech_samples", "silence_samples", "prefix_samples"])
def test_negative_durations_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        replace(SETTINGS, **{field: -1})


@pytest.mark.parametrize("probability", [-0.01, 1.01, float("nan"), float("inf")])
def test_an_impossible_probability_is_refused_and_changes_nothing(probability: float) -> None:
    detector = speaking()
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        detector.judge(probability, FRAME)
    assert (detector.state, detector.sample) == (EdgeState.SPEAKING, 7 * FRAME)


@pytest.mark.parametrize("frame_samples", [0, -1])
def test_an_empty_frame_is_refused(frame_samples: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        EdgeDetector(SETTINGS).judge(LOUD, frame_samples)


def test_what_was_judged_cannot_be_cut_off_again() -> None:
    detector = speaking()
    with pytest.raises(ValueError, match="past"):
        detector.reset(7 * FRAME - 1)
    assert detector.state is EdgeState.SPEAKING


def test_stopping_is_possible_with_a_low_threshold() -> None:
    assert replace(SETTINGS, threshold=0.5).stop_threshold == 0.5 - HYSTERESIS
    assert replace(SETTINGS, threshold=0.1).stop_threshold == 0.01
    assert replace(SETTINGS, threshold=0.005).stop_threshold == 0.005


def test_a_turn_starts_with_its_prefix_and_stops_after_enough_silence() -> None:
    detector = speaking()
    assert run(detector, LOUD, QUIET, QUIET) == []
    assert detector.state is EdgeState.STOPPING
    assert run(detector, QUIET) == [Fall(11 * FRAME, speech_end_sample=8 * FRAME)]
    assert detector.state is EdgeState.QUIET


def test_the_prefix_does_not_reach_before_the_first_sample() -> None:
    detector = EdgeDetector(replace(SETTINGS, prefix_samples=100 * FRAME))
    assert run(detector, QUIET, LOUD, LOUD) == [Rise(0)]


def test_the_prefix_does_not_reach_into_the_turn_before() -> None:
    detector = EdgeDetector(replace(SETTINGS, prefix_samples=100 * FRAME, silence_samples=FRAME))
    events = run(detector, LOUD, LOUD, QUIET, QUIET, LOUD, LOUD)
    assert events == [Rise(0), Fall(3 * FRAME, 2 * FRAME), Rise(3 * FRAME)]


def test_a_click_is_not_speech() -> None:
    detector = EdgeDetector(SETTINGS)
    assert run(detector, LOUD, QUIET, LOUD, QUIET) == []
    assert detector.state is EdgeState.QUIET


def test_the_band_between_the_thresholds_starts_nothing_but_lets_speech_go_on() -> None:
    detector = EdgeDetector(SETTINGS)
    assert run(detector, *[BAND] * 10) == []
    assert run(detector, LOUD, BAND) == [Rise(9 * FRAME)]
    assert run(detector, *[BAND] * 10) == []
    assert detector.state is EdgeState.SPEAKING


def test_the_band_does_not_interrupt_a_silence_but_speech_does() -> None:
    detector = speaking()
    assert run(detector, QUIET, BAND, LOUD) == []
    assert detector.state is EdgeState.SPEAKING
    assert run(detector, QUIET, BAND, BAND) == [Fall(13 * FRAME, 10 * FRAME)]


def test_without_durations_every_change_is_an_event_at_once() -> None:
    detector = EdgeDetector(EdgeSettings(0.5, 0, 0, 0))
    assert run(detector, LOUD, QUIET, LOUD) == [Rise(0), Fall(FRAME, FRAME), Rise(2 * FRAME)]


def test_a_long_silence_ends_the_turn_where_it_became_long_enough() -> None:
    detector = speaking()
    assert detector.judge(0.0, 16_000 * 600) == Fall(10 * FRAME, 7 * FRAME)


def test_settings_change_in_mid_turn_without_losing_it() -> None:
    detector = speaking()
    assert run(detector, QUIET, QUIET) == []
    detector.settings = replace(SETTINGS, silence_samples=10 * FRAME)
    assert run(detector, *[QUIET] * 7) == []
    detector.settings = replace(SETTINGS, silence_samples=FRAME)
    # Not in the past: that audio has been heard as part of the turn.
    assert run(detector, QUIET) == [Fall(16 * FRAME, 7 * FRAME)]


def test_a_new_threshold_judges_the_next_frame() -> None:
    detector = speaking()
    detector.settings = replace(SETTINGS, threshold=0.95, silence_samples=0)
    assert run(detector, LOUD) == []
    assert run(detector, 0.7) == [Fall(8 * FRAME, 8 * FRAME)]


@pytest.mark.parametrize("probabilities", [[], [QUIET]])
def test_a_reset_ends_the_turn_ahead_of_the_frames(probabilities: list[float]) -> None:
    detector = speaking()
    run(detector, *probabilities)
    detector.reset(9 * FRAME)
    # Frames of the audio before still come in; they belong to the turn that was ended.
    run(detector, *[LOUD] * (2 - len(probabilities)))
    assert detector.state is EdgeState.QUIET
    assert run(detector, LOUD, LOUD) == [Rise(9 * FRAME)]


def test_a_frame_across_a_reset_counts_from_the_reset() -> None:
    detector = speaking()
    middle = 7 * FRAME + FRAME // 2
    detector.reset(middle)
    assert run(detector, LOUD, LOUD) == []
    assert run(detector, LOUD) == [Rise(middle)]


@pytest.mark.parametrize("probabilities", [[QUIET], [LOUD]])
def test_a_reset_without_a_turn_is_a_border(probabilities: list[float]) -> None:
    detector = EdgeDetector(SETTINGS)
    run(detector, *probabilities)
    detector.reset(FRAME)
    assert run(detector, LOUD, LOUD) == [Rise(FRAME)]


def test_reset_forgets_the_turn_and_keeps_the_time() -> None:
    detector = speaking()
    detector.reset()
    assert (detector.state, detector.sample) == (EdgeState.QUIET, 7 * FRAME)
    assert run(detector, LOUD, LOUD) == [Rise(7 * FRAME)]
    detector.reset(20 * FRAME)
    assert run(detector, *[LOUD] * 13) == [Rise(20 * FRAME)]


PROBABILITIES = st.lists(st.tuples(st.sampled_from([LOUD, BAND, QUIET]), st.integers(1, 40)), max_size=30)
ANY_SETTINGS = st.builds(EdgeSettings, st.just(0.5), st.integers(0, 50), st.integers(0, 50), st.integers(0, 100))


@example_settings(max_examples=150, deadline=None)
@given(settings=ANY_SETTINGS, frames=PROBABILITIES)
def test_events_do_not_depend_on_the_frames(settings: EdgeSettings, frames: list[tuple[float, int]]) -> None:
    coarse, fine = EdgeDetector(settings), EdgeDetector(settings)
    for probability, samples in frames:
        event = coarse.judge(probability, samples)
        pieces = [fine.judge(probability, 1) for _ in range(samples)]
        assert [piece for piece in pieces if piece is not None] == ([] if event is None else [event])


@example_settings(max_examples=150, deadline=None)
@given(settings=ANY_SETTINGS, frames=PROBABILITIES)
def test_turns_alternate_and_never_overlap(settings: EdgeSettings, frames: list[tuple[float, int]]) -> None:
    detector = EdgeDetector(settings)
    events: list[Edge] = []
    for probability, samples in frames:
        event = detector.judge(probability, samples)
        if event is not None:
            assert event.sample <= detector.sample
            events.append(event)
    assert all(type(a) is not type(b) and a.sample <= b.sample for a, b in pairwise(events))
    for event in events:
        if isinstance(event, Fall):
            assert event.sample - event.speech_end_sample == settings.silence_samples


def test_a_border_ahead_is_not_taken_back_by_a_reset() -> None:
    detector = speaking()
    detector.reset(9 * FRAME)
    detector.reset()
    assert run(detector, *[LOUD] * 4) == [Rise(9 * FRAME)]
