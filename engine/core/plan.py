"""`StepPlan`: one step of the engine as data, from scheduler to runner, and `DecodeResult`, what the runner returns.

`engine/core/scheduler.py` fills a plan, `engine/server/loop.py` gives it to a runner. A plan contains integers and
audio, no tensors. A *position* is the model's time step (`ModelSpec.samples_per_position` samples). An *embedding* is
the encoded audio of one position, and a *row* is its index in the runner's array of embeddings. Row 0 is the model's
constant silence and is never written. A *slot* is an index into the runner's per-stream state: it belongs to one stream
from the plan that opens it to the plan that closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.messages import Item, Saved

SILENCE_ROW = 0


@dataclass(slots=True)
class OpenTask:
    """A slot now belongs to a new stream."""

    slot: int
    stream: str
    delay_positions: int
    options: dict[str, str]
    forced_tokens: list[int]
    # For a recovered stream: the state from `Runner.save`, and the audio that it refers to.
    saved: Saved | None = None
    saved_items: Sequence[Item] = ()
    live: bool = True


@dataclass(slots=True)
class EncodeTask:
    """Turn an item's payload into embeddings and write them into `rows`, in order."""

    stream: str
    payload: Any
    mask: list[bool] | None
    rows: list[int]


@dataclass(slots=True)
class DecodeTask:
    """Compute positions [start, end) of a stream.

    `rows[i]` is the input of position `base + i`; base == start unless the model rereads its window. `new_pages` are
    the ring-table entries (KV group, ring index, page) that changed since the stream's last task. `final`: a windowed
    model must commit all text, because no more audio belongs to it. `pause`: there is a pause at `end`; a final task
    may follow there, so the model decodes to the end now. `cut_off`: a final task ends in speech, so its last word may
    be incomplete. `pending`: the punctuation that the model left pending has not been emitted.
    """

    slot: int
    stream: str
    base: int
    start: int
    end: int
    rows: list[int]
    new_pages: list[tuple[int, int, int]]
    final: bool
    pause: bool = False
    pending: bool = False
    cut_off: bool = False


@dataclass(slots=True)
class MoveTask:
    """Copy the keys and values of a silent stream to host memory, or back.

    `pages` has the stream's pages in each group, in ring order. A stream that is brought back is computed by a later
    plan, whose task has its ring-table entries.
    """

    slot: int
    pages: list[list[int]]


@dataclass(slots=True)
class StepPlan:
    """The work of one step, in this order: close slots, park, restore, open slots, encode, decode."""

    step: int
    opened: list[OpenTask] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    encode: list[EncodeTask] = field(default_factory=list)
    decode: list[DecodeTask] = field(default_factory=list)
    # The first `live` tasks of `decode` belong to live streams, the others to uploads.
    live: int = 0
    # Positions of rebuilds: computed again, with the tokens known from another engine.
    rebuilt_positions: int = 0
    # Streams to park and streams to bring back, in this order and before anything is computed.
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
    """Result of one DecodeTask, in the order of the plan.

    Frame-synchronous models return one token per position in `tokens`. Windowed models return the committed tokens in
    `timed`, the first position that the next window needs in `keep_from`, and in `stride` the number of new positions
    for the next step (None: unchanged). `pending` is punctuation that follows this text unless the next text replaces
    it. `error` ends only this stream. `unfinished`: the runner has paused an upload, or a live stream that resumes, and
    continues it later.
    """

    tokens: Sequence[int] = ()
    timed: Sequence[TimedToken] = ()
    keep_from: int | None = None
    error: str | None = None
    unfinished: bool = False
    stride: int | None = None
    pending: Sequence[TimedToken] = ()
