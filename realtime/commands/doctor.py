"""`tickertape doctor`: checks installed packages and memory, and measures how many streams this machine can serve.

The measurement plays speech in real time into a few streams of an engine in this process and reads the engine's load.
It uses no running server; `tickertape bench` measures one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.host_memory import available_memory, needed_memory
from realtime.commands.terminal import FAILED, OK, out
from realtime.commands.transcription_options import add_model_options

if TYPE_CHECKING:
    from engine.client.client import EngineClient
    from engine.client.stream import EngineStream
    from realtime.session.events import Samples

EPILOG = """\
Examples:
  tickertape doctor
  tickertape doctor --model whisper-base.en
  tickertape doctor --no-measure      do not load the model

The number of streams is measured: speech is played into the engine in real time for a few seconds.
Exit code 1 if something that the server needs is missing.
"""
PACKAGES = (
    "torch",
    "torchaudio",
    "transformers",
    "numpy",
    "av",
    "soxr",
    "silero-vad",
    "websockets",
    "uvicorn",
    "pyzmq",
)
# Streams that are played at the same time.
STREAMS = 2
# Seconds before the measurement: at first, streams have less than a full window of audio, and cost less.
WARM_UP_S = 4.0
MEASURED_S = 8.0
# The load (0 to 1) above which streams would wait for each other.
USABLE_LOAD = 0.8


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine: packages, memory, number of streams",
        description="Check this machine: installed packages, memory for the model, number of streams to expect.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-measure", action="store_true", help="do not load the model to measure its speed")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from engine.options import cache_folder
    from engine.weights.store import available_models
    from realtime.commands.pull import SAMPLE, model_name

    report = Report()
    _check_machine(report)
    _check_packages(report)
    name = model_name(options.model)
    weights = Path(name) if name not in available_models() else cache_folder() / name
    if not weights.exists():
        fix = f"run `tickertape pull {name}`" if name in available_models() else "see `tickertape models` for names"
        report.bad("model", f"{name} is not on this machine; {fix}")
        return report.close()
    size = sum(
        file.stat().st_size for file in ([weights] if weights.is_file() else weights.iterdir()) if file.is_file()
    )
    report.good("model", f"{name} is on this machine: {size / 1e6:.0f} MB in {weights}")
    _check_memory(report, weights)
    if options.no_measure:
        return report.close()
    recording = cache_folder() / SAMPLE
    if not recording.exists():
        report.good("streams", f"not measured, because the recording to play is missing: `tickertape pull {SAMPLE}`")
        return report.close()
    sound = next(file for file in recording.iterdir() if file.suffix == ".wav")
    asyncio.run(_measure(report, options, sound))
    return report.close()


class Report:
    """Prints the findings and counts the problems."""

    def __init__(self) -> None:
        self._problems = 0

    def good(self, what: str, text: str) -> None:
        out(f"  ok   {what:10} {text}")

    def bad(self, what: str, text: str) -> None:
        self._problems += 1
        out(f"  !!   {what:10} {text}")

    def close(self) -> int:
        """Print a summary; returns the exit code of the command."""
        if not self._problems:
            out("No problems found: `tickertape serve` can start.")
            return OK
        out(f"{_count(self._problems, 'problem')} found; a line with !! says what to do.")
        return FAILED


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _check_machine(report: Report) -> None:
    report.good("python", platform.python_version())
    cores = _count(usable_cores(), "CPU core")
    report.good("machine", f"{platform.system()} on {platform.machine()}; this process may use {cores}")
    gpus = graphics_cards()
    report.good("gpu", "; ".join(gpus) if gpus else "no NVIDIA GPU is available; models run on the CPU")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def graphics_cards() -> list[str]:
    """Name, memory and free memory of each GPU, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def _check_packages(report: Report) -> None:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            report.bad("packages", f"{package} is not installed; install tickertape again")
    report.good("packages", ", ".join(found))
    for problem in version_conflicts():
        report.bad("packages", problem)


def version_conflicts() -> list[str]:
    """A sentence for every installed package of another version than the one that Tickertape requires (torch)."""
    from importlib.metadata import PackageNotFoundError, requires, version

    problems = []
    for line in requires("tickertape") or ():
        pinned = re.fullmatch(r"([\w-]+)==([\d.]+)", line)
        if pinned is None:
            continue
        package, required = pinned.groups()
        with suppress(PackageNotFoundError):
            # The version of a build ends with its name: 2.10.0+cpu.
            if (found := version(package)).partition("+")[0] != required:
                problems.append(
                    f"{package} {found} is installed, and this version of Tickertape needs {required}: "
                    f"run `pip install {package}=={required}` in its environment, or install tickertape again"
                )
    return problems


def _check_memory(report: Report, weights: Path) -> None:
    available = available_memory()
    if available is None:
        report.good("memory", "not checked: this system does not report how much memory is free")
        return
    needed = needed_memory(weights)
    text = f"{available / 2**30:.1f} GiB are free, and the model needs about {needed / 2**30:.1f} GiB on the CPU"
    if needed <= available:
        twice = "and fits too" if 2 * needed <= available else "and does not fit"
        report.good("memory", f"{text}; a spare engine (model.spare) needs the same again {twice}")
    else:
        report.bad("memory", f"{text}; choose a smaller model with --model")


def resident_memory() -> int | None:
    """Bytes of memory that this process uses; None if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_gpu_memory() -> int:
    """Free bytes on all GPUs together; 0 without a GPU."""
    return sum(int(card.split(",")[-1].split()[0]) * 2**20 for card in graphics_cards())


async def _measure(report: Report, options: argparse.Namespace, sound: Path) -> None:
    from engine.errors import EngineError
    from realtime.commands.file_transcription import local_engine

    out("  ..   streams    loading the model and transcribing some seconds of speech, to measure its speed")
    before, free_before = resident_memory(), free_gpu_memory()
    try:
        async with local_engine(options.model, options.device) as client:
            measured = await measure_load(client, sound)
            after, free_after = resident_memory(), free_gpu_memory()
    except EngineError as error:
        report.bad("engine", " ".join(str(error).split()))
        return
    report.good("engine", f"{client.spec.name} works; it transcribed {measured.text[:60]!r}")
    if before is not None and after is not None:
        used = f"the engine with {measured.streams} streams uses {max(after - before, 0) / 2**20:.0f} MiB"
        on_gpu = (free_before - free_after) / 2**20
        report.good("memory", f"{used}, and {on_gpu:.0f} MiB on the GPU" if on_gpu >= 1 else used)
    cost = (
        f"{measured.streams} streams of continuous speech kept the engine busy {measured.load:.0%} of the time, with "
        f"{measured.cpu_share:.2f} CPU cores for each"
    )
    if measured.expected < 1:
        report.bad("streams", f"too slow for live captions: {cost}; choose a smaller model with --model")
    else:
        report.good("streams", f"expect about {_count(measured.expected, 'live stream')} at once: {cost}")
        report.good("", "`tickertape bench` measures that with a whole server")


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The engine's load with `streams` streams of continuous speech, and the text of the first one."""

    streams: int
    load: float
    text: str
    # CPU seconds of this process per second of speech and stream.
    cpu_share: float = 0.0

    @property
    def expected(self) -> int:
        """Streams that this machine can serve. An underestimate, because streams share steps."""
        return int(USABLE_LOAD * self.streams / max(self.load, 1e-3))


async def measure_load(client: EngineClient, sound: Path) -> MeasuredLoad:
    """Play the recording into `STREAMS` streams and measure the engine's load."""
    import numpy as np

    from realtime.commands.file_transcription import read_audio

    audio = np.concatenate(list(read_audio(sound)))
    texts = [""] * STREAMS
    streams = [await client.open(f"measure-{number}") for number in range(STREAMS)]
    # Different audio for each stream, so that no result is shared through caches.
    tasks = [
        asyncio.create_task(_play(stream, np.roll(audio, -number * len(audio) // STREAMS)))
        for number, stream in enumerate(streams)
    ]
    tasks += [asyncio.create_task(_listen(stream, texts, number)) for number, stream in enumerate(streams)]
    try:
        await asyncio.sleep(WARM_UP_S)
        loads = []
        cpu = time.process_time()
        for _ in range(round(MEASURED_S)):
            await asyncio.sleep(1.0)
            loads.append(client.capacity().load)
        cpu = time.process_time() - cpu
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.abort()
    return MeasuredLoad(STREAMS, sum(loads) / len(loads), texts[0].strip(), cpu / MEASURED_S / STREAMS)


async def _play(stream: EngineStream, audio: Samples) -> None:
    """Feed the audio in real time."""
    from audio.formats import MODEL_RATE
    from realtime.commands.captions import CHUNK_SAMPLES

    loop = asyncio.get_running_loop()
    began = loop.time()
    for start in range(0, len(audio), CHUNK_SAMPLES):
        chunk = audio[start : start + CHUNK_SAMPLES]
        await asyncio.sleep(max(0.0, began + (start + len(chunk)) / MODEL_RATE - loop.time()))
        await stream.feed(chunk)


async def _listen(stream: EngineStream, texts: list[str], number: int) -> None:
    from engine import messages

    async for output in stream:
        if isinstance(output, messages.Text):
            texts[number] += output.delta
