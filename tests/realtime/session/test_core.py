"""The session core alone: event orders, accounting, and random sequences that must stay inside the table."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine import messages
from engine.end_of_turn import numeric_eagerness
from engine.server.speech_track import SpeechTrack
from realtime.errors import CloseCode, IllegalEvent
from realtime.session.core import (
    HANDLERS,
    MAX_BEHIND_SECONDS,
    TRANSITIONS,
    SavedSession,
    Session,
    SessionLimits,
    SessionPhase,
)
from realtime.session.events import (
    Acknowledged,
    Append,
    Clear,
    Commit,
    Committed,
    Completed,
    Configure,
    Delta,
    Drain,
    EagerTurnEnd,
    End,
    EngineSwitched,
    Feed,
    FeedGap,
    FinishEngine,
    FlushEngine,
    FollowTurns,
    Gap,
    Hangup,
    ItemFailed,
    Measured,
    Problem,
    Reanchor,
    Reopen,
    Send,
    SpeechStarted,
    SpeechStopped,
    Tick,
    TimedOut,
    TurnResumed,
)
from realtime.session.settings import INCLUDE_ACKS, INCLUDE_END_OF_TURN, Settings, TurnDetection
from tests.realtime.speech_tracks import judge

RATE = 16_000
FRAME = 512
VAD = Settings()
MANUAL = Settings(turn_detection=None)


def counter() -> Any:
    numbers = itertools.count(1)
    return lambda: f"item_{next(numbers)}"


def session(chosen: Settings = VAD, **limits: Any) -> Session:
    return Session(chosen, RATE, counter(), SessionLimits(**limits))


def append(seconds: float) -> Append:
    samples = round(seconds * RATE)
    return Append(np.zeros(samples, np.float32), samples, seconds * 1000)


def speech(start: float, seconds: float, probability: float) -> messages.Speech:
    count = round(seconds * RATE / FRAME)
    return messages.Speech("s", round(start * RATE / FRAME) * FRAME, FRAME, [probability] * count)


def word(text: str, start: float, end: float) -> messages.Text:
    return messages.Text("s", f" {text}", [messages.Word(text, int(start * RATE), int(end * RATE))], [1])


def flushed() -> messages.Flushed:
    return messages.Flushed("s", 1, 0)


class Driver:
    """Feeds a session and sorts its effects."""

    def __init__(self, core: Session) -> None:
        self.core = core
        # What the engine makes of the probabilities.
        self.track = SpeechTrack(core.turn_rule)
        self.now = 0.0
        self.sent: list[Any] = []
        self.other: list[Any] = []

    def __call__(self, *events: Any) -> list[Any]:
        new = []
        for event in events:
            if isinstance(event, messages.Speech):
                event = judge(self.track, event)
            for effect in self.core.handle(event, self.now):
                self._follow(effect)
                if isinstance(effect, Send):
                    self.sent.append(effect.event)
                    new.append(effect.event)
                elif not isinstance(effect, Measured):
                    self.other.append(effect)
                    new.append(effect)
            self.core.check_integrity()
        return new

    def _follow(self, effect: Any) -> None:
        """What the engine's speech track does with an effect."""
        if isinstance(effect, FollowTurns):
            self.track.change(self.core.turn_rule, self.core.appended)
        elif isinstance(effect, FlushEngine) and effect.ends_speech:
            self.track.restart(self.core.appended)


def kinds(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


SCORED = replace(VAD, turn_detection=TurnDetection(scored=numeric_eagerness(0.8, 0.4, 3000)))


# Bad input first.


def test_event_that_has_no_answer_raises_and_changes_nothing() -> None:
    drive = Driver(session())
    drive(append(1.0), End(), messages.Closed("s", 0))
    assert drive.core.phase is SessionPhase.CLOSED
    for event in (append(1.0), Commit(), Tick(), flushed()):
        with pytest.raises(IllegalEvent):
            drive(event)
    assert (drive.core.phase, drive.core.appended) == (SessionPhase.CLOSED, RATE)


def test_flush_answer_that_nobody_asked_for_is_refused() -> None:
    drive = Driver(session())
    with pytest.raises(IllegalEvent):
        drive(flushed())


@pytest.mark.parametrize("chosen", [VAD, MANUAL])
def test_commit_of_an_empty_buffer_names_what_is_missing_and_echoes_the_event_id(chosen: Settings) -> None:
    drive = Driver(session(chosen))
    assert drive(Commit("e1")) == [
        Problem(
            "input_audio_buffer_commit_empty",
            "Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, "
            "but buffer only has 0.00ms of audio.",
            event_id="e1",
        )
    ]
    problem = drive(append(0.05), Commit("e2"))[-1]
    assert problem.event_id == "e2" and "only has 50.00ms" in problem.message
    assert drive.core.phase is SessionPhase.ACTIVE


def test_second_commit_of_the_same_audio_is_empty() -> None:
    drive = Driver(session(MANUAL))
    drive(append(1.0), Commit("first"))
    assert kinds(drive(Commit("again"))) == ["Problem"]
    assert kinds(drive(flushed())) == ["Completed"]


def test_stream_failure_fails_committed_items_once_and_the_session_goes_on() -> None:
    drive = Driver(session(MANUAL))
    drive(append(1.0), Commit(), append(0.5))
    out = drive(messages.Failed("s", "StreamFailed", "numbers went wrong"))
    assert [event for event in out if isinstance(event, ItemFailed)] == [
        ItemFailed("item_1", "transcription_failed", "numbers went wrong")
    ]
    assert isinstance(drive.other[-1], Reanchor)
    drive(EngineSwitched(drive.other[-1].base), Commit())
    assert kinds(drive(word("still", 0.0, 0.4), flushed()))[-1] == "Completed"


def test_stream_that_keeps_failing_ends_the_session() -> None:
    drive = Driver(session(MANUAL, max_engine_failures=2))
    drive(append(1.0), messages.Failed("s", "x", "no"))
    assert drive.core.phase is SessionPhase.ACTIVE
    assert drive(messages.Failed("s", "x", "no"))[-1] == Hangup(
        CloseCode.INTERNAL, "transcription failed", "stream_failure"
    )


def test_failures_with_text_in_between_do_not_add_up() -> None:
    drive = Driver(session(MANUAL, max_engine_failures=2))
    for second in range(10):
        drive(append(1.0), messages.Failed("s", "x", "no"))
        drive(EngineSwitched(drive.other[-1].base), word("on", second / 10, second / 10 + 0.05))
    assert drive.core.phase is SessionPhase.ACTIVE


def test_dead_engine_fails_what_was_promised_and_hangs_up() -> None:
    drive = Driver(session(MANUAL))
    out = drive(append(1.0), Commit(), messages.Dead("gone"))
    assert kinds(out)[-2:] == ["ItemFailed", "Hangup"] and drive.core.phase is SessionPhase.CLOSED


def test_speech_that_goes_on_when_the_engine_dies_is_ended_and_fails_by_name() -> None:
    drive = Driver(session())
    drive(append(3.0), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99))
    out = drive(messages.Dead("gone"))
    assert kinds(out) == ["SpeechStopped", "Committed", "ItemFailed", "Hangup"]
    assert out[-2].item_id == out[0].item_id


# Turns with speech detection.


def test_turn_by_detection_in_the_order_of_the_protocol() -> None:
    drive = Driver(session())
    drive(append(1.0), speech(0.0, 0.96, 0.01))
    started = drive(append(2.0), speech(0.96, 1.536, 0.99))
    assert kinds(started)[-1] == "SpeechStarted" and started[-1].sample == round(0.96 * RATE) - 4800
    assert drive(word("hello", 1.0, 1.4))[-1] == Delta("item_1", "hello", (drive.sent[-1].words[0],))
    out = drive(append(0.5), speech(2.496, 0.64, 0.01))
    assert kinds(out)[1:] == ["SpeechStopped", "Committed", "FlushEngine"]
    assert out[1].sample == round(2.496 * RATE) + 8000
    out = drive(word("world", 1.5, 2.3), flushed())
    assert [event.text for event in out if isinstance(event, Delta)] == [" world"]
    completed = out[-1]
    assert completed.transcript == "hello world" and completed.item_id == "item_1"
    assert [item.text for item in completed.words] == ["hello", "world"]


def texts(events: list[Any]) -> list[tuple[str, str]]:
    return [(event.item_id, event.text) for event in events if isinstance(event, Delta)]


def test_a_word_that_comes_before_the_report_of_its_audio_is_of_the_turn_that_is_reported() -> None:
    drive = Driver(session())
    drive(append(6.0), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99))
    # The engine delays its reports while it asks the turn detector; this word is of the next turn.
    out = drive(word("hello", 1.0, 1.4), word("again", 4.2, 4.5))
    assert texts(out) == [("item_1", "hello")]
    out = drive(speech(2.496, 0.64, 0.01), speech(3.136, 0.96, 0.01))
    assert kinds(out)[:2] == ["SpeechStopped", "Committed"] and texts(out) == []
    out = drive(flushed(), speech(4.096, 1.024, 0.99))
    assert [event.transcript for event in out if isinstance(event, Completed)] == ["hello"]
    assert texts(out) == [("item_2", "again")]


@pytest.mark.parametrize("way", ["commit", "end", "no detection"])
def test_words_that_wait_for_a_report_are_not_lost_if_the_client_does_not_wait(way: str) -> None:
    drive = Driver(session())
    drive(append(6.0), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99), word("hello", 1.0, 1.4))
    drive(word("again", 4.2, 4.5), word("later", 5.0, 5.2))
    if way == "no detection":
        drive(Configure(MANUAL), Commit(), flushed())
    elif way == "commit":
        drive(Commit(), speech(2.496, 3.488, 0.99), flushed())
    else:
        drive(End(), speech(2.496, 3.488, 0.99), messages.Closed("s", 0))
    assert [event.transcript for event in drive.sent if isinstance(event, Completed)] == ["hello again later"]


def test_words_that_come_before_the_first_report_are_in_their_turns() -> None:
    drive = Driver(session())
    assert texts(drive(append(6.0), word("hello", 1.0, 1.4), word("again", 4.2, 4.5))) == []
    drive(speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99), speech(2.496, 1.6, 0.01))
    drive(flushed(), speech(4.096, 1.024, 0.99))
    assert texts(drive.sent) == [("item_1", "hello"), ("item_2", "again")]


@pytest.mark.parametrize("moves", [False, True])
def test_the_first_part_of_a_word_that_waits_for_a_report_is_sent_with_it(moves: bool) -> None:
    drive = Driver(session())
    drive(append(6.0), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99))
    assert texts(drive(messages.Text("s", " ag", [], [1], sample=4 * RATE))) == []
    if moves:
        saved = msgspec.msgpack.encode(drive.core.save())
        drive.core = session()
        drive.core.load(msgspec.msgpack.decode(saved, type=SavedSession), 0.0)
    # It is of the next turn, but in this report the first one has not ended yet.
    assert texts(drive(speech(2.496, 0.128, 0.01))) == []
    assert texts(drive(speech(2.624, 1.472, 0.99))) == [("item_1", "ag")]


@pytest.mark.parametrize("seconds", [2.9, 6.0])
def test_a_commit_takes_words_that_wait_also_if_its_flush_is_answered_before_their_report(seconds: float) -> None:
    """After 2.9 s the commit is answered at once, after 6 s with the flush: the turn may have ended before it."""
    drive = Driver(session())
    drive(append(seconds), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99), word("hello", 1.0, 1.4))
    drive(word("again", 2.6, 2.8), Commit(), flushed())
    assert [event.transcript for event in drive.sent if isinstance(event, Completed)] == ["hello again"]


def test_a_pause_is_judged_by_words_that_came_before_its_report() -> None:
    """Words and the report of their audio may come in any order: the turn ends at the same sample."""
    chosen = Settings(turn_detection=TurnDetection(semantic=True, eagerness="high"))
    ends = []
    for late in (False, True):
        drive = Driver(session(chosen))
        drive(append(8.0), speech(0.0, 0.96, 0.01), speech(0.96, 0.512, 0.99))
        said = [word("I", 1.0, 1.3), word("think.", 2.0, 2.4)]
        reports = [speech(1.472, 1.024, 0.99), speech(2.496, 4.992, 0.01)]
        if late:
            whole = structs.replace(reports[0], probabilities=reports[0].probabilities + reports[1].probabilities)
            drive(*said, whole)
        else:
            drive(reports[0], *said, reports[1])
        ends.append([event.sample for event in drive.sent if isinstance(event, SpeechStopped)])
    assert ends[0] == ends[1] != []


def test_clear_drops_words_that_wait_for_a_report() -> None:
    drive = Driver(session())
    drive(append(6.0), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99), word("hello", 1.0, 1.4))
    drive(word("again", 4.2, 4.5), Clear(), word("later", 5.0, 5.2), flushed(), speech(2.496, 3.488, 0.99))
    drive(append(2.0), speech(5.984, 2.016, 0.99), word("new", 6.5, 7.0))
    assert texts(drive.sent) == [("item_1", "hello"), ("item_2", "new")]


def test_a_turn_is_flushed_although_the_next_one_begins_in_the_same_message() -> None:
    drive = Driver(session())
    drive(append(3.5), speech(0.0, 0.96, 0.01), speech(0.96, 1.536, 0.99), word("hello", 1.0, 1.4))
    quiet, again = speech(2.496, 0.512, 0.01), speech(3.008, 0.096, 0.99)
    quiet.probabilities += again.probabilities
    out = drive(quiet)
    assert kinds(out) == ["SpeechStopped", "Committed", "FlushEngine", "SpeechStarted"]
    assert out[2].pause == out[0].sample
    assert [event.transcript for event in drive(flushed()) if isinstance(event, Completed)] == ["hello"]
    assert drive.core.turns.current is not None, "the next turn goes on"


IDLE = replace(VAD, turn_detection=TurnDetection(idle_timeout_ms=2000))


def test_silence_that_lasts_too_long_becomes_an_empty_item_again_and_again() -> None:
    drive = Driver(session(IDLE))
    drive(append(4.5), speech(0.0, 1.984, 0.01))
    assert not drive.sent
    out = drive(speech(1.984, 2.4, 0.01), flushed())
    assert kinds(out) == ["TimedOut", "Committed", "TimedOut", "Committed", "FlushEngine", "Completed", "Completed"]
    first, second = (event for event in out if isinstance(event, TimedOut))
    assert first.start == 0 and 0 <= first.end - 2 * RATE < FRAME and second.start == first.end
    assert [event.transcript for event in out if isinstance(event, Completed)] == ["", ""]


def test_idle_time_begins_at_the_end_of_a_turn_and_speech_stops_it() -> None:
    drive = Driver(session(IDLE))
    drive(append(6.0), speech(0.0, 1.92, 0.01), speech(1.92, 0.96, 0.99), speech(2.88, 0.64, 0.01))
    assert kinds(drive.sent) == ["SpeechStarted", "SpeechStopped", "Committed"]
    stopped = drive.sent[1].sample
    drive(speech(3.52, 1.728, 0.01))
    assert not any(isinstance(event, TimedOut) for event in drive.sent)
    drive(speech(5.248, 0.256, 0.01))
    (timed_out,) = (event for event in drive.sent if isinstance(event, TimedOut))
    assert timed_out.start == stopped and timed_out.item_id == "item_2"


def test_a_click_puts_the_timeout_off_until_it_was_no_speech() -> None:
    drive = Driver(session(IDLE))
    drive(append(6.0), speech(0.0, 1.984, 0.01), speech(1.984, 0.032, 0.99))
    assert not drive.sent
    assert kinds(drive(speech(2.016, 0.32, 0.01)))[:2] == ["TimedOut", "Committed"]


def test_words_of_the_next_turn_wait_until_the_first_is_completed() -> None:
    drive = Driver(session())
    drive(append(6.0), speech(0.0, 1.984, 0.99), speech(1.984, 1.024, 0.01))
    drive(speech(3.008, 1.984, 0.99))
    assert kinds(drive.sent) == ["SpeechStarted", "SpeechStopped", "Committed", "SpeechStarted"]
    # No flush was asked for: audio of the second turn is with the engine already, and speech continues.
    assert not any(isinstance(effect, FlushEngine) for effect in drive.other)
    assert drive(word("one", 0.2, 0.6))[-1].item_id == "item_1"
    # A word from behind the end of the first turn shows that nothing more will come for it.
    out = drive(word("two", 2.7, 3.3), word("three", 3.4, 4.2))
    assert kinds(out) == ["Completed", "Delta", "Delta"]
    assert out[0].transcript == "one" and [event.text for event in out[1:]] == ["two", " three"]


def test_first_word_of_a_turn_whose_time_is_a_little_early_is_not_the_last_of_the_turn_before() -> None:
    drive = Driver(session())
    # Half a second of silence ends the turn at 2.484 s; the next one begins at once.
    drive(append(4.0), speech(0.0, 1.984, 0.99), speech(1.984, 0.512, 0.01), speech(2.496, 1.024, 0.99))
    out = drive(word("late", 1.8, 2.5), word("early", 2.3, 2.6), flushed())
    assert [(event.item_id, event.text) for event in out if isinstance(event, Delta)] == [
        ("item_1", "late"),
        ("item_2", "early"),
    ]


def test_text_of_later_turns_is_held_while_an_earlier_one_waits_for_its_flush() -> None:
    drive = Driver(session())
    drive(append(3.0), speech(0.0, 1.984, 0.99), speech(1.984, 1.016, 0.01))
    assert isinstance(drive.other[-1], FlushEngine)
    drive(append(2.0), speech(3.008, 1.984, 0.99))
    # A quick engine that hears on before it answers the flush.
    assert drive(word("next", 3.1, 3.5)) == []
    out = drive(word("last", 1.5, 1.9), flushed())
    assert kinds(out) == ["Delta", "Completed", "Delta"]
    assert [event.item_id for event in out] == ["item_1", "item_1", "item_2"]


def test_commit_behind_unheard_audio_waits_and_later_requests_queue_behind_it() -> None:
    drive = Driver(session())
    drive(append(1.0))
    assert kinds(drive(Commit("c1"))) == ["FlushEngine"] and drive.core.phase is SessionPhase.COMMITTING
    assert kinds(drive(Clear())) == ["FlushEngine"]
    # Speech behind the waiting commit must not open a turn before it is answered.
    drive(append(1.0))
    out = drive(speech(0.0, 1.92, 0.99))
    assert kinds(out) == ["SpeechStarted"]
    out = drive(word("first", 0.1, 0.5), flushed())
    assert kinds(out) == ["Delta", "SpeechStopped", "Committed", "Cleared", "Completed", "SpeechStarted"]
    assert out[-1].item_id == "item_2" and drive.core.phase is SessionPhase.ACTIVE
    assert drive(flushed()) == []


@pytest.mark.parametrize("chosen", [VAD, Settings(turn_detection=TurnDetection(semantic=True))])
def test_what_a_commit_ends_does_not_depend_on_how_far_detection_has_come(chosen: Settings) -> None:
    def told(is_behind: bool) -> list[Any]:
        drive = Driver(session(chosen))
        spoken, pause, commit = speech(0.0, 1.984, 0.99), speech(1.984, 4.096, 0.01), Commit("c1")
        drive(append(6.1), spoken, word("spoken.", 1.0, 1.9), *((commit, pause) if is_behind else (pause, commit)))
        drive(word("behind", 5.6, 5.9), *(flushed() for _ in drive.core.marks))
        return [event for event in drive.sent if isinstance(event, Committed | Completed | Problem)]

    calm = told(is_behind=False)
    assert kinds(calm) == ["Committed", "Problem", "Completed"] and calm[-1].transcript == "spoken."
    assert told(is_behind=True) == calm


def test_commit_is_answered_at_once_if_the_open_turn_cannot_have_ended_since() -> None:
    drive = Driver(session())
    drive(append(2.4), speech(0.0, 1.984, 0.99))
    assert kinds(drive(Commit())) == ["SpeechStopped", "Committed", "FlushEngine"]


def test_busy_engine_is_flushed_once_the_pause_is_long() -> None:
    drive = Driver(session())
    drive(append(6.0), speech(0.0, 1.984, 0.99))
    assert kinds(drive(speech(1.984, 1.024, 0.01))) == ["SpeechStopped", "Committed"]
    assert kinds(drive(speech(3.008, 0.512, 0.01))) == ["FlushEngine"]


def test_commit_over_silence_is_answered_as_empty_once_detection_has_seen_it() -> None:
    drive = Driver(session())
    drive(append(1.0), Commit("c1"), speech(0.0, 0.992, 0.01))
    assert drive(flushed()) == [drive.sent[-1]] and drive.sent[-1].event_id == "c1"
    assert drive.core.idle


def test_clear_inside_a_turn_drops_its_text_and_keeps_committed_items() -> None:
    drive = Driver(session(MANUAL))
    drive(append(1.0), Commit(), append(1.0))
    assert kinds(drive(Clear())) == ["FlushEngine", "Cleared"]
    out = drive(word("kept", 0.1, 0.5), flushed())
    assert kinds(out) == ["Delta", "Completed"]
    assert drive(word("dropped", 1.1, 1.5), flushed()) == []
    out = drive(append(1.0), word("new", 2.1, 2.5), Commit(), flushed())
    assert [e.transcript for e in out if isinstance(e, Completed)] == ["new"]


def test_cleared_vad_turn_balances_its_speech_events() -> None:
    drive = Driver(session())
    drive(append(1.0), speech(0.0, 0.96, 0.99))
    assert kinds(drive(Clear())) == ["SpeechStopped", "FlushEngine", "Cleared"]


def test_silent_turn_completes_with_empty_text() -> None:
    drive = Driver(session(MANUAL))
    out = drive(append(1.0), Commit(), flushed())
    assert out[-1].transcript == "" and not any(isinstance(event, Delta) for event in out)


def test_turn_detection_switched_off_and_on_keeps_buffered_audio() -> None:
    drive = Driver(session())
    drive(append(1.0), Configure(MANUAL))
    out = drive(Commit(), word("early", 0.2, 0.6), flushed())
    assert [event.transcript for event in out if isinstance(event, Completed)] == ["early"]
    drive(append(1.0), Configure(VAD), speech(0.0, 2.0, 0.99))
    assert kinds(drive(Commit()))[:2] == ["SpeechStopped", "Committed"]


def test_options_that_change_in_the_middle_reopen_the_stream_once() -> None:
    drive = Driver(session(MANUAL))
    changed = replace(MANUAL, language="de")
    assert kinds(drive(Configure(changed))) == ["SessionUpdated"]
    assert kinds(drive(append(1.0), Configure(replace(MANUAL, language="fr")))) == ["Feed", "Reopen", "SessionUpdated"]
    assert kinds(drive(Configure(replace(MANUAL, language="fr", include=("x",))))) == ["SessionUpdated"]


def test_the_engine_is_told_when_turns_end_by_another_rule() -> None:
    drive = Driver(session(MANUAL))
    assert kinds(drive(Configure(VAD))) == ["SessionUpdated"]
    patient = replace(VAD, turn_detection=TurnDetection(silence_duration_ms=1500))
    assert kinds(drive(append(1.0), Configure(patient))) == ["Feed", "FollowTurns", "SessionUpdated"]
    assert kinds(drive(Configure(replace(patient, include=("x",))))) == ["SessionUpdated"]
    assert kinds(drive(Configure(replace(MANUAL, language="fr")))) == ["Reopen", "SessionUpdated"]


def test_the_flush_of_a_turn_says_where_the_turn_ended() -> None:
    drive = Driver(session())
    (flush,) = [
        effect
        for effect in drive(append(2.2), speech(0.0, 1.024, 0.99), speech(1.024, 0.64, 0.01))
        if isinstance(effect, FlushEngine)
    ]
    assert flush.pause == (1.024 + 0.5) * RATE


def test_text_outside_any_turn_joins_the_turn_it_was_spoken_just_before() -> None:
    drive = Driver(session())
    drive(append(10.0), speech(0.0, 4.992, 0.01), word("noise", 0.5, 1.0), word("Well", 4.6, 4.9))
    drive(speech(4.992, 0.512, 0.99))
    assert drive.sent[-1] == Delta("item_1", "Well", drive.sent[-1].words)


def test_loose_end_of_a_word_goes_out_at_once_and_its_word_follows_it() -> None:
    drive = Driver(session(MANUAL))
    drive(append(2.0))
    assert drive(messages.Text("s", " hel", [], [1]))[0].text == "hel"
    rest = messages.Text("s", "lo the", [messages.Word("hello", 0, 8000)], [2])
    assert drive(rest)[0].text == "lo the"
    out = drive(Commit(), messages.Text("s", "re", [], [3]), flushed())
    assert out[-1].transcript == "hello there"
    assert "".join(event.text for event in drive.sent if isinstance(event, Delta)) == "hello there"


def test_no_event_for_an_empty_delta() -> None:
    drive = Driver(session(MANUAL))
    assert drive(append(1.0), messages.Text("s", "", [], [0, 0], 5))[1:] == []


def test_vllm_settings_keep_the_leading_space_and_allow_empty_utterances() -> None:
    drive = Driver(session(replace(MANUAL, trim_start=False, minimum_commit_ms=0)))
    assert drive(Commit(), flushed())[-1].transcript == ""
    out = drive(append(1.0), word("hi", 0.1, 0.4), Commit(), flushed())
    assert out[-1].transcript == " hi"


# The stall guard, draining, acknowledgements.


def test_speech_without_text_reanchors_from_kept_audio_and_backs_off() -> None:
    drive = Driver(session(MANUAL, stall_seconds=2.0, keep_seconds=10.0))
    drive(append(1.0), word("start", 0.1, 0.6))
    drive(append(4.0), speech(0.0, 4.992, 0.99))
    assert drive(Tick()) == []
    drive.now = 2.5
    anchor = drive(Tick())[0]
    # From the end of the last word on.
    assert isinstance(anchor, Reanchor) and anchor.base == 9600
    assert sum(len(audio) for audio in anchor.replay if not isinstance(audio, int)) == 5 * RATE - 9600
    # Frames the new stream shows again are not heard twice, and the next firing takes twice as long.
    drive(EngineSwitched(anchor.base), speech(0.0, 4.384, 0.99))
    drive.now = 5.0
    drive(append(3.0), speech(4.384, 2.976, 0.99))
    assert drive(Tick()) == []
    drive.now = 9.0
    drive(append(2.0), speech(7.36, 1.984, 0.99))
    assert kinds(drive(Tick())) == ["Reanchor"]


def test_no_stall_while_an_engine_is_replaced_and_hears_what_it_missed() -> None:
    drive = Driver(session(MANUAL, stall_seconds=8.0))
    drive(append(1.0), word("start", 0.1, 0.6), speech(0.0, 0.992, 0.99))
    # The engine is lost for ten seconds, in which the client speaks on.
    for second in range(1, 11):
        drive.now = float(second)
        drive(append(1.0))
        assert drive(Tick()) == []
    # The next one hears all of it at once, before it has decoded it.
    drive.now = 10.5
    drive(speech(0.992, 9.984, 0.99))
    assert drive(Tick()) == []
    drive.now = 12.0
    assert drive(Tick()) == []
    drive.now = 18.5
    assert kinds(drive(Tick())) == ["Reanchor"], "it has had the time to decode it"


def test_no_stall_while_the_engine_has_heard_the_speech_and_not_computed_it() -> None:
    """After the loss of an engine, speech is detected as soon as its audio is there, and computed in its turn."""
    drive = Driver(session(MANUAL, stall_seconds=8.0))
    drive(append(1.0), word("start", 0.1, 0.6), speech(0.0, 0.992, 0.99))
    drive(append(20.0), speech(0.992, 19.968, 0.99))
    for second in range(1, 30):
        drive.now = float(second)
        assert drive(Tick(behind_s=20.0 - second / 2)) == []
    drive.now = 36.0
    assert drive(Tick(behind_s=1.0)) == [], "it had no time to compute it"
    drive.now = 37.5
    assert kinds(drive(Tick(behind_s=1.0))) == ["Reanchor"]


def test_an_engine_that_never_computes_the_speech_has_stalled() -> None:
    drive = Driver(session(MANUAL, stall_seconds=8.0))
    drive(append(9.0), speech(0.0, 8.992, 0.99))
    drive.now = 9.0
    assert kinds(drive(Tick(behind_s=MAX_BEHIND_SECONDS + 1))) == ["Reanchor"]


def test_reanchored_stream_is_asked_again_for_what_the_old_one_owed() -> None:
    drive = Driver(session(MANUAL, stall_seconds=1.0))
    drive(append(4.0), speech(0.0, 4.0, 0.99), Commit())
    drive.now = 2.0
    assert kinds(drive(Tick())) == ["Reanchor", "FlushEngine"]
    out = drive(EngineSwitched(0), word("found", 1.0, 1.5), flushed())
    assert kinds(out) == ["Delta", "Completed"]


def test_words_after_a_reanchor_have_session_times() -> None:
    drive = Driver(session(MANUAL, stall_seconds=1.0, keep_seconds=2.0))
    for _ in range(50):
        drive(append(0.1))
    drive(speech(0.0, 4.992, 0.99))
    drive.now = 2.0
    anchor = drive(Tick())[0]
    assert anchor.base == 3 * RATE
    out = drive(EngineSwitched(anchor.base), word("late", 0.5, 1.0))
    assert out[0].words[0].start == 3.5 * RATE


def test_kept_audio_is_bounded_and_silence_is_not_kept() -> None:
    core = session(VAD, keep_seconds=5.0)
    drive = Driver(core)
    for second in range(60):
        drive(append(0.992), speech(second * 0.992, 0.992, 0.01))
        assert core.stall.kept_samples <= 3 * RATE
    for second in range(60):
        drive(append(0.992), speech((60 + second) * 0.992, 0.992, 0.99))
        assert core.stall.kept_samples <= 6 * RATE


def test_drain_lets_the_turn_finish_then_closes_with_restart() -> None:
    drive = Driver(session())
    drive(append(1.0), speech(0.0, 0.992, 0.99))
    assert kinds(drive(Drain(deadline=10.0))) == ["Closing"]
    drive(append(1.0), speech(0.992, 0.992, 0.01))
    assert drive(flushed())[-1] == Hangup(CloseCode.RESTART, "the server is restarting", "drain")


def test_drain_deadline_commits_what_is_open() -> None:
    drive = Driver(session(MANUAL))
    drive(append(1.0), Drain(deadline=5.0))
    assert drive(Tick()) == []
    drive.now = 5.0
    assert kinds(drive(Tick())) == ["FinishEngine"]
    out = drive(word("bye", 0.1, 0.5), messages.Closed("s", 0))
    assert kinds(out) == ["Delta", "Committed", "Completed", "Ended", "Hangup"] and out[-1].code == CloseCode.RESTART


def test_drain_of_an_idle_session_closes_at_once() -> None:
    drive = Driver(session())
    assert kinds(drive(Drain(5.0))) == ["Closing", "Hangup"]


def test_acknowledgements_only_when_asked_for_and_not_too_often() -> None:
    drive = Driver(session(replace(MANUAL, include=(INCLUDE_ACKS,))))
    drive.now = 1.0
    assert drive(append(0.5))[-1] == Acknowledged(8000)
    assert drive(append(0.5))[1:] == []
    drive.now = 1.3
    assert drive(Tick()) == [Acknowledged(16000)]
    assert drive(Tick()) == []


def test_gap_counts_like_audio_and_is_not_fed_as_samples() -> None:
    drive = Driver(session(MANUAL))
    assert kinds(drive(Gap(RATE, RATE, 1000.0))) == ["FeedGap"]
    assert kinds(drive(Commit()))[0] == "Committed"


def test_a_day_of_turns_keeps_no_history() -> None:
    core = session(MANUAL)
    drive = Driver(core)
    for number in range(2000):
        drive(append(0.5), word(f"w{number}", number / 2, number / 2 + 0.3), Commit(), flushed())
        drive.sent.clear()
        drive.other.clear()
    assert not core.turns.ended and core.turns.current is None and not core.marks
    assert core.stall.kept_samples < RATE


# Random sequences.


# Turns that end by a score.


def spoken(drive: Driver, start: float, seconds: float, *words: messages.Text) -> list[Any]:
    """Speech with words at `start`, and half a second of silence after it."""
    return drive(append(seconds + 0.512), speech(start, seconds, 0.99), *words, speech(start + seconds, 0.512, 0.01))


def test_a_probable_end_is_announced_when_its_text_has_arrived_and_speech_takes_it_back() -> None:
    drive = Driver(session(SCORED))
    assert kinds(spoken(drive, 0.0, 1.024, word("one", 0.1, 0.5)))[-1] == "FlushEngine"
    assert kinds(drive(word("two.", 0.6, 0.9))) == ["Delta"]
    (early,) = drive(flushed())
    assert isinstance(early, EagerTurnEnd) and early.item_id == "item_1"
    assert early.confidence == pytest.approx(0.4, abs=0.01) and 1.024 * RATE < early.sample <= drive.core.appended
    (resumed,) = [event for event in spoken(drive, 1.536, 1.024) if isinstance(event, TurnResumed)]
    assert resumed.item_id == "item_1" and 1.536 * RATE <= resumed.sample <= 1.568 * RATE
    assert kinds(drive(word("three.", 1.6, 2.0), flushed())) == ["Delta", "EagerTurnEnd"]
    ended = drive(append(3.0), speech(3.072, 2.56, 0.01))[1:]
    assert kinds(ended) == ["SpeechStopped", "Committed", "FlushEngine"] and ended[0].confidence > 0.79
    (done,) = drive(flushed())
    assert (done.transcript, done.confidence, done.timeout) == ("one two. three.", ended[0].confidence, False)


def test_speech_before_the_text_has_arrived_drops_the_probable_end_without_a_word() -> None:
    drive = Driver(session(SCORED))
    spoken(drive, 0.0, 1.024, word("one.", 0.1, 0.5))
    assert kinds(spoken(drive, 1.536, 1.024)) == ["Feed", "FlushEngine"]
    # The answer to the first flush comes after speech has continued.
    assert drive(flushed()) == []
    assert kinds(drive(flushed())) == ["EagerTurnEnd"]


@pytest.mark.parametrize(("event", "answer"), [(Clear(), "Cleared"), (Commit("e"), "Committed")])
def test_a_turn_that_the_client_ends_has_no_probable_end(event: Any, answer: str) -> None:
    drive = Driver(session(SCORED))
    spoken(drive, 0.0, 1.024, word("one.", 0.1, 0.5))
    drive(event)
    while drive.core.marks:
        drive(flushed())
    assert answer in kinds(drive.sent) and "EagerTurnEnd" not in kinds(drive.sent)


def test_the_length_of_the_silence_ends_a_turn_that_no_word_ends() -> None:
    drive = Driver(session(replace(VAD, turn_detection=TurnDetection(scored=numeric_eagerness(1.0, None, 2000)))))
    spoken(drive, 0.0, 1.024, word("and", 0.1, 0.5))
    drive(flushed())
    drive(append(3.0), speech(1.536, 2.56, 0.01))
    drive(flushed())
    done = drive.sent[-1]
    assert isinstance(done, Completed) and done.timeout and done.end == round(3.024 * RATE)
    assert "EagerTurnEnd" not in kinds(drive.sent)


class Engine:
    """Answers in order, whenever it is asked to move; words are one per second of audio it was fed."""

    def __init__(self, rule: messages.TurnRule | None) -> None:
        self.track = SpeechTrack(rule)
        self.base = 0
        self.fed = 0
        self.heard = 0
        self.said = 0
        self.queue: deque[Any] = deque()

    def take(self, effect: Any, core: Session) -> None:
        match effect:
            case Feed(samples):
                self.fed += len(samples)
                self.queue.append("audio")
            case FeedGap(samples):
                self.fed += samples
                self.queue.append("audio")
            case FlushEngine(_, ends_speech):
                self.queue.append(("flush", self.fed, ends_speech))
            case FollowTurns():
                self.queue.append(("turns", self.fed, core.turn_rule))
            case FinishEngine():
                self.queue.append(("finish", self.fed))
            case Reopen():
                self.queue.append(("switch", self.fed, core))
            case Reanchor(base, _):
                self.queue.clear()
                self.queue.append(("switch", base, core))

    def move(self, loud: bool) -> list[Any]:
        """What comes next."""
        if not self.queue:
            return []
        step = self.queue.popleft()
        if step == "audio":
            return self._hear(loud) + self._say(self.fed - self.base - RATE // 2)
        kind, at, *rest = step
        if kind == "turns":
            self.track.change(rest[0], at - self.base)
            return []
        if kind == "flush":
            if rest[0]:
                self.track.restart(at - self.base)
            return self._hear(loud) + [*self._say(at - self.base), messages.Flushed("s", 0, at)]
        if kind == "finish":
            return [*self._say(at - self.base), messages.Closed("s", at)]
        self.base, self.heard, self.said = at, 0, 0
        self.track = SpeechTrack(rest[0].turn_rule)
        self.track.continue_from(rest[0].speech_track.shifted(-at))
        return [EngineSwitched(at)]

    def _hear(self, loud: bool) -> list[Any]:
        frames = (self.fed - self.base - self.heard) // FRAME
        if frames <= 0:
            return []
        start, self.heard = self.heard, self.heard + frames * FRAME
        return [judge(self.track, messages.Speech("s", start, FRAME, [0.99 if loud else 0.01] * frames))]

    def _say(self, until: int) -> list[Any]:
        out = []
        while (self.said + 1) * RATE <= until:
            start = self.said * RATE
            self.said += 1
            out.append(messages.Text("s", f" w{self.said}", [messages.Word(f"w{self.said}", start, start + RATE)], [1]))
        return out


SOME_SETTINGS = (
    VAD,
    IDLE,
    MANUAL,
    replace(
        VAD,
        turn_detection=TurnDetection(semantic=True, eagerness="high"),
        include=(INCLUDE_END_OF_TURN,),
    ),
    replace(VAD, turn_detection=TurnDetection(scored=numeric_eagerness(0.9, 0.3, 3000))),
    replace(VAD, utterance_end_ms=1000),
    replace(MANUAL, language="de"),
    replace(MANUAL, trim_start=False, minimum_commit_ms=0),
)
actions = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3 * RATE)),
    st.tuples(st.just("gap"), st.integers(0, 3 * RATE)),
    st.tuples(st.just("move"), st.booleans()),
    st.tuples(st.just("move"), st.booleans()),
    st.tuples(st.just("move"), st.booleans()),
    st.tuples(st.just("commit"), st.none()),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("configure"), st.sampled_from(SOME_SETTINGS)),
    # In sixteenths: a clock that shows a thousand seconds more shows exactly as much more.
    st.tuples(st.just("tick"), st.integers(0, 64).map(lambda sixteenths: sixteenths / 16)),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("drain"), st.none()),
)


class World:
    """A session, an engine that answers it, and everything that must hold between them."""

    def __init__(self, chosen: Settings) -> None:
        self.core = session(chosen, stall_seconds=3.0, max_engine_failures=10_000)
        self.engine = Engine(self.core.turn_rule)
        self.now = 0.0
        self.sent_samples = 0
        self.fed: list[tuple[int, int]] = []
        self.position = 0
        self.committed: list[str] = []
        self.finished: list[str] = []
        self.text: dict[str, str] = {}
        self.open_speech: str | None = None
        self.eager: str | None = None

    def do(self, event: Any) -> None:
        if self.core.phase is SessionPhase.CLOSED:
            return
        assert type(event) in HANDLERS[self.core.phase]
        before = self.core.phase
        for effect in self.core.handle(event, self.now):
            self.engine.take(effect, self.core)
            if isinstance(effect, Feed | FeedGap):
                self.position += len(effect.samples) if isinstance(effect, Feed) else effect.samples
            elif isinstance(effect, Send):
                self.check_sent(effect.event)
        assert (
            before is self.core.phase
            or self.core.phase in TRANSITIONS[before]
            or self.core.phase is SessionPhase.CLOSED
        )
        self.core.check_integrity()

    def check_sent(self, event: Any) -> None:
        match event:
            case SpeechStarted(item_id, _):
                assert self.open_speech is None
                self.open_speech = item_id
            case EagerTurnEnd(item_id, sample, confidence):
                assert self.open_speech == item_id and self.eager is None
                assert sample <= self.core.appended and 0.3 - 1e-3 <= confidence < 1
                self.eager = item_id
            case TurnResumed(item_id, _):
                assert self.open_speech == self.eager == item_id
                self.eager = None
            case SpeechStopped(item_id, _):
                assert self.open_speech == item_id
                self.open_speech = self.eager = None
            case Committed(item_id, previous):
                assert previous == (self.committed[-1] if self.committed else None)
                assert item_id not in self.committed
                self.committed.append(item_id)
            case Delta(item_id, text, _):
                assert text and item_id not in self.finished
                unfinished = [item for item in self.committed if item not in self.finished]
                assert not unfinished or unfinished[0] == item_id, "items must be serialised"
                self.text[item_id] = self.text.get(item_id, "") + text
            case Completed(item_id=item_id, transcript=transcript):
                assert item_id in self.committed and item_id not in self.finished
                assert transcript == self.text.get(item_id, "")
                self.finished.append(item_id)
            case ItemFailed(item_id, _, _):
                assert item_id in self.committed and item_id not in self.finished
                self.finished.append(item_id)

    def act(self, kind: str, value: Any) -> None:
        match kind:
            case "append" | "gap":
                if self.core.phase in (SessionPhase.ACTIVE, SessionPhase.COMMITTING):
                    self.sent_samples += value
                if kind == "gap":
                    self.do(Gap(value, value, value * 1000 / RATE))
                else:
                    self.do(Append(np.zeros(value, np.float32), value, value * 1000 / RATE))
            case "move":
                for output in self.engine.move(value):
                    self.do(output)
            case "commit":
                self.do(Commit("e"))
            case "clear":
                self.do(Clear())
            case "configure":
                self.do(Configure(value))
            case "tick":
                self.now += value
                self.do(Tick())
            case "fail":
                self.do(messages.Failed("s", "x", "broken"))
            case "drain":
                self.do(Drain(self.now + 2.0))


def finish(world: World) -> None:
    """End the session, let the engine run out, and check what must hold over its whole life."""
    world.do(End())
    for _ in range(2000):
        if world.core.phase is SessionPhase.CLOSED:
            break
        world.act("move", False)
    assert world.core.phase is SessionPhase.CLOSED
    # Each appended sample went to the engine once, in order.
    assert world.position == world.sent_samples == world.core.appended
    # Exactly one completed or failed for each committed item.
    assert sorted(world.finished) == sorted(world.committed)
    assert world.open_speech is None


@given(st.sampled_from(SOME_SETTINGS), st.lists(actions, max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_sequence_stays_inside_the_table_and_accounts_for_every_sample(
    chosen: Settings, steps: list[tuple[str, Any]]
) -> None:
    world = World(chosen)
    for kind, value in steps:
        world.act(kind, value)
    finish(world)


@pytest.mark.parametrize("chosen", SOME_SETTINGS)
def test_long_random_sessions_keep_every_promise(chosen: Settings) -> None:
    """Longer lives than hypothesis likes to draw, with speech that comes and goes as people talk."""
    for seed in range(60):
        dice = random.Random(seed)
        world = World(chosen)
        loud = False
        for _ in range(150):
            if dice.random() < 0.2:
                loud = not loud
            kind = dice.choices(
                ["append", "gap", "move", "commit", "clear", "tick", "configure", "fail", "drain"],
                [30, 3, 45, 8, 4, 6, 2, 1, 0.1],
            )[0]
            value: Any = loud
            if kind in ("append", "gap"):
                value = dice.choice([0, 100, 1600, 8000, 20_000])
            elif kind == "tick":
                value = dice.random()
            elif kind == "configure":
                value = dice.choice(SOME_SETTINGS)
            world.act(kind, value)
        finish(world)
