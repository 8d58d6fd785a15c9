"""What ZeroMQ holds of a peer before it is authenticated: one frame of limited size, at a real engine socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boundary import sockets
from engine.boundary.codec import PayloadPlace, WireError, payload_of
from engine.boundary.sockets import FRAME_BYTES, EngineSocket, GatewaySocket, LinkKeys, join_pieces, pieces_of

MIB = 1024 * 1024
SECRET = b"a secret of this fleet that is long enough"
COMMAND, MESSAGE = 0x06, 0x02
READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"


@contextmanager
def engine_socket(keys: LinkKeys | None) -> Iterator[EngineSocket]:
    engine = EngineSocket(zmq.Context.instance(), "tcp://127.0.0.1:0", keys)
    try:
        yield engine
    finally:
        engine.close()


def stranger(engine: EngineSocket, mechanism: bytes) -> socket.socket:
    """A raw connection that has sent the greeting of ZMTP 3.0 and read the engine's."""
    peer = socket.create_connection(("127.0.0.1", urlsplit(engine.bound_to).port or 0), timeout=5)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        greeting += peer.recv(64 - len(greeting))
    return peer


def taken_of(peer: socket.socket, kind: int, size: int) -> int:
    """Announce a frame of `size` bytes and send all but its last byte; returns the bytes sent before the connection was
    closed, or all of them if it stays open."""
    sent = 0
    try:
        peer.sendall(bytes([kind]) + size.to_bytes(8, "big"))
        while sent < size - 1:
            sent += peer.send(bytes(min(64 * 1024, size - 1 - sent)))
        # Closing is the answer that is waited for; the engine may send its own handshake first.
        peer.settimeout(1)
        while peer.recv(4096):
            pass
    except TimeoutError:
        return size
    except OSError:
        pass
    return min(sent, size - 1)


@pytest.mark.parametrize(("keys", "mechanism"), [(LinkKeys.from_secret(SECRET), b"CURVE"), (None, b"NULL")])
async def test_a_stranger_that_announces_a_long_frame_is_disconnected_and_a_gateway_continues(
    keys: LinkKeys | None, mechanism: bytes
) -> None:
    with engine_socket(keys) as engine:
        gateway = GatewaySocket(
            zmq.Context.instance(), engine.bound_to, lambda frames: None, pytest.fail, pytest.fail, keys
        )
        try:
            for kind in (COMMAND, MESSAGE):
                with stranger(engine, mechanism) as peer:
                    taken = await asyncio.to_thread(taken_of, peer, kind, 32 * MIB)
                # The rest of what was sent lies in the buffers of the system.
                assert taken < 16 * MIB
            gateway.send([b"header", bytes(3 * FRAME_BYTES)])
            name, frames = await asyncio.to_thread(received, engine)
            assert [len(frame) for frame in frames] == [6, 3 * FRAME_BYTES]
        finally:
            gateway.close()


def test_a_stranger_that_says_it_is_a_gateway_may_not_send_a_long_frame_either() -> None:
    with engine_socket(None) as engine, stranger(engine, b"NULL") as peer:
        peer.sendall(b"\x04" + bytes([len(READY)]) + READY)
        assert taken_of(peer, MESSAGE, 32 * MIB) < 16 * MIB


def received(engine: EngineSocket) -> tuple[bytes, list[bytes]]:
    for _ in range(200):
        engine.wait(0.05)
        message = engine.receive()
        if message is not None:
            return message[0], whole(message[1])
    raise AssertionError("no message has arrived")


@pytest.mark.parametrize("kind", ["ipc", "tcp", "inproc", "curve"])
async def test_a_message_of_any_size_crosses_both_ways(kind: str, tmp_path: Path) -> None:
    address = {"ipc": f"ipc://{tmp_path}/e", "inproc": "inproc://any-size"}.get(kind, "tcp://127.0.0.1:0")
    keys = LinkKeys.from_secret(SECRET) if kind == "curve" else None
    engine = EngineSocket(zmq.Context.instance(), address, keys)
    arrived: asyncio.Queue[list[bytes]] = asyncio.Queue()
    gateway = GatewaySocket(
        zmq.Context.instance(),
        engine.bound_to,
        lambda frames: arrived.put_nowait(whole(frames)),
        pytest.fail,
        pytest.fail,
        keys,
    )
    sizes = [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 2 * FRAME_BYTES, 9 * MIB]
    try:
        for size in sizes:
            message = [b"h" * size, b"p" * (9 * MIB - size)]
            gateway.send(message)
            name, frames = await asyncio.to_thread(received, engine)
            assert frames == message
            assert engine.send(name, message)
            assert whole(await asyncio.wait_for(arrived.get(), 10)) == message
    finally:
        gateway.close()
        engine.close()


@given(st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_piece_is_longer_than_the_limit_and_the_frames_come_back(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "FRAME_BYTES", 8)
        frames = [bytes([number]) * size for number, size in enumerate(sizes)]
        pieces = pieces_of(frames)
        assert all(len(piece) <= 8 for piece in pieces)
        joined = join_pieces([bytes(piece) for piece in pieces])
        assert whole(joined) == frames
        assert not joined or isinstance(joined[0], bytes), "the header is whole"


def whole(frames: Sequence[Any]) -> list[bytes]:
    return [b"".join(frame) if isinstance(frame, list) else bytes(frame) for frame in frames]


@given(size=st.integers(4, 60), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_payload_is_the_same_in_whatever_pieces_its_frame_came(size: int, data: st.DataObject) -> None:
    frame = bytes(range(size))
    start = data.draw(st.integers(0, size - 4))
    length = 4 * data.draw(st.integers(1, (size - start) // 4))
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1))))
    pieces = [frame[begin:end] for begin, end in pairwise([0, *cuts, size])]
    place = PayloadPlace(b"k", start, length, None)
    expected, found = payload_of(place, [b"header", frame]), payload_of(place, [b"header", pieces])
    assert expected is not None and found is not None
    assert found.tobytes() == expected.tobytes() == frame[start : start + length]
    assert found.flags.writeable
    for wrong in (PayloadPlace(b"k", start, size + 4, None), PayloadPlace(b"k", size, 4, None)):
        with pytest.raises(WireError, match="in a message that has"):
            payload_of(wrong, [b"header", pieces])
