"""A turn that never ends: the state that is kept of it, and the events for each kind of client."""

from __future__ import annotations

import gc
import itertools
import sys
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_word

from engine import messages
from engine.server.speech_track import SpeechTrack
from realtime.dialects.base import Dialect, SessionFacts
from realtime.dialects.deepgram import DeepgramDialect, Listening, read_socket_query
from realtime.dialects.openai import OpenAIDialect
from realtime.dialects.vllm import VllmDialect
from realtime.session.core import Session, SessionLimits
from realtime.session.events import (
    Append,
    Commit,
    Committed,
    Completed,
    Configure,
    Delta,
    End,
    ItemFailed,
    Send,
    TimedWord,
)
from realtime.session.settings import INCLUDE_LOGPROBS, INCLUDE_SPEAKERS, INCLUDE_WORDS, Settings
from realtime.session.turns import MAX_DETAILED_SECONDS, MAX_FINAL_WORDS
from tests.realtime.speech_tracks import judge

RATE = 16_000
FRAME = 512
FACTS = SessionFacts("sess", 0, RATE, "m", frozenset({"m"}), lambda: "event")
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
MANUAL = Settings(turn_detection=None)
NO_ENDPOINTING = read_socket_query({"encoding": "linear16", "endpointing": "false", "interim_results": "true"})


def held_bytes(thing: Any, seen: set[int] | None = None) -> int:
    """All that an object of ours refers to, in bytes; what it shares with others counts once."""
    seen = set() if seen is None else seen
    if id(thing) in seen or callable(thing):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(held_bytes(part, seen) for pair in thing.items() for part in pair)
    if isinstance(thing, str | bytes | int | float | np.ndarray):
        return size
    if hasattr(thing, "__iter__"):
        return size + sum(held_bytes(part, seen) for part in thing)
    if isinstance(thing, TimedWord):
        return size + sum(held_bytes(getattr(thing, name), seen) for name in TimedWord.__struct_fields__)
    if is_dataclass(thing):
        return size + sum(held_bytes(getattr(thing, field.name), seen) for field in fields(thing))
    return size + held_bytes(getattr(thing, "__dict__", {}), seen)


class Talk:
    """Speech without a pause; events for the client go through its dialect."""

    def __init__(self, dialect: Dialect, chosen: Settings, **limits: Any) -> None:
        names = itertools.count(1)
        self.dialect = dialect
        self.core = Session(
            dialect.start_settings(chosen),
            RATE,
            lambda: f"item_{next(names)}",
            SessionLimits(stall_seconds=0, **limits),
        )
        self.track = SpeechTrack(self.core.turn_rule)
        self.seconds = 0
        self.words: list[str] = []

    def go_on(self, seconds: int, apart: int = 1) -> list[Any]:
        """Frames of so many seconds, with two words in each `apart` seconds."""
        frames = []
        silence = np.zeros(apart * RATE, np.float32)
        for _ in range(0, seconds, apart):
            start = self.seconds * RATE
            self.seconds += apart
            said = [f"w{len(self.words)}", f"w{len(self.words) + 1}"]
            self.words += said
            times = [(start, start + 7000), (start + 8000, start + 15_000)]
            words = [messages.Word(text, first, last) for text, (first, last) in zip(said, times, strict=True)]
            frames += self.handle(Append(silence, apart * RATE, apart * 1000.0))
            frames += self.handle(messages.Speech("s", start, apart * RATE, [0.99]))
            # The second word is still on its way when the first is complete, as models send it.
            frames += self.handle(messages.Text("s", f" {said[0]} {said[1][:1]}", words[:1], [1]))
            frames += self.handle(messages.Text("s", said[1][1:], words[1:], [2]))
        return frames

    def handle(self, event: Any) -> list[Any]:
        frames = []
        if isinstance(event, messages.Speech):
            event = judge(self.track, event)
        for effect in self.core.handle(event, float(self.seconds)):
            if isinstance(effect, Send):
                frames += self.dialect.write(effect.event, self.core.settings)
        self.core.check_integrity()
        return frames


def talks() -> dict[str, Talk]:
    return {
        "openai": Talk(OpenAIDialect(FACTS), MANUAL),
        "vllm": Talk(VllmDialect(FACTS), MANUAL),
        "deepgram": Talk(DeepgramDialect(FACTS, Listening(NO_ENDPOINTING)), NO_ENDPOINTING.settings),
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("client", ["openai", "vllm", "deepgram"])
def test_a_day_with_a_single_open_turn_is_flat(client: str) -> None:
    talk = talks()[client]
    sizes, largest = [], 0
    for _ in range(24):
        frames = talk.go_on(3600, apart=10)
        sizes.append(held_bytes(talk.core) + held_bytes(talk.dialect))
        largest = max(largest, *(len(str(frame)) for frame in frames))
        talk.words.clear()
    assert max(sizes) <= 1.1 * sizes[0] <= 3_000_000, sizes
    if client == "deepgram":
        assert largest < 20_000, "an interim result repeats what is not final yet, and nothing else"


def test_a_long_turn_of_a_client_that_commits_is_several_items_and_no_word_is_lost() -> None:
    talk = Talk(OpenAIDialect(FACTS), MANUAL, max_turn_seconds=60.0)
    frames = talk.go_on(150)
    frames += talk.handle(Commit("mine")) + talk.handle(messages.Flushed("s", 1, 0))
    done = [frame for frame in frames if frame["type"] == COMPLETED]
    assert [frame["usage"]["seconds"] for frame in done] == [pytest.approx(60, abs=1)] * 2 + [pytest.approx(30, abs=2)]
    assert " ".join(frame["transcript"] for frame in done).split() == talk.words
    for frame in done:
        deltas = [part["delta"] for part in frames if part["type"] == DELTA and part["item_id"] == frame["item_id"]]
        assert "".join(deltas) == frame["transcript"]
    committed = [frame for frame in frames if frame["type"] == "input_audio_buffer.committed"]
    assert [frame["item_id"] for frame in committed] == [frame["item_id"] for frame in done]
    assert [frame["previous_item_id"] for frame in committed] == [None, *(frame["item_id"] for frame in done[:-1])]


def test_with_turn_detection_the_speech_goes_on_in_the_next_item() -> None:
    talk = Talk(OpenAIDialect(FACTS), Settings(), max_turn_seconds=60.0)
    frames = talk.go_on(100)
    for second in range(100, 103):
        frames += talk.handle(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
        frames += talk.handle(messages.Speech("s", second * RATE, FRAME, [0.01] * 32))
    frames += talk.handle(messages.Flushed("s", 1, 0))
    order = [frame["type"].removeprefix("input_audio_buffer.") for frame in frames if frame["type"] != DELTA]
    turn = ["speech_started", "speech_stopped", "committed", "conversation.item.added", "conversation.item.done"]
    assert order == [*turn, COMPLETED] * 2
    done = [frame for frame in frames if frame["type"] == COMPLETED]
    assert " ".join(frame["transcript"] for frame in done).split() == talk.words


def test_vllm_hears_of_one_utterance_only() -> None:
    talk = Talk(VllmDialect(FACTS), MANUAL, max_turn_seconds=60.0)
    frames = talk.go_on(150)
    assert {frame["type"] for frame in frames} == {"transcription.delta"}
    frames += talk.handle(Commit()) + talk.handle(messages.Flushed("s", 1, 0))
    done = frames[-1]
    said = "".join(frame["delta"] for frame in frames[:-1])
    assert said.split() == talk.words and said.endswith(done["text"]) and done["type"] == "transcription.done"
    assert done["usage"]["completion_tokens"] == 300
    assert done["usage"]["prompt_tokens"] == pytest.approx(150_000 / 80, abs=2)


def test_deepgram_settles_a_long_turn_in_segments() -> None:
    query = read_socket_query({"encoding": "linear16", "interim_results": "true", "punctuate": "true"})
    talk = Talk(DeepgramDialect(FACTS, Listening(query)), query.settings)
    frames = talk.go_on(200)
    finals = [frame for frame in frames if frame["is_final"]]
    assert all(5 < frame["duration"] <= 6 for frame in finals) and len(finals) > 200 / 6 - 1
    assert not any(frame["speech_final"] for frame in finals)
    frames += talk.handle(End()) + talk.handle(messages.Closed("s", 0))
    assert frames.pop()["type"] == "Metadata"
    finals = [frame for frame in frames if frame["is_final"]]
    assert [frame["speech_final"] for frame in finals] == [False] * (len(finals) - 1) + [True]
    said = [frame["channel"]["alternatives"][0] for frame in finals]
    assert " ".join(part["transcript"] for part in said).split() == talk.words
    assert [word["punctuated_word"] for part in said for word in part["words"]] == talk.words
    # Spans follow one another, and an interim result is the beginning of what becomes final.
    spans = [(frame["start"], round(frame["start"] + frame["duration"], 3)) for frame in finals]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    following = iter(finals)
    final = next(following)
    for frame in frames:
        if frame is final:
            final = next(following, final)
        else:
            texts = [part["channel"]["alternatives"][0]["transcript"] for part in (frame, final)]
            assert texts[1].startswith(texts[0])


@pytest.mark.parametrize("include", [INCLUDE_WORDS, INCLUDE_LOGPROBS, INCLUDE_SPEAKERS, None])
def test_a_turn_whose_final_lists_its_words_is_bounded(include: str | None) -> None:
    """A final is written in one step of the event loop, and an hour of words is too much for one."""
    chosen = replace(MANUAL, include=(include,) if include else None)
    frames = Talk(OpenAIDialect(FACTS), chosen).go_on(MAX_DETAILED_SECONDS + 20)
    finals = [frame for frame in frames if frame["type"].endswith(".completed")]
    assert len(finals) == (1 if include else 0)
    assert all(len(frame["words"]) <= 3 * MAX_DETAILED_SECONDS for frame in finals if include == INCLUDE_WORDS)


def test_words_that_are_asked_for_at_the_end_of_a_long_turn_are_bounded() -> None:
    talk = Talk(OpenAIDialect(FACTS), MANUAL)
    talk.go_on(MAX_FINAL_WORDS)
    talk.handle(Configure(replace(MANUAL, include=(INCLUDE_WORDS,))))
    done = (talk.handle(Commit()) + talk.handle(messages.Flushed("s", 1, talk.seconds * RATE)))[-1]
    assert done["type"] == COMPLETED and done["transcript"].split() == talk.words
    assert [word["word"] for word in done["words"]] == talk.words[-MAX_FINAL_WORDS:]


def test_a_failed_item_leaves_no_text_to_the_next_result() -> None:
    dialect, chosen = DeepgramDialect(FACTS, Listening(NO_ENDPOINTING)), NO_ENDPOINTING.settings
    dialect.write(Delta("1", "lost words", (TimedWord("lost", 0, 9),)), chosen)
    dialect.write(Committed("1", None, "finalize"), chosen)
    dialect.write(ItemFailed("1", "transcription_failed", "numbers went wrong"), chosen)
    assert not dialect._finalized and not dialect._starts
    (interim,) = dialect.write(Delta("2", "new", (TimedWord("new", 20, 30),)), chosen)
    (final,) = dialect.write(Completed("2", "new", (TimedWord("new", 20, 30),), 20, 30, 1, 0.0), chosen)
    for result in (interim, final):
        assert result["channel"]["alternatives"][0]["transcript"] == "new"


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=60), longest=st.integers(2, 40))
def test_however_text_is_cut_a_long_turn_loses_and_repeats_nothing(sizes: list[int], longest: int) -> None:
    """Deltas end anywhere, words are named late and several at once."""
    text = "".join(f" {'ab'[number % 2] * (1 + number % 5)}{number}" for number in range(40))
    core = Session(MANUAL, RATE, iter(map(str, range(99))).__next__, SessionLimits(max_turn_seconds=longest))
    core.handle(Append(np.zeros(80 * RATE, np.float32), 80 * RATE, 80_000.0), 0.0)
    named = [messages.Word(part, 2 * n * RATE, (2 * n + 1) * RATE) for n, part in enumerate(text.split())]
    sent: list[Any] = []
    done, start, size = 0, 0, itertools.cycle(sizes)
    while start < len(text):
        delta = text[start : start + next(size)]
        start += len(delta)
        whole = len((text[:start] + "|").split()) - 1
        words, done = named[done:whole], whole
        sent += [
            effect.event
            for effect in core.handle(messages.Text("s", delta, words, [1]), 0.0)
            if isinstance(effect, Send)
        ]
        core.check_integrity()
    for event in (Commit(), messages.Flushed("s", 1, 0)):
        sent += [effect.event for effect in core.handle(event, 0.0) if isinstance(effect, Send)]
    transcripts = [event.transcript for event in sent if isinstance(event, Completed)]
    assert " ".join(transcripts) == text.strip()
    assert len(transcripts) >= 80 // (longest + 8)


def test_words_are_not_searched_by_the_garbage_collector() -> None:
    """Many open turns of an hour would make each collection a pause for all clients."""
    word = TimedWord("word", 0, 1, ((b"wo", -0.1), (b"rd", -0.2)), 0.9)
    assert not gc.is_tracked(word) and not gc.is_tracked(replace_word(word, speaker=1))
