"""One stream in the engine (`Stream`): its items, positions, KV pages and flushes, and its text (`StreamText`).

The scheduler makes and owns it. `StreamText` turns the tokens that the runner returns into text and words with sample
times, with `Detokenizer` and `WordBuilder`. The memory of a stream is bounded: items and rows behind the window are
released, its pages are a ring that is reused (`engine/core/kv_pages.py`), and of the text only what is unfinished or
not sent yet is kept.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

from engine.core.encoder_cache import Held
from engine.core.kv_pages import PagePool, RingTable
from engine.core.plan import DecodeResult, TimedToken
from engine.core.timeline import SampleClock, Timeline
from engine.messages import Open, Saved, Text, TokenLogProbability, Word
from engine.spec import ModelSpec, Vocabulary

# A script without spaces would otherwise make one endless word.
MAX_WORD_CHARACTERS = 64


class Detokenizer:
    """Decodes tokens to text incrementally; the text does not depend on how the tokens are split into calls."""

    __slots__ = ("_vocabulary", "_whole", "tail")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._whole = vocabulary.texts
        self.tail = b""  # bytes of an incomplete character

    def push(self, token: int) -> str:
        if not self.tail:
            text = self._whole[token]
            if text is not None:
                return text
        # A blank between the bytes of one character must not break the character.
        text, used = utf_8_decode(self.tail + self._vocabulary.pieces[token], "replace", False)
        self.tail = (self.tail + self._vocabulary.pieces[token])[used:]
        return text

    def flush(self) -> str:
        """Return a replacement character for an incomplete character, or an empty string."""
        text, _ = utf_8_decode(self.tail, "replace", True)
        self.tail = b""
        return text


class WordBuilder:
    """Groups text into words with times. A word begins at a marker or at a piece that starts with a space."""

    __slots__ = ("_log_probabilities", "_end", "_marked", "_start", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._end = 0
        self._marked: int | None = None
        self._log_probabilities: list[TokenLogProbability] = []

    def mark(self, sample: int) -> Word | None:
        """A word marker: the next word begins at `sample`. Returns the word that this completes."""
        word = self.flush()
        self._marked = sample
        return word

    def push(self, text: str, start: int, end: int) -> Word | None:
        """Add text of the samples [start, end); returns the word that this completes."""
        complete = None
        if self._text and (text[0].isspace() or len(self._text) >= MAX_WORD_CHARACTERS):
            complete = self.flush()
        if not self._text:
            text = text.lstrip()
            if not text:
                return complete
            self._start = start if self._marked is None else self._marked
            self._marked = None
        # Punctuation is not spoken: the end of a word is that of its last letters.
        if not any(map(str.isalnum, self._text)) or any(map(str.isalnum, text)):
            self._end = end if end > self._start else self._start
        self._text += text
        return complete

    def note_log_probability(self, piece: bytes, log_probability: float) -> None:
        """Note the log probability of the token pushed last."""
        self._log_probabilities.append((piece, log_probability))

    @property
    def unfinished(self) -> tuple[str, int, int, int | None, list[TokenLogProbability]]:
        """The word in progress: text, start, end, sample of a word marker, and its tokens' log probabilities."""
        return self._text, self._start, self._end, self._marked, list(self._log_probabilities)

    def resume(
        self, text: str, start: int, end: int, marked: int | None, log_probabilities: list[TokenLogProbability]
    ) -> None:
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
    """The words of a complete text. `sample_at` converts positions."""
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


# Blank tokens that a silent stream collects before it reports them in a Text without a delta.
REPORT_AFTER_TOKENS = 64
# Old items are removed once in this many positions, because each removal shifts the lists.
PRUNE_EVERY_POSITIONS = 32
# Number of last tokens that tell whether there was speech just before the engine was lost.
RECENT_POSITIONS = 25
# A recovered stream that is at most this far behind is on time again.
CAUGHT_UP_POSITIONS = 2
# Value of `covered` for a model without paged attention.
UNPAGED = 1 << 62


@dataclass(slots=True)
class FlushMark:
    """A flush: the text of all positions below `position` is wanted.

    `tag` goes into the answer; None: no answer. Unless `ends_text`, the sentence may continue. With `resume_at`, the
    stream continues at that position and skips the positions between. `cut_off`: there is speech at `position`, so the
    last word may be incomplete.
    """

    position: int
    tag: int | None
    ends_text: bool = False
    resume_at: int | None = None
    cut_off: bool = False


class Stream:
    """The scheduler's state of one stream. Positions count from the prefix of the model."""

    __slots__ = (
        "available", "base", "catch_up_until", "clock", "computed", "covered", "delay", "encoded", "finished",
        "flushes", "forced", "held", "held_embeds", "holding", "id", "live", "new_pages", "pauses", "prune_at",
        "queued", "released", "resident", "rings", "slot", "spoke_lately", "stride", "text", "timeline",
        "waiting_since",
    )  # fmt: skip

    def __init__(
        self,
        opened: Open,
        slot: int,
        delay: int,
        spec: ModelSpec,
        held: Held,
        pools: list[PagePool],
        vocabulary: Vocabulary,
        resident: bool = True,
    ) -> None:
        self.id = opened.stream
        self.slot = slot
        self.live = opened.live
        self.delay = delay
        start = spec.prefix_positions
        self.timeline = Timeline(start)
        self.clock = SampleClock(spec.samples_per_position, start)
        self.available = start  # positions below this have arrived
        self.computed = start  # positions below this are done
        self.base = start  # first position a model that rereads its window still needs
        self.stride = spec.stride_positions  # new positions needed for a step while audio keeps coming
        self.held = held  # items whose rows this stream holds in the encoder cache
        self.held_embeds = 0
        self.encoded = 0  # items below this index are or were in the encoder cache
        self.released = 0  # items below this index hold no cache rows any more
        self.forced = start + len(opened.forced_tokens)  # positions below this repeat known tokens
        # Whether there was speech shortly before the engine was lost: the last known tokens are not all blank.
        self.spoke_lately = not set(opened.forced_tokens[-RECENT_POSITIONS:]) <= vocabulary.blanks
        self.catch_up_until = opened.catch_up_until  # positions below this are computed stride by stride, even if late
        self.flushes: deque[FlushMark] = deque()  # not reached yet, in order
        self.finished = False
        self.pauses: deque[int] = deque()  # positions of pauses not computed yet, in order
        self.holding = False  # audio waits until the gate is certain that it is speech
        self.queued = False
        self.waiting_since = 0
        self.rings = [RingTable(group, pool) for group, pool in zip(spec.kv_groups, pools, strict=True)]
        self.new_pages: list[tuple[int, int, int]] = []
        self.covered = 0 if self.rings else UNPAGED  # positions below this have a page in every group
        self.prune_at = start + PRUNE_EVERY_POSITIONS
        self.resident = resident  # its pages are reserved on the device
        if resident:
            self.cover(start)
        self.text = StreamText(self, vocabulary)

    @property
    def is_rebuilding(self) -> bool:
        """Whether the next positions repeat known tokens."""
        return self.computed < self.forced

    @property
    def is_caught_up(self) -> bool:
        """Whether at most `CAUGHT_UP_POSITIONS` of the audio that has arrived are not computed."""
        return self.available - self.computed <= CAUGHT_UP_POSITIONS

    def cover(self, end: int) -> None:
        """Allocate pages for all positions below `end`, and note the new ring entries."""
        if end <= self.covered:
            return
        for group, ring in enumerate(self.rings):
            self.new_pages = self.new_pages + [(group, index, page) for index, page in ring.extend(end)]
        self.covered = min(ring.covered for ring in self.rings)

    def park(self) -> list[list[int]] | None:
        """Give up the pages on the device; returns them by group. None: no plan has used them yet, so that nothing of
        them is needed again."""
        self.resident = False
        pages = [ring.park() for ring in self.rings]
        if not self.new_pages:
            return pages
        for ring in self.rings:
            ring.parked = ring.covered = 0
        self.new_pages, self.covered = [], 0
        return None

    def restore(self) -> list[list[int]] | None:
        """Take pages on the device, which are reserved; returns those of parked contents by group, None without."""
        self.resident = True
        if not self.covered:
            self.cover(self.computed)
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
        goes_on = self.available - self.computed >= self.stride and not self.holding
        return goes_on or (bool(self.pauses) and self.next_pause() is not None)

    def next_pause(self) -> int | None:
        """Return the first pause that is not computed yet, or None."""
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
            "holding": self.holding,
            "flushes": [astuple(mark) for mark in flushes],
            "clock": self.clock.save(),
            "text": self.text.save(),
        }

    def resume(self, saved: Saved, available: int) -> None:
        """Restore a saved state; the stream's items are in the timeline already."""
        self.timeline.end = self.available = available
        self.base, self.computed, self.holding = saved["base"], saved["computed"], saved["holding"]
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
        self._unsent: list[int] = []
        self.pending: Sequence[
            TimedToken
        ] = ()  # punctuation after the last word, until the next text confirms or replaces it

    def commit(self, start: int, result: DecodeResult, ends_segment: bool) -> Text | None:
        """Return the Text of one step, or None if there is nothing to report."""
        tokens, unsent = result.tokens, self._unsent
        if len(tokens) == 1 and tokens[0] in self._blanks and start >= self._stream.forced and not ends_segment:
            unsent.append(tokens[0])  # most frames are blank
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

    def report(self) -> Text:
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
        self._keep(self.builder.flush(), words)
        return self._detokenizer.flush()

    def _push_frames(self, start: int, tokens: Sequence[int], words: list[Word]) -> str:
        """Add one token per position; a token stands for the audio `delay` positions before it."""
        stream, push = self._stream, self._detokenizer.push
        delta = ""
        for position, token in enumerate(tokens, start):
            # A replayed token was sent before: it only rebuilds the unfinished word.
            replayed = position < stream.forced
            if not replayed:
                self._unsent.append(token)
            if token == self._marker:
                word = self.builder.mark(stream.clock.sample_at(position - stream.delay))
                if not replayed:
                    self._keep(word, words)
                continue
            text = push(token)
            if text:
                heard = position - stream.delay
                word = self.builder.push(text, stream.clock.sample_at(heard), stream.clock.sample_at(heard + 1))
                if not replayed:
                    self._keep(word, words)
                    delta += text
        return delta

    def _push_timed(self, tokens: Sequence[TimedToken], words: list[Word]) -> str:
        clock = self._stream.clock
        delta = ""
        for timed in tokens:
            self._unsent.append(timed.token)
            text = self._detokenizer.push(timed.token)
            if text:
                self._keep(self.builder.push(text, clock.sample_at(timed.start), clock.sample_at(timed.end)), words)
                delta += text
            if timed.log_probability is not None:
                self.builder.note_log_probability(self._pieces[timed.token], timed.log_probability)
        return delta

    @staticmethod
    def _keep(word: Word | None, words: list[Word]) -> None:
        if word is not None and word.text:
            words.append(word)
