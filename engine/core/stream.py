"""One stream in the scheduler: its positions, KV pages, cache entries and flushes (`Stream`), and its text.

The scheduler makes and owns it. Its audio items are in a `Timeline` and its `SampleClock` converts positions to samples
(`engine/core/timeline.py`). `StreamText` turns the tokens that the runner returns into `Text` messages, with words and
their times in samples (`engine/core/words.py`). The memory of a stream is bounded: items and rows before the window are
released, its pages are a ring that is reused (`engine/core/kv_pages.py`), and of the text only the part is kept that is
unfinished or not sent yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from engine.core.encoder_cache import StreamEntries
from engine.core.kv_pages import PagePool, RingTable
from engine.core.plan import DecodeResult, TimedToken
from engine.core.timeline import SampleClock, Timeline
from engine.core.words import Detokenizer, WordBuilder
from engine.messages import Open, Saved, Text, Word
from engine.spec import ModelSpec, Vocabulary

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
        "available", "base", "cached", "cached_rows", "catch_up_until", "clock", "computed", "delay", "encoded",
        "finished", "flushes", "forced_until", "id", "is_held", "live", "new_pages", "paged_until", "pauses",
        "prune_at", "queued", "released", "resident", "rings", "slot", "spoke_lately", "stride", "text", "timeline",
        "waiting_since",
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
        self.resident = resident  # its pages are reserved on the device
        if resident:
            self.allocate_pages(start)
        self.text = StreamText(self, vocabulary)

    @property
    def is_rebuilding(self) -> bool:
        """Whether the next positions repeat known tokens."""
        return self.computed < self.forced_until

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

    def park(self) -> list[list[int]] | None:
        """Free the pages on the device; returns them by KV group, to be copied to host memory. None: no plan has used
        them yet, so there is nothing to copy."""
        self.resident = False
        pages = [ring.park() for ring in self.rings]
        if not self.new_pages:
            return pages
        for ring in self.rings:
            ring.parked = ring.paged_until = 0
        self.new_pages, self.paged_until = [], 0
        return None

    def restore(self) -> list[list[int]] | None:
        """Allocate pages on the device, which are reserved; returns the pages to copy the parked contents into, by KV
        group. None: nothing was parked."""
        self.resident = True
        if not self.paged_until:
            self.allocate_pages(self.computed)
            return None
        self.new_pages = [(group, *entry) for group, ring in enumerate(self.rings) for entry in ring.restore()]
        return [ring.pages[:] for ring in self.rings]

    def is_due(self, spec: ModelSpec) -> bool:
        """Whether a step would have something to do for the stream."""
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
