"""A gateway's batch on its way into the loop: its audio through the gateway's cache, then command by command.

The intake promises: what one command says, and whether it can be read at all, concerns its own stream alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Frames, Payload, WireData, WireError
from engine.boundary.commands import (
    UnreadableCommand,
    WireAbort,
    WireChangeTurns,
    WireCommand,
    WireFeed,
    WireFinish,
    WireFlush,
    WireItem,
    WireOpen,
    WireSessionCommand,
    code_of,
    decode_commands,
    plain_open,
    plain_rule,
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
        # Commands for the loop. Whoever asks it about its streams hands them on first.
        self._coming: list[messages.Command] = []

    def take(self, peer: Peer, batch: codec.Batch, frames: Frames, now: int) -> list[bytes]:
        """Everything in a batch. Returns the keys of data that must be sent again first; then nothing was taken."""
        keyed = [self._keyed(peer, data, frames) for data in batch.data]
        missing = [key for key in peer.cache.missing(keyed, peer.repaired) if key not in peer.gone]
        if missing:
            return missing
        audio = [(data.key, payload) for data, payload in zip(batch.data, self._unpack(peer, keyed), strict=True)]
        try:
            for command in decode_commands(batch.commands):
                self._take_command(peer, command, audio, now)
        finally:
            self._hand_on(now)
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
        self,
        peer: Peer,
        command: WireCommand | UnreadableCommand,
        audio: Sequence[tuple[bytes, Payload | None]],
        now: int,
    ) -> None:
        if isinstance(command, WireFeed):
            self._feed(peer, command, audio)
        elif isinstance(command, WireSessionCommand):
            self._wills.take(peer, command)
        elif isinstance(command, WireOpen):
            self._hand_on(now)
            self._open(peer, command, audio)
        elif isinstance(command, UnreadableCommand):
            self._end_unread(peer, command)
        elif (name := peer.streams.get(command.stream)) is not None:
            # Else it crossed with the stream's end, which its gateway has been told of.
            self._take_request(peer, name, command)

    def _feed(self, peer: Peer, command: WireFeed, audio: Sequence[tuple[bytes, Payload | None]]) -> None:
        name = peer.streams.get(command.stream)
        if name is None:
            return
        try:
            items = self._items(name, command.items, audio)
        except BadItem as error:
            self._fail(name, str(error))
        else:
            self._roster.streams[name].fed(items, self._loop.scheduler.spec.samples_per_position)
            self._coming.append(messages.Feed(name, items))

    def _take_request(
        self, peer: Peer, name: str, command: WireFlush | WireChangeTurns | WireFinish | WireAbort
    ) -> None:
        match command:
            case WireFlush():
                self._roster.streams[name].flushed(command.tag, command.pause)
                self._coming.append(messages.Flush(name, command.tag, command.pause))
            case WireChangeTurns():
                self._coming.append(messages.ChangeTurns(name, plain_rule(command.turns)))
            case WireFinish():
                self._roster.streams[name].finished()
                self._coming.append(messages.Finish(name))
            case WireAbort():
                self._roster.release(peer, command.stream, name)
                self._coming.append(messages.Abort(name))

    def _open(self, peer: Peer, command: WireOpen, audio: Sequence[tuple[bytes, Payload | None]]) -> None:
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
            self._fail(name, str(error))
        else:
            self._roster.streams[name].fed(items, spec.samples_per_position)
            self._coming.append(plain_open(command, name, items))

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

    def _end_unread(self, peer: Peer, unread: UnreadableCommand) -> None:
        logger.warning("gateway %s, stream %s: %s", peer.gateway, unread.stream, unread.why)
        if unread.stream is None:
            return
        name = peer.streams.get(unread.stream)
        if name is not None:
            self._fail(name, unread.why, code_of(unread.opens))
        elif unread.opens:
            text = f"stream {unread.stream!r}: {unread.why}"
            peer.outputs.append(messages.Failed(unread.stream, code_of(unread.opens), text))

    def _fail(self, name: str, why: str, code: str = BadItem.__name__) -> None:
        """End one stream with an error, wherever it is by now."""
        hosted = self._roster.streams[name]
        hosted.tell(messages.Failed(hosted.name, code, why.replace(name, hosted.name)))
        self._roster.forget(name)
        self._coming.append(messages.Abort(name))

    def _hand_on(self, now: int) -> None:
        coming, self._coming = self._coming, []
        self._loop.submit(coming, now)
