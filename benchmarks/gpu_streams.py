"""How many live streams one GPU holds: Voxtral Realtime at full dimensions, random weights, the engine's own loop.

    python -m benchmarks.gpu_streams --window 1024 --kv bf16 --streams 100 200 400 --bisect --reference

N streams with random phases feed distinct audio, one 80 ms frame at a time, in real time. Streams start as old as
their windows are long, so every step reads full windows from the first second on; they join 5 ms apart, and counting
begins 2 s after the last has joined. Lag is the time from the moment a frame is complete to the moment its token is
out; a point holds if the 99th percentile of the lag is at most 80 ms. A step is what the engine's thread does between
two looks at its inbox: commands in, plan, execute, commit; what of it is not the device is the host. The audio is made
by the same thread: that counts in the lag and as feed, not as host. Random weights choose a word in nearly every frame,
where speech has blanks in four of five, so commit costs more here than in use.
Needs torch, numpy and (for --reference) transformers. Writes a table, and JSON with --json.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.random_voxtral import random_model
from benchmarks.step_cost import Bench as HostBench
from engine.core.limits import Limits
from engine.core.plan import DecodeResult, DecodeTask, StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Abort, Feed, Item, Open
from engine.models.voxtral_realtime import voxtral_mini_4b
from engine.runner.device import free_memory, require_device
from engine.runner.frames.batch import Payloads, StepRows
from engine.runner.frames.memory import GIB, plan_memory
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.server.collector import calm_collector
from engine.server.loop import EngineLoop

POSITION_NS = 80_000_000
MAX_LAG_MS = 80.0
SETTLE_S = 2
JOIN_EVERY_NS = 5_000_000
KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass
class Point:
    """One measurement. Times in milliseconds."""

    streams: int
    seconds: float
    steps: int
    batch_p50: float
    lag_p50: float
    lag_p99: float
    lag_max: float
    step_p50: float
    step_p99: float
    device_p50: float
    host_share: float
    submit_p50: float
    plan_p50: float
    commit_p50: float
    plan_commit_p99: float
    # Of all the time: making the audio, and nothing to do.
    feed_share: float
    idle_share: float
    late_frames: int

    @property
    def holds(self) -> bool:
        return self.lag_p99 <= MAX_LAG_MS and self.late_frames == 0


class Probe:
    """Stands between the loop and the runner: keeps the last plan and the time the device took for it."""

    def __init__(self, runner: VoxtralRunner) -> None:
        self._runner = runner
        self.spec, self.vocabulary, self.check_open = runner.spec, runner.vocabulary, runner.check_open
        self.tasks: list[DecodeTask] = []
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        graphs = runner._graphs
        assert graphs is not None
        replay = graphs.run

        def timed(count: int) -> None:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay(count)
            end.record()
            self._passes.append((begin, end))

        graphs.run = timed  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        self.tasks = plan.decode
        self._passes = []
        return self._runner.execute(plan)

    def device_ms(self) -> float:
        return sum(float(begin.elapsed_time(end)) for begin, end in self._passes)


class Traffic:
    """N streams, each with its own phase and its own stretch of a long noise; they join one after the other."""

    def __init__(self, streams: int, first_position: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.names = [f"stream {index}" for index in range(streams)]
        self._phases = np.sort(random.integers(0, POSITION_NS, streams)).tolist()
        # Frames that a stream misses at the beginning because it has not joined yet.
        self._missed = (random.permutation(streams) * JOIN_EVERY_NS // POSITION_NS).tolist()
        self.joined_ns = (max(self._missed) + 1) * POSITION_NS
        self._noise = (random.standard_normal(1 << 24) * 0.1).astype(np.float32)
        self._starts = random.integers(0, (1 << 24) - 2000, streams).tolist()
        self._first = first_position
        self._next = 0  # frames are numbered over all streams, in order of arrival

    def due(self, elapsed_ns: int) -> list[Feed]:
        feeds = []
        while self.next_arrival() <= elapsed_ns:
            frame, index = divmod(self._next, len(self.names))
            self._next += 1
            frame -= self._missed[index]
            if frame < 0:
                continue
            start = (self._starts[index] + frame * 1280) % ((1 << 24) - 2000)
            item = Item(
                offset=self._first + frame,
                length=1,
                sample=frame * 1280,
                key=b"%d/%d" % (index, frame),
                payload=self._noise[start : start + 2000],
            )
            feeds.append(Feed(self.names[index], [item]))
        return feeds

    def next_arrival(self) -> int:
        frame, index = divmod(self._next, len(self.names))
        return int((frame + 1) * POSITION_NS + self._phases[index])

    def arrival(self, index: int, position: int) -> int:
        return int((position - self._first + self._missed[index] + 1) * POSITION_NS + self._phases[index])


class Bench:
    def __init__(self, runner: VoxtralRunner) -> None:
        self.probe = Probe(runner)
        self._memory = runner.memory
        # Streams begin behind a full window, which is where they spend their lives.
        start = 64 + 2 * max(group.window_positions for group in runner.spec.kv_groups)
        self._spec = replace(runner.spec, prefix_positions=start)

    def measure(self, streams: int, seconds: float, seed: int = 1) -> Point:
        memory = self._memory
        limits = Limits(memory.streams, memory.cache_embeds, memory.group_pages)
        loop = EngineLoop(Scheduler(self._spec, limits, self.probe.vocabulary), self.probe)  # type: ignore[arg-type]
        traffic = Traffic(streams, self._spec.prefix_positions, seed)
        loop.submit([Open(name) for name in traffic.names], 0)
        loop.step()
        gc.collect()  # what the last point left behind
        point = self._run(loop, traffic, seconds)
        loop.submit([Abort(name) for name in traffic.names], 0)
        loop.step()
        return point

    def _run(self, loop: EngineLoop, traffic: Traffic, seconds: float) -> Point:
        slots = {loop.scheduler.streams[name].slot: index for index, name in enumerate(traffic.names)}
        lags: list[int] = []
        steps: list[Step] = []
        feed_ns = idle_ns = 0
        settled = traffic.joined_ns + SETTLE_S * 10**9
        began = time.perf_counter_ns()
        while (elapsed := time.perf_counter_ns() - began) < settled + seconds * 1e9:
            feeds = traffic.due(elapsed)
            step_began = time.perf_counter_ns()
            loop.submit(feeds, elapsed)
            submitted = time.perf_counter_ns()
            if not loop.has_work():
                time.sleep(max(0, traffic.next_arrival() - elapsed) / 1e9)
                idle_ns += (time.perf_counter_ns() - submitted) * (elapsed >= settled)
                continue
            loop.step()
            now = time.perf_counter_ns()
            if elapsed < settled:
                continue
            feed_ns += step_began - began - elapsed
            lags += [now - began - traffic.arrival(slots[task.slot], task.start) for task in self.probe.tasks]
            times = loop.meter.times
            steps.append(
                Step(
                    whole=(now - step_began) / 1e6,
                    submit=(submitted - step_began) / 1e6,
                    plan=times.plan_ns / 1e6,
                    commit=times.commit_ns / 1e6,
                    device=self.probe.device_ms(),
                    streams=len(self.probe.tasks),
                )
            )
        waiting = sum(stream.available - stream.computed for stream in loop.scheduler.streams.values())
        late = max(0, waiting - len(traffic.names))
        return _summary(
            len(traffic.names), seconds, lags, steps, late, feed_ns / 1e9 / seconds, idle_ns / 1e9 / seconds
        )


class Step(NamedTuple):
    """Milliseconds of one step."""

    whole: float
    submit: float
    plan: float
    commit: float
    device: float
    streams: int


def _summary(
    streams: int, seconds: float, lags: list[int], steps: list[Step], late: int, feed_share: float, idle_share: float
) -> Point:
    lag = np.array(lags) / 1e6
    whole, submit, plan, commit, device, batch = np.array(steps).T
    return Point(
        streams=streams,
        seconds=seconds,
        steps=len(steps),
        batch_p50=float(np.median(batch)),
        lag_p50=float(np.percentile(lag, 50)),
        lag_p99=float(np.percentile(lag, 99)),
        lag_max=float(lag.max()),
        step_p50=float(np.percentile(whole, 50)),
        step_p99=float(np.percentile(whole, 99)),
        device_p50=float(np.median(device)),
        host_share=float(1 - device.sum() / whole.sum()),
        submit_p50=float(np.median(submit)),
        plan_p50=float(np.median(plan)),
        commit_p50=float(np.median(commit)),
        plan_commit_p99=float(np.percentile(plan + commit, 99)),
        feed_share=feed_share,
        idle_share=idle_share,
        late_frames=late,
    )


def build_runner(kv: str, window: int, max_streams: int | None) -> VoxtralRunner:
    device = require_device("cuda")
    config = voxtral_mini_4b()
    settings = RunnerSettings(kv_dtype=KV_TYPES[kv], decoder_window=window, max_streams=max_streams)
    memory = plan_memory(
        config,
        free_memory(device),
        decoder_window=window,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        max_streams=max_streams,
    )
    model, vocabulary = random_model(config, settings.dtype, device)
    runner = VoxtralRunner(model, vocabulary, memory, settings)
    _fill_pages(runner)
    runner.warm_up()
    return runner


def _fill_pages(runner: VoxtralRunner) -> None:
    """Random rows: zeros could be faster than real ones."""
    for cache in runner._caches:
        for layer in cache.pages.data:
            if layer.dtype == torch.float8_e4m3fn:
                layer.view(torch.uint8).random_(0x20, 0x50)  # bit patterns of moderate values
            else:
                layer.normal_()
        if cache.pages.scales is not None:
            cache.pages.scales.fill_(0.01)


def step_times(runner: VoxtralRunner, sizes: list[int]) -> list[tuple[int, float]]:
    """Milliseconds of the recorded step alone, by batch size, all streams with full windows in pages of their own."""
    buffers, graphs = runner._buffers, runner._graphs
    assert graphs is not None
    for cache in runner._caches:
        ring = cache.layout.group.ring_pages
        cache.update_table(
            [(slot, index, slot * ring + index) for slot in range(runner.memory.streams) for index in range(ring)]
        )
    rows = []
    for size in sizes:
        position = 2 * max(group.window_positions for group in runner.spec.kv_groups)
        step = StepRows(list(range(size)), [position] * size, [0] * size, [-1] * size)
        noise = (np.random.default_rng(size).standard_normal((size, 2000)) * 0.1).astype(np.float32)
        buffers.upload(step, Payloads(list(range(1, size + 1)), list(noise)))
        times = []
        for _ in range(20):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs.run(size)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        rows.append((size, float(np.median(times))))
    return rows


def plan_commit_ms(streams: int, steps: int = 60) -> float:
    """Median milliseconds of plan and commit when that many streams have a frame in one step."""
    bench = HostBench.start(streams)
    times = []
    for _ in range(steps):
        bench.tick()
        times.append((bench.loop.meter.times.plan_ns + bench.loop.meter.times.commit_ns) / 1e6)
    return float(np.median(times))


def bisect(bench: Bench, low: int, high: int, seconds: float) -> list[Point]:
    """Points of a search for the largest N that holds, to within 2 %."""
    points = []
    while high - low > max(4, low // 50):
        middle = (low + high) // 2
        point = bench.measure(middle, seconds)
        print_point(point)
        points.append(point)
        low, high = (middle, high) if point.holds else (low, middle)
    return points


def print_point(point: Point) -> None:
    print(
        f"N={point.streams:4d} {'holds' if point.holds else 'FAILS'}  "
        f"lag p50 {point.lag_p50:6.1f} p99 {point.lag_p99:6.1f} max {point.lag_max:6.1f}  "
        f"step p50 {point.step_p50:5.1f} p99 {point.step_p99:5.1f}  device p50 {point.device_p50:5.1f}  "
        f"host {100 * point.host_share:4.1f} % (submit {point.submit_p50:.2f} plan {point.plan_p50:.2f} commit "
        f"{point.commit_p50:.2f})  plan+commit p99 {point.plan_commit_p99:4.2f}  batch {point.batch_p50:.0f}  "
        f"feed {100 * point.feed_share:.1f} %  idle {100 * point.idle_share:.1f} %  late {point.late_frames}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", choices=sorted(KV_TYPES), default="bf16")
    parser.add_argument("--window", type=int, default=1024, help="decoder window in tokens")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--streams", type=int, nargs="*", default=[100, 200, 400])
    parser.add_argument("--seconds", type=float, default=60.0, help="of steady state per point")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 32, 64, 128], help="batch sizes to time alone")
    parser.add_argument("--bisect", type=float, metavar="SECONDS", help="search the largest N, SECONDS per probe")
    parser.add_argument("--reference", action="store_true", help="time transformers on the same machine first")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"arguments": vars(arguments), "device": torch.cuda.get_device_name()}
    if arguments.reference:
        from benchmarks.transformers_voxtral import streaming_step_ms

        results["transformers_step_ms"] = streaming_step_ms()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"transformers, one stream: {results['transformers_step_ms']:.0f} ms a step", flush=True)
    began = time.perf_counter()
    runner = build_runner(arguments.kv, arguments.window, arguments.max_streams)
    free = torch.cuda.mem_get_info()[0]
    results |= {"room_for": runner.memory.streams, "free_gib": free / GIB, "start_s": time.perf_counter() - began}
    print(
        f"{arguments.kv}, window {arguments.window}: room for {runner.memory.streams} streams, "
        f"{free / GIB:.1f} GiB left, start-up {results['start_s']:.0f} s",
        flush=True,
    )
    results["steps"] = step_times(runner, [size for size in arguments.sizes if size <= runner.memory.streams])
    for size, milliseconds in results["steps"]:
        print(f"step of {size:3d} streams: {milliseconds:6.2f} ms on the device", flush=True)
    calm_collector()
    results["plan_commit_512_ms"] = plan_commit_ms(512)
    print(f"plan and commit for 512 streams at once: {results['plan_commit_512_ms']:.2f} ms", flush=True)
    bench = Bench(runner)
    points = []
    for streams in arguments.streams:
        if streams > runner.memory.streams:
            print(f"N={streams}: no room")
            continue
        points.append(bench.measure(streams, arguments.seconds))
        print_point(points[-1])
    if arguments.bisect:
        holding = [point.streams for point in points if point.holds]
        low = max(holding, default=1)
        failing = [point.streams for point in points if not point.holds and point.streams > low]
        points += bisect(bench, low, min([runner.memory.streams + 1, *failing]), arguments.bisect)
        # A probe is short; the largest number is measured again for as long as the points asked for.
        largest = max((point.streams for point in points if point.holds), default=0)
        if largest and all(point.seconds < arguments.seconds for point in points if point.streams == largest):
            points.append(bench.measure(largest, arguments.seconds))
            print_point(points[-1])
    results["points"] = [asdict(point) for point in points]
    largest = max((point.streams for point in points if point.holds and point.seconds >= arguments.seconds), default=0)
    print(f"largest N that holds for {arguments.seconds:.0f} s: {largest}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
