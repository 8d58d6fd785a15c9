"""On which engine a stream is, how that engine counts, and how far it has come.

An engine that takes a stream over counts its positions and samples anew, from the first item it is sent. The placement
promises that everybody else sees one count: the stream's own, from its first sample on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from engine import messages
from engine.boundary.items import make_cutter, prepare
from engine.client.crash_suspects import CrashSuspicion
from engine.client.link import EngineLink, ItemRefused, Queued
from engine.client.replay import AskedFlush, KeptAudio, NewTurns, Replay, ReplayEntry, StreamLimits, memory_for
from engine.errors import AtCapacity, BadOption, DuplicateStream, EngineDead, EngineError, StreamFailed, StreamFinished
from engine.messages import Item
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class HandoffTarget:
    """An engine that could go on with a stream for another gateway: how many of its outputs were read here, and by how
    many positions and samples it counts less."""

    link: EngineLink
    read: int = 0
    before: tuple[int, int] = (0, 0)


class Placement:
    """Of one stream."""

    def __init__(self, spec: ModelSpec) -> None:
        self.link: EngineLink | None = None
        # Since when no engine goes on with the stream.
        self.lost_at: float | None = None
        # Positions below this were computed, by any engine.
        self.computed = spec.prefix_positions
        self._spec = spec
        self._computed_here = spec.prefix_positions
        self._spoke_here = False
        # By how much the engine that carries the stream now counts less than the stream itself does.
        self._position_offset = 0
        self._sample_offset = 0
        # The stream has gone on after a loss when it is computed up to here.
        self._goes_on_at = 0

    def begin(self, link: EngineLink, replay: Replay) -> None:
        """This engine carries the stream from now on; it is sent the replay first."""
        self.link = link
        self._position_offset, self._sample_offset = replay.positions, replay.samples
        self._computed_here = replay.positions + self._spec.prefix_positions
        self._spoke_here = False

    @property
    def before(self) -> tuple[int, int]:
        """Positions and samples by which this engine counts less."""
        return self._position_offset, self._sample_offset

    def lose(self, now: float, end: int) -> None:
        """The engine is lost; the audio so far ends at position `end`."""
        self.link = None
        if self.lost_at is None:
            self.lost_at = now
        # A model that waits for a stride leaves less than one uncomputed.
        all_of_it = end - (self._spec.stride_positions - 1)
        self._goes_on_at = min(all_of_it, self.computed + 1)

    def progress(self, computed: int) -> None:
        """The engine has computed so far, on its own count."""
        self._computed_here = computed + self._position_offset
        self.computed = max(self.computed, self._computed_here)

    @property
    def goes_on(self) -> bool:
        """Whether the new engine itself has passed the point where the old one stopped: what it has been sent and has
        not computed again does not count."""
        return self.link is not None and (self._spoke_here or self._computed_here >= self._goes_on_at)

    def speaks(self) -> None:
        """New words of the stream, or its end, came from this engine, perhaps before word of how far it has come."""
        self._spoke_here = True

    def uncomputed(self, end: int) -> range:
        """What the engine may have been computing when it died, if the audio sent to it ends at `end`."""
        return range(self._computed_here, end)

    def own_count(self, start: int, end: int) -> range:
        """Positions of the engine's count on the stream's own."""
        return range(start + self._position_offset, end + self._position_offset)

    def engine_count(self, positions: range) -> tuple[int, int]:
        """Positions of the stream's count on the engine's."""
        return positions.start - self._position_offset, positions.stop - self._position_offset

    def to_engine(self, items: Sequence[Item]) -> list[Item]:
        """The items as the engine counts."""
        positions, samples = self._position_offset, self._sample_offset
        if not positions:
            return list(items)
        return [structs.replace(item, offset=item.offset - positions, sample=item.sample - samples) for item in items]

    def sample_to_engine(self, sample: int | None) -> int | None:
        return None if sample is None else max(0, sample - self._sample_offset)

    def from_engine(self, output: messages.Output) -> None:
        """Turn the engine's count of samples in an output into the stream's."""
        samples = self._sample_offset
        if not samples:
            return
        match output:
            case messages.Text():
                output.sample += samples
                for word in output.words:
                    word.start_sample += samples
                    word.end_sample += samples
            case messages.Speech() | messages.Flushed() | messages.Closed():
                output.sample += samples
            case _:
                pass


# The way of one stream's commands to the engine that carries it.
#
# Commands arrive in the order in which they were sent. An engine is asked whether it takes the stream before it is
# sent what was heard so far, and a replay leaves in pieces, when the link has time for it; what comes later waits
# behind it.

# Items of a replay that travel in one command: small enough for many streams to take turns.
REPLAY_ITEMS = 16


class Delivery:
    """Asks the engine for a place at once. A source of the link's outbox while something waits. `on_done` is called
    when the engine has been sent all of the replay."""

    def __init__(
        self,
        link: EngineLink,
        opening: messages.Open,
        replay: Replay,
        finished: bool,
        on_done: Callable[[], None],
    ) -> None:
        # The engine has said yes.
        self.is_open = False
        self._stream = opening.stream
        self._link = link
        self._on_done = on_done
        self._opening: Queued | None = None
        self._waiting = deque(_commands(opening.stream, replay.entries, finished))
        if replay.known:
            # A saved state travels with audio that it refers to, and takes its turn.
            self._opening = (opening, replay.known)
            link.pace(self)
        else:
            link.send(opening)

    @classmethod
    def of_open_stream(cls, link: EngineLink, stream: str) -> Delivery:
        """To an engine that runs the stream already."""
        delivery = cls.__new__(cls)
        delivery.is_open, delivery._stream, delivery._link = True, stream, link
        delivery._opening, delivery._waiting = None, deque()
        # Nothing is replayed, so nobody waits for the end of it.
        delivery._on_done = lambda: None
        return delivery

    @property
    def is_done(self) -> bool:
        """The engine has been sent all that came so far."""
        return self.is_open and not self._waiting

    def send(self, command: messages.Command, items: list[Item] | None = None) -> None:
        if self.is_open and not self._waiting:
            self._link.send(command, items)
        else:
            self._waiting.append((command, items or []))

    def opened(self) -> None:
        """The engine has a place: now it is sent what it needs."""
        self.is_open = True
        if self._waiting:
            self._link.pace(self)
        else:
            self._on_done()

    def take(self) -> Queued | None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return opening
        if not self.is_open or not self._waiting:
            return None
        next_one = self._waiting.popleft()
        if not self._waiting:
            self._on_done()
        return next_one

    def abort(self) -> bool:
        """Send nothing more and have the engine forget the stream; False if it never heard of it."""
        self._waiting.clear()
        if self._opening is not None:
            self._opening = None
            return False
        self._link.send(messages.Abort(self._stream))
        return True


def _commands(stream: str, entries: Iterable[ReplayEntry], finished: bool) -> Iterable[Queued]:
    """A replay as commands."""
    run: list[Item] = []
    for entry in entries:
        if run and (not isinstance(entry, Item) or len(run) == REPLAY_ITEMS):
            yield messages.Feed(stream, []), run
            run = []
        if isinstance(entry, AskedFlush):
            yield messages.Flush(stream, entry.tag, entry.pause), []
        elif isinstance(entry, NewTurns):
            yield messages.ChangeTurns(stream, entry.turns), []
        else:
            run.append(entry)
    if run:
        yield messages.Feed(stream, []), run
    if finished:
        yield messages.Finish(stream), []


# What a stream has to say: handed to a listener as it comes, or a queue, read by iteration until the last output.
#
# The queue promises that nothing is said twice: speech that was told before a replay is left out of it.

# Outputs that may wait for a reader before its stream takes no more audio.
MAX_QUEUED_OUTPUTS = 1024
SPEECH_THRESHOLD = 0.5
_FINAL = (messages.Closed, messages.Failed, messages.Dead)


class Outputs:
    """`on_read` is called when there is room for more."""

    def __init__(self, sample_rate: int, on_read: Callable[[], None]) -> None:
        self._sample_rate = sample_rate
        self._on_read = on_read
        # Each with its number: how many outputs of the engine it was.
        self._queue: deque[tuple[int, messages.Output]] = deque()
        # The number of the last one that was read, and of the last that came.
        self.read = 0
        self.told = 0
        self._news = asyncio.Event()
        self._listener: Callable[[messages.Output], None] | None = None
        # Speech before this sample has been told.
        self._reported_until = 0
        # Whether somebody spoke in the last that was told.
        self.speech_goes_on = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) >= MAX_QUEUED_OUTPUTS

    def put(self, output: messages.Output | None) -> None:
        if output is None:
            return
        if self._listener is not None:
            self.read = self.told
            self._listener(output)
        else:
            self._queue.append((self.told, output))
            self._news.set()

    def listen(self, listener: Callable[[messages.Output], None]) -> None:
        """Hand each output over as it comes, to a listener who never has to wait and never raises."""
        self._listener = listener
        while self._queue:
            self.read, output = self._queue.popleft()
            listener(output)

    def begin(self, told: int) -> None:
        """Another engine carries the stream, which has said so much; what still waits here is not of it."""
        self._queue = deque((told, output) for _, output in self._queue)
        self.read = self.told = told

    def put_speech(self, speech: messages.Speech) -> None:
        self.speech_goes_on = speech.probabilities[-1:] >= [SPEECH_THRESHOLD]
        self.put(self._new_part(speech))

    async def __aiter__(self) -> AsyncIterator[messages.Output]:
        while True:
            while self._queue:
                self.read, output = self._queue.popleft()
                self._on_read()
                yield output
                if isinstance(output, _FINAL):
                    return
            self._news.clear()
            await self._news.wait()

    def _new_part(self, speech: messages.Speech) -> messages.Speech | None:
        """The speech without what was told before, if the audio is a replay."""
        if speech.sample >= self._reported_until and speech.frame_samples and speech.probabilities:
            self._reported_until = speech.sample + len(speech.probabilities) * speech.frame_samples
            return speech
        if speech.frame_samples > self._sample_rate and speech.sample < self._reported_until:
            # A long silence is one long frame, of which a part is known.
            known = min(self._reported_until - speech.sample, speech.frame_samples)
            speech.sample, speech.frame_samples = speech.sample + known, speech.frame_samples - known
        if not speech.frame_samples:
            return None
        known = max(0, -(-(self._reported_until - speech.sample) // speech.frame_samples))
        probabilities = speech.probabilities[known:]
        if not probabilities:
            return None
        sample = speech.sample + known * speech.frame_samples
        self._reported_until = sample + len(probabilities) * speech.frame_samples
        return messages.Speech(speech.stream, sample, speech.frame_samples, probabilities)


def error_of(failed: messages.Failed) -> EngineError | ValueError:
    """The error that an engine ended a stream with."""
    text = failed.message.removeprefix(f"stream {failed.stream!r}: ")
    if failed.code == AtCapacity.__name__:
        return AtCapacity(failed.stream, text)
    if failed.code == BadOption.__name__:
        return ValueError(text)
    return StreamFailed(failed.stream, text)


# The engine that a stream leaves for another one, until it is not needed any more.
#
# It keeps the stream until the other one has all of it, and until the session that was entrusted with it is there
# too: so at any moment one engine could go on with both for another gateway.


class PreviousEngine:
    """Of one stream."""

    def __init__(self, stream: str) -> None:
        # Whether a session was entrusted to the engine beside the stream.
        self.is_handed_off = False
        # Until the other engine has all of the stream.
        self.leaving: HandoffTarget | None = None
        self._stream = stream
        # From then on, until the session is there too.
        self._left: HandoffTarget | None = None

    def begin(self, target: HandoffTarget | None) -> None:
        self.end()
        self.leaving = target

    def settle(self) -> None:
        """The other engine has all of the stream."""
        if self.leaving is not None:
            self._left, self.leaving = self.leaving, None
            if not self.is_handed_off:
                self.release()

    def release(self) -> None:
        """The session is with the other engine too."""
        left, self._left = self._left, None
        if left is not None:
            left.link.send(messages.Abort(self._stream))

    def end(self) -> None:
        """Whatever still has the stream, beside the engine that carries it, is to forget it."""
        self.release()
        self._left, self.leaving = self.leaving, None
        self.release()

    def is_from(self, link: EngineLink) -> bool:
        return any(target is not None and target.link is link for target in (self.leaving, self._left))


# One stream as the gateway sees it: audio in, outputs out, on whichever engine carries it at the moment.

logger = logging.getLogger(__name__)

# A live stream that gets no audio for so long may have come to its end.
QUIET_LINE_SECONDS = 0.3


class EngineStream:
    """Made by `EngineClient.open`; iterate over it for outputs until it ends."""

    def __init__(
        self, opening: messages.Open, spec: ModelSpec, limits: StreamLimits, on_end: Callable[[EngineStream], None]
    ) -> None:
        self.id = opening.stream
        self.place = Placement(spec)
        self.suspicion = CrashSuspicion()
        self._opening = opening
        self._spec = spec
        self._limits = limits
        self._on_end = on_end
        self._cutter = make_cutter(spec)
        self._kept = KeptAudio(spec)
        self._memory = memory_for(spec, limits.keep_positions)
        self._outputs = Outputs(spec.sample_rate, self.wake)
        self._tags = 0
        self._unanswered: set[int] = set()
        # Whether any engine ever carried it.
        self.was_opened = False
        self._finished = self._aborted = self._ended = False
        self._prepared_only = False
        self._room = asyncio.Event()
        self._opened: asyncio.Future[None] | None = None
        # The way to the engine that carries the stream now, or is asked to.
        self._delivery: Delivery | None = None
        self.previous_engine = PreviousEngine(self.id)

    # For the gateway.

    async def feed(self, samples: NDArray[np.float32]) -> None:
        """Take audio at the model's rate; waits while the engine is too far behind or nobody reads the outputs."""
        self._check_open()
        if self._prepared_only:
            raise StreamFinished(self.id, "was fed prepared items; open another stream for samples")
        second = self._spec.sample_rate
        for start in range(0, len(samples), second):
            if start:
                await asyncio.sleep(0)  # a long recording must not keep everybody else waiting
            await self._wait_for_room()
            self._take_samples(samples[start : start + second])

    def feed_now(self, samples: NDArray[np.float32]) -> bool:
        """Take a short piece of audio if there is nothing to wait for and nothing wrong; else it was not taken."""
        short = len(samples) <= self._spec.sample_rate
        if not short or self._finished or self._prepared_only or not self._has_room():
            return False
        self._take_samples(samples)
        return True

    async def gap(self, samples: int) -> None:
        """So many samples of silence that nobody has to send."""
        await self._wait_for_room()
        self._send_items(prepare(self._cutter, self._cutter.cut_gap(samples), self._spec))

    async def feed_items(self, items: Sequence[Item | None]) -> None:
        """Take items prepared elsewhere, as they follow one another; a hash alone is enough for data the engine holds.

        Raises ItemRefused, and then has taken none of them.
        """
        self._check_open()
        if self._cutter.samples_in:
            raise StreamFinished(self.id, "was fed samples; open another stream for prepared items")
        await self._wait_for_room()
        link = self.place.link
        if link is None:
            raise EngineDead("the engine is being restarted; send the items again")
        checked = link.processor.check(items)
        arriving = {item.key for item in checked if item.payload is not None}
        for item in checked:
            if item.key and item.payload is None and item.key not in arriving and item.key not in link.cache:
                raise ItemRefused(f"the engine has never seen {item.key.hex()}; send the item's data with its hash")
        self._prepared_only = True
        if checked:
            shift, later = self._kept.end - checked[0].offset, self._kept.end_sample - checked[0].sample
            self._send_items(
                [structs.replace(item, offset=item.offset + shift, sample=item.sample + later) for item in checked]
            )

    async def flush(self, pause: int | None = None) -> int:
        """Ask for the text of everything fed so far; the tag comes back in `Flushed`.

        `pause`: of everything before this sample, at which nobody spoke. Where the audio is cut into positions then
        does not depend on when this was called, and neither do the words that follow. A live stream of a model that
        says words some time after they were spoken is not given silence for that: the audio that goes on brings them.
        """
        await self._wait_for_room()
        if pause is None or not (self._spec.rereads_window or self._opening.live):
            pause = None
            self._send_items(self._cut_rest())
        self._tags += 1
        self._kept.mark_flush(self._tags, self._unanswered, pause)
        self._unanswered.add(self._tags)
        self._send(messages.Flush(self.id, self._tags, self.place.sample_to_engine(pause)))
        if pause is not None:
            self._watch_for_audio()
        return self._tags

    def change_turns(self, turns: messages.TurnRule | None) -> None:
        """From here on, turns end by another rule."""
        self._kept.mark_turns(turns)
        self._send(messages.ChangeTurns(self.id, turns))

    async def finish(self) -> None:
        """No more audio; the outputs end with `Closed` when all is said."""
        self._check_open()
        self._send_items(self._cut_rest())
        self._finished = True
        self._send(messages.Finish(self.id))

    async def abort(self) -> None:
        """Forget the stream now. Harmless when it has ended."""
        if self._ended:
            return
        self._finished = self._aborted = True
        if self._delivery is None or not self._delivery.abort():
            self.end(messages.Closed(self.id, self._kept.end_sample))

    def __aiter__(self) -> AsyncIterator[messages.Output]:
        return aiter(self._outputs)

    def listen(self, listener: Callable[[messages.Output], None]) -> None:
        """Instead of iteration: have each output handed over as it comes. The listener must not raise."""
        self._outputs.listen(listener)

    @property
    def target(self) -> HandoffTarget | None:
        """The engine that could go on with the stream for another gateway; None while none has all of it."""
        leaving = self.previous_engine.leaving
        if leaving is not None:
            return leaving if leaving.link.lost is None else None
        if self.place.link is None or self._delivery is None or not self._delivery.is_done:
            return None
        return HandoffTarget(self.place.link, self.read, self.place.before)

    @property
    def read(self) -> int:
        """How many outputs of the engine that carries the stream now have been read."""
        return self._outputs.read

    def rest(self) -> NDArray[np.float32]:
        """Audio that was fed and has not left for the engine, with the context before it. What was fed to another one
        than would go on is not told: its client has it."""
        return self._cutter.rest() if self.previous_engine.leaving is None else np.zeros(0, np.float32)

    def lay_down(self) -> None:
        """The stream goes on at another gateway: nothing more is sent, and nobody reads its outputs here."""
        if self.previous_engine.leaving is not None and self._delivery is not None:
            self._delivery.abort()
        self._delivery = self.place.link = None
        if not self._ended:
            self._ended = True
            self._room.set()
            self._on_end(self)

    # For the client that owns the stream.

    async def open_on(self, link: EngineLink) -> None:
        """Open or reopen here, replaying what is kept. Raises what the engine answers, or EngineDead; then no engine
        carries the stream."""
        if not self._memory.can_replay:
            raise StreamFailed(
                self.id, "came from another gateway, and too little of it was heard here to go on elsewhere"
            )
        if self.previous_engine.is_from(link):
            self.previous_engine.end()
        self._opened = opened = asyncio.get_running_loop().create_future()
        self._outputs.begin(0)
        replay = self._memory.replay(self._kept)
        self.place.begin(link, replay)
        suspicion = self.suspicion
        opening = structs.replace(
            self._opening,
            forced_tokens=replay.forced_tokens,
            state=replay.state,
            catch_up_until=replay.catch_up_until,
            suspect=self.place.engine_count(suspicion.spot) if suspicion.alone else None,
        )
        self._delivery = Delivery(link, opening, replay, self._finished, self.previous_engine.settle)
        try:
            await opened
        except (EngineError, ValueError):
            self._leave_engine()
            raise

    def carried_by(self, link: EngineLink, adopted: messages.SessionGiven) -> int:
        """This engine runs the stream already, for a gateway before us. Returns the sample from which on its audio has
        to be fed."""
        positions, samples = adopted.position_offset, adopted.sample_offset
        end, sample = adopted.end + positions, adopted.sample + samples
        self.place.begin(link, Replay(positions, samples, []))
        self._kept.end, self._kept.end_sample = end, sample
        self._memory.go_on(end, adopted.token + positions)
        self._tags = adopted.flushes
        self._unanswered = set(range(adopted.answered + 1, adopted.flushes + 1))
        self._watch_for_audio()
        self._outputs.begin(adopted.consumed)
        self.was_opened = True
        self._delivery = Delivery.of_open_stream(link, self.id)
        return self._cutter.go_on(end, sample, adopted.segment + samples)

    @property
    def may_move(self) -> bool:
        """Whether another engine could go on from here with the same words: all that was said has been read."""
        at_rest = self.target is not None and self.previous_engine.leaving is None and not len(self._outputs)
        return at_rest and self.is_open and not self._aborted and self._memory.is_whole(self._kept)

    @property
    def at_pause(self) -> bool:
        """Nobody speaks, and nobody waits for an answer."""
        return not self._outputs.speech_goes_on and not self._unanswered

    def part(self, now: float) -> None:
        """Leave the engine for another one. It keeps the stream until that one has all of it."""
        self.previous_engine.begin(self.target)
        self.place.lose(now, self._kept.end)
        self._leave_engine()

    @property
    def is_open(self) -> bool:
        """Whether its last output is still to come."""
        return not self._ended

    def abandon(self) -> None:
        """The stream is not wanted any more by the one who opened it; nobody reads its outputs."""
        if self._delivery is not None:
            self._delivery.abort()
        self._ended = True

    def drop(self) -> None:
        """The stream is not wanted, here or anywhere: nobody reads its outputs."""
        if self._delivery is not None:
            self._delivery.abort()
        self.previous_engine.end()
        self.lay_down()

    def detach(self, why: str, now: float) -> None:
        """The engine is lost. Until another takes over, audio is kept and nothing is sent."""
        self.place.lose(now, self._kept.end)
        self._answer_open(EngineDead(why))
        self._leave_engine()

    def uncomputed(self) -> range:
        """What may have been computed when the engine died."""
        return self.place.uncomputed(self._kept.end)

    def take(self, output: messages.Output) -> None:
        """An output of the engine that carries the stream now."""
        self._outputs.told += 1
        self.place.from_engine(output)
        match output:
            case messages.Opened():
                self.was_opened = True
                if self._delivery is not None:
                    self._delivery.opened()
                self._answer_open(None)
            case messages.Text():
                self._outputs.put(self._memory.hear(output))
            case messages.Speech():
                self._outputs.put_speech(output)
            case messages.Flushed():
                if output.tag in self._unanswered:
                    self._unanswered.discard(output.tag)
                    self._outputs.put(output)
            case messages.StreamState():
                self._memory.take(output)
                self._memory.trim(self._kept)
            case messages.Failed() if self._opened is not None and not self._opened.done():
                self._answer_open(error_of(output))
            case messages.Closed() | messages.Failed() | messages.Dead():
                self.end(output)
            case messages.Refused() if output.code == DuplicateStream.__name__:
                self._answer_open(DuplicateStream(self.id, "is open already; use another id"))
            case messages.Refused():
                # It changed nothing: an answer to a command that crossed with the stream's end.
                logger.debug("stream %s: %s", self.id, output.message)

    def progress(self, computed: int) -> None:
        """The engine that carries the stream now has computed so far."""
        self.place.progress(computed)
        self.suspicion.passed(self.place.computed)
        self._memory.trim(self._kept)
        self._room.set()

    def wake(self) -> None:
        """Something that audio was waiting for may have changed."""
        self._room.set()

    def end(self, output: messages.Output) -> None:
        """The last output. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._answer_open(EngineDead("the stream ended before it was open"))
        self.previous_engine.end()
        self._outputs.put(output)
        self._room.set()
        self._on_end(self)

    # Inside.

    def _check_open(self) -> None:
        if self._finished:
            raise StreamFinished(self.id, "was finished; open a new stream for more audio")

    async def _wait_for_room(self) -> None:
        self._check_open()
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def _has_room(self) -> bool:
        if self._ended:
            return True
        if self._kept.end - self.place.computed >= self._limits.ahead_positions:
            return False
        return not self._outputs.full and (self.place.link is None or self.place.link.has_room)

    def _take_samples(self, samples: NDArray[np.float32]) -> None:
        self._send_items(prepare(self._cutter, self._cutter.cut(samples), self._spec))

    def _watch_for_audio(self) -> None:
        """See that a flush at a pause does not wait for audio that nobody sends."""
        if not self._spec.rereads_window:
            asyncio.get_running_loop().call_later(QUIET_LINE_SECONDS, self._bring_out, self._kept.end)

    def _bring_out(self, end: int) -> None:
        """Put silence into the stream if a flush is unanswered and no audio came behind `end`."""
        if self._unanswered and not self._finished and not self._ended:
            if self._kept.end > end:
                self._watch_for_audio()
            else:
                self._send_items(self._cut_rest())

    def _cut_rest(self) -> list[Item]:
        delay = self._opening.delay_positions
        pads = self._spec.flush_positions_for(self._spec.default_delay_positions if delay is None else delay)
        return prepare(self._cutter, self._cutter.flush(pads), self._spec)

    def _send_items(self, items: list[Item]) -> None:
        # After the engine has ended the stream its outputs say so; audio on its way is not an error.
        if not items or self._ended:
            return
        self._kept.add(items)
        if self._delivery is not None:
            self._delivery.send(messages.Feed(self.id, []), self.place.to_engine(items))

    def _send(self, command: messages.Command) -> None:
        if self._delivery is not None and not self._ended:
            self._delivery.send(command)

    def _leave_engine(self) -> None:
        """No engine carries the stream now."""
        self._delivery = self.place.link = None
        self._room.set()
        if self._aborted:
            self.end(messages.Closed(self.id, self._kept.end_sample))

    def _answer_open(self, error: EngineError | ValueError | None) -> None:
        if self._opened is None or self._opened.done():
            return
        if error is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(error)
            # The one who asked may have gone.
            self._opened.exception()
