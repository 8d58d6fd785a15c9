"""The final of a turn has the words of the engine's second pass; what was streamed stays as it was sent."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from engine.options import REVISED, Options
from engine.spec import ModelSpec
from realtime.session.core import SavedSession, Session
from realtime.session.events import Clear, Commit, Completed, Delta, End, EngineSwitched, Event, Tick
from realtime.session.settings import BETTER_FINALS, STREAMED_FINALS, Settings
from realtime.session.turns import REVISION_SECONDS
from tests.realtime.session.test_core import RATE, Driver, append, counter, word

NO_TURNS = Settings(turn_detection=None)


def better(text: str, start: float, end: float) -> messages.Word:
    return messages.Word(text, int(start * RATE), int(end * RATE), [(f" {text}".encode(), -0.1)])


def revised(end: float, *words: messages.Word, start: float = 0.0) -> messages.Revised:
    return messages.Revised("s", int(start * RATE), int(end * RATE), list(words) or None)


def flushed(sample: float, *, is_revised: bool = True) -> messages.Flushed:
    return messages.Flushed("s", 1, int(sample * RATE), is_revised)


def completed(events: list[Any]) -> list[Completed]:
    return [event for event in events if isinstance(event, Completed)]


def turn() -> Driver:
    """A committed turn with two words."""
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    drive(append(3.0), word("good", 0.2, 0.6), word("mourning", 1.2, 1.8), Commit())
    return drive


def test_a_final_waits_for_its_revision() -> None:
    drive = turn()
    assert not completed(drive(flushed(3.0)))
    (done,) = completed(drive(revised(3.0, better("Good", 0.2, 0.6), better("morning.", 1.2, 1.7))))
    assert done.transcript == "Good morning." and done.is_revised
    assert [one.text for one in done.words] == ["Good", "morning."]
    assert done.words[1].end == int(1.7 * RATE)


def test_a_final_without_a_revision_does_not_wait() -> None:
    (done,) = completed(turn()(flushed(3.0, is_revised=False)))
    assert done.transcript == "good mourning" and not done.is_revised


def test_a_revision_that_the_engine_gave_up_leaves_the_streamed_words() -> None:
    drive = turn()
    drive(flushed(3.0))
    (done,) = completed(drive(revised(3.0)))
    assert done.transcript == "good mourning" and not done.is_revised


def test_a_revision_that_never_comes_is_not_waited_for_without_end() -> None:
    drive = turn()
    drive(flushed(3.0))
    assert drive.core.final_due == REVISION_SECONDS
    assert not completed(drive(Tick()))
    drive.now = REVISION_SECONDS
    (done,) = completed(drive(Tick()))
    assert done.transcript == "good mourning"
    # A late one changes nothing.
    assert not drive(revised(3.0, better("Good", 0.2, 0.6)))


def test_a_turn_whose_words_are_revised_does_not_wait_for_the_revision_of_the_next() -> None:
    drive = turn()
    drive(flushed(3.0))
    drive(append(3.0), word("again", 3.5, 4.0), Commit())
    drive(messages.Flushed("s", 2, 6 * RATE, True))
    (first,) = completed(drive(revised(3.0, better("Good", 0.2, 0.6), better("morning.", 1.2, 1.7))))
    assert first.transcript == "Good morning."
    (second,) = completed(drive(revised(6.0, better("Again.", 3.5, 4.0), start=3.0)))
    assert second.transcript == "Again."


def test_the_end_of_the_stream_completes_everything() -> None:
    drive = turn()
    drive(flushed(3.0), End())
    (done,) = completed(drive(messages.Closed("s", 3 * RATE)))
    assert done.transcript == "good mourning"


def test_the_next_turn_waits_behind_one_that_waits() -> None:
    drive = turn()
    drive(flushed(3.0))
    drive(append(2.0))
    assert not drive(word("next", 3.5, 4.0))
    events = drive(revised(3.0, better("Good.", 0.2, 0.6)))
    assert [type(event) for event in events] == [Completed, Delta]
    assert events[1].text == "next"


def test_a_revision_of_two_turns_is_divided_between_their_words() -> None:
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    drive(append(2.0), word("one", 0.2, 0.8), Commit(), flushed(2.0, is_revised=False))
    drive(append(2.0), word("two", 2.6, 3.2), Commit(), flushed(4.0))
    parts = better("One.", 0.2, 0.8), better("Extra.", 1.0, 1.4), better("Two.", 2.5, 3.2)
    events = drive(revised(4.0, *parts))
    assert [done.transcript for done in completed(events)] == ["Two."]


def test_parts_of_a_long_turn_are_joined_and_words_outside_of_them_stay() -> None:
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    drive(append(9.0), word("one", 0.2, 0.8), word("two", 4.0, 4.6), word("three", 8.0, 8.6))
    drive(revised(3.0, better("One", 0.2, 0.8)), Commit(), flushed(9.0))
    (done,) = completed(drive(revised(9.0, better("free.", 8.0, 8.6), start=6.0)))
    assert done.transcript == "One two free."


def test_the_work_for_a_long_turn_grows_with_its_words_and_not_with_its_revisions() -> None:
    """Calls are counted: a turn of ten times as many words and revised parts costs about ten times as much."""

    def calls(seconds: int) -> int:
        drive = Driver(Session(NO_TURNS, RATE, counter()))
        drive(append(seconds), *(word(f"w{at}", at + 0.2, at + 0.6) for at in range(seconds)))
        for at in range(0, seconds, 20):
            words = (better(f"b{second}", second + 0.2, second + 0.6) for second in range(at, at + 20))
            drive(revised(at + 20.0, *words, start=float(at)))
        drive(Commit())
        profile = cProfile.Profile()
        (done,) = completed(profile.runcall(drive, flushed(seconds, is_revised=False)))
        assert done.transcript.split() == [f"b{second}" for second in range(seconds)]
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(2000) < 12 * calls(200)


def test_the_same_revision_twice_counts_once() -> None:
    drive = turn()
    again = revised(3.0, better("Good.", 0.2, 0.6))
    drive(again)
    (done,) = completed(drive(flushed(3.0)))
    assert done.transcript == "Good."
    assert not completed(drive(again))


def test_a_turn_to_which_no_revised_word_falls_keeps_its_streamed_words() -> None:
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    drive(append(3.0), word("good", 0.2, 0.6), Commit(), flushed(3.0))
    (done,) = completed(drive(revised(3.0, better("late", 3.1, 3.5))))
    assert done.transcript == "good" and not done.is_revised


def test_a_final_does_not_wait_for_a_stream_that_was_replaced() -> None:
    drive = turn()
    assert not completed(drive(flushed(3.0)))
    (done,) = completed(drive(EngineSwitched(3 * RATE)))
    assert done.transcript == "good mourning"


def test_a_failed_stream_leaves_nothing_to_wait_for() -> None:
    drive = turn()
    drive(flushed(3.0), messages.Failed("s", "StreamFailed", "broken"))
    assert drive.core.final_due is None


def test_cleared_words_do_not_come_back_with_a_revision() -> None:
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    drive(append(2.0), word("hello", 0.2, 0.8), Commit(), append(2.0), Clear())
    drive(word("secret", 2.6, 3.2), flushed(2.0, is_revised=False), flushed(4.0))
    parts = better("Hello", 0.2, 0.8), better("secret", 2.6, 3.2)
    assert not [done for done in completed(drive(revised(4.0, *parts))) if "secret" in done.transcript]


def test_revisions_of_cleared_turns_are_not_kept() -> None:
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    for second in range(50):
        drive(append(1.0), Clear(), flushed(second + 1.0))
        drive(revised(second + 1.0, better("x", second + 0.2, second + 0.4), start=float(second)))
    assert len(msgspec.json.encode(drive.core.save())) < 4_000


@pytest.mark.parametrize("trim", [True, False])
def test_white_space_at_the_start_is_as_in_the_streamed_text(trim: bool) -> None:
    drive = Driver(Session(Settings(turn_detection=None, trim_start=trim), RATE, counter()))
    drive(append(3.0), word("good", 0.2, 0.6), Commit(), flushed(3.0))
    (done,) = completed(drive(revised(3.0, better("Good.", 0.2, 0.6))))
    assert done.transcript == ("Good." if trim else " Good.")
    spelled = b"".join(piece for piece, _ in done.words[0].chances).decode()
    assert spelled == done.transcript


@settings(deadline=None)
@given(st.integers(0, 8))
def test_a_session_that_waits_for_a_revision_can_be_saved_at_any_event(at: int) -> None:
    events: list[Event] = [
        append(3.0),
        word("good", 0.2, 0.6),
        word("mourning", 1.2, 1.8),
        Commit(),
        flushed(3.0),
        append(1.0),
        word("next", 3.2, 3.4),
        revised(3.0, better("Good", 0.2, 0.6), better("morning.", 1.2, 1.7)),
    ]
    alone = Driver(Session(NO_TURNS, RATE, counter()))
    expected = [event for one in events for event in alone(one)]
    drive = Driver(Session(NO_TURNS, RATE, counter()))
    said = [event for one in events[:at] for event in drive(one)]
    saved = msgspec.json.decode(msgspec.json.encode(drive.core.save()), type=SavedSession)
    other = Driver(Session(NO_TURNS, RATE, counter()))
    other.core.load(saved, 0.0)
    said += [event for one in events[at:] for event in other(one)]
    assert [type(event) for event in said] == [type(event) for event in expected]
    assert [one.transcript for one in completed(said)] == [one.transcript for one in completed(expected)]


def test_settings_ask_for_better_finals_only_of_a_model_that_has_them() -> None:
    plain = ModelSpec("m", 16_000, 1280)
    revising = ModelSpec("m", 16_000, 1280, options=Options(revises=True))
    assert Settings().in_force(plain).finals is None and REVISED not in Settings().in_force(plain).engine_options()
    assert Settings().in_force(revising).engine_options()[REVISED] == "yes"
    streamed = Settings(finals=STREAMED_FINALS).in_force(revising)
    assert streamed.finals == STREAMED_FINALS and REVISED not in streamed.engine_options()
    assert Settings().in_force(revising).finals == BETTER_FINALS
