"""Asks the turn detector in the pauses of streams whose rule wants it, and sends its answers with the events of speech.

The speech track says when to ask (`TurnScored` without an answer). The detector answers outside of the loop, so that no
stream waits for it; only the `Speech` message with the question, and those after it, are kept back until the answer is
in them. So the gateway gets every answer at its sample, in order with the other events, and what it decides depends on
the audio and the text alone. The wait is bounded by audio and not by time: an answer that is not there after
`WAIT_MESSAGES` more messages of the stream is left out for good, and so is one that is open when the client ends the
turn or the stream. (Messages and not samples: after a rebuild one message has the audio of many seconds.)

What is kept back belongs to the state of a stream: another engine asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from engine.errors import reading_state
from engine.messages import Closed, Flushed, Item, Output, Saved, Speech, TurnRule, TurnScored
from engine.runner.base import TurnDetector
from engine.server.recent_audio import RecentAudio
from engine.spec import ModelSpec

# Messages of a stream for which an answer is waited for: 0.8 s of a live stream. The turn detector needs about 0.2 s;
# on a machine that has no time for it, text and silence end turns.
WAIT_MESSAGES = 10


@dataclass(slots=True)
class KeptBack:
    """A message whose questions are not all answered, with the answers to come."""

    speech: Speech
    open: list[tuple[TurnScored, Future[float]]] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return all(answer.done() for _, answer in self.open)


class StreamQuestions:
    """The questions of one stream. Without a detector they have no answers, and nothing is kept."""

    def __init__(self, spec: ModelSpec, detector: TurnDetector | None) -> None:
        self._spec = spec
        self._detector = detector
        self.audio = RecentAudio()
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
        return self.audio.position

    def add_audio(self, items: Iterable[Item]) -> None:
        if self._detector is not None:
            self.audio.add(items, self._spec)

    def take(self, speech: Speech) -> list[Speech]:
        """The next message of the stream: returns the messages that can be sent now."""
        self._kept.append(self._ask(speech))
        self._drop_open(len(self._kept) - WAIT_MESSAGES)
        if self._detector is not None:
            asked = (event.sample for kept in self._kept for event, _ in kept.open)
            self.audio.drop_before(min([speech.end, *asked]) - self._detector.window_samples)
        return self.answered()

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

    def save(self) -> Saved:
        """The messages that are kept back, as plain data."""
        return {"kept": [msgspec.to_builtins(kept.speech) for kept in self._kept]}

    def resume(self, name: str, saved: Saved, items: Iterable[Item]) -> None:
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
            if isinstance(event, TurnScored) and self._detector is not None:
                start = max(event.sample - self._detector.window_samples, self.audio.start)
                audio = self.audio.later_cut(start, event.sample)
                kept.open.append((event, self._detector.submit(audio)))
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
    """The questions of all streams with a rule that asks."""

    def __init__(self, spec: ModelSpec, detector: TurnDetector | None) -> None:
        self._spec = spec
        self._detector = detector
        self._streams: dict[str, StreamQuestions] = {}
        # Those of them that keep messages back.
        self._waiting: dict[str, StreamQuestions] = {}

    def use(self, name: str, rule: TurnRule | None) -> None:
        """The stream has this rule from now on. Once it has asked, its audio is kept until it ends."""
        if rule is not None and rule.asks and name not in self._streams:
            self._streams[name] = StreamQuestions(self._spec, self._detector)
            if self._detector is not None:
                self._detector.prepare()

    def close(self, name: str) -> None:
        """Drop a stream, if it is known."""
        self._waiting.pop(name, None)
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.give_up()

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
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
        return self.kept_back > 0

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

    def resume(self, name: str, parts: dict[str, Saved], items: Iterable[Item]) -> None:
        """Continue from a saved state. Raises BadItem."""
        if "turns" not in parts:
            return
        stream = self._streams[name] = StreamQuestions(self._spec, self._detector)
        with reading_state(name, "turns"):
            stream.resume(name, parts["turns"], items)
        if len(stream):
            self._waiting[name] = stream
