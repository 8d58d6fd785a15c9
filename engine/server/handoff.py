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
from engine.server.peer import MOST_OUTPUTS_KEPT, HostedStream, HostedStreams, Peer

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
class SavedHandoff:
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
    position_offset: int = 0
    sample_offset: int = 0
    keep_s: float = 0.0
    hosted: HostedStream | None = None
    # Since when nobody owns it.
    left_at: float = 0.0
    # Who wants it, and since when, by the time in which the engine listened.
    claimants: list[Peer] = field(default_factory=list)
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A session that is not here and goes on all the same: its gateway has come back and says so, or has moved it to
    another engine. Without an owner it is the latter."""

    number: int
    owner: Peer | None
    since: float


class HandoffTable:
    """`reaches` sends a word to a gateway at once and says whether there is anybody; `hear_out` takes in what has come
    from one; `abort` ends a stream."""

    def __init__(
        self,
        hosted_streams: HostedStreams,
        clock: Callable[[], float],
        reaches: Callable[[Peer, messages.Wanted], bool],
        hear_out: Callable[[Peer], None],
        abort: Callable[[str], None],
    ) -> None:
        self._hosted = hosted_streams
        self._clock = clock
        self._reaches = reaches
        self._hear_out = hear_out
        self._abort = abort
        self._handoffs: dict[str, SavedHandoff] = {}
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
        return len(self._handoffs)

    def take(self, peer: Peer, command: messages.SessionCommand) -> None:
        match command:
            case messages.SaveHandoff():
                self._save_handoff(peer, command)
            case messages.Ask():
                peer.outputs.append(self._held(command.key, command.tag))
            case messages.Adopt():
                self._adopt(peer, command.key, command.number)
            case messages.Renew():
                peer.outputs.append(messages.Renewed(command.tag, self._renew(peer, command)))
            case messages.Claim():
                self._claim(peer, command)
            case messages.DropHandoff():
                self._disown(command)

    def leave(self, peer: Peer) -> None:
        """A gateway is gone: its sessions wait for another, and so do their streams."""
        self._elsewhere = {key: found for key, found in self._elsewhere.items() if found.owner is not peer}
        for handoff in list(self._handoffs.values()):
            if peer in handoff.claimants:
                handoff.claimants.remove(peer)
                handoff.left_at = self._clock()
            if handoff.owner is peer:
                handoff.left_by = peer.gateway
                self._release(handoff)
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
        for handoff in list(self._handoffs.values()):
            if self._handoffs.get(handoff.key) is not handoff:
                continue  # hearing another one's owner out has ended it
            if handoff.owner is None and not handoff.claimants and now - handoff.left_at > handoff.keep_s:
                logger.info("nobody came back for session %s", handoff.key)
                self._forget(handoff)
            elif (
                handoff.claimants
                and handoff.owner is not None
                and self._listened_s - handoff.asked_at > RELEASE_SECONDS
            ):
                self._take_away(handoff, handoff.owner)
        self._elsewhere = {key: found for key, found in self._elsewhere.items() if now - found.since <= CLAIM_SECONDS}
        while self._over and now - next(iter(self._over.values()))[1] > OVER_SECONDS:
            del self._over[next(iter(self._over))]

    def _take_away(self, handoff: SavedHandoff, owner: Peer) -> None:
        """The owner has had its time. If its last word is here already, that counts."""
        self._hear_out(owner)
        if handoff.owner is not owner or self._handoffs.get(handoff.key) is not handoff:
            return
        if self._clock() < self._in_doubt_until:
            # It may have gone on at another engine, and not have said so yet.
            self._refuse_claimants(handoff)
        else:
            self._release(handoff)

    def _held(self, key: str, tag: int) -> messages.Held:
        handoff, elsewhere = self._handoffs.get(key), self._elsewhere.get(key)
        if handoff is not None:
            return messages.Held(key, tag, handoff.number, whole=not self._is_in_doubt(handoff))
        return messages.Held(key, tag) if elsewhere is None else messages.Held(key, tag, elsewhere.number, whole=False)

    def _renew(self, peer: Peer, command: messages.Renew) -> int:
        handoff = self._handoffs.get(command.key)
        if handoff is None:
            return command.number
        if handoff.owner is not peer or command.number < handoff.least:
            return 0
        self._refuse_claimants(handoff)
        handoff.number += messages.NEXT_OWNER
        return handoff.number

    def _disown(self, command: messages.DropHandoff) -> None:
        handoff, elsewhere = self._handoffs.get(command.key), self._elsewhere.get(command.key)
        if elsewhere is not None and elsewhere.number <= command.number:
            del self._elsewhere[command.key]
        if handoff is None or handoff.number > command.number:
            return
        self._forget(handoff)
        if handoff.number >= messages.NEXT_OWNER:
            self._over.pop(command.key, None)
            self._over[command.key] = (command.number, self._clock())
            if len(self._over) > MOST_OVER:
                del self._over[next(iter(self._over))]
        if handoff.number < command.number:
            # It has moved. Whoever asks all engines for it at this moment may have asked the other one too early.
            self._elsewhere[command.key] = _Elsewhere(command.number, None, self._clock())

    def _is_in_doubt(self, handoff: SavedHandoff) -> bool:
        """Whether its owner may have taken it to another engine, and not come back yet to say so."""
        return handoff.owner is None and bool(handoff.left_by) and self._clock() < self._in_doubt_until

    def _claim(self, peer: Peer, claim: messages.Claim) -> None:
        """A gateway says which sessions it has: those of another are told, and what it left here and goes on with is
        forgotten. What it does not name waits on: it may have given it up, and the word of that be lost."""
        for key, number, is_elsewhere in claim.claims:
            handoff, (last, _) = self._handoffs.get(key), self._over.get(key, (0, 0.0))
            was_left = handoff is not None and handoff.owner is None and handoff.left_by == peer.gateway
            if handoff is not None and handoff.owner is peer:
                continue
            if handoff is not None and handoff.number > number and not was_left:
                peer.outputs.append(messages.Fenced(key, handoff.number))
            elif handoff is None and last > number:
                peer.outputs.append(messages.Fenced(key, last))
            elif handoff is None or handoff.owner is None:
                if handoff is not None:
                    self._forget(handoff)
                if not is_elsewhere:
                    self._elsewhere[key] = _Elsewhere(number, peer, self._clock())
        peer.outputs.append(messages.Claimed(claim.tag))

    def _save_handoff(self, peer: Peer, given: messages.SaveHandoff) -> None:
        handoff = self._handoffs.get(given.key)
        least = 0 if handoff is None else handoff.least if handoff.owner is peer else handoff.number + 1
        if handoff is None and given.key in self._over:
            least = self._over[given.key][0]
        if given.number < least:
            peer.outputs.append(messages.Fenced(given.key, least))
            return
        if given.base is not None:
            handoff = self._begin(peer, given, handoff)
        elif handoff is None or handoff.owner is not peer:
            return  # the entries of a will that was not believed; its owner begins anew in time
        handoff.entries += given.entries
        handoff.entry_bytes += sum(map(len, given.entries))
        handoff.consumed = given.consumed
        self._name_stream(peer, handoff, given.stream)
        if handoff.hosted is not None:
            handoff.hosted.forget_outputs(given.consumed)
        if self._is_overgrown(handoff):
            logger.warning("session %s: its gateway entrusts more than it may; it cannot be adopted", handoff.key)
            self._forget(handoff)
        elif given.last:
            self._release(handoff)
            self._settle()

    def _begin(self, peer: Peer, given: messages.SaveHandoff, known: SavedHandoff | None) -> SavedHandoff:
        assert given.base is not None
        handoff = known or SavedHandoff(given.key, given.number, peer, given.number)
        self._handoffs[given.key] = handoff
        self._elsewhere.pop(given.key, None)
        if handoff.owner not in (None, peer):
            # It was adopted at another engine, and has moved here.
            handoff.owner.outputs.append(messages.Fenced(handoff.key, given.number))
        if handoff.owner is not peer:
            self._refuse_claimants(handoff)
            handoff.owner, handoff.left_by, handoff.least = peer, "", given.number
        handoff.number, handoff.base = max(handoff.number, given.number), given.base
        handoff.entries, handoff.entry_bytes, handoff.keep_s = [], 0, given.keep_s
        handoff.position_offset, handoff.sample_offset = given.position_offset, given.sample_offset
        if given.chunk:
            handoff.chunks.append(given.chunk)
            while len(handoff.chunks) > 1 and sum(map(len, handoff.chunks)) > given.keep_bytes:
                handoff.chunks.popleft()
        return handoff

    def _name_stream(self, peer: Peer, handoff: SavedHandoff, stream: str) -> None:
        name = peer.streams.get(stream)
        if not stream:
            handoff.hosted = None
        elif name is not None and (hosted := self._hosted.streams.get(name)) is not handoff.hosted:
            old, handoff.hosted = handoff.hosted, hosted
            if old is not None and old.peer is None:
                self._abort(old.loop_name)

    def _is_overgrown(self, handoff: SavedHandoff) -> bool:
        told = 0 if handoff.hosted is None else len(handoff.hosted.outputs)
        return (
            len(handoff.entries) > MOST_ENTRIES or handoff.entry_bytes > MOST_ENTRY_BYTES or told >= MOST_OUTPUTS_KEPT
        )

    def _adopt(self, peer: Peer, key: str, number: int) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None or not messages.same_owner(number, handoff.number):
            # Somebody else has it since the peer asked: whether its client still waits there is not known any more.
            peer.outputs.append(messages.SessionGiven(key))
            return
        if not handoff.claimants:
            handoff.asked_at = self._listened_s
        if peer not in handoff.claimants:
            handoff.claimants.append(peer)
        self._wanted.add(key)
        owner = handoff.owner
        if owner is peer or (owner is not None and not self._reaches(owner, messages.Wanted(key, handoff.number))):
            # One that turned out to be gone has left its sessions by now.
            if handoff.owner is owner:
                self._release(handoff)
        self._settle()

    def _release(self, handoff: SavedHandoff) -> None:
        """Nobody owns the session now; its stream goes on with what it has."""
        owner, handoff.owner, handoff.left_at = handoff.owner, None, self._clock()
        if owner is not None and handoff.claimants and owner not in handoff.claimants:
            owner.outputs.append(messages.Fenced(handoff.key, handoff.number + messages.NEXT_OWNER))
        if handoff.hosted is not None:
            self._hosted.detach(handoff.hosted)

    def _settle(self) -> None:
        """Give the sessions that nobody owns to those who want them, while there is room on the way to them."""
        given = 0
        for key in list(self._wanted):
            handoff = self._handoffs.get(key)
            if handoff is not None and self._is_in_doubt(handoff):
                self._refuse_claimants(handoff)
            if handoff is None or not handoff.claimants:
                self._wanted.discard(key)
            elif handoff.owner is None and handoff.claimants[-1].has_room and given < GIVEN_AT_ONCE:
                given += 1
                self._wanted.discard(key)
                self._give(handoff, handoff.claimants[-1])

    def _give(self, handoff: SavedHandoff, claimant: Peer) -> None:
        # Of several who ask, the last has the client; the others may ask again.
        for other in handoff.claimants[:-1]:
            other.outputs.append(messages.SessionGiven(handoff.key))
        handoff.claimants, handoff.owner, handoff.left_by = [], claimant, ""
        handoff.number += messages.NEXT_OWNER
        handoff.least = handoff.number
        adopted = messages.SessionGiven(
            handoff.key,
            handoff.number,
            base=handoff.base,
            chunks=list(handoff.chunks),
            entries=handoff.entries,
            consumed=handoff.consumed,
            position_offset=handoff.position_offset,
            sample_offset=handoff.sample_offset,
        )
        claimant.outputs.append(adopted)
        if handoff.hosted is not None:
            self._hosted.attach(handoff.hosted, claimant)
            _describe(handoff.hosted, adopted)
            claimant.outputs += [output for _, output in handoff.hosted.outputs]

    def _refuse_claimants(self, handoff: SavedHandoff) -> None:
        for claimant in handoff.claimants:
            claimant.outputs.append(messages.SessionGiven(handoff.key))
        handoff.claimants = []

    def _forget(self, handoff: SavedHandoff) -> None:
        self._handoffs.pop(handoff.key, None)
        self._refuse_claimants(handoff)
        if handoff.hosted is not None and handoff.hosted.peer is None:
            self._abort(handoff.hosted.loop_name)


def _describe(hosted: HostedStream, adopted: messages.SessionGiven) -> None:
    """Where the stream stood after the last output that is accounted for."""
    opening, ahead = hosted.opening, [output for _, output in hosted.outputs]
    answers = [output.tag for output in ahead if isinstance(output, messages.Flushed)]
    tokens = sum(len(output.tokens) for output in ahead if isinstance(output, messages.Text))
    adopted.stream = hosted.name
    adopted.end, adopted.sample, adopted.segment = hosted.end, hosted.end_sample, hosted.segment
    adopted.flushes = hosted.flushes
    adopted.answered = answers[0] - 1 if answers else hosted.answered
    adopted.token = hosted.tokens - tokens
    adopted.delay_positions, adopted.options = opening.delay_positions, opening.options
