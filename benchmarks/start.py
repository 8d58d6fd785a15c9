"""Start-up time: how long `tickertape serve` and `tickertape transcribe` take to their first words, and which part.

    python -m benchmarks.start [--runs 5] [--model NAME] [--against FOLDER] [--json FILE]

Each run starts `tickertape serve` as a process of its own. A client tries to connect from that moment on, as a script
would that starts together with the server, and sends recorded speech at the pace of a microphone when its socket opens.
Then `tickertape transcribe` transcribes the same 10 s. A first start compiles modules and reads files into memory; it
is not counted. The figures are the best of all runs, because other programs can only make a run slower, and the median.
With `--against`, another checkout is started in turn with this one, and ratios are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.clients import PacedClient, appends_of
from benchmarks.measuring import ROOT, RunFailed, parser_of, run_command, show, until
from benchmarks.recordings import SMALL_MODEL, sample_speech
from benchmarks.servers import READY_S, Child, free_port, wait_until_ready
from benchmarks.sounds import SAMPLE_RATE, pcm16, write_wav
from engine.options import DEFAULT_MODEL
from realtime.client.wire_client import DELTA, CannotConnect

SPEECH_SECONDS = 10.0
# Before the first word of the recording; the client speaks as soon as its socket opens.
SILENCE_SECONDS = 1.1
RETRY_S = 0.05

# By group and part, seconds.
Run = dict[str, dict[str, float]]

# Run in a new process; prints seconds as JSON.
GATEWAY_IMPORTS = """
import json, time
began = time.perf_counter()
import realtime.app
print(json.dumps({"gateway_imports": time.perf_counter() - began}))
"""
ENGINE_PARTS = """
import contextlib, importlib, json, sys, time
times = [time.perf_counter()]
for early in ("fast_import", "preloaded"):  # the name in versions up to 0.2.0 is the second; older ones have neither
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("engine.server." + early)
from engine.options import EngineConfig
from engine.server.main import build_loop, warm_up
times.append(time.perf_counter())
loop = build_loop(EngineConfig(model=sys.argv[1]))
times.append(time.perf_counter())
warm_up(loop)
times.append(time.perf_counter())
loop.close()
names = ("engine_imports", "model_load", "warm_up")
print(json.dumps(dict(zip(names, (end - begin for begin, end in zip(times, times[1:]))))))
"""


def environment() -> dict[str, str]:
    """The environment of a user: Python keeps compiled modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class CaptionClient(PacedClient):
    """Speaks from the moment at which its session begins until its first words come."""

    first_at = 0.0

    def __init__(self, url: str, speech: bytes) -> None:
        super().__init__(url, takewhile(lambda _: not self.first_at, appends_of(speech)))

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == DELTA and event["delta"].strip():
            self.first_at = self.first_at or time.monotonic()

    async def _speak(self) -> None:
        await until(lambda: self.begun > 0)
        await super()._speak()


async def served(tree: Path, model: str, speech: bytes, folder: Path) -> dict[str, float]:
    """Seconds since `serve` was called: until it is ready, until a client's socket opens, until its first words."""
    port = free_port()
    command = [sys.executable, "-m", "realtime.cli", "serve", "--model", model, "--port", str(port)]
    began = time.monotonic()
    server = Child("serve", command, folder / "serve.log", cwd=tree, env=environment())
    try:
        ready = asyncio.create_task(asyncio.to_thread(_ready, server, port))
        client = await _first_caption(f"ws://127.0.0.1:{port}/v1/realtime", speech)
        return {
            "ready": await ready - began,
            "socket_open": client.began_at - began,
            "first_caption": client.first_at - began,
        }
    finally:
        await asyncio.to_thread(server.stop)


def _ready(server: Child, port: int) -> float:
    wait_until_ready(f"http://127.0.0.1:{port}", server)
    return time.monotonic()


async def _first_caption(url: str, speech: bytes) -> CaptionClient:
    async with asyncio.timeout(READY_S):
        while True:
            client = CaptionClient(url, speech)
            try:
                await client.speak(hangs_up=True)
            except CannotConnect:
                await asyncio.sleep(RETRY_S)
                continue
            if not client.first_at:
                raise RunFailed("the session ended before a caption came")
            return client


def transcribed(tree: Path, model: str, file: Path) -> dict[str, float]:
    """Seconds from `transcribe` to its first text, and to its end."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "realtime.cli", "transcribe", "--model", model, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tree,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        process.stdout.read()
    if process.returncode or not text:
        raise RunFailed(f"`tickertape transcribe` ended with {process.returncode} and no text")
    return {"first_text": first, "end": time.perf_counter() - began}


def parts(tree: Path, model: str) -> dict[str, float]:
    """Seconds of imports, load and warm-up, one after the other, in processes that do nothing else."""
    figures: dict[str, float] = {}
    for script in (GATEWAY_IMPORTS, ENGINE_PARTS):
        command = [sys.executable, "-c", script, model]
        done = subprocess.run(command, cwd=tree, env=environment(), check=True, stdout=subprocess.PIPE)
        figures |= json.loads(done.stdout)
    return figures


def one_run(tree: Path, model: str, speech: bytes, folder: Path) -> Run:
    return {
        "serve, s": asyncio.run(served(tree, model, speech, folder)),
        "transcribe of 10 s, s": transcribed(tree, model, folder / "speech.wav"),
        "parts, s": parts(tree, model),
    }


def summary(runs: list[Run], of: Callable[[list[float]], float]) -> Run:
    """The best or the median of every figure."""
    return {
        group: {part: of([run[group][part] for run in runs]) for part in figures} for group, figures in runs[0].items()
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    trees = {"here": ROOT} | ({"there": options.against.resolve()} if options.against else {})
    runs: dict[str, list[Run]] = {name: [] for name in trees}
    spoken = 3.0 if options.small else SPEECH_SECONDS
    sound = sample_speech(SILENCE_SECONDS + spoken)[round(SILENCE_SECONDS * SAMPLE_RATE) :]
    with tempfile.TemporaryDirectory(prefix="start-") as made:
        write_wav(Path(made) / "speech.wav", sound)
        for number in range(options.runs + (not options.small)):
            for name, tree in trees.items():
                figures = one_run(tree, options.model, pcm16(sound), Path(made))
                # The first start of several compiles modules and reads files into memory.
                if number or options.small:
                    runs[name].append(figures)
    best = {name: summary(of_tree, min) for name, of_tree in runs.items()}
    report: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    for name, of_tree in runs.items():
        report[name] = {"best": best[name], "median": summary(of_tree, statistics.median)}
    if options.against:
        report["ratio of the best"] = {
            group: {part: seconds / best["there"][group][part] for part, seconds in figures.items()}
            for group, figures in best["here"].items()
        }
    show(f"Start of {options.model}, {options.runs} runs", report)
    return report | {"runs": runs}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version")
    run_command(parser, arguments, measure, runs=1, model=SMALL_MODEL)


if __name__ == "__main__":
    main()
