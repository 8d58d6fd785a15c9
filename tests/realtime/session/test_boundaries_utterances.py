"""The pause after the last word (UtteranceEnd): reported once, on time, and not during speech."""

from __future__ import annotations

from dataclasses import replace

from engine import messages
from realtime.session.events import FlushEngine, UtteranceEnded
from realtime.session.settings import Settings, TurnDetection
from tests.realtime.session.test_core import Driver, append, flushed, kinds, session, speech, word

RATE = 16_000
ENDPOINTS = Settings(turn_detection=TurnDetection(silence_duration_ms=300), utterance_end_ms=1000)
# As when a client switches endpointing off: a turn practically never ends.
NO_ENDPOINTS = replace(ENDPOINTS, turn_detection=TurnDetection(silence_duration_ms=60_000))


def driver(chosen: Settings) -> Driver:
    """The word `hello` is spoken from 0.2 s to 1.0 s."""
    drive = Driver(session(chosen, stall_seconds=0.0))
    drive(append(1.056), speech(0.0, 1.056, 0.99), word("hello", 0.2, 1.0))
    return drive


def quiet(drive: Driver, start: float, seconds: float, probability: float = 0.01) -> list[object]:
    return drive(append(seconds), speech(start, seconds, probability))


def ends(drive: Driver) -> list[float]:
    return [event.sample / RATE for event in drive.sent if isinstance(event, UtteranceEnded)]


def test_it_comes_after_its_time_and_not_with_the_end_of_the_turn() -> None:
    drive = driver(ENDPOINTS)
    quiet(drive, 1.056, 0.512)
    drive(flushed())
    assert kinds(drive.sent)[-1] == "Completed" and not ends(drive)
    quiet(drive, 1.568, 0.352)
    assert not ends(drive), "0.92 s after the word"
    quiet(drive, 1.92, 0.128)
    assert ends(drive) == [1.0]
    quiet(drive, 2.048, 3.2)
    assert ends(drive) == [1.0], "told once"


def test_a_new_word_begins_the_wait_anew() -> None:
    drive = driver(ENDPOINTS)
    quiet(drive, 1.056, 0.512)
    drive(flushed())
    quiet(drive, 1.568, 0.96, probability=0.99)
    drive(word("again", 1.8, 2.4))
    quiet(drive, 2.528, 0.32)
    drive(flushed())
    quiet(drive, 2.848, 0.384)
    assert not ends(drive), "a second has passed since the first word, and not since the last"
    quiet(drive, 3.232, 0.32)
    assert ends(drive) == [2.4]


def test_without_endpointing_the_engine_is_asked_before_anybody_is_told() -> None:
    drive = driver(NO_ENDPOINTS)
    asked = [event for event in quiet(drive, 1.056, 0.992) if isinstance(event, FlushEngine)]
    assert asked == [FlushEngine(pause=asked[0].pause)] and asked[0].pause and not ends(drive)
    drive(flushed())
    assert ends(drive) == [1.0] and "Completed" not in kinds(drive.sent)


def test_a_word_that_the_engine_still_had_is_the_last_one() -> None:
    drive = driver(NO_ENDPOINTS)
    quiet(drive, 1.056, 0.992)
    drive(word("late", 1.3, 1.6), flushed())
    assert not ends(drive)
    quiet(drive, 2.048, 0.608)
    assert ends(drive) == [1.6]


def test_somebody_who_goes_on_speaking_is_not_cut_off() -> None:
    drive = driver(ENDPOINTS)
    asked = quiet(drive, 1.056, 1.92, probability=0.99)
    assert not any(isinstance(event, FlushEngine) for event in asked) and not ends(drive)


def test_noise_that_sounds_like_speech_does_not_hide_the_end() -> None:
    drive = driver(ENDPOINTS)
    asked = [event for event in quiet(drive, 1.056, 2.976, probability=0.99) if isinstance(event, FlushEngine)]
    assert asked == [FlushEngine()] and not ends(drive)
    drive(flushed())
    assert ends(drive) == [1.0]


def test_a_lost_answer_is_asked_for_again() -> None:
    """A stream that is replaced forgets the flushes of the one before."""
    drive = driver(NO_ENDPOINTS)
    quiet(drive, 1.056, 0.992)
    drive.core.handle(messages.Failed("s", "StreamFailed", "numbers went wrong"), 0.0)
    asked = [event for event in quiet(drive, 2.048, 1.024) if isinstance(event, FlushEngine)]
    assert len(asked) == 1
    drive(flushed())
    assert ends(drive) == [1.0]


def test_a_pause_that_only_the_next_word_shows_is_told_before_it() -> None:
    """A client that sends faster than real time."""
    drive = driver(NO_ENDPOINTS)
    drive(append(20.0), speech(1.056, 3.488, 0.99), word("later", 4.0, 4.5))
    assert kinds(drive.sent)[-2:] == ["UtteranceEnded", "Delta"] and ends(drive) == [1.0]


def test_nobody_is_told_who_did_not_ask() -> None:
    drive = driver(replace(ENDPOINTS, utterance_end_ms=None))
    quiet(drive, 1.056, 2.048)
    drive(flushed())
    assert not ends(drive)
