"""The audio that the speech gate passes: no noise, all speech, and an end soon after the last word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.speech_track import (
    Begin,
    Decision,
    End,
    GateSettings,
    Pause,
    Resume,
    Skip,
    SpeechGate,
    SplitUtterance,
)

FRAME = 512
# A frame lasts 0.032 s. One of SPEECH adds 6 log-odds, one of DOUBT 1.2, one of QUIET takes 1, one of NEUTRAL nothing.
SPEECH, DOUBT, NEUTRAL, QUIET = 0.9995, 0.9, 0.7311, 0.01
# Eight frames of speech open the gate, or two in a conversation; 5 frames of pre-roll, 3 make a pause, 10 of hang-over,
# 40 held.
SETTINGS = GateSettings(
    evidence=8 * 6 * 0.032 - 0.01,
    conversation_evidence=2 * 6 * 0.032 - 0.01,
    conversation_samples=100 * FRAME,
    pre_roll_samples=5 * FRAME,
    pause_samples=3 * FRAME,
    hang_over_samples=10 * FRAME,
    hold_samples=40 * FRAME,
)


def decide(*spans: tuple[float, int], settings: GateSettings = SETTINGS) -> list[Decision]:
    """Decisions over stretches of (probability, frames), pushed frame by frame."""
    gate = SpeechGate(settings)
    return [
        decision
        for probability, frames in spans
        for _ in range(frames)
        for decision in gate.judge([probability], FRAME)
    ]


def heard(decisions: list[Decision]) -> list[Decision]:
    return [decision for decision in decisions if isinstance(decision, (Begin, End))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_threshold": 0.0},
        {"stop_threshold": 1.0},
        {"evidence": 0.0},
        {"conversation_evidence": -1.0},
        {"hang_over_samples": -1},
        {"pause_samples": 0},
        {"pause_samples": 10 * FRAME},
        {"hold_samples": -1},
        {"pre_roll_samples": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="stop_threshold|evidence|durations|hang-over"):
        replace(SETTINGS, **wrong)  # type: ignore[arg-type]


def test_silence_is_skipped_up_to_the_pre_roll() -> None:
    assert decide((QUIET, 8)) == [Skip(FRAME), Skip(2 * FRAME), Skip(3 * FRAME)]


def test_an_utterance_begins_before_its_first_frame_and_ends_at_its_pause_after_the_hang_over() -> None:
    before = decide((QUIET, 20), (SPEECH, 30), (QUIET, 9))
    assert before[-2:] == [Begin(15 * FRAME), Pause(53 * FRAME)]
    after = decide((QUIET, 20), (SPEECH, 30), (QUIET, 10))
    assert after[: len(before)] == before
    assert heard(after)[-1] == End(53 * FRAME, speech_end=50 * FRAME)


def test_speech_in_the_first_frame_begins_at_the_start() -> None:
    assert heard(decide((SPEECH, 8))) == [Begin(0)]


@pytest.mark.parametrize(
    "noise",
    [
        [(SPEECH, 7)],
        [(DOUBT, 39)],
        [(SPEECH, 3), (QUIET, 5), (DOUBT, 9), (SPEECH, 3)],
        [(NEUTRAL, 500)],
        [(SPEECH, 1), (QUIET, 6)] * 50,
    ],
    ids=["click", "hum", "cough", "rustle", "knocks"],
)
def test_short_or_unsure_sounds_after_silence_are_never_heard(noise: list[tuple[float, int]]) -> None:
    decisions = decide((QUIET, 20), *noise, (QUIET, 60))
    assert heard(decisions) == []
    total = 80 + sum(frames for _, frames in noise)
    assert decisions[-1] == Skip((total - 5) * FRAME)


def test_a_doubtful_sound_is_held_whole_and_then_its_latest_part() -> None:
    assert decide((QUIET, 20), (SPEECH, 7), (NEUTRAL, 30))[-1] == Skip(15 * FRAME)
    assert decide((QUIET, 20), (SPEECH, 7), (NEUTRAL, 60))[-1] == Skip((87 - 40 - 5) * FRAME)


def test_speech_after_long_doubt_is_heard_from_what_was_held() -> None:
    decisions = decide((QUIET, 20), (SPEECH, 7), (NEUTRAL, 60), (SPEECH, 1))
    assert heard(decisions) == [Begin((88 - 40 - 5) * FRAME)]


def test_hesitant_speech_gathers_evidence_over_short_pauses() -> None:
    decisions = decide((QUIET, 20), (SPEECH, 4), (QUIET, 9), (SPEECH, 6))
    assert heard(decisions) == [Begin(15 * FRAME)]


def test_in_a_conversation_a_short_word_is_heard() -> None:
    decisions = decide((SPEECH, 20), (QUIET, 50), (SPEECH, 2), (QUIET, 10))
    assert heard(decisions)[2:] == [Begin(65 * FRAME), End(75 * FRAME, speech_end=72 * FRAME)]


def test_after_a_long_silence_a_conversation_is_over() -> None:
    assert len(heard(decide((SPEECH, 20), (QUIET, 101), (SPEECH, 2), (QUIET, 20)))) == 2


def test_a_pause_shorter_than_the_hang_over_ends_nothing() -> None:
    decisions = decide((SPEECH, 20), (QUIET, 9), (SPEECH, 1), (QUIET, 9), (0.36, 1), (QUIET, 9))
    assert decisions == [
        Begin(0),
        Pause(23 * FRAME),
        Resume(30 * FRAME),
        Pause(33 * FRAME),
        Resume(40 * FRAME),
        Pause(43 * FRAME),
    ]


def test_an_utterance_never_reaches_back_into_the_one_before() -> None:
    near = replace(SETTINGS, pre_roll_samples=20 * FRAME)
    decisions = decide((SPEECH, 20), (QUIET, 10), (SPEECH, 20), settings=near)
    assert heard(decisions) == [Begin(0), End(23 * FRAME, speech_end=20 * FRAME), Begin(23 * FRAME)]


def test_flush_in_a_pause_ends_the_utterance_at_the_pause() -> None:
    gate = SpeechGate(SETTINGS)
    gate.judge([SPEECH] * 20 + [QUIET] * 5, FRAME)
    assert gate.flush(26 * FRAME) == [End(23 * FRAME, speech_end=20 * FRAME), Skip(26 * FRAME)]
    # What was flushed away is no part of what comes next.
    assert gate.judge([SPEECH] * 2, FRAME) == [Begin(26 * FRAME)]


def test_a_flush_at_a_pause_gives_the_same_whenever_it_comes() -> None:
    ends = []
    for late in range(3, 9):
        gate = SpeechGate(SETTINGS)
        decisions = gate.judge([SPEECH] * 20 + [QUIET] * late, FRAME) + gate.flush_at_pause()
        decisions += gate.judge([QUIET] * (20 - late) + [SPEECH] * 8, FRAME)
        ends.append(heard(decisions))
    assert ends == [[Begin(0), End(23 * FRAME, speech_end=20 * FRAME), Begin(35 * FRAME)]] * 6


def test_a_flush_at_a_pause_takes_nothing_from_what_is_in_doubt() -> None:
    gate = SpeechGate(SETTINGS)
    gate.judge([QUIET] * 10 + [SPEECH] * 4, FRAME)
    assert gate.flush_at_pause() == []
    assert gate.judge([SPEECH] * 4, FRAME) == [Begin(5 * FRAME)]


def test_flush_ends_an_open_utterance_where_the_caller_says() -> None:
    gate = SpeechGate(SETTINGS)
    gate.judge([SPEECH] * 20, FRAME)
    assert gate.flush(20 * FRAME + 100) == [End(20 * FRAME + 100, speech_end=20 * FRAME)]
    # Speech that continues is passed from there on.
    assert gate.judge([SPEECH] * 2, FRAME) == [Begin(20 * FRAME + 100)]


def test_flush_gives_up_a_doubtful_sound() -> None:
    gate = SpeechGate(SETTINGS)
    gate.judge([SPEECH] * 5, FRAME)
    assert gate.flush(5 * FRAME) == [Skip(5 * FRAME)]
    assert gate.flush(5 * FRAME) == []
    assert not gate.is_open


def test_flush_cannot_lie_in_the_past() -> None:
    gate = SpeechGate(SETTINGS)
    gate.judge([SPEECH] * 5, FRAME)
    with pytest.raises(ValueError, match="past"):
        gate.flush(4 * FRAME)


def test_a_stream_that_starts_later_is_followed_from_there() -> None:
    gate = SpeechGate(SETTINGS, sample=10_000)
    assert gate.judge([SPEECH] * 8, FRAME) == [Begin(10_000)]


probabilities = st.lists(st.sampled_from([QUIET, QUIET, NEUTRAL, DOUBT, SPEECH, SPEECH]), max_size=120)


@settings(max_examples=60, deadline=None)
@given(frames=probabilities, cut=st.integers(1, 40))
def test_how_frames_are_grouped_changes_no_utterance(frames: list[float], cut: int) -> None:
    gate, pieces = SpeechGate(SETTINGS), []
    for start in range(0, len(frames), cut):
        pieces += gate.judge(frames[start : start + cut], FRAME)
    assert heard(pieces) == heard(decide(*[(probability, 1) for probability in frames]))


@settings(max_examples=60, deadline=None)
@given(frames=probabilities)
def test_decisions_move_forward_and_alternate(frames: list[float]) -> None:
    gate, last, is_open = SpeechGate(SETTINGS), 0, False
    for number, probability in enumerate(frames, 1):
        for decision in gate.judge([probability], FRAME):
            assert last <= decision.sample <= number * FRAME
            last = decision.sample
            in_utterance = isinstance(decision, (Pause, Resume, End))
            assert in_utterance == is_open, "an open gate can only pause, resume and end, a closed one cannot"
            is_open = isinstance(decision, (Begin, Pause, Resume))
        assert gate.is_open == is_open
        # What is held back is bounded, however long the doubt lasts.
        if not is_open:
            assert number * FRAME - last <= SETTINGS.hold_samples + SETTINGS.pre_roll_samples


# Files: long utterances are cut where it is quiet

LONGEST = 60 * FRAME
FILE = replace(SETTINGS, longest_samples=LONGEST)


def test_an_utterance_that_grows_too_long_is_cut_where_it_was_calmest() -> None:
    spans = [(SPEECH, 20), (QUIET, 9), (SPEECH, 11), (0.6, 8), (SPEECH, 30)]
    cut = 44 * FRAME  # the calm place in the second half, not the calmer one in the first
    assert [d for d in decide(*spans, settings=FILE) if isinstance(d, (Begin, SplitUtterance, End))] == [
        Begin(0),
        SplitUtterance(cut),
    ]
    assert not any(isinstance(decision, SplitUtterance) for decision in decide(*spans, (SPEECH, 500)))


def test_what_follows_a_cut_is_the_same_utterance() -> None:
    decisions = decide((SPEECH, 40), (0.6, 8), (SPEECH, 30), (QUIET, 10), settings=FILE)
    assert heard(decisions) == [Begin(0), End(81 * FRAME, speech_end=78 * FRAME)]


def test_an_utterance_that_ends_in_the_calm_where_it_was_cut_ends_there() -> None:
    gate = SpeechGate(replace(FILE, hang_over_samples=20 * FRAME))
    decisions = gate.judge([SPEECH] * 45 + [QUIET] * 30, FRAME)
    cut = next(decision.sample for decision in decisions if isinstance(decision, SplitUtterance))
    assert cut > 48 * FRAME
    assert decisions[-2:] == [End(cut, speech_end=45 * FRAME), Skip(70 * FRAME)]


@settings(max_examples=60, deadline=None)
@given(frames=st.lists(st.sampled_from([QUIET, 0.5, SPEECH, SPEECH, SPEECH]), max_size=400), at=st.integers(1, 40))
def test_no_piece_of_a_file_is_longer_than_its_bound_however_it_comes(frames: list[float], at: int) -> None:
    one_by_one = decide(*[(probability, 1) for probability in frames], settings=FILE)
    gate, grouped = SpeechGate(FILE), []
    for start in range(0, len(frames), at):
        grouped += gate.judge(frames[start : start + at], FRAME)
        gate, saved = SpeechGate(FILE), gate.save()
        gate.resume(saved)
    kinds = (Begin, SplitUtterance, End)
    assert [d for d in grouped if isinstance(d, kinds)] == [d for d in one_by_one if isinstance(d, kinds)]
    start = None
    for decision in one_by_one:
        if isinstance(decision, (SplitUtterance, End)):
            assert start is not None and start <= decision.sample <= start + LONGEST
        if isinstance(decision, kinds):
            start = decision.sample


def test_short_silences_stay_in_the_windows_of_files_and_long_ones_do_not() -> None:
    settings = GateSettings().for_files(28 * 16_000)
    second = 16_000 // FRAME
    for silence, utterances in ((1, 1), (2, 1), (4, 2)):
        decisions = decide((SPEECH, 2 * second), (QUIET, silence * second), (SPEECH, second), settings=settings)
        assert sum(isinstance(decision, Begin) for decision in decisions) == utterances
