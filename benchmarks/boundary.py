"""What the boundary between gateway and engine costs, and what it saves.

    python -m benchmarks.boundary [--json FILE] [--quick] [--recording FILE [--model NAME]]

Throughput and latency run against an engine process that answers every item at once, so only the boundary is measured:
cut, hash, look up, encode, cross, decode, look up, and back. A recording of speech adds the first request after
readiness beside the tenth, with and without warm-up and cache, on a real model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audio.containers import read_file
from engine.client.client import ClientSettings, EngineClient
from engine.client.handles import MODEL_MODULES, EngineProcess
from engine.client.stream import EngineStream
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.core.limits import Limits
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Closed, Command, Feed, Open, StepOutput, Text
from engine.server.loop import EngineLoop
from engine.server.main import Build
from engine.spec import ModelSpec
from engine.vocabulary import Vocabulary

# The flagship's clock: one item per 80 ms, with its look-around.
SPEC = ModelSpec(
    name="echo",
    sample_rate=16_000,
    samples_per_position=1280,
    look_back_samples=680,
    look_ahead_samples=40,
)
CHUNK = SPEC.samples_per_position
LIVE_STREAMS = 500
# Requests of the comparison between first and later ones; the shift is no multiple of anything.
REQUEST_SECONDS = 4
SHIFT = 997


class EchoRunner:
    """There is no model."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.vocabulary = Vocabulary([b""])

    def check_open(self, message: Open) -> None:
        return None

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        return [DecodeResult(tokens=[0] * (task.end - task.start)) for task in plan.decode]

    def warm_up(self) -> None:
        return None

    def close(self) -> None:
        return None


class EchoLoop(EngineLoop):
    """Answers each item with a Text that says when the item arrived, and computes nothing."""

    def __init__(self) -> None:
        runner = EchoRunner()
        limits = Limits(max_streams=2048, cache_embeds=2048 * SPEC.embeds_per_stream)
        super().__init__(Scheduler(SPEC, limits, runner.vocabulary), runner)
        self._echoes: list[Any] = []

    def submit(self, commands: Iterable[Command], now: int) -> None:
        arrived = str(time.monotonic_ns())
        for command in commands:
            if isinstance(command, Feed):
                stream = self.scheduler.streams[command.stream]
                for item in command.items:
                    self._echoes.append(Text(command.stream, arrived, [], [], item.sample))
                    stream.computed = stream.base = item.offset + item.length
            else:
                super().submit([command], now)

    def has_work(self) -> bool:
        return bool(self._echoes) or super().has_work()

    def step(self) -> StepOutput | None:
        echoes, self._echoes = self._echoes, []
        result = super().step() if super().has_work() else None
        return StepOutput(0, echoes + ([] if result is None else result.outputs))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Noise:
    """Audio that never repeats."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._samples = self._random.standard_normal(1 << 22, dtype=np.float32)

    def chunk(self) -> NDArray[np.float32]:
        start = int(self._random.integers(0, len(self._samples) - CHUNK))
        return self._samples[start : start + CHUNK]


SILENCE = np.zeros(CHUNK, np.float32)


async def start(
    build: Build, warm: bool = True, preload: Sequence[str] = (), **settings: Any
) -> tuple[EngineProcess, EngineClient]:
    engine = EngineProcess(build, warm=warm, preload=preload)
    client = EngineClient([engine], ClientSettings(**settings))
    await client.start()
    return engine, client


async def throughput(seconds: float, silent: bool) -> dict[str, float]:
    """As fast as it goes over 50 streams: items per second of processor time on either side."""
    engine, client = await start(EchoLoop)
    noise = Noise()
    streams = [await client.open(f"s{i}") for i in range(50)]
    readers = [asyncio.create_task(drain(stream)) for stream in streams]
    assert engine.pid is not None
    mine, theirs, began = time.process_time(), cpu_seconds(engine.pid), time.perf_counter()
    fed = 0
    while time.perf_counter() - began < seconds:
        for stream in streams:
            await stream.feed(SILENCE if silent else noise.chunk())
        fed += len(streams)
        await asyncio.sleep(0)
    for stream in streams:
        await stream.finish()
    await asyncio.gather(*readers)
    wall = time.perf_counter() - began
    mine, theirs = time.process_time() - mine, cpu_seconds(engine.pid) - theirs
    await client.close()
    return {
        "items": fed,
        "items_per_second_wall": fed / wall,
        "items_per_gateway_core_second": fed / mine,
        "items_per_engine_core_second": fed / theirs,
        "items_per_core_second_both_sides": fed / (mine + theirs),
    }


async def drain(stream: EngineStream) -> None:
    async for _ in stream:
        pass


async def latency(seconds: float, streams: int) -> dict[str, float]:
    """Live streams, each a chunk every 80 ms, none in step with another: how long an item takes there and back."""
    engine, client = await start(EchoLoop)
    noise = Noise()
    sent: dict[tuple[str, int], int] = {}
    there: list[float] = []
    both: list[float] = []

    async def listen(stream: EngineStream) -> None:
        async for output in stream:
            if isinstance(output, Text) and output.delta:
                began = sent.pop((stream.id, output.sample), None)
                if began is not None:
                    there.append((int(output.delta) - began) / 1e6)
                    both.append((time.monotonic_ns() - began) / 1e6)

    opened = [await client.open(f"s{i}") for i in range(streams)]
    readers = [asyncio.create_task(listen(stream)) for stream in opened]
    assert engine.pid is not None
    mine, theirs, began = time.process_time(), cpu_seconds(engine.pid), time.perf_counter()
    period = CHUNK / SPEC.sample_rate
    turns = int(seconds / period)
    late = 0.0
    for turn in range(turns):
        for index, stream in enumerate(opened):
            due = began + (turn + index / streams) * period
            wait = due - time.perf_counter()
            # A turn of the event loop finds several chunks, as it does when they come from sockets.
            if wait > 0.0005 or index % 8 == 0:
                await asyncio.sleep(max(0.0, wait))
            late = max(late, -wait)
            # A chunk completes the look-ahead of the item before it.
            sent[stream.id, (turn - 1) * CHUNK] = time.monotonic_ns()
            await stream.feed(noise.chunk())
    wall = time.perf_counter() - began
    mine, theirs = time.process_time() - mine, cpu_seconds(engine.pid) - theirs
    for stream in opened:
        await stream.finish()
    await asyncio.gather(*readers)
    await client.close()
    return {
        "streams": streams,
        "items_per_second": turns * streams / wall,
        "gateway_core_share": mine / wall,
        "engine_core_share": theirs / wall,
        "feeding_late_ms_max": 1000 * late,
        "to_engine_ms_p50": percentile(there, 50),
        "to_engine_ms_p99": percentile(there, 99),
        "there_and_back_ms_p50": percentile(both, 50),
        "there_and_back_ms_p99": percentile(both, 99),
    }


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


async def savings(seconds: int) -> dict[str, dict[str, float]]:
    """Bytes that cross for the same amount of audio, by what the audio is."""
    noise = Noise()
    chunks = int(seconds * SPEC.sample_rate / CHUNK)
    speech = [noise.chunk().copy() for _ in range(chunks)]
    cases: dict[str, list[list[NDArray[np.float32]]]] = {
        "distinct audio": [speech],
        "muted microphone (digital silence)": [[SILENCE] * chunks],
        "one broadcast, two sessions": [speech, speech],
        "audio sent again after a reconnect": [speech, speech[chunks // 2 :]],
    }
    found = {}
    for name, sessions in cases.items():
        _, client = await start(EchoLoop)
        for index, session in enumerate(sessions):
            stream = await client.open(f"s{index}")
            reader = asyncio.create_task(drain(stream))
            for chunk in session:
                await stream.feed(chunk)
            await stream.finish()
            await reader
        stats = client.metrics().input_cache
        await client.close()
        found[name] = {
            "items": stats.queries,
            "hits": stats.hits,
            "bytes_sent": stats.bytes_sent,
            "bytes_saved": stats.bytes_saved,
        }
    return found


async def first_and_tenth(model: str, speech: NDArray[np.float32], warm: bool, cache_bytes: int) -> dict[str, float]:
    """Ten short requests one after the other: seconds of the first and the tenth, and the median of the later ones."""
    config = EngineConfig(model=model, threads=1)
    _, client = await start(config, warm=warm, preload=MODEL_MODULES, cache_bytes=cache_bytes)
    took = []
    for index in range(10):
        # Shifted a little each time, so that no request finds the audio of another in a cache.
        audio = speech[index * SHIFT : index * SHIFT + REQUEST_SECONDS * SPEC.sample_rate]
        began = time.perf_counter()
        stream = await client.open(f"s{index}")
        await stream.feed(audio)
        await stream.finish()
        last = [output async for output in stream][-1]
        assert isinstance(last, Closed), last
        took.append(time.perf_counter() - began)
    await client.close()
    later = statistics.median(took[1:])
    return {
        "first_s": took[0],
        "tenth_s": took[9],
        "median_of_later_s": later,
        "first_to_later": took[0] / later,
    }


def show(title: str, rows: dict[str, float]) -> None:
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:36s} {value:14,.3f}" if isinstance(value, float) else f"  {name:36s} {value:14,d}")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    seconds = 2.0 if arguments.quick else 8.0
    report: dict[str, Any] = {
        "throughput": await throughput(seconds, silent=False),
        "throughput_silence": await throughput(seconds, silent=True),
        "latency": await latency(seconds, LIVE_STREAMS),
        "savings": await savings(10 if arguments.quick else 60),
    }
    show("Throughput, distinct audio", report["throughput"])
    show("Throughput, digital silence", report["throughput_silence"])
    show("Latency", report["latency"])
    for name, row in report["savings"].items():
        show(f"Bytes: {name}", row)
    if arguments.recording:
        speech = np.concatenate(list(read_file(arguments.recording)))
        for warm in (True, False):
            for cache_bytes in (64 << 20, 0):
                title = f"{'warm' if warm else 'cold'} start, {'with' if cache_bytes else 'without'} cache"
                report[title] = await first_and_tenth(arguments.model, speech, warm, cache_bytes)
                show(f"First request beside the tenth, {title}", report[title])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--quick", action="store_true", help="a few seconds per part")
    parser.add_argument("--recording", type=Path, help="speech, at least 6 s: also measure the first request")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model of that request")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
