"""How many live streams of Voxtral Realtime one GPU holds, and how fast it rebuilds them: the engine alone.

    python -m benchmarks.engine_capacity --window 1024 --kv bf16 --streams 100 200 400 --seconds 60 --audio speech.wav
    python -m benchmarks.engine_capacity --kv fp8 --streams --rebuilt 128 --audio speech.wav

Full dimensions, with random weights that output a word in three frames of ten, as in speech, and with speech detection.
N streams with random phases play the same audio from different places, 80 ms at a time, in real time. They start with
full windows and join 5 ms apart; counting begins 2 s after the last. Lag is the time from the moment a frame of 80 ms
is complete to the moment its answer is out. A point holds if its 99th percentile is at most 80 ms.

A step is the work of the engine's thread between two reads of its inbox: commands in, detection, plan, launch, and
commit of the step before; the part without the device is the host time on the critical path. The same thread generates
the audio: that counts in the lag and as `feed`, not as host time. Needs torch, numpy and silero-vad.

With `--rebuilt`, so many streams with a window of known tokens are rebuilt, as after the loss of their engine; their
audio is sent as gateways send it, with a flush every few seconds. Times are per position: of the thread by part, of the
passes on the device, and of the passes of chunks alone.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import RunFailed, is_at_most, parser_of, percentiles, row, run_command, show
from benchmarks.random_weights import KV_TYPES, voxtral_runner
from benchmarks.sounds import Samples, speech
from engine.core.plan import DecodeResult, DecodeTask, StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Abort, Command, Dead, Feed, Flush, Item, Open, Output, TurnRule
from engine.models.voxtral_realtime import STREAMING_PAD
from engine.runner.base import never
from engine.runner.device import GIB, compute_on_one_thread, free_memory, require_device
from engine.runner.frames.runner import CHUNK_PASS_MS, Chunk, Payloads, StepRows, VoxtralRunner
from engine.runner.load import frames_limits, load_detector
from engine.runner.speech import DeviceSpeechDetector
from engine.server.loop import EngineLoop, calm_collector
from engine.server.skipped_silence import skip_settings
from engine.spec import ModelSpec

MAX_LAG_MS = 80.0
POSITION_NS = 80_000_000
JOIN_EVERY_NS, SETTLE_S = 5_000_000, 2.0
# Rebuilt streams: the default rule for ends of turns, and the length of silence that is skipped.
TURNS, SKIPPED_SILENCE_S = TurnRule(0.5, 1600, 8000), 4.0
# Samples of a frame with those around it.
PAYLOAD_SAMPLES = 2000

Point = dict[str, Any]


class Traffic:
    """N streams, each with its own phase and its own place in the audio; they join one after the other."""

    def __init__(self, streams: int, first_position: int, seed: int, sound: Samples) -> None:
        random = np.random.default_rng(seed)
        self.names = [f"stream {index}" for index in range(streams)]
        self._phases = np.sort(random.integers(0, POSITION_NS, streams)).tolist()
        # Frames at the beginning that a stream skips because it has not joined yet.
        self._missed = (random.permutation(streams) * JOIN_EVERY_NS // POSITION_NS).tolist()
        self.joined_ns = (max(self._missed) + 1) * POSITION_NS
        # Audio is played in a loop; a frame reads a little beyond its end.
        self._length = len(sound)
        self._sound = np.concatenate([sound, sound[:PAYLOAD_SAMPLES]])
        self._starts = random.integers(0, self._length, streams).tolist()
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
            start = (self._starts[index] + frame * 1280) % self._length
            payload = self._sound[start : start + PAYLOAD_SAMPLES]
            item = Item(self._first + frame, 1, frame * 1280, b"%d/%d" % (index, frame), payload)
            feeds.append(Feed(self.names[index], [item]))
        return feeds

    def next_arrival(self) -> int:
        frame, index = divmod(self._next, len(self.names))
        return int((frame + 1) * POSITION_NS + self._phases[index])

    def arrival(self, index: int, position: int) -> int:
        return int((position - self._first + self._missed[index] + 1) * POSITION_NS + self._phases[index])


class Watch:
    """Records the tasks that each step answers, and the milliseconds that the device computes for them."""

    def __init__(self, runner: VoxtralRunner, detector: object) -> None:
        self._tasks: list[DecodeTask] = []
        self._device_ms = 0.0
        # For each pass on the device its beginning and end: since the last launch, and by launch.
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launched: deque[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = deque()
        if not torch.cuda.is_available():
            return
        self._time_calls(runner._graphs or runner.passes, "run" if runner._graphs else "batch")
        self._time_calls(runner._encoder_inputs, "_encode")
        for _, graphs in runner._chunk_graphs.values():
            self._time_calls(graphs, "run")
        launch = runner.launch

        def launch_and_note(plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
            answers = launch(plan, time_is_up)
            self._launched.append(self._passes[:])
            self._passes.clear()
            return answers

        runner.launch = launch_and_note  # type: ignore[method-assign]
        if isinstance(detector, DeviceSpeechDetector):
            for buffers in detector._rounds:
                if buffers.graphs is not None:
                    self._time_calls(buffers.graphs, "run")

    def follow(self, scheduler: Scheduler) -> None:
        """Record each step when it is committed."""
        commit = scheduler.commit

        def note_and_commit(plan: StepPlan, results: list[DecodeResult]) -> list[Output]:
            self._tasks += plan.decode
            if self._launched:
                self._device_ms += sum(begin.elapsed_time(end) for begin, end in self._launched.popleft())
            return commit(plan, results)

        scheduler.commit = note_and_commit  # type: ignore[method-assign]

    def look(self) -> tuple[list[DecodeTask], float]:
        """The records since the last call."""
        noted, self._tasks, self._device_ms = (self._tasks, self._device_ms), [], 0.0
        return noted

    def _time_calls(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(work: object) -> None:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call(work)
            end.record()
            self._passes.append((begin, end))

        setattr(owner, name, timed)


class Step(NamedTuple):
    """Milliseconds of one step, and the tasks it answered."""

    whole: float
    submit: float
    speech: float
    plan: float
    commit: float
    device: float
    tasks: int


@dataclass
class Trace:
    """The measurements of one point."""

    # Milliseconds, of each frame.
    lags: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    feed_ns: int = 0
    late_frames: int = 0


class Bench:
    """An engine whose points are measured one after the other."""

    def __init__(self, runner: VoxtralRunner, options: argparse.Namespace) -> None:
        self._runner, self._limits = runner, frames_limits(runner.memory)
        self._detector = load_detector(runner, self._limits.max_streams)
        self._watch = Watch(runner, self._detector)
        self._sound = speech(options.audio)
        self._settle_s = 0.0 if options.small else SETTLE_S
        # Streams begin with a full window, as in most of their life.
        start = 64 + 2 * max(group.window_positions for group in runner.spec.kv_groups)
        self._spec = replace(runner.spec, prefix_positions=start)

    def measure(self, streams: int, seconds: float) -> Point:
        scheduler = Scheduler(self._spec, self._limits, self._runner.vocabulary)
        self._watch.follow(scheduler)
        loop = EngineLoop(scheduler, self._runner, self._detector)
        traffic = Traffic(streams, self._spec.prefix_positions, 1, self._sound)
        loop.submit([Open(name) for name in traffic.names], 0)
        finish_steps(loop)
        gc.collect()  # what the last point left behind
        self._watch.look()
        trace = self._play(loop, traffic, seconds)
        loop.submit([Abort(name) for name in traffic.names], 0)
        finish_steps(loop)
        return point_of(trace, streams, seconds)

    def rebuild(self, streams: int) -> Point:
        """Rebuild this many streams, each with a full window of known tokens."""
        spec = self._runner.spec
        scheduler = Scheduler(spec, self._limits, self._runner.vocabulary)
        self._watch.follow(scheduler)
        loop = EngineLoop(scheduler, self._runner, self._detector, skipping=skip_settings(SKIPPED_SILENCE_S))
        names = [f"rebuilt {index}" for index in range(streams)]
        tokens = [STREAMING_PAD] * max(group.window_positions for group in spec.kv_groups)
        loop.submit([Open(name, forced_tokens=tokens, turns=TURNS) for name in names], 0)
        replays = deque(deque(replay(name, len(tokens), spec, self._sound)) for name in names)
        finish_steps(loop)
        self._watch.look()
        before, submit_ns, device = copy(loop.meter.totals), 0, 0.0
        began = time.perf_counter_ns()
        while replays or loop.has_work():
            submit_began = time.perf_counter_ns()
            while replays and (loop.replay_room or not scheduler.rebuild_backlog):
                # In turn, as many as gateways would send at the same time: `POSITIONS_A_REPLAY` of
                # `engine/client/link.py`.
                turn = min(len(replays), loop.replay_positions_under_way // (4 * spec.replay_positions)) - 1
                source = replays.popleft()
                loop.submit(source.popleft(), submit_began)
                if source:
                    replays.insert(turn, source)
            submit_ns += time.perf_counter_ns() - submit_began
            loop.step()
            device += self._watch.look()[1]
        seconds = (time.perf_counter_ns() - began) / 1e9
        loop.submit([Abort(name) for name in names], 0)
        finish_steps(loop)
        after, positions = loop.meter.totals, streams * len(tokens)
        took = {
            "submit": submit_ns,
            "speech": after.speech_ns - before.speech_ns,
            "plan": after.plan_ns - before.plan_ns,
            "launch": (after.execute_ns - before.execute_ns) - (after.wait_ns - before.wait_ns),
            "commit": after.commit_ns - before.commit_ns,
            "wait": after.wait_ns - before.wait_ns,
            "device": device * 1e6,
        }
        return {
            "rebuilt": streams,
            "positions": len(tokens),
            "positions_per_second": positions / seconds,
            **{f"{part}_us": ns / 1000 / positions for part, ns in took.items()},
        }

    def _play(self, loop: EngineLoop, traffic: Traffic, seconds: float) -> Trace:
        """In real time: feed due audio, step, record. Nothing counts until all streams have settled."""
        trace, index_of = Trace(), {name: index for index, name in enumerate(traffic.names)}
        counts_from = traffic.joined_ns + self._settle_s * 1e9
        began = time.perf_counter_ns()
        while (elapsed := time.perf_counter_ns() - began) < counts_from + seconds * 1e9:
            feeds = traffic.due(elapsed)
            step_began = time.perf_counter_ns()
            loop.submit(feeds, elapsed)
            submitted = time.perf_counter_ns()
            if not loop.has_work():
                time.sleep(max(0, traffic.next_arrival() - elapsed) / 1e9)
                continue
            result = loop.step()
            now = time.perf_counter_ns()
            tasks, device_ms = self._watch.look()
            dead = [output for output in result.outputs if isinstance(output, Dead)] if result else []
            if dead:
                raise RunFailed(dead[0].message)
            if elapsed < counts_from:
                continue
            trace.feed_ns += step_began - began - elapsed
            for task in tasks:
                for position in range(task.start, task.end):
                    trace.lags.append((now - began - traffic.arrival(index_of[task.stream], position)) / 1e6)
            times = loop.meter.times
            spent = (now - step_began, submitted - step_began, times.speech_ns, times.plan_ns, times.commit_ns)
            trace.steps.append(Step(*[each / 1e6 for each in spent], device=device_ms, tasks=len(tasks)))
        waiting = sum(stream.available - stream.computed for stream in loop.scheduler.streams.values())
        trace.late_frames = max(0, waiting - len(traffic.names))
        return trace


def replay(name: str, positions: int, spec: ModelSpec, sound: Samples) -> Iterator[list[Command]]:
    """The commands that rebuild a stream, in the pieces in which a gateway sends them."""
    step = spec.samples_per_position
    around = spec.look_back_samples + spec.look_ahead_samples
    offset = int(name.split()[-1]) * spec.sample_rate
    sound = np.resize(np.roll(sound, -offset), around + positions * step)
    piece, part = spec.replay_positions, spec.replay_part
    for number, start in enumerate(range(0, positions, piece)):
        items = []
        for first in range(start, min(start + piece, positions), part):
            length = min(part, positions - first)
            payload = sound[first * step : (first + length) * step + around]
            key = f"{name}/{first}".encode()
            items.append(Item(spec.prefix_positions + first, length, first * step, key, payload))
        yield [Feed(name, items), Flush(name, number + 1, pause=start * step)]


def finish_steps(loop: EngineLoop) -> None:
    while loop.has_work():
        loop.step()


def point_of(trace: Trace, streams: int, seconds: float) -> Point:
    """Times in milliseconds; shares are of all the time, but for the host's, which is what the device did not do of the
    steps."""
    if not trace.lags:
        raise RunFailed("no speech in that time: play for longer, or another recording")
    steps, answering = trace.steps, [step for step in trace.steps if step.tasks]
    device, whole = sum(step.device for step in steps), sum(step.whole for step in steps)
    lags = percentiles("lag", trace.lags, 50, 95, 99, 100)
    point = {
        "streams": streams,
        "seconds": seconds,
        "holds": is_at_most(lags["lag_p99"], MAX_LAG_MS) and trace.late_frames == 0,
        **lags,
        **percentiles("step", [step.whole for step in steps], 50, 95, 99),
        **percentiles("device", [step.device for step in answering], 50),
        "device_share": device / 1000 / seconds,
        "host_share": max(0.0, 1 - device / whole),
        "feed_share": trace.feed_ns / 1e9 / seconds,
        "late_frames": trace.late_frames,
        "passes_per_second": sum(step.tasks for step in steps) / seconds,
    }
    for part in ("submit", "speech", "plan", "commit"):
        point |= percentiles(part, [getattr(step, part) for step in steps], 50)
    return point


# Parts of Voxtral's step alone


def device_ms(work: Callable[[], object], times: int) -> float:
    """Median milliseconds by the device's own clock."""
    took = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return float(np.median(took))


def fill_tables(runner: VoxtralRunner) -> None:
    """Give each stream pages of its own for a full window, so that passes read as much memory as in use."""
    for cache in runner._caches:
        ring = cache.layout.group.ring_pages
        cache.update_table(
            [(slot, index, slot * ring + index) for slot in range(runner.memory.streams) for index in range(ring)]
        )


def step_times(runner: VoxtralRunner, sizes: list[int]) -> list[tuple[int, float]]:
    """Milliseconds of the recorded step alone, by batch size, all streams with full windows in pages of their own."""
    if not sizes:
        return []
    buffers, graphs = runner._buffers, runner._graphs
    assert graphs is not None
    fill_tables(runner)
    rows = []
    for size in sizes:
        position = 2 * max(group.window_positions for group in runner.spec.kv_groups)
        step = StepRows(list(range(size)), [position] * size, [0] * size, [-1] * size)
        noise = (np.random.default_rng(size).standard_normal((size, 2000)) * 0.1).astype(np.float32)
        buffers.upload(step, Payloads(list(range(1, size + 1)), list(noise)))
        rows.append((size, device_ms(partial(graphs.run, size), 20)))
    return rows


def chunk_times(runner: VoxtralRunner, sizes: list[int]) -> list[tuple[int, float]]:
    """Milliseconds of a recorded pass of chunks of known tokens alone, by the number of chunks, all streams with full
    windows in pages of their own."""
    fill_tables(runner)
    length = runner._chunk_sizes[0]
    buffers, graphs = runner._chunk_graphs[length]
    position = 2 * max(group.window_positions for group in runner.spec.kv_groups)
    rows = []
    for size in sizes:
        buffers.upload([Chunk(slot, position, [0] * length, [STREAMING_PAD] * length, 6) for slot in range(size)])
        rows.append((size, device_ms(partial(graphs.run, size), 10)))
    return rows


# The command


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.small:
        compute_on_one_thread()
    began = time.perf_counter()
    runner = voxtral_runner(options.kv, options.window, options.max_streams, options.small)
    room = runner.memory.streams
    report: dict[str, Any] = {
        "device": "cpu" if options.small else torch.cuda.get_device_name(),
        "model": runner.spec.name,
        "room_for": room,
        "start_s": time.perf_counter() - began,
        "steps": step_times(runner, [size for size in options.sizes if size <= room]),
        "chunks": chunk_times(runner, [size for size in CHUNK_PASS_MS if options.rebuilt and size <= room])
        if runner._chunk_graphs
        else [],
    }
    calm_collector()
    bench = Bench(runner, options)
    report["free_gib"] = free_memory(require_device("cpu" if options.small else "cuda")) / GIB
    show("Engine alone", report)
    points: list[Point] = []
    for streams in options.streams:
        if streams <= room:
            points.append(bench.measure(streams, options.seconds))
            print(f"engine alone, {row(points[-1])}", flush=True)
    for streams in options.rebuilt:
        if streams <= room:
            points.append(bench.rebuild(streams))
            print(f"rebuild alone, {row(points[-1])}", flush=True)
    held = [point["streams"] for point in points if point.get("holds")]
    print(f"largest N that holds for {options.seconds:.0f} s: {max(held, default=0)}")
    return {"arguments": vars(options), **report, "points": points}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[100, 200, 400])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds that count, for each point")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--audio", type=Path, help="a WAV file of speech; default: made-up voices")
    parser.add_argument("--kv", choices=sorted(KV_TYPES), default="bf16", help="keys and values")
    parser.add_argument("--window", type=int, default=1024, help="decoder window in tokens")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 32, 64, 128], help="steps alone, by batch size")
    parser.add_argument("--rebuilt", type=int, nargs="*", default=[], help="streams to rebuild")
    run_command(parser, arguments, measure, streams=[2], seconds=3.0, sizes=[], max_streams=2, rebuilt=[2])


if __name__ == "__main__":
    main()
