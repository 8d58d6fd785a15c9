"""A receiver of webhooks on loopback, over real sockets, that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from realtime.serving.webhooks import signature

# A status, or a function that writes the whole answer.
Reply = int | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Receiver:
    """Takes POST requests. `replies` are the answers to the next requests; after them every answer is `usual`."""

    def __init__(self) -> None:
        self.usual: Reply = 200
        self.replies: list[Reply] = []
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        # Bodies that were answered with 2xx.
        self.taken: list[dict[str, Any]] = []
        self.connections = 0
        self.at_once = 0
        self.most_at_once = 0
        self.port = 0
        self.scheme = "http"
        self._writers: list[asyncio.StreamWriter] = []

    def url(self, path: str = "/hook") -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{path}"

    @property
    def texts(self) -> list[str]:
        """The texts of the finals that were taken."""
        return [body["data"]["text"] for body in self.taken if body["type"] == "session.final"]

    def verify(self, secret: bytes) -> None:
        """Every request has a valid signature."""
        assert self.heads
        for head, body in zip(self.heads, self.bodies, strict=True):
            wanted = signature(secret, head["webhook-id"], int(head["webhook-timestamp"]), body)
            assert head["webhook-signature"] == wanted

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.connections += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            named = dict(line.split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(fields["content-length"]))
            self.paths.append(lines[0].split()[1])
            self.heads.append(named)
            self.bodies.append(body)
            reply = self.replies.pop(0) if self.replies else self.usual
            if isinstance(reply, int):
                if 200 <= reply < 300:
                    self.taken.append(json.loads(body))
                writer.write(f"HTTP/1.1 {reply} X\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
            else:
                await reply(writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.at_once -= 1
            writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def hang(writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await writer.wait_closed()


@asynccontextmanager
async def receiver(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> AsyncIterator[Receiver]:
    found = Receiver()
    server = await asyncio.start_server(found.serve, host, 0, ssl=tls)
    found.port = server.sockets[0].getsockname()[1]
    found.scheme = "https" if tls else "http"
    try:
        yield found
    finally:
        server.close()
        found.cut()
        await asyncio.sleep(0)
