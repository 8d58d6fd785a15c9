"""What one engine has, how much of it one step may use, and whether a model can live with that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.core.encoder_cache import EncoderCache
from engine.core.plan import SILENCE_ROW, DecodeTask, EncodeTask, StepPlan
from engine.core.stream import Stream
from engine.messages import Item
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine has, and how much of it one step may use."""

    max_streams: int
    cache_embeds: int
    group_pages: tuple[int, ...] = ()
    step_positions: int = 1024
    step_embeds: int = 1024
    # Positions of streams that are rebuilt, in a step that has nothing else to do.
    rebuild_positions: int = 1024


def largest_item(spec: ModelSpec, limits: Limits) -> int:
    """Embeddings of the largest item that always fits into what is set aside for a stream and into one step.

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
    # An item may stick out of the window at both ends.
    return min(slack // 2 + 1, limits.step_embeds)


# What the next step does for one stream: how far it goes, which cache rows it reads, what must be encoded for that.
#
# A step has two budgets, positions to compute and embeddings to encode. A stream that does not fit into what is left
# of them waits for the next step; nothing of it changes.

# A live stream that is fewer strides of its model behind than this takes every stride. A larger number keeps words the
# same on a busier machine; with a smaller one a late stream catches up sooner.
STRIDES_IN_TIME = 5
# Streams that are rebuilt side by side: more of them fill no device better.
REBUILT_TOGETHER = 32
# Streams that met an error nobody foresaw, and the error.
Surprises = list[tuple[str, Exception]]
_NO_PAGES: list[tuple[int, int, int]] = []


class Planner:
    """Fills one step's plan: `add_all` for each queue, the most urgent streams first."""

    def __init__(
        self, spec: ModelSpec, limits: Limits, cache: EncoderCache, plan: StepPlan, surprises: Surprises
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._decode = plan.decode
        self._encode = plan.encode
        self._surprises = surprises
        self._positions = limits.step_positions
        self._embeds = limits.step_embeds
        self._one_frame = not spec.rereads_window and spec.step_positions == 1
        # Positions of a stream whose tokens are known, and the fewest of them that are computed well by themselves.
        self._replay_positions = spec.replay_positions
        self._replay_part = max(1, spec.replay_positions // 4)
        # Streams that may hear so many positions in one step, because they lost their engine and are late.
        self._recovering: Collection[str] = ()
        self._catch_up_positions = 1

    def let_catch_up(self, recovering: Collection[str], positions: int) -> None:
        """These streams take up to so many positions, if they have come."""
        self._recovering, self._catch_up_positions = recovering, positions

    def add_rebuilt(self, queue: list[Stream], most_positions: int) -> list[Stream]:
        """As `add_all`, for streams whose tokens are known. As many of them as are computed well together take a part
        each; if there are fewer, or there is room for more, they take longer parts."""
        part = self._replay_part
        parts = round(most_positions / (part * max(1, min(len(queue), REBUILT_TOGETHER))))
        self._replay_positions = min(max(1, parts) * part, self._spec.replay_positions)
        return self.add_all(queue, most_positions)

    def add_all(self, queue: list[Stream], most_positions: int | None = None) -> list[Stream]:
        """Plan the queued streams in their order, at most so many positions (None: what is left of the budget); returns
        those that must wait for the next step."""
        if most_positions is not None:
            self._positions = min(self._positions, most_positions)
        waiting = []
        for stream in queue:
            try:
                if not self._add(stream):
                    waiting.append(stream)
            except Exception as error:
                self._surprises.append((stream.id, error))
        return waiting

    def _add(self, stream: Stream) -> bool:
        start = base = stream.computed
        if self._one_frame and start >= stream.forced and not self._is_late(stream):
            # Most streams hear one new frame in most steps: no search, no windows.
            index = stream.encoded
            frame = stream.timeline.frame_at(index, start)
            if frame is not None:
                if self._positions < 1 or not self._cached(stream, index, frame):
                    return False
                self._put(stream, start, start, start + 1, stream.held[index], False)
                return True
        if self._spec.rereads_window:
            if not stream.is_due(self._spec):
                stream.queued = False  # a skip or a hold took its work away
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
            # The words of backlog do not depend on what else ran: what is encoded stays, and the whole window waits.
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
        """Positions [base, end) that a model which rereads its window should read next.

        The span goes on by whole strides, not to the newest sample: what a model hears, and so what it says, then does
        not depend on how busy the machine is, as long as it keeps up.
        """
        base, done, stride = stream.base, stream.computed, stream.stride
        limit = base + self._spec.window_for(stream.live)
        in_time = self._is_in_time(stream)
        mark = self._next_mark(stream, limit, in_time)
        end = min(stream.available, limit) if mark is None else mark
        # The stride that ends at a mark is the mark's own step.
        strides = (end - done - (mark is not None)) // stride
        if strides < 1 or (mark is not None and not in_time):
            return base, end
        return base, done + (1 if in_time else strides) * stride

    def _is_in_time(self, stream: Stream) -> bool:
        """Whether a stream takes every stride and every pause: a live one that is not far behind, or that is behind
        because an engine was lost. Others leave strides and pauses out."""
        behind = stream.available - stream.computed
        near = behind < STRIDES_IN_TIME * self._spec.stride_positions
        return stream.live and (near or stream.computed < stream.catch_up_until)

    @staticmethod
    def _next_mark(stream: Stream, limit: int, in_time: bool) -> int | None:
        """Where a span must end at the latest, within its window: at a flush, or at a pause that comes before it."""
        mark = stream.flushes[0].position if stream.flushes else limit + 1
        pause = stream.next_pause()
        if pause is not None and pause <= mark and in_time:
            mark = pause
        return mark if mark <= limit else None

    def _frames_end(self, stream: Stream) -> int:
        """How far the next step of a frame-synchronous model goes; no further than computed if nothing is left."""
        start, stop, step = stream.computed, stream.available, self._spec.step_positions
        if stream.flushes:
            stop = min(stop, stream.flushes[0].position)
        if start < stream.forced:
            return self._replay_end(start, min(stop, stream.forced))
        if self._is_late(stream):
            step = max(step, self._catch_up_positions)
        return min(start + min(step, self._positions), stop)

    def _replay_end(self, start: int, stop: int) -> int:
        """How far the next step goes with known tokens, which reach to `stop`. No rest is left, here or for the next
        step, that is too short to be computed well by itself."""
        step, part = self._replay_positions, self._replay_part
        if step < stop - start < step + part:
            step += part if step + part <= self._spec.replay_positions else -part
        if self._positions < min(step, stop - start):
            step = self._positions // part * part
            if not step and not self._decode:
                step = self._positions
        return min(start + step, stop)

    def _is_late(self, stream: Stream) -> bool:
        """Whether a stream that lost its engine may take more than one position."""
        return self._catch_up_positions > 1 and stream.id in self._recovering

    def _rows(self, stream: Stream, base: int, end: int) -> list[int]:
        """The cache row of each position in [base, end), the silence row where there is no embedding; items that are
        not in the cache get into the plan. Fewer rows than positions: the budgets reach no further."""
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
        """Bring an item into the cache for this step; returns False if a budget does not allow it."""
        embeds = item.embeds
        if embeds:
            if stream.held_embeds + embeds > self._spec.embeds_for(stream.live):
                return False
            cache, held = self._cache, stream.held
            # The same audio with another mask has other rows.
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
        item.payload = None  # the cache has it now, for as long as this stream needs it
        stream.encoded = index + 1
        return True
