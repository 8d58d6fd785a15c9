"""Stands between the loop and a runner of `benchmarks.gpu_streams`, and times what the device does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engine.core.plan import DecodeResult, DecodeTask, StepPlan
from engine.runner.device_speech import DeviceSpeechDetector
from engine.runner.frames.runner import VoxtralRunner
from engine.runner.speech import SpeechDetector


class Probe:
    """Stands between the loop and the runner: keeps what was answered last, and the time the device took for it."""

    def __init__(self, runner: VoxtralRunner, detector: SpeechDetector | DeviceSpeechDetector | None) -> None:
        self._runner = runner
        self.spec, self.vocabulary, self.check_open = runner.spec, runner.vocabulary, runner.check_open
        # Of the plans that were answered since somebody looked: their tasks, and milliseconds of the device.
        self.tasks: list[DecodeTask] = []
        self.device_ms = 0.0
        self._passes: list[Callable[[], float]] = []
        _time_calls(runner._graphs or runner._passes, "run" if runner._graphs else "batch", self._passes)
        if isinstance(detector, DeviceSpeechDetector) and detector._graphs is not None:
            _time_calls(detector._graphs, "run", self._passes)

    def launch(self, plan: StepPlan) -> Callable[[], list[DecodeResult]]:
        answers = self._runner.launch(plan)
        passes = self._passes[:]
        self._passes.clear()

        def timed() -> list[DecodeResult]:
            results = answers()
            self.tasks += plan.decode
            self.device_ms += sum(milliseconds() for milliseconds in passes)
            return results

        return timed

    def look(self) -> tuple[list[DecodeTask], float]:
        seen, self.tasks, self.device_ms = (self.tasks, self.device_ms), [], 0.0
        return seen


class OneByOne:
    """A probe that hides that steps can overlap."""

    def __init__(self, probe: Probe) -> None:
        self.spec, self.vocabulary, self.check_open = probe.spec, probe.vocabulary, probe.check_open
        self._launch = probe.launch

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        return self._launch(plan)()


def _time_calls(owner: Any, name: str, passes: list[Callable[[], float]]) -> None:
    """Have every call of a method leave a function that says how many milliseconds it took."""
    call = getattr(owner, name)

    def on_the_device(count: int) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(count)
        end.record()
        passes.append(lambda: float(begin.elapsed_time(end)))

    def on_the_cpu(count: int) -> None:
        began = time.perf_counter()
        call(count)
        took = 1000 * (time.perf_counter() - began)
        passes.append(lambda: took)

    setattr(owner, name, on_the_device if torch.cuda.is_available() else on_the_cpu)
