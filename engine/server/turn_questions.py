"""Asks the turn detector in the pauses of streams whose turn rule has questions, and puts the answers into the events.

A part of the engine loop; the detector itself computes on other threads (`engine/runner/background.py`). The speech
track decides when to ask: it adds a `TurnScored` without an answer to the events of a `Speech` message. The computation
of words never waits for an answer. Only the `Speech` message with the question, and later `Speech` messages of the
stream, are delayed until the answer is in them. So an answer that comes in time reaches the gateway at its sample, in
order with the other events. Only a late answer makes decisions depend on the load.

The delay is bounded by audio and not by time: if an answer has not come after `WAIT_MESSAGES` more messages of the
stream, or when the client ends the turn or the stream, the message is sent without it. (The bound is in messages and
not in samples, because after a rebuild one message has the audio of many seconds.) Delayed messages are part of a
stream's saved state: another engine asks again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from engine.errors import reading_state
from engine.messages import Closed, Flushed, Item, Output, Saved, Speech, TurnRule, TurnScored
from engine.runner.base import TurnDetector
from engine.server.recent_audio import RecentAudio
from engine.spec import ModelSpec

# Messages of a stream after which an answer is given up: 0.8 s of a live stream. The turn detector needs about 0.1 s;
# on an overloaded machine, text and silence end turns.
WAIT_MESSAGES = 10


class TurnAudio(ABC):
    """Access to the audio of one stream for questions to the turn detector."""

    # The detector judges this much audio before a question.
    window_samples: int

    @property
    @abstractmethod
    def position(self) -> int | None:
        """The position of the first item that is kept; None if there is none."""

    @abstractmethod
    def add(self, items: Sequence[Item]) -> None: ...

    @abstractmethod
    def drop_before(self, sample: int) -> None:
        """No question will need audio before this sample."""

    @abstractmethod
    def ask(self, sample: int) -> Future[float]:
        """Ask whether the turn is complete at this sample. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """The stream has ended."""


class LocalTurnAudio(TurnAudio):
    """Audio that is kept in this process, for a detector on its threads."""

    def __init__(self, spec: ModelSpec, detector: TurnDetector) -> None:
        self._spec = spec
        self._detector = detector
        self.window_samples = detector.window_samples
        self.recent = RecentAudio()
        detector.prepare()

    @property
    def position(self) -> int | None:
        return self.recent.position

    def add(self, items: Sequence[Item]) -> None:
        self.recent.add(items, self._spec)

    def drop_before(self, sample: int) -> None:
        self.recent.drop_before(sample)

    def ask(self, sample: int) -> Future[float]:
        start = max(sample - self.window_samples, self.recent.start)
        return self._detector.submit(self.recent.later_cut(start, sample))

    def close(self) -> None:
        return None


@dataclass(slots=True)
class DelayedSpeech:
    """A message that waits for answers, with its questions."""

    speech: Speech
    open: list[tuple[TurnScored, Future[float]]] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return all(answer.done() for _, answer in self.open)


class StreamQuestions:
    """The questions of one stream. `audio` is None if there is no detector; then questions are sent without answers."""

    def __init__(self, audio: TurnAudio | None) -> None:
        self._audio = audio
        self._delayed: deque[DelayedSpeech] = deque()
        # Tags of flushes at which the client has ended the turn.
        self.turn_ends: set[int] = set()

    def __len__(self) -> int:
        """Number of delayed messages."""
        return len(self._delayed)

    @property
    def has_answered(self) -> bool:
        """Whether a delayed message can be sent now."""
        return bool(self._delayed) and self._delayed[0].is_answered

    @property
    def position(self) -> int | None:
        """The position from which on another engine needs the audio; None if it needs none."""
        return None if self._audio is None else self._audio.position

    def add_audio(self, items: Sequence[Item]) -> None:
        if self._audio is not None:
            self._audio.add(items)

    def add(self, speech: Speech) -> list[Speech]:
        """Add the next message of the stream; returns the messages that can be sent now."""
        if self._delayed or speech.events:
            self._delayed.append(self._ask(speech))
            self._give_up_questions(len(self._delayed) - WAIT_MESSAGES)
            ready = self.take_answered()
        else:
            ready = [speech]
        if self._audio is not None:
            # Another engine would ask the open questions again, so their audio is still needed.
            asked = (event.sample for delayed in self._delayed for event, _ in delayed.open)
            needed = min([speech.end, *asked]) if self._delayed else speech.end
            self._audio.drop_before(needed - self._audio.window_samples)
        return ready

    def take_answered(self) -> list[Speech]:
        """Return and remove the delayed messages that can be sent now."""
        ready = []
        while self.has_answered:
            delayed = self._delayed.popleft()
            for event, answer in delayed.open:
                event.probability = _probability(answer)
            ready.append(delayed.speech)
        return ready

    def take_all(self) -> list[Speech]:
        """Return and remove all delayed messages, with the answers that have come."""
        self._give_up_questions(len(self._delayed))
        return self.take_answered()

    def close(self) -> None:
        self._give_up_questions(len(self._delayed))
        if self._audio is not None:
            self._audio.close()

    def save(self) -> Saved:
        """The delayed messages, as plain data."""
        return {"kept": [msgspec.to_builtins(delayed.speech) for delayed in self._delayed]}

    def resume(self, name: str, saved: Saved, items: Sequence[Item]) -> None:
        """Continue from a saved state, perhaps of an engine on which the stream had another name; `items` are the audio
        from the state's position on."""
        self.add_audio(items)
        for message in saved["kept"]:
            speech = msgspec.convert(message, Speech)
            speech.stream = name
            self._delayed.append(self._ask(speech))

    def _ask(self, speech: Speech) -> DelayedSpeech:
        """Ask the questions of a message."""
        delayed = DelayedSpeech(speech)
        for event in speech.events:
            if isinstance(event, TurnScored) and self._audio is not None:
                delayed.open.append((event, self._audio.ask(event.sample)))
        return delayed

    def _give_up_questions(self, count: int) -> None:
        """Cancel the unanswered questions of the `count` oldest messages."""
        for delayed in islice(self._delayed, max(0, count)):
            for _, answer in delayed.open:
                answer.cancel()
            delayed.open = [
                (event, answer) for event, answer in delayed.open if answer.done() and not answer.cancelled()
            ]


def _probability(answer: Future[float]) -> float | None:
    return None if answer.exception() is not None else answer.result()


class TurnQuestions:
    """The questions of all streams whose turn rule has questions. `audio_of` makes the `TurnAudio` of a stream; None
    if there is no turn detector."""

    def __init__(self, audio_of: Callable[[str], TurnAudio | None]) -> None:
        self._audio_of = audio_of
        self._streams: dict[str, StreamQuestions] = {}
        # Those of them with delayed messages.
        self._waiting: dict[str, StreamQuestions] = {}

    def set_rule(self, name: str, rule: TurnRule | None) -> None:
        """The stream has this turn rule from now on. If it has questions, the stream's audio is kept until its end."""
        if rule is not None and rule.questions and name not in self._streams:
            self._add(name)

    def close(self, name: str) -> None:
        """Drop a stream, if it is known."""
        self._waiting.pop(name, None)
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.close()

    def add_audio(self, name: str, items: Sequence[Item]) -> None:
        stream = self._streams.get(name)
        if stream is not None:
            stream.add_audio(items)

    def add(self, speech: Speech) -> list[Speech]:
        """Add the next message of a stream; returns its messages that can be sent now."""
        stream = self._streams.get(speech.stream)
        if stream is None:
            return [speech]
        ready = stream.add(speech)
        if len(stream):
            self._waiting[speech.stream] = stream
        return ready

    def end_at(self, name: str, tag: int) -> None:
        """The client has ended the turn with this flush: `Flushed` does not wait for the turn detector."""
        stream = self._streams.get(name)
        if stream is not None:
            stream.turn_ends.add(tag)

    @property
    def has_answered(self) -> bool:
        """Whether a delayed message can be sent with the next step."""
        return any(stream.has_answered for stream in self._waiting.values())

    @property
    def is_waiting(self) -> bool:
        """Whether answers are being computed."""
        return bool(self._waiting)

    @property
    def delayed_count(self) -> int:
        """Number of delayed messages."""
        return sum(map(len, self._streams.values()))

    def add_answered(self, outputs: list[Output]) -> None:
        """Add the delayed messages that can be sent now to the outputs of a step. If the client has ended the turn or
        the stream, all delayed messages are added, before the `Flushed` or `Closed` that answers it."""
        if not self._streams:
            return
        for output in [one for one in outputs if isinstance(one, Closed | Flushed) and one.stream in self._streams]:
            stream = self._streams[output.stream]
            ends = {tag for tag in stream.turn_ends if isinstance(output, Flushed) and tag <= output.tag}
            stream.turn_ends -= ends
            if ends or isinstance(output, Closed):
                index = outputs.index(output)
                outputs[index:index] = stream.take_all()
        for name, stream in list(self._waiting.items()):
            outputs += stream.take_answered()
            if not len(stream):
                del self._waiting[name]

    def save(self, name: str) -> tuple[dict[str, Saved], int | None]:
        """The state of a stream, and the position from which on its audio is needed."""
        stream = self._streams.get(name)
        return ({}, None) if stream is None else ({"turns": stream.save()}, stream.position)

    def resume(self, name: str, parts: dict[str, Saved], items: Sequence[Item]) -> None:
        """Continue from a saved state. Raises BadItem."""
        if "turns" not in parts:
            return
        stream = self._add(name)
        with reading_state(name, "turns"):
            stream.resume(name, parts["turns"], items)
        if len(stream):
            self._waiting[name] = stream

    def _add(self, name: str) -> StreamQuestions:
        stream = self._streams[name] = StreamQuestions(self._audio_of(name))
        return stream
