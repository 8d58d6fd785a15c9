"""Main functions of the engine process: builds the loop from a configuration, warms it up, and serves gateways.

A gateway starts an engine as a child process with `run_child`; `tickertape engine` and `EngineThread` call `run_engine`
in their own process. The engine runs on the calling thread, which owns the model, until it is stopped or drained.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import zmq

from engine import messages
from engine.boundary.crash_suspects import CrashRecord
from engine.boundary.items import WARM_UP_SECONDS, make_cutter, prepare
from engine.boundary.sockets import EngineSocket, LinkKeys, check_address
from engine.core.scheduler import Scheduler
from engine.errors import EngineDead, EngineError
from engine.logs import WITH_PROCESS, set_up_logging
from engine.options import EngineConfig
from engine.runner.load import load_detector, load_embedder, load_runner, load_turn_detector
from engine.server.host import DrainRequest, EngineHost
from engine.server.loop import EngineLoop, calm_collector, keep_freed_memory
from engine.server.skipped_silence import skip_settings
from engine.server.speech_gate import GateSettings
from engine.spec import ModelSpec
from engine.weights.checkpoint import fingerprint
from engine.weights.store import resolve

logger = logging.getLogger(__name__)

# Builds the loop in the process where it will run; must be picklable for another process.
Build = Callable[[], EngineLoop]

# Most streams of noise with which the cost of a step is measured at the start.
MEASURED_STREAMS = 8


def build_loop(config: EngineConfig, clock: Callable[[], int] = time.perf_counter_ns) -> EngineLoop:
    """Load the model and build the loop around it. Raises EngineError with a text that says what to change."""
    path = resolve(config.model)
    runner, limits = load_runner(path, config)
    embedder = load_embedder(runner, config)
    turn_detector = load_turn_detector(runner, config)
    options = replace(runner.spec.options, speakers=embedder is not None, turn_detector=turn_detector is not None)
    # Gateways compare fingerprints, so that engines with different weights under one name are not mixed.
    spec = replace(runner.spec, weights=fingerprint(path), options=options)
    scheduler = Scheduler(spec, limits, runner.vocabulary)
    # Windowed models invent words in silence, so a gate keeps it from them. Frame-synchronous models are trained with
    # silence; only long silence is skipped, to save work.
    gate = GateSettings() if runner.spec.rereads_window else None
    skipping = None if spec.rereads_window or not config.cut_silence_s else skip_settings(config.cut_silence_s)
    detector = load_detector(runner, limits.max_streams)
    return EngineLoop(scheduler, runner, detector, gate, clock, skipping, embedder, turn_detector)


def run_engine(
    address: str,
    build: Build,
    stop: Callable[[], bool],
    warm: bool = True,
    record: CrashRecord | None = None,
    drain: DrainRequest | None = None,
    fleet_secret: bytes | None = None,
) -> None:
    """Build, warm up, bind the address, and serve until `stop` returns True or the engine has drained.

    Raises EngineDead if the runner fails for all streams. With a fleet secret, links over tcp are encrypted.
    """
    check_address(address)
    began = time.perf_counter()
    loop = build()
    try:
        logger.info("the model is loaded after %.1f s", time.perf_counter() - began)
        if warm:
            began = time.perf_counter()
            warm_up(loop)
            logger.info("the model is warm after %.1f s", time.perf_counter() - began)
        calm_collector()
        keep_freed_memory()
        keys = None if fleet_secret is None else LinkKeys.from_secret(fleet_secret)
        with closing(EngineSocket(zmq.Context.instance(), address, keys)) as socket:
            logger.info("%s listens on %s", loop.scheduler.spec.name, socket.bound_to)
            EngineHost(loop, socket, uuid4().hex, time.monotonic, record).serve(stop, drain)
    finally:
        loop.close()


def warm_up(loop: EngineLoop) -> None:
    """Run the model's own warm-up and one short stream, so that the first session does not wait for it.

    For models that compute noise like speech, more streams then measure the cost of a step, so that admission has an
    estimate from the start. For models that skip noise the first speech has to provide it.
    """
    loop.start_background()
    loop.runner.warm_up()
    loop.warm_up_background()
    _run_noise(loop, 1)
    loop.meter.live_cost.forget()
    if not loop.silence_is_free:
        _run_noise(loop, 1)
        _run_noise(loop, min(MEASURED_STREAMS, loop.scheduler.limits.max_streams))


def _run_noise(loop: EngineLoop, streams: int) -> None:
    """Run this many short streams of noise at once to their end. Raises EngineDead if the model fails."""
    for number in range(streams):
        name = f"warm-up {number}"
        items = _noise(loop.scheduler.spec, number)
        loop.submit([messages.Open(name), messages.Feed(name, items), messages.Finish(name)], time.monotonic_ns())
    while loop.has_work():
        result = loop.step()
        for output in [] if result is None else result.outputs:
            if isinstance(output, (messages.Dead, messages.Failed)):
                raise EngineDead(f"warm-up failed: {output.message}")


def _noise(spec: ModelSpec, seed: int) -> list[messages.Item]:
    cutter = make_cutter(spec)
    noise = 0.01 * np.random.default_rng(seed).standard_normal(WARM_UP_SECONDS * spec.sample_rate, dtype=np.float32)
    items = prepare(cutter, cutter.cut(noise), spec)
    return items + prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)


def run_child(address: str, build: Build, warm: bool, record_path: Path) -> None:
    """Main function of an engine process that a gateway starts; it ends when that gateway ends."""
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    # Ctrl-C and a closed terminal signal the whole process group; the gateway decides when its engine stops.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(WITH_PROCESS)
    threading.Thread(target=_stop_with_parent, args=(stop_requested,), daemon=True).start()
    try:
        run_engine(address, build, stop_requested.is_set, warm, CrashRecord.at(record_path))
    except EngineError as error:
        # The text says what to change; a stack trace does not help.
        logger.error("%s", error)
        raise SystemExit(1) from None


def _stop_with_parent(stop_requested: threading.Event) -> None:
    """Request a stop when the gateway's process has ended."""
    gateway = multiprocessing.parent_process()
    assert gateway is not None
    gateway.join()
    stop_requested.set()
