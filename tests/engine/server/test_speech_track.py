"""The one judge of speech: every transition, and events that depend neither on calls, frames nor on the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from engine.messages import (
    Phase,
    SpeechEnded,
    SpeechEvent,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    TrackState,
    TurnRule,
    TurnScored,
)
from engine.server.speech_track import (
    DECISIONS,
    HYSTERESIS,
    Begin,
    GateSettings,
    Skip,
    SpeechGate,
    SpeechTrack,
    stop_threshold,
)

FRAME = 512
RULE = TurnRule(threshold=0.5, min_speech_samples=2 * FRAME, silence_samples=3 * FRAME)
LOUD, BAND, QUIET = 0.9, 0.4, 0.1


def rule(threshold: float = 0.5, least: int = 2 * FRAME, silence: int = 3 * FRAME) -> TurnRule:
    return TurnRule(threshold, least, silence)


def run(track: SpeechTrack, *probabilities: float) -> list[SpeechEvent]:
    return [event for event in track.add_frames(probabilities, FRAME) if not isinstance(event, DECISIONS)]


def speaking() -> SpeechTrack:
    """In speech that began with frame 5."""
    track = SpeechTrack(RULE)
    assert run(track, *[QUIET] * 5, LOUD, LOUD) == [SpeechStarted(5 * FRAME, 7 * FRAME)]
    return track


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.1, float("nan")])
def test_an_impossible_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        SpeechTrack(rule(threshold))


@pytest.mark.parametrize(("least", "silence"), [(-1, 0), (0, -1)])
def test_negative_durations_are_refused(least: int, silence: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        SpeechTrack(rule(least=least, silence=silence))


@pytest.mark.parametrize("probability", [-0.01, 1.01, float("nan"), float("inf")])
def test_an_impossible_probability_is_refused_and_changes_nothing(probability: float) -> None:
    track = speaking()
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        track.add_frames([probability], FRAME)
    assert (track.phase, track.sample) == (Phase.SPEAKING, 7 * FRAME)


@pytest.mark.parametrize("frame_samples", [0, -1])
def test_an_empty_frame_is_refused(frame_samples: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        SpeechTrack(RULE).add_frames([LOUD], frame_samples)


def test_silence_is_possible_with_a_low_threshold() -> None:
    assert stop_threshold(0.5) == 0.5 - HYSTERESIS
    assert stop_threshold(0.1) == 0.01
    assert stop_threshold(0.005) == 0.005


def test_speech_pauses_at_once_and_ends_after_the_silence_of_the_rule() -> None:
    track = speaking()
    assert run(track, LOUD, QUIET, QUIET) == [SpeechPaused(8 * FRAME, 9 * FRAME)]
    assert track.state.phase == Phase.PAUSED
    assert run(track, QUIET) == [SpeechEnded(11 * FRAME, 11 * FRAME, speech_end=8 * FRAME)]
    assert track.phase is Phase.QUIET


def test_a_click_is_not_speech() -> None:
    track = SpeechTrack(RULE)
    assert run(track, LOUD, QUIET, LOUD, QUIET) == []
    assert track.phase is Phase.QUIET


def test_the_band_between_the_thresholds_starts_nothing_but_lets_speech_go_on() -> None:
    track = SpeechTrack(RULE)
    assert run(track, *[BAND] * 10) == []
    assert run(track, LOUD, BAND) == [SpeechStarted(10 * FRAME, 12 * FRAME)]
    assert run(track, *[BAND] * 10) == []
    assert track.phase is Phase.SPEAKING


def test_the_band_does_not_interrupt_a_pause_but_speech_does() -> None:
    track = speaking()
    assert run(track, QUIET, BAND, LOUD) == [SpeechPaused(7 * FRAME, 8 * FRAME), SpeechResumed(9 * FRAME, 10 * FRAME)]
    found = run(track, QUIET, BAND, BAND)
    assert found == [SpeechPaused(10 * FRAME, 11 * FRAME), SpeechEnded(13 * FRAME, 13 * FRAME, 10 * FRAME)]


def test_a_long_silence_ends_speech_where_it_became_long_enough() -> None:
    track = speaking()
    found = [event for event in track.add_frames([0.0], 16_000 * 600) if isinstance(event, SpeechEnded)]
    assert [(event.sample, event.speech_end) for event in found] == [(10 * FRAME, 7 * FRAME)]


def test_a_rule_changes_at_its_sample_without_losing_open_speech() -> None:
    track = speaking()
    assert [type(event) for event in run(track, QUIET, QUIET)] == [SpeechPaused]
    track.change(rule(silence=10 * FRAME), 9 * FRAME)
    assert run(track, *[QUIET] * 7) == []
    track.change(rule(silence=FRAME), 16 * FRAME)
    # Not in the past: that audio has been heard as part of the speech.
    assert run(track, QUIET) == [SpeechEnded(16 * FRAME, 17 * FRAME, 7 * FRAME)]


def test_a_change_ahead_of_the_frames_waits_for_its_sample() -> None:
    track = speaking()
    track.change(rule(0.95, silence=0), 8 * FRAME + 1)
    assert run(track, 0.7) == []
    assert [type(event) for event in run(track, 0.7)] == [SpeechPaused, SpeechEnded]


def test_a_restart_ends_speech_at_its_sample_without_an_event() -> None:
    track = speaking()
    middle = 8 * FRAME + FRAME // 2
    track.restart(middle)
    assert run(track, LOUD) == []
    assert track.phase is Phase.SPEAKING  # frames before the sample still belong to the speech that is ended
    assert run(track, LOUD, LOUD) == []
    assert run(track, LOUD) == [SpeechStarted(middle, 11 * FRAME)]


# Properties.

FRAMES = st.lists(st.sampled_from([0.0, 0.3, 0.4, 0.55, 0.7, 0.9, 1.0]), max_size=80)
RULES = st.builds(
    TurnRule,
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(0, 4 * FRAME),
    st.integers(0, 8 * FRAME),
    st.lists(st.integers(0, 40 * FRAME), max_size=3).map(lambda found: tuple(sorted(found))),
)
# (frame number, rule or None for a restart)
CHANGES = st.lists(st.tuples(st.integers(0, 80 * FRAME), st.none() | RULES), max_size=4)
WINDOWED = GateSettings(evidence=0.1, conversation_evidence=0.05, pre_roll_samples=FRAME, hang_over_samples=6 * FRAME)
SKIPPING = GateSettings(
    evidence=0.2, conversation_evidence=0.2, pre_roll_samples=FRAME, hang_over_samples=6 * FRAME, follows_track=True
)


def track_with(gate: GateSettings | None, first: TurnRule, is_open: bool = False) -> SpeechTrack:
    return SpeechTrack(first, None if gate is None else SpeechGate(gate, is_open=is_open))


def apply(track: SpeechTrack, changes: list[tuple[int, TurnRule | None]]) -> None:
    for sample, new in sorted(changes, key=lambda change: change[0]):
        if new is None:
            track.restart(sample)
        else:
            track.change(new, sample)


def without_skips(events: list[object]) -> list[object]:
    """How far silence has been skipped at the end of a call depends on the call; nothing else does."""
    return [event for event in events if not isinstance(event, Skip)]


@example_settings(max_examples=150, deadline=None)
@given(
    first=RULES, frames=FRAMES, changes=CHANGES, gate=st.sampled_from([None, WINDOWED, SKIPPING]), seed=st.integers()
)
def test_any_division_into_calls_gives_the_same_events(
    first: TurnRule, frames: list[float], changes: list[tuple[int, TurnRule | None]], gate: GateSettings, seed: int
) -> None:
    whole, parts = track_with(gate, first), track_with(gate, first)
    apply(whole, changes)
    apply(parts, changes)
    expected, found, chance = whole.add_frames(frames, FRAME), list[object](), random.Random(seed)
    rest = list(frames)
    while rest:
        size = chance.randint(1, 9)
        found += parts.add_frames(rest[:size], FRAME)
        # A state that was saved and loaded between is the same state.
        other = track_with(gate, first)
        other.load(parts.save())
        if parts.gate is not None and other.gate is not None:
            other.gate.resume(parts.gate.save())
        parts, rest = other, rest[size:]
    assert without_skips(found) == without_skips(list(expected))
    assert parts.state == whole.state
    if gate is not None:
        assert parts.gate is not None and whole.gate is not None
        assert parts.gate.floor == whole.gate.floor


class JudgingEachFrame(SpeechTrack):
    def is_silence(self, probabilities: Sequence[float]) -> bool:
        return False

    def is_speech(self, probabilities: Sequence[float], frame_samples: int) -> bool:
        return False

    def split(self, probabilities: Sequence[float], frame_samples: int) -> Iterator[Sequence[float]]:
        return ((probability,) for probability in probabilities)


@example_settings(max_examples=200, deadline=None)
@given(
    first=RULES,
    pieces=st.lists(
        st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.34, 0.36, 0.9]), max_size=14)
        | st.lists(st.sampled_from([0.55, 0.65, 0.9, 1.0]), max_size=14),
        max_size=30,
    ),
    changes=CHANGES,
    gate=st.sampled_from([None, WINDOWED, SKIPPING, WINDOWED.for_files(60 * FRAME)]),
    finds_sounds=st.booleans(),
    continued=st.none() | st.tuples(st.sampled_from(Phase), st.integers(0, 20 * FRAME)),
)
def test_frames_that_are_passed_at_once_are_as_if_each_were_judged(
    first: TurnRule,
    pieces: list[list[float]],
    changes: list[tuple[int, TurnRule | None]],
    gate: GateSettings | None,
    finds_sounds: bool,
    continued: tuple[Phase, int] | None,
) -> None:
    tracks = [
        kind(first, None if gate is None else SpeechGate(gate), finds_sounds=finds_sounds)
        for kind in (SpeechTrack, JudgingEachFrame)
    ]
    for track in tracks:
        apply(track, changes)
        if continued is not None:
            track.continue_from(TrackState(continued[0], sample=continued[1]))
    for piece in pieces:
        fast, slow = (track.add_frames(piece, FRAME) for track in tracks)
        assert fast == slow
        states = [(track.save(), track.take_spoken(), track.gate and track.gate.save()) for track in tracks]
        assert states[0] == states[1]
        if finds_sounds and gate is not None:
            assert tracks[0].take_sounds() == tracks[1].take_sounds()


@pytest.mark.parametrize("broken", [-0.1, 1.5, float("nan")])
def test_an_impossible_probability_in_silence_is_refused(broken: float) -> None:
    track = SpeechTrack(RULE, SpeechGate(SKIPPING))
    track.add_frames([0.0] * 4, FRAME)
    with pytest.raises(ValueError, match="probability"):
        track.add_frames([0.0, broken, 0.0], FRAME)


@example_settings(max_examples=150, deadline=None)
@given(first=RULES, frames=st.lists(st.tuples(st.sampled_from([LOUD, BAND, QUIET]), st.integers(1, 40)), max_size=30))
def test_events_do_not_depend_on_the_length_of_silent_frames(first: TurnRule, frames: list[tuple[float, int]]) -> None:
    questions = tuple(samples // 32 for samples in first.questions)
    short = TurnRule(first.threshold, first.min_speech_samples // 32, first.silence_samples // 32, questions)
    coarse, fine = SpeechTrack(short), SpeechTrack(short)

    def samples(events: list[object]) -> list[tuple[type, int]]:
        return [(type(event), event.sample) for event in events]  # type: ignore[attr-defined]

    for probability, length in frames:
        # Only silence comes in long frames: how soon a frame is taken for speech depends on its length.
        whole = ([probability], length) if probability == QUIET else ([probability] * length, 1)
        assert samples(list(coarse.add_frames(*whole))) == samples(list(fine.add_frames([probability] * length, 1)))


@example_settings(max_examples=150, deadline=None)
@given(first=RULES, frames=FRAMES, died_at=st.integers(0, 80), window=st.integers(0, 80), changes=CHANGES)
def test_another_engine_goes_on_with_the_same_events(
    first: TurnRule, frames: list[float], died_at: int, window: int, changes: list[tuple[int, TurnRule | None]]
) -> None:
    """The other engine gets the audio of its window once more, and the state and the rule of what was told."""
    died_at = min(died_at, len(frames))
    start = max(0, died_at - window)
    whole = SpeechTrack(first)
    apply(whole, changes)
    told = whole.add_frames(frames[:died_at], FRAME)
    state, in_force = whole.state, whole.rule
    expected = told + whole.add_frames(frames[died_at:], FRAME)
    # The other engine counts from the beginning of its window.
    other, before = SpeechTrack(in_force), start * FRAME
    other.continue_from(state.shifted(-before))
    apply(other, [(sample - before, new) for sample, new in changes if sample >= before])
    again = other.add_frames(frames[start:], FRAME)
    for event in again:
        assert not isinstance(event, DECISIONS)
        event.sample += before
        event.at += before
        if isinstance(event, SpeechEnded):
            event.speech_end += before
        elif isinstance(event, TurnScored):
            event.fell += before
    assert told + again == expected


@example_settings(max_examples=150, deadline=None)
@given(first=RULES, frames=FRAMES)
def test_events_alternate_and_never_overlap(first: TurnRule, frames: list[float]) -> None:
    events = [event for event in run(SpeechTrack(first), *frames) if not isinstance(event, TurnScored)]
    after: dict[type | None, tuple[type, ...]] = {
        None: (SpeechStarted,),
        SpeechStarted: (SpeechPaused,),
        SpeechResumed: (SpeechPaused,),
        SpeechPaused: (SpeechResumed, SpeechEnded),
        SpeechEnded: (SpeechStarted,),
    }
    for last, event in pairwise([None, *events]):
        assert event is not None and isinstance(event, after[None if last is None else type(last)])
        assert last is None or last.sample <= event.sample
        if isinstance(event, SpeechEnded):
            assert event.sample - event.speech_end == first.silence_samples


@example_settings(max_examples=150, deadline=None)
@given(first=RULES, frames=FRAMES)
def test_no_speech_is_skipped(first: TurnRule, frames: list[float]) -> None:
    """The gate that follows the track is open while there is speech, from its first sample on."""
    track = track_with(SKIPPING, first, is_open=True)
    assert track.gate is not None
    for probability in frames:
        floor_before = track.gate.floor
        for event in track.add_frames([probability], FRAME):
            if isinstance(event, SpeechStarted):
                assert track.gate.is_open
                assert track.gate.floor <= event.sample, "the start of speech was skipped"
        if track.phase is Phase.SPEAKING:
            assert track.gate.is_open
        assert track.gate.floor >= floor_before


def test_a_noise_that_starts_speech_opens_the_gate_of_skipped_silence() -> None:
    """The noise is no evidence (p = 0.7), but it is speech by the rule: the model gets it, with the audio before it."""
    track = track_with(SKIPPING, TurnRule(0.5, 1024, 8000), is_open=True)
    track.add_frames([0.0] * 2000, FRAME)
    assert track.gate is not None and not track.gate.is_open
    found = without_skips(list(track.add_frames([0.7] * 3, FRAME)))
    assert [type(event) for event in found] == [Begin, SpeechStarted]
    assert found[0] == Begin(2000 * FRAME - FRAME)


ASKS = TurnRule(0.5, 2 * FRAME, 3200, (3200, 9600, 16_000))


def questions(events: list[SpeechEvent]) -> list[tuple[int, int, int]]:
    return [(event.fell, event.number, event.sample) for event in events if isinstance(event, TurnScored)]


def paused() -> tuple[SpeechTrack, int]:
    """In a pause, and where it began."""
    track = SpeechTrack(ASKS)
    run(track, *[LOUD] * 4, QUIET)
    return track, 4 * FRAME


def test_the_turn_detector_is_asked_three_times_in_a_pause_and_a_click_does_not_end_it() -> None:
    track, fell = paused()
    found = run(track, *[QUIET] * 8, LOUD, *[QUIET] * 100)
    assert questions(found) == [(fell, 0, fell + 3200), (fell, 1, fell + 9600), (fell, 2, fell + 16_000)]
    assert [type(event) for event in found] == [TurnScored, SpeechEnded, TurnScored, TurnScored]
    assert questions(run(track, *[LOUD] * 2, *[QUIET] * 7)) == [(fell + 112 * FRAME, 0, fell + 112 * FRAME + 3200)]


def test_speech_ends_the_questions_and_so_do_a_restart_an_end_and_a_rule_that_does_not_ask() -> None:
    track, fell = paused()
    assert questions(run(track, *[QUIET] * 7, *[LOUD] * 3)) == [(fell, 0, fell + 3200)]
    for end in (
        lambda track: track.restart(5 * FRAME),
        lambda track: track.change(RULE, 5 * FRAME),
        lambda track: track.end_questions(5 * FRAME),
    ):
        track, fell = paused()
        end(track)
        assert questions(run(track, *[QUIET] * 100)) == []
    track, fell = paused()
    track.end_questions(fell)
    assert len(questions(run(track, *[QUIET] * 100))) == 3, "the turn before this pause has ended"


def test_a_rule_that_asks_from_within_a_pause_on_asks_in_the_next_one() -> None:
    track = speaking()
    run(track, QUIET)
    track.change(ASKS, track.sample)
    assert questions(run(track, *[QUIET] * 50)) == []
    assert len(questions(run(track, *[LOUD] * 4, *[QUIET] * 50))) == 3


def test_a_rule_that_changes_within_many_frames_holds_for_the_rest_of_them() -> None:
    """What was surely speech by the old rule is silence by the new one."""
    strict = TurnRule(0.95, 2 * FRAME, 4 * FRAME)
    found = []
    for kind in (SpeechTrack, JudgingEachFrame):
        track = kind(TurnRule(0.5, 2 * FRAME, 4 * FRAME))
        track.change(strict, 6 * FRAME)
        found.append((track.add_frames([0.7] * 6 + [0.85] + [0.7] * 23, FRAME), track.state))
    assert found[0] == found[1] and len(found[0][0]) > 1
