"""Turns that end where the speaker changes: the items depend on words and labels alone, and no word is lost or sent
twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from engine.options import Options
from engine.server.speech_track import SpeechTrack
from engine.spec import ModelSpec
from realtime.errors import ClientFault
from realtime.session import turns as turns_module
from realtime.session.core import SavedSession, Session, SessionLimits
from realtime.session.events import (
    Append,
    Commit,
    Committed,
    Completed,
    Configure,
    Delta,
    End,
    FlushEngine,
    Send,
    SpeechStarted,
    SpeechStopped,
    Tick,
)
from realtime.session.settings import INCLUDE_SPEAKERS, Settings, TurnDetection, make_formatting
from realtime.session.speakers import SpeakerTimeline
from realtime.session.turns import IDLE_SECONDS, REVISION_SECONDS
from tests.realtime.session.test_core import (
    FRAME,
    RATE,
    Driver,
    Engine,
    World,
    append,
    counter,
    finish,
    flushed,
    kinds,
    speech,
    word,
)
from tests.realtime.session.test_core_saved import MovingWorld
from tests.realtime.speech_tracks import judge

LABELLED = Settings(include=(INCLUDE_SPEAKERS,))
CUT = replace(LABELLED, turn_detection=TurnDetection(speaker_change=True))
SEMANTIC = replace(LABELLED, turn_detection=TurnDetection(semantic=True, speaker_change=True))
REDACTED = replace(CUT, formatting=make_formatting(redact=["numbers"]))
ABLE = ModelSpec("m", RATE, 1280, options=Options(speakers=True))

Span = tuple[float, float, int]


def labels(*spans: Span, settled: float = 0.0) -> messages.Labels:
    decided = [(int(start * RATE), int(end * RATE), who, 0.9) for start, end, who in spans]
    return messages.Labels("s", decided, [], None, int(settled * RATE))


def talk(drive: Driver, *words: str) -> None:
    """Speech of a second for each word."""
    drive(append(len(words) * 1.024), speech(0.0, len(words) * 1.024, 0.99))
    for number, text in enumerate(words):
        drive(word(text, number + 0.1, number + 0.9))


def items(events: list[Any]) -> list[tuple[str, str, list[int | None]]]:
    done = [event for event in events if isinstance(event, Completed)]
    return [(one.item_id, one.transcript, [said.speaker for said in one.words]) for one in done]


# Bad input first.


def test_a_session_without_labels_is_told_what_to_add() -> None:
    asked = replace(CUT, include=None)
    with pytest.raises(ClientFault, match="add 'item.input_audio_transcription.speakers' to 'include'") as fault:
        asked.in_force(ABLE)
    assert fault.value.param == "turn_detection"


def test_a_server_without_the_weights_names_the_command() -> None:
    with pytest.raises(ClientFault, match="tickertape pull speakers"):
        CUT.in_force(ModelSpec("m", RATE, 1280))
    taken, faults = CUT.in_force_after(Settings(), ModelSpec("m", RATE, 1280))
    assert [fault.param for fault in faults] == ["include", "turn_detection"]
    assert taken.turn_detection == TurnDetection()


def test_labels_cannot_be_taken_from_a_session_that_cuts_by_them() -> None:
    current = CUT.in_force(ABLE)
    taken, faults = replace(current, include=None).in_force_after(current, ABLE)
    assert [fault.param for fault in faults] == ["turn_detection"]
    assert taken == current
    taken, faults = replace(current, include=None, turn_detection=None).in_force_after(current, ABLE)
    assert not faults and not taken.labels_speakers


def test_finals_are_the_streamed_words() -> None:
    able = replace(ABLE, options=Options(speakers=True, revises=True))
    assert "revised" not in CUT.in_force(able).engine_options()
    assert LABELLED.in_force(able).engine_options()["revised"] == "yes"


# One turn.


def test_a_turn_ends_where_the_speaker_changes() -> None:
    drive = Driver(Session(CUT, RATE, counter()))
    talk(drive, "one", "two", "three", "four")
    assert "Delta" not in kinds(drive.sent), "a word waits for its speaker"
    assert kinds(drive(labels((0.0, 1.5, 0)))) == ["Delta"]
    cut = drive(labels((1.5, 2.0, 0), (2.0, 4.1, 1)))
    assert kinds(cut) == ["Delta", "SpeechStopped", "Committed", "Completed", "SpeechStarted", "Delta"]
    assert items(cut) == [("item_1", "one two", [0, 0])]
    stopped, started = cut[1], cut[4]
    assert isinstance(stopped, SpeechStopped) and isinstance(started, SpeechStarted)
    assert stopped.sample == started.sample == 2 * RATE
    drive(append(1.0), speech(4.096, 1.024, 0.01))
    done = drive(flushed())
    assert items(done) == [("item_2", "three four", [1, 1])]


def test_a_turn_that_has_ended_becomes_several_items() -> None:
    drive = Driver(Session(CUT, RATE, counter()))
    talk(drive, "one", "two", "three")
    drive(append(1.0), speech(3.072, 1.024, 0.01))
    assert [event.item_id for event in drive.sent if isinstance(event, Committed)] == ["item_1"]
    assert not items(drive(flushed()))
    # The next turn begins and ends before the labels of the first come.
    drive(append(2.0), speech(4.096, 1.024, 0.99), speech(5.12, 0.96, 0.01), word("next", 4.2, 4.9), flushed())
    assert drive.core.turns.last_committed == "item_2"
    sent = drive(labels((0.0, 1.0, 0), (1.0, 2.0, 1), (2.0, 3.0, 0)))
    assert items(sent) == [("item_1", "one", [0]), ("item_3", "two", [1]), ("item_4", "three", [0])]
    # Each is inserted behind the one before it, as OpenAI's field says.
    assert [(one.item_id, one.previous_item_id) for one in sent if isinstance(one, Committed)] == [
        ("item_3", "item_1"),
        ("item_4", "item_3"),
    ]
    assert not any(isinstance(one, SpeechStarted | SpeechStopped) for one in sent)
    assert drive.core.turns.last_committed == "item_2"
    assert items(drive(labels((4.1, 5.0, 0)))) == [("item_2", "next", [0])]


def test_a_word_without_a_label_belongs_to_the_word_before() -> None:
    drive = Driver(Session(CUT, RATE, counter()))
    talk(drive, "one", "two", "three")
    sent = drive(labels((0.0, 0.9, 0), (2.1, 3.0, 1)))
    assert items(sent) == [("item_1", "one two", [0, 0])]


def test_labels_that_never_come_hold_no_final_for_ever() -> None:
    drive = Driver(Session(CUT, RATE, counter()))
    talk(drive, "one", "two")
    drive(append(1.0), speech(2.048, 1.024, 0.01), flushed())
    # While audio comes, labels may come.
    for _ in range(int(REVISION_SECONDS) - 1):
        drive.now += 1.0
        assert not items(drive(append(1.0), Tick()))
    drive.now += 1.0
    assert items(drive(Tick())) == [("item_1", "one two", [None, None])]


def test_a_client_that_sends_no_more_audio_waits_for_a_moment() -> None:
    drive = Driver(Session(CUT, RATE, counter()))
    talk(drive, "one", "two")
    drive(messages.Labels("s", [(0, RATE, 0, 0.9)], [(RATE, 2 * RATE, 1, 0.6)]), Commit(), flushed())
    drive.now = IDLE_SECONDS - 0.01
    assert not items(drive(Tick()))
    assert drive.core.final_due == IDLE_SECONDS
    drive.now = IDLE_SECONDS
    assert items(drive(Tick())) == [("item_1", "one", [0]), ("item_2", "two", [1])]


def test_held_words_are_bounded() -> None:
    drive = Driver(Session(CUT, RATE, counter()))
    for number in range(120):
        drive(append(1.024), speech(number * 1.024, 1.024, 0.99), word(f"w{number}", number, number + 0.9))
        current = drive.core.turns.current
        assert current is not None and len(current.held) <= turns_module.MAX_LABEL_SECONDS + 1


def test_a_long_turn_of_one_speaker_is_cut_after_a_word() -> None:
    drive = Driver(Session(CUT, RATE, counter(), SessionLimits(max_turn_seconds=2.5)))
    talk(drive, "one", "two", "three", "four")
    assert items(drive(labels((0.0, 4.1, 0)))) == [("item_1", "one two", [0, 0]), ("item_2", "three four", [0, 0])][:1]


def test_switched_on_and_off_within_a_turn_no_word_is_lost() -> None:
    drive = Driver(Session(LABELLED, RATE, counter()))
    drive(append(6.144), speech(0.0, 6.144, 0.99), word("one", 0.1, 0.9), messages.Text("s", " tw", [], [1]))
    drive(Configure(CUT), messages.Text("s", "o", [messages.Word("two", int(1.1 * RATE), int(1.9 * RATE))], [1]))
    drive(word("three", 2.1, 2.9), labels((0.0, 2.0, 0), (2.0, 3.0, 1)), word("four", 3.1, 3.9))
    drive(Configure(LABELLED), word("five", 4.1, 4.9), End(), messages.Closed("s", 0))
    texts: dict[str, str] = {}
    for event in drive.sent:
        if isinstance(event, Delta):
            texts[event.item_id] = texts.get(event.item_id, "") + event.text
    assert texts == {"item_1": "one two", "item_2": "three four five"}
    assert [one[1] for one in items(drive.sent)] == list(texts.values())


def test_a_number_that_two_people_say_is_redacted_in_both_items() -> None:
    drive = Driver(Session(REDACTED, RATE, counter()))
    talk(drive, "pin", "4711", "0815", "thanks")
    drive(labels((0.0, 2.0, 0), (2.0, 4.1, 1)), End(), messages.Closed("s", 0))
    assert items(drive.sent) == [
        ("item_1", "pin [REDACTED]", [0, 0]),
        ("item_2", "[REDACTED] thanks", [1, 1]),
    ]


# Properties: whatever the chunks and delays, the items are those that words and labels say.


@dataclass(frozen=True)
class Talk:
    """Stretches of speech, each with words; spans with speakers, each as long as a piece; all in samples."""

    probabilities: list[float]
    words: list[messages.Word]
    spans: list[messages.LabelSpan]

    @property
    def samples(self) -> int:
        return len(self.probabilities) * FRAME


def some_talk(dice: random.Random) -> Talk:
    probabilities: list[float] = [0.01] * 10
    words: list[messages.Word] = []
    spans: list[messages.LabelSpan] = []
    speaker = 0
    for _ in range(dice.randint(1, 4)):
        start = len(probabilities) * FRAME
        frames = dice.randint(12, 160)
        probabilities += [0.99] * frames + [0.01] * dice.randint(18, 60)
        end = start + frames * FRAME
        at = start
        while at < end:
            length = min(dice.randint(2000, 9000), end - at)
            if dice.random() < 0.8:
                words.append(messages.Word(f"w{len(words)}", at, at + length * dice.randint(1, 4) // 4))
            at += length
        at = start
        while at < end:
            if dice.random() < 0.3:
                speaker = dice.randint(0, 2)
            length = min(dice.randint(3000, 8000), end - at)
            if dice.random() < 0.95:
                spans.append((at, at + length, speaker, 0.9))
            at += length
    return Talk(probabilities, words, spans)


class Played:
    """A talk, told to a session in chunks, with words and labels as late as the dice say."""

    def __init__(self, talk: Talk, chosen: Settings, dice: random.Random, *, moves: bool = False) -> None:
        self.talk, self.dice, self.moves, self.chosen = talk, dice, moves, chosen
        self.ids = 0
        self.core = self._new(chosen)
        self.track = SpeechTrack(self.core.turn_rule)
        self.now = 0.0
        self.fed = self.heard = self.said = 0
        self.labelled = 0
        self.word_delay, self.label_delay = dice.randint(0, 20_000), dice.randint(0, 60_000)
        self.flushes: list[int] = []
        self.sent: list[Any] = []

    def _new(self, chosen: Settings) -> Session:
        return Session(chosen, RATE, self._id)

    def _id(self) -> str:
        self.ids += 1
        return f"item_{self.ids}"

    def run(self) -> list[Completed]:
        while self.fed < self.talk.samples:
            count = min(self.dice.choice([FRAME, 1600, 5000, 20_000, 60_000]), self.talk.samples - self.fed)
            self.fed += count
            self.now += count / RATE
            self._do(Append(np.zeros(count, np.float32), count, count * 1000 / RATE))
            # An engine judges audio before it tells words of it; labels come whenever they are computed.
            steps = [self._hear, self._say]
            steps.insert(self.dice.randint(0, 2), self._label)
            for step in steps:
                step(self.fed)
            self._answer()
        self._do(End())
        self._hear(self.fed)
        self.word_delay = self.label_delay = 0
        self._say(self.talk.samples)
        self._label(self.talk.samples)
        self._do(messages.Closed("s", self.fed))
        return [event for event in self.sent if isinstance(event, Completed)]

    def _hear(self, until: int) -> None:
        start, end = self.heard // FRAME, until // FRAME
        if end > start:
            self.heard = end * FRAME
            told = messages.Speech("s", start * FRAME, FRAME, self.talk.probabilities[start:end])
            self._do(judge(self.track, told))

    def _say(self, until: int, *, flush: bool = False) -> None:
        until -= 0 if flush else self.word_delay
        while self.said < len(self.talk.words) and self.talk.words[self.said].end_sample <= until:
            said = self.talk.words[self.said]
            self.said += 1
            self._do(messages.Text("s", f" {said.text}", [said], [1]))

    def _label(self, until: int) -> None:
        until -= self.label_delay
        first = self.labelled
        while self.labelled < len(self.talk.spans) and self.talk.spans[self.labelled][1] <= until:
            self.labelled += 1
        coming = [start for start, _, _, _ in self.talk.spans[self.labelled : self.labelled + 1]]
        # An engine that was lost tells some of them again.
        again = max(0, first - self.dice.choice([0, 0, 3]))
        decided = self.talk.spans[again : self.labelled]
        self._do(messages.Labels("s", decided, [], None, max(0, min([until, *coming]))))

    def _answer(self) -> None:
        while self.flushes and self.dice.random() < 0.8:
            sample = self.flushes.pop(0)
            self._hear(sample)
            self._say(sample, flush=True)
            self._do(messages.Flushed("s", 0, sample))

    def _do(self, event: Any) -> None:
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, FlushEngine):
                self.flushes.append(self.core.appended)
            elif isinstance(effect, Send):
                self.sent.append(effect.event)
        self.core.check_integrity()
        if self.moves and self.dice.random() < 0.2:
            saved = msgspec.msgpack.decode(msgspec.msgpack.encode(self.core.save()), type=SavedSession)
            self.core = self._new(saved.settings)
            self.core.load(saved, 0.0)


def told(done: list[Completed]) -> list[tuple[str, int, int, list[tuple[str, int | None]]]]:
    return [(one.transcript, one.start, one.end, [(said.text, said.speaker) for said in one.words]) for one in done]


def expected(talk: Talk) -> list[list[str]]:
    """The words of the items, from those of whole turns and from all labels."""
    whole = Played(talk, Settings(), random.Random(0))
    whole.word_delay = 0
    timeline = SpeakerTimeline()
    timeline.add(messages.Labels("s", talk.spans), 0)
    found: list[list[str]] = []
    for turn in whole.run():
        speaker, parts = None, list[list[str]]([[]])
        for said in turn.words:
            now = timeline.with_final_label(said).speaker
            if now is not None and speaker not in (None, now):
                parts.append([])
            speaker = speaker if now is None else now
            parts[-1].append(said.text)
        found += parts
    return found


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_chunking_gives_the_same_items_with_every_word_once(seed: int, moves: bool) -> None:
    talk = some_talk(random.Random(seed))
    dice = random.Random(seed + 1)
    calm = Played(talk, CUT, dice).run()
    assert [[said.text for said in one.words] for one in calm] == expected(talk)
    for one in calm:
        assert one.transcript == " ".join(said.text for said in one.words)
        assert len({said.speaker for said in one.words if said.speaker is not None}) <= 1
    for _ in range(2):
        other = Played(talk, CUT, dice, moves=moves)
        assert told(sorted(other.run(), key=lambda one: one.start)) == told(calm)
        texts: dict[str, str] = {}
        for event in other.sent:
            if isinstance(event, Delta):
                texts[event.item_id] = texts.get(event.item_id, "") + event.text
        done = [event for event in other.sent if isinstance(event, Completed)]
        assert texts == {one.item_id: one.transcript for one in done if one.transcript}


# Every third word is a name that must not be told.
HIDDEN = make_formatting(names=[f"w{number}" for number in range(0, 200, 3)])


class Switched(Played):
    """A talk whose session switches its settings at any moment. A word may come in two parts, but not a name: its first
    part could not be taken back. With `untimed` the last text of a turn may have no time."""

    def __init__(
        self, talk: Talk, choices: tuple[Settings, ...], dice: random.Random, *, moves: bool, untimed: bool = False
    ) -> None:
        super().__init__(talk, dice.choice(choices), dice, moves=moves)
        self.choices = choices
        self.has_ended = False
        self.untimed: list[str] | None = [] if untimed else None
        # Which settings are in force from which place of `sent` on.
        self.switched = [(0, self.chosen)]

    def _say(self, until: int, *, flush: bool = False) -> None:
        until -= 0 if flush else self.word_delay
        while self.said < len(self.talk.words) and self.talk.words[self.said].end_sample <= until:
            said = self.talk.words[self.said]
            self.said += 1
            text, cut = f" {said.text}", self.dice.randint(0, len(said.text) + 1)
            if said.text in HIDDEN.names:
                cut = 0
            if cut:
                self._do(messages.Text("s", text[:cut], [], [1]))
                self._switch()
            self._do(messages.Text("s", text[cut:], [said], [1]))
            self._switch()

    def _answer(self) -> None:
        while self.flushes and self.dice.random() < 0.8:
            sample = self.flushes.pop(0)
            self._hear(sample)
            self._say(sample, flush=True)
            if self.untimed is not None and self.core.turns.ended and self.dice.random() < 0.3:
                self.untimed.append(f"u{len(self.untimed)}")
                self._do(messages.Text("s", f" {self.untimed[-1]}", [], [1]))
            self._do(messages.Flushed("s", 0, sample))
            self._switch()

    def _label(self, until: int) -> None:
        super()._label(until)
        self._switch()

    def _do(self, event: Any) -> None:
        self.has_ended = self.has_ended or isinstance(event, End)
        super()._do(event)

    def _switch(self) -> None:
        if not self.has_ended and self.dice.random() < 0.15:
            self.chosen = self.dice.choice(self.choices)
            self.switched.append((len(self.sent), self.chosen))
            self._do(Configure(self.chosen))

    def finals(self) -> list[str]:
        """The words of all finals, in the order of the audio."""
        done = sorted(self.run(), key=lambda one: one.start)
        return [said for one in done for said in one.transcript.split()]


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=120, deadline=None)
def test_speaker_change_switched_at_any_moment_every_word_comes_once(seed: int, moves: bool) -> None:
    dice = random.Random(seed)
    played = Switched(some_talk(dice), (CUT, SEMANTIC, LABELLED), dice, moves=moves, untimed=True)
    finals = played.finals()
    assert [said for said in finals if said[0] == "w"] == [said.text for said in played.talk.words]
    assert sorted(said for said in finals if said[0] == "u") == sorted(played.untimed or [])
    texts: dict[str, str] = {}
    for event in played.sent:
        if isinstance(event, Delta):
            texts[event.item_id] = texts.get(event.item_id, "") + event.text
    done = [event for event in played.sent if isinstance(event, Completed)]
    assert texts == {one.item_id: one.transcript for one in done if one.transcript}


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=120, deadline=None)
def test_redaction_switched_at_any_moment_hides_what_comes_later_and_loses_no_word(seed: int, moves: bool) -> None:
    dice = random.Random(seed)
    choices = (CUT, LABELLED, replace(CUT, formatting=HIDDEN), replace(LABELLED, formatting=HIDDEN))
    played = Switched(some_talk(dice), choices, dice, moves=moves)
    for said, word_of_final in zip(played.talk.words, played.finals(), strict=True):
        assert word_of_final == said.text or (word_of_final == "[REDACTED]" and said.text in HIDDEN.names)
    for place, event in enumerate(played.sent):
        if isinstance(event, Delta | Completed):
            then = [chosen for start, chosen in played.switched if start <= place][-1]
            told = event.text if isinstance(event, Delta) else event.transcript
            assert not then.formatting.redacts or not set(HIDDEN.names) & set(told.split())


class LabellingEngine(Engine):
    """Labels what it has heard, two seconds to each speaker, up to a second before its end."""

    def _hear(self, loud: bool) -> list[Any]:
        found = super()._hear(loud)
        until = max(0, self.heard - RATE)
        spans = [
            (start, min(start + RATE // 2, until), (start + self.base) // (2 * RATE) % 2, 0.9)
            for start in range(0, until, RATE // 2)
        ]
        return [*found, messages.Labels("s", spans[-8:], [], None, until)]


CHOSEN = (CUT, SEMANTIC, LABELLED)


class InsertingMixin:
    """An item of a turn that has ended is inserted behind the one before it."""

    committed: list[str]

    def check_sent(self, event: Any) -> None:
        if isinstance(event, Committed):
            assert event.item_id not in self.committed
            if event.previous_item_id is None:
                assert not self.committed
            place = 0 if event.previous_item_id is None else self.committed.index(event.previous_item_id) + 1
            self.committed.insert(place, event.item_id)
        else:
            super().check_sent(event)  # type: ignore[misc]


class LabelledWorld(InsertingMixin, World):
    def __init__(self, chosen: Settings) -> None:
        super().__init__(chosen)
        self.engine = LabellingEngine(self.core.turn_rule)


class MovingLabelledWorld(InsertingMixin, MovingWorld):
    def __init__(self, chosen: Settings) -> None:
        super().__init__(chosen)
        self.engine = LabellingEngine(self.core.turn_rule)


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("kind", [LabelledWorld, MovingLabelledWorld])
def test_long_random_sessions_keep_every_promise(chosen: Settings, kind: Any) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        world, loud = kind(chosen), False
        for _ in range(150):
            if dice.random() < 0.2:
                loud = not loud
            act = dice.choices(
                ["append", "gap", "move", "commit", "clear", "tick", "configure", "fail", "drain"],
                [30, 3, 45, 6, 2, 6, 2, 1, 0.1],
            )[0]
            value: Any = loud
            if act in ("append", "gap"):
                value = dice.choice([0, 100, 1600, 8000, 20_000])
            elif act == "tick":
                value = dice.randint(0, 32) / 16
            elif act == "configure":
                value = dice.choice(CHOSEN)
            world.act(act, value)
            if isinstance(world, MovingWorld) and dice.random() < 0.3:
                world.move()
        finish(world)


def test_words_that_wait_for_their_speakers_are_sent_before_their_item_fails() -> None:
    driver = Driver(Session(CUT, RATE, counter()))
    talk(driver, "one", "two", "three")
    driver(labels((0, 0.9, 0)))
    driver(messages.Dead("the engine stopped"))
    assert "".join(event.text for event in driver.sent if isinstance(event, Delta)) == "one two three"


def test_words_from_before_labels_were_switched_on_do_not_wait_for_labels() -> None:
    off = replace(CUT, include=None, turn_detection=TurnDetection())
    drive = Driver(Session(off, RATE, counter()))
    drive(append(2.0), speech(0.0, 1.9, 0.99), word("one", 0.5, 0.8), Configure(CUT))
    told = drive(word("two", 1.0, 1.3))
    assert [event.text for event in told if isinstance(event, Delta)] == [" two"]
    # Also the final of a turn that ends before the switch has nothing to wait for.
    for chosen in (CUT, LABELLED):
        drive = Driver(Session(off, RATE, counter()))
        drive(append(2.0), speech(0.0, 1.9, 0.99), word("one", 0.5, 0.8), Configure(chosen), Commit())
        assert items(drive(flushed())) == [("item_1", "one", [None])]


def test_labels_that_are_switched_off_are_not_sent_with_words_that_waited() -> None:
    """The redactor still held these words when their speakers were known."""
    off = replace(REDACTED, include=None, turn_detection=TurnDetection())
    drive = Driver(Session(REDACTED, RATE, counter()))
    drive(append(6.0), speech(0.0, 5.9, 0.99), labels((0.0, 3.0, 0)))
    drive(word("call", 0.5, 0.8), word("five", 1.0, 1.3), word("six", 1.4, 1.6), Configure(off))
    told = drive(word("then", 2.0, 2.3), word("go", 2.4, 2.6), word("home", 2.8, 3.0))
    said = [one for event in told if isinstance(event, Delta) for one in event.words]
    assert {one.speaker for one in said} == {None} and said[0].text == "call"
