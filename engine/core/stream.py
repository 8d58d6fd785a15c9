"""One stream in the scheduler (`Stream`): its items, positions, KV pages, cache entries and flushes, and its text.

The scheduler makes and owns it. The file has three parts:

- Items and samples: `Timeline` has the stream's audio items in order, and finds those of a range of positions;
  `SampleClock` converts between positions and samples.
- Words: `Detokenizer` joins the bytes of tokens to text, `WordBuilder` groups text into words; `words_of` makes the
  words of a text that is complete (`engine/server/revisions.py`).
- The stream itself, and `StreamText`, which turns the tokens that the runner returns into `Text` messages.

The memory of a stream is bounded: items and rows before the window are released, its pages are a ring that is reused
(`engine/core/caches.py`), and of the text only the part is kept that is unfinished or not sent yet.

Item indices are absolute: the first item of a stream has index 0, and pruning does not renumber. Pruned items leave the
lists when they outnumber the others, so the cost of an operation does not grow with the age of the stream. Sums and
offsets are lists of ints: reading single elements of a tensor or array would cost far more than the lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

from engine.core.caches import PagePool, RingTable, StreamEntries
from engine.core.plan import DecodeResult, TimedToken
from engine.messages import Item, Open, Saved, Text, TokenLogProbability, Word
from engine.spec import ModelSpec, Vocabulary

# Items and samples.


class ItemPositions:
    """The positions of an item: `length` positions from `offset`, and which of them have a row in the encoder cache.

    A position without audio has no row; it reads the row of silence. Without a mask every position has a row.
    """

    __slots__ = ("length", "offset", "rows_until")

    def __init__(self, offset: int, length: int, mask: Sequence[bool] | None = None) -> None:
        if offset < 0 or length < 0:
            raise ValueError(f"a range needs offset and length >= 0, got offset {offset} and length {length}")
        if mask is not None and len(mask) != length:
            raise ValueError(f"the mask has {len(mask)} entries for a range of {length} positions")
        self.offset = offset
        self.length = length
        # Number of rows of the positions up to and including each one; None: every position has a row.
        self.rows_until: list[int] | None = None if mask is None else list(accumulate(map(int, mask)))

    @property
    def end(self) -> int:
        return self.offset + self.length

    def row_count(self) -> int:
        """How many rows the item needs; cache space and compute budgets count rows, not positions."""
        if self.rows_until is None:
            return self.length
        return self.rows_until[-1] if self.rows_until else 0

    def row_slice(self, start: int, end: int) -> tuple[int, int]:
        """The slice of the item's rows that belongs to its positions [start, end); 0 is the item's first position."""
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"positions [{start}, {end}) are not inside a range of {self.length} positions")
        if self.rows_until is None:
            return start, end
        # Index -1 would be the last element, so 0 is a case of its own.
        first = self.rows_until[start - 1] if start else 0
        last = self.rows_until[end - 1] if end else 0
        return first, last

    def rows_of(self, start: int, end: int, item_rows: Sequence[int], silence: int) -> list[int]:
        """The row number of each position in [start, end): from the item's rows, or `silence` without audio."""
        first, last = self.row_slice(start, end)
        if last - first == end - start:
            return list(item_rows[first:last])
        if self.rows_until is None or first == last:
            return [silence] * (end - start)
        previous = [first, *self.rows_until[start : end - 1]]
        return [
            item_rows[after - 1] if after > before else silence
            for before, after in zip(previous, self.rows_until[start:end], strict=True)
        ]


class Timeline:
    """Sorted items that do not overlap. Offsets and ends are lists of ints, so bisect runs in C."""

    __slots__ = ("__weakref__", "_base", "_ends", "_items", "_masked", "_offsets", "_pruned", "end")

    def __init__(self, start: int = 0) -> None:
        self._base = 0  # absolute index of the first entry in the lists
        self._pruned = 0  # leading entries that are pruned but still in the lists
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._items: list[Item] = []
        # The positions of items with a mask, by index.
        self._masked: dict[int, ItemPositions] = {}
        self.end = start  # first position that no item covers

    def __len__(self) -> int:
        """Number of items appended so far, pruned ones included: the index of the next item."""
        return self._base + len(self._ends)

    @property
    def first(self) -> int:
        """Index of the first item that is not pruned."""
        return self._base + self._pruned

    def append(self, item: Item) -> None:
        """Add an item at the end, and set its `embeds`, the number of its positions with a row in the encoder cache.
        Raises ValueError if it overlaps the last item or is malformed."""
        offset = item.offset
        if offset < self.end or item.length < 0:
            place = f"item of {item.length} positions at {offset}, but the positions before {self.end} are covered"
            raise ValueError(f"{place}; send items in order and without overlap")
        if item.mask is None:
            item.embeds = item.length if item.key else 0
        else:
            span = ItemPositions(offset, item.length, item.mask)
            item.embeds = span.row_count()
            self._masked[len(self)] = span
        self.end = end = offset + item.length
        self._offsets.append(offset)
        self._ends.append(end)
        self._items.append(item)

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Indices [lo, hi) of the items that overlap positions [start, end); lo == hi if there are none."""
        pruned, base = self._pruned, self._base
        lo = bisect_right(self._ends, start, pruned)
        hi = bisect_left(self._offsets, end, pruned)
        if hi <= lo or end <= start:
            return base + lo, base + lo
        return base + lo, base + hi

    def item(self, index: int) -> Item:
        return self._items[index - self._base]

    def single_position_item(self, index: int, position: int) -> Item | None:
        """Fast path for live audio: item `index` if it is exactly this one position, with audio; else None."""
        place = index - self._base
        if place < len(self._items):
            item = self._items[place]
            if item.offset == position and item.length == 1 and item.embeds == 1:
                return item
        return None

    def items(self, lo: int, hi: int) -> list[Item]:
        """The items [lo, hi), indices as returned by `window`."""
        return self._items[lo - self._base : hi - self._base]

    def first_beyond(self, index: int, position: int) -> int:
        """Index of the first item from `index` on that ends after a position; else the index of the next item."""
        ends, place = self._ends, index - self._base
        while place < len(ends) and ends[place] <= position:
            place += 1
        return self._base + place

    def positions(self, index: int) -> ItemPositions:
        """The positions of an item."""
        masked = self._masked.get(index)
        if masked is not None:
            return masked
        item = self._items[index - self._base]
        return ItemPositions(item.offset, item.length)

    def arrival_at(self, position: int) -> int | None:
        """`Item.arrival` of the first item that ends after `position`; None if there is none."""
        place = bisect_right(self._ends, position, self._pruned)
        return self._items[place].arrival if place < len(self._items) else None

    def prune(self, position: int) -> None:
        """Drop the items that end at or before `position`; the others keep their indices."""
        ends, pruned = self._ends, self._pruned
        size = len(ends)
        while pruned < size and ends[pruned] <= position:
            if self._masked:
                self._masked.pop(self._base + pruned, None)
            pruned += 1
        self._pruned = pruned
        if pruned > 32 and pruned * 2 > size:
            del self._offsets[:pruned], ends[:pruned], self._items[:pruned]
            self._base += pruned
            self._pruned = 0

    def check_integrity(self) -> None:
        assert len(self._offsets) == len(self._ends) == len(self._items), "lists of different lengths"
        assert 0 <= self._pruned <= len(self._ends)
        previous = 0
        for offset, end, item in zip(self._offsets, self._ends, self._items, strict=True):
            assert previous <= offset <= end, f"item [{offset}, {end}) after {previous}"
            assert (item.offset, item.offset + item.length) == (offset, end)
            previous = end
        assert previous <= self.end
        masked = {index for index in range(self.first, len(self)) if self.item(index).mask is not None}
        assert masked == self._masked.keys(), "masked ranges and items disagree"


class SampleClock:
    """Converts between positions and samples of a stream.

    A *segment* is a run in which positions and samples advance together. A flush inserts silence, which advances
    positions only, so the next segment begins after it.
    """

    __slots__ = ("_origin", "_positions", "_samples", "_samples_per_position", "end_sample")

    def __init__(self, samples_per_position: int, first_position: int) -> None:
        self._samples_per_position = samples_per_position
        # First position and first sample of each segment.
        self._positions = [first_position]
        self._samples = [0]
        # Sample of position 0, extrapolated from the last segment.
        self._origin = -first_position * samples_per_position
        self.end_sample = 0  # first sample that no item covers

    def append(self, item: Item) -> None:
        """Record the sample of an item. Raises ValueError if its samples overlap earlier ones."""
        sample = item.sample
        if sample < self.end_sample:
            raise ValueError(f"item at sample {sample}, but the samples before {self.end_sample} are already covered")
        if sample != self._origin + item.offset * self._samples_per_position:
            self._positions.append(item.offset)
            self._samples.append(sample)
            self._origin = sample - item.offset * self._samples_per_position
        self.end_sample = sample + item.covered_samples(self._samples_per_position)

    def sample_at(self, position: float) -> int:
        """The sample at which a position starts."""
        positions, samples, segment_end = self._positions, self._samples, self.end_sample
        segment = len(positions) - 1
        if position < positions[segment]:
            segment = max(0, bisect_right(positions, position) - 1)
            segment_end = samples[segment + 1] if segment + 1 < len(samples) else segment_end
        sample = samples[segment] + int((position - positions[segment]) * self._samples_per_position)
        # Positions of inserted silence belong to the sample at which their segment ends.
        if sample > segment_end:
            sample = segment_end
        return sample if sample > 0 else 0

    def position_at(self, sample: int) -> int:
        """The position that contains a sample."""
        segment = max(0, bisect_right(self._samples, sample) - 1)
        return self._positions[segment] + max(0, sample - self._samples[segment]) // self._samples_per_position

    def save(self) -> Saved:
        return {"positions": list(self._positions), "samples": list(self._samples), "end_sample": self.end_sample}

    def resume(self, saved: Saved) -> None:
        """Restore a saved state."""
        self._positions, self._samples = list(saved["positions"]), list(saved["samples"])
        self._origin = self._samples[-1] - self._positions[-1] * self._samples_per_position
        self.end_sample = saved["end_sample"]

    def prune(self, position: int) -> None:
        """Drop the segments that end before `position`."""
        if len(self._positions) > 1 and self._positions[1] <= position:
            keep = bisect_right(self._positions, position) - 1
            del self._positions[:keep], self._samples[:keep]


# Words.

# A longer word is divided: a script without spaces would otherwise make one endless word.
MAX_WORD_CHARACTERS = 64


class Detokenizer:
    """Decodes tokens to text one by one. A character may consist of bytes of several tokens."""

    __slots__ = ("_pieces", "_texts", "tail")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._texts = vocabulary.texts
        self.tail = b""  # bytes of an incomplete character

    def push(self, token: int) -> str:
        """Return the text that the token completes; may be empty."""
        if not self.tail:
            text = self._texts[token]
            if text is not None:
                return text
        # A blank between the bytes of one character adds no bytes and must not end the character.
        undecoded = self.tail + self._pieces[token]
        text, used = utf_8_decode(undecoded, "replace", False)
        self.tail = undecoded[used:]
        return text

    def flush(self) -> str:
        """Return a replacement character for an incomplete character, or an empty string."""
        text, _ = utf_8_decode(self.tail, "replace", True)
        self.tail = b""
        return text


class WordBuilder:
    """Groups text into words with times in samples. A word begins at a marker or at text that starts with a space."""

    __slots__ = ("_end", "_log_probabilities", "_marked", "_start", "_text")

    def __init__(self) -> None:
        # The word in progress: its text and its first and last sample.
        self._text = ""
        self._start = 0
        self._end = 0
        # Sample of a word marker whose word has no text yet.
        self._marked: int | None = None
        self._log_probabilities: list[TokenLogProbability] = []

    def mark(self, sample: int) -> Word | None:
        """A word marker: the next word begins at `sample`. Returns the word that this completes."""
        word = self.flush()
        self._marked = sample
        return word

    def push(self, text: str, start: int, end: int) -> Word | None:
        """Add text of the samples [start, end); returns the word that this completes."""
        completed = None
        if self._text and (text[0].isspace() or len(self._text) >= MAX_WORD_CHARACTERS):
            completed = self.flush()
        if not self._text:
            text = text.lstrip()
            if not text:
                return completed
            self._start = start if self._marked is None else self._marked
            self._marked = None
        # Punctuation is not spoken: the end of a word is that of its last letters.
        if not any(map(str.isalnum, self._text)) or any(map(str.isalnum, text)):
            self._end = end if end > self._start else self._start
        self._text += text
        return completed

    def note_log_probability(self, piece: bytes, log_probability: float) -> None:
        """Add the log probability of the token whose text was pushed last, and its bytes."""
        self._log_probabilities.append((piece, log_probability))

    @property
    def unfinished(self) -> tuple[str, int, int, int | None, list[TokenLogProbability]]:
        """The word in progress: text, start, end, sample of a word marker, and its tokens' log probabilities."""
        return self._text, self._start, self._end, self._marked, list(self._log_probabilities)

    def resume(
        self, text: str, start: int, end: int, marked: int | None, log_probabilities: list[TokenLogProbability]
    ) -> None:
        """Restore the word in progress from the value of `unfinished`."""
        self._text, self._start, self._end, self._marked = text, start, end, marked
        self._log_probabilities = [(piece, log_probability) for piece, log_probability in log_probabilities]

    def flush(self) -> Word | None:
        """Complete the word in progress, if there is one."""
        if not self._text:
            return None
        word = Word(self._text.rstrip(), self._start, self._end, self._log_probabilities)
        self._text, self._log_probabilities = "", []
        return word


def words_of(tokens: Iterable[TimedToken], vocabulary: Vocabulary, sample_at: Callable[[float], int]) -> list[Word]:
    """The words of a complete text. `sample_at` converts positions to samples."""
    detokenizer, builder, words = Detokenizer(vocabulary), WordBuilder(), list[Word]()
    for timed in tokens:
        text = detokenizer.push(timed.token)
        if text:
            word = builder.push(text, sample_at(timed.start), sample_at(timed.end))
            words += [word] if word is not None and word.text else []
        if timed.log_probability is not None:
            builder.note_log_probability(vocabulary.pieces[timed.token], timed.log_probability)
    word = builder.flush()
    return [*words, word] if word is not None and word.text else words


# The stream and its text.

# A stream reports its blank tokens, in a Text without a delta, when it has collected this many.
REPORT_AFTER_TOKENS = 64
# Old items are removed once in this many positions, because each removal shifts the lists.
PRUNE_EVERY_POSITIONS = 32
# There was speech just before the engine was lost if this many last known tokens are not all blank (2 s of Voxtral).
RECENT_POSITIONS = 25
# A recovered stream with at most this many positions to compute has caught up.
CAUGHT_UP_POSITIONS = 2
# Value of `Stream.paged_until` for a model without KV groups: no position ever needs a page.
UNPAGED = 1 << 62


@dataclass(slots=True)
class FlushMark:
    """A flush: the text of all positions below `position` must be produced."""

    position: int
    # Goes into the answer, `Flushed`; None: no answer.
    tag: int | None
    # The text ends here; otherwise the sentence may continue after the flush.
    ends_text: bool = False
    # The stream continues at this position and skips the positions between.
    resume_at: int | None = None
    # There is speech at `position`, so the last word may be incomplete.
    cut_off: bool = False


class Stream:
    """The scheduler's state of one stream.

    Position 0 is the first of the model's prefix; audio begins at `ModelSpec.prefix_positions`.
    """

    __slots__ = (
        "ahead_until", "available", "base", "cached", "cached_rows", "catch_up_until", "clock", "computed", "delay",
        "encoded", "finished", "flushes", "forced_until", "id", "is_held", "live", "new_pages", "paged_until", "pauses",
        "prune_at", "queued", "rebuilt_until", "released", "resident", "resident_since", "rings", "slot",
        "spoke_lately", "stride", "text", "timeline", "waiting_since",
    )  # fmt: skip

    def __init__(
        self,
        opened: Open,
        slot: int,
        delay: int,
        spec: ModelSpec,
        cached: StreamEntries,
        pools: list[PagePool],
        vocabulary: Vocabulary,
        resident: bool = True,
    ) -> None:
        self.id = opened.stream
        self.slot = slot
        self.live = opened.live
        self.delay = delay  # positions between audio and the token for it
        start = spec.prefix_positions
        self.timeline = Timeline(start)
        self.clock = SampleClock(spec.samples_per_position, start)
        self.available = start  # positions below this have arrived
        self.computed = start  # positions below this are done
        self.base = start  # first position that is still needed: where the window of a windowed model begins
        self.stride = spec.stride_positions  # new positions needed for a step while audio keeps coming
        self.cached = cached  # entries of the encoder cache that this stream references, by item index
        self.cached_rows = 0  # number of their rows
        self.encoded = 0  # items below this index are or were in the encoder cache
        self.released = 0  # items below this index have no cache entry any more
        self.forced_until = start + len(opened.forced_tokens)  # positions below this repeat known tokens
        # Whether there was speech shortly before the engine was lost: the last known tokens are not all blank.
        self.spoke_lately = not set(opened.forced_tokens[-RECENT_POSITIONS:]) <= vocabulary.blanks
        # Positions below this are computed in single strides although they are late, for the same words as on time.
        self.catch_up_until = opened.catch_up_until
        self.flushes: deque[FlushMark] = deque()  # not reached yet, in order
        # Of an upload: the end of the last window that was planned ahead.
        self.ahead_until = 0
        self.finished = False
        self.pauses: deque[int] = deque()  # positions of pauses not computed yet, in order
        self.is_held = False  # audio waits until the speech gate is certain that it is speech
        self.queued = False  # it is in one of the scheduler's queues, or in a plan that is not committed
        self.waiting_since = 0  # when its oldest uncomputed audio arrived (ns, the clock of `Item.arrival`)
        self.rings = [RingTable(group, pool) for group, pool in zip(spec.kv_groups, pools, strict=True)]
        # Ring entries (KV group, ring index, page) that no plan has given to the runner yet.
        self.new_pages: list[tuple[int, int, int]] = []
        self.paged_until = 0 if self.rings else UNPAGED  # no position below this needs another page
        self.prune_at = start + PRUNE_EVERY_POSITIONS  # old items are removed when the window begins here
        self.rebuilt_until = 0  # up to where plans rebuild it, also those that are not committed
        self.resident = resident  # its pages are reserved on the device
        self.resident_since = 0  # with parking: when its pages came to the device (ns, the clock of `waiting_since`)
        if resident:
            self.allocate_pages(start)
        self.text = StreamText(self, vocabulary)

    @property
    def is_rebuilding(self) -> bool:
        """Whether the next positions repeat known tokens."""
        return self.computed < self.forced_until

    @property
    def rebuild_start(self) -> int:
        """Return the position from which the next plan rebuilds the stream."""
        return max(self.computed, self.rebuilt_until)

    @property
    def is_caught_up(self) -> bool:
        """Whether at most `CAUGHT_UP_POSITIONS` of the audio that has arrived are not computed."""
        return self.available - self.computed <= CAUGHT_UP_POSITIONS

    def allocate_pages(self, end: int) -> None:
        """Allocate pages for all positions below `end`, and note the new ring entries."""
        if end <= self.paged_until:
            return
        for group, ring in enumerate(self.rings):
            self.new_pages = self.new_pages + [(group, index, page) for index, page in ring.extend(end)]
        self.paged_until = min(ring.paged_until for ring in self.rings)

    def park(self) -> list[list[int]]:
        """Free the pages on the device; returns them by KV group, to be copied to host memory."""
        assert not self.new_pages, "a plan must have used the pages"
        self.resident = False
        return [ring.park() for ring in self.rings]

    def restore(self) -> list[list[int]] | None:
        """Allocate pages on the device, which are reserved; returns the pages to copy the parked contents into, by KV
        group. None: nothing was parked."""
        self.resident = True
        if not self.paged_until:
            self.allocate_pages(self.computed)
            return None
        self.new_pages = [(group, *entry) for group, ring in enumerate(self.rings) for entry in ring.restore()]
        return [ring.pages[:] for ring in self.rings]

    def rebuild_stop(self, spec: ModelSpec) -> int:
        """Return the position up to which the stream can be rebuilt now. As long as more of the audio with known tokens
        is to come, that is in multiples of `ModelSpec.replay_part`, and leaves at least that for the last step."""
        if self.available >= self.forced_until or self.finished:
            return min(self.available, self.forced_until)
        part, start = spec.replay_part, self.rebuild_start
        parts = min(self.available - start, self.forced_until - start - part) // part
        return start + max(0, parts) * part

    def is_due(self, spec: ModelSpec) -> bool:
        """Whether a step would have something to do for the stream."""
        if self.computed < self.forced_until:
            return self.rebuild_stop(spec) > self.rebuild_start
        reached = self.base if spec.rereads_window else self.computed
        if self.flushes and min(self.flushes[0].position, self.available) > reached:
            return True
        if not self.live and spec.rereads_window:
            return self.available >= self.base + spec.upload_positions
        has_stride = self.available - self.computed >= self.stride and not self.is_held
        return has_stride or (bool(self.pauses) and self.next_pause() is not None)

    def next_pause(self) -> int | None:
        """Return the first pause that is not computed yet, or None; drops the computed ones."""
        while self.pauses and self.pauses[0] <= self.computed:
            self.pauses.popleft()
        return self.pauses[0] if self.pauses else None

    def drop_audio_before(self, index: int) -> None:
        """Items before this one that were not encoded are skipped: their audio is not needed."""
        while self.encoded < index:
            self.timeline.item(self.encoded).payload = None
            self.encoded += 1

    def window_after(self, end: int) -> tuple[int, int] | None:
        """The window [base, stop) of the utterance after the one that ends at `end`; None if its end is not known."""
        base = end
        for mark in self.flushes:
            if mark.position > base:
                return base, mark.position
            base = max(base, mark.resume_at or 0)
        return None

    def save(self) -> Saved:
        """The state of a windowed model's stream, without `finished`: the gateway sends `Finish` again."""
        flushes = list(self.flushes)[: -1 if self.finished else None]
        return {
            "base": self.base,
            "computed": self.computed,
            "stride": self.stride,
            "pauses": list(self.pauses),
            "holding": self.is_held,
            "flushes": [astuple(mark) for mark in flushes],
            "clock": self.clock.save(),
            "text": self.text.save(),
        }

    def resume(self, saved: Saved, available: int) -> None:
        """Restore a saved state; the stream's items are in the timeline already."""
        self.timeline.end = self.available = available
        self.base, self.computed, self.is_held = saved["base"], saved["computed"], saved["holding"]
        self.pauses, self.stride = deque(saved["pauses"]), saved["stride"]
        self.flushes = deque(FlushMark(*mark) for mark in saved["flushes"])
        self.clock.resume(saved["clock"])
        self.text.resume(saved["text"])


class StreamText:
    """Turns a stream's tokens into Text messages: append-only deltas and words with audio times."""

    __slots__ = ("_blanks", "_detokenizer", "_marker", "_pieces", "_stream", "_unsent", "builder", "pending")

    def __init__(self, stream: Stream, vocabulary: Vocabulary) -> None:
        self._stream = stream
        self._detokenizer = Detokenizer(vocabulary)
        self.builder = WordBuilder()
        self._pieces = vocabulary.pieces
        self._blanks = vocabulary.blanks
        self._marker = vocabulary.word_marker
        self._unsent: list[int] = []  # tokens that no Text has contained yet
        # Punctuation after the last word, until the next text confirms or replaces it.
        self.pending: Sequence[TimedToken] = ()

    def commit(self, start: int, result: DecodeResult, ends_segment: bool) -> Text | None:
        """Return the Text of one step that began at position `start`, or None if there is nothing to report."""
        tokens, unsent = result.tokens, self._unsent
        if len(tokens) == 1 and tokens[0] in self._blanks and start >= self._stream.forced_until and not ends_segment:
            # Fast path: most positions are blank.
            unsent.append(tokens[0])
            return None if len(unsent) < REPORT_AFTER_TOKENS else self._text("", [])
        words: list[Word] = []
        delta = self._push_frames(start, tokens, words) if tokens else ""
        if result.timed or result.pending:
            delta += self._push_timed(result.timed, words)
            self.pending = result.pending
        if ends_segment:
            delta += self._finish_word(words)
        if not delta and not words and len(unsent) < REPORT_AFTER_TOKENS:
            return None
        return self._text(delta, words)

    def end_segment(self) -> list[Text]:
        """Emit the unfinished word and its punctuation: text before a flush does not wait for text after it."""
        words: list[Word] = []
        delta = self._push_timed(self.pending, words) + self._finish_word(words)
        self.pending = ()
        return [self._text(delta, words)] if delta or words else []

    def unsent_tokens(self) -> Text:
        """Return a Text with all tokens that were not sent yet, without a delta."""
        return self._text("", [])

    def save(self) -> Saved:
        word, pending = self.builder.unfinished, [astuple(timed) for timed in self.pending]
        return {"tail": self._detokenizer.tail, "word": word, "unsent": list(self._unsent), "pending": pending}

    def resume(self, saved: Saved) -> None:
        self._detokenizer.tail = saved["tail"]
        self.builder.resume(*saved["word"])
        self._unsent = list(saved["unsent"])
        self.pending = [TimedToken(*timed) for timed in saved["pending"]]

    def _text(self, delta: str, words: list[Word]) -> Text:
        stream = self._stream
        tokens, self._unsent = self._unsent, []
        return Text(stream.id, delta, words, tokens, stream.clock.sample_at(stream.computed))

    def _finish_word(self, words: list[Word]) -> str:
        self._add_word(self.builder.flush(), words)
        return self._detokenizer.flush()

    def _push_frames(self, start: int, tokens: Sequence[int], words: list[Word]) -> str:
        """Add one token per position; a token stands for the audio `delay` positions before it."""
        stream, push = self._stream, self._detokenizer.push
        delta = ""
        for position, token in enumerate(tokens, start):
            # A replayed token was sent before: it only rebuilds the unfinished word.
            replayed = position < stream.forced_until
            if not replayed:
                self._unsent.append(token)
            if token == self._marker:
                word = self.builder.mark(stream.clock.sample_at(position - stream.delay))
                if not replayed:
                    self._add_word(word, words)
                continue
            text = push(token)
            if text:
                audio = position - stream.delay
                word = self.builder.push(text, stream.clock.sample_at(audio), stream.clock.sample_at(audio + 1))
                if not replayed:
                    self._add_word(word, words)
                    delta += text
        return delta

    def _push_timed(self, tokens: Sequence[TimedToken], words: list[Word]) -> str:
        """Add tokens that have times of their own; returns their text."""
        clock = self._stream.clock
        delta = ""
        for timed in tokens:
            self._unsent.append(timed.token)
            text = self._detokenizer.push(timed.token)
            if text:
                self._add_word(self.builder.push(text, clock.sample_at(timed.start), clock.sample_at(timed.end)), words)
                delta += text
            if timed.log_probability is not None:
                self.builder.note_log_probability(self._pieces[timed.token], timed.log_probability)
        return delta

    @staticmethod
    def _add_word(word: Word | None, words: list[Word]) -> None:
        if word is not None and word.text:
            words.append(word)
