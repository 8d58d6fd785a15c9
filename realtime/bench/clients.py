"""The clients of a load test: processes that play recordings to a server in real time and record all events.

Each client plays its own `Playlist` (`recordings.py`) on an absolute schedule: a chunk is sent when its last sample
would have been spoken, regardless of earlier chunks. Times are seconds since the client's first sample. The lateness
of each chunk is recorded too: if the generator cannot keep up, the figures do not describe the server.
`run_records.py` reads what the clients wrote.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TextIO

from websockets.exceptions import ConnectionClosed

from realtime.bench.recordings import Bank, Playlist, chunks
from realtime.client.wire_client import CannotConnect, SessionOptions, WireSession, open_session

# Sessions are opened this many seconds before their audio, so that no client is measured while others connect.
CONNECT_S = 1.0
# Timeout for the start of the client processes.
READY_S = 120.0
# Seconds for the last finals after the end of the audio.
LAST_FINALS_S = 20.0

Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and the options of its sessions."""

    url: str
    key: str | None = field(repr=False)
    model: str | None
    chunk_ms: int
    silence_ms: int
    speakers: bool = False


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """What one client plays, and when it starts."""

    client: int
    # Seconds after the common start.
    phase: float
    playlist: Playlist


def play_all(
    target: Target, bank: Bank, plans: list[ClientPlan], processes: int, folder: Path, name: str
) -> list[Path]:
    """Play all plans at once from `processes` processes; returns the files of the record."""
    shares = [plans[index::processes] for index in range(min(processes, len(plans)))]
    context = get_context("spawn")
    all_ready = context.Barrier(len(shares))
    paths = [folder / f"{name}-{index}.jsonl" for index in range(len(shares))]
    workers = [
        context.Process(
            target=_run_process, args=(target, bank, share, all_ready, path), name=f"bench-{index}", daemon=True
        )
        for index, (share, path) in enumerate(zip(shares, paths, strict=True))
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join()
    return paths


def _run_process(target: Target, bank: Bank, plans: list[ClientPlan], all_ready: Barrier, path: Path) -> None:
    """Main function of a client process."""
    with path.open("w", encoding="utf-8") as file, bank.path.open("rb") as raw:
        with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as samples:
            all_ready.wait(READY_S)
            start = time.perf_counter() + CONNECT_S
            asyncio.run(_play_share(target, bank, samples, plans, start, file))


async def _play_share(
    target: Target, bank: Bank, samples: memoryview, plans: list[ClientPlan], start: float, file: TextIO
) -> None:
    players = [Player(target, bank, samples, plan, start + plan.phase, _writer(plan, file)) for plan in plans]
    await asyncio.gather(*(player.play() for player in players))


def _writer(plan: ClientPlan, file: TextIO) -> Record:
    def record(entry: dict[str, Any]) -> None:
        file.write(json.dumps({"client": plan.client, **entry}) + "\n")

    return record


class Player:
    """One client: opens a session, plays its playlist, and records the events."""

    def __init__(
        self, target: Target, bank: Bank, samples: memoryview, plan: ClientPlan, start: float, record: Record
    ) -> None:
        self._target = target
        self._bank = bank
        self._samples = samples
        self._plan = plan
        self._start = start
        self._record = record

    @property
    def _now(self) -> float:
        """Seconds since the first sample."""
        return time.perf_counter() - self._start

    async def play(self) -> None:
        """Run the client. Failures are recorded and not raised."""
        seconds = self._plan.playlist.samples / self._bank.rate
        try:
            await asyncio.sleep(max(0.0, -CONNECT_S - self._now))
            async with (
                open_session(self._target.url, self._target.key) as session,
                asyncio.timeout(CONNECT_S + seconds + LAST_FINALS_S),
            ):
                await self._run_session(session)
        except CannotConnect as error:
            self._fail(str(error))
        except TimeoutError:
            self._fail(f"finals did not arrive within {LAST_FINALS_S:g} s of the end")
        except ConnectionClosed as error:
            self._fail(f"the server closed the connection: {error}")
        self._record({"t": self._now, "end": seconds})

    async def _run_session(self, session: WireSession) -> None:
        turns = {"type": "server_vad", "silence_duration_ms": self._target.silence_ms}
        target = self._target
        await session.configure(SessionOptions(self._bank.rate, turns, target.model, speakers=target.speakers))
        listener = asyncio.create_task(self._listen(session), name=f"client {self._plan.client}")
        try:
            await self._speak(session)
            await listener
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    def _fail(self, reason: str) -> None:
        self._record({"t": self._now, "failure": reason})

    async def _speak(self, session: WireSession) -> None:
        chunk_samples = self._bank.rate * self._target.chunk_ms // 1000
        late_ms: list[float] = []
        sent = 0
        for chunk in chunks(self._samples, self._plan.playlist, chunk_samples):
            sent += len(chunk) // 2
            due = sent / self._bank.rate
            await asyncio.sleep(max(0.0, due - self._now))
            late_ms.append(round(1000 * (self._now - due), 2))
            await session.append(chunk)
        self._record({"t": self._now, "late_ms": late_ms})
        await session.finish()

    async def _listen(self, session: WireSession) -> None:
        async for event in session.events():
            self._record({"t": round(self._now, 4), "event": event})
            if session.is_over:
                return
        self._fail("the server closed the session before its last final")
