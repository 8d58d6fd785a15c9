"""From a model's name to an engine loop that runs it: weights, runner, speech detection, limits.

Plain data until it is called: the configuration travels to the process that runs the engine, and torch is loaded there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.scheduler import Scheduler
from engine.server.gate import GateSettings

if TYPE_CHECKING:
    from engine.server.loop import EngineLoop

DEFAULT_MODEL = "moonshine-tiny"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine. Calling it builds the loop."""

    # A name that `tickertape pull` knows, or the path of a checkpoint.
    model: str = DEFAULT_MODEL
    # auto, cpu or cuda.
    device: str = "auto"
    # Streams at once; 0 takes what the device allows.
    max_streams: int = 0
    # CPU threads for the model; 0 leaves the choice to the model's family.
    threads: int = 0
    # Frame-synchronous models: tokens the decoder looks back on, 8-bit keys and values, the guard against blank ruts.
    decoder_window: int = 1024
    kv_8bit: bool = False
    blank_guard: bool = True

    def __call__(self) -> EngineLoop:
        return build_loop(self)


def build_loop(config: EngineConfig) -> EngineLoop:
    """Load the model and what surrounds it. Raises EngineError with what to change."""
    from engine.runner.load import load_detector, load_runner
    from engine.server.loop import EngineLoop
    from engine.weights.store import resolve

    runner, limits = load_runner(resolve(config.model), config)
    scheduler = Scheduler(runner.spec, limits, runner.vocabulary)
    # A frame-synchronous model was trained to hear silence; a windowed one makes words up in it.
    gate = GateSettings() if runner.spec.rereads_window else None
    return EngineLoop(scheduler, runner, load_detector(limits.max_streams), gate)
