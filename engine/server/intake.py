"""A gateway's batch on its way into the loop: its audio through the gateway's cache, then command by command.

The intake promises: what one command says, and whether it can be read at all, concerns its own stream alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Frames, Payload, WireData, WireError
from engine.boundary.commands import (
    UnreadableCommand,
    WireAbort,
    WireAdopt,
    WireDisown,
    WireEntrust,
    WireFeed,
    WireFinish,
    WireFlush,
    WireItem,
    WireOpen,
    code_of,
    decode_command,
    plain_open,
)
from engine.boundary.item_rules import complaint_about
from engine.errors import AtCapacity, BadItem, DuplicateStream
from engine.server.loop import EngineLoop
from engine.server.peer import Peer, Roster
from engine.server.wills import Wills

logger = logging.getLogger(__name__)

# A key, the size of its data and the data itself, if it came along.
Keyed = tuple[bytes, int, Payload | None]


class Intake:
    """Hands commands to the loop under the names it knows streams by; `clock` is for what streams did lately."""

    def __init__(self, loop: EngineLoop, roster: Roster, wills: Wills, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._roster = roster
        self._wills = wills
        self._clock = clock
        # The engine takes nothing new.
        self.draining = False

    def take(self, peer: Peer, batch: codec.Batch, frames: Frames, now: int) -> list[bytes]:
        """Everything in a batch. Returns the keys of data that must be sent again first; then nothing was taken."""
        keyed = [self._keyed(peer, data, frames) for data in batch.data]
        missing = [key for key in peer.cache.missing(keyed, peer.repaired) if key not in peer.gone]
        if missing:
            return missing
        audio = [(data.key, payload) for data, payload in zip(batch.data, self._unpack(peer, keyed), strict=True)]
        for raw in batch.commands:
            self._take_command(peer, raw, audio, now)
        return []

    @staticmethod
    def _keyed(peer: Peer, data: WireData, frames: Frames) -> Keyed:
        try:
            payload = codec.payload_of(data, frames)
        except WireError as error:
            logger.warning("gateway %s sent audio that is none: %s", peer.gateway, error)
            peer.gone.add(data.key)
            payload = None
        return data.key, 0 if payload is None else payload.nbytes, payload

    @staticmethod
    def _unpack(peer: Peer, keyed: Sequence[Keyed]) -> list[Payload | None]:
        sized = [
            (key, peer.repaired[key].nbytes if data is None and key in peer.repaired else size, data)
            for key, size, data in keyed
        ]
        found = peer.cache.unpack(sized, peer.repaired)
        peer.repaired, peer.gone = {}, set()
        return found

    # Commands.

    def _take_command(
        self, peer: Peer, raw: msgspec.Raw, audio: Sequence[tuple[bytes, Payload | None]], now: int
    ) -> None:
        try:
            command = decode_command(raw)
        except UnreadableCommand as error:
            self._end_unread(peer, error, now)
            return
        if isinstance(command, WireOpen):
            self._open(peer, command, audio, now)
            return
        if isinstance(command, (WireEntrust, WireAdopt, WireDisown)):
            self._wills.take(peer, command)
            return
        name = peer.streams.get(command.stream)
        if name is None:
            return  # it crossed with the stream's end, which its gateway has been told of
        match command:
            case WireFeed():
                try:
                    items = self._items(name, command.items, audio)
                except BadItem as error:
                    self._fail(name, error, now)
                else:
                    self._roster.streams[name].fed(items, self._loop.scheduler.spec.samples_per_position)
                    self._submit(messages.Feed(name, items), now)
            case WireFlush():
                self._roster.streams[name].flushed(command.tag, command.at_pause)
                self._submit(messages.Flush(name, command.tag, command.at_pause), now)
            case WireFinish():
                self._roster.streams[name].finished()
                self._submit(messages.Finish(name), now)
            case WireAbort():
                self._roster.release(peer, command.stream, name)
                self._submit(messages.Abort(name), now)

    def _open(self, peer: Peer, command: WireOpen, audio: Sequence[tuple[bytes, Payload | None]], now: int) -> None:
        open_as = peer.streams.get(command.stream)
        if open_as is not None and open_as in self._loop.scheduler.streams:
            error = DuplicateStream(command.stream, "is open already; use another id")
            peer.outputs.append(messages.Refused(command.stream, type(error).__name__, str(error)))
            return
        if self.draining:
            refusal = AtCapacity(command.stream, "this engine takes no new streams: it is about to end")
            peer.outputs.append(messages.Failed(command.stream, type(refusal).__name__, str(refusal)))
            return
        spec = self._loop.scheduler.spec
        name = self._roster.open(peer, command, spec.prefix_positions, self._clock())
        try:
            items = self._items(name, command.items, audio)
        except BadItem as error:
            self._fail(name, error, now)
        else:
            self._roster.streams[name].fed(items, spec.samples_per_position)
            self._submit(plain_open(command, name, items), now)

    def _items(
        self, name: str, described: Sequence[WireItem], audio: Sequence[tuple[bytes, Payload | None]]
    ) -> list[messages.Item]:
        """Raises BadItem."""
        spec, items = self._loop.scheduler.spec, []
        for part in described:
            item = messages.Item(part.offset, part.length, part.sample, mask=part.mask, samples=part.samples)
            if part.data is not None:
                if part.data >= len(audio):
                    raise BadItem(name, f"the item at position {part.offset} refers to audio that did not come")
                item.key, item.payload = audio[part.data]
            complaint = complaint_about(item, spec)
            if complaint is not None:
                raise BadItem(name, f"item at position {part.offset}: {complaint}")
            if item.key and item.payload is None:
                why = f"the engine does not hold the hash {item.key.hex()} and no data came with it"
                raise BadItem(name, f"{why}; send the item's data")
            items.append(item)
        return items

    # Ends.

    def _end_unread(self, peer: Peer, error: UnreadableCommand, now: int) -> None:
        logger.warning("gateway %s, stream %s: %s", peer.gateway, error.stream, error)
        if error.stream is None:
            return
        name = peer.streams.get(error.stream)
        if name is not None:
            self._fail(name, error, now, code_of(error.opens))
        elif error.opens:
            text = f"stream {error.stream!r}: {error}"
            peer.outputs.append(messages.Failed(error.stream, code_of(error.opens), text))

    def _fail(self, name: str, error: Exception, now: int, code: str = BadItem.__name__) -> None:
        """End one stream with an error, wherever it is by now."""
        hosted = self._roster.streams[name]
        message = str(error).replace(name, hosted.name)
        hosted.tell(messages.Failed(hosted.name, code, message))
        self._roster.forget(name)
        self._submit(messages.Abort(name), now)

    def _submit(self, command: messages.Command, now: int) -> None:
        self._loop.submit([command], now)
