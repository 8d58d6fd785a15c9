"""Seconds from a kill of the engine until the next word, with and without a spare engine.

    python -m benchmarks.recovery [--model NAME] [--sessions 2] [--kills 5] [--json FILE]
    python -m benchmarks.recovery --random-voxtral [--sessions 100]      # full size, random weights, needs a GPU

Sound is played at the pace of a microphone into the engine's client: engine and client alone, no sockets of clients. A
word takes a while also when nothing happens, so the same is measured from moments at which nothing was killed. Random
weights are made on the device: reading a real checkpoint from disk comes on top of each start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.random_engine import build
from engine.client.client import ClientSettings, EngineClient
from engine.client.handles import EngineProcess
from engine.client.stream import EngineStream
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.messages import Text

PACKET_S = 0.08
# An engine lives so long before it is killed, and a word may take so long to come.
ALIVE_S = (2.0, 4.0)
PATIENCE_S = 300.0

MakeEngine = Callable[[int], EngineProcess]
Audio = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Result:
    """One server, with or without a spare. Seconds, over all sessions and kills."""

    spares: int
    sessions: int
    kills: int
    # Of the first engine, from nothing to ready.
    start_s: float
    calm_p50_s: float
    calm_max_s: float
    killed_p50_s: float
    killed_max_s: float
    # Until a stream was where it had been.
    recovered_p50_s: float
    streams_recovered: int
    # What the spare has of its own, in bytes; 0 without one.
    spare_bytes: int


class Speaker:
    """Sound that goes on, into one stream, and what is said of it."""

    def __init__(self, stream: EngineStream, audio: Audio, rate: int) -> None:
        self._stream = stream
        self._audio = audio
        self._packet = round(PACKET_S * rate)
        self._spoke = asyncio.Event()
        self._tasks = [asyncio.create_task(self._speak()), asyncio.create_task(self._listen())]

    async def next_words(self) -> float:
        """The moment at which text comes again."""
        self._spoke.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self._spoke.wait()
        return time.perf_counter()

    async def stop(self) -> None:
        self._tasks[0].cancel()
        await self._stream.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _speak(self) -> None:
        due, start = time.perf_counter(), 0
        while True:
            due += PACKET_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self._stream.feed(np.take(self._audio, range(start, start + self._packet), mode="wrap"))
            start += self._packet

    async def _listen(self) -> None:
        async for output in self._stream:
            if isinstance(output, Text) and output.delta:
                self._spoke.set()


async def measure(make: MakeEngine, audio: Audio, sessions: int, kills: int, spares: int) -> Result:
    engines = [make(1 + spares) for _ in range(1 + spares)]
    client = EngineClient(engines, ClientSettings(spares=spares))
    began = time.perf_counter()
    await client.start()
    start_s = time.perf_counter() - began
    try:
        await until(lambda: client.capacity().spares_ready == spares)
        rate = client.spec.sample_rate
        speakers = [
            Speaker(await client.open(f"s{number}"), np.roll(audio, number * rate), rate) for number in range(sessions)
        ]
        await asyncio.gather(*(speaker.next_words() for speaker in speakers))
        chance, calm, killed = random.Random(1), [], []
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(*ALIVE_S))
            calm += await waits(speakers, time.perf_counter())
        spare_bytes = own_bytes(engines[1].pid) if spares else 0
        for kill in range(kills):
            await until(lambda: client.ready and client.capacity().spares_ready == spares)
            await asyncio.sleep(chance.uniform(*ALIVE_S))
            killed += await kill_one(client, engines, kill % len(engines), speakers)
        await until(lambda: client.metrics().streams_recovered == sessions * kills)
        metrics = client.metrics()
        for speaker in speakers:
            await speaker.stop()
    finally:
        await client.close()
    return Result(
        spares,
        sessions,
        kills,
        start_s,
        statistics.median(calm),
        max(calm),
        statistics.median(killed),
        max(killed),
        statistics.median(metrics.recent_recovery_seconds),
        metrics.streams_recovered,
        spare_bytes,
    )


async def kill_one(
    client: EngineClient, engines: list[EngineProcess], victim: int, speakers: list[Speaker]
) -> list[float]:
    """With a spare, engines serve in turn. Words that were on their way when it died do not count."""
    seat, pid = client._running.seats.all[victim], engines[victim].pid
    assert seat.serves and pid is not None
    link, moment = seat.link, time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: seat.link is not link)
    return await waits(speakers, moment)


async def waits(speakers: list[Speaker], since: float) -> list[float]:
    moments = await asyncio.gather(*(speaker.next_words() for speaker in speakers))
    return [moment - since for moment in moments]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def own_bytes(pid: int | None) -> int:
    """Memory that a process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def sample_speech() -> Audio:
    """The recording that `tickertape demo` plays. A machine that runs random weights need not have the packages."""
    from audio.containers import read_file
    from engine.weights.store import cache_folder
    from realtime.commands.pull import SAMPLE

    sound = next(file for file in (cache_folder() / SAMPLE).iterdir() if file.suffix == ".wav")
    return np.concatenate(list(read_file(sound)))


def noise() -> Audio:
    return (np.random.default_rng(1).standard_normal(60 * 16_000) * 0.1).astype(np.float32)


def compare(make: MakeEngine, audio: Audio, sessions: int, kills: int) -> list[Result]:
    return [asyncio.run(measure(make, audio, sessions, kills, spares)) for spares in (0, 1)]


def real_engine(model: str, device: str, threads: int, share_of: int) -> EngineProcess:
    return EngineProcess(EngineConfig(model=model, device=device, threads=threads, share_of=share_of))


def random_engine(kv: str, small: bool, streams: int, share_of: int) -> EngineProcess:
    """A plan for so many streams and no more leaves room for the other engine."""
    return EngineProcess(partial(build, kv, 1024, streams, small))


def show(results: list[Result]) -> None:
    print("spare  start s  next words: calm p50 / max s   after a kill p50 / max   where it was p50 s   spare's own MB")
    for result in results:
        calm = f"{result.calm_p50_s:.2f} / {result.calm_max_s:.2f}"
        killed = f"{result.killed_p50_s:.2f} / {result.killed_max_s:.2f}"
        own = f"{result.spare_bytes / 1e6:.0f}" if result.spares else "-"
        shown = "yes" if result.spares else "no"
        print(f"{shown:5}  {result.start_s:7.1f}  {calm:>28}  {killed:>25}  {result.recovered_p50_s:18.2f}  {own:>15}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--random-voxtral", action="store_true", help="a Voxtral Realtime with random weights")
    parser.add_argument("--small", action="store_true", help="of small dimensions, on the CPU")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="its keys and values")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if arguments.random_voxtral:
        make: MakeEngine = partial(random_engine, arguments.kv, arguments.small, arguments.sessions)
    else:
        make = partial(real_engine, arguments.model, arguments.device, arguments.threads)
    audio = noise() if arguments.random_voxtral else sample_speech()
    results = compare(make, audio, arguments.sessions, arguments.kills)
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
