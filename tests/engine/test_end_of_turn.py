"""The rule for the end of a turn: questions, thresholds and words; the same ends for any division of the silence."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.end_of_turn import (
    ANSWER_MS,
    EAGERNESS,
    FINISHED_MS,
    MAX_QUESTIONS,
    MIN_SILENCE_MS,
    UNFINISHED_MS,
    AskDetector,
    Decision,
    EagerEnd,
    Eagerness,
    End,
    Judge,
    Pause,
    WordEvidence,
    ends_sentence,
    evidence_of,
    numeric_eagerness,
)
from realtime.session import words as session_words

RATE = 16_000
FELL = 5 * RATE


def ms(milliseconds: float) -> int:
    return FELL + round(milliseconds * RATE / 1000)


def play(
    judge: Judge, text: str, answers: list[float | None], stops: list[int], later: tuple[int, str] | None = None
) -> list[Decision]:
    """A pause whose silence is told in pieces that end at `stops`; `later`: text that arrives at this sample."""
    pause, signs = judge.begin(FELL, text), []
    left = list(answers)
    stops = sorted({*stops, *([later[0]] if later else [])})
    for stop in stops:
        while True:
            pause, found = judge.advance(pause, stop)
            signs += found
            if not pause.asked:
                break
            pause = judge.with_answer(pause, left.pop(0) if left else None)
        if later is not None and stop == later[0]:
            pause = judge.with_words(pause, later[1])
    return signs


# WordEvidence


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", WordEvidence.NONE),
        ("  ", WordEvidence.NONE),
        ("I think so.", WordEvidence.FINISHED),
        ('He said "yes."', WordEvidence.FINISHED),
        ("Is it open?", WordEvidence.FINISHED),
        ("And then...", WordEvidence.UNFINISHED),
        ("apples, bananas,", WordEvidence.UNFINISHED),
        ("I want to go to the", WordEvidence.UNFINISHED),
        ("I was thinking, um.", WordEvidence.UNFINISHED),
        ("four one five", WordEvidence.OPEN),
        ("Das ist gut。", WordEvidence.FINISHED),
        ("wir gehen dann,", WordEvidence.UNFINISHED),
    ],
)
def test_what_words_tell(text: str, told: WordEvidence) -> None:
    assert evidence_of(text) is told


@given(st.text(alphabet="ab .?!…,\"'", max_size=12))
def test_a_sentence_ends_as_sessions_see_it(text: str) -> None:
    assert ends_sentence(text) == session_words.ends_sentence(text)


# Questions


def test_the_detector_is_asked_three_times_in_a_pause() -> None:
    judge = Judge(EAGERNESS["low"], RATE, has_detector=True)
    signs = play(judge, "I want to go to the", [0.01] * 3, [ms(20_000)])
    asked = [sign.sample for sign in signs if isinstance(sign, AskDetector)]
    assert asked == [FELL + samples for samples in EAGERNESS["low"].questions(RATE)]
    assert [after - before for before, after in pairwise(asked)] == [6400, 6400]
    assert MAX_QUESTIONS == len(asked) == 3
    assert isinstance(signs[-1], End)


SETTINGS = [*EAGERNESS.values(), numeric_eagerness(), numeric_eagerness(0.9, 0.4), numeric_eagerness(0.7, None, 500)]


@pytest.mark.parametrize("eagerness", SETTINGS)
def test_no_answer_could_have_ended_the_turn_before_the_first_question(eagerness: Eagerness) -> None:
    """A judge that is given the surest answer at once ends no earlier; and the answer comes in time."""
    rule = eagerness if eagerness.eager is None else replace(eagerness, threshold=eagerness.eager, eager=None)
    judge, first = Judge(rule, RATE, has_detector=True), FELL + eagerness.questions(RATE)[0]
    surest = Pause(FELL, FELL, WordEvidence.FINISHED, probability=1.0, answers=MAX_QUESTIONS)
    _, signs = judge.advance(surest, ms(30_000))
    assert isinstance(signs[-1], End) and signs[-1].sample >= first
    assert first == ms(MIN_SILENCE_MS) or abs(signs[-1].sample - first - ms(ANSWER_MS) + FELL) <= 1


def test_a_detector_whose_answers_come_too_late_to_count_is_not_asked() -> None:
    assert numeric_eagerness(1.0).questions(RATE) == ()
    assert len(numeric_eagerness(0.7, None, 500).questions(RATE)) == 1
    assert end_ms(numeric_eagerness(0.95, None, 500), "I think so.", 0.99) == 500


def test_nothing_is_decided_while_a_question_is_open() -> None:
    judge = Judge(EAGERNESS["high"], RATE, has_detector=True)
    first = FELL + EAGERNESS["high"].questions(RATE)[0]
    pause, signs = judge.advance(judge.begin(FELL, "I think so."), ms(9000))
    assert signs == [AskDetector(first)] and pause.asked and pause.now == first
    assert judge.advance(pause, ms(9500)) == (pause, [])


def test_an_answer_without_a_question_is_refused() -> None:
    judge = Judge(EAGERNESS["high"], RATE, has_detector=True)
    with pytest.raises(ValueError, match="was not asked"):
        judge.with_answer(judge.begin(FELL, ""), 0.5)


def test_a_detector_that_fails_leaves_the_words() -> None:
    judge = Judge(EAGERNESS["medium"], RATE, has_detector=True)
    signs = play(judge, "I think so.", [None, None, None], [ms(5000)])
    assert isinstance(signs[-1], End) and signs[-1].sample <= ms(UNFINISHED_MS["medium"])


# Thresholds


def end_ms(eagerness: Eagerness, text: str, *answers: float | None, has_detector: bool = True) -> float:
    signs = play(Judge(eagerness, RATE, has_detector=has_detector), text, list(answers) * MAX_QUESTIONS, [ms(30_000)])
    assert isinstance(signs[-1], End)
    return (signs[-1].sample - FELL) * 1000 / RATE


def test_a_sure_end_is_told_early() -> None:
    assert end_ms(numeric_eagerness(0.5), "I think so.", 0.99) == pytest.approx(311, abs=1)
    assert end_ms(EAGERNESS["medium"], "I think so.", 0.99) == pytest.approx(574, abs=1)
    assert end_ms(EAGERNESS["medium"], "I think so.", 1.0) == end_ms(EAGERNESS["medium"], "I think so.", 0.99)


def test_an_unfinished_turn_is_waited_for() -> None:
    assert end_ms(EAGERNESS["medium"], "I want to go to the", 0.02) > 1200


def test_the_longest_silence_ends_every_turn() -> None:
    for name, timeout in UNFINISHED_MS.items():
        assert end_ms(EAGERNESS[name], "I want to go to the", 0.0) <= timeout


@pytest.mark.parametrize("text", ["I think so.", "four one five", "and the", ""])
@pytest.mark.parametrize("probability", [0.05, 0.3, 0.6, 0.9])
def test_more_eager_never_ends_later(text: str, probability: float) -> None:
    waits = [end_ms(EAGERNESS[name], text, probability) for name in ("high", "medium", "low")]
    assert waits == sorted(waits)
    assert end_ms(EAGERNESS["auto"], text, probability) == waits[1]


@pytest.mark.parametrize("text", ["I think so.", "four one five", "and the", ""])
def test_a_higher_probability_never_ends_later(text: str) -> None:
    waits = [end_ms(EAGERNESS["medium"], text, chance / 20) for chance in range(21)]
    assert waits == sorted(waits, reverse=True)


@pytest.mark.parametrize("name", list(EAGERNESS))
def test_without_a_detector_the_words_decide_as_before(name: str) -> None:
    assert end_ms(EAGERNESS[name], "I think so.", has_detector=False) == FINISHED_MS[name]
    assert end_ms(EAGERNESS[name], "I think that", has_detector=False) == UNFINISHED_MS[name]


def test_text_that_comes_late_ends_the_turn_when_it_comes() -> None:
    judge = Judge(EAGERNESS["medium"], RATE, has_detector=False)
    signs = play(judge, "I think", [], [ms(3000)], later=(ms(800), "I think so."))
    assert signs == [End(ms(800), judge.confidence(Pause(FELL, FELL, WordEvidence.FINISHED), ms(800)), False)]


def test_confidence_grows_with_the_silence() -> None:
    judge = Judge(EAGERNESS["medium"], RATE, has_detector=True)
    pause = Pause(FELL, ms(200), WordEvidence.OPEN, probability=0.4, answers=1)
    sure = [judge.confidence(pause, ms(at)) for at in (200, 400, 800, 1600, 3200)]
    assert sure == sorted(sure) and 0 < sure[0] < sure[-1] < 1


def test_an_early_end_comes_before_the_end() -> None:
    judge = Judge(numeric_eagerness(0.9, 0.3), RATE, has_detector=True)
    signs = play(judge, "four one five", [0.6] * 3, [ms(10_000)])
    early = [sign for sign in signs if isinstance(sign, EagerEnd)]
    assert len(early) == 1 and isinstance(signs[-1], End)
    assert early[0].sample < signs[-1].sample and early[0].confidence >= 0.3 - 1e-3


def test_at_a_threshold_of_one_only_the_silence_ends_a_turn() -> None:
    assert end_ms(numeric_eagerness(1.0, None, 7000), "I think so.", 0.99) == 7000


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"^eot_threshold must be between 0.5 and 1$"):
        numeric_eagerness(0.45)
    with pytest.raises(ValueError, match=r"^eager_eot_threshold must be between 0.3 and 0.9$"):
        numeric_eagerness(0.7, 0.1)
    with pytest.raises(ValueError, match=r"^eager_eot_threshold \(0.8\) must not be above eot_threshold \(0.7\)$"):
        numeric_eagerness(0.7, 0.8)
    with pytest.raises(ValueError, match=r"^eot_timeout_ms must be between 500 and 60000$"):
        numeric_eagerness(0.7, None, 100)
    with pytest.raises(ValueError, match="eot_threshold"):
        numeric_eagerness(float("nan"))
    with pytest.raises(ValueError, match="eot_timeout_ms"):
        numeric_eagerness(eot_timeout_ms=10**5000)


# Any division of the silence


@given(
    name=st.sampled_from(["high", "medium", "low", "numbers"]),
    has_detector=st.booleans(),
    text=st.sampled_from(["", "I think so.", "four one five", "apples,", "and the"]),
    answers=st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=3, max_size=3),
    later=st.one_of(st.none(), st.tuples(st.integers(1, 9000), st.sampled_from(["I see.", "I see", "and"]))),
    seed=st.integers(0, 1000),
)
def test_any_division_of_the_silence_gives_the_same_signs(
    name: str, has_detector: bool, text: str, answers: list[float | None], later: tuple[int, str] | None, seed: int
) -> None:
    eagerness = numeric_eagerness(0.8, 0.4) if name == "numbers" else EAGERNESS[name]
    judge = Judge(eagerness, RATE, has_detector=has_detector)
    arrives = None if later is None else (ms(later[0]), later[1])
    whole = play(judge, text, answers, [ms(10_000)], arrives)
    chance = random.Random(seed)
    cuts = sorted({chance.randrange(FELL, ms(10_000)) for _ in range(chance.randrange(1, 60))} | {ms(10_000)})
    assert play(judge, text, answers, cuts, arrives) == whole
    assert isinstance(whole[-1], End)
    assert all(before.sample <= after.sample for before, after in pairwise(whole))
