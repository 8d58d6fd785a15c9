"""A UDP proxy that loses and delays datagrams between a client and a server of one machine."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

# The port of a host candidate, and of a section of media, in an answer.
PORT = re.compile(r"(?<=a=candidate:1 1 udp \d{10} 127\.0\.0\.1 )\d+")


class _End(asyncio.DatagramProtocol):
    """One socket of the proxy."""

    def __init__(self, take: Any) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._take(data, addr)

    def error_received(self, exc: Exception) -> None:
        """The other side has left."""


class LossyLine:
    """Give `through` the answer of a server; the client then reaches the server by this proxy."""

    def __init__(self, loss: float, jitter_s: float) -> None:
        self.loss, self.jitter_s = loss, jitter_s
        self.lost = 0
        self.passed = 0
        self._random = random.Random(29)
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        here = ("127.0.0.1", 0)
        _, self._to_client = await loop.create_datagram_endpoint(lambda: _End(self._from_client), here)
        _, self._to_server = await loop.create_datagram_endpoint(lambda: _End(self._from_server), here)

    def close(self) -> None:
        self._to_client.transport.close()
        self._to_server.transport.close()

    def through(self, answer: str) -> str:
        found = PORT.search(answer)
        assert found is not None, answer
        self._server = ("127.0.0.1", int(found[0]))
        return PORT.sub(str(self._to_client.transport.get_extra_info("sockname")[1]), answer)

    def _from_client(self, data: bytes, address: tuple[str, int]) -> None:
        self._client = address
        self._pass(self._to_server, data, self._server)

    def _from_server(self, data: bytes, address: tuple[str, int]) -> None:
        self._pass(self._to_client, data, self._client)

    def _pass(self, end: _End, data: bytes, address: tuple[str, int] | None) -> None:
        if address is None or self._random.random() < self.loss:
            self.lost += 1
            return
        self.passed += 1
        delay = self._random.uniform(0, self.jitter_s)
        asyncio.get_running_loop().call_later(delay, self._send, end, data, address)

    @staticmethod
    def _send(end: _End, data: bytes, address: tuple[str, int]) -> None:
        if not end.transport.is_closing():
            end.transport.sendto(data, address)


@asynccontextmanager
async def lossy_line(loss: float = 0.1, jitter_s: float = 0.06) -> AsyncIterator[LossyLine]:
    line = LossyLine(loss, jitter_s)
    await line.open()
    try:
        yield line
    finally:
        line.close()
