"""Words get the labels of their samples; a final waits a moment for them, and never changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from engine import messages
from engine.options import Options
from engine.spec import ModelSpec
from realtime.errors import ClientFault
from realtime.session.core import SavedSession, Session
from realtime.session.events import Commit, Completed, Configure, Delta, End, Tick, TimedWord, WordsLabelled
from realtime.session.settings import INCLUDE_SPEAKERS, Settings
from realtime.session.speakers import SpeakerTimeline, letter_name, shown_name
from realtime.session.turns import LABELS_SECONDS, MAX_FINAL_WORDS, REVISION_SECONDS
from realtime.session.words import spoken_lines, subtitles, to_srt, to_vtt, vtt_blocks
from tests.realtime.session.test_core import RATE, Driver, append, counter, flushed, word

LABELLED = Settings(turn_detection=None, speakers=True)


Span = tuple[float, float, int]


def labels(*spans: Span, guess: tuple[Span, ...] = ()) -> messages.Labels:
    decided, guessed = (
        [(int(start * RATE), int(end * RATE), who, 0.9) for start, end, who in part] for part in (spans, guess)
    )
    return messages.Labels("s", decided, guessed)


def turn() -> Driver:
    """A committed turn with two words, whose text is complete."""
    drive = Driver(Session(LABELLED, RATE, counter()))
    drive(append(3.0), word("good", 0.2, 0.6), word("morning", 1.2, 1.8), Commit())
    return drive


def completed(events: list[Any]) -> list[Completed]:
    return [event for event in events if isinstance(event, Completed)]


def speakers(events: list[Any]) -> list[int | None]:
    return [one.speaker for event in completed(events) for one in event.words]


def test_a_final_with_known_labels_does_not_wait() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0), (1.0, 2.0, 1)))
    assert speakers(drive(flushed())) == [0, 1]


def test_a_final_waits_for_its_last_labels() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0), guess=((1.0, 2.0, 0),)))
    assert not completed(drive(flushed()))
    assert not completed(drive(Tick()))
    assert speakers(drive(labels((1.0, 2.0, 1)))) == [0, 1]


def test_a_final_takes_the_best_guess_when_labels_are_late() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0), guess=((1.0, 2.0, 1),)), flushed())
    drive.now = LABELS_SECONDS - 0.01
    assert not completed(drive(Tick()))
    assert drive.core.final_due == LABELS_SECONDS
    drive.now = LABELS_SECONDS
    done = drive(Tick())
    assert speakers(done) == [0, 1]
    # Labels that come later change nothing.
    assert not completed(drive(labels((1.0, 2.0, 0))))
    assert drive.core.final_due is None


def test_a_final_waits_longer_for_an_engine_that_took_the_stream_over() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0)), messages.Labels("s", [], is_behind=True), flushed())
    drive.now = 10 * LABELS_SECONDS
    assert not completed(drive(Tick())), "no guess is known of the second word"
    assert speakers(drive(labels((1.0, 2.0, 1)))) == [0, 1]


def test_a_final_does_not_wait_for_ever_for_an_engine_that_took_the_stream_over() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0)), messages.Labels("s", [], is_behind=True), flushed())
    assert drive.core.final_due == REVISION_SECONDS
    drive.now = REVISION_SECONDS
    assert speakers(drive(Tick())) == [0, 0]


def test_a_final_without_any_label_is_sent_all_the_same() -> None:
    drive = turn()
    drive(flushed())
    drive.now = LABELS_SECONDS
    assert speakers(drive(Tick())) == [None, None]


def test_words_are_told_at_once_and_their_labels_as_soon_as_they_are_known() -> None:
    drive = Driver(Session(LABELLED, RATE, counter()))
    told = drive(append(3.0), word("good", 0.2, 0.6))
    assert [one.speaker for event in told if isinstance(event, Delta) for one in event.words] == [None]
    (known,) = drive(labels((0.0, 1.0, 1)))
    assert isinstance(known, WordsLabelled) and [one.speaker for one in known.words] == [1]
    assert not drive(labels())
    later = drive(word("day", 0.6, 0.9))
    assert [one.speaker for event in later if isinstance(event, Delta) for one in event.words] == [1]


def test_the_next_turn_waits_behind_one_that_waits_for_labels() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0)), flushed())
    drive(append(2.0))
    assert not drive(word("next", 3.2, 3.6))
    sent = drive(labels((1.0, 2.0, 1)))
    assert [type(event).__name__ for event in sent] == ["Completed", "Delta"]
    assert [event.item_id for event in sent] == ["item_1", "item_2"]


def test_the_end_of_a_session_and_a_failed_stream_do_not_wait() -> None:
    drive = turn()
    drive(flushed(), End())
    assert len(completed(drive(messages.Closed("s", 0)))) == 1
    drive = turn()
    drive(flushed())
    assert len(completed(drive(messages.Failed("s", "StreamFailed", "broken")))) == 1


def test_labels_that_come_again_after_the_loss_of_an_engine_change_nothing() -> None:
    drive = turn()
    drive(labels((0.0, 1.0, 0), (1.0, 2.0, 1)), labels((0.5, 1.0, 1), (1.0, 2.0, 0)))
    assert speakers(drive(flushed())) == [0, 1]


def test_a_session_without_labels_ignores_them() -> None:
    drive = Driver(Session(Settings(turn_detection=None), RATE, counter()))
    drive(append(3.0), word("good", 0.2, 0.6), Commit(), labels((0.0, 1.0, 0)))
    assert speakers(drive(flushed())) == [None]


def test_a_session_that_waits_for_labels_can_be_saved_and_goes_on() -> None:
    drive = turn()
    state = {"voices": [b"x"]}
    drive(messages.Labels("s", [(0, RATE, 0, 0.9)], [], state), flushed())
    value = msgspec.msgpack.encode(drive.core.save())
    other = Session(LABELLED, RATE, counter())
    other.load(msgspec.msgpack.decode(value, type=SavedSession), shift=100.0)
    assert other.final_due == 100.0 + LABELS_SECONDS
    assert other.label_state(5 * RATE) == (state, 5 * RATE)
    again = Driver(other)
    again.now = 100.1
    assert speakers(again(labels((1.0, 2.0, 1)))) == [0, 1]


def test_memory_does_not_grow_with_the_conversation() -> None:
    timeline = SpeakerTimeline()
    for second in range(20_000):
        timeline.add(labels((second, second + 1, second % 2)), 0)
    assert len(timeline.decided) <= 4096
    timeline.forget_before(19_990 * RATE)
    assert len(timeline.decided) <= 11


def test_labels_that_are_turned_on_late_are_of_the_words_from_then_on() -> None:
    """An hour of text, then labels: the words of the hour have none, and are not looked up in one go."""
    count = 4 * MAX_FINAL_WORDS
    plain = replace(LABELLED, speakers=False)
    drive = Driver(Session(plain, RATE, counter()))
    drive(append(count * 0.5))
    for number in range(count):
        drive(word("on", number * 0.5, number * 0.5 + 0.4))
    drive(Configure(LABELLED))
    told = drive(append(2.0), labels((count * 0.5, count * 0.5 + 1, 0)))
    assert [len(event.words) for event in told if isinstance(event, WordsLabelled)] == [MAX_FINAL_WORDS]
    # The turn is longer than one with labels may be, and ends after the next word.
    told = drive(word("on", count * 0.5, count * 0.5 + 0.4))
    assert speakers(told) == [None] * (MAX_FINAL_WORDS - 1) + [0]


@pytest.mark.parametrize("asked", [Settings(speakers=True), Settings(include=(INCLUDE_SPEAKERS,))])
def test_a_server_without_the_weights_names_the_command_that_fetches_them(asked: Settings) -> None:
    with pytest.raises(ClientFault, match="tickertape pull speakers"):
        asked.in_force(ModelSpec("m", RATE, 1280))
    able = ModelSpec("m", RATE, 1280, options=Options(speakers=True))
    assert asked.in_force(able).engine_options() == {"speakers": "labels"}


def told(drive: Driver, text: str) -> list[int | None]:
    """The speakers of a word in all events."""
    events = [event for event in drive.sent if isinstance(event, Delta | WordsLabelled | Completed)]
    return [one.speaker for event in events for one in event.words if one.text == text]


def test_a_speaker_that_was_told_of_a_word_stays() -> None:
    drive = Driver(Session(LABELLED, RATE, counter()))
    # The word is a little beyond the last label, and has that one; then a label comes for its own time.
    drive(append(3.0), labels((0.0, 1.0, 0)), word("late", 0.9, 1.2), labels((1.0, 2.0, 1)), Commit(), flushed())
    assert set(told(drive, "late")) == {0}


def test_labels_that_are_switched_off_are_in_no_event_and_told_ones_come_back() -> None:
    on, off = LABELLED, replace(LABELLED, speakers=False)
    drive = Driver(Session(on, RATE, counter()))
    drive(append(1.5), labels((0.0, 1.5, 0)), word("first", 0.2, 0.6))
    drive(Configure(off), append(1.5), word("second", 1.6, 2.0), Configure(on))
    drive(append(3.0), labels((3.1, 4.5, 1)), word("third", 3.2, 3.8), Commit(), flushed())
    # Nobody listened for voices while the second word was said.
    assert [set(told(drive, text)) for text in ("first", "second", "third")] == [{0}, {None}, {1}]

    drive = Driver(Session(on, RATE, counter()))
    drive(append(3.0), labels((0.0, 1.5, 0)), word("first", 0.2, 0.6), Configure(off), Commit(), flushed())
    assert told(drive, "first") == [0, None]


def test_labels_that_are_switched_on_again_know_the_voices() -> None:
    """So that a number is the same person in the whole session, also if the session moves while labels are off."""
    off = replace(LABELLED, speakers=False)
    drive = Driver(Session(LABELLED, RATE, counter()))
    drive(append(2.0), structs.replace(labels((0.0, 1.5, 0)), state={"voices": "of two"}), Configure(off), append(2.0))
    assert drive.core.label_state(5 * RATE) is None
    moved = Session(off, RATE, counter())
    moved.load(msgspec.msgpack.decode(msgspec.msgpack.encode(drive.core.save()), type=SavedSession), 0.0)
    for core in (drive.core, moved):
        core.handle(Configure(LABELLED), 0.0)
        assert core.label_state(5 * RATE) == ({"voices": "of two"}, 5 * RATE)


def test_names() -> None:
    assert [letter_name(number) for number in (0, 25, 26, 27)] == ["A", "Z", "AA", "AB"]
    assert [letter_name(number, ["Ann"]) for number in (0, 1)] == ["Ann", "A"]
    assert [shown_name(number, ["Ann"]) for number in (0, 1)] == ["Ann", "Speaker 1"]


def test_a_person_without_a_name_does_not_get_the_name_of_an_enrolled_voice() -> None:
    names = ["B", "Speaker 2", "A", "speaker 3", "Speaker 03", "AA"]
    assert [letter_name(number, names) for number in (2, 6, 7, 29, 30)] == ["A", "C", "D", "Z", "AB"]
    shown = [shown_name(number, names) for number in (1, 6, 7, 8)]
    assert shown == ["Speaker 2", "Speaker 1", "Speaker 3", "Speaker 4"]


WORDS = [
    TimedWord("Hello.", 0, RATE, speaker=0),
    TimedWord("Are", RATE, 2 * RATE, speaker=0),
    TimedWord("Yes", 2 * RATE, 3 * RATE, speaker=1),
]


def test_subtitles_end_where_the_speaker_changes() -> None:
    lines = subtitles(WORDS, RATE)
    assert [(line.text, line.speaker) for line in lines] == [("Hello.", 0), ("Are", 0), ("Yes", 1)]
    assert "Speaker 2: Yes\n" in to_srt(lines)
    assert "<v Speaker 2>Yes\n" in to_vtt(lines)
    assert list(spoken_lines(WORDS)) == ["Speaker 1: Hello. Are\n", "Speaker 2: Yes\n"]


def test_a_name_cannot_break_out_of_its_tag() -> None:
    hostile = "</v><script>--> & <b>"
    (_, block) = vtt_blocks(subtitles(WORDS[:1], RATE), [hostile])
    assert block.splitlines()[1] == "<v &lt;/v&gt;&lt;script&gt;--&gt; &amp; &lt;b&gt;>Hello."
