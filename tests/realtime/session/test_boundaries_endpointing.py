"""When turns end in pauses: by the pause and the text, and with the turn detector's answers."""

from __future__ import annotations

import pytest

from engine.end_of_turn import EAGERNESS, End
from engine.messages import TurnRule, TurnScored
from realtime.session.boundaries import PauseWatch, turn_rule
from realtime.session.settings import TurnDetection

RATE = 16_000


def test_the_rule_of_the_track_has_the_silence_of_the_turn_or_of_the_text() -> None:
    assert turn_rule(None, RATE) is None
    assert turn_rule(TurnDetection(threshold=0.7, silence_duration_ms=320), RATE) == TurnRule(0.7, 1024, 5120)
    assert turn_rule(TurnDetection(semantic=True), RATE) == TurnRule(0.5, 1024, 4000)
    questions = EAGERNESS["auto"].questions(RATE)
    assert turn_rule(TurnDetection(semantic=True), RATE, has_detector=True) == TurnRule(0.5, 1024, 3200, questions)
    # Without semantic detection the turn detector is not asked.
    assert turn_rule(TurnDetection(), RATE, has_detector=True) == TurnRule(0.5, 1024, 8000)


def ends(watch: PauseWatch, until: int, text: str, step: int = 512) -> list[int]:
    start = watch.pause_start or 0
    found = [sign for end in range(start, until + step, step) for sign in watch.advance(end, text)]
    return [sign.sample - start for sign in found if isinstance(sign, End)]


@pytest.mark.parametrize(("eagerness", "seconds"), [("high", 2), ("auto", 4), ("medium", 4), ("low", 8)])
def test_semantic_detection_waits_no_longer_than_its_cap(eagerness: str, seconds: int) -> None:
    watch = PauseWatch(EAGERNESS[eagerness], RATE, has_detector=False)
    watch.begin(5000, "unfinished")
    assert ends(watch, 10 * RATE, "unfinished") == [seconds * RATE]


@pytest.mark.parametrize(("eagerness", "milliseconds"), [("high", 300), ("auto", 500), ("medium", 500), ("low", 900)])
@pytest.mark.parametrize("step", [1, 77, 512, 5000])
def test_a_complete_sentence_ends_sooner_however_the_silence_is_divided(
    eagerness: str, milliseconds: int, step: int
) -> None:
    watch = PauseWatch(EAGERNESS[eagerness], RATE, has_detector=False)
    watch.begin(5000, "It works.")
    assert ends(watch, 2 * RATE, "It works.", step) == [milliseconds * RATE // 1000]


def scored(watch: PauseWatch, fell: int, number: int, probability: float | None) -> None:
    watch.on_score(TurnScored(0, 0, fell, number, probability))


@pytest.mark.parametrize("step", [77, 512, 5000])
def test_a_sure_answer_ends_the_turn_soon_and_a_sure_no_waits(step: int) -> None:
    found = {}
    for probability in (0.99, 0.01):
        watch = PauseWatch(EAGERNESS["auto"], RATE, has_detector=True)
        watch.begin(5000, "It works.")
        for number in range(3):
            scored(watch, 5000, number, probability)
        found[probability] = ends(watch, 6 * RATE, "It works.", step)
    assert len(found[0.99]) == len(found[0.01]) == 1
    assert found[0.99][0] < found[0.01][0] <= 4 * RATE


@pytest.mark.parametrize("eagerness", list(EAGERNESS))
@pytest.mark.parametrize("text", ["It works.", "unfinished"])
def test_a_pause_without_answers_ends_as_without_a_detector(eagerness: str, text: str) -> None:
    found = []
    for learnt in (True, False):
        watch = PauseWatch(EAGERNESS[eagerness], RATE, has_detector=learnt)
        watch.begin(5000, text)
        scored(watch, 4000, 0, 0.99)  # of another pause
        found.append(ends(watch, 10 * RATE, text))
    assert found[0] == found[1] != []


def test_a_saved_pause_goes_on() -> None:
    watch, other = (PauseWatch(EAGERNESS["auto"], RATE, has_detector=True) for _ in range(2))
    watch.begin(5000, "It works.")
    scored(watch, 5000, 0, 0.9)
    watch.advance(9000, "It works.")
    scored(watch, 5000, 1, 0.2)
    other.load(watch.save())
    assert ends(watch, 6 * RATE, "It works.") == ends(other, 6 * RATE, "It works.") != []
