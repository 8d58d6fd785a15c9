"""An engine process with a Voxtral Realtime of random weights: what `tickertape engine` runs but for the weights.

    python -m benchmarks.random_engine --listen ipc:///tmp/engine --kv fp8 --max-streams 800
    python -m benchmarks.random_engine --listen ipc:///tmp/engine --whisper small

With --whisper it is Whisper of that size, which says what a script has (`benchmarks.random_whisper`).
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from functools import partial

import torch

from benchmarks.random_runner import KV_TYPES, build_runner
from benchmarks.random_whisper import SIZES, count_tokens, random_whisper
from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.runner.device import free_memory, require_device
from engine.runner.load import DEVICE_DTYPE, load_detector, windowed_on_device
from engine.runner.windowed.device_windows import DeviceWindows
from engine.server.gate import GateSettings
from engine.server.loop import EngineLoop
from engine.server.main import run_engine
from engine.server.silence_cut import cut_settings


def build(kv: str, window: int, max_streams: int | None, small: bool) -> EngineLoop:
    runner = build_runner(kv, window, max_streams, small)
    memory, streams = runner.memory, runner.memory.streams
    limits = Limits(streams, memory.cache_embeds, memory.group_pages, step_positions=streams, step_embeds=streams)
    scheduler = Scheduler(runner.spec, limits, runner.vocabulary)
    cut = cut_settings(EngineConfig().cut_silence_s)
    return EngineLoop(scheduler, runner, load_detector(runner, streams), cut=cut)


def build_whisper(size: str, max_streams: int | None, small: bool) -> EngineLoop:
    device = require_device("cpu" if small else "cuda")
    dtype = DEVICE_DTYPE if device.type == "cuda" else torch.float32
    model, pieces = random_whisper(size, device)
    runner, limits = windowed_on_device(
        f"whisper-{size}", model, pieces, device, dtype, free_memory(device), max_streams
    )
    windows = runner._windows
    assert isinstance(windows, DeviceWindows)
    count_tokens(windows, [], model)
    scheduler = Scheduler(runner.spec, limits, runner.vocabulary)
    return EngineLoop(scheduler, runner, load_detector(runner, limits.max_streams), GateSettings())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True, help="address to listen on")
    parser.add_argument("--kv", choices=sorted(KV_TYPES), default="fp8")
    parser.add_argument("--window", type=int, default=1024, help="decoder window in tokens")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--whisper", choices=sorted(SIZES), help="Whisper of this size instead")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    asked_to_stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_stop.set())
    if options.whisper:
        make = partial(build_whisper, options.whisper, options.max_streams, options.small)
    else:
        make = partial(build, options.kv, options.window, options.max_streams, options.small)
    run_engine(options.listen, make, asked_to_stop.is_set)


if __name__ == "__main__":
    main()
