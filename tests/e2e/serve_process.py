"""`tickertape serve` as a process of its own over an engine of the test, with all that it says kept in a file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.server.main import run_engine
from tests.addresses import Addresses
from tests.engine.fakes import until
from tests.realtime.workers.engines import build

START_S = 60.0
# Admission by measured load is switched off: on a busy machine a stream costs more, and a session would be refused.
NO_LOAD = ("--limits.max-load", "0")


@contextmanager
def engine_at(folder: Path, max_streams: int = 64) -> Iterator[str]:
    """An engine that runs elsewhere: for the server it makes no difference that it is a thread of this process."""
    stop = threading.Event()
    address = f"ipc://{folder}/engine"
    thread = threading.Thread(target=run_engine, args=(address, partial(build, True, max_streams), stop.is_set))
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join()


@dataclass
class Served(Addresses):
    """A server that runs. `log` has what it says on both outputs."""

    process: asyncio.subprocess.Process
    log: Path
    port: int = 0

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    async def until_it_says(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(START_S):
            await until(lambda: self.said.count(text) >= times or self.process.returncode is not None)
        assert self.said.count(text) >= times, self.said

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(START_S):
            return await self.process.wait()

    def workers(self) -> list[int]:
        """Process numbers of its workers."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "realtime.workers.worker"], capture_output=True, text=True
        )
        return [int(line) for line in found.stdout.split()]


@asynccontextmanager
async def serving(
    folder: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    wrapper: Sequence[str] = (),
    ready: bool = True,
) -> AsyncIterator[Served]:
    """`wrapper`: what the command is started by. `ready`: wait until it serves."""
    log = folder / "log"
    adopted = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *wrapper, sys.executable, "-m", "realtime.cli", "serve", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=adopted | (environment or {}),
        )  # fmt: skip
    served = Served(process, log)
    try:
        if ready:
            await served.until_it_says("the page:")
            found = re.search(r"the page: +https?://[^:]+:(\d+)/", served.said)
            assert found is not None, served.said
            served.port = int(found[1])
        yield served
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
