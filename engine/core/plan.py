"""One step as data: what the scheduler asks of the runner, and what the runner answers.

Rows are places in the runner's slab of encoder output: one row per embedding. Row 0 is the model's constant silence
row and is never written. Slots are places in the runner's persistent batch: a slot belongs to one stream from the plan
that opens it to the plan that closes it.
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
    # What `Runner.save` gave for a stream that goes on here, and the audio that it refers to.
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

    `rows[i]` holds the input of position `base + i`; base == start unless the model reads its window again.
    `new_pages` are the ring-table entries (group, ring index, page) that changed since the stream's last task.
    `final` asks a windowed model to commit all it has heard: no audio that belongs to this text will follow. `pause`
    says that the speaker paused at `end`: a final task may follow there, so the model decodes to the end right now.
    `cut_off` says that a final task ends while somebody speaks: its last word may be half a word.
    `pending` says that the marks which the model left open last have not been said.
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
class StepPlan:
    step: int
    opened: list[OpenTask] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    encode: list[EncodeTask] = field(default_factory=list)
    decode: list[DecodeTask] = field(default_factory=list)
    # The first so many tasks of `decode` belong to live streams, the others to backlog.
    live: int = 0
    # Positions of live streams that are computed again because their tokens are known from another engine.
    rebuilt: int = 0


@dataclass(slots=True)
class TimedToken:
    """A committed token of a windowed model, with the positions (may be fractional) it was heard at."""

    token: int
    start: float
    end: float
    log_probability: float | None = None


@dataclass(slots=True)
class DecodeResult:
    """Answer to one DecodeTask, in the order of the plan.

    Frame-synchronous models give one token per position in `tokens`. Windowed models give the tokens they commit in
    `timed`, in `keep_from` the first position their next window still needs, and in `stride` (None: as before) the new
    positions that make the next step worth taking. `pending` are marks that will stand behind this text unless the next
    text takes their place. `error` ends this stream alone. `unfinished`: backlog is laid aside and goes on later.
    """

    tokens: Sequence[int] = ()
    timed: Sequence[TimedToken] = ()
    keep_from: int | None = None
    error: str | None = None
    unfinished: bool = False
    stride: int | None = None
    pending: Sequence[TimedToken] = ()
