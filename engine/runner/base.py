"""The interfaces of model runners, revisers, speech detectors and speaker embeddings that the engine loop uses. Without
torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, StepPlan, TimedToken
from engine.messages import Open, Saved, Speech
from engine.spec import ModelSpec, Vocabulary

Samples = NDArray[np.float32]


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EndedUtterance:
    """The audio of an utterance with `start` samples before it as context, the tokens of that context (`said`), the
    tokens of the utterance as they were streamed (`draft`), and the stream's options."""

    samples: Samples
    draft: Sequence[int]
    options: Mapping[str, str]
    start: int = 0
    said: Sequence[int] = ()


class Reviser(ABC):
    """Decodes whole utterances again, for a better final text. The loop does not wait."""

    @abstractmethod
    def submit(self, utterance: EndedUtterance) -> Future[list[TimedToken]]:
        """Start on one utterance. Positions of the tokens are counted from the first of its samples; no tokens: the
        model takes it for noise."""

    def close(self) -> None:
        """Stop; utterances that wait are not computed."""
        return None


class Runner(ABC):
    """Owns the model and the accelerator: launches plans and collects their results.

    The attributes say what a runner can do; a subclass sets those that differ from the defaults.
    """

    spec: ModelSpec
    vocabulary: Vocabulary
    # The device computes asynchronously: the loop plans and launches the next step before it collects this one.
    overlaps_steps = False
    # `launch` may leave uploads unfinished when their time is up.
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
        does one piece of upload work, and more until `time_is_up`. Upload tasks not done by then have unfinished
        results and must come again, in the same order, in the next plan with uploads.
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


class Embedder(ABC):
    """Computes speaker embeddings of pieces of speech: 192 numbers, together of length 1. The loop does not wait."""

    @abstractmethod
    def submit(self, audio: Samples) -> Future[NDArray[np.float32]]:
        """Start on one piece."""

    def prepare(self) -> None:
        """A stream with labels was opened: get ready for its first piece."""
        return None

    def close(self) -> None:
        """Stop; pieces that wait are not computed."""
        return None


class TurnDetector(ABC):
    """Computes the probability that a speaker's turn is complete. The loop does not wait."""

    # How much of the audio before the question counts, in samples.
    window_samples: int

    @abstractmethod
    def submit(self, audio: Samples) -> Future[float]:
        """Start on one question: the last `window_samples` of the audio, or all that there is."""

    def prepare(self) -> None:
        """A stream that asks was opened: get ready for its first question."""
        return None

    def close(self) -> None:
        """Stop; questions that wait are not answered."""
        return None
