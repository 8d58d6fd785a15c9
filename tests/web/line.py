"""A line between browser and server that a test can cut, clog upwards, freeze both ways, or have refuse sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Line:
    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing, self._answering = asyncio.Event(), asyncio.Event()
        self._flowing.set()
        self._answering.set()
        self._closed = False
        # What sockets and posted requests are answered with in place of the server, for example by a proxy.
        self.refusal = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close_for_good(self) -> None:
        """Nobody gets through any more."""
        self._closed = True
        self.cut()

    def open_again(self) -> None:
        self._closed = False

    def clog(self) -> None:
        self._flowing.clear()

    def freeze(self) -> None:
        """Nothing passes either way, and no connection says that it is broken."""
        self._flowing.clear()
        self._answering.clear()

    def clear(self) -> None:
        self._flowing.set()
        self._answering.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, up_writer]
        if self.refusal and await self._refused(reader, writer, up_writer):
            return
        for pump in (self._pump(reader, up_writer, self._flowing), self._pump(up_reader, writer, self._answering)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _refused(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up_writer: asyncio.StreamWriter
    ) -> bool:
        """Answer an upgrade or a posted request here; anything else goes up."""
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST") and b"\r\nupgrade: websocket" not in head.lower():
            # No other request may follow on this connection unseen.
            up_writer.write(head.replace(b"\r\nConnection: keep-alive", b"\r\nConnection: close"))
            return False
        length = len(self.refusal)
        answer = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        writer.write(f"{answer}Connection: close\r\n\r\n".encode() + self.refusal)
        writer.close()
        up_writer.close()
        return True

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        try:
            while data := await reader.read(4096):
                await gate.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        self.cut()
        self.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def line_to(port: int) -> AsyncIterator[Line]:
    line = Line(port)
    # A small window, so that a clogged line is felt by the browser soon.
    server = await asyncio.start_server(line.accept, "127.0.0.1", 0, limit=4096)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        server.close()
        await line.close()
