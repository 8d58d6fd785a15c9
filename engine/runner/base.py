"""Interfaces between the engine loop and everything that runs a model: runners, detectors, background models.

A `Runner` computes text, a `Detector` speech probabilities. The background models compute beside the loop, on threads
or in another process: `Reviser` decodes a finished utterance again, `Embedder` makes speaker embeddings, `TurnDetector`
finds ends of turns. The engine loop knows only these interfaces and does not import torch; `engine/runner/load.py`
builds the implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, InstantMoves, Moves, StepPlan, TimedToken
from engine.messages import Open, Saved, Speech
from engine.spec import ModelSpec, Vocabulary

Samples = NDArray[np.float32]
Task = TypeVar("Task")
Result = TypeVar("Result")


def never() -> bool:
    """The `time_is_up` of a plan without a time limit."""
    return False


class Background(ABC, Generic[Task, Result]):
    """A model that computes tasks beside the engine loop, which does not wait for them."""

    # Picklable: makes this model again in the background process (engine/server/background_process.py), which serves
    # hundreds of streams. None: tasks are computed in this process.
    recipe: Callable[[], Background[Task, Result]] | None = None
    # Number of tasks that are computed at the same time.
    threads = 1
    # Consecutive failed batches. A failure to load the model is not counted.
    consecutive_failures = 0

    @abstractmethod
    def submit(self, task: Task) -> Future[Result]:
        """Queue one task."""

    def warm_up(self) -> None:
        """Before the engine serves: do the slow work that would stall its streams later."""
        return None

    def prepare(self) -> None:
        """A stream that will have tasks was opened: prepare for the first of them."""
        return None

    def close(self) -> None:
        """Stop; queued tasks are cancelled."""
        return None


@dataclass(frozen=True, slots=True)
class EndedUtterance:
    """An utterance to be decoded again, with audio before it as context."""

    # Audio of the context and of the utterance.
    samples: Samples
    # Tokens of the utterance as they were streamed.
    draft: Sequence[int]
    # The stream's options.
    options: Mapping[str, str]
    # Length of the context, and its tokens.
    context_samples: int = 0
    context_tokens: Sequence[int] = ()


class Reviser(Background[EndedUtterance, list[TimedToken]]):
    """Decodes whole utterances again, for a better final text. Positions of the tokens are counted from the first
    sample of the context. The result is empty if the model takes the utterance for noise or does not reach its end."""


class Embedder(Background[Samples, Samples]):
    """Computes the speaker embeddings of a piece of speech and of its parts: vectors of 192 numbers with norm 1."""


class TurnDetector(Background[Callable[[], Samples], float]):
    """Computes the probability that a speaker's turn is complete. A task is a function that returns the audio up to the
    possible end of the turn: the last `window_samples` of it, or all if it is shorter."""

    window_samples: int


class Runner(ABC):
    """Owns the model and the device: launches plans and collects their results.

    The attributes say what a runner can do; a subclass sets those that differ from the defaults.
    """

    spec: ModelSpec
    vocabulary: Vocabulary
    # The device computes asynchronously: the loop plans and launches the next step before it collects this one.
    overlaps_steps = False
    # `launch` may suspend uploads, and live streams whose state must be rebuilt, when the time is up.
    pauses_uploads = False
    # The state of a stream can be saved and restored (`save`); otherwise a stream is replayed with its tokens.
    saves_state = False
    # `judgement` gives language and speech of a window, if the model can detect them.
    judges_windows = False
    # Number of tokens that the guard against runs of blanks has changed.
    blank_guard_activations = 0
    # The second pass for finals; None if the model has none.
    reviser: Reviser | None = None
    # How far the copies of parked streams are.
    moves: Moves = InstantMoves()

    @abstractmethod
    def check_open(self, message: Open) -> None:
        """Raises ValueError if the model does not accept these options."""

    @abstractmethod
    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        """Start a plan. The returned function waits for its results, in the order of the plan's decode tasks.

        Plans are computed, and their results collected, in the order of their launches.

        A runner with `pauses_uploads` computes live tasks first and completely. Then it computes deferred tasks (those
        of uploads, and of live streams whose state must be rebuilt) piece by piece until `time_is_up`. It computes at
        least one piece, unless live tasks have used up the time. Deferred tasks that are not done have `unfinished`
        results, and must be in the next plan that has uploads. So have tasks of streams whose keywords are not ready.
        """

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        """Launch a plan and wait for its results."""
        return self.launch(plan)()

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The state of a slot whose window is the positions [base, end), and the first position whose audio is needed
        to restore it."""
        raise NotImplementedError("this runner does not save states")

    def judgement(self, slot: int) -> tuple[str, float | None]:
        """The language of the slot's last window, and the probability that the window has no speech. Empty and None if
        unknown."""
        return "", None

    def warm_up(self) -> None:
        """Do the slow work of a first step in advance."""
        return None

    def close(self) -> None:
        """Free the device's memory."""
        return None


class SynchronousRunner(Runner):
    """A runner whose `launch` computes the plan before it returns."""

    @abstractmethod
    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        """The results of a plan, as described at `launch`."""

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        results = self.compute(plan, time_is_up)
        return lambda: results


class Detector(ABC):
    """Computes speech probabilities for the new samples of many streams at once.

    If `launch` raises, no stream of the batch has changed, and the batch can be passed again stream by stream.
    """

    # The device computes asynchronously: results are collected after the step that is launched meanwhile.
    overlaps_steps = False

    @abstractmethod
    def open(self, stream: str, sample: int = 0) -> None:
        """Add a stream whose next sample has the number `sample`."""

    @abstractmethod
    def close(self, stream: str) -> None:
        """Remove a stream."""

    @abstractmethod
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """Start on new samples; each stream occurs at most once. The returned function waits for the probabilities of
        the frames that the samples complete, and leaves out streams that were closed meanwhile."""

    def detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        """Launch a batch and wait for its results."""
        return self.launch(batch)()

    @abstractmethod
    def pass_silence(self, stream: str, samples: int) -> Speech:
        """Add this number of samples of digital silence, as one long frame with the last probability. Nothing is
        computed, so the silence before them must be long enough that the probability does not change."""

    def save(self, stream: str) -> Saved:
        """The state that determines the next probabilities of a stream, as plain data."""
        raise NotImplementedError("this detector does not save states")

    def resume(self, stream: str, saved: Saved) -> None:
        """Restore a saved state."""
        raise NotImplementedError("this detector does not save states")
