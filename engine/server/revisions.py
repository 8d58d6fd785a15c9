"""Second passes for finals (`Revisions`): decides which ended utterances of live streams are decoded again, and when.

A part of the engine loop. It keeps the audio and the streamed words of each stream since its last revision, and sends
the new words as `Revised`; `UtteranceReviser` (`engine/runner/background.py`) computes them on other threads. A
`Revision` covers the audio between two flushes, or between a flush and the end of the stream. Audio that goes on for
long without a flush is revised in parts while the speaker goes on, cut at pauses between words, so that little is left
to do at the flush. So is audio before a long silence.

A part is decoded again only if it has a word that is less probable than `SURE`, and if the result would be ready in
time, by the pace of the last revisions (one of `PROBE_EVERY` that would be late is begun nevertheless). A revision that
is late all the same is given up. In all other cases the streamed words stay, and the final waits only for earlier parts
of its turn that are still being decoded. The division into parts depends on the audio and the streamed words alone;
which parts are decoded again, and when, depends on the load too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np

from engine.core.plan import TimedToken
from engine.core.stream import words_of
from engine.errors import reading_state
from engine.messages import Closed, Flushed, Item, Output, Revised, Saved, Text, Word
from engine.options import REVISED
from engine.runner.base import EndedUtterance, Reviser
from engine.server.recent_audio import RecentAudio
from engine.server.speech import Listener
from engine.spec import ModelSpec, Vocabulary

logger = logging.getLogger(__name__)

SAMPLE_RATE = 16_000
# Audio before the first word and after the last one that is decoded again too: a word may have been missed there.
MARGIN_SAMPLES = SAMPLE_RATE
# Audio without words that is kept: words arrive some time after they are spoken, later under load.
WORDLESS_SAMPLES = 8 * SAMPLE_RATE
# After SHORTEST_PART_SAMPLES, audio without a flush is cut at the first pause of PAUSE_SAMPLES between two words. If
# there is none within LONG_SAMPLES, it is cut at the longest pause.
SHORTEST_PART_SAMPLES = 8 * SAMPLE_RATE
PAUSE_SAMPLES = 3 * SAMPLE_RATE // 10
LONG_SAMPLES = 20 * SAMPLE_RATE
# Longest audio of one revision; the model was trained on half a minute.
MAX_SAMPLES = 28 * SAMPLE_RATE
# A part shorter than SHORT_SAMPLES is decoded with context, because a few words alone are often recognised wrongly: the
# end of the part before it, at most MAX_CONTEXT_SAMPLES, if that part ended at most NEAR_SAMPLES before.
SHORT_SAMPLES = 5 * SAMPLE_RATE
MAX_CONTEXT_SAMPLES = 8 * SAMPLE_RATE
NEAR_SAMPLES = 3 * SAMPLE_RATE
# A part whose words are all at least this probable is not decoded again. On development speech (docs/experiments.md)
# two thirds of the audio has a less probable word, and nearly all errors are there.
SURE = 0.7
# Revisions of an engine that may wait, for each thread that computes them. The last places are reserved for streams
# without a waiting revision, so that a client that sends audio faster than it is spoken cannot occupy them all.
MAX_WAITING = 6
PLACES_FOR_OTHERS = 2
# A revision is given up after this time: if a client waits for its final, and while the speaker continues.
PATIENCE_SECONDS = 0.9
UNHURRIED_SECONDS = 5.0
# A rebuilt stream has caught up when it is nearer than this to the end of its audio.
BEHIND_SAMPLES = SAMPLE_RATE
# With more speaking streams than this for each thread that computes revisions, clients wait for less time: all words
# come later then, because the streams share the processor.
FEW_STREAMS = 3
# The weight of the newest revision in the measured pace.
NEWEST_WEIGHT = 0.25
# One in this many revisions that would be late is begun nevertheless, because the load may have ended.
PROBE_EVERY = 6

_PUNCTUATION = (b".", b",", b"?", b"!", b";", b":")


@dataclass(frozen=True, slots=True)
class StreamedWord:
    """A word as it was streamed: its first sample and its end, the number of its tokens, and its probability."""

    start: int
    end: int
    tokens: int
    confidence: float


@dataclass(slots=True)
class Revision:
    """A part of a stream that is decoded again."""

    # The samples [start, end) of the part.
    start: int
    end: int
    # The samples [start, end) of the audio that is decoded for it.
    audio_span: tuple[int, int]
    # The tokens that were streamed for it.
    draft: list[int]
    # The part before, as context: the first sample of its audio, and its tokens.
    context: tuple[int, list[int]] | None = None
    # The speaker continued: the end of the part need not be the end of a sentence.
    goes_on: bool = False
    # When it was submitted, and when it is given up (nanoseconds of the loop's clock).
    begun_ns: int = 0
    give_up_ns: int = 0
    # Seconds of audio of all revisions that waited when it was begun, its own included.
    queued_seconds: float = 0.0
    # None: nothing is decoded, and the streamed words stay.
    result: Future[list[TimedToken]] | None = None

    def save(self) -> Saved:
        return {
            "start": self.start,
            "end": self.end,
            "audio": list(self.audio_span),
            "draft": list(self.draft),
            "context": self.context,
            "goes_on": self.goes_on,
        }

    @classmethod
    def resumed(cls, saved: Saved) -> Revision:
        (first, last), context = saved["audio"], saved["context"]
        before = None if context is None else (context[0], list(context[1]))
        goes_on = bool(saved["goes_on"])
        return cls(saved["start"], saved["end"], (first, last), list(saved["draft"]), before, goes_on)

    @property
    def needs_from(self) -> int:
        """The first sample of the audio that is decoded, with the context."""
        return self.audio_span[0] if self.context is None else self.context[0]

    @property
    def seconds(self) -> float:
        """The length of the audio that is decoded."""
        return (self.audio_span[1] - self.needs_from) / SAMPLE_RATE


@dataclass(slots=True)
class RevisedStream:
    """The audio and streamed words of one stream since its last revision."""

    options: Mapping[str, str]
    audio: RecentAudio = field(default_factory=RecentAudio)
    # The end of the last revision, and the words and tokens that were streamed since.
    start: int = 0
    words: list[StreamedWord] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # The last part, as long as it may be context for the next one: first sample, end, tokens.
    previous: tuple[int, int, list[int]] | None = None
    # Tags of flushes at which the client ended a turn or dropped it: nothing before them is context.
    turn_end_tags: set[int] = field(default_factory=set)
    # Revisions that are not sent yet, in order.
    waiting: deque[Revision] = field(default_factory=deque)
    # The end of the stream, which waits for its last revision.
    closed: Closed | None = None
    # It was rebuilt after the loss of an engine, and no revision was done since it has caught up.
    recovers: bool = False

    def add_audio(self, items: Iterable[Item], spec: ModelSpec) -> None:
        self.audio.add(items, spec)
        self.audio.drop_before(self.needs_from)

    def add_text(self, text: Text) -> None:
        self.tokens += text.tokens
        for word in text.words:
            chances = [chance for piece, chance in word.chances if any(map(str.isalnum, piece.decode(errors="ignore")))]
            confidence = float(np.exp(min(chances))) if chances else 1.0
            self.words.append(StreamedWord(word.start_sample, word.end_sample, len(word.chances), confidence))

    @property
    def needs_from(self) -> int:
        """The first sample whose audio is still needed."""
        first = self.words[0].start - MARGIN_SAMPLES if self.words else self.audio.end - WORDLESS_SAMPLES
        before = [self.previous[0]] if self.previous is not None and self._is_near(first + MARGIN_SAMPLES) else []
        return min([max(self.start, first), *before, *(one.needs_from for one in self.waiting)])

    def _is_near(self, start: int) -> bool:
        return self.previous is not None and start - self.previous[1] <= NEAR_SAMPLES

    @property
    def needs_position(self) -> int | None:
        """The position of the item with that sample; None before the first item."""
        self.audio.drop_before(self.needs_from)
        return self.audio.position

    def is_silent(self, computed: int) -> bool:
        """Whether a long silence has followed the last word: its audio need not be kept for a flush. The model has
        computed the audio before sample `computed`; what was received may be far ahead of that."""
        return bool(self.words) and computed - self.words[-1].end > LONG_SAMPLES

    def long_part(self) -> int | None:
        """The sample at which long audio without a flush is divided, in a pause between two words; None: not yet."""
        if not self.words:
            return None
        earliest, best, cut = self._audio_start() + SHORTEST_PART_SAMPLES, -1, None
        for before, after in pairwise(self.words):
            pause = after.start - before.end
            if cut is not None and before.end - self._audio_start() > LONG_SAMPLES:
                break
            if before.end >= earliest and pause >= best:
                best, cut = pause, (before.end + after.start) // 2
                if pause >= PAUSE_SAMPLES:
                    return cut
        return cut if self.words[-1].end - self._audio_start() >= LONG_SAMPLES else None

    def take_part(self, end: int) -> tuple[Revision, float] | None:
        """Take the words and tokens up to this sample as a part. Returns what to decode again, and the probability of
        its least probable word; None if it has no words."""
        count = next((at for at, word in enumerate(self.words) if word.start >= end), len(self.words))
        words, self.words = self.words[:count], self.words[count:]
        tokens = sum(word.tokens for word in words) if self.words else len(self.tokens)
        draft, self.tokens = self.tokens[:tokens], self.tokens[tokens:]
        start, self.start = self.start, max(self.start, end)
        if not words:
            return None
        audio = max(start, words[0].start - MARGIN_SAMPLES), min(end, words[-1].end + MARGIN_SAMPLES)
        context = None
        if self.previous is not None and audio[1] - audio[0] < SHORT_SAMPLES and self._is_near(words[0].start):
            context = self.previous[0], self.previous[2]
        self.previous = _end_of_part(words, audio, draft)
        return Revision(start, end, audio, draft, context), min(word.confidence for word in words)

    def _audio_start(self) -> int:
        return max(self.start, self.words[0].start - MARGIN_SAMPLES)

    def save(self) -> Saved:
        return {
            "start": self.start,
            "words": [[word.start, word.end, word.tokens, word.confidence] for word in self.words],
            "tokens": list(self.tokens),
            "previous": self.previous,
            "borders": list(self.turn_end_tags),
            "waiting": [one.save() for one in self.waiting],
        }

    def resume(self, saved: Saved) -> None:
        self.start, self.tokens = saved["start"], list(saved["tokens"])
        self.words = [StreamedWord(*word) for word in saved["words"]]
        self.turn_end_tags = set(saved["borders"])
        if saved["previous"] is not None:
            first, last, tokens = saved["previous"]
            self.previous = first, last, list(tokens)
        self.waiting.extend(map(Revision.resumed, saved["waiting"]))


def _end_of_part(
    words: list[StreamedWord], audio: tuple[int, int], draft: list[int]
) -> tuple[int, int, list[int]] | None:
    """The audio and the tokens at the end of a part that may be context for the next one: all of it, or what follows
    the longest pause between two words near its end; None if there is none."""
    if audio[1] - audio[0] <= MAX_CONTEXT_SAMPLES:
        return *audio, draft
    best, found, tokens = -1, None, 0
    for before, after in pairwise(words):
        tokens += before.tokens
        pause = after.start - before.end
        if audio[1] - before.end <= MAX_CONTEXT_SAMPLES and pause >= best:
            best, found = pause, ((before.end + after.start) // 2, audio[1], draft[tokens:])
    return found


class Revisions:
    """The revisions of all streams that ask for them. `computed` returns the sample up to which the model has computed
    a stream; `end_failed` ends one stream with an error."""

    def __init__(
        self,
        spec: ModelSpec,
        vocabulary: Vocabulary,
        reviser: Reviser | None,
        listener: Listener | None,
        clock: Callable[[], int],
        computed: Callable[[str], int],
        end_failed: Callable[[str, Exception], None],
    ) -> None:
        self._spec = spec
        self._computed = computed
        self._vocabulary = vocabulary
        self._reviser = reviser
        self._threads = 1 if reviser is None else reviser.threads
        self._listener = listener
        self._clock = clock
        self._end_failed = end_failed
        self._streams: dict[str, RevisedStream] = {}
        # Measured seconds until a revision is done, per second of the audio that was waiting with it.
        self._pace = 0.0
        # Revisions that were not begun because of the pace.
        self._late = 0
        # Revisions that were done, that were skipped because of the load, and words that differ from the streamed ones.
        self.done = 0
        self.skipped = 0
        self.words_changed = 0

    def open(self, name: str, options: Mapping[str, str], live: bool) -> None:
        if REVISED in options and live and self._reviser is not None:
            self._streams[name] = RevisedStream({key: value for key, value in options.items() if key != REVISED})

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
        stream = self._streams.get(name)
        if stream is not None:
            stream.add_audio(items, self._spec)

    def mark_turn_end(self, name: str, tag: int) -> None:
        """The client has ended or dropped a turn with this flush."""
        if name in self._streams:
            self._streams[name].turn_end_tags.add(tag)

    def save(self, name: str) -> tuple[dict[str, Saved], int | None]:
        """The state of a stream, and the position from which on its audio is needed."""
        stream = self._streams.get(name)
        return ({}, None) if stream is None else ({"revisions": stream.save()}, stream.needs_position)

    def resume(self, name: str, saved: Saved, items: Iterable[Item]) -> None:
        """Continue from a saved state; `items` is the audio before it that is still needed. Raises BadItem."""
        stream = self._streams.get(name)
        if stream is None:
            return
        with reading_state(name, "revisions"):
            stream.resume(saved)
            stream.recovers = True
            stream.add_audio(items, self._spec)
            for one in stream.waiting:
                if one.seconds:
                    self._submit(one, stream, UNHURRIED_SECONDS)

    def kept_samples(self, name: str) -> int:
        """Samples of audio that are kept of a stream."""
        return self._streams[name].audio.kept_samples

    def close(self, name: str) -> Closed | None:
        """Drop a stream. Returns its end (`Closed`), if that was delayed."""
        stream = self._streams.pop(name, None)
        for revision in stream.waiting if stream is not None else ():
            if revision.result is not None:
                revision.result.cancel()
        return None if stream is None else stream.closed

    @property
    def has_work(self) -> bool:
        """Whether a step would bring a revision."""
        now = self._clock()
        oldest = [stream.waiting[0] for stream in self._streams.values() if stream.waiting]
        return any(one.result is None or one.result.done() or now > one.give_up_ns for one in oldest)

    @property
    def is_waiting(self) -> bool:
        """Whether revisions are being computed."""
        return any(stream.waiting for stream in self._streams.values())

    def add_revisions(self, outputs: list[Output]) -> None:
        """Begin revisions at the ends of parts in the outputs of a step, add the results of those that are done, and
        delay the ends of streams that wait for one."""
        if not self._streams:
            return
        for output in list(outputs):
            stream = self._streams.get(getattr(output, "stream", ""))
            if stream is not None and self._add_output(output, stream):
                outputs.remove(output)
        for name, stream in list(self._streams.items()):
            try:
                if stream.is_silent(self._computed(name)):
                    self._begin(stream, stream.words[-1].end + MARGIN_SAMPLES, UNHURRIED_SECONDS)
                outputs += self._finished(name, stream)
            except Exception as error:
                self._end_failed(name, error)

    def _add_output(self, output: Output, stream: RevisedStream) -> bool:
        """Process an output of the stream. Returns whether it is delayed until the last revision is done."""
        if isinstance(output, Text):
            stream.add_text(output)
            while (cut := stream.long_part()) is not None:
                self._begin(stream, cut, UNHURRIED_SECONDS, goes_on=True)
        elif isinstance(output, Flushed):
            patience = self._patience(stream)
            self._hurry(stream, patience)
            is_begun = self._begin(stream, output.sample, patience)
            output.is_revised = is_begun or self._wait_for_earlier(stream, output.sample)
            if output.tag in stream.turn_end_tags:
                stream.turn_end_tags, stream.previous = set(), None
        elif isinstance(output, Closed):
            patience = self._patience(stream)
            self._hurry(stream, patience)
            self._begin(stream, max(output.sample, stream.audio.end), patience)
            stream.closed = output if stream.waiting else None
        return stream.closed is output

    def _patience(self, stream: RevisedStream) -> float:
        """Seconds for which a client waits for a revision of its final. After the loss of an engine the
        client has waited anyway, and a short limit would make its final depend on the loss."""
        if stream.recovers:
            return UNHURRIED_SECONDS
        speaking = sum(bool(stream.words or stream.waiting) for stream in self._streams.values())
        return PATIENCE_SECONDS * min(1.0, FEW_STREAMS * self._threads / max(1, speaking))

    def _hurry(self, stream: RevisedStream, patience: float) -> None:
        """A client waits for the final from now on."""
        latest = self._clock() + int(patience * 1e9)
        for revision in stream.waiting:
            revision.give_up_ns = min(revision.give_up_ns, latest)

    def _begin(self, stream: RevisedStream, end: int, patience: float, *, goes_on: bool = False) -> bool:
        """Take the part up to this sample. Decode it again if a word is doubtful and the result will be ready in
        `patience` seconds. Returns whether it is decoded."""
        found = stream.take_part(end)
        if found is None:
            return False
        revision, confidence = found
        revision.goes_on = goes_on
        if confidence >= SURE:
            return False
        if revision.audio_span[1] - revision.audio_span[0] > MAX_SAMPLES or revision.needs_from < stream.audio.start:
            # Too long for the model, or its words came so late that its audio was dropped.
            self.skipped += 1
            return False
        waiting = sum(one.result is not None for other in self._streams.values() for one in other.waiting)
        if waiting >= MAX_WAITING * self._threads - (PLACES_FOR_OTHERS if stream.waiting else 0):
            self.skipped += 1
            return False
        if not stream.recovers and self._would_be_late(revision, patience):
            self.skipped += 1
            return False
        stream.waiting.append(revision)
        self._submit(revision, stream, patience)
        return True

    def _wait_for_earlier(self, stream: RevisedStream, end: int) -> bool:
        """The part up to this sample keeps its words. If parts before it are being decoded, its turn waits for them.
        Returns whether it waits."""
        if not stream.waiting:
            return False
        if stream.waiting[-1].result is None:
            stream.waiting.pop()
        stream.waiting.append(Revision(end, end, (end, end), []))
        return True

    def _waiting_seconds(self) -> float:
        """Seconds of audio that wait for the reviser or are being decoded by it."""
        return sum(one.seconds for stream in self._streams.values() for one in stream.waiting)

    def _submit(self, revision: Revision, stream: RevisedStream, patience: float) -> None:
        assert self._reviser is not None
        first, said = revision.audio_span[0], list[int]()
        if revision.context is not None:
            first, said = revision.context
        samples = stream.audio.cut(first, revision.audio_span[1])
        utterance = EndedUtterance(samples, revision.draft, stream.options, revision.audio_span[0] - first, said)
        revision.result = self._reviser.submit(utterance)
        revision.begun_ns = self._clock()
        revision.give_up_ns = revision.begun_ns + int(patience * 1e9)
        revision.queued_seconds = self._waiting_seconds()

    def _would_be_late(self, revision: Revision, patience: float) -> bool:
        if revision.goes_on and self._waiting_seconds():
            # Finals for which clients wait are decoded first.
            return True
        if self._pace * (self._waiting_seconds() + revision.seconds) <= patience:
            return False
        self._late += 1
        return self._late % PROBE_EVERY != 0

    def _measure_pace(self, revision: Revision, stream: RevisedStream) -> None:
        """Update the pace after a revision was done or given up. During a rebuild it is not representative."""
        if stream.recovers:
            return
        pace = (self._clock() - revision.begun_ns) / 1e9 / max(revision.queued_seconds, 0.1)
        self._pace += (NEWEST_WEIGHT if self._pace else 1.0) * (pace - self._pace)

    def _finished(self, name: str, stream: RevisedStream) -> Iterator[Output]:
        while stream.waiting:
            revision = stream.waiting[0]
            if revision.result is None:
                words = None
            elif revision.result.done():
                words = self._words(name, revision)
                self.done += 1
                self._measure_pace(revision, stream)
            elif self._clock() > revision.give_up_ns:
                revision.result.cancel()
                words = None
                self._measure_pace(revision, stream)
                self.skipped += 1
            else:
                return
            stream.waiting.popleft()
            stream.recovers &= stream.audio.end - self._computed(name) > BEHIND_SAMPLES
            yield Revised(name, revision.start, revision.end, words)
        if stream.closed is not None:
            closed, stream.closed = stream.closed, None
            yield closed

    def _words(self, name: str, revision: Revision) -> list[Word] | None:
        """The words of a revision; None if the model failed, or found no words where some were streamed."""
        assert revision.result is not None
        try:
            tokens = revision.result.result()
        except Exception as error:
            logger.error("stream %s: a final could not be revised", name, exc_info=error)
            return None
        last = [timed.token for timed in tokens[-1:]]
        if revision.goes_on and self._is_mark(last) and not self._is_mark(revision.draft[-1:]):
            # The model puts a full stop at the end of the audio, although the speaker continued.
            tokens = tokens[:-1]
        size, first = self._spec.samples_per_position, revision.needs_from
        words = words_of(tokens, self._vocabulary, lambda position: first + round(position * size))
        if self._listener is not None:
            self._listener.bound_revised(name, words)
        if words:
            self.words_changed += self._difference(revision.draft, [timed.token for timed in tokens])
        return words or None

    def _is_mark(self, tokens: list[int]) -> bool:
        """Whether this is a punctuation mark, and not another token or none."""
        return any(self._vocabulary.pieces[token] in _PUNCTUATION for token in tokens)

    def _difference(self, draft: list[int], tokens: list[int]) -> int:
        """The number of words that differ between two texts."""
        old, new = (b"".join(self._vocabulary.pieces[token] for token in text).split() for text in (draft, tokens))
        same = sum(block.size for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks())
        return max(len(old), len(new)) - same
