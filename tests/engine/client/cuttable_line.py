"""A tcp line between two processes that tests can read and cut while both ends stay open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CuttableLine:
    """Forwards tcp from `address` to a port of this machine. While cut, it passes nothing and keeps both ends open."""

    def __init__(self, port: int) -> None:
        # All bytes, and those of the side that connected and of the other one.
        self.heard, self.sent, self.answered = bytearray(), bytearray(), bytearray()
        self.address = ""
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self._open.wait()
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers.append(back)
            for way in (self._copy(reader, back, self.sent), self._copy(there, writer, self.answered)):
                self._tasks.append(asyncio.create_task(way))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                self.heard += data
                record += data
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def cuttable_line(port: int) -> AsyncIterator[CuttableLine]:
    line = CuttableLine(port)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        await line.close()
