"""The engine's side of session handoff (`HandoffTable`): the saved state of each session, for a gateway that adopts it.

A part of the host (`engine/server/host.py`). The state is opaque bytes that the session's gateway saves on the engine
of its stream; `engine/client/handoff.py` is the gateway's side.

Invariants: a session has at most one owner, and its owner number rises with each owner. Messages from a former owner,
and requests to adopt that are older than the current owner, change nothing. A session whose owner is lost or has
released it waits with its stream for `SaveHandoff.keep_s` seconds. The gateway that adopts it gets the saved state, the
stream as it is, and the outputs that the state does not include.

The owner number is a fencing token: a new owner raises it by `NEXT_OWNER`, a migration to another engine by one. A
gateway that connects names the sessions that it owns (`Claim`). A session that is claimed or has migrated, and has no
saved state here, is remembered for `CLAIM_SECONDS` (`_Elsewhere`), so that no gateway takes it for unknown.

An engine that was frozen (its process or machine was suspended) does not trust its table for a while: the sessions of
lost gateways may have continued on another engine, and requests to adopt them are refused (`_is_in_doubt`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import messages
from engine.server.hosted_streams import MAX_OUTPUTS_KEPT, HostedStream, HostedStreams, Peer

logger = logging.getLogger(__name__)

# How long an owner may take to release a session that another gateway wants; then the session is taken from it. A
# gateway that was frozen for nearly this long first checks which sessions it still owns: `STANDSTILL_S` in
# `realtime/serving/registry.py` must be less.
RELEASE_SECONDS = 1.0
# Gateways give up an engine that is frozen for longer than this, and continue on another one.
FROZEN_ENGINE_SECONDS = 2.5
# How long a session without saved state here is remembered after its gateway has claimed or migrated it.
CLAIM_SECONDS = 10.0
# Most entries since the last base, and their bytes. A handoff that exceeds them is dropped; gateways send a new base
# long before.
MAX_ENTRIES = 8192
MAX_ENTRY_BYTES = 8 * 1024 * 1024
# The last owner numbers of ended sessions that had several owners: how long and of how many sessions they are
# remembered. Without its number, a former owner that was frozen meanwhile could continue an ended session.
ENDED_SECONDS = 600.0
MAX_ENDED = 10_000
# Sessions that are adopted in one tick: each may have a long log, and live outputs wait behind it.
ADOPTIONS_PER_TICK = 16
# Interval at which deadlines are checked.
REVIEW_SECONDS = 0.25


@dataclass(slots=True)
class SavedHandoff:
    """The saved state of one session, its owner, and the gateways that want to adopt it."""

    key: str
    owner_number: int
    owner: Peer | None
    # Lowest owner number accepted from the owner, which uses it until it has received the one from `Renew`.
    min_number: int = 0
    # The lost gateway that owned it and may return with a newer state; empty if the session was released.
    lost_gateway: str = ""
    # The saved state, as in `SaveHandoff`.
    base: bytes = b""
    chunks: deque[bytes] = field(default_factory=deque)
    entries: list[bytes] = field(default_factory=list)
    entry_bytes: int = 0
    consumed: int = 0
    position_offset: int = 0
    sample_offset: int = 0
    keep_s: float = 0.0
    # The session's stream.
    hosted: HostedStream | None = None
    # When it lost its owner (clock seconds).
    ownerless_since: float = 0.0
    # Gateways that want to adopt it, and since when (in seconds of `_running_s`).
    claimants: list[Peer] = field(default_factory=list)
    wanted_since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A session that has no saved state here but exists: its gateway has claimed it, or (owner None) has migrated it to
    another engine."""

    owner_number: int
    owner: Peer | None
    since: float


class HandoffTable:
    """All saved handoffs of an engine.

    `request_release` asks a gateway to release a session and returns whether the gateway is connected; `apply_received`
    applies all received messages of a gateway; `abort` ends a stream. `clock` returns seconds.
    """

    def __init__(
        self,
        hosted_streams: HostedStreams,
        clock: Callable[[], float],
        request_release: Callable[[Peer, messages.Wanted], bool],
        apply_received: Callable[[Peer], None],
        abort: Callable[[str], None],
    ) -> None:
        self._hosted = hosted_streams
        self._clock = clock
        self._request_release = request_release
        self._apply_received = apply_received
        self._abort = abort
        self._handoffs: dict[str, SavedHandoff] = {}
        # Keys of sessions with claimants.
        self._wanted: set[str] = set()
        self._elsewhere: dict[str, _Elsewhere] = {}
        # Ended sessions: key -> (last owner number, time), oldest first.
        self.ended: dict[str, tuple[int, float]] = {}
        # Seconds during which the engine was not frozen. While it is frozen, no owner counts as late.
        self._running_s = 0.0
        self._ticked_at = self._reviewed_at = clock()
        # This engine was frozen: until this time a session whose owner was lost may be continued on another engine.
        self._in_doubt_until = float("-inf")

    def __len__(self) -> int:
        return len(self._handoffs)

    def on_command(self, peer: Peer, command: messages.SessionCommand) -> None:
        match command:
            case messages.SaveHandoff():
                self._save_handoff(peer, command)
            case messages.Ask():
                peer.outputs.append(self._holding(command.key, command.tag))
            case messages.Adopt():
                self._adopt(peer, command.key, command.owner_number)
            case messages.Renew():
                peer.outputs.append(messages.Renewed(command.tag, self._renew(peer, command)))
            case messages.Claim():
                self._claim(peer, command)
            case messages.DropHandoff():
                self._on_drop(command)

    def on_lost(self, peer: Peer) -> None:
        """A gateway is gone: its sessions and their streams wait to be adopted."""
        self._elsewhere = {key: found for key, found in self._elsewhere.items() if found.owner is not peer}
        for handoff in list(self._handoffs.values()):
            if peer in handoff.claimants:
                handoff.claimants.remove(peer)
                handoff.ownerless_since = self._clock()
            if handoff.owner is peer:
                handoff.lost_gateway = peer.gateway
                self._release(handoff)
        self._adopt_waiting()

    def tick(self, now: float) -> None:
        """Take sessions from late owners, let claimants adopt them, and drop those that have waited long enough."""
        if now - self._ticked_at > FROZEN_ENGINE_SECONDS:
            self._in_doubt_until = now + CLAIM_SECONDS
        self._running_s += min(now - self._ticked_at, 2 * REVIEW_SECONDS)
        self._ticked_at = now
        if now - self._reviewed_at >= REVIEW_SECONDS:
            self._reviewed_at = now
            self._review(now)
        if self._wanted:
            self._adopt_waiting()

    # Internals.

    def _review(self, now: float) -> None:
        for handoff in list(self._handoffs.values()):
            if self._handoffs.get(handoff.key) is not handoff:
                continue  # dropped while the messages of another session's owner were taken in
            if handoff.owner is None and not handoff.claimants and now - handoff.ownerless_since > handoff.keep_s:
                logger.info("session %s was not resumed in time", handoff.key)
                self._forget(handoff)
            elif (
                handoff.claimants
                and handoff.owner is not None
                and self._running_s - handoff.wanted_since > RELEASE_SECONDS
            ):
                self._take_away(handoff, handoff.owner)
        self._elsewhere = {key: found for key, found in self._elsewhere.items() if now - found.since <= CLAIM_SECONDS}
        while self.ended and now - next(iter(self.ended.values()))[1] > ENDED_SECONDS:
            del self.ended[next(iter(self.ended))]

    def _take_away(self, handoff: SavedHandoff, owner: Peer) -> None:
        """The owner is late. If its release has arrived already, that counts."""
        self._apply_received(owner)
        if handoff.owner is not owner or self._handoffs.get(handoff.key) is not handoff:
            return
        if self._was_frozen:
            # The session may have continued on another engine whose gateway has not said so yet.
            self._refuse_claimants(handoff)
        else:
            self._release(handoff)

    def _holding(self, key: str, tag: int) -> messages.Held:
        handoff, elsewhere = self._handoffs.get(key), self._elsewhere.get(key)
        if handoff is not None:
            return messages.Held(key, tag, handoff.owner_number, whole=not self._is_in_doubt(handoff))
        return (
            messages.Held(key, tag)
            if elsewhere is None
            else messages.Held(key, tag, elsewhere.owner_number, whole=False)
        )

    def _renew(self, peer: Peer, command: messages.Renew) -> int:
        """The client has resumed at the owner itself: the owner gets the number of a new owner, so that older requests
        to adopt the session fail. 0: the peer is not the owner."""
        handoff = self._handoffs.get(command.key)
        if handoff is None:
            return command.owner_number
        if handoff.owner is not peer or command.owner_number < handoff.min_number:
            return 0
        self._refuse_claimants(handoff)
        handoff.owner_number += messages.NEXT_OWNER
        return handoff.owner_number

    def _on_drop(self, command: messages.DropHandoff) -> None:
        handoff, elsewhere = self._handoffs.get(command.key), self._elsewhere.get(command.key)
        if elsewhere is not None and elsewhere.owner_number <= command.owner_number:
            del self._elsewhere[command.key]
        if handoff is None or handoff.owner_number > command.owner_number:
            return
        self._forget(handoff)
        had_several_owners = handoff.owner_number >= messages.NEXT_OWNER
        has_migrated = handoff.owner_number < command.owner_number
        if had_several_owners:
            self.ended.pop(command.key, None)
            self.ended[command.key] = (command.owner_number, self._clock())
            if len(self.ended) > MAX_ENDED:
                del self.ended[next(iter(self.ended))]
        if has_migrated:
            # A gateway that asks all engines now may have asked the other one too early.
            self._elsewhere[command.key] = _Elsewhere(command.owner_number, None, self._clock())

    def _is_in_doubt(self, handoff: SavedHandoff) -> bool:
        """Whether its owner may have continued it on another engine without having told this one."""
        return handoff.owner is None and bool(handoff.lost_gateway) and self._was_frozen

    @property
    def _was_frozen(self) -> bool:
        """Whether this engine was frozen a short time ago. Messages may be taken in before the first tick since."""
        now = self._clock()
        return now < self._in_doubt_until or now - self._ticked_at > FROZEN_ENGINE_SECONDS

    def _claim(self, peer: Peer, claim: messages.Claim) -> None:
        """A gateway says which sessions it owns. Fence those that have a newer owner, and drop saved handoffs of those
        that it continues. Sessions that it does not name keep waiting: it may have released them, and the release may
        be lost."""
        for key, number, is_elsewhere in claim.claims:
            handoff, (last, _) = self._handoffs.get(key), self.ended.get(key, (0, 0.0))
            was_left = handoff is not None and handoff.owner is None and handoff.lost_gateway == peer.gateway
            if handoff is not None and handoff.owner is peer:
                continue
            if handoff is not None and handoff.owner_number > number and not was_left:
                peer.outputs.append(messages.Fenced(key, handoff.owner_number))
            elif handoff is None and last > number:
                peer.outputs.append(messages.Fenced(key, last))
            elif handoff is None or handoff.owner is None:
                if handoff is not None:
                    self._forget(handoff)
                if not is_elsewhere:
                    self._elsewhere[key] = _Elsewhere(number, peer, self._clock())
        peer.outputs.append(messages.Claimed(claim.tag))

    def _save_handoff(self, peer: Peer, saved: messages.SaveHandoff) -> None:
        handoff = self._handoffs.get(saved.key)
        lowest = 0 if handoff is None else handoff.min_number if handoff.owner is peer else handoff.owner_number + 1
        if handoff is None and saved.key in self.ended:
            lowest = self.ended[saved.key][0]
        if saved.owner_number < lowest:
            peer.outputs.append(messages.Fenced(saved.key, lowest))
            return
        if saved.base is not None:
            handoff = self._begin(peer, saved, handoff)
        elif handoff is None or handoff.owner is not peer:
            return  # entries without a base: the handoff was dropped, and the owner will send a new base
        handoff.entries += saved.entries
        handoff.entry_bytes += sum(map(len, saved.entries))
        handoff.consumed = saved.consumed
        self._name_stream(peer, handoff, saved.stream)
        if handoff.hosted is not None:
            handoff.hosted.forget_outputs(saved.consumed)
        if self._is_overgrown(handoff):
            logger.warning(
                "session %s: its saved handoff is too large and was dropped; it cannot be adopted", handoff.key
            )
            self._forget(handoff)
        elif saved.last:
            self._release(handoff)
            self._adopt_waiting()

    def _begin(self, peer: Peer, saved: messages.SaveHandoff, known: SavedHandoff | None) -> SavedHandoff:
        assert saved.base is not None
        handoff = known or SavedHandoff(saved.key, saved.owner_number, peer, saved.owner_number)
        self._handoffs[saved.key] = handoff
        self._elsewhere.pop(saved.key, None)
        if handoff.owner not in (None, peer):
            # It was adopted on another engine and has migrated here.
            handoff.owner.outputs.append(messages.Fenced(handoff.key, saved.owner_number))
        if handoff.owner is not peer:
            self._refuse_claimants(handoff)
            handoff.owner, handoff.lost_gateway, handoff.min_number = peer, "", saved.owner_number
        handoff.owner_number, handoff.base = max(handoff.owner_number, saved.owner_number), saved.base
        handoff.entries, handoff.entry_bytes, handoff.keep_s = [], 0, saved.keep_s
        handoff.position_offset, handoff.sample_offset = saved.position_offset, saved.sample_offset
        if saved.chunk:
            handoff.chunks.append(saved.chunk)
            while len(handoff.chunks) > 1 and sum(map(len, handoff.chunks)) > saved.keep_bytes:
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
        kept = 0 if handoff.hosted is None else len(handoff.hosted.outputs)
        return len(handoff.entries) > MAX_ENTRIES or handoff.entry_bytes > MAX_ENTRY_BYTES or kept >= MAX_OUTPUTS_KEPT

    def _adopt(self, peer: Peer, key: str, number: int) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None or not messages.same_owner(number, handoff.owner_number):
            # It has a newer owner since the peer asked, and its client may be connected there.
            peer.outputs.append(messages.SessionGiven(key))
            return
        if not handoff.claimants:
            handoff.wanted_since = self._running_s
        if peer not in handoff.claimants:
            handoff.claimants.append(peer)
        self._wanted.add(key)
        owner = handoff.owner
        if owner is peer or (
            owner is not None and not self._request_release(owner, messages.Wanted(key, handoff.owner_number))
        ):
            # A send to a lost owner has already released its sessions.
            if handoff.owner is owner:
                self._release(handoff)
        self._adopt_waiting()

    def _release(self, handoff: SavedHandoff) -> None:
        """The session has no owner now; its stream continues with the audio it has."""
        owner, handoff.owner, handoff.ownerless_since = handoff.owner, None, self._clock()
        if owner is not None and handoff.claimants and owner not in handoff.claimants:
            owner.outputs.append(messages.Fenced(handoff.key, handoff.owner_number + messages.NEXT_OWNER))
        if handoff.hosted is not None:
            self._hosted.detach(handoff.hosted)

    def _adopt_waiting(self) -> None:
        """Give sessions without an owner to their claimants, as long as the claimants' queues have room."""
        adopted = 0
        for key in list(self._wanted):
            handoff = self._handoffs.get(key)
            if handoff is not None and self._is_in_doubt(handoff):
                self._refuse_claimants(handoff)
            if handoff is None or not handoff.claimants:
                self._wanted.discard(key)
            elif handoff.owner is None and handoff.claimants[-1].has_room and adopted < ADOPTIONS_PER_TICK:
                adopted += 1
                self._wanted.discard(key)
                self._give(handoff, handoff.claimants[-1])

    def _give(self, handoff: SavedHandoff, claimant: Peer) -> None:
        # Of several claimants, the last one has the client; the others may ask again.
        for other in handoff.claimants[:-1]:
            other.outputs.append(messages.SessionGiven(handoff.key))
        handoff.claimants, handoff.owner, handoff.lost_gateway = [], claimant, ""
        handoff.owner_number += messages.NEXT_OWNER
        handoff.min_number = handoff.owner_number
        adopted = messages.SessionGiven(
            handoff.key,
            handoff.owner_number,
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
    """Fill in the stream's state as it was after the last output that the saved handoff includes."""
    opening, ahead = hosted.opening, [output for _, output in hosted.outputs]
    answers = [output.tag for output in ahead if isinstance(output, messages.Flushed)]
    tokens = sum(len(output.tokens) for output in ahead if isinstance(output, messages.Text))
    adopted.stream = hosted.name
    adopted.end, adopted.sample, adopted.segment = hosted.end, hosted.end_sample, hosted.segment
    adopted.flushes = hosted.flushes
    # An engine that rebuilds a stream says some things again; what the gateway before it had received counts.
    adopted.answered = max(opening.answered, answers[0] - 1) if answers else hosted.answered
    adopted.token = hosted.next_token - tokens
    adopted.delay_positions, adopted.options, adopted.turns = opening.delay_positions, opening.options, opening.turns
    speech = [output.sample for output in ahead if isinstance(output, messages.Speech)]
    adopted.heard_until = max(opening.heard_until, speech[0]) if speech else hosted.heard_until
    # If speech is ahead, the track after it comes with it.
    adopted.track = None if speech else hosted.track
    adopted.labels = hosted.labels
    if hosted.kept is not None:
        adopted.state, adopted.kept = hosted.state, hosted.kept.to_commands()
