"""`Scheduler`: decides which streams run in the next step (`plan`) and applies the step's results to them (`commit`).

One per engine process; `engine/server/loop.py` calls it on the engine's one thread. It owns all streams, the queues of
those with work, and the pools of slots, pages and rows of the encoder cache. There are no prefill and decode modes:
each stream has *available* and *computed* positions, and a step computes positions between them within its budgets.
Live streams go first, ordered by the arrival of their oldest uncomputed audio; uploads use the rest. A stream without
work is in no queue and costs nothing. A slot, cache rows and, without parking, pages are reserved at admission, so no
stream waits for another to end: admission instead of preemption. With parking, pages are shared in turns.

`Planner` fills the plan of one step with the positions each stream computes and the items to prepare for them. The
scheduler makes one planner per step and gives it the queues of streams, the most urgent first. A step has two budgets:
positions to compute, and rows of the encoder cache to prepare (`Limits`). A stream gets the positions that the rest of
the budgets allows; with none it waits for the next step. A windowed model reads the window of an upload whole or not at
all.

Parking: with `Limits.resident_streams` there may be more streams than the device has pages for. A stream gets pages
when it first has work. A stream that has been silent for a while may be *parked*: its pages go to host memory. When it
has work it is brought back, in place of the stream that has been silent for longest, and computed when its pages have
arrived (`Moves`). If no stream is silent, a live stream takes the place of an upload, or, when it has waited for
`TURN_NS`, that of the live stream that has been on the device for longest. A stream with reserved pages on the device
is *resident*.

Recovery: a frame-synchronous stream whose engine was lost is opened with the tokens that are known. While its next
positions repeat these tokens it is *rebuilding*. It is *recovering* until it has also caught up with its audio. Crash
suspects, streams that may have crashed an engine, are not computed in one step with each other at the positions of the
crash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter

from engine.core.caches import EncoderCache, PagePool
from engine.core.plan import (
    SILENCE_ROW,
    DecodeResult,
    DecodeTask,
    EncodeTask,
    InstantMoves,
    Moves,
    MoveTask,
    OpenTask,
    StepPlan,
)
from engine.core.stream import PRUNE_EVERY_POSITIONS, FlushMark, Stream
from engine.errors import (
    AtCapacity,
    BadItem,
    BadOption,
    DuplicateStream,
    ItemTooLarge,
    StreamError,
    StreamFailed,
    StreamFinished,
    UnknownStream,
)
from engine.messages import Closed, Failed, Flushed, Item, Open, Output
from engine.spec import ModelSpec, Vocabulary

_oldest_first = attrgetter("waiting_since")
_resident_for_longest = attrgetter("resident_since")
# Streams that have caught up stay `recovering` while others are rebuilt. After this many steps without progress of a
# rebuild they no longer do, since the audio of the others does not arrive.
STALLED_STEPS = 100
# Most positions per step of a stream that is behind, for a model that otherwise computes one. Each further position is
# another pass of the model, for which all streams of the step wait. So there is one only if at least this share of the
# waiting streams takes part. Without it they would never catch up, because a stream is in every second step at most.
MAX_CATCH_UP_POSITIONS = 4
LATE_SHARE = 0.25
# While more streams are rebuilt than are on time, a step has so many of those that are rebuilt already: those with the
# fewest new positions. A step of all would take longer, for streams on time and for those that wait for first words.
FIRST_WORDS_STREAMS = 64
# A stream may be parked when its last audio to compute arrived this long ago: longer than the gaps in the audio of a
# usual connection.
PARKED_AFTER_NS = 500_000_000
# If more live streams have work than there is room for, each may use the device for this long at a time; the others
# wait for at least as long.
TURN_NS = 2_000_000_000
# A copy takes milliseconds. One that has not ended after this time never will: the engine must be replaced.
COPY_LIMIT_NS = 20_000_000_000
# Pages are kept free for one in `KEPT_FREE_DIVISOR` resident streams, for at most `MAX_KEPT_FREE`, so that a stream
# with new speech need not wait until another is parked. Uploads may not use them.
MAX_KEPT_FREE, KEPT_FREE_DIVISOR = 8, 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources of one engine, and the budgets of one step."""

    max_streams: int
    # Rows of the encoder cache.
    cache_embeds: int
    # Pages of each KV group.
    group_pages: tuple[int, ...] = ()
    # Budgets of a step: positions to compute, and rows of the encoder cache to prepare.
    step_positions: int = 1024
    step_embeds: int = 1024
    # Positions of rebuilds in a step that has nothing else to do.
    rebuild_positions: int = 1024
    # How many of `max_streams` can have their pages on the device at a time; the others are silent and parked in host
    # memory. None: all of them.
    resident_streams: int | None = None
    # Most streams parked, and most brought back, in one step. At most twice as many are on their way back.
    moves: int = 4
    # Whether plans have the next tasks of uploads too (`StepPlan.ahead`), because the runner encodes on another thread.
    # They have none while a live stream is open: live streams need that thread.
    plans_ahead: bool = False


def largest_item(spec: ModelSpec, limits: Limits) -> int:
    """Return the size, in rows of the encoder cache, of the largest item that always fits into a stream's reserved rows
    and into one step.

    Raises ValueError if a model could never run within these limits.
    """
    if len(limits.group_pages) != len(spec.kv_groups):
        raise ValueError(f"{len(spec.kv_groups)} groups of pages are needed, {len(limits.group_pages)} were given")
    needed = spec.window_for(live=False) if spec.rereads_window else 1
    if limits.step_positions < needed:
        raise ValueError(f"a step of this model reads {needed} positions; raise step_positions to at least that")
    if limits.step_embeds < 1:
        raise ValueError("a step must be able to prepare an item; raise step_embeds")
    if not spec.rereads_window:
        return min(spec.embeds_per_stream, limits.step_embeds)
    beyond_window = spec.embeds_per_stream - spec.window_positions
    if beyond_window < 0:
        raise ValueError(f"embeds_per_stream must be at least the window of {spec.window_positions} positions")
    # Items may extend beyond the window at both ends.
    return min(beyond_window // 2 + 1, limits.step_embeds)


# The plan of one step.

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
        plans_ahead: bool = False,
    ) -> None:
        self._spec = spec
        self._plans_ahead = plans_ahead
        self._ahead = plan.ahead
        self._encoder_cache = cache
        self._decode = plan.decode
        self._encode = plan.encode
        self._unexpected_errors = unexpected_errors
        # What is left of the budgets.
        self._positions = step_positions
        self._rows = step_rows
        self._one_position = not spec.rereads_window and spec.step_positions == 1
        # Most positions per step of a rebuild.
        self._replay_positions = spec.replay_positions
        # Streams that are behind, which may compute `_catch_up_positions` positions in one step.
        self._late: Collection[str] = ()
        self._catch_up_positions = 1

    def let_catch_up(self, late: Collection[str], positions: int) -> None:
        """Let these streams compute up to `positions` positions in this step."""
        self._late, self._catch_up_positions = late, positions

    def add_rebuilt(self, queue: list[Stream], most_positions: int) -> list[Stream]:
        """As `add_all`, for rebuilds. The positions are divided among up to `REBUILT_TOGETHER` streams, in multiples of
        `ModelSpec.replay_part`."""
        part = self._spec.replay_part
        parts = round(most_positions / (part * max(1, min(len(queue), REBUILT_TOGETHER))))
        self._replay_positions = min(max(1, parts) * part, self._spec.replay_positions)
        return self.add_all(queue, most_positions)

    def add_again(self, tasks: list[DecodeTask], streams: Mapping[str, Stream]) -> None:
        """Plan suspended tasks (`DecodeResult.unfinished`) again."""
        self._decode += tasks
        self._positions -= sum(task.end - task.base for task in tasks)
        for task in tasks:
            self._add_ahead(streams[task.stream], task)

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
            start = base = stream.rebuild_start
            end = self._span_end(stream)
            if end == start:
                return False
        rows = self._rows_of(stream, base, end)
        if len(rows) < end - base:
            end = base + len(rows)
            if stream.is_rebuilding and end - start > self._spec.replay_part:
                end -= (end - start) % self._spec.replay_part
                del rows[end - base :]
            # The words of an upload must not depend on the load, so it waits until its whole window is prepared. The
            # rows prepared so far stay in the cache.
            if end <= start or (self._spec.rereads_window and not stream.live):
                return False
        pause = end == stream.next_pause()
        final = bool(stream.flushes) and self._spec.rereads_window and end == stream.flushes[0].position and not pause
        if stream.is_rebuilding:
            stream.rebuilt_until = end
        self._append(stream, base, start, end, rows, final, pause)
        self._add_ahead(stream, self._decode[-1])
        return True

    def _add_ahead(self, stream: Stream, task: DecodeTask) -> None:
        """Add the task of an upload that follows its final task: once, as soon as its window is known and its rows fit
        into the budgets."""
        if not self._plans_ahead or stream.live or not task.final:
            return
        window = stream.window_after(task.end)
        if window is None or window[0] < stream.ahead_until or window[1] - window[0] > self._spec.window_for(False):
            return
        base, stop = window
        first, _ = stream.timeline.window(base, stop)
        stream.drop_audio_before(first)
        rows = self._rows_of(stream, base, stop)
        if len(rows) == stop - base:
            stream.ahead_until = stop
            self._ahead.append(DecodeTask(stream.slot, stream.id, base, base, stop, rows, _NO_PAGES, final=True))

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
        if stream.is_rebuilding:
            # Beyond flushes: their text is ended when the step is committed.
            return self._replay_end(stream)
        if stream.flushes:
            stop = min(stop, stream.flushes[0].position)
        if self._may_catch_up(stream):
            step = max(step, self._catch_up_positions)
        return min(start + min(step, self._positions), stop)

    def _replay_end(self, stream: Stream) -> int:
        """Return the end of the positions that a rebuild computes next. Avoids a remainder that is too short to be
        efficient."""
        start, stop = stream.rebuild_start, stream.rebuild_stop(self._spec)
        step, part, length = self._replay_positions, self._spec.replay_part, stop - start
        if step < length < step + part:
            step += part if step + part <= self._spec.replay_positions else -part
        if self._positions < min(step, length):
            step = self._positions // part * part
            if step < length < step + part:
                step -= part
            if step <= 0:
                step = 0 if self._decode else self._positions
        return min(start + step, stop)

    def _may_catch_up(self, stream: Stream) -> bool:
        """Whether this stream may compute more than one position."""
        return self._catch_up_positions > 1 and stream.id in self._late

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
                self._encode.append(EncodeTask(stream.id, item.payload, item.mask, entry, item.offset + item.length))
            stream.cached_rows += count
        item.payload = None  # the cache keeps its rows as long as this stream needs them
        stream.encoded = index + 1
        return True


# All streams, and their queues.


def _rebuild_order(stream: Stream) -> tuple[bool, int]:
    """Sort key of rebuilds: streams with recent speech first, then those with the fewest positions left."""
    return not stream.spoke_lately, stream.forced_until - stream.rebuild_start


class Scheduler:
    """All streams of an engine, the queues of those that have work, and the pools they share."""

    def __init__(self, spec: ModelSpec, limits: Limits, vocabulary: Vocabulary) -> None:
        self._max_item_rows = largest_item(spec, limits)
        self.spec = spec
        self.limits = limits
        self.cache = EncoderCache(limits.cache_embeds)
        self.pools = [PagePool(pages) for pages in limits.group_pages]
        self.streams: dict[str, Stream] = {}
        self._vocabulary = vocabulary
        self._free_slots = list(range(limits.max_streams - 1, -1, -1))
        self._reserved_rows = 0  # rows of the encoder cache that open streams may need
        self._step = 0  # number of the last plan
        self._live_count = 0  # open streams that are live
        # Queues: resident streams with work.
        self.live: list[Stream] = []
        self.uploads: list[Stream] = []
        # Tasks that are planned and not committed, by slot and in order, and tasks that the runner has suspended. Their
        # streams are in no queue.
        self._planned: dict[int, list[DecodeTask]] = {}
        self._unfinished: list[DecodeTask] = []
        self.rebuilding: set[str] = set()  # streams whose next positions repeat known tokens
        # Those, and rebuilt streams until they have caught up with their audio and no other stream is being rebuilt.
        self.recovering: set[str] = set()
        # Steps that computed something since the last one that rebuilt something.
        self._steps_without_rebuild = 0
        self.suspects: dict[str, range] = {}  # crash suspects, and the positions at which an engine died
        # Slots to open and to close in the next plan.
        self._opened: dict[int, OpenTask] = {}
        self._closed_slots: list[int] = []
        self._parks = limits.resident_streams is not None
        # Streams for which pages are kept free; an upload must fit beside them.
        resident = limits.resident_streams or 0
        self._kept_free = min(MAX_KEPT_FREE, max(1, resident // KEPT_FREE_DIVISOR), max(0, resident - 1))
        # With parking: streams with work that are not resident, and those whose pages are being brought back.
        self._waiting_for_pages: list[Stream] = []
        self._arriving: list[Stream] = []
        # The engine loop sets this to the moves of its runner.
        self.moves: Moves = InstantMoves()
        self._parking_room = 0  # streams that the plan under way may still park
        # With parking: resident streams without work, the one that has been without for longest first.
        self._idle: dict[str, Stream] = {}
        self.parked = 0  # streams whose pages are in host memory
        self._now = 0  # time of the last arrival (ns, the clock of `Item.arrival`)
        self._replies: list[Output] = []  # outputs that need no step
        self.unexpected_errors: UnexpectedErrors = []  # of planning and committing; the engine loop ends these streams

    # Commands: each may raise a StreamError, and then leaves the stream unchanged.

    def admit(self, message: Open) -> None:
        """Open a stream with what it needs reserved, or refuse it. Raises DuplicateStream, BadOption, AtCapacity."""
        spec, name = self.spec, message.stream
        if name in self.streams:
            raise DuplicateStream(name, "is open already; use another id")
        delay = spec.default_delay_positions if message.delay_positions is None else message.delay_positions
        if not 0 <= delay <= spec.max_delay_positions:
            raise BadOption(name, f"a delay of {delay} positions; this model takes 0 to {spec.max_delay_positions}")
        self._check_capacity(name, message.live)
        if not self._parks:
            self._reserve()
        self._reserved_rows += spec.embeds_for(message.live)
        self._live_count += message.live
        slot = self._free_slots.pop()
        if message.suspect is not None:
            self.suspects[name] = range(*message.suspect)
        cached = self.cache.open(name)
        stream = Stream(message, slot, delay, spec, cached, self.pools, self._vocabulary, resident=not self._parks)
        self.streams[name] = stream
        if message.forced_tokens:
            self.rebuilding.add(name)
            self.recovering.add(name)
        self._opened[slot] = OpenTask(slot, name, delay, message.options, message.forced_tokens, live=message.live)

    def resume(self, message: Open, now: int) -> None:
        """Put a stream that was just admitted into its saved state."""
        stream, state = self.streams[message.stream], message.state
        assert state is not None and self.spec.rereads_window, "only windowed models have states"
        # Planning removes the payload of an item, so the runner gets copies.
        opened = self._opened[stream.slot]
        opened.saved, opened.saved_items = state.parts["runner"], [copy(item) for item in message.items]
        for item in message.items:
            self._append(stream, item, now)
        if message.items and stream.available != state.position:
            raise BadItem(stream.id, f"a state at {state.position} with audio up to {stream.available}; send all of it")
        stream.resume(state.parts["stream"], state.position)
        self._release_before(stream, stream.base)
        self._queue_if_due(stream)

    def feed(self, name: str, items: Iterable[Item], now: int) -> None:
        """Append items to a stream; `now` is their time of arrival in nanoseconds."""
        stream = self.require_open(name)
        self.advance_clock(now)
        caught_up = stream.computed == stream.available
        for item in items:
            self._append(stream, item, now)
        if not stream.queued and stream.is_due(self.spec):
            self._queue(stream, now if caught_up else stream.timeline.arrival_at(stream.computed))

    def flush(self, name: str, tag: int | None, position: int | None = None, *, cut_off: bool = False) -> None:
        """Produce the text of everything before `position` (None: of all audio fed; it may lie ahead), then answer with
        `Flushed` if there is a tag. `cut_off`: there is speech at `position`."""
        stream = self.require_open(name)
        # A windowed model has computed text up to `computed` already, so a flush cannot end before that.
        computed = [stream.computed, *(task.end for task in self._unfinished if task.slot == stream.slot)]
        earliest = [mark.position for mark in stream.flushes] + (computed if self.spec.rereads_window else [])
        position = max(stream.available if position is None else position, *earliest, 0)
        stream.flushes.append(FlushMark(position, tag, ends_text=tag is not None, cut_off=cut_off))
        self._settle(stream, self._replies)

    def mark(self, name: str, tag: int | None = None, *, ends_text: bool = False) -> None:
        """Add a mark at the position of the last flush: answer `tag` there, or end the text. Text of later audio is not
        affected."""
        stream = self.require_open(name)
        position = stream.flushes[-1].position if stream.flushes else stream.base
        stream.flushes.append(FlushMark(position, tag, ends_text))
        self._settle(stream, self._replies)

    def skip(self, name: str, position: int) -> None:
        """Do not compute positions below `position`: they are silent. Only for models that reread their window.

        Audio before a pending flush is still computed first.
        """
        stream = self.require_open(name)
        assert self.spec.rereads_window, "a frame-synchronous model computes every position"
        position = min(position, stream.available)
        if stream.flushes:
            stream.flushes[-1].resume_at = position
        else:
            self._skip_to(stream, position)

    def pause(self, name: str, position: int) -> None:
        """There is a pause at `position`: compute a live stream up to there, even while it is held, so that the text is
        ready if a flush follows there. Uploads ignore pauses."""
        stream = self.require_open(name)
        if stream.live:
            stream.pauses.append(min(position, stream.available))
            self._queue_if_due(stream)

    def hold(self, name: str, is_held: bool) -> None:
        """While a stream is held, its audio waits; only a flush or a pause makes it run."""
        stream = self.require_open(name)
        stream.is_held = is_held
        self._queue_if_due(stream)

    def finish(self, name: str) -> None:
        """No more audio follows: compute the rest, then close the stream."""
        stream = self.require_open(name)
        stream.finished = True
        for mark in stream.flushes:
            mark.position = min(mark.position, stream.available)
        stream.flushes.append(FlushMark(stream.available, None))
        self._settle(stream, self._replies)

    def abort(self, name: str) -> None:
        """Close a stream now, without further text."""
        stream = self.streams.get(name)
        if stream is None:
            raise UnknownStream(name, "is not open; open it first")
        self._replies.append(Closed(name, stream.clock.sample_at(stream.computed)))
        self._close(stream)

    def fail(self, error: StreamError) -> None:
        """End one stream with an error."""
        self._replies.append(Failed(error.stream, type(error).__name__, str(error)))
        if (stream := self.streams.get(error.stream)) is not None:
            self._close(stream)

    def require_open(self, name: str) -> Stream:
        """Return the stream that accepts audio under this name. Raises UnknownStream, StreamFinished."""
        stream = self.streams.get(name)
        if stream is None:
            raise UnknownStream(name, "is not open; open it first")
        if stream.finished:
            raise StreamFinished(name, "was finished; open a new stream for more audio")
        return stream

    def advance_clock(self, now: int) -> None:
        """It is `now` (ns, the clock of arrivals): streams without audio for long enough may be parked, also while no
        other audio arrives."""
        if now > self._now:
            self._now = now

    def has_work(self) -> bool:
        """Whether a step would compute something, or open or close slots of the runner."""
        if self.live or self.uploads_wait or self._opened or self._closed_slots or self._arriving:
            return True
        if not self._waiting_for_pages:
            return False
        first = min(self._waiting_for_pages, key=self._waiting_order)
        return self._can_reserve(0 if first.live else self._kept_free) or self._next_to_park(first) is not None

    @property
    def waits_for_copies(self) -> bool:
        """Whether the next plan has nothing to do but to see whether copies of pages are complete."""
        if self.live or self.uploads_wait or self._opened or self._closed_slots:
            return False
        return bool(self._arriving or (self._waiting_for_pages and not self._parking_room))

    @property
    def live_waits(self) -> bool:
        return bool(self.live)

    @property
    def uploads_wait(self) -> bool:
        return bool(self.uploads or self._unfinished)

    def has_replies(self) -> bool:
        return bool(self._replies)

    def take_replies(self) -> list[Output]:
        """Return and clear the outputs that need no step."""
        replies, self._replies = self._replies, []
        return replies

    # One step: plan, then commit with the runner's results.

    @property
    def rebuild_waits(self) -> bool:
        """Whether a live stream waits for its rebuild."""
        return bool(self.rebuilding) and any(stream.is_rebuilding for stream in self.live)

    @property
    def rebuild_backlog(self) -> int:
        """Positions of rebuilds that could be computed and are in no plan."""
        streams = map(self.streams.__getitem__, self.rebuilding)
        return sum(stream.rebuild_stop(self.spec) - stream.rebuild_start for stream in streams)

    @property
    def rebuild_to_come(self) -> int:
        """Positions with known tokens whose audio has not arrived."""
        streams = map(self.streams.__getitem__, self.rebuilding)
        return sum(max(0, stream.forced_until - stream.available) for stream in streams)

    @property
    def others_wait(self) -> bool:
        """Whether something other than rebuilds waits."""
        return self.uploads_wait or any(not stream.is_rebuilding for stream in self.live)

    @property
    def longest_wait_ns(self) -> int:
        """How long the oldest audio of live streams that is in no plan has waited. Recovering streams do not count, nor
        do streams that wait for pages: streams that are rebuilt may have these, and keep them until then."""
        oldest = self._now
        for stream in self.streams.values():
            if not (stream.live and stream.queued and stream.resident):
                continue
            tasks = self._planned.get(stream.slot)
            next_position = tasks[-1].end if tasks else stream.computed
            if stream.available > next_position and stream.id not in self.recovering:
                arrival = stream.timeline.arrival_at(next_position)
                oldest = oldest if arrival is None else min(oldest, arrival)
        return self._now - oldest

    @property
    def on_time_count(self) -> int:
        """Number of live streams that are not recovering."""
        return self._live_count - sum(self.streams[name].live for name in self.recovering)

    @property
    def suspect_is_near(self) -> bool:
        """Whether the next step, or one that is not committed, may compute positions at which an engine died."""
        suspects = ((self.streams[name], spot) for name, spot in self.suspects.items())
        return any(stream.queued and self._reach(stream) > spot.start for stream, spot in suspects)

    def plan(
        self, live: bool = True, upload_positions: int | None = None, rebuild_positions: int | None = None
    ) -> StepPlan:
        """Plan the next step. Streams in the plan stay out of the queues until `commit`, so no stream is in two plans,
        even if further plans are made before, unless it is rebuilt (`rebuilt_further`).

        Without `live`, the step has no live streams except rebuilds. `upload_positions` limits the positions of
        uploads (None: the rest of the budget), `rebuild_positions` those of rebuilds, which are planned after other
        live streams (None: `Limits.rebuild_positions` with `live`, else none).
        """
        self._step += 1
        plan = StepPlan(self._step, list(self._opened.values()), self._closed_slots)
        self._opened, self._closed_slots = {}, []
        if self._parks:
            self._move_streams(plan)
        set_aside = self._set_suspects_aside() if self.suspects else []
        limits = self.limits
        planner = Planner(
            self.spec,
            limits.step_positions,
            limits.step_embeds,
            self.cache,
            plan,
            self.unexpected_errors,
            limits.plans_ahead and not self._live_count,
        )
        if rebuild_positions is None:
            rebuild_positions = limits.rebuild_positions if live else 0
        if (live and self.live) or rebuild_positions:
            rebuilt = [stream for stream in self.live if stream.is_rebuilding] if self.rebuilding else []
            if rebuilt:
                self.live = [stream for stream in self.live if not stream.is_rebuilding]
            if live:
                self.live.sort(key=_oldest_first)
                later: list[Stream] = []
                if len(self.rebuilding) > self.on_time_count:
                    self.live, later = self._first_words()
                if not self.spec.rereads_window:
                    self._let_catch_up(planner)
                self.live = planner.add_all(self.live) + later
            if rebuild_positions:
                first = len(plan.decode)
                rebuilt += self.rebuilt_further()
                rebuilt.sort(key=_rebuild_order)
                rebuilt = planner.add_rebuilt(rebuilt, rebuild_positions)
                plan.rebuilt_positions = sum(task.end - task.start for task in plan.decode[first:])
            self.live += [stream for stream in rebuilt if stream.slot not in self._planned]
            plan.live = len(plan.decode)
        if upload_positions != 0:
            planner.add_again(self._unfinished, self.streams)
            self._unfinished = []
            self.uploads = planner.add_all(self.uploads, upload_positions)
        for stream in set_aside:
            (self.live if stream.live else self.uploads).append(stream)
        self._note_planned(plan)
        return plan

    def _note_planned(self, plan: StepPlan) -> None:
        if plan.decode:
            self._steps_without_rebuild = 0 if plan.rebuilt_positions else self._steps_without_rebuild + 1
        for task in plan.decode:
            self._planned.setdefault(task.slot, []).append(task)

    def rebuilt_further(self) -> list[Stream]:
        """Return the live streams of plans that are not committed in which more could be rebuilt. The device computes
        the plans in order, and a rebuild needs no results: the next plan may go on where the last one ends."""
        streams = (self.streams[name] for name in self.rebuilding)
        return [
            stream
            for stream in streams
            if stream.live
            and stream.slot in self._planned
            and stream.rebuild_stop(self.spec) > stream.rebuild_start
            and stream.id not in self.suspects
        ]

    def commit(self, plan: StepPlan, results: list[DecodeResult]) -> list[Output]:
        """Apply the results of the runner, which are in the order of `plan.decode`; returns all outputs. Plans are
        committed in the order in which they were made."""
        outputs = self.take_replies()
        rereads = self.spec.rereads_window
        for task, result in zip(plan.decode, results, strict=True):
            tasks = self._planned.get(task.slot)
            if not tasks or tasks[0] is not task:
                continue  # its stream has ended; another stream may have the slot
            del tasks[0]
            if not tasks:
                del self._planned[task.slot]
            stream = self.streams[task.stream]
            if result.unfinished:
                self._unfinished.append(task)
                continue
            stream.queued = bool(tasks)
            try:
                problem = result.error or self._invalid_result(task, result, stream.live)
                if problem:
                    self.fail(StreamFailed(task.stream, f"the model failed on this stream: {problem}"))
                    continue
                self._commit_text(stream, task, result, outputs)
                if self.recovering:
                    self._note_recovery(stream)
                keep = result.keep_from if rereads and not task.final else task.end
                if keep is not None:
                    self._release_before(stream, keep)
                if stream.flushes:
                    self._settle(stream, outputs)
                elif stream.available - task.end >= stream.stride or stream.pauses:
                    self._queue_if_due(stream)
                if self._parks and not stream.queued and task.stream in self.streams:
                    self._idle[task.stream] = stream
            except Exception as error:
                self.unexpected_errors.append((task.stream, error))
        return outputs + self.take_replies()

    def _commit_text(self, stream: Stream, task: DecodeTask, result: DecodeResult, outputs: list[Output]) -> None:
        """Commit the tokens of a task. Its positions may reach beyond flushes: the text ends at each, and the flush is
        answered before the tokens after it are added."""
        start = task.start
        flushes: Sequence[FlushMark] = () if self.spec.rereads_window else stream.flushes
        while flushes and start < flushes[0].position < task.end:
            stream.computed = position = flushes[0].position
            text = stream.text.commit(start, DecodeResult(result.tokens[: position - start]), ends_segment=True)
            if text is not None:
                outputs.append(text)
            self._answer_flushes(stream, position, outputs)
            start, result = position, DecodeResult(result.tokens[position - start :])
        stream.computed, stream.stride = task.end, result.stride or stream.stride
        text = stream.text.commit(start, result, bool(flushes) and flushes[0].position <= task.end)
        if text is not None:
            outputs.append(text)

    def check_integrity(self) -> None:
        """Check all bookkeeping against the streams. Raises AssertionError."""
        self.cache.check_integrity()
        for group, pool in enumerate(self.pools):
            pool.check_integrity([page for stream in self.streams.values() for page in stream.rings[group].pages])
        reserved = sum(self.spec.embeds_for(stream.live) for stream in self.streams.values())
        assert self._reserved_rows == reserved <= self.limits.cache_embeds
        assert self._live_count == sum(stream.live for stream in self.streams.values())
        resident = [stream for stream in self.streams.values() if stream.resident]
        for kind, pool in zip(self.spec.kv_groups, self.pools, strict=True):
            assert pool.reserved == len(resident) * kind.ring_pages, "reservations differ from the resident streams"
        assert self.parked == sum(not stream.resident and stream.paged_until > 0 for stream in self.streams.values())
        if self._parks:
            idle = {stream.id for stream in resident if not stream.queued}
            assert set(self._idle) == idle, "streams without work are not those that may be parked"
        slots = [stream.slot for stream in self.streams.values()] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_streams)), "slots were lost or handed out twice"
        for stream in self.streams.values():
            stream.timeline.check_integrity()
            assert stream.base <= stream.computed <= stream.available == stream.timeline.end
            rows = sum(len(entry) for entry in stream.cached.values())
            assert rows == stream.cached_rows <= self.spec.embeds_for(stream.live), "more rows than reserved for it"
            waiting = (self.live if stream.live else self.uploads).count(stream) if stream.resident else 0
            waiting += self._waiting_for_pages.count(stream) + self._arriving.count(stream)
            waiting += sum(task.slot == stream.slot for task in self._unfinished) + (stream.slot in self._planned)
            assert waiting == int(stream.queued), f"{stream.id} is queued {waiting} times"

    def _check_capacity(self, name: str, live: bool) -> None:
        if not self._free_slots:
            raise AtCapacity(name, f"all {self.limits.max_streams} streams are taken; try again later")
        for group, pool in zip(self.spec.kv_groups, self.pools, strict=True):
            if not self._parks and not pool.can_reserve(group.ring_pages):
                raise AtCapacity(name, f"fewer than {group.ring_pages} {group.name} pages are left; try again later")
        if self._reserved_rows + self.spec.embeds_for(live) > self.limits.cache_embeds:
            raise AtCapacity(name, "the encoder cache is reserved for open streams; try again later")

    def _append(self, stream: Stream, item: Item, now: int) -> None:
        rows = sum(item.mask) if item.mask else item.length if item.key or item.payload is not None else 0
        if rows > (largest := self._max_item_rows):
            raise ItemTooLarge(
                stream.id, f"an item with audio for {rows} positions; cut items to at most {largest} positions"
            )
        if rows > 0 and (item.payload is None or not item.key):
            raise BadItem(stream.id, f"the item at position {item.offset} has no audio or no key; send both")
        item.arrival = now
        try:
            stream.timeline.append(item)
            stream.clock.append(item)
        except ValueError as error:
            raise BadItem(stream.id, str(error)) from None
        stream.available = stream.timeline.end

    def _set_suspects_aside(self) -> list[Stream]:
        """Remove all crash suspects but one from the queues, so that a second crash identifies the stream. Returns the
        removed streams; streams past the positions of their crash are suspects no longer."""
        at_the_spot = []
        for stream in [*self.live, *self.uploads]:
            spot = self.suspects.get(stream.id)
            if spot is not None and stream.computed >= spot.stop:
                del self.suspects[stream.id]
            elif spot is not None and self._reach(stream) > spot.start:
                at_the_spot.append(stream)
        is_begun = any(task.stream in self.suspects for task in self._unfinished)
        aside = at_the_spot if is_begun else at_the_spot[1:]
        for stream in aside:
            (self.live if stream.live else self.uploads).remove(stream)
        return aside

    def _reach(self, stream: Stream) -> int:
        """Return the position up to which the next step may compute a stream. In one step a stream has either known or
        new tokens."""
        spec = self.spec
        if spec.rereads_window:
            return stream.computed + max(spec.replay_positions, spec.stride_positions)
        if stream.is_rebuilding:
            return min(stream.computed + spec.replay_positions, stream.forced_until)
        return stream.computed + spec.step_positions

    def _first_words(self) -> tuple[list[Stream], list[Stream]]:
        """Divide the live streams of a step while most are being rebuilt: all that are on time, and those of the
        others that have the fewest new positions; the rest waits."""
        on_time = [stream for stream in self.live if stream.id not in self.recovering]
        recovering = [stream for stream in self.live if stream.id in self.recovering]
        recovering.sort(key=lambda stream: stream.computed - stream.forced_until)
        return on_time + recovering[:FIRST_WORDS_STREAMS], recovering[FIRST_WORDS_STREAMS:]

    def _let_catch_up(self, planner: Planner) -> None:
        """Let streams that are behind compute several positions in this step: as many as a share of `LATE_SHARE` of
        the waiting streams has. If it is one, recovered streams compute two. While streams on time and rebuilds share
        the device, recovered streams wait."""
        held_back = self.recovering if self.rebuilding and self.on_time_count else ()
        late = {
            stream.id: behind
            for stream in self.live
            if (behind := stream.available - stream.computed) > 1
            and stream.id not in held_back
            and stream.id not in self.suspects
        }
        positions = 1
        while positions < MAX_CATCH_UP_POSITIONS:
            if sum(behind > positions for behind in late.values()) < max(1, LATE_SHARE * len(self.live)):
                break
            positions += 1
        if positions > 1:
            planner.let_catch_up(late, positions)
        elif recovered := late.keys() & self.recovering:
            planner.let_catch_up(recovered, MAX_CATCH_UP_POSITIONS // 2)

    def _note_recovery(self, stream: Stream) -> None:
        """Note that the stream has been rebuilt, or has caught up."""
        if stream.is_rebuilding:
            return
        if stream.id in self.rebuilding:
            self._end_rebuild(stream)
            stream.resident_since = self._now  # its turn begins
        elif stream.is_caught_up and (not self.rebuilding or self._steps_without_rebuild > STALLED_STEPS):
            self.recovering.discard(stream.id)

    def _end_rebuild(self, stream: Stream) -> None:
        """Note that the stream is rebuilt or closed. After the last rebuild, streams that have caught up are no longer
        recovering."""
        self.rebuilding.discard(stream.id)
        if not self.rebuilding:
            self.recovering = {name for name in self.recovering if not self.streams[name].is_caught_up}

    def _queue(self, stream: Stream, arrival: int | None) -> None:
        """Queue a stream whose oldest uncomputed audio came at `arrival` (None: only a flush waits)."""
        stream.queued = True
        if arrival is not None:
            stream.waiting_since = arrival
        if not stream.resident:
            self._waiting_for_pages.append(stream)
            return
        if self._parks:
            self._idle.pop(stream.id, None)
        (self.live if stream.live else self.uploads).append(stream)

    # Parking.

    def _can_reserve(self, kept_free: int = 0) -> bool:
        """Whether pages for one more resident stream can be reserved, with pages for `kept_free` others left."""
        groups = self.spec.kv_groups
        return all(
            pool.can_reserve(group.ring_pages * (1 + kept_free)) for group, pool in zip(groups, self.pools, strict=True)
        )

    def _reserve(self) -> None:
        """Reserve the pages of one resident stream."""
        for group, pool in zip(self.spec.kv_groups, self.pools, strict=True):
            pool.reserve(group.ring_pages)

    def _waiting_order(self, stream: Stream) -> tuple[bool, bool, int]:
        """Sort key of streams that need their pages: live streams before uploads; rebuilds later, unless they have
        waited for a turn; then by arrival."""
        return not stream.live, stream.is_rebuilding and not self._has_waited(stream), stream.waiting_since

    def _has_waited(self, stream: Stream) -> bool:
        """Whether the stream's oldest uncomputed audio has waited for a turn."""
        return self._now - stream.waiting_since >= TURN_NS

    def _next_to_park(self, waiting: Stream | None = None) -> Stream | None:
        """Return the next stream to park, for the stream `waiting` (None: to keep pages free); None if there is none.

        It is the stream that has been without work for longest, if that is `PARKED_AFTER_NS`. For a live stream it may
        also be an upload, or a stream whose turn is over.
        """
        silent = next(iter(self._idle.values()), None)
        if silent is not None and self._now - silent.waiting_since >= PARKED_AFTER_NS:
            return silent
        if waiting is None or not waiting.live:
            return None
        # A stream with new pages has computed nothing since it came to the device: it is not moved without a use.
        upload = next((stream for stream in reversed(self.uploads) if not stream.new_pages), None)
        if upload is not None or not self._has_waited(waiting):
            return upload
        over = (
            stream
            for stream in (*self._idle.values(), *self.live)
            if not (stream.new_pages or stream.is_rebuilding) and self._now - stream.resident_since >= TURN_NS
        )
        return min(over, key=_resident_for_longest, default=None)

    def _move_streams(self, plan: StepPlan) -> None:
        """Queue the streams whose pages have arrived. Bring streams with work back to the device, in `_waiting_order`,
        and park others for them and for the next ones. A stream that never had pages has nothing to copy and can be
        computed by this plan."""
        arriving, self._arriving = self._arriving, []
        for stream in arriving:
            if self.moves.is_restored(stream.slot):
                self._begin_turn(stream)
            elif self._now - stream.resident_since < COPY_LIMIT_NS:
                self._arriving.append(stream)
            else:
                raise RuntimeError(f"the pages of a stream have not arrived after {COPY_LIMIT_NS / 1e9:g} s")
        self._parking_room = min(self.limits.moves, self.moves.parking_room())
        waiting, self._waiting_for_pages = self._waiting_for_pages, []
        for stream in sorted(waiting, key=self._waiting_order) if len(waiting) > 1 else waiting:
            kept_free = 0 if stream.live else self._kept_free
            is_full = len(plan.restored) == self.limits.moves or len(self._arriving) == 2 * self.limits.moves
            if (is_full and stream.paged_until) or not self._make_room(plan, kept_free, stream):
                self._waiting_for_pages.append(stream)
                continue
            self._reserve()
            pages = stream.restore()
            if pages is None:
                self._begin_turn(stream)
            else:
                self.parked -= 1
                plan.restored.append(MoveTask(stream.slot, pages))
                stream.resident_since = self._now
                self._arriving.append(stream)
        # Keep pages free for the next streams.
        self._make_room(plan, self._kept_free - 1)

    def _begin_turn(self, stream: Stream) -> None:
        """The stream has its pages on the device: it can be computed."""
        stream.resident_since = self._now
        (self.live if stream.live else self.uploads).append(stream)

    def _make_room(self, plan: StepPlan, kept_free: int, waiting: Stream | None = None) -> bool:
        """Park streams until pages for one more stream can be reserved, with pages for `kept_free` others left. False
        if too few streams may be parked for `waiting` (`_next_to_park`)."""
        while not (has_room := self._can_reserve(kept_free)) and self._park_one(plan, waiting):
            pass
        return has_room

    def _park_one(self, plan: StepPlan, waiting: Stream | None) -> bool:
        """Park one stream; False if none may be parked, or if the plan can park no more."""
        stream = self._next_to_park(waiting) if len(plan.parked) < self._parking_room else None
        if stream is None:
            return False
        if stream.queued:
            (self.live if stream.live else self.uploads).remove(stream)
            self._waiting_for_pages.append(stream)
        else:
            del self._idle[stream.id]
        plan.parked.append(MoveTask(stream.slot, stream.park()))
        self.parked += 1
        return True

    def _queue_if_due(self, stream: Stream) -> None:
        if not stream.queued and stream.is_due(self.spec):
            self._queue(stream, stream.timeline.arrival_at(stream.computed))

    def _skip_to(self, stream: Stream, position: int) -> None:
        if position > stream.base:
            stream.computed = max(stream.computed, position)
            self._release_before(stream, position)

    def _release_before(self, stream: Stream, keep: int) -> None:
        """The stream needs nothing below position `keep` any more: release cache entries and old items there."""
        if keep > stream.base:
            stream.base = keep
        timeline, index = stream.timeline, stream.released
        stop = stream.released = timeline.first_beyond(index, keep)
        while index < stop:
            stream.cached_rows -= self.cache.release(stream.cached, index)
            index += 1
        if stream.encoded < stop:
            stream.drop_audio_before(stop)
        if keep >= stream.prune_at:
            stream.prune_at = keep + PRUNE_EVERY_POSITIONS
            horizon = keep - self.spec.history_positions
            timeline.prune(horizon)
            stream.clock.prune(horizon)

    def _invalid_result(self, task: DecodeTask, result: DecodeResult, live: bool) -> str | None:
        """Return what is wrong with a runner's result, if anything."""
        if not self.spec.rereads_window:
            tokens, positions = len(result.tokens), task.end - task.start
            return None if tokens == positions else f"{tokens} tokens for {positions} positions"
        if result.keep_from is not None and not task.base <= result.keep_from <= task.end:
            return f"keep_from {result.keep_from} is outside [{task.base}, {task.end}]"
        is_full = not task.final and task.end - task.base >= self.spec.window_for(live)
        if is_full and result.keep_from in (None, task.base):
            return "the window is full and did not move"
        return None

    def _settle(self, stream: Stream, outputs: list[Output]) -> None:
        """Answer the flushes that the stream has reached; close it if it is finished, else queue it if it has work."""
        # A windowed model reads the audio after `base` again, so its text is final only before `base`.
        self._answer_flushes(stream, stream.base if self.spec.rereads_window else stream.computed, outputs)
        if stream.finished and not stream.flushes:
            outputs.append(Closed(stream.id, stream.clock.end_sample))
            self._close(stream)
        else:
            self._queue_if_due(stream)

    def _answer_flushes(self, stream: Stream, reached: int, outputs: list[Output]) -> None:
        """Answer the flushes up to position `reached`."""
        flushes = stream.flushes
        while flushes and flushes[0].position <= reached:
            mark = flushes.popleft()
            if mark.ends_text or (stream.finished and not flushes):
                outputs += stream.text.end_segment()
            if mark.tag is not None:
                outputs.append(Flushed(stream.id, mark.tag, stream.clock.sample_at(mark.position)))
            if mark.resume_at is not None:
                self._skip_to(stream, mark.resume_at)
                reached = stream.base

    def _close(self, stream: Stream) -> None:
        del self.streams[stream.id]
        self.suspects.pop(stream.id, None)
        self.recovering.discard(stream.id)
        if stream.id in self.rebuilding:
            self._end_rebuild(stream)
        del stream.text  # breaks the reference cycle, so that no garbage collection is needed
        self.cache.close(stream.id)
        if stream.resident:
            for ring in stream.rings:
                ring.close()
        elif stream.paged_until:
            self.parked -= 1
        self._idle.pop(stream.id, None)
        self._reserved_rows -= self.spec.embeds_for(stream.live)
        self._live_count -= stream.live
        self._free_slots.append(stream.slot)
        if stream.queued:
            for queue in (self.live if stream.live else self.uploads, self._waiting_for_pages, self._arriving):
                queue[:] = [other for other in queue if other is not stream]
            self._unfinished = [task for task in self._unfinished if task.slot != stream.slot]
            self._planned.pop(stream.slot, None)
        # The runner does not know a stream that closes before its first plan.
        if self._opened.pop(stream.slot, None) is None:
            self._closed_slots.append(stream.slot)
