"""The clients of a load test: each plays its audio on an absolute schedule and writes down all that happens.

Moments are seconds since the client's first sample was spoken. A chunk is sent when its last sample has been spoken:
at `start + k * chunk`, whatever happened to the chunk before it. How late each one went out is written down too: if the
generator cannot keep up, its figures are not the server's.
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

from realtime.bench.sounds import Bank, Playlist, chunks
from realtime.client.wire_client import CannotConnect, SessionWishes, WireSession, open_session

# Sessions open this long before their audio starts, so that no client is measured while others connect.
CONNECT_S = 1.0
# How long a generator process may take until it is ready to play.
READY_S = 120.0
# How long a server may take for the last finals after the audio ends.
LAST_FINALS_S = 20.0

Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how to talk to it."""

    url: str
    key: str | None = field(repr=False)
    model: str | None
    chunk_ms: int
    silence_ms: int


@dataclass(frozen=True, slots=True)
class ClientPlan:
    client: int
    # Seconds after the common start.
    phase: float
    playlist: Playlist


def play_all(
    target: Target, bank: Bank, plans: list[ClientPlan], processes: int, folder: Path, name: str
) -> list[Path]:
    """Play all plans at once from `processes` processes; returns the files that hold the record."""
    shares = [plans[index::processes] for index in range(min(processes, len(plans)))]
    context = get_context("spawn")
    everybody_ready = context.Barrier(len(shares))
    paths = [folder / f"{name}-{index}.jsonl" for index in range(len(shares))]
    workers = [
        context.Process(
            target=_work, args=(target, bank, share, everybody_ready, path), name=f"bench-{index}", daemon=True
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


def _work(target: Target, bank: Bank, plans: list[ClientPlan], everybody_ready: Barrier, path: Path) -> None:
    """Main function of a generator process."""
    with path.open("w", encoding="utf-8") as file, bank.path.open("rb") as raw:
        with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as samples:
            everybody_ready.wait(READY_S)
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
    """One client."""

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
        """Seconds since the first sample was spoken."""
        return time.perf_counter() - self._start

    async def play(self) -> None:
        """Everything that goes wrong goes into the record."""
        seconds = self._plan.playlist.samples / self._bank.rate
        try:
            await asyncio.sleep(max(0.0, -CONNECT_S - self._now))
            async with (
                open_session(self._target.url, self._target.key) as session,
                asyncio.timeout(CONNECT_S + seconds + LAST_FINALS_S),
            ):
                await self._converse(session)
        except CannotConnect as error:
            self._fail(str(error))
        except TimeoutError:
            self._fail(f"finals did not come within {LAST_FINALS_S:g} s of the end")
        except ConnectionClosed as error:
            self._fail(f"the server closed the connection: {error}")
        self._record({"t": self._now, "end": seconds})

    async def _converse(self, session: WireSession) -> None:
        turns = {"type": "server_vad", "silence_duration_ms": self._target.silence_ms}
        await session.configure(SessionWishes(self._bank.rate, turns, self._target.model))
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
