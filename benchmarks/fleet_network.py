"""What lies between the parts of a fleet in `benchmarks.fleet`: a load balancer, and links that can be cut.

    python -m benchmarks.fleet_network serve ...

in place of `tickertape` runs a gateway whose links to engines go through this process. A file `cut-NAME` beside the
gateway's table stops the link to that engine: bytes are neither sent nor refused, as when a cable is pulled.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from urllib.parse import urlsplit

CHUNK = 65_536
LOOK_S = 0.1
NOBODY_S = 30.0
RUN_OUT_S = 2.0


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_cut: Callable[[], bool]) -> None:
    """Bytes one way, until either end closes."""
    try:
        while data := await reader.read(CHUNK):
            while is_cut():  # noqa: ASYNC110 - a cut has no event
                await asyncio.sleep(LOOK_S)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, is_cut: Callable[[], bool]
) -> None:
    """A connection to nobody waits for somebody to come, as one to a machine that boots does: to be taken and closed
    would look like a refusal."""
    deadline = asyncio.get_running_loop().time() + NOBODY_S
    while True:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            break
        except OSError:
            if asyncio.get_running_loop().time() > deadline:
                writer.close()
                return
            await asyncio.sleep(LOOK_S)
    await asyncio.gather(pump(reader, far_writer, is_cut), pump(far_reader, writer, is_cut))


class Balancer:
    """One address before all gateways: each connection goes to one that accepts it, chosen at random."""

    def __init__(self) -> None:
        self.gateways: list[tuple[str, int]] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for host, port in random.sample(self.gateways, len(self.gateways)):
            try:
                far_reader, far_writer = await asyncio.open_connection(host, port)
            except OSError:
                continue
            await asyncio.gather(pump(reader, far_writer, lambda: False), pump(far_reader, writer, lambda: False))
            return
        writer.close()


class Links:
    """The engines of a table, each behind a port of this process."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self.shown = table.with_suffix(".through.json")
        self._ports: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._joined: set[asyncio.Task[None]] = set()

    async def follow(self) -> None:
        last = ""
        while True:
            text = self._table.read_text() if self._table.is_file() else ""
            if text and text != last:
                table = json.loads(text)
                for engine in table["engines"]:
                    engine["address"] = f"tcp://127.0.0.1:{await self._through(engine['name'], engine['address'])}"
                beside = self.shown.with_suffix(".new")
                beside.write_text(json.dumps(table))
                os.replace(beside, self.shown)
                last = text
            await asyncio.sleep(LOOK_S)

    async def _through(self, name: str, address: str) -> int:
        if name not in self._ports:
            to = urlsplit(address)
            host, port, cut = str(to.hostname), int(to.port or 0), self._table.with_name(f"cut-{name}")
            server = await asyncio.start_server(
                lambda r, w: self._keep(join(r, w, host, port, cut.exists)), "127.0.0.1", 0
            )
            self._servers.append(server)
            self._ports[name] = server.sockets[0].getsockname()[1]
        return self._ports[name]

    def _keep(self, joined: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(joined)
        self._joined.add(task)
        task.add_done_callback(self._joined.discard)

    async def run_out(self) -> None:
        """Until what a gateway sent before it ended has been handed on."""
        if self._joined:
            await asyncio.wait(self._joined, timeout=RUN_OUT_S)


async def serve(arguments: list[str]) -> int:
    place = arguments.index("--engine-table") + 1
    links = Links(Path(arguments[place]))
    arguments[place] = str(links.shown)
    following = asyncio.create_task(links.follow())
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "realtime.cli", *arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, process.terminate)
    code = await process.wait()
    following.cancel()
    await links.run_out()
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1:])))
