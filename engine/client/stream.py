"""One stream as the gateway sees it: audio in, outputs out, on whichever engine carries it at the moment."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.boundary import codec
from engine.client.link import EngineLink
from engine.client.processor import ItemRefused, make_cutter, prepare
from engine.client.replay import FlushMark, KeptAudio, memory_for
from engine.errors import AtCapacity, BadOption, DuplicateStream, EngineDead, EngineError, StreamFailed, StreamFinished
from engine.messages import Item
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Outputs that may wait for a reader before its stream takes no more audio.
MAX_QUEUED_OUTPUTS = 1024
# Items of a replay that travel in one command.
REPLAY_ITEMS = 64
_FINAL = (messages.Closed, messages.Failed, messages.Dead)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much audio of a stream a gateway holds: what a replay needs, and what the engine has not computed yet."""

    keep_positions: int
    ahead_positions: int


class EngineStream:
    """Made by `EngineClient.open`; iterate over it for outputs until it ends."""

    def __init__(
        self, opening: messages.Open, spec: ModelSpec, limits: StreamLimits, on_end: Callable[[EngineStream], None]
    ) -> None:
        self.id = opening.stream
        self.link: EngineLink | None = None
        # Since when no engine goes on with it, and how many engines died with it at the same spot of their last step.
        self.lost_at: float | None = None
        self.strikes = 0
        self._spot = range(0)
        # Whether that spot must not be computed together with another suspect's, or the stream not even reopened.
        self.alone = False
        self.must_wait = False
        self._stuck_at = 0
        self._all_by = 0
        self._opening = opening
        self._spec = spec
        self._limits = limits
        self._on_end = on_end
        self._cutter = make_cutter(spec)
        self._kept = KeptAudio(spec)
        self._memory = memory_for(spec, limits.keep_positions)
        # What the engine that carries the stream now counts less than the stream itself.
        self._positions_before = 0
        self._samples_before = 0
        self._computed = spec.prefix_positions
        self._computed_here = spec.prefix_positions  # by the engine that carries the stream now
        self._tags = 0
        self._unanswered: set[int] = set()
        self._finished = False
        self._aborted = False
        self._ended = False
        self._prepared_only = False
        self._heard_until = 0
        self._queue: deque[messages.Output] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._opened: asyncio.Future[None] | None = None

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
            cut = self._cutter.push(samples[start : start + second])
            self._send_items(prepare(self._cutter, cut, self._spec))

    async def gap(self, samples: int) -> None:
        """So many samples of silence that nobody has to send."""
        self._check_open()
        await self._wait_for_room()
        self._send_items(prepare(self._cutter, self._cutter.gap(samples), self._spec))

    async def feed_items(self, items: Sequence[Item | None]) -> None:
        """Take items prepared elsewhere, as they follow one another; a hash alone is enough for data the engine holds.

        Raises ItemRefused, and then has taken none of them.
        """
        self._check_open()
        if self._cutter.samples_in:
            raise StreamFinished(self.id, "was fed samples; open another stream for prepared items")
        await self._wait_for_room()
        link = self.link
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
                [replace(item, offset=item.offset + shift, sample=item.sample + later) for item in checked]
            )

    async def flush(self, at_pause: bool = False) -> int:
        """Ask for the text of everything fed so far; the tag comes back in `Flushed`.

        `at_pause`: of everything before the last pause, for a model that knows pauses. Where the audio is cut into
        positions then does not depend on when this was called, and neither do the words that follow.
        """
        self._check_open()
        await self._wait_for_room()
        at_pause = at_pause and self._spec.rereads_window
        if not at_pause:
            self._send_items(self._cut_rest())
        self._tags += 1
        self._kept.mark_flush(self._tags, self._unanswered, at_pause)
        self._unanswered.add(self._tags)
        self._send(messages.Flush(self.id, self._tags, at_pause))
        return self._tags

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
        self._send(messages.Abort(self.id))
        if self.link is None:
            self.end(messages.Closed(self.id, self._kept.end_sample))

    def __aiter__(self) -> AsyncIterator[messages.Output]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[messages.Output]:
        while True:
            while self._queue:
                output = self._queue.popleft()
                self._room.set()
                yield output
                if isinstance(output, _FINAL):
                    return
            self._news.clear()
            await self._news.wait()

    # For the client that owns the stream.

    async def open_on(self, link: EngineLink) -> None:
        """Open or reopen here, replaying what is kept. Raises what the engine answers, or EngineDead."""
        self.link = link
        self._opened = opened = asyncio.get_running_loop().create_future()
        replay = self._memory.replay(self._kept)
        self._positions_before, self._samples_before = replay.positions, replay.samples
        self._computed_here = replay.positions + self._spec.prefix_positions
        opening = replace(
            self._opening,
            forced_tokens=replay.forced_tokens,
            checkpoint=replay.checkpoint,
            catch_up_until=replay.catch_up_until,
            suspect=(self._spot.start - replay.positions, self._spot.stop - replay.positions) if self.alone else None,
        )
        link.send(opening, replay.known)
        run: list[Item] = []
        for entry in [*replay.entries, None]:
            if run and (not isinstance(entry, Item) or len(run) == REPLAY_ITEMS):
                link.send(messages.Feed(self.id, []), run)
                run = []
            if isinstance(entry, Item):
                run.append(entry)
            elif isinstance(entry, FlushMark):
                link.send(messages.Flush(self.id, entry.tag, entry.at_pause))
        if self._finished:
            link.send(messages.Finish(self.id))
        await opened

    @property
    def is_open(self) -> bool:
        """Whether more is to be said about it."""
        return not self._ended

    def forsake(self) -> None:
        """Whoever wanted to open it does not any more; nobody reads its outputs."""
        self._send(messages.Abort(self.id))
        self._ended = True

    def detach(self, why: str, now: float) -> None:
        """The engine is lost. Until another takes over, audio is kept and nothing is sent."""
        self.link = None
        if self.lost_at is None:
            self.lost_at = now
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(EngineDead(why))
        self._stuck_at = self._computed
        # A model that waits for a stride leaves less than one uncomputed.
        self._all_by = self._kept.end - (self._spec.stride_positions - 1)
        self._room.set()
        if self._aborted:
            self.end(messages.Closed(self.id, self._kept.end_sample))

    @property
    def goes_on(self) -> bool:
        """Whether the new engine has passed the point where the old one stopped."""
        return self._computed >= min(self._all_by, self._stuck_at + 1)

    def strike(self, start: int, end: int) -> None:
        """An engine died while it computed these positions, on its own count, of this stream and perhaps others."""
        last, spot = self._spot, range(start + self._positions_before, max(start + 1, end) + self._positions_before)
        both = range(max(spot.start, last.start), min(spot.stop, last.stop))
        if self.strikes and spot.stop <= last.start:
            return  # on its way to the spot where the engine before died: that says nothing new
        self.strikes = self.strikes + 1 if both else 1
        self._spot = both or spot

    def unheard(self) -> tuple[int, int]:
        """What may have been computed when the engine died, as the engine counts."""
        return self._computed_here - self._positions_before, self._kept.end - self._positions_before

    def take(self, output: messages.Output) -> None:
        """An output of the engine that carries the stream now."""
        if self._samples_before:
            _count_from(output, self._samples_before)
        match output:
            case messages.Opened():
                self._answer_open(None)
            case messages.Text():
                self._put(self._memory.hear(output))
            case messages.Speech():
                self._put(self._new_speech(output))
            case messages.Flushed():
                if output.tag in self._unanswered:
                    self._unanswered.discard(output.tag)
                    self._put(output)
            case messages.Checkpoint():
                self._memory.take(output)
                self._memory.trim(self._kept)
            case messages.Failed() if self._opened is not None and not self._opened.done():
                self._answer_open(_as_error(output))
            case messages.Closed() | messages.Failed() | messages.Dead():
                self.end(output)
            case messages.Refused() if output.code == DuplicateStream.__name__:
                self._answer_open(DuplicateStream(self.id, "is open already; use another id"))
            case messages.Refused():
                # It changed nothing: an answer to a command that crossed with the stream's end.
                logger.debug("stream %s: %s", self.id, output.message)

    def progress(self, progress: codec.Progress) -> None:
        self._computed_here = progress.computed + self._positions_before
        self._computed = max(self._computed, self._computed_here)
        if self._computed >= self._spot.stop:
            self.strikes, self.alone, self.must_wait = 0, False, False  # past the spot: it was not the reason
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
        self._put(output)
        self._room.set()
        self._on_end(self)

    # Inside.

    def _check_open(self) -> None:
        if self._finished:
            raise StreamFinished(self.id, "was finished; open a new stream for more audio")

    async def _wait_for_room(self) -> None:
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def _has_room(self) -> bool:
        if self._ended:
            return True
        if self._kept.end - self._computed >= self._limits.ahead_positions:
            return False
        return len(self._queue) < MAX_QUEUED_OUTPUTS and (self.link is None or self.link.has_room)

    def _cut_rest(self) -> list[Item]:
        delay = self._opening.delay_positions
        pads = self._spec.flush_positions_for(self._spec.default_delay_positions if delay is None else delay)
        return prepare(self._cutter, self._cutter.flush(pads), self._spec)

    def _send_items(self, items: list[Item]) -> None:
        # After the engine has ended the stream its outputs say so; audio on its way is not an error.
        if not items or self._ended:
            return
        self._kept.add(items)
        if self.link is not None:
            positions, samples = self._positions_before, self._samples_before
            if positions:
                items = [replace(item, offset=item.offset - positions, sample=item.sample - samples) for item in items]
            self.link.send(messages.Feed(self.id, []), items)

    def _send(self, command: messages.Command) -> None:
        if self.link is not None and not self._ended:
            self.link.send(command)

    def _answer_open(self, error: EngineError | ValueError | None) -> None:
        opened = self._opened
        if opened is None or opened.done():
            return
        if error is None:
            opened.set_result(None)
        else:
            opened.set_exception(error)
            # Whoever asked may have gone.
            opened.exception()

    def _put(self, output: messages.Output | None) -> None:
        if output is not None:
            self._queue.append(output)
            self._news.set()

    def _new_speech(self, speech: messages.Speech) -> messages.Speech | None:
        """Without what was heard before, if the audio is a replay."""
        if speech.frame_samples > self._spec.sample_rate and speech.sample < self._heard_until:
            # A long silence is one long frame, of which a part is known.
            known = min(self._heard_until - speech.sample, speech.frame_samples)
            speech.sample, speech.frame_samples = speech.sample + known, speech.frame_samples - known
        if not speech.frame_samples:
            return None
        known = max(0, -(-(self._heard_until - speech.sample) // speech.frame_samples))
        probabilities = speech.probabilities[known:]
        if not probabilities:
            return None
        sample = speech.sample + known * speech.frame_samples
        self._heard_until = sample + len(probabilities) * speech.frame_samples
        return messages.Speech(self.id, sample, speech.frame_samples, probabilities)


def _count_from(output: messages.Output, samples: int) -> None:
    """Turn the engine's count of samples into the stream's."""
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


def _as_error(failed: messages.Failed) -> EngineError | ValueError:
    text = failed.message.removeprefix(f"stream {failed.stream!r}: ")
    if failed.code == AtCapacity.__name__:
        return AtCapacity(failed.stream, text)
    if failed.code == BadOption.__name__:
        return ValueError(failed.message)
    return StreamFailed(failed.stream, text)
