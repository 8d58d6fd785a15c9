"""What gateways entrust to an engine: each session's last value, opaque, beside its stream.

The wills promise: a session has one owner, and its number rises with each; what a former owner still sends changes
nothing, and neither does a request to adopt it that is older than its owner. A session whose owner is lost, or has
given it up, waits with its stream for so long as was asked; whoever adopts it gets the value, the stream as it stands,
and the outputs that the value does not account for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import messages
from engine.boundary.commands import (
    WireAdopt,
    WireAsk,
    WireClaim,
    WireDisown,
    WireEntrust,
    WireRenew,
    WireSessionCommand,
)
from engine.server.peer import MOST_OUTPUTS_KEPT, HostedStream, Peer, Roster

logger = logging.getLogger(__name__)

# How long an owner that is asked for a session may take to give it up before it is taken. Gateways that stood still for
# nearly as long find out first whether their sessions are still their own: `STANDSTILL_S` must be less.
RELEASE_SECONDS = 1.0
# Gateways lose an engine that stands still for longer, and go on at another one.
STOOD_STILL_SECONDS = 2.5
# How long a session counts as held after its gateway has come back without leaving its value anew, or has moved it.
CLAIM_SECONDS = 10.0
# Entries since the last base, and bytes of them, beyond which a will is not believed: owners begin anew long before.
MOST_ENTRIES = 8192
MOST_ENTRY_BYTES = 8 * 1024 * 1024
# Sessions that had several owners and are over: for how long, and how many of them, an engine knows the last number. A
# former owner that was stopped meanwhile would go on with its own copy.
OVER_SECONDS = 600.0
MOST_OVER = 10_000
# Sessions that are given away in one go: each may carry a long log, and live outputs wait behind them.
GIVEN_AT_ONCE = 16
REVIEW_SECONDS = 0.25


@dataclass(slots=True)
class Will:
    """Of one session."""

    key: str
    number: int
    owner: Peer | None
    # The lowest number under which its owner may still speak: it may not have heard of a higher one yet.
    least: int = 0
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
    # Who wants it, and since when, by the time in which the engine listened.
    heirs: list[Peer] = field(default_factory=list)
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A session that is not here and goes on all the same: its gateway has come back and says so, or has moved it to
    another engine. Without an owner it is the latter."""

    number: int
    owner: Peer | None
    since: float


class Wills:
    """`reaches` sends a word to a gateway at once and says whether there is anybody; `hear_out` takes in what has come
    from one; `abort` ends a stream."""

    def __init__(
        self,
        roster: Roster,
        clock: Callable[[], float],
        reaches: Callable[[Peer, messages.Wanted], bool],
        hear_out: Callable[[Peer], None],
        abort: Callable[[str], None],
    ) -> None:
        self._roster = roster
        self._clock = clock
        self._reaches = reaches
        self._hear_out = hear_out
        self._abort = abort
        self._wills: dict[str, Will] = {}
        # Those that somebody wants.
        self._wanted: set[str] = set()
        self._elsewhere: dict[str, _Elsewhere] = {}
        # Sessions that are over: the last number, and since when. The oldest comes first.
        self._over: dict[str, tuple[int, float]] = {}
        # How long the engine has listened. While it stands still nobody can answer it, and nobody is late.
        self._listened_s = 0.0
        self._ticked_at = self._reviewed_at = clock()
        # Until then a session whose owner was lost may have gone on at another engine: this one stood still.
        self._in_doubt_until = float("-inf")

    def __len__(self) -> int:
        return len(self._wills)

    def take(self, peer: Peer, command: WireSessionCommand) -> None:
        match command:
            case WireEntrust():
                self._entrust(peer, command)
            case WireAsk():
                peer.outputs.append(self._held(command.key, command.tag))
            case WireAdopt():
                self._adopt(peer, command.key, command.number)
            case WireRenew():
                peer.outputs.append(messages.Renewed(command.tag, self._renew(peer, command)))
            case WireClaim():
                self._claim(peer, command)
            case WireDisown():
                self._disown(command)

    def leave(self, peer: Peer) -> None:
        """A gateway is gone: its sessions wait for another, and so do their streams."""
        self._elsewhere = {key: found for key, found in self._elsewhere.items() if found.owner is not peer}
        for will in list(self._wills.values()):
            if peer in will.heirs:
                will.heirs.remove(peer)
                will.left_at = self._clock()
            if will.owner is peer:
                will.left_by = peer.gateway
                self._orphan(will)
        self._settle()

    def tick(self, now: float) -> None:
        """Give sessions to those who have waited long enough, and forget those that nobody wants."""
        if now - self._ticked_at > STOOD_STILL_SECONDS:
            self._in_doubt_until = now + CLAIM_SECONDS
        self._listened_s += min(now - self._ticked_at, 2 * REVIEW_SECONDS)
        self._ticked_at = now
        if now - self._reviewed_at >= REVIEW_SECONDS:
            self._reviewed_at = now
            self._review(now)
        if self._wanted:
            self._settle()

    # Inside.

    def _review(self, now: float) -> None:
        for will in list(self._wills.values()):
            if self._wills.get(will.key) is not will:
                continue  # hearing another one's owner out has ended it
            if will.owner is None and not will.heirs and now - will.left_at > will.keep_s:
                logger.info("nobody came back for session %s", will.key)
                self._forget(will)
            elif will.heirs and will.owner is not None and self._listened_s - will.asked_at > RELEASE_SECONDS:
                self._take_away(will, will.owner)
        self._elsewhere = {key: found for key, found in self._elsewhere.items() if now - found.since <= CLAIM_SECONDS}
        while self._over and now - next(iter(self._over.values()))[1] > OVER_SECONDS:
            del self._over[next(iter(self._over))]

    def _take_away(self, will: Will, owner: Peer) -> None:
        """The owner has had its time. If its last word is here already, that counts."""
        self._hear_out(owner)
        if will.owner is not owner or self._wills.get(will.key) is not will:
            return
        if self._clock() < self._in_doubt_until:
            # It may have gone on at another engine, and not have said so yet.
            self._refuse_heirs(will)
        else:
            self._orphan(will)

    def _held(self, key: str, tag: int) -> messages.Held:
        will, elsewhere = self._wills.get(key), self._elsewhere.get(key)
        if will is not None:
            return messages.Held(key, tag, will.number, whole=not self._is_in_doubt(will))
        return messages.Held(key, tag) if elsewhere is None else messages.Held(key, tag, elsewhere.number, whole=False)

    def _renew(self, peer: Peer, command: WireRenew) -> int:
        will = self._wills.get(command.key)
        if will is None:
            return command.number
        if will.owner is not peer or command.number < will.least:
            return 0
        self._refuse_heirs(will)
        will.number += messages.NEXT_OWNER
        return will.number

    def _disown(self, command: WireDisown) -> None:
        will, elsewhere = self._wills.get(command.key), self._elsewhere.get(command.key)
        if elsewhere is not None and elsewhere.number <= command.number:
            del self._elsewhere[command.key]
        if will is None or will.number > command.number:
            return
        self._forget(will)
        if will.number >= messages.NEXT_OWNER:
            self._over.pop(command.key, None)
            self._over[command.key] = (command.number, self._clock())
            if len(self._over) > MOST_OVER:
                del self._over[next(iter(self._over))]
        if will.number < command.number:
            # It has moved. Whoever asks all engines for it at this moment may have asked the other one too early.
            self._elsewhere[command.key] = _Elsewhere(command.number, None, self._clock())

    def _is_in_doubt(self, will: Will) -> bool:
        """Whether its owner may have taken it to another engine, and not come back yet to say so."""
        return will.owner is None and bool(will.left_by) and self._clock() < self._in_doubt_until

    def _claim(self, peer: Peer, claim: WireClaim) -> None:
        """A gateway says which sessions it has: those of another are told, and what it left here and goes on with is
        forgotten. What it does not name waits on: it may have given it up, and the word of that be lost."""
        for key, number, is_elsewhere in claim.claims:
            will, (last, _) = self._wills.get(key), self._over.get(key, (0, 0.0))
            was_left = will is not None and will.owner is None and will.left_by == peer.gateway
            if will is not None and will.owner is peer:
                continue
            if will is not None and will.number > number and not was_left:
                peer.outputs.append(messages.Fenced(key, will.number))
            elif will is None and last > number:
                peer.outputs.append(messages.Fenced(key, last))
            elif will is None or will.owner is None:
                if will is not None:
                    self._forget(will)
                if not is_elsewhere:
                    self._elsewhere[key] = _Elsewhere(number, peer, self._clock())
        peer.outputs.append(messages.Claimed(claim.tag))

    def _entrust(self, peer: Peer, given: WireEntrust) -> None:
        will = self._wills.get(given.key)
        least = 0 if will is None else will.least if will.owner is peer else will.number + 1
        if will is None and given.key in self._over:
            least = self._over[given.key][0]
        if given.number < least:
            peer.outputs.append(messages.Fenced(given.key, least))
            return
        if given.base is not None:
            will = self._begin(peer, given, will)
        elif will is None or will.owner is not peer:
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
        will = known or Will(given.key, given.number, peer, given.number)
        self._wills[given.key] = will
        self._elsewhere.pop(given.key, None)
        if will.owner not in (None, peer):
            # It was adopted at another engine, and has moved here.
            will.owner.outputs.append(messages.Fenced(will.key, given.number))
        if will.owner is not peer:
            self._refuse_heirs(will)
            will.owner, will.left_by, will.least = peer, "", given.number
        will.number, will.base = max(will.number, given.number), given.base
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

    def _adopt(self, peer: Peer, key: str, number: int) -> None:
        will = self._wills.get(key)
        if will is None or not messages.same_owner(number, will.number):
            # Somebody else has it since the peer asked: whether its client still waits there is not known any more.
            peer.outputs.append(messages.Inherited(key))
            return
        if not will.heirs:
            will.asked_at = self._listened_s
        if peer not in will.heirs:
            will.heirs.append(peer)
        self._wanted.add(key)
        owner = will.owner
        if owner is peer or (owner is not None and not self._reaches(owner, messages.Wanted(key, will.number))):
            # One that turned out to be gone has left its sessions by now.
            if will.owner is owner:
                self._orphan(will)
        self._settle()

    def _orphan(self, will: Will) -> None:
        """Nobody owns the session now; its stream goes on with what it has."""
        owner, will.owner, will.left_at = will.owner, None, self._clock()
        if owner is not None and will.heirs and owner not in will.heirs:
            owner.outputs.append(messages.Fenced(will.key, will.number + messages.NEXT_OWNER))
        if will.hosted is not None:
            self._roster.detach(will.hosted)

    def _settle(self) -> None:
        """Give the sessions that nobody owns to those who want them, while there is room on the way to them."""
        given = 0
        for key in list(self._wanted):
            will = self._wills.get(key)
            if will is not None and self._is_in_doubt(will):
                self._refuse_heirs(will)
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
        will.number += messages.NEXT_OWNER
        will.least = will.number
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

    def _refuse_heirs(self, will: Will) -> None:
        for heir in will.heirs:
            heir.outputs.append(messages.Inherited(will.key))
        will.heirs = []

    def _forget(self, will: Will) -> None:
        self._wills.pop(will.key, None)
        self._refuse_heirs(will)
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
