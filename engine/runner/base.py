"""Interfaces between the engine loop and everything that computes: runners, detectors, background models.

A `Runner` computes text, a `Detector` finds speech. The background models compute beside the loop, on threads or in
another process: `Reviser` decodes a finished utterance again, `Embedder` makes speaker embeddings, `TurnDetector` finds
ends of turns. The engine loop knows only these interfaces and does not import torch; `engine/runner/load.py` builds the
implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, StepPlan, TimedToken
from engine.messages import Open, Saved, Speech
from engine.spec import ModelSpec, Vocabulary

Samples = NDArray[np.float32]
Task = TypeVar("Task")
Result = TypeVar("Result")


def never() -> bool:
    """The `time_is_up` of a plan without a time limit."""
    return False


class Background(ABC, Generic[Task, Result]):
    """Computes tasks beside the engine's loop, which does not wait for them."""

    # Makes one like it in another process, for hundreds of streams (engine/server/background_process.py); None: tasks
    # are computed in this process.
    recipe: Callable[[], Background[Task, Result]] | None = None
    # Tasks that are computed at the same time.
    threads = 1
    # Batches that failed since the last one that did not; a model that could not be loaded has none.
    failed_in_a_row = 0

    @abstractmethod
    def submit(self, task: Task) -> Future[Result]:
        """Start on one task."""

    def warm_up(self) -> None:
        """Before the engine serves: do what would stop its streams later."""
        return None

    def prepare(self) -> None:
        """A stream that will bring tasks was opened: get ready for the first one."""
        return None

    def close(self) -> None:
        """Stop; tasks that wait are not computed."""
        return None


@dataclass(frozen=True, slots=True)
class EndedUtterance:
    """The audio of an utterance with `start` samples before it as context, the tokens of that context (`said`), the
    tokens of the utterance as they were streamed (`draft`), and the stream's options."""

    samples: Samples
    draft: Sequence[int]
    options: Mapping[str, str]
    start: int = 0
    said: Sequence[int] = ()


class Reviser(Background[EndedUtterance, list[TimedToken]]):
    """Decodes whole utterances again, for a better final text. Positions of the tokens are counted from the first of
    the utterance's samples; no tokens: the model takes it for noise."""


class Embedder(Background[Samples, Samples]):
    """Computes speaker embeddings of pieces of speech: 192 numbers, together of length 1."""


class TurnDetector(Background[Callable[[], Samples], float]):
    """Computes the probability that a speaker's turn is complete, from the last `window_samples` of the audio before
    the question, or from all that there is. A task returns that audio."""

    window_samples: int


class Runner(ABC):
    """Owns the model and the accelerator: launches plans and collects their results.

    The attributes say what a runner can do; a subclass sets those that differ from the defaults.
    """

    spec: ModelSpec
    vocabulary: Vocabulary
    # The device computes asynchronously: the loop plans and launches the next step before it collects this one.
    overlaps_steps = False
    # `launch` may leave uploads, and live streams that resume, unfinished when their time is up.
    pauses_uploads = False
    # A stream can be saved and resumed as a value; otherwise it is replayed with its tokens.
    saves_state = False
    # `judgement` returns something for some models of this runner.
    judges_windows = False
    # Number of tokens changed by the guard against runs of blanks.
    blank_guard_activations = 0
    # Set if the model can decode whole utterances better than live audio.
    reviser: Reviser | None = None

    @abstractmethod
    def check_open(self, message: Open) -> None:
        """Raises ValueError if the model does not accept these options."""

    @abstractmethod
    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        """Start a plan. The returned function waits for its results, in the order of the plan's decode tasks.

        Plans are computed, and their results collected, in the order of their launches. A runner with `pauses_uploads`
        does at least one piece of what live streams need not wait for, and more until `time_is_up`: uploads, and live
        streams whose state is to be rebuilt first. Tasks not done by then have unfinished results and must come again
        in the next plan with uploads. If the time is up before it begins, live streams may be all that is computed.
        """

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        """Launch a plan and wait for its results."""
        return self.launch(plan)()

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The state of a slot whose window is [base, end), and the first position whose audio the state needs."""
        raise NotImplementedError("this runner does not save states")

    def judgement(self, slot: int) -> tuple[str, float | None]:
        """The language of the last window, and the probability that it has no speech; empty and None if unknown."""
        return "", None

    def warm_up(self) -> None:
        """Do the slow work of a first step in advance."""
        return None

    def close(self) -> None:
        """Free the device's memory."""
        return None


class SynchronousRunner(Runner):
    """A runner whose `launch` returns after the plan is computed."""

    @abstractmethod
    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        """The results of a plan, as described at `launch`."""

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        results = self.compute(plan, time_is_up)
        return lambda: results


class Detector(ABC):
    """Computes speech probabilities for the new samples of many streams at once.

    If `launch` raises, no stream of the batch has changed, and the streams can be sent again one by one.
    """

    # The device computes asynchronously: results are collected after the step that is launched meanwhile.
    overlaps_steps = False

    @abstractmethod
    def open(self, stream: str, sample: int = 0) -> None: ...

    @abstractmethod
    def close(self, stream: str) -> None: ...

    @abstractmethod
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """Start on new samples; each stream occurs once. The returned function waits for the completed frames and
        leaves out streams that were closed meanwhile."""

    def detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        return self.launch(batch)()

    @abstractmethod
    def pass_silence(self, stream: str, samples: int) -> Speech:
        """Add `samples` of constant silence: one long frame, not computed."""

    def save(self, stream: str) -> Saved:
        """The state that determines the next probabilities of a stream, as plain data."""
        raise NotImplementedError("this detector does not save states")

    def resume(self, stream: str, saved: Saved) -> None:
        """Restore a saved state."""
        raise NotImplementedError("this detector does not save states")
