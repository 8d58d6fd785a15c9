"""How many live streams one GPU holds: Voxtral Realtime at full dimensions, random weights, the engine's own loop.

    python -m benchmarks.gpu_streams --window 1024 --kv bf16 --streams 100 200 400 --bisect 6 --reference

Engine alone: no sockets, no gateway. N streams with random phases feed distinct pieces of speech, one 80 ms frame at a
time, in real time; the speech detector listens to all of it (`--no-detector` leaves it out). Streams start as old as
their windows are long, so every step reads full windows from the first second on; they join 5 ms apart, and counting
begins 2 s after the last has joined. Lag is the time from the moment a frame is complete to the moment its token is
out; a point holds if the 99th percentile of the lag is at most 80 ms. A step is what the engine's thread does between
two looks at its inbox: commands in, detection, plan, launch, and commit of the step before; what of it is not the
device is the host on the critical path (`--one-by-one`: steps do not overlap). The audio is made by the same thread:
that counts in the lag and as feed, not as host. The model says a word in three frames
of ten, as speech has them.
Needs torch, numpy and (for --reference) transformers. Writes a table, and JSON with --json. With --small a tiny model
runs on the CPU: that checks the benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_probe import OneByOne, Probe
from benchmarks.random_runner import KV_TYPES, build_runner
from benchmarks.random_voxtral import random_keywords
from benchmarks.speech_sound import speech
from benchmarks.step_cost import Bench as HostBench
from benchmarks.traffic import Traffic
from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.messages import Abort, Open, Speech
from engine.runner.device import GIB, free_memory
from engine.runner.frames.batch import Payloads, StepRows
from engine.runner.frames.runner import VoxtralRunner
from engine.runner.load import load_detector
from engine.server.collector import calm_collector
from engine.server.loop import EngineLoop

MAX_LAG_MS = 80.0
SETTLE_S = 2


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
    # Of all the time the device computed; of the steps what the device did not.
    device_share: float
    host_share: float
    submit_p50: float
    speech_p50: float
    plan_p50: float
    commit_p50: float
    plan_commit_p99: float
    # Of all the time: making the audio, and nothing to do.
    feed_share: float
    idle_share: float
    # Of the detector's frames, those with speech in them.
    speech_share: float
    late_frames: int

    @property
    def holds(self) -> bool:
        return self.lag_p99 <= MAX_LAG_MS and self.late_frames == 0


class Bench:
    def __init__(
        self, runner: VoxtralRunner, *, detects: bool = True, overlaps: bool = True, recording: Path | None = None
    ) -> None:
        self._detector = load_detector(runner, runner.memory.streams) if detects else None
        self.probe = Probe(runner, self._detector)
        self._overlaps = overlaps
        self._memory = runner.memory
        self._sound = speech(recording)
        self.options: dict[str, str] = {}
        # Streams begin behind a full window, which is where they spend their lives.
        start = 64 + 2 * max(group.window_positions for group in runner.spec.kv_groups)
        self._spec = replace(runner.spec, prefix_positions=start)

    def measure(self, streams: int, seconds: float, seed: int = 1) -> Point:
        memory = self._memory
        limits = Limits(memory.streams, memory.cache_embeds, memory.group_pages)
        runner: Any = self.probe if self._overlaps else OneByOne(self.probe)
        loop = EngineLoop(Scheduler(self._spec, limits, self.probe.vocabulary), runner, self._detector)
        traffic = Traffic(streams, self._spec.prefix_positions, seed, self._sound)
        loop.submit([Open(name, options=self.options) for name in traffic.names], 0)
        _finish_steps(loop)
        gc.collect()  # what the last point left behind
        self.probe.look()
        point = self._run(loop, traffic, seconds)
        loop.submit([Abort(name) for name in traffic.names], 0)
        _finish_steps(loop)
        return point

    def _run(self, loop: EngineLoop, traffic: Traffic, seconds: float) -> Point:
        slots = {loop.scheduler.streams[name].slot: index for index, name in enumerate(traffic.names)}
        lags: list[int] = []
        steps: list[Step] = []
        feed_ns = idle_ns = heard = spoken = 0
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
            said = loop.step()
            now = time.perf_counter_ns()
            tasks, device_ms = self.probe.look()
            if elapsed < settled:
                continue
            feed_ns += step_began - began - elapsed
            for output in [] if said is None else said.outputs:
                if isinstance(output, Speech):
                    heard += len(output.probabilities)
                    spoken += sum(probability >= 0.5 for probability in output.probabilities)
            lags += [now - began - traffic.arrival(slots[task.slot], task.start) for task in tasks]
            times = loop.meter.times
            steps.append(
                Step(
                    whole=(now - step_began) / 1e6,
                    submit=(submitted - step_began) / 1e6,
                    plan=times.plan_ns / 1e6,
                    commit=times.commit_ns / 1e6,
                    device=device_ms,
                    streams=len(tasks),
                    speech=times.speech_ns / 1e6,
                )
            )
        waiting = sum(stream.available - stream.computed for stream in loop.scheduler.streams.values())
        late = max(0, waiting - len(traffic.names))
        speech_share = spoken / heard if heard else 0.0
        shares = feed_ns / 1e9 / seconds, idle_ns / 1e9 / seconds, speech_share
        return _summary(len(traffic.names), seconds, lags, steps, late, *shares)


class Step(NamedTuple):
    """Milliseconds of one step."""

    whole: float
    submit: float
    plan: float
    commit: float
    device: float
    streams: int
    speech: float


def _finish_steps(loop: EngineLoop) -> None:
    while loop.has_work():
        loop.step()


def _summary(
    streams: int,
    seconds: float,
    lags: list[int],
    steps: list[Step],
    late: int,
    feed_share: float,
    idle_share: float,
    speech_share: float,
) -> Point:
    lag = np.array(lags) / 1e6
    whole, submit, plan, commit, device, batch, speech_ms = np.array(steps).T
    computing = batch > 0
    return Point(
        streams=streams,
        seconds=seconds,
        steps=len(steps),
        batch_p50=float(np.median(batch[computing])),
        lag_p50=float(np.percentile(lag, 50)),
        lag_p99=float(np.percentile(lag, 99)),
        lag_max=float(lag.max()),
        step_p50=float(np.percentile(whole, 50)),
        step_p99=float(np.percentile(whole, 99)),
        device_p50=float(np.median(device[computing])),
        device_share=float(device.sum() / 1000 / seconds),
        host_share=float(max(0.0, 1 - device.sum() / whole.sum())),
        submit_p50=float(np.median(submit)),
        speech_p50=float(np.median(speech_ms)),
        plan_p50=float(np.median(plan)),
        commit_p50=float(np.median(commit)),
        plan_commit_p99=float(np.percentile(plan + commit, 99)),
        feed_share=feed_share,
        idle_share=idle_share,
        speech_share=speech_share,
        late_frames=late,
    )


def step_times(runner: VoxtralRunner, sizes: list[int]) -> list[tuple[int, float]]:
    """Milliseconds of the recorded step alone, by batch size, all streams with full windows in pages of their own."""
    if not sizes:
        return []
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


def search(bench: Bench, points: list[Point], seconds: float, probe_seconds: float, room: int) -> list[Point]:
    """The largest number that holds, starting from what is known."""
    low = max((point.streams for point in points if point.holds), default=1)
    failing = [point.streams for point in points if not point.holds and point.streams > low]
    found = bisect(bench, low, min([room + 1, *failing]), probe_seconds)
    # A probe is short; the largest number is measured again for as long as the points asked for.
    known = [*points, *found]
    largest = max((point.streams for point in known if point.holds), default=0)
    if largest and all(point.seconds < seconds for point in known if point.streams == largest):
        found.append(bench.measure(largest, seconds))
        print_point(found[-1])
    return found


def print_point(point: Point) -> None:
    host = f"submit {point.submit_p50:.2f} speech {point.speech_p50:.2f} plan {point.plan_p50:.2f}"
    print(
        f"engine alone, N={point.streams:4d} {'holds' if point.holds else 'FAILS'}  "
        f"lag p50 {point.lag_p50:6.1f} p99 {point.lag_p99:6.1f} max {point.lag_max:6.1f}  "
        f"step p50 {point.step_p50:5.1f} p99 {point.step_p99:5.1f}  device p50 {point.device_p50:5.1f}  "
        f"busy {100 * point.device_share:4.1f} %  host {100 * point.host_share:4.1f} % ({host} commit "
        f"{point.commit_p50:.2f})  plan+commit p99 {point.plan_commit_p99:4.2f}  batch {point.batch_p50:.0f}  "
        f"feed {100 * point.feed_share:.1f} %  idle {100 * point.idle_share:.1f} %  "
        f"speech in {100 * point.speech_share:.0f} % of frames  late {point.late_frames}",
        flush=True,
    )


def parsed(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", choices=sorted(KV_TYPES), default="bf16")
    parser.add_argument("--window", type=int, default=1024, help="decoder window in tokens")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--streams", type=int, nargs="*", default=[100, 200, 400])
    parser.add_argument("--seconds", type=float, default=60.0, help="of steady state per point")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 32, 64, 128], help="batch sizes to time alone")
    parser.add_argument("--bisect", type=float, metavar="SECONDS", help="search the largest N, SECONDS per probe")
    parser.add_argument("--reference", action="store_true", help="time transformers on the same machine first")
    parser.add_argument("--no-detector", action="store_true", help="leave speech detection out")
    parser.add_argument("--one-by-one", action="store_true", help="steps that do not overlap")
    parser.add_argument("--audio", type=Path, help="a WAV file of speech; default: voices that are made up")
    parser.add_argument("--keywords", type=int, default=0, help="words that each stream expects")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, to check the benchmark itself")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    arguments = parsed(given)
    results: dict[str, Any] = {"arguments": {**vars(arguments), "audio": str(arguments.audio)}}
    results["device"] = "cpu" if arguments.small else torch.cuda.get_device_name()
    if arguments.reference:
        from benchmarks.transformers_voxtral import streaming_step_ms

        results["transformers_step_ms"] = streaming_step_ms()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"transformers, one stream: {results['transformers_step_ms']:.0f} ms a step", flush=True)
    began = time.perf_counter()
    runner = build_runner(arguments.kv, arguments.window, arguments.max_streams, arguments.small)
    free = free_memory(runner.device)
    results |= {"room_for": runner.memory.streams, "free_gib": free / GIB, "start_s": time.perf_counter() - began}
    print(
        f"{arguments.kv}, window {arguments.window}: room for {runner.memory.streams} streams, "
        f"{free / GIB:.1f} GiB left, start-up {results['start_s']:.0f} s",
        flush=True,
    )
    sizes = [] if arguments.small else [size for size in arguments.sizes if size <= runner.memory.streams]
    results["steps"] = step_times(runner, sizes)
    for size, milliseconds in results["steps"]:
        print(f"step of {size:3d} streams: {milliseconds:6.2f} ms on the device", flush=True)
    calm_collector()
    if not arguments.small:
        results["plan_commit_512_ms"] = plan_commit_ms(512)
        print(f"plan and commit for 512 streams at once: {results['plan_commit_512_ms']:.2f} ms", flush=True)
    detects, overlaps = not arguments.no_detector, not arguments.one_by_one
    bench = Bench(runner, detects=detects, overlaps=overlaps, recording=arguments.audio)
    bench.options = random_keywords(arguments.keywords)
    results["free_with_detector_gib"] = free_memory(runner.device) / GIB
    points = []
    for streams in arguments.streams:
        if streams > runner.memory.streams:
            print(f"N={streams}: no room")
            continue
        points.append(bench.measure(streams, arguments.seconds))
        print_point(points[-1])
    if arguments.bisect:
        points += search(bench, points, arguments.seconds, arguments.bisect, runner.memory.streams)
    results["points"] = [asdict(point) for point in points]
    largest = max((point.streams for point in points if point.holds and point.seconds >= arguments.seconds), default=0)
    print(f"largest N that holds for {arguments.seconds:.0f} s: {largest}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
