"""The socket at which a gateway listens to the others: silent connections, floods and addresses that are not tcp."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engine.boundary import sockets
from engine.boundary.sockets import CannotListen, GatewayListener, LinkKeys
from tests.engine import fakes

KEYS = LinkKeys.between_gateways(b"a secret of this fleet that is long enough")


async def test_a_connection_that_says_nothing_is_closed_long_before_zeromq_would() -> None:
    listener = GatewayListener("tcp://127.0.0.1:0", KEYS, lambda name, frames: None)
    try:
        # ZeroMQ alone would close it after 30 s.
        with socket.create_connection(("127.0.0.1", urlsplit(listener.bound_to).port or 0), timeout=20) as silent:

            def read_to_the_end() -> None:
                while silent.recv(4096):
                    pass

            await asyncio.to_thread(read_to_the_end)
    finally:
        listener.close()


async def test_an_address_that_is_not_tcp_is_refused_before_it_is_bound(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match="use tcp://host:port"):
        GatewayListener(f"ipc://{tmp_path}/g", KEYS, lambda name, frames: None)
    assert not os.listdir(tmp_path)


async def test_a_flood_of_messages_leaves_turns_to_the_rest_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    listener = GatewayListener("tcp://127.0.0.1:0", KEYS, lambda name, frames: heard.append(name))
    flood = [(b"%d" % number, [b"message"]) for number in range(10 * sockets.MESSAGES_A_TURN)]
    waiting = list(flood)
    monkeypatch.setattr(listener, "wait", lambda seconds: bool(waiting))
    monkeypatch.setattr(listener, "receive", lambda: waiting.pop(0))
    try:
        listener._read()
        assert len(heard) == sockets.MESSAGES_A_TURN
        await fakes.until(lambda: len(heard) == len(flood))
        assert heard == [name for name, _ in flood]
    finally:
        listener.close()
