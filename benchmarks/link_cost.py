"""What the link between gateway and engine costs, and what its input cache saves.

    python -m benchmarks.link_cost [--quick] [--recording FILE [--model NAME]] [--json FILE]

Throughput and latency are measured against an engine process that answers every item at once, so that only the link
counts: cut, hash, look up, encode, send, decode, look up, and back. With a recording of speech and a real model, the
first request after readiness is compared with the tenth, with and without warm-up and cache.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines import SPEC as VOXTRAL_SPEC
from benchmarks.engines import NullRunner, engine_client
from benchmarks.measuring import cpu_seconds, parser_of, percentiles, show, write_json
from benchmarks.recordings import load_audio
from benchmarks.sounds import Samples
from engine.client.engine_handles import MODEL_MODULES, EngineProcess
from engine.client.stream import EngineStream
from engine.core.planner import Limits
from engine.core.scheduler import Scheduler
from engine.messages import Closed, Command, Feed, Output, StepOutput, Text
from engine.options import DEFAULT_MODEL, EngineConfig
from engine.server.loop import EngineLoop
from engine.spec import ModelSpec

# The clock of Voxtral Realtime, without its keys and values.
SPEC = ModelSpec(
    name="echo",
    sample_rate=VOXTRAL_SPEC.sample_rate,
    samples_per_position=VOXTRAL_SPEC.samples_per_position,
    look_back_samples=VOXTRAL_SPEC.look_back_samples,
    look_ahead_samples=VOXTRAL_SPEC.look_ahead_samples,
)
CHUNK = SPEC.samples_per_position
SILENCE = np.zeros(CHUNK, np.float32)
# Requests of the comparison between first and later ones; the shift is a multiple of no other size.
REQUEST_SECONDS = 4
SHIFT = 997


class EchoLoop(EngineLoop):
    """Answers each item with a Text that says when the item arrived, and computes nothing."""

    def __init__(self) -> None:
        runner = NullRunner(SPEC)
        limits = Limits(max_streams=2048, cache_embeds=2048 * SPEC.embeds_per_stream)
        super().__init__(Scheduler(SPEC, limits, runner.vocabulary), runner)
        self._echoes: list[Output] = []

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


class Noise:
    """Audio that never repeats."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._samples = self._random.standard_normal(1 << 22, dtype=np.float32)

    def chunk(self) -> Samples:
        start = int(self._random.integers(0, len(self._samples) - CHUNK))
        return self._samples[start : start + CHUNK]


def echo_engine() -> EngineProcess:
    return EngineProcess(EchoLoop, preload=())


async def drain(stream: EngineStream, take: Callable[[Output], None] = lambda output: None) -> None:
    async for output in stream:
        take(output)


async def drive(streams: int, seconds: float, paced: bool) -> dict[str, Any]:
    """Either as fast as it goes: items per second of processor time on either side. Or live, a chunk of each stream
    every 80 ms, none in step with another: how long an item takes there and back."""
    noise, period = Noise(), CHUNK / SPEC.sample_rate
    sent: dict[tuple[str, int], int] = {}
    there: list[float] = []
    both: list[float] = []

    def take(output: Output) -> None:
        if isinstance(output, Text) and output.delta:
            began = sent.pop((output.stream, output.sample), None)
            if began is not None:
                there.append((int(output.delta) - began) / 1e6)
                both.append((time.monotonic_ns() - began) / 1e6)

    engine = echo_engine()

    def clock() -> NDArray[np.float64]:
        """Wall seconds, and processor seconds of gateway and engine."""
        return np.array([time.perf_counter(), time.process_time(), cpu_seconds(engine.pid or 0)])

    async with engine_client(engine) as client:
        opened = [await client.open(f"s{i}") for i in range(streams)]
        readers = [asyncio.create_task(drain(stream, take)) for stream in opened]
        began, turn = clock(), 0
        while turn * period < seconds if paced else time.perf_counter() - began[0] < seconds:
            for index, stream in enumerate(opened):
                wait = began[0] + (turn + index / streams) * period - time.perf_counter() if paced else 0.0
                # A turn of the event loop finds several chunks, as it does when they come from sockets.
                if wait > 0.0005 or index % (8 if paced else streams) == 0:
                    await asyncio.sleep(max(0.0, wait))
                if paced:
                    # A chunk completes the look-ahead of the item before it.
                    sent[stream.id, (turn - 1) * CHUNK] = time.monotonic_ns()
                await stream.feed(noise.chunk())
            turn += 1
        spent = clock() - began
        for stream in opened:
            await stream.finish()
        await asyncio.gather(*readers)
        # Unpaced, what is on its way at the end belongs to the items that were fed.
        _, gateway, engine = (spent if paced else clock() - began).tolist()
    items = turn * streams
    return {
        "streams": streams,
        "items": items,
        "items_per_gateway_core_second": items / gateway,
        "items_per_engine_core_second": items / engine,
        "items_per_core_second_both_sides": items / (gateway + engine),
        **percentiles("to_engine_ms", there, 50, 99),
        **percentiles("there_and_back_ms", both, 50, 99),
    }


async def savings(seconds: int) -> dict[str, dict[str, float]]:
    """Bytes that cross for the same amount of audio, by what the audio is."""
    noise = Noise()
    chunks = int(seconds * SPEC.sample_rate / CHUNK)
    speech = [noise.chunk().copy() for _ in range(chunks)]
    cases = {
        "distinct audio": [speech],
        "muted microphone (digital silence)": [[SILENCE] * chunks],
        "one broadcast, two sessions": [speech, speech],
        "audio sent again after a reconnect": [speech, speech[chunks // 2 :]],
    }
    found = {}
    for name, sessions in cases.items():
        async with engine_client(echo_engine()) as client:
            for index, session in enumerate(sessions):
                stream = await client.open(f"s{index}")
                reader = asyncio.create_task(drain(stream))
                for chunk in session:
                    await stream.feed(chunk)
                await stream.finish()
                await reader
            stats = client.metrics().input_cache
        found[name] = {
            "items": stats.queries,
            "hits": stats.hits,
            "bytes_sent": stats.bytes_sent,
            "bytes_saved": stats.bytes_saved,
        }
    return found


async def first_and_tenth(model: str, speech: Samples, warm: bool, cache_bytes: int) -> dict[str, float]:
    """Ten short requests one after the other: seconds of the first and the tenth, and the median of the later ones."""
    took = []
    engine = EngineProcess(EngineConfig(model=model, threads=1), warm=warm, preload=MODEL_MODULES)
    async with engine_client(engine, cache_bytes=cache_bytes) as client:
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
    later = statistics.median(took[1:])
    return {"first_s": took[0], "tenth_s": took[9], "median_of_later_s": later, "first_to_later": took[0] / later}


async def run(options: Any) -> dict[str, Any]:
    seconds = 0.5 if options.small else 2.0 if options.quick else 8.0
    report: dict[str, Any] = {
        "throughput": await drive(50, seconds, paced=False),
        "latency": await drive(20 if options.small else 500, seconds, paced=True),
        "savings": await savings(1 if options.small else 10 if options.quick else 60),
    }
    for warm in (True, False) if options.recording else ():
        for cache_bytes in (64 << 20, 0):
            title = f"{'warm' if warm else 'cold'} start, {'with' if cache_bytes else 'without'} cache"
            speech = load_audio(options.recording)
            report[title] = await first_and_tenth(options.model, speech, warm, cache_bytes)
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds per part")
    parser.add_argument("--recording", type=Path, help="speech, at least 6 s: also measure the first request")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model of that request")
    options = parser.parse_args(arguments)
    report = asyncio.run(run(options))
    show("Link between gateway and engine", report)
    write_json(options, report)


if __name__ == "__main__":
    main()
