"""What four uploads do to a live stream, and a live stream to them: delay, lag, throughput and words, with and without.

    python -m benchmarks.uploads_beside_live [--uploads 4] [--seconds 44] [--model NAME] [--threads 1] [--wall]
                                             [--json FILE]

Plays the sample recording that `tickertape pull` provides into a real engine loop: at the pace of a microphone for the
live stream, as fast as the engine takes it for the uploads, with the same audio waiting ahead as behind a gateway.
Uploads are sent again and again for as long as the live stream speaks. Time is virtual unless `--wall` is given (see
benchmarks.live_run): what other programs take from the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.live_run import LiveRun, RunFailed, SessionRun, VirtualClock, WallClock
from benchmarks.recordings import SAMPLE_RATE, Clip, Session, load_audio
from benchmarks.scoring import percentile
from engine.boundary.preparation import make_cutter, prepare
from engine.client.client import ClientSettings
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.messages import Closed, Command, Failed, Feed, Finish, Item, Open, Output, Text
from engine.server.build import build_loop
from engine.server.collector import calm_collector
from engine.server.loop import EngineLoop
from engine.server.main import warm_up
from engine.spec import ModelSpec
from engine.weights.store import pull

SAMPLE = "sample-two-cities"
# What a gateway reads of a file at a time, about.
PIECE_SAMPLES = SAMPLE_RATE


class Upload:
    """One client that sends a file, takes its text, and sends the file again under another name."""

    def __init__(self, number: int, audio: NDArray[np.float32], spec: ModelSpec, ahead_positions: int) -> None:
        self._number = number
        # Cut beforehand: behind a gateway another process does it.
        self._pieces = _cut(audio, spec)
        self._ahead_positions = ahead_positions
        self.rounds = 0
        self.texts: list[str] = []
        self._begin()

    @property
    def name(self) -> str:
        return f"upload-{self._number}-{self.rounds}"

    def _begin(self) -> None:
        self._left = iter(self._pieces)
        self._fed = 0
        self._opened = self._finished = False
        self._said = ""

    def commands(self, computed: int) -> Iterator[Command]:
        """All that may wait in the engine, which has computed so many positions."""
        if not self._opened:
            self._opened = True
            yield Open(self.name, live=False)
        while not self._finished and self._fed - computed < self._ahead_positions:
            items = next(self._left, None)
            if items is None:
                self._finished = True
                yield Finish(self.name)
            elif items:
                self._fed = items[-1].offset + items[-1].length
                # The engine takes the audio out of the items it is given.
                yield Feed(self.name, [replace(item) for item in items])

    def take(self, output: Output) -> None:
        match output:
            case Text():
                self._said += output.delta
            case Closed():
                self.texts.append(self._said)
                self.rounds += 1
                self._begin()
            case Failed():
                raise RunFailed(output.message)


def _cut(audio: NDArray[np.float32], spec: ModelSpec) -> list[list[Item]]:
    cutter = make_cutter(spec)
    blocks = [audio[start : start + PIECE_SAMPLES] for start in range(0, len(audio), PIECE_SAMPLES)]
    pieces = [prepare(cutter, cutter.cut(block), spec) for block in blocks]
    return [*pieces, prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)]


class RunWithUploads(LiveRun):
    """A live run with uploads beside it; `heard` counts the positions of uploads that were computed."""

    def __init__(self, loop: EngineLoop, clock: VirtualClock | WallClock, uploads: list[Upload]) -> None:
        super().__init__(loop, clock, streams=1)
        self._uploads = uploads
        self._heard: dict[str, int] = defaultdict(int)

    @property
    def heard_seconds(self) -> float:
        return sum(self._heard.values()) * self._spec.samples_per_position / SAMPLE_RATE

    def run_uploads(self, seconds: float) -> None:
        """Nothing but uploads for so long."""
        while self._clock.now < seconds:
            for output in self._clock.run(self._tick):
                self._take(output, self._clock.now, lambda run: None)

    def _tick(self) -> list[Output]:
        streams = self._loop.scheduler.streams
        for upload in self._uploads:
            computed = streams[upload.name].computed if upload.name in streams else 0
            self._loop.submit(list(upload.commands(computed)), int(self._clock.now * 1e9))
        outputs = super()._tick()
        for upload in self._uploads:
            if upload.name in streams:
                self._heard[upload.name] = streams[upload.name].computed
        return outputs

    def _take(self, output: Output, now: float, progress: Any) -> None:
        for upload in self._uploads:
            if getattr(output, "stream", None) == upload.name:
                upload.take(output)
                return
        super()._take(output, now, progress)


@dataclass(slots=True)
class Report:
    live: dict[str, dict[str, float]] = field(default_factory=dict)
    uploads: dict[str, float] = field(default_factory=dict)
    words: dict[str, bool] = field(default_factory=dict)


def delays(run: SessionRun) -> dict[str, float]:
    """Seconds from the end of each word to its text, and how far the engine was behind when text came."""
    waits = [word.shown_at - word.end for word in run.emissions.shown()]
    figures = {
        "delay_p50": percentile(waits, 50),
        "delay_p95": percentile(waits, 95),
        "lag_p50": percentile(run.lags, 50),
        "lag_p95": percentile(run.lags, 95),
    }
    if None in figures.values():
        raise RunFailed("the live stream said nothing")
    return {name: value for name, value in figures.items() if value is not None}


def measure(arguments: argparse.Namespace) -> Report:
    path = pull(SAMPLE)
    path = path if path.is_file() else next(path.glob("*.wav"))
    audio = load_audio(path)[: round(arguments.seconds * SAMPLE_RATE)]
    session = Session("live", (Clip(path, "", len(audio) / SAMPLE_RATE, "clips"),), 1.0)
    config = EngineConfig(model=arguments.model, threads=arguments.threads)
    # What backlog may spend is counted on the clock that the delays are counted on.
    loop = build_loop(config, time.perf_counter_ns if arguments.wall else time.process_time_ns)
    warm_up(loop)
    calm_collector()
    spec = loop.scheduler.spec
    ahead = int(ClientSettings().ahead_seconds * spec.sample_rate / spec.samples_per_position)
    make_clock = WallClock if arguments.wall else VirtualClock

    def uploads() -> list[Upload]:
        # Each starts elsewhere in the recording: no two read the same window at the same time.
        starts = range(0, len(audio), max(1, len(audio) // arguments.uploads))
        return [Upload(n, np.roll(audio, -start), spec, ahead) for n, start in enumerate(starts[: arguments.uploads])]

    def play(beside: list[Upload]) -> tuple[SessionRun, float]:
        run = RunWithUploads(loop, make_clock(), beside)
        (live,) = run.play([session], lambda done: None)
        assert live.closed_at is not None
        for name in list(loop.scheduler.streams):
            loop.scheduler.abort(name)
        loop.step()
        return live, run.heard_seconds / live.closed_at

    alone, _ = play([])
    beside_live = uploads()
    together, throughput = play(beside_live)
    by_themselves = uploads()
    run = RunWithUploads(loop, make_clock(), by_themselves)
    run.run_uploads(arguments.seconds / 2)
    report = Report(live={"alone": delays(alone), "with uploads": delays(together)})
    report.uploads = {"alone": run.heard_seconds / (arguments.seconds / 2), "beside live": throughput}
    report.words = {
        "live": alone.emissions.text == together.emissions.text,
        "uploads": same_texts(beside_live, by_themselves),
    }
    return report


def same_texts(uploads: list[Upload], others: list[Upload]) -> bool:
    """Whether each upload said the same in both runs, as often as it came to its end in both."""
    pairs = [
        pair for one, other in zip(uploads, others, strict=True) for pair in zip(one.texts, other.texts, strict=False)
    ]
    if not pairs:
        raise RunFailed("no upload came to its end in both runs; take shorter or more of the recording")
    return all(one == other for one, other in pairs)


def show(report: Report) -> None:
    alone, beside = report.live["alone"], report.live["with uploads"]
    print(f"{'live stream':>14} {'alone':>9} {'beside':>9} {'ratio':>7}")
    for name in alone:
        print(f"{name:>14} {alone[name]:>7.2f} s {beside[name]:>7.2f} s {beside[name] / alone[name]:>7.2f}")
    print("\nUploads: seconds of audio a second, all together")
    for name, rate in report.uploads.items():
        print(f"{name:>14} {rate:>7.2f}")
    for name, same in report.words.items():
        print(f"the words of {name} are {'the same' if same else 'NOT THE SAME'} with and without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=44.0, help="of the recording")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="in real time")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    began = time.perf_counter()
    report = measure(arguments)
    show(report)
    print(f"({time.perf_counter() - began:.0f} s)")
    if arguments.json:
        figures = {"live": report.live, "uploads": report.uploads, "same_words": report.words}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
