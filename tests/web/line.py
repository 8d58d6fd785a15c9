"""A line between browser and server that a test can cut, clog upwards or freeze both ways."""

from __future__ import annotations

import asyncio
import re
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
        # The name that the server is told in place of the one the browser asked for, as by some proxies.
        self.host = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close_for_good(self) -> None:
        """Refuses all connections from now on."""
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
        if self.host:
            await self._rename(reader, up_writer)
        for pump in (self._pump(reader, up_writer, self._flowing), self._pump(up_reader, writer, self._answering)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _rename(self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter) -> None:
        """Send the head of a request on under another name. No other request follows on this connection unseen."""
        head = await reader.readuntil(b"\r\n\r\n")
        head = re.sub(rb"\r\nHost: [^\r]*", b"\r\nHost: " + self.host.encode(), head)
        up_writer.write(head.replace(b"\r\nConnection: keep-alive", b"\r\nConnection: close"))

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
