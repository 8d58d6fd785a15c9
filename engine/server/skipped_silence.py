"""Skipped silence: keeps long silence from a frame-synchronous model, which would compute all of it.

A frame-synchronous model, such as Voxtral, computes every position (80 ms of audio for Voxtral), also in silence, and
each stream of a conversation is silent for most of the time. So after some seconds of silence a live stream's audio
waits here and does not go to the scheduler. Audio that has waited is skipped, except for the last part of it: when
speech starts, the stream continues a little before it. `SkippingStream` has the waiting audio and the skips of one
stream. `SilenceSkipper` has all streams and is a part of the engine loop, between its commands and the scheduler.

To the model the audio around a skip is contiguous. So there are two counts of positions: the *gateway count* includes
skipped positions, the *engine count* does not. The times of words are not affected, because each item has its sample.

The gate of the stream's speech track (`engine/server/speech_track.py`) decides. It is open at the start, opens with any
speech that the track has found, and closes when silence has lasted for its hang-over, which is shorter while the engine
is busy (`skip_sooner`). Apart from that, which items are skipped depends only on the probabilities of speech, not on
when they arrive: an item is *released* to the scheduler only when no later probability could skip it. A flush, which
asks for the text up to a point now, releases everything before it. Each skipped position is reported to the gateway as
a `SKIPPED` token, so that a replay, which computes the stream again on another engine, skips the same positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from engine.boundary.items import can_be_split, is_gap, split_item
from engine.core.scheduler import Scheduler
from engine.core.stream import REPORT_AFTER_TOKENS
from engine.errors import StreamFinished
from engine.messages import SKIPPED, Finish, Flush, Item, Open, Output, Text
from engine.server.speech import Target
from engine.server.speech_track import GateSettings, SpeechGate, SpeechTrack
from engine.spec import ModelSpec

SAMPLE_RATE = 16_000
# Evidence that opens the gate. It is as little as the gate of a windowed model needs in a conversation, because a
# missed word is worse than computed silence.
EVIDENCE = 0.2
PRE_ROLL_SECONDS = 0.48
# Silence to compute while the engine is busy, if that is less than usual.
SHORT_SILENCE_SECONDS = 1.0


def skip_settings(silence_seconds: float) -> GateSettings:
    """Settings of a gate that skips silence after this many seconds of it."""
    return GateSettings(
        evidence=EVIDENCE,
        conversation_evidence=EVIDENCE,
        pre_roll_samples=int(PRE_ROLL_SECONDS * SAMPLE_RATE),
        hang_over_samples=int(silence_seconds * SAMPLE_RATE),
        follows_track=True,
    )


# Called when all audio before a flush has been released; returns the engine position up to which text is wanted (None:
# all of it).
FindPosition = Callable[[], int | None]


@dataclass(slots=True)
class PendingMark:
    """A flush or the end of the stream, queued behind the audio before it. `position` as in `add_mark`."""

    command: Flush | Finish
    position: FindPosition | None


class SkippingStream:
    """One stream: its waiting audio, its skips, and the conversion between the two counts."""

    def __init__(self, message: Open, gate: GateSettings | None, spec: ModelSpec) -> None:
        self._spec = spec
        self._samples_per_position = spec.samples_per_position
        if gate is not None:
            # The model completes the last word before a pause this much later; the audio until then must not be
            # skipped. Two positions are added as a margin.
            delay = spec.default_delay_positions if message.delay_positions is None else message.delay_positions
            needed = (spec.pause_positions_for(delay) + 2) * self._samples_per_position
            usual = max(gate.hang_over_samples, needed)
            gate = replace(gate, hang_over_samples=usual)
            self._usual_silence = usual
            self._short_silence = min(usual, max(int(SHORT_SILENCE_SECONDS * spec.sample_rate), needed))
        self.gate = None if gate is None else SpeechGate(gate, is_open=True)
        self.finished = False
        self.waiting: deque[Item | PendingMark] = deque()
        # For each waiting mark: the sample up to which audio had arrived.
        self._marks: deque[int] = deque()
        # End of the audio received, end of the audio that the speech track has processed, and the length of its frames,
        # all in samples.
        self._end_sample = self._processed = self._frame = 0
        # A replay: positions (gateway count) that were skipped the first time, and where this record ends.
        first, tokens = spec.prefix_positions, message.forced_tokens
        self._recorded = {first + index for index, token in enumerate(tokens) if token == SKIPPED}
        self._recorded_until = first + len(tokens)
        # Skipped positions in total, and (engine position, total before it) for each skip.
        self.skipped_positions = 0
        self._skips: list[tuple[int, int]] = []
        # Skips not reported yet: (engine position, length); and the sum of their lengths.
        self._unreported_skips: deque[tuple[int, int]] = deque()
        self.unreported = 0
        self._reported_until = self._recorded_until - len(self._recorded)
        self._skip_until_sample = 0

    def skip_sooner(self, is_busy: bool) -> None:
        """From the next frame on, skip silence after less of it, or after the usual time."""
        if self.gate is not None:
            silence = self._short_silence if is_busy else self._usual_silence
            self.gate.settings = replace(self.gate.settings, hang_over_samples=silence)

    def add(self, items: Iterable[Item]) -> None:
        """Queue items that have arrived."""
        for item in items:
            if item.payload is not None and item.payload.ndim > 1:
                # The speech detector cannot process features, so nothing is skipped any more.
                self.gate = None
            self._end_sample = max(self._end_sample, item.sample + self._samples(item))
            self.waiting.append(item)

    def add_mark(self, command: Flush | Finish, position: FindPosition | None = None) -> None:
        """Queue a flush or the end. `position` finds the engine position up to which text is wanted; None: all."""
        self.waiting.append(PendingMark(command, position))
        self._marks.append(self._end_sample)

    @property
    def is_marked(self) -> bool:
        """Whether a flush or the end of the stream waits."""
        return bool(self._marks)

    def on_track(self, sample: int, frame_samples: int) -> None:
        """The speech track has processed the audio up to this sample, in frames of this length."""
        self._processed = sample
        self._frame = min(self._frame, frame_samples) or frame_samples

    def is_released_at_once(self, item: Item) -> bool:
        """Fast path for speech: whether a new item can be released at once. If not, `add` it."""
        gate, payload = self.gate, item.payload
        if gate is None or self.waiting or item.offset < self._recorded_until or payload is None or payload.ndim > 1:
            return False
        end, certain = item.sample + self._samples(item), gate.certain_until
        if certain is None or end > certain or self._position_offset(item, gate.floor):
            return False
        self._end_sample = max(self._end_sample, end)
        return True

    @property
    def nothing_is_released(self) -> bool:
        """Fast path for silence. If True, `next` would return None: nothing waits, or the first item must wait."""
        if not self.waiting:
            return True
        gate, head = self.gate, self.waiting[0]
        if gate is None or gate.is_open or self._marks or isinstance(head, PendingMark) or is_gap(head):
            return False
        return head.offset >= self._recorded_until and head.sample + self._samples(head) > gate.floor

    def next(self, reached: int) -> Item | PendingMark | None:
        """The next released item or mark, in engine positions; None: the rest must wait for probabilities.

        `reached`: the engine position that the stream has reached.
        """
        gate = self.gate
        while self.waiting:
            head = self.waiting.popleft()
            if isinstance(head, PendingMark):
                self._marks.popleft()
                return head
            if head.offset < self._recorded_until:
                head = self._recorded_part(head)
                if head.offset not in self._recorded:
                    return self.on_engine_count(head)
                self._skip(head, reached, reported=True)
            elif gate is None:
                return self.on_engine_count(head)
            else:
                passed, released = self._position_offset(head, gate.floor), self._released_positions(head, gate)
                # Audio is split only where it is released; until then it is skipped by whole items.
                if passed == head.length or (passed and (released or is_gap(head))):
                    self._skip(self._split(head, passed), reached, reported=False)
                elif released:
                    return self.on_engine_count(self._split(head, released))
                else:
                    self.waiting.appendleft(head)
                    return None
        return None

    def gateway_count(self, position: int) -> int:
        """Convert an engine position to the gateway count, including what was skipped right before it."""
        if self._skips and position >= self._skips[-1][0]:
            return position + self.skipped_positions  # the usual case
        index = bisect_right(self._skips, (position, 1 << 62)) - 1
        return position + (self._skips[index][1] if index >= 0 else 0)

    @property
    def is_settled(self) -> bool:
        """Whether all skips are reported and `forget_before` has nothing to do."""
        return not self.unreported and len(self._skips) < 2

    def forget_before(self, position: int) -> None:
        """Positions before this one will not be converted any more."""
        while len(self._skips) > 1 and self._skips[1][0] <= position:
            self._skips.pop(0)

    def add_skips(self, text: Text) -> None:
        """Insert `SKIPPED` tokens for unreported skips into the tokens of a text."""
        start, tokens, done = self._reported_until, [], 0
        self._reported_until = end = start + len(text.tokens)
        while self._unreported_skips and self._unreported_skips[0][0] <= end:
            position, length = self._unreported_skips.popleft()
            tokens += text.tokens[done : position - start] + [SKIPPED] * length
            done = position - start
            self.unreported -= length
            if position == end:
                text.sample = max(text.sample, self._skip_until_sample)
        if tokens:
            text.tokens = tokens + text.tokens[done:]

    def _samples(self, item: Item) -> int:
        return item.covered_samples(self._samples_per_position)

    def _is_flushed(self) -> bool:
        """Whether a flush wants the text of the first items, and the track has processed the audio before it."""
        return bool(self._marks) and self._processed + self._frame > self._marks[0]

    def _recorded_part(self, item: Item) -> Item:
        """The first positions of an item that were all skipped the first time, or all not."""
        if not can_be_split(item):
            return item
        was_skipped, count = item.offset in self._recorded, 1
        stop = min(item.length, self._recorded_until - item.offset)
        while count < stop and (item.offset + count in self._recorded) == was_skipped:
            count += 1
        return self._split(item, count)

    def _position_offset(self, item: Item, sample: int) -> int:
        """How many positions of an item end at or before a sample. An item that cannot be split counts as one."""
        covered, passed = self._samples(item), sample - item.sample
        if not covered or passed <= 0:
            return 0
        if is_gap(item):
            return min(item.length, passed // self._samples_per_position)
        if passed >= covered:
            return item.length
        return passed // self._samples_per_position if can_be_split(item) else 0

    def _released_positions(self, item: Item, gate: SpeechGate) -> int:
        """How many positions of an item are released: all if a flush wants its text, else those that begin within the
        certain part, because positions are not divided."""
        if self._is_flushed():
            return item.length
        certain = 0 if gate.certain_until is None else gate.certain_until
        if item.sample >= certain:
            return 0
        if not self._samples(item):
            return item.length
        return self._position_offset(item, certain + self._samples_per_position - 1)

    def _split(self, item: Item, positions: int) -> Item:
        """The first `positions` of an item; the rest goes back to the queue."""
        if positions >= item.length:
            return item
        first, rest = split_item(item, positions, self._spec)
        self.waiting.appendleft(rest)
        return first

    def on_engine_count(self, item: Item) -> Item:
        """A released item, with its offset on the engine count."""
        return structs.replace(item, offset=item.offset - self.skipped_positions) if self.skipped_positions else item

    def _skip(self, item: Item, reached: int, reported: bool) -> None:
        """Count an item as skipped at the engine position `reached`."""
        self.skipped_positions += item.length
        if self._skips and self._skips[-1][0] == reached:
            self._skips.pop()
        self._skips.append((reached, self.skipped_positions))
        self._skip_until_sample = item.sample + self._samples(item)
        if not reported:
            self._unreported_skips.append((reached, item.length))
            self.unreported += item.length


class SilenceSkipper:
    """Filters the commands for live streams between the loop and the scheduler.

    With `settings` None it only repeats recorded skips.
    """

    def __init__(self, scheduler: Scheduler, settings: GateSettings | None, emit: Callable[[Output], None]) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._emit = emit
        self._streams: dict[str, SkippingStream] = {}
        self._now = 0
        self._is_busy = False

    def skip_sooner(self, is_busy: bool) -> None:
        """While the engine is busy, skip silence after `SHORT_SILENCE_SECONDS`, if that is less than usual."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            for stream in self._streams.values():
                stream.skip_sooner(is_busy)

    def open(self, message: Open) -> Open:
        """The message for scheduler and runner, in engine positions."""
        skipped_before = SKIPPED in message.forced_tokens
        if not message.live or (self._settings is None and not skipped_before):
            return message
        stream = self._streams[message.stream] = SkippingStream(message, self._settings, self._scheduler.spec)
        stream.skip_sooner(self._is_busy)
        if not skipped_before:
            return message
        suspect, first = message.suspect, self._scheduler.spec.prefix_positions
        if suspect is not None:
            start, end = (position - message.forced_tokens[: position - first].count(SKIPPED) for position in suspect)
            suspect = start, end
        kept = [token for token in message.forced_tokens if token != SKIPPED]
        return structs.replace(message, forced_tokens=kept, suspect=suspect)

    def check_open(self, name: str) -> None:
        """Raises StreamError if the stream takes no more audio or flushes."""
        self._scheduler.require_open(name)
        stream = self._streams.get(name)
        if stream is not None and stream.finished:
            raise StreamFinished(name, "was finished; open a new stream for more audio")

    def close(self, name: str) -> None:
        """Drop a stream. Does nothing for an unknown stream."""
        self._streams.pop(name, None)

    def feed(self, name: str, items: list[Item], now: int) -> None:
        stream = self._streams.get(name)
        if stream is None:
            self._scheduler.feed(name, items, now)
            return
        self.check_open(name)
        self._now = now
        if all(map(stream.is_released_at_once, items)):
            self._scheduler.feed(name, [stream.on_engine_count(item) for item in items], now)
            if stream.is_settled:
                return
        else:
            stream.add(items)
            if stream.nothing_is_released:
                return
        self._release(name, stream)

    def flush(self, message: Flush, position: FindPosition | None = None) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            self._scheduler.flush(message.stream, message.tag, None if position is None else position())
            return
        self.check_open(message.stream)
        stream.add_mark(message, position)
        self._release(message.stream, stream)

    def finish(self, message: Finish) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            self._scheduler.finish(message.stream)
            return
        self.check_open(message.stream)
        stream.finished = True
        stream.add_mark(message)
        self._release(message.stream, stream)

    def gate(self, name: str) -> SpeechGate | None:
        """The gate that the stream's speech track has to drive; None if no silence of it is skipped."""
        stream = self._streams.get(name)
        return None if stream is None else stream.gate

    def needs_each_frame(self, name: str, track: SpeechTrack, probabilities: Sequence[float]) -> bool:
        """Whether items wait: then the state of the gate after each frame counts, except in speech that goes on. In a
        silence that goes on the last state counts, unless a flush waits."""
        stream = self._streams.get(name)
        if stream is None or stream.gate is None or not stream.waiting:
            return False
        return stream.is_marked or not track.is_silence(probabilities)

    def on_track(self, name: str, sample: int, frame_samples: int) -> bool:
        """The stream's speech track has processed the audio up to this sample: release items. Returns whether its
        silence is skipped. Raises StreamError."""
        stream = self._streams.get(name)
        if stream is None or stream.gate is None or name not in self._scheduler.streams:
            return False
        stream.on_track(sample, frame_samples)
        if not stream.nothing_is_released:
            self._release(name, stream)
        return not stream.gate.is_open

    def add_skips(self, outputs: Iterable[Output]) -> None:
        """Add the skipped positions to the texts, so that a replay skips the same."""
        if self._streams:
            for output in outputs:
                if isinstance(output, Text) and (stream := self._streams.get(output.stream)) is not None:
                    stream.add_skips(output)

    def gateway_count(self, name: str, position: int) -> int:
        """Convert an engine position of a stream to the gateway count."""
        stream = self._streams.get(name)
        return position if stream is None or not stream.skipped_positions else stream.gateway_count(position)

    def on_gateway_count(self, targets: Iterable[Target]) -> list[Target]:
        """Convert the positions of targets to the gateway count."""
        find = self._streams.get
        return [
            (name, start, end)
            if (stream := find(name)) is None or not stream.skipped_positions
            else (name, stream.gateway_count(start), stream.gateway_count(end))
            for name, start, end in targets
        ]

    def _release(self, name: str, skipping: SkippingStream) -> None:
        """Pass released items and marks to the scheduler, in order."""
        scheduler = self._scheduler
        while (stream := scheduler.streams.get(name)) is not None:
            entry = skipping.next(stream.available)
            if isinstance(entry, Item):
                scheduler.feed(name, [entry], self._now)
            elif entry is None:
                break
            elif isinstance(entry.command, Flush):
                position = None if entry.position is None else entry.position()
                scheduler.flush(name, entry.command.tag, position)
            else:
                scheduler.finish(name)
        if stream is None:
            return
        skipping.forget_before(stream.computed)
        if skipping.unreported >= REPORT_AFTER_TOKENS and stream.computed == stream.available:
            self._emit(stream.text.unsent_tokens())
