"""Somebody on the internal network without the fleet's secret: floods, recorded handshakes, and bytes that drip."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import zmq

from engine.boundary import sockets
from engine.boundary.codec import Frames
from engine.boundary.sockets import EngineSocket, GatewayListener, GatewaySocket, LinkKeys
from tests.engine.client.cuttable_line import CuttableLine, cuttable_line
from tests.waiting import until

SECRET = b"a secret of this fleet that is long enough"
KEYS = LinkKeys.from_secret(SECRET)
# More than the 2000 events that ZeroMQ keeps for a monitor unless it is told otherwise.
STRANGERS = 2500
PATIENCE_S = 60


def port_of(address: str) -> int:
    return urlsplit(address).port or 0


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


class Gateway:
    """A gateway's end of a link, and what it was told."""

    def __init__(self, address: str) -> None:
        self.heard: list[list[bytes]] = []
        self.lost = 0
        self.socket = GatewaySocket(zmq.Context.instance(), address, self._hear, self._lose, self._lose, KEYS)

    def _hear(self, frames: Frames) -> None:
        self.heard.append([bytes(frame) for frame in frames])

    def _lose(self) -> None:
        self.lost += 1


async def received(engine: EngineSocket) -> tuple[bytes, list[bytes]]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await asyncio.to_thread(engine.wait, 0.1)
            message = engine.receive()
            if message is not None:
                return message[0], [bytes(frame) for frame in message[1]]


@asynccontextmanager
async def recorded_link() -> AsyncIterator[tuple[EngineSocket, CuttableLine]]:
    """An engine, and the recording of a link over which a message and its answer went."""
    engine = EngineSocket(zmq.Context.instance(), "tcp://127.0.0.1:0", KEYS)
    async with cuttable_line(port_of(engine.bound_to)) as line:
        gateway = Gateway(line.address)
        try:
            gateway.socket.send([b"the only message"])
            name, frames = await received(engine)
            assert frames == [b"the only message"]
            assert engine.send(name, [b"answer"])
            await until(lambda: [b"answer"] in gateway.heard)
            yield engine, line
        finally:
            gateway.socket.close()
            engine.close()


def refuse_strangers(port: int, count: int) -> None:
    """Connections that ask for a link without encryption, one after the other, until each is refused."""
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(greeting(b"NULL"))
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass


async def test_strangers_do_not_stop_the_links_of_an_engine_that_is_in_a_long_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineSocket(zmq.Context.instance(), "tcp://127.0.0.1:0", KEYS)
    gateway = Gateway(engine.bound_to)
    try:
        gateway.socket.send([b"before"])
        name, _ = await received(engine)
        # The engine does not look at its socket meanwhile.
        await asyncio.to_thread(refuse_strangers, port_of(engine.bound_to), STRANGERS)
        assert engine.send(name, [b"answer"])
        await until(lambda: [b"answer"] in gateway.heard)
        assert not gateway.lost
        # Of all that was refused, one look reads a part.
        read: list[int] = []
        recv = engine._monitor.recv_multipart

        def count(flags: int) -> list[bytes]:
            read.append(1)
            return recv(flags)

        monkeypatch.setattr(engine._monitor, "recv_multipart", count)
        engine.wait(0)
        assert len(read) <= sockets.REFUSALS_READ_AT_ONCE < STRANGERS
    finally:
        monkeypatch.undo()
        gateway.socket.close()
        engine.close()


@pytest.mark.parametrize("first", [64, 1_000_000], ids=["greeting first", "at once"])
async def test_a_recorded_handshake_opens_nothing_at_an_engine(first: int) -> None:
    async with recorded_link() as (engine, line):
        recorded = bytes(line.sent)
        stranger = socket.create_connection(("127.0.0.1", port_of(engine.bound_to)), timeout=PATIENCE_S)
        with stranger:
            stranger.sendall(recorded[:first])
            await asyncio.to_thread(stranger.recv, 64)
            try:
                stranger.sendall(recorded[first:])
            except OSError:
                pass  # it was refused already
            for _ in range(20):
                await asyncio.to_thread(engine.wait, 0.05)
                assert engine.receive() is None, "a message of the recording was taken for a new one"


async def test_a_recorded_engine_is_not_taken_for_one() -> None:
    async with recorded_link() as (_, line):
        recorded = bytes(line.answered)
    false = socket.create_server(("127.0.0.1", 0))

    def play() -> None:
        while True:
            try:
                connection, _ = false.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.sendall(recorded)
                    while connection.recv(65536):
                        pass
                except OSError:
                    pass

    playing = asyncio.create_task(asyncio.to_thread(play))
    gateway = Gateway(f"tcp://127.0.0.1:{false.getsockname()[1]}")
    try:
        gateway.socket.send([b"what nobody else may read"])
        await until(lambda: gateway.lost)
        assert not gateway.heard
    finally:
        gateway.socket.close()
        false.shutdown(socket.SHUT_RDWR)
        false.close()
        await playing


async def test_bytes_that_drip_in_hold_no_connection_of_a_gateway() -> None:
    listener = GatewayListener("tcp://127.0.0.1:0", LinkKeys.between_gateways(SECRET), lambda name, frames: None)
    stranger = socket.create_connection(("127.0.0.1", port_of(listener.bound_to)), timeout=0.1)

    def drip() -> int:
        """Bytes that were taken before the connection was closed; one is sent in each tenth of a second."""
        sent = 0
        while sent < 10_000:
            try:
                stranger.sendall(greeting(b"CURVE")[:60][sent : sent + 1])
                sent += 1
                if not stranger.recv(4096):
                    return sent
            except TimeoutError:
                continue
            except OSError:
                return sent
        return sent

    try:
        # ZeroMQ alone would wait for 30 s, the listener for 3 s; a busy machine may take longer.
        assert await asyncio.to_thread(drip) < 10_000
    finally:
        stranger.close()
        listener.close()
