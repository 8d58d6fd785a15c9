"""Published sessions across the gateways of a fleet: a name belongs to one session, and viewers may use any gateway.

Each name is coordinated by one gateway, its home. Rendezvous hashing chooses the home from the table of the fleet, so
all gateways choose the same one and few names move when gateways come and go. `FleetNames` takes the place of
`Coordinator` (`publishing.py`), in the gateway or in the parent of its workers: it forwards requests to the home of
each name, and keeps the words of all names that are published or read at this gateway. When a home is lost or changes,
the gateways send these words to the new home, so no words depend on a single gateway.

Gateways are linked by sockets that are encrypted with keys derived from the fleet's secret. A link is opened when it is
needed, and closed when it is idle.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.boundary.codec import Frames
from engine.boundary.sockets import CannotListen, GatewayListener, GatewaySocket, LinkKeys, link_context
from engine.client.fleet_table import TABLE_POLL_SECONDS, GatewayEntry, TableFile
from engine.fleet_secret import derive
from realtime.config import Config
from realtime.serving.publishing import (
    Begun,
    Coordinator,
    Current,
    Follow,
    FromCoordinator,
    Key,
    LinksFrom,
    News,
    Post,
    Publish,
    Published,
    PublishedTranscript,
    Publisher,
    Revoke,
    State,
    ToCoordinator,
    Unpublish,
    Update,
)
from realtime.serving.signed_tokens import Revocation, Revocations, fleet_secret

log = logging.getLogger("tickertape.viewers")

# A link sends a message every BEAT_S; after SILENT_S without one the other side gives it up.
BEAT_S = 1.0
SILENT_S = 5.0
# Seconds before a broken link is opened again; doubles with each attempt, and is spread at random.
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 10.0
# A link that no name needs is closed after this many seconds.
IDLE_S = 30.0
# Seconds after which a name is granted although its home does not answer, so that sessions do not wait for a lost
# machine. The claim is repeated when the home is back, or when the table has another home. Less than `ANSWER_S`.
GRANT_AFTER_S = 1.0
# Messages to a home that may be unanswered; beyond it the link is closed and opened again.
MAX_UNANSWERED = 20_000
# Names that are sent to homes in one iteration of the event loop; each name may have a long transcript.
NAMES_PER_BATCH = 20
# This gateway's own number among the members of its coordinator; other gateways have numbers from 1.
SELF = 0


# Messages between gateways, besides those of `publishing`


class Hello(msgspec.Struct, tag="hello"):
    """The first message on a link: names of both gateways, and the caller's state of viewer links."""

    caller: str
    called: str
    links_from_ms: int
    revocations: list[Revocation]


class Welcome(msgspec.Struct, tag="welcome"):
    """The answer to `Hello`."""

    links_from_ms: int
    revocations: list[Revocation]


class Beat(msgspec.Struct, tag="beat"):
    """A heartbeat. The listener answers each one with its number."""

    number: int


class Goodbye(msgspec.Struct, tag="goodbye"):
    """The listener does not know this link, or is another gateway than the one that was called."""


Message = Hello | Welcome | Beat | Goodbye | ToCoordinator | FromCoordinator
encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Message)


def home_of(key: Key, gateways: Sequence[str]) -> str:
    """The gateway that coordinates a name: the one with the highest hash (rendezvous hashing)."""
    owner, name = key
    return max(gateways, key=lambda gateway: (_hash(gateway, owner, name), gateway))


def _hash(*words: str) -> bytes:
    return hashlib.blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=8).digest()


@dataclass(slots=True)
class _Name:
    """A name that a process of this gateway publishes or reads."""

    transcript: PublishedTranscript = field(default_factory=PublishedTranscript)
    session: str = ""
    # The process that has the session, if it is one of this gateway and the home has granted the name.
    holder: int | None = None
    # Claims that the home has not answered: our number of the claim -> the process and its request.
    pending_claims: dict[int, tuple[int, Publish]] = field(default_factory=dict)
    # Number of the last claim that was repeated to a home for a name that was granted before. The answer says whether
    # the home agrees. 0: no answer is expected.
    repeated_claim: int = 0
    followers: set[int] = field(default_factory=set)
    # Whether the words so far have arrived from the home.
    is_current: bool = False
    # The gateway to which the claims were sent last.
    home: str = ""

    @property
    def is_used(self) -> bool:
        return self.holder is not None or bool(self.pending_claims) or bool(self.followers)


class _Link:
    """The link to another gateway, which is opened again until `close`."""

    def __init__(self, entry: GatewayEntry, names: FleetNames, keys: LinkKeys) -> None:
        self.entry = entry
        self.is_up = False
        self.needed_at = asyncio.get_running_loop().time()
        self._names = names
        self._keys = keys
        self._socket: GatewaySocket | None = None
        self._last_message_at = 0.0
        self._sent = self._answered = 0
        self._retry: asyncio.TimerHandle | None = None
        self._wait_s = FIRST_WAIT_S
        self._open()

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._retry, self._last_message_at = None, loop.time()
        self._sent = self._answered = 0
        socket = self._socket = GatewaySocket(
            link_context(), self.entry.address, self._on_frames, self._on_loss, self._on_refused, self._keys
        )
        socket.send([encoder.encode(self._names.hello(self.entry.name))])

    def send(self, message: Message) -> None:
        """Send a message. While the link is down messages are dropped: when it is up again, all claims are repeated."""
        if self.is_up and self._socket is not None:
            self._sent += 1
            self._socket.send([encoder.encode(message)])

    def tick(self, now: float) -> None:
        if self._socket is None:
            return
        if now - self._last_message_at > SILENT_S or self._sent - self._answered > MAX_UNANSWERED:
            self._on_loss()
        else:
            self.send(Beat(self._sent + 1))

    def _on_frames(self, frames: Frames) -> None:
        self._last_message_at = asyncio.get_running_loop().time()
        try:
            message = decoder.decode(frames[0])
        except msgspec.DecodeError as error:
            log.warning("gateway %s sent a message that this one does not know: %s", self.entry.name, error)
            return self._on_loss()
        match message:
            case Welcome():
                self.is_up, self._wait_s = True, FIRST_WAIT_S
                self._names.on_welcome(self.entry.name, message)
            case Beat(number):
                self._answered = number
            case Goodbye():
                self._on_loss()
            case _:
                self._names.on_answer(self.entry.name, message)

    def _on_refused(self) -> None:
        log.warning("gateway %s refuses this one: the two have different fleet secrets", self.entry.name)
        self._on_loss()

    def _on_loss(self) -> None:
        if self._socket is None:
            return
        if self.is_up:
            log.warning("the link to gateway %s broke", self.entry.name)
        self._drop()
        wait_s = random.uniform(0.5, 1.5) * self._wait_s
        self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)
        self._retry = asyncio.get_running_loop().call_later(wait_s, self._open)

    def _drop(self) -> None:
        self.is_up = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._drop()


@dataclass(slots=True)
class _Caller:
    """Another gateway that is linked to the coordinator here."""

    member: int
    last_message_at: float


class FleetNames:
    """The interface of `Coordinator` for the processes of this gateway, over the coordinators of all gateways."""

    def __init__(self, gateway: str, secret: bytes, keep_s: float, clock: Callable[[], float] = time.time) -> None:
        self.gateway = gateway
        self.names: dict[Key, _Name] = {}
        self.links: dict[str, _Link] = {}
        # The coordinator of the names whose home is here. Its members are gateways.
        self.coordinator = Coordinator(keep_s, answers_with_state=True)
        self.coordinator.add(SELF, lambda message: self.on_answer(self.gateway, message))
        self.revocations = Revocations()
        self.revocations.links_from_ms = round(clock() * 1000)
        # Viewer links are signed with it.
        self.link_secret = derive(secret, "viewer links")
        self._keys = LinkKeys.between_gateways(secret)
        self._members: dict[int, Callable[[FromCoordinator], None]] = {}
        self._entries: dict[str, GatewayEntry] = {}
        self._homes: list[str] = [gateway]
        self._listener: GatewayListener | None = None
        self._listens_at = ""
        self._callers: dict[bytes, _Caller] = {}
        self._last_caller = SELF
        self._number = 0
        self._claims: dict[int, Key] = {}
        self._is_closed = False
        # Gateways that have all revocations of this one.
        self._synced_gateways: set[str] = set()

    @classmethod
    def of(cls, config: Config) -> FleetNames | None:
        """For a gateway that the table of a fleet names; None for any other server."""
        secret = fleet_secret(config)
        if secret is None or not (config.fleet.table and config.fleet.gateway and config.limits.viewers):
            return None
        return cls(config.fleet.gateway, secret, config.session.resume_s)

    def publisher(self) -> Publisher:
        """The publisher of a gateway with a single process."""
        publisher = Publisher(lambda message: self.on_message(SELF, message))
        self.add(SELF, publisher.on_message)
        return publisher

    # Requests of the processes of this gateway

    def add(self, member: int, deliver: Callable[[FromCoordinator], None]) -> None:
        self._members[member] = deliver
        deliver(LinksFrom(self.revocations.links_from_ms))
        for revocation in self.revocations.all():
            deliver(Revoke(revocation))

    def remove(self, member: int) -> None:
        """A process has ended. Its sessions may continue anywhere in the fleet."""
        self._members.pop(member, None)
        for key, name in list(self.names.items()):
            self._unfollow(member, key, name)
            if name.holder == member:
                self._release(key, name, moves=True)
            self._drop_unused(key)

    def on_message(self, member: int, message: ToCoordinator) -> None:
        if member not in self._members:
            return
        match message:
            case Publish():
                self._claim(member, message)
            case Post(owner, key_name, session, update):
                self._post(member, (owner, key_name), session, update)
            case Unpublish(owner, key_name, session, moves):
                name = self.names.get((owner, key_name))
                if name is not None and (name.holder, name.session) == (member, session):
                    self._release((owner, key_name), name, moves)
                    self._drop_unused((owner, key_name))
            case Follow(owner, key_name, wanted):
                self._follow(member, (owner, key_name), wanted)
            case Revoke(revocation):
                self._revoke(revocation)
                self._send_revocation(message)

    def _claim(self, member: int, message: Publish) -> None:
        key = (message.owner, message.name)
        name = self._name(key)
        self._number += 1
        name.pending_claims[self._number] = (member, message)
        self._claims[self._number] = key
        self._to_home(key, Publish(self._number, *key, message.session))
        if self._number in name.pending_claims:
            asyncio.get_running_loop().call_later(GRANT_AFTER_S, self._grant_without_home, key, self._number)

    def _grant_without_home(self, key: Key, number: int) -> None:
        """The home has not answered: grant the name, unless another session of this gateway has it."""
        name = self.names.get(key)
        if name is None or number not in name.pending_claims:
            return
        member, request = name.pending_claims.pop(number)
        del self._claims[number]
        is_taken = name.holder is not None and name.session != request.session
        if not is_taken and member in self._members:
            if name.session != request.session or not name.transcript.is_live:
                name.transcript.apply(Begun())
            name.holder, name.session, name.is_current = member, request.session, True
            self._expect_repeated_claim(key, name, number)
            self._deliver(name, Current(*key, name.transcript.save(), name.session))
        if member in self._members:
            self._members[member](Published(request.number, not is_taken))
        self._drop_unused(key)

    def _post(self, member: int, key: Key, session: str, update: Update) -> None:
        name = self.names.get(key)
        if name is None or (name.holder, name.session) != (member, session) or not name.transcript.apply(update):
            return
        self._deliver(name, News(*key, update))
        self._to_home(key, Post(*key, session, update))

    def _follow(self, member: int, key: Key, wanted: bool) -> None:
        name = self._name(key)
        if not wanted:
            self._unfollow(member, key, name)
            self._drop_unused(key)
            return
        is_first = not name.followers and name.holder is None
        name.followers.add(member)
        if is_first:
            name.is_current = False
            self._to_home(key, Follow(*key))
        elif name.is_current:
            self._members[member](Current(*key, name.transcript.save(), name.session))

    def _unfollow(self, member: int, key: Key, name: _Name) -> None:
        if member in name.followers:
            name.followers.discard(member)
            if not name.followers and name.holder is None:
                self._to_home(key, Follow(*key, wanted=False))

    def _release(self, key: Key, name: _Name, moves: bool) -> None:
        """The session of this gateway gives the name up, or continues elsewhere."""
        name.holder = None
        if name.followers:
            # First, so that the home keeps the words for viewers at this gateway.
            self._to_home(key, Follow(*key))
        self._to_home(key, Unpublish(*key, name.session, moves))

    def _revoke(self, revocation: Revocation) -> None:
        self.revocations.add(revocation)
        for deliver in self._members.values():
            deliver(Revoke(revocation))

    def _send_revocation(self, message: Revoke) -> None:
        """Send a revocation to all gateways. A gateway without a link gets it with the `Hello` of a new link."""
        self._synced_gateways = {
            name for name in self._synced_gateways if name in self.links and self.links[name].is_up
        }
        for name in self._synced_gateways:
            self.links[name].send(message)
        self._update_links()

    # Answers of the homes

    def on_answer(self, gateway: str, message: Any) -> None:
        """A message of the coordinator of another gateway, or of our own."""
        match message:
            case Published(number, is_granted, state):
                self._on_published(gateway, number, is_granted, state)
            case Current(owner, key_name, state, session):
                self._on_current(gateway, (owner, key_name), state, session)
            case News(owner, key_name, update, session):
                name = self.names.get((owner, key_name))
                if name is None or name.home != gateway or name.holder is not None:
                    return
                name.session = session or name.session
                if name.transcript.apply(update):
                    self._deliver(name, News(owner, key_name, update))
            case Revoke(revocation):
                self._revoke(revocation)

    def _on_published(self, gateway: str, number: int, is_granted: bool, state: State | None) -> None:
        key = self._claims.pop(number, None)
        name = None if key is None else self.names.get(key)
        if key is None or name is None:
            return
        if number == name.repeated_claim:
            self._on_repeated_claim(key, name, is_granted)
            return
        if number not in name.pending_claims:
            return
        member, request = name.pending_claims.pop(number)
        if is_granted and name.home == gateway:
            if name.followers and name.holder is None:
                self._to_home(key, Follow(*key, wanted=False))
            name.holder, name.session, name.is_current = member, request.session, True
            if state is not None:
                name.transcript.load(state)
            self._deliver(name, Current(*key, name.transcript.save(), name.session))
        if member in self._members:
            self._members[member](Published(request.number, is_granted))
        elif name.holder == member:
            self._release(key, name, moves=True)
        self._drop_unused(key)

    def _on_repeated_claim(self, key: Key, name: _Name, is_granted: bool) -> None:
        name.repeated_claim = 0
        if is_granted or name.holder is None:
            return
        # Two sessions had the name while gateways could not reach each other.
        log.warning("session %s is not published any more: another session has its name", name.session)
        name.holder = None
        if name.followers:
            self._to_home(key, Follow(*key))
        self._drop_unused(key)

    def _on_current(self, gateway: str, key: Key, state: State, session: str) -> None:
        name = self.names.get(key)
        if name is None or name.home != gateway:
            return
        if name.holder is None:
            name.session, name.is_current = session, True
            name.transcript.load(state)
        elif session != name.session or not name.transcript.add_earlier(state):
            return
        self._deliver(name, Current(*key, name.transcript.save(), name.session))

    def _deliver(self, name: _Name, message: Current | News) -> None:
        for follower in tuple(name.followers):
            self._members[follower](message)

    # Homes and links

    def _name(self, key: Key) -> _Name:
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = _Name(home=home_of(key, self._homes))
        return name

    def _drop_unused(self, key: Key) -> None:
        name = self.names.get(key)
        if name is not None and not name.is_used:
            del self.names[key]
            self._claims.pop(name.repeated_claim, None)

    def _to_home(self, key: Key, message: ToCoordinator) -> None:
        name = self.names[key]
        if name.home == self.gateway:
            self.coordinator.on_message(SELF, message)
            return
        link = self._link(name.home)
        if link is not None:
            link.send(message)

    def _link(self, gateway: str) -> _Link | None:
        link = self.links.get(gateway)
        if link is None:
            if gateway not in self._entries:
                return None
            link = self.links[gateway] = _Link(self._entries[gateway], self, self._keys)
        link.needed_at = asyncio.get_running_loop().time()
        return link

    def _repeat_claims(self, key: Key, name: _Name) -> None:
        """Send the claims and the follow request of a name to its home: the home is new, or the link to it is."""
        if name.holder is not None:
            self._number += 1
            self._expect_repeated_claim(key, name, self._number)
            self._to_home(key, Publish(self._number, *key, name.session, name.transcript.save()))
        for number, (_, request) in list(name.pending_claims.items()):
            self._claims[number] = key
            self._to_home(key, Publish(number, *key, request.session))
        if name.followers and name.holder is None:
            self._to_home(key, self._follow_with_state(key, name))

    def _expect_repeated_claim(self, key: Key, name: _Name, number: int) -> None:
        """Wait for the answer to the claim with this number, which says whether the home agrees with the holder.
        Answers to earlier claims are ignored."""
        self._claims.pop(name.repeated_claim, None)
        self._claims[number], name.repeated_claim = key, number

    def _follow_with_state(self, key: Key, name: _Name) -> Follow:
        known = name.transcript.save() if name.transcript.is_live else None
        return Follow(*key, session=name.session, state=known)

    def update_gateways(self, gateways: Sequence[GatewayEntry]) -> None:
        """The gateways of the fleet, from a new table. A gateway that drains is no home."""
        self._entries = {entry.name: entry for entry in gateways if entry.name != self.gateway}
        for gateway, link in list(self.links.items()):
            if self._entries.get(gateway) != link.entry:
                link.close()
                del self.links[gateway]
        self._synced_gateways &= self._entries.keys()
        own = next((entry for entry in gateways if entry.name == self.gateway), None)
        self._listen("" if own is None else own.address)
        self._homes = sorted(entry.name for entry in gateways if entry.state == "serving") or [self.gateway]
        self._in_batches(list(self.names), self._move)
        self._update_links()

    def _in_batches(self, keys: list[Key], tell: Callable[[Key, _Name], None]) -> None:
        """Call `tell` for each of these names that still exists, a few in each iteration of the event loop."""
        if self._is_closed:
            return
        for key in keys[:NAMES_PER_BATCH]:
            name = self.names.get(key)
            if name is not None:
                tell(key, name)
        if len(keys) > NAMES_PER_BATCH:
            asyncio.get_running_loop().call_soon(self._in_batches, keys[NAMES_PER_BATCH:], tell)

    def _move(self, key: Key, name: _Name) -> None:
        """Tell the home of a name, if it is another one than before."""
        home = home_of(key, self._homes)
        if home == name.home:
            return
        if name.holder is not None:
            self._to_home(key, Unpublish(*key, name.session, moves=True))
        elif name.followers:
            self._to_home(key, Follow(*key, wanted=False))
        name.home = home
        self._repeat_claims(key, name)

    def _update_links(self) -> None:
        """Open the links to gateways that do not know our revocations yet, and close those that nothing needs."""
        now = asyncio.get_running_loop().time()
        needed = {name.home for name in self.names.values()} | (self._entries.keys() - self._synced_gateways)
        for gateway in needed - {self.gateway}:
            self._link(gateway)
        for gateway, link in list(self.links.items()):
            if gateway not in needed and now - link.needed_at > IDLE_S:
                link.close()
                del self.links[gateway]

    def hello(self, called: str) -> Hello:
        return Hello(self.gateway, called, self.revocations.links_from_ms, self.revocations.all())

    def on_welcome(self, gateway: str, message: Welcome) -> None:
        self._synced_gateways.add(gateway)
        self._merge_revocations(message.links_from_ms, message.revocations)
        self._in_batches([key for key, name in self.names.items() if name.home == gateway], self._repeat_claims)

    def _merge_revocations(self, links_from_ms: int, revocations: list[Revocation]) -> None:
        """Merge what another gateway knows of viewer links: first the revocations, then the time from which links are
        valid."""
        known = set(self.revocations.all())
        for revocation in revocations:
            if revocation not in known:
                self._revoke(revocation)
        if links_from_ms < self.revocations.links_from_ms:
            self.revocations.links_from_ms = links_from_ms
            for deliver in self._members.values():
                deliver(LinksFrom(links_from_ms))

    # The side that listens

    def _listen(self, address: str) -> None:
        if address == self._listens_at:
            return
        self._stop_listening()
        self._listens_at = address
        if not address:
            return
        try:
            self._listener = GatewayListener(address, self._keys, self._on_call)
        except CannotListen as error:
            log.error("other gateways cannot reach this one, so that their viewers miss its sessions: %s", error)

    def _stop_listening(self) -> None:
        for caller in list(self._callers):
            self._forget(caller)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _on_call(self, caller: bytes, frames: Frames) -> None:
        try:
            message = decoder.decode(frames[0])
        except msgspec.DecodeError as error:
            log.warning("another gateway sent a message that this one does not know: %s", error)
            return
        known = self._callers.get(caller)
        if isinstance(message, Hello):
            self._on_hello(caller, message)
        elif known is None:
            self._answer(caller, Goodbye())
        else:
            known.last_message_at = asyncio.get_running_loop().time()
            if isinstance(message, Beat):
                self._answer(caller, message)
            elif isinstance(message, Revoke):
                self._revoke(message.revocation)
            elif isinstance(message, ToCoordinator):
                self.coordinator.on_message(known.member, message)

    def _on_hello(self, caller: bytes, message: Hello) -> None:
        if message.called != self.gateway:
            self._answer(caller, Goodbye())
            return
        self._merge_revocations(message.links_from_ms, message.revocations)
        self._last_caller += 1
        self._callers[caller] = _Caller(self._last_caller, asyncio.get_running_loop().time())
        self._answer(caller, Welcome(self.revocations.links_from_ms, self.revocations.all()))
        self.coordinator.add(self._last_caller, lambda answer: self._answer(caller, answer))

    def _answer(self, caller: bytes, message: Message) -> None:
        sent = self._listener is not None and self._listener.send(caller, [encoder.encode(message)])
        if not sent and caller in self._callers:
            # Not now: this may be called from within the coordinator. The caller notices at its next beat.
            asyncio.get_running_loop().call_soon(self._forget, caller)

    def _forget(self, caller: bytes) -> None:
        known = self._callers.pop(caller, None)
        if known is not None:
            self.coordinator.remove(known.member)

    def tick(self) -> None:
        now = asyncio.get_running_loop().time()
        for link in self.links.values():
            link.tick(now)
        for caller, known in list(self._callers.items()):
            if now - known.last_message_at > SILENT_S:
                self._forget(caller)
        self._update_links()

    async def run(self, table: str) -> None:
        """Read the table when it changes, and keep the links up, until cancelled."""
        file = TableFile(table)
        ticked = 0.0
        try:
            while True:
                found = await asyncio.to_thread(file.poll)
                if found is not None:
                    self.update_gateways(found.gateways)
                now = asyncio.get_running_loop().time()
                if now - ticked >= BEAT_S:
                    ticked = now
                    self.tick()
                await asyncio.sleep(TABLE_POLL_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._stop_listening()
