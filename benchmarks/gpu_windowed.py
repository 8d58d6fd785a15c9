"""How many live streams of a windowed model one GPU holds: the engine's own loop, real speech, in real time.

    python -m benchmarks.gpu_windowed --random small --streams 200 400 --seconds 20 --audio speech.wav
    python -m benchmarks.gpu_windowed --model whisper-tiny.en --streams 200 400 --seconds 20 --audio speech.wav

Engine alone: no sockets, no gateway. N streams play the same recording from different places, 80 ms at a time, in real
time. Speech detection, the gate, pauses and the saving of states are switched on, as in a server. Streams join 4 ms
apart; counting begins when windows are as long as they get (`--settle`). Lag is the time from the moment an 80 ms piece
is complete to the moment at which a pass that heard it is answered; a pass comes every 0.8 s, so half of that is there
from the start. A point holds if the 95th percentile of the lag is at most 1.5 s, over all and in the second half.
With --random the weights are random and every pass is computed in full; its answers are replaced by three tokens for
each second of audio (`benchmarks/random_whisper.py`). Needs torch, numpy and silero-vad. Writes a table, and JSON with
--json. `--device cpu` runs the same code on the CPU: that checks the benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_whisper import SIZES, count_tokens, random_whisper
from benchmarks.speech_sound import speech
from benchmarks.traffic import Traffic
from engine.core.limits import Limits
from engine.core.plan import DecodeResult, DecodeTask, StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Abort, Dead, Open, StepOutput, Text
from engine.models.whisper import Whisper
from engine.runner.device import GIB, free_memory, require_device
from engine.runner.load import DEVICE_DTYPE, load_detector, windowed_on_device
from engine.runner.windowed.device_windows import DeviceWindows
from engine.runner.windowed.runner import WindowedRunner
from engine.server.collector import calm_collector
from engine.server.gate import GateSettings
from engine.server.loop import EngineLoop
from engine.weights.pretrained import load_speech_model
from engine.weights.store import resolve

MAX_LAG_S = 1.5
# So far behind nobody catches up: the rest of the point would measure nothing.
HOPELESS_LAG_S = 6.0
JOIN_EVERY_NS = 4_000_000


@dataclass
class Point:
    """One measurement. Times in milliseconds, shares of all the time."""

    streams: int
    seconds: float
    lag_p50: float
    lag_p95: float
    lag_p95_late: float
    lag_max: float
    step_p50: float
    step_p95: float
    passes_per_second: float
    windows_p50: float
    # Tokens that were decoded one by one, for each pass of a batch.
    tokens_one_by_one: float
    speech_share: float
    plan_share: float
    execute_share: float
    commit_share: float
    idle_share: float
    words_per_stream_second: float

    @property
    def holds(self) -> bool:
        return max(self.lag_p95, self.lag_p95_late) <= 1000 * MAX_LAG_S


class Watched:
    """Stands before a runner, and remembers which tasks were answered last."""

    def __init__(self, runner: WindowedRunner) -> None:
        self.spec, self.vocabulary = runner.spec, runner.vocabulary
        self.check_open, self.save = runner.check_open, runner.save
        self._runner = runner
        self.answered: list[DecodeTask] = []

    def execute_until(self, plan: StepPlan, time_is_up: Callable[[], bool]) -> list[DecodeResult]:
        results = self._runner.execute_until(plan, time_is_up)
        self.answered = plan.decode
        return results

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        return self.execute_until(plan, lambda: False)

    def warm_up(self) -> None:
        self._runner.warm_up()

    def close(self) -> None:
        self._runner.close()


class Bench:
    def __init__(self, runner: WindowedRunner, limits: Limits, settle: float, recording: Path | None) -> None:
        self._runner = runner
        self._limits = limits
        self._settle_ns = int(settle * 1e9)
        self._sound = speech(recording)
        # Of each token of a batch that was decoded alone: how many rows took part.
        self.rows_of_tokens: list[int] = []

    def measure(self, streams: int, seconds: float, seed: int = 1) -> Point:
        runner = self._runner
        detector = load_detector(runner, self._limits.max_streams)
        scheduler = Scheduler(runner.spec, self._limits, runner.vocabulary)
        watched = Watched(runner)
        loop = EngineLoop(scheduler, watched, detector, GateSettings())
        traffic = Traffic(streams, 0, seed, self._sound, runner.spec.samples_per_position, JOIN_EVERY_NS)
        loop.submit([Open(name, options={"language": "en"}) for name in traffic.names], 0)
        gc.collect()
        point = _Run(loop, watched, traffic, self.rows_of_tokens).play(seconds, self._settle_ns)
        loop.submit([Abort(name) for name in traffic.names], 0)
        while loop.has_work():
            loop.step()
        return point


class _Run:
    """One point under way."""

    def __init__(self, loop: EngineLoop, runner: Watched, traffic: Traffic, rows_of_tokens: list[int]) -> None:
        self._loop, self._runner, self._traffic = loop, runner, traffic
        self._rows_of_tokens = rows_of_tokens
        self._index = {name: index for index, name in enumerate(traffic.names)}
        # When each piece was answered and how long that took; and of each step: milliseconds and windows.
        self._lags: list[tuple[int, int]] = []
        self._steps: list[tuple[float, int]] = []
        self._parts = np.zeros(4)
        self._idle_ns = self._words = 0

    def play(self, seconds: float, settle_ns: int) -> Point:
        loop, traffic = self._loop, self._traffic
        counted_from = traffic.joined_ns + settle_ns
        end = counted_from + int(seconds * 1e9)
        began = time.perf_counter_ns()
        while (elapsed := time.perf_counter_ns() - began) < end:
            if elapsed < counted_from:
                self._forget()
            loop.submit(traffic.due(elapsed), elapsed)
            submitted = time.perf_counter_ns()
            if not loop.has_work():
                time.sleep(max(0, traffic.next_arrival() - elapsed) / 1e9)
                self._idle_ns += time.perf_counter_ns() - submitted
                continue
            self._runner.answered = []
            said = loop.step()
            self._note(said, submitted, time.perf_counter_ns(), began)
            if self._lags and self._lags[-1][1] > HOPELESS_LAG_S * 1e9:
                break
        return self._point(seconds)

    def _forget(self) -> None:
        """Nothing counts yet."""
        self._lags.clear()
        self._steps.clear()
        self._rows_of_tokens.clear()
        self._parts[:] = 0
        self._idle_ns = self._words = 0

    def _note(self, said: StepOutput | None, step_began: int, now: int, began: int) -> None:
        traffic, windows = self._traffic, 0
        for task in self._runner.answered:
            windows += 1
            index = self._index[task.stream]
            for position in range(task.start, task.end):
                self._lags.append((now - began, now - began - traffic.arrival(index, position)))
        for output in [] if said is None else said.outputs:
            if isinstance(output, Dead):
                raise RuntimeError(output.message)
            if isinstance(output, Text):
                self._words += len(output.words)
        times = self._loop.meter.times
        self._parts += (times.speech_ns, times.plan_ns, times.execute_ns, times.commit_ns)
        if windows:
            self._steps.append(((now - step_began) / 1e6, windows))

    def _point(self, seconds: float) -> Point:
        if not self._lags:
            raise RuntimeError("nobody spoke in that time: play for longer, or another recording")
        lags = np.array(self._lags, dtype=np.float64)
        late = lags[lags[:, 0] >= (lags[0, 0] + lags[-1, 0]) / 2]
        steps = np.array(self._steps or [(0.0, 0)])
        passes = float(steps[:, 1].sum())
        speech_share, plan, execute, commit = self._parts / 1e9 / seconds
        streams = len(self._traffic.names)
        return Point(
            streams=streams,
            seconds=seconds,
            lag_p50=float(np.percentile(lags[:, 1], 50)) / 1e6,
            lag_p95=float(np.percentile(lags[:, 1], 95)) / 1e6,
            lag_p95_late=float(np.percentile(late[:, 1], 95)) / 1e6,
            lag_max=float(lags[:, 1].max()) / 1e6,
            step_p50=float(np.percentile(steps[:, 0], 50)),
            step_p95=float(np.percentile(steps[:, 0], 95)),
            passes_per_second=passes / seconds,
            windows_p50=float(np.median(steps[:, 1])),
            tokens_one_by_one=len(self._rows_of_tokens) / max(1, len(steps)),
            speech_share=speech_share,
            plan_share=plan,
            execute_share=execute,
            commit_share=commit,
            idle_share=self._idle_ns / 1e9 / seconds,
            words_per_stream_second=self._words / seconds / streams,
        )


def build(options: argparse.Namespace) -> tuple[WindowedRunner, Limits]:
    device = require_device(options.device)
    dtype = DEVICE_DTYPE if device.type == "cuda" else torch.float32
    room = free_memory(device)
    if options.random:
        model, pieces = random_whisper(options.random, device)
        name = f"random whisper-{options.random}"
    else:
        model, pieces = load_speech_model(resolve(options.model))
        name = Path(options.model).name
    runner, limits = windowed_on_device(
        name, model, pieces, device, dtype, room, options.max_streams, ample=not options.short
    )
    runner.warm_up()
    return runner, limits


def next_number(points: list[Point], most: int) -> int:
    """Streams to try next: between those that held and those that did not, or what the idle time has room for."""
    held = max((point.streams for point in points if point.holds), default=0)
    failed = min((point.streams for point in points if not point.holds), default=0)
    if held and failed:
        return (held + failed) // 2
    if failed:
        return int(0.7 * failed)
    busy = 1 - next(point.idle_share for point in points if point.streams == held)
    return min(most, int(held * min(2.0, 0.95 / busy)))


def print_point(point: Point) -> None:
    shares = ("speech", "plan", "execute", "commit", "idle")
    parts = " ".join(f"{name} {getattr(point, name + '_share'):.2f}" for name in shares)
    print(
        f"engine alone, N={point.streams:4d} {'holds' if point.holds else 'FAILS'}  lag p50 {point.lag_p50:5.0f} p95 "
        f"{point.lag_p95:5.0f} (late {point.lag_p95_late:5.0f}) max {point.lag_max:5.0f} ms  step p50 "
        f"{point.step_p50:5.1f} p95 {point.step_p95:5.1f} ms  passes {point.passes_per_second:5.0f}/s  windows "
        f"{point.windows_p50:3.0f}  one by one {point.tokens_one_by_one:4.1f}  {parts}  words "
        f"{point.words_per_stream_second:.2f}/s",
        flush=True,
    )


def parsed(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--random", choices=sorted(SIZES), help="Whisper of this size with random weights")
    what.add_argument("--model", help="real weights: a name that `tickertape pull` knows, or a path")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=[100])
    parser.add_argument("--search", type=int, default=0, help="so many more points, chosen by those before")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: as in a server")
    parser.add_argument("--short", action="store_true", help="Whisper: 2 s of silence behind a window, as on a CPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="that count, for each point")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before that")
    parser.add_argument("--audio", type=Path, help="a WAV file of speech; default: voices that are made up")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = parsed(given)
    began = time.perf_counter()
    runner, limits = build(options)
    windows = runner._windows
    assert isinstance(windows, DeviceWindows)
    bench = Bench(runner, limits, options.settle, options.audio)
    model = windows._model
    count_tokens(windows, bench.rows_of_tokens, model if options.random and isinstance(model, Whisper) else None)
    memory, started = windows._memory, time.perf_counter() - began
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    print(
        f"{runner.spec.name} on {name}: room for {memory.streams} streams, batches of {memory.rows}, planned "
        f"{memory.total_bytes / GIB:.1f} GiB, {free_memory(runner.device) / GIB:.1f} GiB free, start-up "
        f"{started:.0f} s",
        flush=True,
    )
    calm_collector()
    points = []
    for streams in options.streams:
        points.append(bench.measure(streams, options.seconds))
        print_point(points[-1])
    for _ in range(options.search):
        streams = next_number(points, memory.streams)
        points.append(bench.measure(streams, options.seconds))
        print_point(points[-1])
    if options.json:
        result = {"model": runner.spec.name, "device": name, "memory": asdict(memory), "start_s": started}
        result["points"] = [asdict(point) for point in points]
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
