"""How many commands an engine takes in before a step, from which gateways, and their cost."""

from __future__ import annotations

from typing import Any

import pytest

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Batch, PayloadPlace
from engine.server.host import COMMANDS_AN_ITEM, MIN_ITEMS
from engine.server.loop import EngineLoop
from tests.engine import fakes
from tests.engine.server.test_host import SAMPLES, Host, audio, calm, command, feed

__all__ = ["calm"]


def test_an_engine_that_is_late_takes_in_no_more_than_it_computes(calm: str) -> None:
    """A step has one frame of each stream. If all that came during a long step came in before the next, there would be
    less time for steps the later an engine is."""
    host = Host()
    for name in (b"g", b"h"):
        host.greet(name)
        host.send(name, command(messages.Open("good")))
    for position in range(20):
        for name in (b"g", b"h"):
            idle = [command(messages.Adopt("", "nobody's", 1)) for _ in range(COMMANDS_AN_ITEM * MIN_ITEMS // 4)]
            host.post(name, feed("good", position), *idle, audio=(audio(position),))
    host.host.tick()
    taken = [peer.numbering.accepted - 1 for peer in host.host.peers.values()]
    assert taken == [2, 2], "two batches of each were more than enough"
    assert host.host.load.status.lag_ms == 0.0
    host.now += 0.5
    host.host.tick()
    assert host.host.load.status.lag_ms >= 500.0, "an engine is as late as what it has not taken in yet"
    turns = 2
    while any(peer.inbox for peer in host.host.peers.values()):
        host.host.tick()
        turns += 1
    assert turns == 10
    for name in (b"g", b"h"):
        host.send(name, command(messages.Finish("good")))
        assert host.text(name, "good") == calm


def test_an_engine_of_a_windowed_model_takes_in_a_stride_of_every_stream() -> None:
    """Its steps are few and long. With one position of each stream before every step it would fall behind for good,
    although its steps had room."""
    streams, stride = 64, fakes.WINDOWED.stride_positions
    host = Host(fakes.build(windowed=True, max_streams=streams, detects=True))
    host.greet(b"g")
    host.send(b"g", *(command(messages.Open(f"s{number}")) for number in range(streams)))
    for _ in range(2 * stride):
        host.post(b"g", *(command(messages.Adopt("", "nobody's", 1)) for _ in range(COMMANDS_AN_ITEM * streams)))
    host.host.tick()
    assert 2 * stride * streams > MIN_ITEMS and not host.host.peers[b"g"].inbox


def test_an_engine_takes_in_as_much_of_a_replay_as_it_rebuilds() -> None:
    """A rebuilt stream computes many positions in a step, so the bound for live audio would leave the device idle."""
    loop = fakes.build(max_streams=8)
    host = Host(loop)
    host.greet(b"g")
    host.send(b"g", *(command(messages.Open(f"s{number}", forced_tokens=[1] * 4000)) for number in range(8)))
    room = loop.replay_room
    assert room > MIN_ITEMS
    for start in range(0, 3 * room, 64):
        feeds = (feed("s0", position, position - start) for position in range(start, start + 64))
        host.post(b"g", *feeds, audio=tuple(audio(position) for position in range(start, start + 64)))
    before = host.host.peers[b"g"].numbering.accepted
    host.host.tick()
    taken = 64 * (host.host.peers[b"g"].numbering.accepted - before)
    assert room + MIN_ITEMS <= taken < room + MIN_ITEMS + 64, "beside the bound for other audio"


def test_short_appends_do_not_keep_an_engine_late() -> None:
    """A position of 20 ms appends comes with four saved handoffs. An engine that counted commands would take in one
    position before each step, and never catch up."""
    streams = 100
    host = Host(fakes.build(max_streams=streams, detects=True))
    host.greet(b"g")
    host.send(b"g", *(command(messages.Open(f"s{number}")) for number in range(streams)))
    for _ in range(6):
        others = [command(messages.Adopt("", "nobody's", 1)) for _ in range(5 * streams)]
        host.post(b"g", *others)
    before = host.host.peers[b"g"].numbering.accepted
    host.host.tick()
    assert host.host.peers[b"g"].numbering.accepted - before >= 2


def test_a_gateway_that_is_waited_for_keeps_no_room_from_the_others() -> None:
    """Its batch is not taken in, however large it is: data of it is missing."""
    host = Host()
    for name in (b"g", b"h"):
        host.greet(name)
        host.send(name, command(messages.Open("a")))
    missing = Batch(
        2, 0, [PayloadPlace(b"k" * 16, None, 4 * SAMPLES, None)], [feed("a", 0)] * (COMMANDS_AN_ITEM * MIN_ITEMS + 1)
    )
    host.line.arriving.append((b"g", codec.encode(missing)))
    host.host.tick()
    for position in range(5):
        host.post(b"h", feed("a", position), audio=(audio(position),))
    host.host.tick()
    assert {peer.gateway: len(peer.inbox) for peer in host.host.peers.values()} == {"g": 1, "h": 0}


def test_an_engine_that_many_streams_come_to_goes_on_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a stream may take long: those that are open wait for one of them, not for all."""
    host = Host()
    host.greet(b"g")
    check_open = host.loop.runner.check_open

    def check_slowly(message: messages.Open) -> None:
        host.now += 0.3
        check_open(message)

    monkeypatch.setattr(host.loop.runner, "check_open", check_slowly)
    for number in range(4):
        host.post(b"g", command(messages.Open(f"new {number}")))
    for opened in range(1, 5):
        host.host.tick()
        assert len(host.believed(b"g")) == opened


@pytest.mark.parametrize("flying", [False, True])
def test_time_for_messages_counts_as_load_unless_a_step_is_computed_meanwhile(
    flying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that computes while messages are read loses no time to them."""
    host = Host()
    host.greet(b"a")
    receive = host.line.receive

    def slow_receive() -> tuple[bytes, list[Any]] | None:
        host.now += 0.25
        return receive()

    monkeypatch.setattr(host.line, "receive", slow_receive)
    monkeypatch.setattr(EngineLoop, "has_launched_step", property(lambda loop: flying))
    for _ in range(8):
        host.tick()
    assert host.host.load.status.load == pytest.approx(0.0 if flying else 0.25 / 0.26, abs=0.02)
