"""What gateways entrust to an engine: each session's last value, opaque, beside its stream.

The wills promise: a session has one owner, and its number rises with each; what a former owner still sends changes
nothing. A session whose owner is lost, or has given it up, waits with its stream for so long as was asked; whoever
adopts it gets the value, the stream as it stands, and the outputs that the value does not account for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import messages
from engine.boundary.commands import WireAdopt, WireDisown, WireEntrust, WireSessionCommand
from engine.server.peer import MOST_OUTPUTS_KEPT, HostedStream, Peer, Roster

logger = logging.getLogger(__name__)

# How long an owner that is asked for a session may take to give it up before it is taken.
RELEASE_SECONDS = 1.0
# Entries since the last base, and bytes of them, beyond which a will is not believed: owners begin anew long before.
MOST_ENTRIES = 8192
MOST_ENTRY_BYTES = 8 * 1024 * 1024
# Sessions that are given away in one go: each may carry a long log, and live outputs wait behind them.
GIVEN_AT_ONCE = 16
REVIEW_SECONDS = 0.25


@dataclass(slots=True)
class Will:
    """Of one session."""

    key: str
    number: int
    owner: Peer | None
    # The gateway that was lost and may come back, with a newer value than this one; none if it gave the session up.
    left_by: str = ""
    base: bytes = b""
    chunks: deque[bytes] = field(default_factory=deque)
    entries: list[bytes] = field(default_factory=list)
    entry_bytes: int = 0
    consumed: int = 0
    positions_before: int = 0
    samples_before: int = 0
    keep_s: float = 0.0
    hosted: HostedStream | None = None
    # Since when nobody owns it.
    left_at: float = 0.0
    # Who wants it, and since when.
    heirs: list[Peer] = field(default_factory=list)
    asked_at: float = 0.0


class Wills:
    """`reaches` sends a word to a gateway at once and says whether there is anybody; `abort` ends a stream."""

    def __init__(
        self,
        roster: Roster,
        clock: Callable[[], float],
        reaches: Callable[[Peer, messages.Wanted], bool],
        abort: Callable[[str], None],
    ) -> None:
        self._roster = roster
        self._clock = clock
        self._reaches = reaches
        self._abort = abort
        self._wills: dict[str, Will] = {}
        # Those that somebody wants.
        self._wanted: set[str] = set()
        self._reviewed_at = 0.0

    def __len__(self) -> int:
        return len(self._wills)

    def take(self, peer: Peer, command: WireSessionCommand) -> None:
        match command:
            case WireEntrust():
                self._entrust(peer, command)
            case WireAdopt():
                self._adopt(peer, command.key)
            case WireDisown():
                will = self._wills.get(command.key)
                if will is not None and will.number <= command.number:
                    self._forget(will)

    def leave(self, peer: Peer) -> None:
        """A gateway is gone: its sessions wait for another, and so do their streams."""
        for will in list(self._wills.values()):
            if peer in will.heirs:
                will.heirs.remove(peer)
                will.left_at = self._clock()
            if will.owner is peer:
                will.left_by = peer.gateway
                self._orphan(will)
        self._settle()

    def forget_all(self, peer: Peer) -> None:
        """A gateway begins anew, and has all it needs for that."""
        for will in [will for will in self._wills.values() if will.owner is peer]:
            self._forget(will)

    def forget_left_by(self, gateway: str) -> None:
        """It was thought lost and comes back: what waits here for another has gone on elsewhere since."""
        for will in [will for will in self._wills.values() if will.owner is None and will.left_by == gateway]:
            self._forget(will)

    def tick(self, now: float) -> None:
        """Give sessions to those who have waited long enough, and forget those that nobody wants."""
        if now - self._reviewed_at >= REVIEW_SECONDS:
            self._reviewed_at = now
            self._review(now)
        if self._wanted:
            self._settle()

    # Inside.

    def _review(self, now: float) -> None:
        for will in list(self._wills.values()):
            if will.owner is None and not will.heirs and now - will.left_at > will.keep_s:
                logger.info("nobody came back for session %s", will.key)
                self._forget(will)
            elif will.heirs and now - will.asked_at > RELEASE_SECONDS:
                self._orphan(will)

    def _entrust(self, peer: Peer, given: WireEntrust) -> None:
        will = self._wills.get(given.key)
        if will is not None and (given.number < will.number or (will.owner is not peer and not given.base)):
            peer.outputs.append(messages.Fenced(given.key))
            return
        if given.base is not None:
            will = self._begin(peer, given, will)
        elif will is None:
            return  # the entries of a will that was not believed; its owner begins anew in time
        will.entries += given.entries
        will.entry_bytes += sum(map(len, given.entries))
        will.consumed = given.consumed
        self._name_stream(peer, will, given.stream)
        if will.hosted is not None:
            will.hosted.forget_outputs(given.consumed)
        if self._is_overgrown(will):
            logger.warning("session %s: its gateway entrusts more than it may; it cannot be adopted", will.key)
            self._forget(will)
        elif given.last:
            self._orphan(will)
            self._settle()

    def _begin(self, peer: Peer, given: WireEntrust, known: Will | None) -> Will:
        assert given.base is not None
        will = known or Will(given.key, given.number, peer)
        self._wills[given.key] = will
        will.owner, will.left_by, will.number, will.base = peer, "", given.number, given.base
        will.entries, will.entry_bytes, will.keep_s = [], 0, given.keep_s
        will.positions_before, will.samples_before = given.positions_before, given.samples_before
        if given.chunk:
            will.chunks.append(given.chunk)
            while len(will.chunks) > 1 and sum(map(len, will.chunks)) > given.keep_bytes:
                will.chunks.popleft()
        return will

    def _name_stream(self, peer: Peer, will: Will, stream: str) -> None:
        name = peer.streams.get(stream)
        if not stream:
            will.hosted = None
        elif name is not None and (hosted := self._roster.streams.get(name)) is not will.hosted:
            old, will.hosted = will.hosted, hosted
            if old is not None and old.peer is None:
                self._abort(old.loop_name)

    def _is_overgrown(self, will: Will) -> bool:
        told = 0 if will.hosted is None else len(will.hosted.outputs)
        return len(will.entries) > MOST_ENTRIES or will.entry_bytes > MOST_ENTRY_BYTES or told >= MOST_OUTPUTS_KEPT

    def _adopt(self, peer: Peer, key: str) -> None:
        will = self._wills.get(key)
        if will is None:
            peer.outputs.append(messages.Inherited(key))
            return
        if not will.heirs:
            will.asked_at = self._clock()
        if peer not in will.heirs:
            will.heirs.append(peer)
        self._wanted.add(key)
        owner = will.owner
        if owner is peer or (owner is not None and not self._reaches(owner, messages.Wanted(key))):
            # One that turned out to be gone has left its sessions by now.
            if will.owner is owner:
                self._orphan(will)
        self._settle()

    def _orphan(self, will: Will) -> None:
        """Nobody owns the session now; its stream goes on with what it has."""
        owner, will.owner, will.left_at = will.owner, None, self._clock()
        if owner is not None and will.heirs and owner not in will.heirs:
            owner.outputs.append(messages.Fenced(will.key))
        if will.hosted is not None:
            self._roster.detach(will.hosted)

    def _settle(self) -> None:
        """Give the sessions that nobody owns to those who want them, while there is room on the way to them."""
        given = 0
        for key in list(self._wanted):
            will = self._wills.get(key)
            if will is None or not will.heirs:
                self._wanted.discard(key)
            elif will.owner is None and will.heirs[-1].has_room and given < GIVEN_AT_ONCE:
                given += 1
                self._wanted.discard(key)
                self._give(will, will.heirs[-1])

    def _give(self, will: Will, heir: Peer) -> None:
        # Of several who ask, the last has the client; the others may ask again.
        for other in will.heirs[:-1]:
            other.outputs.append(messages.Inherited(will.key))
        will.heirs, will.owner, will.left_by = [], heir, ""
        will.number += 1
        inherited = messages.Inherited(
            will.key,
            will.number,
            base=will.base,
            chunks=list(will.chunks),
            entries=will.entries,
            consumed=will.consumed,
            positions_before=will.positions_before,
            samples_before=will.samples_before,
        )
        heir.outputs.append(inherited)
        if will.hosted is not None:
            self._roster.attach(will.hosted, heir)
            _describe(will.hosted, inherited)
            heir.outputs += [output for _, output in will.hosted.outputs]

    def _forget(self, will: Will) -> None:
        self._wills.pop(will.key, None)
        for heir in will.heirs:
            heir.outputs.append(messages.Inherited(will.key))
        if will.hosted is not None and will.hosted.peer is None:
            self._abort(will.hosted.loop_name)


def _describe(hosted: HostedStream, inherited: messages.Inherited) -> None:
    """Where the stream stood after the last output that is accounted for."""
    opening, ahead = hosted.opening, [output for _, output in hosted.outputs]
    answers = [output.tag for output in ahead if isinstance(output, messages.Flushed)]
    tokens = sum(len(output.tokens) for output in ahead if isinstance(output, messages.Text))
    inherited.stream = hosted.name
    inherited.end, inherited.sample, inherited.segment = hosted.end, hosted.end_sample, hosted.segment
    inherited.flushes = hosted.flushes
    inherited.answered = answers[0] - 1 if answers else hosted.answered
    inherited.token = hosted.tokens - tokens
    inherited.delay_positions, inherited.options = opening.delay_positions, opening.options
