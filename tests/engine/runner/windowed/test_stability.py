"""Which tokens are committed, word times, cuts of windows: on hand-made hypotheses, and invariants on random ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner.windowed.stability import (
    HypothesisToken,
    Policy,
    best_cut,
    committable,
    is_noise,
    loop_start,
    rereads_from,
    rising,
    spans,
    spoken_before_the_end,
    steady,
    without_repeat,
    without_second_mark,
)

# 0..3 start words, 4 continues one, 5 is a comma, 6 ends a sentence.
PIECES = [b" one", b" two", b" three", b" four", b"teen", b",", b"."]
POLICY = Policy(agreed_margin=4.0, lone_margin=10.0, cut_beyond=100.0)


def heard(*pairs: tuple[int, float]) -> list[HypothesisToken]:
    return [HypothesisToken(token, peak) for token, peak in pairs]


def count(new: list[HypothesisToken], previous: list[int], ended: bool = False, edge: float = 50.0) -> int:
    return committable(new, ended, previous, (0.0, edge), PIECES, POLICY)


def test_nothing_near_the_live_edge() -> None:
    assert count(heard((0, 47.0), (1, 49.0)), [0, 1]) == 0


def test_agreed_tokens_need_less_distance() -> None:
    new = heard((0, 10.0), (1, 43.0), (2, 44.0), (3, 49.0))
    assert count(new, [0, 1, 2]) == 3
    assert count(new, []) == 1
    assert count(new, [0, 3, 2]) == 1


def test_a_young_window_is_treated_with_more_care() -> None:
    new = heard((0, 18.0), (1, 24.0))
    assert committable(new, False, [0, 1], (0.0, 25.0), PIECES, POLICY) == 0
    assert committable(new, False, [0, 1], (-20.0, 25.0), PIECES, POLICY) == 1


def test_tokens_the_model_doubts_need_more_distance() -> None:
    new = [HypothesisToken(0, 10.0), HypothesisToken(1, 43.0, -1.2), HypothesisToken(2, 49.0)]
    assert count(new, [0, 1, 2]) == 1
    assert count([HypothesisToken(0, 10.0), HypothesisToken(1, 39.0, -1.2), HypothesisToken(2, 49.0)], [0, 1, 2]) == 2


def test_a_word_goes_on_as_long_as_its_end_is_a_mere_guess() -> None:
    policy = Policy(agreed_margin=4.0, lone_margin=10.0, word_end=-1.0)
    for chance, expected in ((-0.9, 2), (-1.1, 1)):
        new = [HypothesisToken(0, 10.0), HypothesisToken(1, 20.0), HypothesisToken(2, 49.0, chance)]
        assert committable(new, False, [], (0.0, 50.0), PIECES, policy) == expected


def test_what_the_model_is_certain_of_waits_for_no_second_pass_however_young_the_window() -> None:
    policy = Policy(agreed_margin=4.0, lone_margin=10.0, certain=-0.1)
    for chance, expected in ((-0.05, 1), (-0.2, 0)):
        new = [HypothesisToken(0, 20.0, chance), HypothesisToken(1, 24.0)]
        assert committable(new, False, [], (0.0, 25.0), PIECES, policy) == expected


def test_what_is_neither_sure_nor_agreed_on_needs_the_most_distance() -> None:
    policy = Policy(agreed_margin=4.0, lone_margin=10.0, doubtful_margin=20.0, sure=-0.7)
    for chance, previous, expected in ((-0.5, [], 1), (-1.2, [], 0), (-1.2, [0], 1)):
        new = [HypothesisToken(0, 38.0, chance), HypothesisToken(1, 49.0)]
        assert committable(new, False, previous, (0.0, 50.0), PIECES, policy) == expected
    assert (
        committable([HypothesisToken(0, 29.0, -1.2), HypothesisToken(1, 49.0)], False, [], (0.0, 50.0), PIECES, policy)
        == 1
    )


def test_only_whole_words() -> None:
    assert count(heard((0, 10.0), (1, 12.0), (4, 49.0)), [0, 1, 4]) == 1
    assert count(heard((0, 10.0), (1, 12.0)), [0, 1]) == 1
    assert count(heard((0, 10.0), (1, 12.0)), [0, 1], ended=True) == 2


def test_a_mark_ends_a_word() -> None:
    assert count(heard((0, 10.0), (5, 49.0)), [0, 5]) == 1


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 60)), max_size=12),
    st.lists(st.integers(0, 6), max_size=12),
    st.booleans(),
)
def test_what_is_committed_is_behind_the_margin_and_complete(
    pairs: list[tuple[int, float]], previous: list[int], ended: bool
) -> None:
    peaks = rising([peak for _, peak in pairs], 0.0)
    new = [HypothesisToken(token, peak) for (token, _), peak in zip(pairs, peaks, strict=True)]
    safe = count(new, previous, ended)
    assert all(item.peak <= 50.0 - POLICY.agreed_margin for item in new[:safe])
    if 0 < safe < len(new):
        assert PIECES[new[safe].token][:1] in b" .,"


def test_peaks_never_run_backwards() -> None:
    assert rising([3.0, 1.0, 5.0], 2.0) == [3.0, 3.0, 5.0]
    assert rising([], 2.0) == []
    assert rising([25.0, 3.0, 5.0], 2.0) == [3.0, 3.0, 5.0]


def test_text_that_looks_back_at_old_audio_is_a_repetition() -> None:
    assert rereads_from([31.0, 33.0, 36.0], 30.0) is None
    assert rereads_from([5.0, 33.0, 7.0, 36.0], 30.0) is None
    assert rereads_from([31.0, 5.0, 8.0, 12.0], 30.0) == 1
    assert rereads_from([2.0, 3.0], 30.0) == 0


def test_a_stray_first_token_does_not_make_old_words_of_those_behind_it() -> None:
    """Attention to the first token of an utterance may peak anywhere, as here two seconds too late."""
    assert rereads_from([25.0, 3.0, 5.0, 9.0], 0.0) is None
    assert rereads_from([25.0, 26.0, 3.0, 5.0], 0.0) == 2
    assert rereads_from([25.0, 3.0, 5.0, 9.0, 14.0, 20.0, 3.0, 4.0], 0.0) == 6


def test_a_repetition_begins_with_its_first_word_wherever_that_one_looks() -> None:
    """As here: " If it had been stormy, if it had", whose second " if" looks at the edge of the audio."""
    pieces = [b" If", b" it", b" had", b" stormy", b",", b" if"]
    new = [
        HypothesisToken(3, 31.0),
        HypothesisToken(4, 39.0),
        HypothesisToken(5, 39.0),
        HypothesisToken(1, 39.0),
        HypothesisToken(2, 39.0),
    ]
    places = [31.0, 39.0, 39.0, 5.0, 8.0]
    assert without_repeat([0, 1, 2], new, places, (30.0, 38.0), pieces) == new[:2]
    # What was not said before it, or not in this order, is no part of it.
    assert without_repeat([2, 1, 2], new, places, (30.0, 38.0), pieces) == new[:3]
    assert without_repeat([0, 2, 1], new, places, (30.0, 38.0), pieces) == new[:3]
    assert without_repeat([0, 1, 2], new, [31.0, 33.0, 35.0, 37.0, 39.0], (30.0, 38.0), pieces) == new
    assert without_repeat([0, 1, 2], new[:2], places, (30.0, 38.0), pieces) == new[:2]


def test_words_that_are_heard_before_the_edge_are_no_repetition_although_they_were_said_before() -> None:
    """As here: "have an effect on others, and the others have an effect [on others]"."""
    pieces = [b" have", b" an", b" effect", b" on", b" others"]
    new = [
        HypothesisToken(0, 31.0),
        HypothesisToken(1, 33.0),
        HypothesisToken(2, 35.0),
        HypothesisToken(3, 35.0),
        HypothesisToken(4, 35.0),
    ]
    assert without_repeat([0, 1, 2, 3, 4], new, [31.0, 33.0, 35.0, 5.0, 8.0], (30.0, 38.0), pieces) == new[:3]


def test_spans_meet_halfway_and_leave_pauses_out() -> None:
    first, second, third = spans(heard((0, 10.0), (1, 12.0), (2, 40.0)), before=10.0, after=41.0)
    assert first == (10.0, 11.0)
    assert second[0] == 11.0 and second[1] < 20.0
    assert third[0] > 30.0 and third[1] == 40.5


def test_loops_are_found_where_they_start() -> None:
    assert loop_start([1, 2, 3, 4]) is None
    assert loop_start([9, 7, 7, 7, 7]) == 2
    assert loop_start([9, 1, 2, 1, 2, 1, 2, 1, 2]) == 3
    assert loop_start([1, 2, 1, 2, 1, 2]) is None


def test_noise_is_doubt_or_music() -> None:
    assert not is_noise(b"", [], POLICY.doubt)
    assert not is_noise(b" hello there", [-0.5, -0.6], POLICY.doubt)
    assert is_noise(b" hello there", [-1.5, -0.6], POLICY.doubt)
    assert is_noise(" \u266a la".encode(), [-0.1], POLICY.doubt)
    # A full stop in silence would stand before the next turn's first word.
    assert is_noise(b".", [-0.1], POLICY.doubt) and is_noise(b" . . .", [-0.1] * 3, POLICY.doubt)


def test_cut_prefers_the_end_of_a_sentence() -> None:
    committed = heard((0, 27.0), (1, 30.0), (6, 31.0), (2, 33.0), (3, 36.0))
    behind, place = best_cut(committed, 40.0, 45.0, PIECES, POLICY) or (0, 0.0)
    assert behind == 3 and 31.0 <= place <= 33.0


def test_cut_prefers_a_long_pause() -> None:
    committed = heard((0, 10.0), (1, 12.0), (2, 30.0), (3, 32.0))
    behind, place = best_cut(committed, 34.0, 40.0, PIECES, POLICY) or (0, 0.0)
    assert behind == 2 and 12.0 < place < 30.0


def test_cut_keeps_some_audio_that_was_understood() -> None:
    committed = heard(*((0, 5.0 * index) for index in range(1, 20)))
    behind, place = best_cut(committed, 100.0, 105.0, PIECES, POLICY) or (0, 0.0)
    assert POLICY.keep_behind <= 105.0 - place <= 2 * POLICY.keep_behind
    assert committed[behind - 1].peak < place < committed[behind].peak


def test_cut_never_splits_a_word() -> None:
    assert best_cut([], 40.0, 45.0, PIECES, POLICY) is None
    found = best_cut(heard((0, 10.0), (4, 30.0)), 31.0, 40.0, PIECES, POLICY)
    assert found is not None and found[0] == 2


def test_a_committed_mark_is_not_followed_by_another() -> None:
    new = heard((5, 1.0), (6, 2.0), (1, 3.0), (5, 4.0))
    assert without_second_mark([0, 5], new, PIECES) == new[2:]
    assert without_second_mark([0], new, PIECES) == new
    assert without_second_mark([], new, PIECES) == new[2:]
    assert without_second_mark([6], heard((5, 1.0)), PIECES) == []


def test_a_stray_peak_moves_no_other_word_of_a_window() -> None:
    assert steady([90.0, 2.0, 5.0, 9.0], 0.0) == [2.0, 2.0, 5.0, 9.0]
    assert steady([1.0, 2.0, 0.0, 9.0, 4.0, 12.0], 0.0) == [1.0, 1.0, 1.0, 4.0, 4.0, 12.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 400), max_size=40), st.floats(0, 100))
def test_steady_places_rise_and_are_places_of_peaks(peaks: list[float], floor: float) -> None:
    places = steady(peaks, floor)
    assert places == sorted(places) and len(places) == len(peaks)
    assert set(places) <= {floor, *peaks} and all(place >= floor for place in places)
    in_order = sorted(max(peak, floor) for peak in peaks)
    assert steady(in_order, floor) == in_order


def cut_off(said: str, *seconds: float, ends: float, from_: float = 0.0) -> str:
    """What is left of a hypothesis whose words look at these seconds, of a sound that was cut off."""
    words = said.split("|")
    pieces = [word.encode() for word in words]
    window = (from_ * 12.5, ends * 12.5)
    count = spoken_before_the_end(list(range(len(words))), [place * 12.5 for place in seconds], window, pieces)
    return "".join(words[:count])


def test_words_that_look_back_from_the_end_of_a_sound_that_was_cut_off_were_not_heard() -> None:
    """As the embedded model had them, in the middle of "worst" and of "epoch"."""
    said = ",| it| was| the| best| of| times|,| it| was| the"
    places = (3.06, 2.92, 3.09, 3.3, 2.87, 2.87, 2.87, 2.87, 2.87, 2.87, 3.3)
    assert cut_off(said, *places, ends=3.33, from_=2.18) == ", it was the"
    said = ",| it| was| the| epo|ch| of| belief|,| it"
    places = (10.7, 10.82, 10.86, 11.06, 11.06, 10.58, 10.58, 10.58, 10.58, 10.6)
    assert cut_off(said, *places, ends=11.08, from_=9.78) == ", it was the", "half a word is not guessed at"


def test_two_words_cannot_begin_at_the_very_end() -> None:
    said, places = ",| it| was| the| age", (8.7, 8.7, 8.92, 9.06, 9.06)
    assert cut_off(said, *places, ends=9.09, from_=7.82) == ", it was the"
    assert cut_off(said, 8.7, 8.7, 8.8, 8.92, 9.06, ends=9.09, from_=7.82) == ", it was the age"


def test_a_text_that_goes_on_to_the_end_stays() -> None:
    said = " It| was| the| age| of| wisdom|."
    assert cut_off(said, 4.94, 5.13, 5.27, 5.44, 5.66, 5.75, 6.26, ends=6.28) == " It was the age of wisdom."
    assert cut_off(said, 4.94, 5.13, 4.9, 4.8, 5.66, 5.75, 6.26, ends=6.28) == " It was the age of wisdom.", (
        "a look back long before the end is noise of the measurement"
    )


places = st.lists(st.tuples(st.integers(0, 6), st.floats(0, 60, allow_nan=False)), max_size=30)


@given(places, st.floats(0, 60), st.floats(0, 60))
def test_a_sound_that_was_cut_off_gives_leading_words(
    found: list[tuple[int, float]], floor: float, edge: float
) -> None:
    tokens = [token for token, _ in found]
    count = spoken_before_the_end(tokens, [place for _, place in found], (floor, edge), PIECES)
    assert 0 <= count <= len(tokens)
    last = [
        index
        for index in range(count)
        if PIECES[tokens[index]].startswith(b" ") and found[index][1] > edge - 0.1 * 12.5
    ]
    assert len(last) <= 1
