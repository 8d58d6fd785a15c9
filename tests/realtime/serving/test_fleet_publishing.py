"""Published names over several gateways: who has a name, what viewers are told, and what survives the loss of one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest
import zmq

from engine.boundary.sockets import GatewaySocket, LinkKeys
from engine.client.fleet_table import GatewayEntry
from realtime.serving import fleet_publishing
from realtime.serving.fleet_publishing import FleetNames, home_of
from realtime.serving.publishing import (
    Added,
    Finished,
    Follow,
    Key,
    Line,
    PublishedTranscript,
    Publisher,
    State,
    Update,
)
from realtime.serving.signed_tokens import Signer, ViewerLinks
from tests.engine import fakes

SECRET = b"the secret of a fleet in a test"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


class Reader:
    """What the viewers of one process are told."""

    def __init__(self) -> None:
        self.read: dict[Key, PublishedTranscript] = {}
        self.snapshots = 0
        self.updates: list[Update] = []

    def on_current(self, key: Key, state: State) -> None:
        self.snapshots += 1
        self.read.setdefault(key, PublishedTranscript()).load(state)

    def on_update(self, key: Key, update: Update) -> None:
        self.updates.append(update)
        self.read[key].apply(update)

    def lines(self, key: Key) -> list[str]:
        return [line.text for line in self.read[key].lines.values()] if key in self.read else []

    def is_live(self, key: Key) -> bool:
        return key in self.read and self.read[key].is_live


class Gateway:
    """A gateway with one or more processes."""

    def __init__(self, name: str, secret: bytes = SECRET, processes: int = 1, started: float | None = None) -> None:
        self.entry = GatewayEntry(name, free_address())
        self.names = FleetNames(name, secret, 30.0, time.time if started is None else lambda: started)
        self.publishers: list[Publisher] = []
        self.readers: list[Reader] = []
        for member in range(processes):
            publisher = Publisher(lambda message, member=member: self.names.on_message(member, message))  # type: ignore[misc]
            publisher.reader = reader = Reader()
            self.publishers.append(publisher)
            self.readers.append(reader)
            self.names.add(member, publisher.on_message)

    @property
    def publisher(self) -> Publisher:
        return self.publishers[0]

    @property
    def reader(self) -> Reader:
        return self.readers[0]


class Fleet:
    def __init__(self, *gateways: Gateway) -> None:
        self.gateways = list(gateways)
        self.put()

    def put(self) -> None:
        for gateway in self.gateways:
            gateway.names.update_gateways([one.entry for one in self.gateways])

    def lose(self, gateway: Gateway) -> None:
        """The process is gone; then the table is without it."""
        gateway.names.close()
        self.gateways.remove(gateway)
        self.put()

    def key_at(self, home: Gateway) -> Key:
        names = [one.entry.name for one in self.gateways]
        return next(key for n in range(1000) if home_of(key := ("owner", f"name{n}"), names) == home.entry.name)


@contextlib.asynccontextmanager
async def fleet_of(*gateways: Gateway) -> AsyncIterator[Fleet]:
    fleet = Fleet(*gateways)

    async def tick() -> None:
        while True:
            await asyncio.sleep(fleet_publishing.BEAT_S)
            for gateway in fleet.gateways:
                gateway.names.tick()

    ticking = asyncio.create_task(tick())
    try:
        yield fleet
    finally:
        ticking.cancel()
        for gateway in gateways:
            gateway.names.close()


def line(number: int) -> Finished:
    return Finished(Line(f"i{number}", f"line {number}"))


@pytest.mark.parametrize("home", range(3))
async def test_viewers_at_any_gateway_read_what_is_spoken_at_any_other(home: int) -> None:
    async with fleet_of(*(Gateway(name) for name in "abc")) as fleet:
        speaker, viewer, _ = fleet.gateways
        key = fleet.key_at(fleet.gateways[home])
        # They may come before the session.
        for gateway in fleet.gateways:
            gateway.publisher.follow(key)
        assert await speaker.publisher.claim(key, "s")
        speaker.publisher.post(key, "s", Added("i1", "li"))
        speaker.publisher.post(key, "s", line(1))
        for gateway in fleet.gateways:
            await fakes.until(lambda: gateway.reader.lines(key) == ["line 1"])  # noqa: B023
        # The name belongs to one session of the whole fleet.
        assert await viewer.publisher.claim(key, "other") is False
        speaker.publisher.unpublish(key, "s")
        for gateway in fleet.gateways:
            await fakes.until(lambda: not gateway.reader.is_live(key))  # noqa: B023
            assert gateway.reader.lines(key) == ["line 1"]
        assert await viewer.publisher.claim(key, "other")


async def test_a_gateway_follows_a_name_once_for_all_its_processes_and_not_after_the_last_viewer() -> None:
    async with fleet_of(Gateway("a"), Gateway("b", processes=3)) as fleet:
        speaker, viewer = fleet.gateways
        key = fleet.key_at(speaker)
        assert await speaker.publisher.claim(key, "s")
        for publisher in viewer.publishers:
            publisher.follow(key)
        speaker.publisher.post(key, "s", line(1))
        for reader in viewer.readers:
            await fakes.until(lambda: reader.lines(key) == ["line 1"])  # noqa: B023
        channel = speaker.names.coordinator.channels[key]
        assert len(channel.followers) == 1
        for publisher in viewer.publishers:
            publisher.unfollow(key)
        await fakes.until(lambda: not channel.followers)
        assert not viewer.names.names


@pytest.mark.parametrize("home", range(3))
async def test_viewers_keep_their_words_when_the_speakers_gateway_dies_and_the_session_continues_elsewhere(
    home: int,
) -> None:
    """Also if that gateway was the home of the name, so that its words have to come from those who read them."""
    async with fleet_of(*(Gateway(name) for name in "abc")) as fleet:
        speaker, viewer, adopter = fleet.gateways
        key = fleet.key_at(fleet.gateways[home])
        assert await speaker.publisher.claim(key, "s")
        viewer.publisher.follow(key)
        speaker.publisher.post(key, "s", line(1))
        await fakes.until(lambda: viewer.reader.lines(key) == ["line 1"])
        fleet.lose(speaker)
        assert await adopter.publisher.claim(key, "s")
        adopter.publisher.post(key, "s", line(2))
        await fakes.until(lambda: viewer.reader.lines(key) == ["line 1", "line 2"])
        adopter.publisher.follow(key)
        await fakes.until(lambda: adopter.reader.lines(key) == ["line 1", "line 2"])
        assert viewer.reader.is_live(key)


async def test_the_home_of_a_name_may_change_and_no_words_are_lost() -> None:
    """A gateway comes, and the first one goes."""
    async with fleet_of(Gateway("a"), Gateway("b")) as fleet:
        first, other = fleet.gateways
        keys = [("owner", f"name{n}") for n in range(20)]
        for key in keys:
            assert await other.publisher.claim(key, f"s{key}")
            other.publisher.post(key, f"s{key}", line(1))
        late = Gateway("c")
        fleet.gateways.append(late)
        fleet.put()
        for key in keys:
            late.publisher.follow(key)
            await fakes.until(lambda: late.reader.lines(key) == ["line 1"])  # noqa: B023
        fleet.lose(first)
        for key in keys:
            other.publisher.post(key, f"s{key}", line(2))
            await fakes.until(lambda: late.reader.lines(key) == ["line 1", "line 2"])  # noqa: B023
        late.names.close()


async def test_a_home_that_starts_again_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same address, and before anybody has noticed."""
    monkeypatch.setattr(fleet_publishing, "BEAT_S", 0.05)
    async with fleet_of(Gateway("a"), Gateway("b"), Gateway("c")) as fleet:
        home, speaker, viewer = fleet.gateways
        key = fleet.key_at(home)
        assert await speaker.publisher.claim(key, "s")
        viewer.publisher.follow(key)
        speaker.publisher.post(key, "s", line(1))
        await fakes.until(lambda: viewer.reader.lines(key) == ["line 1"])
        home.names.close()
        speaker.publisher.post(key, "s", line(2))
        again = Gateway("a")
        again.entry = home.entry
        fleet.gateways[0] = again
        again.names.update_gateways([one.entry for one in fleet.gateways])
        await fakes.until(lambda: viewer.reader.lines(key) == ["line 1", "line 2"])
        again.names.close()


async def test_a_process_that_dies_leaves_its_session_to_the_next_one() -> None:
    async with fleet_of(Gateway("a", processes=2), Gateway("b")) as fleet:
        speaker, viewer = fleet.gateways
        key = fleet.key_at(viewer)
        assert await speaker.publishers[0].claim(key, "s")
        speaker.publishers[0].post(key, "s", line(1))
        viewer.publisher.follow(key)
        await fakes.until(lambda: viewer.reader.lines(key) == ["line 1"])
        speaker.names.remove(0)
        assert await speaker.publishers[1].claim(key, "s")
        speaker.publishers[1].post(key, "s", line(2))
        await fakes.until(lambda: viewer.reader.lines(key) == ["line 1", "line 2"])


async def test_a_session_does_not_wait_for_a_home_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its name meanwhile, and its viewers go on. Of two sessions that had a name so, the first one keeps it."""
    monkeypatch.setattr(fleet_publishing, "GRANT_AFTER_S", 0.1)
    async with fleet_of(*(Gateway(name) for name in "abc")) as fleet:
        speaker, rival, gone = fleet.gateways
        key = fleet.key_at(gone)
        assert await speaker.publisher.claim(key, "s")
        rival.publisher.follow(key)
        speaker.publisher.post(key, "s", line(1))
        await fakes.until(lambda: rival.reader.lines(key) == ["line 1"])
        gone.names.close()
        # The session continues at the other gateway.
        speaker.publisher.unpublish(key, "s", moves=True)
        assert await rival.publisher.claim(key, "s")
        assert await rival.publisher.claim(key, "t") is False
        rival.publisher.post(key, "s", line(2))
        await fakes.until(lambda: rival.reader.lines(key) == ["line 1", "line 2"])
        # Another one takes the name where nobody knows of it.
        assert await speaker.publisher.claim(key, "u")
        fleet.lose(gone)

        def holders() -> int:
            known = [one.names.names[key] for one in (speaker, rival) if key in one.names.names]
            return sum(name.holder is not None for name in known)

        await fakes.until(lambda: holders() == 1)


async def test_claims_leave_nothing_behind_while_the_home_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_publishing, "GRANT_AFTER_S", 0.1)
    async with fleet_of(Gateway("a", processes=2), Gateway("b")) as fleet:
        speaker, gone = fleet.gateways
        key = fleet.key_at(gone)
        gone.names.close()
        assert await speaker.publisher.claim(key, "s")
        # Of other sessions, of the same one, and of a process that ends before it has an answer.
        others = [speaker.publisher.claim(key, f"other{n}") for n in range(1000)]
        assert set(await asyncio.gather(*others)) == {False}
        assert set(await asyncio.gather(*(speaker.publisher.claim(key, "s") for _ in range(10)))) == {True}
        waiting = [asyncio.create_task(speaker.publishers[1].claim(key, f"ended{n}")) for n in range(10)]
        name = speaker.names.names[key]
        await fakes.until(lambda: len(name.pending_claims) == len(waiting))
        speaker.names.remove(1)
        await fakes.until(lambda: not name.pending_claims)
        for claim in waiting:
            claim.cancel()
        # Tables that move the name to this gateway and back tell it again.
        for _ in range(10):
            speaker.names.update_gateways([speaker.entry])
            speaker.names.update_gateways([speaker.entry, gone.entry])
        assert list(speaker.names._claims) == [name.repeated_claim]


async def test_many_names_that_move_leave_turns_to_the_rest_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_publishing, "NAMES_PER_BATCH", 2)
    async with fleet_of(Gateway("a"), Gateway("b")) as fleet:
        speaker, home = fleet.gateways
        keys = [("owner", f"name{n}") for n in range(40)]
        for key in keys:
            assert await speaker.publisher.claim(key, f"s{key}")
            speaker.publisher.post(key, f"s{key}", line(1))
        told: list[Key] = []
        tell_again = speaker.names._repeat_claims

        def tell(key: Key, name: fleet_publishing._Name) -> None:
            told.append(key)
            tell_again(key, name)

        monkeypatch.setattr(speaker.names, "_repeat_claims", tell)
        moving = [key for key in keys if home_of(key, ["a", "b"]) == "b"]
        speaker.names.update_gateways([speaker.entry])
        assert len(told) <= 2 < len(moving)
        await fakes.until(lambda: len(told) == len(moving))
        # Another table before all names were told of this one.
        speaker.names.update_gateways([speaker.entry, home.entry])
        speaker.names.update_gateways([speaker.entry])
        fleet.put()
        for key in keys:
            home.publisher.follow(key)
            await fakes.until(lambda: home.reader.lines(key) == ["line 1"])  # noqa: B023
        assert all(speaker.names.names[key].holder is not None for key in keys)
        # Nothing is opened again after the end.
        speaker.names.update_gateways([speaker.entry])
        speaker.names.close()
        count = len(told)
        for _ in range(len(keys)):
            await asyncio.sleep(0)
        assert len(told) == count


async def test_a_gateway_that_does_not_read_is_dropped_and_nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_of(Gateway("a"), Gateway("b")) as fleet:
        home, viewer = fleet.gateways
        key = fleet.key_at(home)
        assert await home.publisher.claim(key, "s")
        viewer.publisher.follow(key)
        with zmq.Context.instance().socket(zmq.DEALER) as stuck:
            stuck.rcvhwm, stuck.linger, stuck.rcvbuf = 1, 0, 4096
            LinkKeys.between_gateways(SECRET).secure_caller(stuck)
            stuck.connect(home.entry.address)
            stuck.send(fleet_publishing.encoder.encode(viewer.names.hello("a")))
            stuck.send(fleet_publishing.encoder.encode(Follow(*key)))
            await fakes.until(lambda: len(home.names.coordinator.channels[key].followers) == 2)
            posted = 0
            while len(home.names.coordinator.channels[key].followers) == 2:
                assert posted < 100_000
                home.publisher.post(key, "s", Finished(Line(f"i{posted}", "x" * 3000)))
                posted += 1
                if posted % 100 == 0:
                    await asyncio.sleep(0)
            home.publisher.post(key, "s", line(1))
            await fakes.until(lambda: viewer.reader.lines(key)[-1:] == ["line 1"])
            # The viewer stays; it may have got some of the lines together.
            assert len(home.names.coordinator.channels[key].followers) == 1


async def test_links_are_valid_at_all_gateways_and_revoked_at_all_also_at_one_that_comes_later() -> None:
    async with fleet_of(Gateway("a"), Gateway("b")) as fleet:
        made_at, other = fleet.gateways

        def links(gateway: Gateway) -> ViewerLinks:
            signer = Signer(gateway.names.link_secret)
            return ViewerLinks(signer, gateway.publisher.revocations, lambda owner: True)

        revoked, link = links(made_at).make("owner", "talk", 60)
        kept, _ = links(made_at).make("owner", "talk", 60)
        await fakes.until(lambda: links(other).read(revoked, "talk") is not None)
        revocation = links(other).revocation("owner", "talk", link.id)
        assert revocation is not None
        other.publisher.revoke(revocation)
        late = Gateway("c")
        fleet.gateways.append(late)
        fleet.put()
        for gateway in fleet.gateways:
            await fakes.until(lambda: links(gateway).read(kept, "talk") is not None)  # noqa: B023
            await fakes.until(lambda: links(gateway).read(revoked, "talk") is None)  # noqa: B023
        # When all of them have gone, nobody knows what was revoked: links from before are not valid any more.
        alone = Gateway("a", started=time.time() + 1)
        assert links(alone).read(kept, "talk") is None
        late.names.close()


async def test_a_stranger_gets_no_answer() -> None:
    async with fleet_of(Gateway("a"), Gateway("b", b"another secret of sixteen bytes")) as fleet:
        home, stranger = fleet.gateways
        key = fleet.key_at(home)
        assert await home.publisher.claim(key, "s")
        stranger.publisher.follow(key)
        heard: list[object] = []
        for keys in (LinkKeys.between_gateways(b"a third secret of sixteen bytes"), LinkKeys.from_secret(SECRET), None):
            refused = asyncio.Event()
            caller = GatewaySocket(
                zmq.Context.instance(), home.entry.address, heard.append, lambda: None, refused.set, keys
            )
            caller.send([b"hello"])
            if keys is not None:
                await asyncio.wait_for(refused.wait(), 60)
            caller.close()
        assert not heard and not home.names._callers and not stranger.reader.snapshots


async def test_messages_that_no_gateway_sends_are_dropped() -> None:
    async with fleet_of(Gateway("a"), Gateway("b")) as fleet:
        home, speaker = fleet.gateways
        heard: list[object] = []
        keys = LinkKeys.between_gateways(SECRET)
        caller = GatewaySocket(
            zmq.Context.instance(), home.entry.address, heard.append, lambda: None, lambda: None, keys
        )
        for garbage in (b"", b"\xff" * 1000, b"\x81\xa4type\xa4nope", b"\x91" * 100_000):
            caller.send([garbage])
        # A name of another gateway: two that are reached at one address would take each other's names.
        caller.send([fleet_publishing.encoder.encode(speaker.names.hello("b"))])
        await fakes.until(lambda: bool(heard))
        assert fleet_publishing.decoder.decode(heard[0][0]) == fleet_publishing.Goodbye()  # type: ignore[index]
        key = fleet.key_at(home)
        assert await speaker.publisher.claim(key, "s")
        caller.close()


async def test_links_are_opened_when_they_are_needed_and_closed_when_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """At rest a fleet has no links between gateways; a name costs one for each gateway that has to do with it."""
    monkeypatch.setattr(fleet_publishing, "IDLE_S", 0.0)
    async with fleet_of(*(Gateway(f"g{n}") for n in range(6))) as fleet:

        def links() -> int:
            for gateway in fleet.gateways:
                gateway.names._update_links()
            return sum(len(gateway.names.links) for gateway in fleet.gateways)

        await fakes.until(lambda: links() == 0)
        home, speaker, viewer = fleet.gateways[:3]
        key = fleet.key_at(home)
        viewer.publisher.follow(key)
        assert await speaker.publisher.claim(key, "s")
        await fakes.until(lambda: links() == 2)
        viewer.publisher.unfollow(key)
        speaker.publisher.unpublish(key, "s")
        await fakes.until(lambda: links() == 0)


def test_names_are_spread_and_few_move() -> None:
    keys = [("owner", f"name{n}") for n in range(2000)]
    gateways = [f"g{n}" for n in range(50)]
    homes = [home_of(key, gateways) for key in keys]
    assert max(homes.count(gateway) for gateway in gateways) < 3 * len(keys) / len(gateways)
    moved = [key for key, home in zip(keys, homes, strict=True) if home_of(key, gateways[1:]) != home]
    assert len(moved) == homes.count("g0")
