"""From a configuration to an engine loop that runs it: weights, runner, speech detection, limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.core.scheduler import Scheduler
from engine.runner.load import load_detector, load_runner
from engine.server.gate import GateSettings
from engine.server.loop import EngineLoop
from engine.server.silence_cut import cut_settings
from engine.weights.fingerprint import fingerprint
from engine.weights.store import resolve


def build_loop(config: EngineConfig, clock: Callable[[], int] = time.perf_counter_ns) -> EngineLoop:
    """Load the model and what surrounds it. Raises EngineError with what to change."""
    path = resolve(config.model)
    runner, limits = load_runner(path, config)
    # Gateways compare it: two engines must not answer with different weights under one name.
    spec = replace(runner.spec, weights=fingerprint(path))
    scheduler = Scheduler(spec, limits, runner.vocabulary)
    # A windowed model makes words up in silence. A frame-synchronous one was trained to hear it; a long one is cut out.
    gate = GateSettings() if runner.spec.rereads_window else None
    cut = None if spec.rereads_window or not config.cut_silence_s else cut_settings(config.cut_silence_s)
    return EngineLoop(scheduler, runner, load_detector(runner, limits.max_streams), gate, clock, cut)
