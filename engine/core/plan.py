"""`StepPlan`: the work of one step, given by the scheduler to the runner, and `DecodeResult`, what the runner returns.

The scheduler makes a plan (`engine/core/scheduler.py`), and the engine loop gives it to a runner
(`engine/server/loop.py`). A plan contains no tensors. A *position* is the model's time step
(`ModelSpec.samples_per_position` samples). The runner has an array with the prepared encoder input of positions: their
samples (windowed models) or the output of the encoder's convolutions (Voxtral Realtime). A *row* is an index into this
array, one position each. Row 0 is the model's silence and is never written by a plan. A *slot* is an index into the
runner's state of streams: it belongs to one stream from the plan that opens it to the plan that closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.messages import Item, Saved

SILENCE_ROW = 0


@dataclass(slots=True)
class OpenTask:
    """From this plan on, the slot belongs to a new stream."""

    slot: int
    stream: str
    delay_positions: int
    options: dict[str, str]
    # Tokens of the first positions, known from the stream's former engine: they are used instead of decoded ones.
    forced_tokens: list[int]
    # For a recovered stream of a windowed model: the state from `Runner.save`, and the audio that it refers to.
    saved: Saved | None = None
    saved_items: Sequence[Item] = ()
    live: bool = True


@dataclass(slots=True)
class EncodeTask:
    """Prepare an item's audio for the encoder, and write it into `rows`, one position each, in order."""

    stream: str
    # The item's samples or features, as in `Item.payload`.
    payload: Any
    # Which positions of the payload have a row; None: all.
    mask: list[bool] | None
    rows: list[int]
    # The position after the item.
    end: int = 0


@dataclass(slots=True)
class DecodeTask:
    """Compute positions [start, end) of a stream; a model that rereads its window computes [base, end) again."""

    slot: int
    stream: str
    # First position of the window; equal to `start` unless the model rereads its window.
    base: int
    start: int
    end: int
    # `rows[i]` is the input of position `base + i`.
    rows: list[int]
    # Entries (KV group, ring index, page) of the stream's ring tables that changed since its last task.
    new_pages: list[tuple[int, int, int]]
    # A windowed model must commit all text, because no later audio belongs to it.
    final: bool
    # There is a pause at `end`. A final task may follow there, so the model decodes up to the end now.
    pause: bool = False
    # The stream has punctuation (`DecodeResult.pending`) that was not emitted yet.
    pending: bool = False
    # A final task ends in speech, so its last word may be incomplete.
    cut_off: bool = False


@dataclass(slots=True)
class MoveTask:
    """Copy the keys and values of a silent stream to host memory (park), or back to the device (restore).

    After a restore, the ring-table entries come with the stream's `DecodeTask` in a later plan.
    """

    slot: int
    # The stream's pages in each KV group, in ring order.
    pages: list[list[int]]


class Moves(Protocol):
    """How far the moves of earlier plans are. The runner copies pages while the device computes."""

    def is_restored(self, slot: int) -> bool:
        """Whether the pages of this slot have arrived on the device, so that the next plan can compute the stream."""

    def parking_room(self) -> int:
        """How many streams the next plan may park."""


class InstantMoves:
    """Moves that are over when the next plan is made."""

    def is_restored(self, slot: int) -> bool:
        return True

    def parking_room(self) -> int:
        return 1 << 20


@dataclass(slots=True)
class StepPlan:
    """The work of one step. It is done in this order: `closed`, `parked`, `restored`, `opened`, `encode`, `decode`."""

    # Number of the step, from 1.
    step: int
    # Slots that a stream now gets, and slots whose stream has ended.
    opened: list[OpenTask] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    encode: list[EncodeTask] = field(default_factory=list)
    decode: list[DecodeTask] = field(default_factory=list)
    # Number of tasks in `decode` that belong to live streams; they come first, then those of uploads.
    live: int = 0
    # Number of positions in `decode` that are rebuilt: computed again, with the tokens known from another engine.
    rebuilt_positions: int = 0
    # With `Limits.plans_ahead`: the task that will follow a final one of an upload. The runner may encode its audio.
    ahead: list[DecodeTask] = field(default_factory=list)
    # Streams to park and streams to bring back to the device.
    parked: list[MoveTask] = field(default_factory=list)
    restored: list[MoveTask] = field(default_factory=list)


@dataclass(slots=True)
class TimedToken:
    """A committed token of a windowed model, and the (fractional) positions of its audio."""

    token: int
    start: float
    end: float
    log_probability: float | None = None


@dataclass(slots=True)
class DecodeResult:
    """Result of one DecodeTask, in the order of the plan."""

    # Frame-synchronous models: one token per position.
    tokens: Sequence[int] = ()
    # Windowed models: the committed tokens.
    timed: Sequence[TimedToken] = ()
    # Windowed models: the first position that the next window needs; None: unchanged.
    keep_from: int | None = None
    # The text of an error that ends this stream alone.
    error: str | None = None
    # The runner has suspended the task: of an upload, of a live stream that is being recovered, or of a stream whose
    # keywords are still being prepared. The plan of a later step must contain the task again.
    unfinished: bool = False
    # Windowed models: number of new positions for the stream's next step; None: unchanged.
    stride: int | None = None
    # Windowed models: punctuation that follows this text unless the next text replaces it.
    pending: Sequence[TimedToken] = ()
