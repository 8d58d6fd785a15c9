"""`Planner`: fills the plan of one step with the positions each stream computes and the items to prepare for them.

The scheduler makes one planner per step and gives it the queues of streams, the most urgent first. A step has two
budgets: positions to compute, and rows of the encoder cache to prepare. A stream gets the positions that the rest of
the budgets allows; with none it waits for the next step. A windowed model reads the window of an upload whole or not at
all.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.core.encoder_cache import EncoderCache
from engine.core.plan import SILENCE_ROW, DecodeTask, EncodeTask, StepPlan
from engine.core.stream import Stream
from engine.messages import Item
from engine.spec import ModelSpec

# A live stream that is fewer strides behind than this computes every stride. With a larger number words stay the same
# on a busier machine; with a smaller one a late stream catches up sooner.
STRIDES_IN_TIME = 5
# Most streams among which the rebuilt positions of a step are divided: with more streams the device is used no better,
# and the first streams are ready later.
REBUILT_TOGETHER = 16
# (stream id, error that is no StreamError). The engine loop ends these streams.
UnexpectedErrors = list[tuple[str, Exception]]
_NO_PAGES: list[tuple[int, int, int]] = []


class Planner:
    """Fills the plan of one step: `add_all` for each queue, the most urgent streams first.

    `step_positions` and `step_rows` are the budgets of the step: positions to compute, and rows of the encoder cache to
    prepare.
    """

    def __init__(
        self,
        spec: ModelSpec,
        step_positions: int,
        step_rows: int,
        cache: EncoderCache,
        plan: StepPlan,
        unexpected_errors: UnexpectedErrors,
    ) -> None:
        self._spec = spec
        self._encoder_cache = cache
        self._decode = plan.decode
        self._encode = plan.encode
        self._unexpected_errors = unexpected_errors
        # What is left of the budgets.
        self._positions = step_positions
        self._rows = step_rows
        self._one_position = not spec.rereads_window and spec.step_positions == 1
        # Most positions per step of a rebuild, and the fewest that are efficient; rebuilds compute multiples of the
        # latter.
        self._replay_positions = spec.replay_positions
        self._replay_part = max(1, spec.replay_positions // 4)
        # Recovered streams that are behind, which may compute `_catch_up_positions` positions in one step.
        self._recovering: Collection[str] = ()
        self._catch_up_positions = 1

    def let_catch_up(self, recovering: Collection[str], positions: int) -> None:
        """Let these streams compute up to `positions` positions in this step."""
        self._recovering, self._catch_up_positions = recovering, positions

    def add_rebuilt(self, queue: list[Stream], most_positions: int) -> list[Stream]:
        """As `add_all`, for rebuilds. The positions are divided among up to `REBUILT_TOGETHER` streams, in multiples of
        `_replay_part`."""
        part = self._replay_part
        parts = round(most_positions / (part * max(1, min(len(queue), REBUILT_TOGETHER))))
        self._replay_positions = min(max(1, parts) * part, self._spec.replay_positions)
        return self.add_all(queue, most_positions)

    def add_again(self, tasks: list[DecodeTask]) -> None:
        """Plan suspended tasks (`DecodeResult.unfinished`) again."""
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
        """Add one stream's task to the plan; returns False if the stream must wait for the next step."""
        start = base = stream.computed
        if self._one_position and start >= stream.forced_until and not self._may_catch_up(stream):
            # Fast path: most streams compute one new position in most steps.
            index = stream.encoded
            item = stream.timeline.single_position_item(index, start)
            if item is not None:
                if self._positions < 1 or not self._cache(stream, index, item):
                    return False
                self._append(stream, start, start, start + 1, stream.cached[index], False)
                return True
        if self._spec.rereads_window:
            if not stream.is_due(self._spec):
                # A skip or a hold has removed its work.
                stream.queued = False
                return True
            base, end = self._window_span(stream)
            if end - base > self._positions:
                return False
        else:
            end = self._span_end(stream)
            if end == start:
                return False
        rows = self._rows_of(stream, base, end)
        if len(rows) < end - base:
            end = base + len(rows)
            # The words of an upload must not depend on the load, so it waits until its whole window is prepared. The
            # rows prepared so far stay in the cache.
            if end <= start or (self._spec.rereads_window and not stream.live):
                return False
        pause = end == stream.next_pause()
        final = bool(stream.flushes) and self._spec.rereads_window and end == stream.flushes[0].position and not pause
        self._append(stream, base, start, end, rows, final, pause)
        return True

    def _append(
        self, stream: Stream, base: int, start: int, end: int, rows: list[int], final: bool, pause: bool = False
    ) -> None:
        """Append a `DecodeTask` of these fields to the plan."""
        if end > stream.paged_until:
            stream.allocate_pages(end)
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

        The span grows by whole strides, not to the newest sample. So the words do not depend on the load of the
        machine, as long as the stream is not late.
        """
        base, computed, stride = stream.base, stream.computed, stream.stride
        limit = base + self._spec.window_for(stream.live)
        in_time = self._is_in_time(stream)
        mark = self._next_mark(stream, limit, in_time)
        end = min(stream.available, limit) if mark is None else mark
        # A stride that ends exactly at the mark is computed as the mark's step.
        strides = (end - computed - (mark is not None)) // stride
        if strides < 1 or (mark is not None and not in_time):
            return base, end
        return base, computed + (1 if in_time else strides) * stride

    def _is_in_time(self, stream: Stream) -> bool:
        """Whether a stream computes every stride and every pause: a live stream that is not far behind, or is behind
        because its engine was lost. Other streams compute several strides at once and ignore pauses."""
        behind = stream.available - stream.computed
        is_near = behind < STRIDES_IN_TIME * self._spec.stride_positions
        return stream.live and (is_near or stream.computed < stream.catch_up_until)

    @staticmethod
    def _next_mark(stream: Stream, limit: int, in_time: bool) -> int | None:
        """Return the position in the window where the span must end: a flush, or a pause before it. None: no mark."""
        mark = stream.flushes[0].position if stream.flushes else limit + 1
        pause = stream.next_pause()
        if pause is not None and pause <= mark and in_time:
            mark = pause
        return mark if mark <= limit else None

    def _span_end(self, stream: Stream) -> int:
        """Return the end of the positions that a frame-synchronous model computes next; `computed` if there is no work
        or no budget."""
        start, stop, step = stream.computed, stream.available, self._spec.step_positions
        if stream.flushes:
            stop = min(stop, stream.flushes[0].position)
        if start < stream.forced_until:
            return self._replay_end(start, min(stop, stream.forced_until))
        if self._may_catch_up(stream):
            step = max(step, self._catch_up_positions)
        return min(start + min(step, self._positions), stop)

    def _replay_end(self, start: int, stop: int) -> int:
        """Return the end of the positions that a rebuild computes next, from `start`, with known tokens up to `stop`.
        Avoids a remainder that is too short to be efficient."""
        step, part = self._replay_positions, self._replay_part
        if step < stop - start < step + part:
            step += part if step + part <= self._spec.replay_positions else -part
        if self._positions < min(step, stop - start):
            step = self._positions // part * part
            if not step and not self._decode:
                step = self._positions
        return min(start + step, stop)

    def _may_catch_up(self, stream: Stream) -> bool:
        """Whether this is a recovered stream that is behind and may compute more than one position."""
        return self._catch_up_positions > 1 and stream.id in self._recovering

    def _rows_of(self, stream: Stream, base: int, end: int) -> list[int]:
        """Return the row of each position in [base, end), with the row of silence where there is no audio. Items that
        are not in the cache are added to the plan. Fewer rows than positions: a budget is exhausted."""
        timeline, cached = stream.timeline, stream.cached
        lo, hi = timeline.window(base, end)
        rows: list[int] = []
        position = base
        for index, item in enumerate(timeline.items(lo, hi), lo):
            if index >= stream.encoded and not self._cache(stream, index, item):
                return rows + [SILENCE_ROW] * (item.offset - position)
            if item.offset > position:
                rows += [SILENCE_ROW] * (item.offset - position)
                position = item.offset
            stop = min(item.offset + item.length, end)
            if not item.embeds:
                rows += [SILENCE_ROW] * (stop - position)
            elif item.length == 1:
                rows.append(cached[index][0])
            else:
                span = timeline.positions(index)
                rows += span.rows_of(position - span.offset, stop - span.offset, cached[index], SILENCE_ROW)
            position = stop
        if position < end:
            rows += [SILENCE_ROW] * (end - position)
        return rows

    def _cache(self, stream: Stream, index: int, item: Item) -> bool:
        """Reference an item in the encoder cache; if it is not there, plan to prepare it. False: a budget is too
        small."""
        count = item.embeds
        if count:
            if stream.cached_rows + count > self._spec.embeds_for(stream.live):
                return False
            cache, cached = self._encoder_cache, stream.cached
            # With another mask the same audio has other rows.
            key = item.key if count == item.length else item.key + bytes(item.mask or ())
            if key in cache.entries:
                cache.lookup(cached, index, key)
            else:
                entry = cache.allocate(cached, index, key, count) if count <= self._rows else None
                if entry is None:
                    return False
                self._rows -= count
                self._encode.append(EncodeTask(stream.id, item.payload, item.mask, entry))
            stream.cached_rows += count
        item.payload = None  # the cache keeps its rows as long as this stream needs them
        stream.encoded = index + 1
        return True
