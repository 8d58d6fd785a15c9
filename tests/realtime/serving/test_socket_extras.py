"""The system's figures of a client's socket with unread bytes."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from realtime.serving.socket_extras import peer_has_closed, seconds_since_data

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so")


@pytest.fixture(autouse=True)
def blockbuster() -> None:
    """Not here: the client of these tests is in the same thread."""


class Unread(asyncio.Protocol):
    """Reads nothing."""

    def __init__(self, made: asyncio.Queue[asyncio.Transport]) -> None:
        self._made = made

    def connection_made(self, transport: Any) -> None:
        transport.pause_reading()
        self._made.put_nowait(transport)


@asynccontextmanager
async def unread_connection() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    made: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
    server = await asyncio.get_running_loop().create_server(lambda: Unread(made), "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        transport = await made.get()
        try:
            yield transport, client
        finally:
            transport.abort()
            server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def a_client_that_leaves(leave: Callable[[socket.socket], None]) -> None:
    async with unread_connection() as (transport, client):
        client.sendall(b"GET / HTTP/1.1")
        assert not peer_has_closed(transport)
        leave(client)
        await until(lambda: peer_has_closed(transport))


async def a_request_that_waits() -> None:
    async with unread_connection() as (transport, client):
        sent = time.monotonic()
        client.sendall(b"GET / HTTP/1.1")
        await until(lambda: seconds_since_data(transport) >= 0.2)
        assert time.monotonic() - sent >= 0.19
        client.sendall(b"\r\n")
        await until(lambda: seconds_since_data(transport) < 0.1)
        transport.abort()
        await until(transport.is_closing)
        assert seconds_since_data(transport) >= 0.0, "and no error"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("how", ["closed", "half closed", "reset"])
def test_a_client_that_has_left_is_known_before_its_last_bytes_are_read(run: Any, how: str) -> None:
    leave: dict[str, Callable[[socket.socket], None]] = {
        "closed": socket.socket.close,
        "half closed": lambda client: client.shutdown(socket.SHUT_WR),
        "reset": reset,
    }
    run(a_client_that_leaves(leave[how]))


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_how_long_a_request_has_waited_is_known(run: Any) -> None:
    run(a_request_that_waits())
