"""Message numbers, addresses and byte windows of the link between gateway and engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import WireError
from engine.boundary.sockets import Arrival, CannotListen, EngineSocket, GatewaySocket, Numbering, check_address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "engine",
        "http://host:1",
        "tcp://host",
        "tcp://host:port",
        "tcp://host:99999",
        "tcp://host:５",
        "ipc://",
        "inproc://",
    ],
)
def test_an_unusable_address_says_what_an_address_looks_like(address: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        check_address(address)


@pytest.mark.parametrize("address", ["ipc:///run/engine", "ipc://relative", "tcp://127.0.0.1:5000", "inproc://a"])
def test_a_usable_address_is_taken_as_it_is(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["ipc:///nowhere/engine", "tcp://192.0.2.1:5555"])
def test_an_address_that_is_not_ours_is_said(address: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on '{address}': .*; choose another address"):
        EngineSocket(zmq.Context.instance(), address)


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x93\x01"], [b"hello"], [b"\x81\xa4type\xa5other"]])
def test_bytes_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    for to_engine in (True, False):
        with pytest.raises(WireError):
            codec.decode(frames, to_engine)


def test_a_message_for_the_other_side_is_refused() -> None:
    update = codec.encode(codec.Update(1, 0, [], [], codec.Status()))
    with pytest.raises(WireError):
        codec.decode(update, to_engine=True)


@pytest.mark.parametrize(("start", "size"), [(0, 20), (16, 4), (-4, 4), (4, -4), (4, 0), (2**60, 4)])
def test_an_item_that_points_to_no_payload_is_refused(start: int, size: int) -> None:
    data = codec.PayloadPlace(b"k", start, size, None)
    for frames in ([b"header"], [b"header", bytes(16)]):
        with pytest.raises(WireError, match="in a message that has"):
            codec.payload_of(data, frames)


@pytest.mark.parametrize(("rows", "size"), [(None, 7), (3, 16), (0, 16)])
def test_a_payload_of_an_odd_size_is_refused(rows: int | None, size: int) -> None:
    data = codec.PayloadPlace(b"k", 0, size, rows)
    with pytest.raises(WireError, match="float32"):
        codec.payload_of(data, [b"header", bytes(size)])


OUTPUTS = [
    messages.Text("s", "hi", [messages.Word("hi", 1, 2, [(b" h", -0.5), (b"\xc3", -1.0)])], [5, 0], 7),
    messages.Speech("s", 512, 512, [0.25, 1.0]),
    messages.Opened("s"),
    messages.Flushed("s", 3, 9),
    messages.Closed("s", 9),
    messages.Failed("s", "BadItem", "why"),
    messages.Refused("s", "UnknownStream", "why"),
    messages.Dead("why"),
]


def test_every_output_survives_the_wire() -> None:
    update = codec.decode(codec.encode(codec.Update(1, 2, OUTPUTS, [codec.Progress("s", 3)], codec.Status())), False)
    assert update.outputs == OUTPUTS
    assert update.progress[0].computed == 3


def test_a_payload_that_is_kept_does_not_keep_the_others_of_its_message() -> None:
    payloads = [np.arange(6, dtype=np.float32), np.arange(100, dtype=np.float32)]
    frames = codec.encode(codec.Bye(), [payload.data for payload in payloads])
    assert len(frames) == 2, "a frame costs the sockets more than its bytes"
    first = codec.payload_of(codec.PayloadPlace(b"k" * 16, 0, 24, None), frames)
    second = codec.payload_of(codec.PayloadPlace(b"k" * 16, 24, 400, None), frames)
    assert first is not None and first.tolist() == payloads[0].tolist() and first.base is None
    assert second is not None and second.tolist() == payloads[1].tolist()


def test_features_keep_their_shape() -> None:
    features = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = codec.PayloadPlace(b"k", 0, features.nbytes, codec.rows_of(features))
    arrived = codec.payload_of(data, codec.encode(codec.Bye(), [features.data]))
    assert arrived is not None and arrived.shape == (2, 3)


class Side:
    """One end of a conversation that carries integers, as link and host use the numbering."""

    def __init__(self) -> None:
        self.numbering = Numbering(window_bytes=64)
        self.said: list[int] = []
        self.heard: list[int] = []

    def say(self, value: int) -> tuple[int, int] | None:
        if not self.numbering.may_send:
            return None
        self.said.append(value)
        self.numbering.keep([b"%08d" % value])
        return self.numbering.sent, value


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_loss_is_noticed_and_made_good_in_order(events: list[tuple[bool, bool, bool]]) -> None:
    """Each event: does the sender speak, is that lost, does the receiver report back (which may be lost as well)."""
    sender, receiver = Side(), Side()

    def deliver(number: int, value: int) -> None:
        if receiver.numbering.classify(number) is Arrival.NEXT:
            receiver.numbering.accept(number)
            receiver.heard.append(value)

    def report() -> None:
        sender.numbering.acknowledged(receiver.numbering.accepted)
        if sender.numbering.sent > receiver.numbering.accepted:
            first = receiver.numbering.accepted + 1
            for number, frames in enumerate(sender.numbering.kept_since(first), first):
                deliver(number, int(frames[0]))

    for value, (speaks, lost, reports) in enumerate(events):
        message = sender.say(value) if speaks else None
        if message is not None and not lost:
            deliver(*message)
        if reports:
            report()
        assert receiver.heard == sender.said[: len(receiver.heard)]
    report()
    report()
    assert receiver.heard == sender.said
    assert sender.numbering.unacknowledged_bytes == 0


def test_what_waits_for_an_acknowledgement_is_bounded() -> None:
    side = Side()
    said = [side.say(value) for value in range(100)]
    assert sum(message is not None for message in said) == 8
    assert side.numbering.acknowledged(3) == [1, 2, 3]
    assert side.numbering.may_send


def test_repeated_and_early_messages_are_told_apart() -> None:
    numbering = Numbering()
    numbering.accept(1)
    assert [numbering.classify(number) for number in (1, 2, 3)] == [
        Arrival.REPEATED,
        Arrival.NEXT,
        Arrival.AFTER_A_GAP,
    ]
    assert numbering.classify(3, waiting=1) is Arrival.NEXT


def test_an_address_that_is_taken_is_a_clear_error() -> None:
    first = EngineSocket(zmq.Context.instance(), "tcp://127.0.0.1:0")
    try:
        with pytest.raises(ValueError, match="choose another address"):
            EngineSocket(zmq.Context.instance(), first.bound_to)
    finally:
        first.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp", "inproc"])
async def test_messages_cross_both_ways_over_every_kind_of_address(kind: str, tmp_path: Path) -> None:
    address = {"ipc": f"ipc://{tmp_path}/e", "tcp": "tcp://127.0.0.1:0", "inproc": "inproc://both-ways"}[kind]
    engine = EngineSocket(zmq.Context.instance(), address)
    arrived: asyncio.Queue[list[bytes]] = asyncio.Queue()
    gateway = GatewaySocket(
        zmq.Context.instance(),
        engine.bound_to,
        lambda frames: arrived.put_nowait([bytes(frame) for frame in frames]),
        lambda: None,
        lambda: None,
    )
    try:
        gateway.send([b"header", np.ones(3, np.float32).data])
        assert await asyncio.to_thread(engine.wait, 5)
        message = engine.receive()
        assert message is not None
        name, frames = message
        assert np.frombuffer(frames[1], np.float32).tolist() == [1, 1, 1]
        assert engine.receive() is None
        engine.send(name, [b"answer"])
        assert await asyncio.wait_for(arrived.get(), 5) == [b"answer"]
    finally:
        gateway.close()
        gateway.close()
        engine.close()


async def test_a_broken_connection_is_noticed_at_once(tmp_path: Path) -> None:
    engine = EngineSocket(zmq.Context.instance(), f"ipc://{tmp_path}/e")
    broken = asyncio.Event()
    gateway = GatewaySocket(zmq.Context.instance(), f"ipc://{tmp_path}/e", lambda frames: None, broken.set, broken.set)
    try:
        gateway.send([b"hello"])
        assert await asyncio.to_thread(engine.wait, 5)
        engine.close()
        await asyncio.wait_for(broken.wait(), 5)
    finally:
        gateway.close()
