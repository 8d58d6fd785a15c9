"""What the engine's loop asks of a model's runner and of a speech detector. Protocols only, free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, StepPlan
from engine.messages import Open, Saved, Speech
from engine.spec import ModelSpec
from engine.vocabulary import Vocabulary


class Runner(Protocol):
    """Owns the model and the accelerator. `execute` answers the plan's decode tasks in their order."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def check_open(self, message: Open) -> None:
        """Raises ValueError if the model does not take these options."""

    def execute(self, plan: StepPlan) -> list[DecodeResult]: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class GuardedRunner(Protocol):
    """A runner that keeps streams from falling silent over speech, and counts the tokens this changed."""

    blank_guard_activations: int


@runtime_checkable
class SavingRunner(Protocol):
    """A runner of a windowed model."""

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The state of a slot whose window is [base, end), and the first position whose audio that state needs."""


@runtime_checkable
class JudgingRunner(Protocol):
    """A runner whose model may say what it thinks of what it hears."""

    def judgement(self, slot: int) -> tuple[str, float | None]:
        """The language of the window that was read last, and how likely nobody speaks in it; empty and None if the
        model does not say."""


@runtime_checkable
class PausingRunner(Protocol):
    """A runner that can lay backlog aside in the middle of a task, because one such task takes long."""

    def execute_until(self, plan: StepPlan, time_is_up: Callable[[], bool]) -> list[DecodeResult]:
        """Live tasks as `execute` does. Of backlog one piece of work, and more until `time_is_up`; tasks that are not
        done by then are answered as unfinished and come again, in the same order, in the next plan with backlog."""


@runtime_checkable
class LaunchingRunner(Protocol):
    """A runner of a frame-synchronous model whose device works by itself, so that the host can run ahead of it."""

    def launch(self, plan: StepPlan) -> Callable[[], list[DecodeResult]]:
        """Returns while the plan is computed; the call that it returns waits for the answers, in the order of the
        plan's tasks. Plans are computed in the order of their launches, and answers are asked for in that order."""


class Listening(Protocol):
    """What all speech detectors have in common."""

    def open(self, stream: str, sample: int = 0) -> None: ...

    def close(self, stream: str) -> None: ...

    def pass_silence(self, stream: str, samples: int) -> Speech:
        """`samples` more of a silence in which nothing changes any more: one long frame, without listening."""


@runtime_checkable
class LaunchingDetector(Listening, Protocol):
    """Speech probabilities for the new samples of many streams at once, from a device that works by itself."""

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Callable[[], list[Speech]]:
        """Returns at once; the call that it returns waits for what was found. If it raises, nothing was heard of any
        stream in the batch: they can be sent again, one by one."""


class Detector(Listening, Protocol):
    """Speech probabilities for the new samples of many streams at once."""

    def detect(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        """If it raises, nothing was heard of any stream in the batch: they can be sent again, one by one."""

    def save(self, stream: str) -> Saved:
        """All that decides what is heard next, as plain data."""

    def resume(self, stream: str, saved: Saved) -> None:
        """Take over a saved state."""
