"""What the engine's loop asks of a model runner and of a speech detector. Free of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, StepPlan
from engine.messages import Open, Saved, Speech
from engine.spec import ModelSpec, Vocabulary

Samples = NDArray[np.float32]


def never() -> bool:
    return False


class Runner(ABC):
    """Owns the model and the accelerator: launches a plan and collects its results.

    The attributes below say what a runner can do; a subclass sets those that differ from the defaults.
    """

    spec: ModelSpec
    vocabulary: Vocabulary
    # True if the device computes on its own: the loop plans and launches the next step before it collects this one.
    overlaps_steps = False
    # True if `launch` may leave uploads unfinished when their time is up.
    pauses_uploads = False
    # True if a stream can be saved and resumed as a value; otherwise it is replayed by its tokens.
    saves_state = False
    # True if `judgement` has an answer for some models of this runner.
    judges_windows = False
    # Tokens that the guard against runs of blanks has changed so far.
    blank_guard_activations = 0

    @abstractmethod
    def check_open(self, message: Open) -> None:
        """Raises ValueError if the model does not take these options."""

    @abstractmethod
    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        """Start a plan. The returned call waits for its results, in the order of the plan's decode tasks.

        Plans are computed in the order of their launches, and results are collected in that order. A runner that
        pauses uploads computes one piece of upload work, and more until `time_is_up`; upload tasks that are not done by
        then are answered as unfinished and come again, in the same order, in the next plan with uploads.
        """

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        """Launch a plan and wait for its results."""
        return self.launch(plan)()

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The state of a slot whose window is [base, end), and the first position whose audio that state needs."""
        raise NotImplementedError("this runner does not save states")

    def judgement(self, slot: int) -> tuple[str, float | None]:
        """The language of the window that was read last, and the probability that it holds no speech; empty and None
        if the model does not tell."""
        return "", None

    def warm_up(self) -> None:
        """Compute what the first step would otherwise wait for."""
        return None

    def close(self) -> None:
        """Free the memory of the device."""
        return None


class SynchronousRunner(Runner):
    """A runner that has computed a plan when `launch` returns."""

    @abstractmethod
    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        """The results of a plan, as `launch` describes them."""

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        results = self.compute(plan, time_is_up)
        return lambda: results


class Detector(ABC):
    """Speech probabilities for the new samples of many streams at once.

    If `launch` raises, no stream of the batch has changed: the streams can be sent again, one by one.
    """

    # True if the device computes on its own: results are collected after the step that was launched meanwhile.
    overlaps_steps = False

    @abstractmethod
    def open(self, stream: str, sample: int = 0) -> None: ...

    @abstractmethod
    def close(self, stream: str) -> None: ...

    @abstractmethod
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """Start on new samples, each stream once. The returned call waits for the frames they complete and leaves out
        streams that were closed meanwhile."""

    def detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        return self.launch(batch)()

    @abstractmethod
    def pass_silence(self, stream: str, samples: int) -> Speech:
        """`samples` more of a silence in which nothing changes any more: one long frame, without computing it."""

    def save(self, stream: str) -> Saved:
        """All that decides the next probabilities of a stream, as plain data."""
        raise NotImplementedError("this detector does not save states")

    def resume(self, stream: str, saved: Saved) -> None:
        """Go on from a saved state."""
        raise NotImplementedError("this detector does not save states")
