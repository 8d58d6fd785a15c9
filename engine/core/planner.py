"""Fills the plan of one step (`Planner`): which positions each stream computes, and which items are encoded for them.

The scheduler makes one planner per step and gives it the queues of streams, the most urgent first. A step has two
budgets: positions to compute and embeddings to encode (`Limits`). A stream that does not fit into the rest of a budget
waits unchanged for the next step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.core.caches import EncoderCache
from engine.core.plan import SILENCE_ROW, DecodeTask, EncodeTask, StepPlan
from engine.core.stream import Stream
from engine.messages import Item
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources of one engine, and the budgets of one step."""

    max_streams: int
    cache_embeds: int
    group_pages: tuple[int, ...] = ()
    step_positions: int = 1024
    step_embeds: int = 1024
    # Positions of rebuilds in a step that has nothing else to do.
    rebuild_positions: int = 1024
    # How many of `max_streams` can have their pages on the device at a time; the others are silent and parked in host
    # memory. None: all of them. `moves`: the most streams parked, and the most brought back, in one step.
    resident_streams: int | None = None
    moves: int = 4


def largest_item(spec: ModelSpec, limits: Limits) -> int:
    """Return the size, in embeddings, of the largest item that always fits into a stream's reserve and one step.

    Raises ValueError if a model could never run within these limits.
    """
    if len(limits.group_pages) != len(spec.kv_groups):
        raise ValueError(f"{len(spec.kv_groups)} groups of pages are needed, {len(limits.group_pages)} were given")
    needed = spec.window_for(live=False) if spec.rereads_window else 1
    if limits.step_positions < needed:
        raise ValueError(f"a step of this model reads {needed} positions; raise step_positions to at least that")
    if limits.step_embeds < 1:
        raise ValueError("a step must be able to encode something; raise step_embeds")
    if not spec.rereads_window:
        return min(spec.embeds_per_stream, limits.step_embeds)
    slack = spec.embeds_per_stream - spec.window_positions
    if slack < 0:
        raise ValueError(f"embeds_per_stream must be at least the window of {spec.window_positions} positions")
    # Items may extend beyond the window at both ends.
    return min(slack // 2 + 1, limits.step_embeds)


# A live stream that is fewer strides behind than this takes every stride. With a larger number words stay the same on
# a busier machine; with a smaller one a late stream catches up sooner.
STRIDES_IN_TIME = 5
# Streams rebuilt in one step: more of them do not use the device better, and the first are ready later.
REBUILT_TOGETHER = 16
# (stream id, error that is no StreamError): the loop ends these streams.
UnexpectedErrors = list[tuple[str, Exception]]
_NO_PAGES: list[tuple[int, int, int]] = []


class Planner:
    """Fills one step's plan: `add_all` for each queue, the most urgent streams first."""

    def __init__(
        self, spec: ModelSpec, limits: Limits, cache: EncoderCache, plan: StepPlan, unexpected_errors: UnexpectedErrors
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._decode = plan.decode
        self._encode = plan.encode
        self._unexpected_errors = unexpected_errors
        self._positions = limits.step_positions
        self._embeds = limits.step_embeds
        self._one_frame = not spec.rereads_window and spec.step_positions == 1
        # Positions per step of a rebuild, and the fewest that are efficient.
        self._replay_positions = spec.replay_positions
        self._replay_part = max(1, spec.replay_positions // 4)
        # Late recovered streams, which may compute `_catch_up_positions` in one step.
        self._recovering: Collection[str] = ()
        self._catch_up_positions = 1

    def let_catch_up(self, recovering: Collection[str], positions: int) -> None:
        """Let these streams compute up to `positions` positions in this step."""
        self._recovering, self._catch_up_positions = recovering, positions

    def add_rebuilt(self, queue: list[Stream], most_positions: int) -> list[Stream]:
        """As `add_all`, for rebuilds. Up to `REBUILT_TOGETHER` streams share the positions in whole parts; with fewer
        streams or more positions, each takes more parts."""
        part = self._replay_part
        parts = round(most_positions / (part * max(1, min(len(queue), REBUILT_TOGETHER))))
        self._replay_positions = min(max(1, parts) * part, self._spec.replay_positions)
        return self.add_all(queue, most_positions)

    def add_again(self, tasks: list[DecodeTask]) -> None:
        """Plan tasks that the runner has not finished."""
        self._decode += tasks
        self._positions -= sum(task.end - task.base for task in tasks)

    def add_all(self, queue: list[Stream], most_positions: int | None = None) -> list[Stream]:
        """Plan the queued streams in order, with at most `most_positions` (None: the rest of the budget). Returns those
        that must wait for the next step."""
        if most_positions is not None:
            self._positions = min(self._positions, most_positions)
        waiting = []
        for stream in queue:
            try:
                if not self._add(stream):
                    waiting.append(stream)
            except Exception as error:
                self._unexpected_errors.append((stream.id, error))
        return waiting

    def _add(self, stream: Stream) -> bool:
        start = base = stream.computed
        if self._one_frame and start >= stream.forced and not self._is_late(stream):
            # Fast path: most streams compute one new frame in most steps.
            index = stream.encoded
            frame = stream.timeline.frame_at(index, start)
            if frame is not None:
                if self._positions < 1 or not self._cached(stream, index, frame):
                    return False
                self._put(stream, start, start, start + 1, stream.held[index], False)
                return True
        if self._spec.rereads_window:
            if not stream.is_due(self._spec):
                stream.queued = False  # a skip or a hold has removed its work
                return True
            base, end = self._window_span(stream)
            if end - base > self._positions:
                return False
        else:
            end = self._frames_end(stream)
            if end == start:
                return False
        rows = self._rows(stream, base, end)
        if len(rows) < end - base:
            end = base + len(rows)
            # The words of an upload must not depend on the load: keep what is encoded and wait for the whole window.
            if end <= start or (self._spec.rereads_window and not stream.live):
                return False
        pause = end == stream.next_pause()
        final = bool(stream.flushes) and self._spec.rereads_window and end == stream.flushes[0].position and not pause
        self._put(stream, base, start, end, rows, final, pause)
        return True

    def _put(
        self, stream: Stream, base: int, start: int, end: int, rows: list[int], final: bool, pause: bool = False
    ) -> None:
        if end > stream.covered:
            stream.cover(end)
        pages = _NO_PAGES
        if stream.new_pages:
            pages, stream.new_pages = stream.new_pages, _NO_PAGES
        pending = bool(stream.text.pending)
        cut_off = final and stream.flushes[0].cut_off
        self._decode.append(
            DecodeTask(stream.slot, stream.id, base, start, end, rows, pages, final, pause, pending, cut_off)
        )
        self._positions -= end - base

    def _window_span(self, stream: Stream) -> tuple[int, int]:
        """Return the positions [base, end) that a windowed model reads next.

        The span grows by whole strides, not to the newest sample, so that the words do not depend on the load of the
        machine, as long as it keeps up.
        """
        base, done, stride = stream.base, stream.computed, stream.stride
        limit = base + self._spec.window_for(stream.live)
        in_time = self._is_in_time(stream)
        mark = self._next_mark(stream, limit, in_time)
        end = min(stream.available, limit) if mark is None else mark
        # A stride that ends exactly at the mark is computed as the mark's step.
        strides = (end - done - (mark is not None)) // stride
        if strides < 1 or (mark is not None and not in_time):
            return base, end
        return base, done + (1 if in_time else strides) * stride

    def _is_in_time(self, stream: Stream) -> bool:
        """Whether a stream computes every stride and every pause: a live stream that is not far behind, or is behind
        because its engine was lost. Other streams leave strides and pauses out."""
        behind = stream.available - stream.computed
        near = behind < STRIDES_IN_TIME * self._spec.stride_positions
        return stream.live and (near or stream.computed < stream.catch_up_until)

    @staticmethod
    def _next_mark(stream: Stream, limit: int, in_time: bool) -> int | None:
        """Return the position in the window where the span must end: a flush, or a pause before it. None: no mark."""
        mark = stream.flushes[0].position if stream.flushes else limit + 1
        pause = stream.next_pause()
        if pause is not None and pause <= mark and in_time:
            mark = pause
        return mark if mark <= limit else None

    def _frames_end(self, stream: Stream) -> int:
        """Return the end of a frame-synchronous model's next step; `computed` if it has no work or no budget."""
        start, stop, step = stream.computed, stream.available, self._spec.step_positions
        if stream.flushes:
            stop = min(stop, stream.flushes[0].position)
        if start < stream.forced:
            return self._replay_end(start, min(stop, stream.forced))
        if self._is_late(stream):
            step = max(step, self._catch_up_positions)
        return min(start + min(step, self._positions), stop)

    def _replay_end(self, start: int, stop: int) -> int:
        """Return the end of the next step of a rebuild whose known tokens reach to `stop`. Avoids a rest that is too
        short to be efficient."""
        step, part = self._replay_positions, self._replay_part
        if step < stop - start < step + part:
            step += part if step + part <= self._spec.replay_positions else -part
        if self._positions < min(step, stop - start):
            step = self._positions // part * part
            if not step and not self._decode:
                step = self._positions
        return min(start + step, stop)

    def _is_late(self, stream: Stream) -> bool:
        """Whether this is a late recovered stream that may compute more than one position."""
        return self._catch_up_positions > 1 and stream.id in self._recovering

    def _rows(self, stream: Stream, base: int, end: int) -> list[int]:
        """Return the cache row of each position in [base, end), with the silence row where there is no embedding. Items
        that are not in the cache are added to the plan. Fewer rows than positions: a budget is exhausted."""
        timeline, held = stream.timeline, stream.held
        lo, hi = timeline.window(base, end)
        rows: list[int] = []
        position = base
        for index, item in enumerate(timeline.items(lo, hi), lo):
            if index >= stream.encoded and not self._cached(stream, index, item):
                return rows + [SILENCE_ROW] * (item.offset - position)
            if item.offset > position:
                rows += [SILENCE_ROW] * (item.offset - position)
                position = item.offset
            stop = min(item.offset + item.length, end)
            if not item.embeds:
                rows += [SILENCE_ROW] * (stop - position)
            elif item.length == 1:
                rows.append(held[index][0])
            else:
                span = timeline.range(index)
                rows += span.rows(held[index], position - span.offset, stop - span.offset, SILENCE_ROW)
            position = stop
        if position < end:
            rows += [SILENCE_ROW] * (end - position)
        return rows

    def _cached(self, stream: Stream, index: int, item: Item) -> bool:
        """Get an item into the cache for this step; False if a budget does not allow it."""
        embeds = item.embeds
        if embeds:
            if stream.held_embeds + embeds > self._spec.embeds_for(stream.live):
                return False
            cache, held = self._cache, stream.held
            # With another mask the same audio has other rows.
            key = item.key if embeds == item.length else item.key + bytes(item.mask or ())
            if key in cache.entries:
                cache.lookup(held, index, key)
            else:
                entry = cache.reserve(held, index, key, embeds) if embeds <= self._embeds else None
                if entry is None:
                    return False
                self._embeds -= embeds
                self._encode.append(EncodeTask(stream.id, item.payload, item.mask, entry))
            stream.held_embeds += embeds
        item.payload = None  # the cache keeps its rows as long as this stream needs them
        stream.encoded = index + 1
        return True
