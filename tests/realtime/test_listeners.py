"""The listening sockets of a server: one for each address, and one sentence if there can be none."""

from __future__ import annotations

import asyncio
import socket

import pytest

from realtime.listeners import listening_sockets


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_a_host_is_listened_on(host: str) -> None:
    sockets = listening_sockets(host, 0)
    try:
        port = sockets[0].getsockname()[1]
        assert port
        if host != "":
            with pytest.raises(OSError, match=f"^cannot listen on {host} port {port}: Address already in use; choose"):
                listening_sockets(host, port)
    finally:
        for listener in sockets:
            listener.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300, "é" * 100, "a..b"])
def test_a_host_that_cannot_be_listened_on_is_one_sentence(host: str) -> None:
    with pytest.raises(OSError, match=r"^cannot listen on .* port 0: .*; choose another --host or --port$") as error:
        listening_sockets(host, 0)
    assert "\n" not in str(error.value)


async def test_connections_send_small_messages_at_once() -> None:
    """asyncio sets the option for sockets that name their protocol, and accepted ones have that of their listener."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted = transport.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    (listener,) = await asyncio.to_thread(listening_sockets, "127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(Accepted, sock=listener)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    assert await asyncio.wait_for(found, 20) == 1
    writer.close()
    await writer.wait_closed()
    server.close()
