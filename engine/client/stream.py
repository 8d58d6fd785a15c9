"""One stream as the gateway sees it: audio in, outputs out, on whichever engine carries it at the moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.boundary.preparation import make_cutter, prepare
from engine.client.delivery import Delivery
from engine.client.handover import Handover
from engine.client.link import EngineLink
from engine.client.outputs import Outputs, error_of
from engine.client.placement import Keeper, Placement
from engine.client.processor import ItemRefused
from engine.client.replay import KeptAudio, Replay, StreamLimits, memory_for
from engine.client.suspicion import Suspicion
from engine.errors import DuplicateStream, EngineDead, EngineError, StreamFailed, StreamFinished
from engine.messages import Item
from engine.spec import ModelSpec

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
        self.suspicion = Suspicion()
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
        self.handover = Handover(self.id)

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
                [replace(item, offset=item.offset + shift, sample=item.sample + later) for item in checked]
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
    def keeper(self) -> Keeper | None:
        """The engine that could go on with the stream for another gateway; None while none has all of it."""
        leaving = self.handover.leaving
        if leaving is not None:
            return leaving if leaving.link.lost is None else None
        if self.place.link is None or self._delivery is None or not self._delivery.is_done:
            return None
        return Keeper(self.place.link, self.read, self.place.before)

    @property
    def read(self) -> int:
        """How many outputs of the engine that carries the stream now have been read."""
        return self._outputs.read

    def rest(self) -> NDArray[np.float32]:
        """Audio that was fed and has not left for the engine, with the context before it. What was fed to another one
        than would go on is not told: its client has it."""
        return self._cutter.rest() if self.handover.leaving is None else np.zeros(0, np.float32)

    def lay_down(self) -> None:
        """The stream goes on at another gateway: nothing more is sent, and nobody reads its outputs here."""
        if self.handover.leaving is not None and self._delivery is not None:
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
        if self.handover.is_from(link):
            self.handover.end()
        self._opened = opened = asyncio.get_running_loop().create_future()
        self._outputs.begin(0)
        replay = self._memory.replay(self._kept)
        self.place.begin(link, replay)
        suspicion = self.suspicion
        opening = replace(
            self._opening,
            forced_tokens=replay.forced_tokens,
            state=replay.state,
            catch_up_until=replay.catch_up_until,
            suspect=self.place.engine_count(suspicion.spot) if suspicion.alone else None,
        )
        self._delivery = Delivery(link, opening, replay, self._finished, self.handover.settle)
        try:
            await opened
        except (EngineError, ValueError):
            self._leave_engine()
            raise

    def carried_by(self, link: EngineLink, inherited: messages.Inherited) -> int:
        """This engine runs the stream already, for a gateway before us. Returns the sample from which on its audio has
        to be fed."""
        positions, samples = inherited.positions_before, inherited.samples_before
        end, sample = inherited.end + positions, inherited.sample + samples
        self.place.begin(link, Replay(positions, samples, []))
        self._kept.end, self._kept.end_sample = end, sample
        self._memory.go_on(end, inherited.token + positions)
        self._tags = inherited.flushes
        self._unanswered = set(range(inherited.answered + 1, inherited.flushes + 1))
        self._watch_for_audio()
        self._outputs.begin(inherited.consumed)
        self.was_opened = True
        self._delivery = Delivery.of_open_stream(link, self.id)
        return self._cutter.go_on(end, sample, inherited.segment + samples)

    @property
    def may_move(self) -> bool:
        """Whether another engine could go on from here with the same words: all that was said has been read."""
        at_rest = self.keeper is not None and self.handover.leaving is None and not len(self._outputs)
        return at_rest and self.is_open and not self._aborted and self._memory.is_whole(self._kept)

    @property
    def at_pause(self) -> bool:
        """Nobody speaks, and nobody waits for an answer."""
        return not self._outputs.speech_goes_on and not self._unanswered

    def part(self, now: float) -> None:
        """Leave the engine for another one. It keeps the stream until that one has all of it."""
        self.handover.begin(self.keeper)
        self.place.lose(now, self._kept.end)
        self._leave_engine()

    @property
    def is_open(self) -> bool:
        """Whether its last output is still to come."""
        return not self._ended

    def forsake(self) -> None:
        """The stream is not wanted any more by the one who opened it; nobody reads its outputs."""
        if self._delivery is not None:
            self._delivery.abort()
        self._ended = True

    def drop(self) -> None:
        """The stream is not wanted, here or anywhere: nobody reads its outputs."""
        if self._delivery is not None:
            self._delivery.abort()
        self.handover.end()
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
        self.handover.end()
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
