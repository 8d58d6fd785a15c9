"""Asks the turn detector in the pauses of streams whose rule wants it, and sends its answers with the events of speech.

A part of the engine loop; the detector itself computes on other threads (`engine/runner/background.py`). The speech
track says when to ask (`TurnScored` without an answer). No stream waits for an answer; only the `Speech` message with
the question, and those after it, are held until the answer is in them. So the gateway gets every answer at its sample,
in order with the other events, and what it decides depends on the audio and the text alone. The wait is bounded by
audio and not by time: an answer that is not there after `WAIT_MESSAGES` more messages of the stream is left out for
good, and so is one that is open when the client ends the turn or the stream. (Messages and not samples: after a rebuild
one message has the audio of many seconds.)

Messages that are held belong to the state of a stream: another engine asks again.
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

# Messages of a stream for which an answer is waited for: 0.8 s of a live stream. The turn detector needs about 0.1 s;
# on a machine that has no time for it, text and silence end turns.
WAIT_MESSAGES = 10


class AskedAudio(ABC):
    """The audio of one stream, about which a turn detector is asked."""

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


class KeptAudio(AskedAudio):
    """Audio that is kept here, for a detector on threads of this process."""

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
class KeptBack:
    """A message whose questions are not all answered, with the answers to come."""

    speech: Speech
    open: list[tuple[TurnScored, Future[float]]] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return all(answer.done() for _, answer in self.open)


class StreamQuestions:
    """The questions of one stream. Without audio, because there is no detector, they have no answers."""

    def __init__(self, audio: AskedAudio | None) -> None:
        self._audio = audio
        self._kept: deque[KeptBack] = deque()
        # Tags of flushes at which the client has ended the turn.
        self.ends: set[int] = set()

    def __len__(self) -> int:
        """Messages that are kept back."""
        return len(self._kept)

    @property
    def has_news(self) -> bool:
        """Whether a message can be sent now."""
        return bool(self._kept) and self._kept[0].is_answered

    @property
    def position(self) -> int | None:
        """The position from which on another engine needs the audio; None if it needs none."""
        return None if self._audio is None else self._audio.position

    def add_audio(self, items: Sequence[Item]) -> None:
        if self._audio is not None:
            self._audio.add(items)

    def take(self, speech: Speech) -> list[Speech]:
        """The next message of the stream: returns the messages that can be sent now."""
        if self._kept or speech.events:
            self._kept.append(self._ask(speech))
            self._drop_open(len(self._kept) - WAIT_MESSAGES)
            ready = self.answered()
        else:
            ready = [speech]
        if self._audio is not None:
            # Another engine asks about what is kept back again.
            asked = (event.sample for kept in self._kept for event, _ in kept.open)
            needed = min([speech.end, *asked]) if self._kept else speech.end
            self._audio.drop_before(needed - self._audio.window_samples)
        return ready

    def answered(self) -> list[Speech]:
        """The messages whose questions have been answered since."""
        found = []
        while self.has_news:
            kept = self._kept.popleft()
            for event, answer in kept.open:
                event.probability = _probability(answer)
            found.append(kept.speech)
        return found

    def give_up(self) -> list[Speech]:
        """All messages that were kept back, with the answers that have come."""
        self._drop_open(len(self._kept))
        return self.answered()

    def close(self) -> None:
        self._drop_open(len(self._kept))
        if self._audio is not None:
            self._audio.close()

    def save(self) -> Saved:
        """The messages that are kept back, as plain data."""
        return {"kept": [msgspec.to_builtins(kept.speech) for kept in self._kept]}

    def resume(self, name: str, saved: Saved, items: Sequence[Item]) -> None:
        """Continue from a saved state, perhaps of an engine on which the stream had another name; `items` are the audio
        from the state's position on."""
        self.add_audio(items)
        for kept in saved["kept"]:
            speech = msgspec.convert(kept, Speech)
            speech.stream = name
            self._kept.append(self._ask(speech))

    def _ask(self, speech: Speech) -> KeptBack:
        kept = KeptBack(speech)
        for event in speech.events:
            if isinstance(event, TurnScored) and self._audio is not None:
                kept.open.append((event, self._audio.ask(event.sample)))
        return kept

    def _drop_open(self, count: int) -> None:
        """In the oldest messages, leave out the answers that have not come."""
        for kept in islice(self._kept, max(0, count)):
            for _, answer in kept.open:
                answer.cancel()
            kept.open = [(event, answer) for event, answer in kept.open if answer.done() and not answer.cancelled()]


def _probability(answer: Future[float]) -> float | None:
    return None if answer.exception() is not None else answer.result()


class TurnQuestions:
    """The questions of all streams with a rule that asks. `audio_of` makes the audio of the stream with a name; None if
    there is no turn detector."""

    def __init__(self, audio_of: Callable[[str], AskedAudio | None]) -> None:
        self._audio_of = audio_of
        self._streams: dict[str, StreamQuestions] = {}
        # The streams of them that keep messages back.
        self._waiting: dict[str, StreamQuestions] = {}

    def use(self, name: str, rule: TurnRule | None) -> None:
        """The stream has this rule from now on. Once it has asked, its audio is kept until it ends."""
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

    def take(self, speech: Speech) -> list[Speech]:
        """The next message of a stream: returns its messages that can be sent now."""
        stream = self._streams.get(speech.stream)
        if stream is None:
            return [speech]
        ready = stream.take(speech)
        if len(stream):
            self._waiting[speech.stream] = stream
        return ready

    def end_at(self, name: str, tag: int) -> None:
        """The client has ended the turn with this flush: its answer does not wait for the turn detector."""
        stream = self._streams.get(name)
        if stream is not None:
            stream.ends.add(tag)

    @property
    def has_news(self) -> bool:
        """Whether a step would bring answers."""
        return any(stream.has_news for stream in self._waiting.values())

    @property
    def is_waiting(self) -> bool:
        """Whether answers are being computed."""
        return bool(self._waiting)

    @property
    def kept_back(self) -> int:
        """Messages that wait for answers."""
        return sum(map(len, self._streams.values()))

    def add_answered(self, outputs: list[Output]) -> None:
        """Add the messages that can be sent now to the outputs of a step: if the client has ended the turn or the
        stream, all of them, before the answer to that."""
        if not self._streams:
            return
        for output in [one for one in outputs if isinstance(one, Closed | Flushed) and one.stream in self._streams]:
            stream = self._streams[output.stream]
            ends = {tag for tag in stream.ends if isinstance(output, Flushed) and tag <= output.tag}
            stream.ends -= ends
            if ends or isinstance(output, Closed):
                place = outputs.index(output)
                outputs[place:place] = stream.give_up()
        for name, stream in list(self._waiting.items()):
            outputs += stream.answered()
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
