"""Processes of a fleet that are stopped and continue later, in any order of events: no client loses its session.

The fleet is simulated (`simulated_fleet.py`), so that an order that was found is found again; `test_fleet_processes.py`
does the same to real processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from engine import messages
from engine.server.handoff import HandoffTable
from engine.server.hosted_streams import Peer
from tests.realtime.workers import simulated_fleet
from tests.realtime.workers.engines import talk
from tests.realtime.workers.simulated_fleet import Client, SimulatedFleet

AUDIO = talk(8, 1)
# After the last process has gone on, everything is settled by then: claims and waiting handoffs.
SETTLED_S = 12.0


@dataclass(frozen=True)
class Stop:
    """So long after the event before, a process stands still for so long: a gateway, the one at which the client is
    now (home), or an engine."""

    after_s: float
    part: str
    number: int
    seconds: float


@dataclass(frozen=True)
class Leave:
    """So long after the event before, the client closes its connection and goes to this gateway."""

    after_s: float
    number: int


Story = list[Stop | Leave]


@contextmanager
def running(chance: Random) -> Iterator[SimulatedFleet]:
    with pytest.MonkeyPatch.context() as patch:
        fleet = SimulatedFleet(chance, patch, gateways=3)
        try:
            fleet.run(1.0)
            yield fleet
        finally:
            fleet.end()


def tell(story: Story, seed: int, patience_s: float) -> tuple[Client, list[str]]:
    """The client after all of it, and what is left of its session that should not be."""
    with running(Random(seed)) as fleet:
        client = Client(fleet, AUDIO, patience_s)
        fleet.until(lambda: bool(client.events), 30)
        for event in story:
            fleet.run(event.after_s)
            if isinstance(event, Leave):
                client.leave(event.number)
            elif event.part == "home":
                client.socket.gateway.stop(event.seconds)
            elif event.part == "gateway":
                fleet.gateways[event.number].stop(event.seconds)
            else:
                fleet.engines[event.number].stop(event.seconds)
        fleet.until(lambda: client.is_done, 200)
        fleet.until(lambda: all(part.is_awake for part in (*fleet.gateways, *fleet.engines)), 60)
        fleet.run(SETTLED_S)
        counts = {
            "sessions": sum(len(gateway.sessions) for gateway in fleet.gateways),
            "wills": sum(len(engine.host.handoffs) for engine in fleet.engines),
            "streams": sum(len(engine.host.hosted.streams) for engine in fleet.engines),
        }
        return client, [f"{count} {name}" for name, count in counts.items() if count > 1]


@cache
def calm_text() -> list[str]:
    client, left = tell([], 0, 30.0)
    assert not client.wrongs and not left and len(client.text) == 4
    return client.text


PAUSES = st.sampled_from((0.0, 0.1, 0.3, 1.0, 2.5))
STOPS = st.sampled_from((0.5, 0.9, 1.2, 2.0, 3.0, 5.0, 10.0))
LEAVES = st.builds(Leave, PAUSES, st.integers(0, 2))
GATEWAYS = st.builds(Stop, PAUSES, st.sampled_from(("gateway", "home")), st.integers(0, 2), STOPS)
STOPS_OF_ENGINES = st.builds(Stop, PAUSES, st.just("engine"), st.integers(0, 1), STOPS)
SEEDS = st.integers(0, 1 << 16)
# Without making failures smaller: a story is short already, and telling one takes a second.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
PATIENCE = st.sampled_from((1.5, 3.0, 5.0))


@settings(max_examples=25, deadline=None, phases=PHASES, derandomize=True)
@given(st.lists(GATEWAYS | LEAVES, max_size=6), SEEDS, PATIENCE)
# The first gateway stands still, its client leaves it for another one, and it goes on.
@example([Stop(2.0, "gateway", 0, 10.0)], 1, 5.0)
@example([Stop(2.0, "gateway", 0, 3.0), Leave(0.3, 0), Leave(1.0, 1)], 1, 5.0)
# The session moves to another engine while a gateway asks one after the other for it.
@example([Leave(0.1, 2), Stop(0.3, "engine", 0, 1.2), Leave(0.3, 2)], 3060, 5.0)
# The session leaves an engine that stands still, and then its gateway, before that engine is back.
@example(
    [
        Stop(2.5, "engine", 1, 2.0),
        Stop(1.0, "engine", 1, 1.2),
        Stop(1.0, "engine", 1, 3.0),
        Leave(2.5, 0),
        Stop(0.3, "gateway", 2, 2.0),
        Stop(1.0, "engine", 1, 1.2),
    ],
    13016,
    1.5,
)
def test_gateways_that_stood_still_take_no_session_back(story: Story, seed: int, patience_s: float) -> None:
    client, left = tell(story, seed, patience_s)
    assert not client.wrongs
    assert client.text == calm_text()
    assert not left


@pytest.mark.parametrize("seconds", [2.5, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_gateway_that_stood_still_tells_nothing_of_a_session_that_has_gone_on(seconds: float, seed: int) -> None:
    """Words of the engine and messages of the client wait for it, and the connection that the client left is open."""
    with running(Random(seed)) as fleet:
        client = Client(fleet, AUDIO)
        fleet.until(lambda: bool(client.text), 30)
        left, gateway = client.socket, client.socket.gateway
        gateway.stop(seconds)
        fleet.run(0.5)
        left.to_client.clear()
        client.leave(1, closes=False)
        fleet.until(lambda: gateway.is_awake, 30)
        fleet.until(lambda: any(message["type"] == "websocket.close" for message in left.to_client), 30)
        fleet.until(lambda: client.is_done, 60)
        assert [(message["type"], message.get("code")) for message in left.to_client] == [("websocket.close", 4409)]
    assert not client.wrongs
    assert client.text == calm_text()


def test_a_request_that_waited_long_in_the_socket_of_a_stopped_gateway_takes_nothing() -> None:
    """Its client may have given it up, and a proxy not have said so. It is told to ask again, and gets it then."""
    with running(Random(0)) as fleet:
        client = Client(fleet, AUDIO, patience_s=60.0)
        fleet.until(lambda: bool(client.text), 30)
        fleet.gateways[1].stop(5.0)
        client.leave(1)
        fleet.until(lambda: fleet.gateways[1].is_awake, 30)
        fleet.until(lambda: client.status == 503, 5)
        fleet.until(lambda: client.is_done, 60)
    assert not client.wrongs
    assert client.text == calm_text()


@pytest.mark.parametrize("at", [0, 1])
def test_a_request_whose_client_has_left_takes_nothing(at: int) -> None:
    """Neither from this gateway nor from another: the client is on another connection by now."""
    with running(Random(0)) as fleet:
        client = Client(fleet, AUDIO)
        fleet.until(lambda: bool(client.text), 30)
        # Closed before the gateway has read the request.
        fleet.gateways[at].open(f"resume={client.token}&after={max(client.events)}").is_closed = True
        fleet.until(lambda: client.is_done, 60)
        assert [len(gateway.sessions) for gateway in fleet.gateways] == [1, 0, 0]
    assert not client.wrongs
    assert client.text == calm_text()


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_client_that_comes_back_to_its_gateway_keeps_its_session(rounds: int, seed: int) -> None:
    """It has asked at another one before, and that is at work on it."""
    with running(Random(seed)) as fleet:
        client = Client(fleet, AUDIO)
        fleet.until(lambda: bool(client.text), 30)
        fleet.gateways[1].open(f"resume={client.token}&after={max(client.events)}")
        for _ in range(rounds):
            fleet.round()
        client.leave(0)
        fleet.until(lambda: client.is_done, 60)
    assert not client.wrongs
    assert client.text == calm_text()


def test_nothing_is_told_of_a_session_that_was_let_go() -> None:
    with running(Random(0)) as fleet:
        client = Client(fleet, AUDIO)
        fleet.until(lambda: bool(client.text), 30)
        gateway = client.socket.gateway
        (entry,) = gateway.sessions.entries.values()
        # As if the words were under way when it was let go.
        entry.is_released, told = True, len(client.events)
        fleet.run(3.0)
        assert len(client.events) == told
        entry.is_released = False
        gateway.stop(2.5)
        fleet.run(0.5)
        client.leave(1)
        fleet.until(lambda: len(gateway.sessions) == 0, 30)
        assert entry.is_released


@pytest.mark.parametrize("seconds", [3.0, 20.0])
def test_a_gateway_that_stood_still_has_nothing_left_of_a_session_that_is_over(seconds: float) -> None:
    """Its client has continued elsewhere and has all events. The session has no owner, and no gateway asks for it."""
    with running(Random(0)) as fleet:
        client = Client(fleet, AUDIO, patience_s=1.0)
        fleet.until(lambda: bool(client.text), 30)
        former = client.socket.gateway
        former.stop(1000.0)
        client.leave(1)
        fleet.until(lambda: client.is_done, 60)
        client.socket.to_server.append({"type": "websocket.disconnect", "code": 1000})
        client.socket.is_closed = True
        fleet.until(lambda: not any(len(gateway.sessions) for gateway in fleet.gateways[1:]), 30)
        fleet.run(seconds)
        former.stop(0.0)
        fleet.run(3.0)
        assert [len(gateway.sessions) for gateway in fleet.gateways] == [0, 0, 0]
        assert not any(len(engine.host.handoffs) + len(engine.host.hosted.streams) for engine in fleet.engines)
    assert not client.wrongs
    assert client.text == calm_text()


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_stood_still_has_nothing_left_of_a_session_that_is_over(seed: int) -> None:
    """Its gateway has gone on at the other engine, and has forgotten the session when this one is back."""
    with running(Random(seed)) as fleet:
        client = Client(fleet, AUDIO, patience_s=60.0)
        fleet.until(lambda: bool(client.text), 30)
        (home,) = [engine for engine in fleet.engines if engine.host.hosted.streams]
        home.stop(1000.0)
        fleet.until(lambda: client.is_done, 60)
        client.socket.to_server.append({"type": "websocket.disconnect", "code": 1000})
        client.socket.is_closed = True
        fleet.until(lambda: not len(fleet.gateways[0].sessions), 30)
        home.stop(0.0)
        fleet.run(15.0)
        assert not any(len(engine.host.handoffs) + len(engine.host.hosted.streams) for engine in fleet.engines)
    assert not client.wrongs
    assert client.text == calm_text()


@pytest.mark.parametrize("seed", range(4))
def test_a_gateway_that_stood_still_looks_for_no_session_before_it_knows_which_are_its_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to resume waits in its socket."""
    take, asked = HandoffTable.on_command, list[type]()

    def note(handoffs: HandoffTable, peer: Peer, command: messages.SessionCommand) -> None:
        asked.extend({type(command)} & {messages.Ask, messages.Claim, messages.Adopt})
        take(handoffs, peer, command)

    with running(Random(seed)) as fleet:
        client = Client(fleet, AUDIO, patience_s=60.0)
        fleet.until(lambda: bool(client.text), 30)
        monkeypatch.setattr(HandoffTable, "on_command", note)
        fleet.gateways[1].stop(2.5)
        client.leave(1)
        fleet.until(lambda: client.is_done, 60)
        assert asked[:2] == [messages.Claim, messages.Claim] and messages.Adopt in asked
    assert not client.wrongs
    assert client.text == calm_text()


def test_a_gateway_that_stood_still_ends_no_session_for_the_time_in_which_it_could_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its client has sent meanwhile waits in the socket, which is read as soon as the owners are known."""
    limits = replace(simulated_fleet.CONFIG.limits, idle_s=2.0)
    monkeypatch.setattr(simulated_fleet, "CONFIG", replace(simulated_fleet.CONFIG, limits=limits))
    with running(Random(0)) as fleet:
        client = Client(fleet, AUDIO, patience_s=60.0)
        fleet.until(lambda: bool(client.text), 30)
        socket = client.socket
        socket.gateway.stop(3.0)
        fleet.until(lambda: client.is_done, 60)
        assert client.socket is socket
    assert not client.wrongs
    assert client.text == calm_text()


def test_a_gateway_that_stood_still_gives_no_session_up_before_it_knows_that_it_is_its_own() -> None:
    """That another one wants it may have been said over a connection that is lost, and so the last word would be."""
    with running(Random(0)) as fleet:
        client = Client(fleet, AUDIO)
        fleet.until(lambda: bool(client.text), 30)
        client.is_held, sessions = True, fleet.gateways[0].sessions
        (owned,) = sessions._owned_handoffs()
        fleet.clock.now += 2.0
        fleet.gateways[0].loop.call_soon(sessions._on_claim, owned.key, owned.owner_number)
        fleet.gateways[0].loop.turn()
        assert len(sessions) == 1
        client.is_held = False
        fleet.until(lambda: client.is_done, 60)
    assert not client.wrongs
    assert client.text == calm_text()


@settings(max_examples=8, deadline=None, phases=PHASES, derandomize=True)
@given(st.lists(STOPS_OF_ENGINES, min_size=1, max_size=6), SEEDS)
def test_engines_that_stood_still_change_no_word(story: Story, seed: int) -> None:
    client, left = tell(story, seed, 60.0)
    assert not client.wrongs
    assert client.text == calm_text()
    assert not left


@settings(max_examples=40, deadline=None, phases=PHASES, derandomize=True)
@given(st.lists(GATEWAYS | LEAVES | STOPS_OF_ENGINES, max_size=8), SEEDS, PATIENCE)
# The session moves to another engine and is renewed there, while the one before gives it to another gateway.
@example(
    [
        Stop(0.1, "gateway", 0, 3.0),
        Stop(0.1, "engine", 0, 2.0),
        Leave(0.0, 0),
        Stop(0.3, "engine", 1, 0.5),
        Leave(1.0, 1),
    ],
    62552,
    3.0,
)
# A gateway adopts the session, stands still, and goes on with it at the other engine.
@example(
    [
        Stop(1.0, "engine", 1, 3.0),
        Stop(0.3, "engine", 0, 1.2),
        Stop(2.5, "engine", 0, 1.2),
        Stop(2.5, "gateway", 2, 5.0),
        Leave(0.3, 2),
        Leave(1.0, 1),
    ],
    3098,
    1.5,
)
@example(
    [
        Stop(0.1, "engine", 0, 0.5),
        Leave(0.1, 2),
        Stop(1.0, "engine", 1, 3.0),
        Stop(0.0, "home", 2, 3.0),
        Stop(2.5, "home", 2, 1.2),
        Stop(2.5, "engine", 1, 0.5),
    ],
    1420,
    5.0,
)
# The session is rebuilt at another engine in a silence, and adopted from there before more audio has come.
@example(
    [
        Leave(2.5, 1),
        Leave(0.0, 0),
        Stop(2.5, "home", 2, 5.0),
        Stop(2.5, "home", 0, 10.0),
        Leave(0.3, 1),
        Leave(1.0, 0),
        Stop(2.5, "engine", 1, 10.0),
        Stop(1.0, "home", 2, 1.2),
    ],
    54177,
    5.0,
)
# A gateway that stands still is given the session, and finds that and that it was taken away at once.
@example([Leave(2.5, 1), Stop(0.3, "home", 1, 3.0), Leave(1.0, 2), Leave(0.0, 0)], 34577, 3.0)
# The owner comes back to an engine that stood still, before that has noticed how long it did.
@example(
    [
        Stop(0.0, "gateway", 0, 5.0),
        Stop(0.3, "gateway", 0, 1.2),
        Stop(2.5, "engine", 0, 0.9),
        Stop(0.1, "home", 2, 3.0),
        Leave(2.5, 1),
        Stop(0.1, "engine", 1, 5.0),
        Stop(0.1, "gateway", 2, 0.9),
        Leave(0.3, 1),
    ],
    2062,
    1.5,
)
# The session moves while it is renewed, and another gateway asks for it before the new engine has it.
@example(
    [
        Stop(0.0, "engine", 1, 2.0),
        Leave(0.1, 1),
        Leave(0.3, 0),
        Stop(0.0, "engine", 0, 1.2),
        Leave(0.1, 1),
        Stop(2.5, "home", 2, 5.0),
        Leave(0.1, 1),
    ],
    8379,
    1.5,
)
# A gateway gives the session up while its stream is being opened.
@example(
    [
        Stop(0.0, "gateway", 0, 0.5),
        Leave(0.1, 1),
        Leave(0.3, 0),
        Stop(0.3, "engine", 1, 0.9),
        Stop(0.1, "engine", 0, 3.0),
        Stop(1.0, "engine", 0, 1.2),
        Stop(0.3, "engine", 1, 0.9),
    ],
    27884,
    1.5,
)
def test_whatever_stood_still_no_word_differs(story: Story, seed: int, patience_s: float) -> None:
    """Both engines, or both holders of a session, may be away at once, and then it is lost: its client is told so."""
    client, left = tell(story, seed, patience_s)
    assert all(wrong.startswith(("answered with 410", "closed with 1011")) for wrong in client.wrongs)
    assert client.wrongs or client.text == calm_text()
    assert not left
