"""Decides which part of a windowed model's hypothesis is committed, and joins the texts of successive utterances. No
I/O.

The windowed runner calls these functions after every pass, and the second pass uses some of them; the only state is the
`Progress` that the caller keeps. A windowed model reads the same audio again and again while
a sentence grows. Text near the *live edge* (the end of the audio so far) still changes: a word may go on, and the
model guesses how. Committed text is never withdrawn, so only whole words that attend to audio at a safe distance from
the edge are committed. The time of a token is its *peak*: the position of the stream, as a float, that it attends to
most.

Between utterances, marks (punctuation) need care. A model puts a full stop at the end of an utterance, but a pause
within a sentence sounds like its end until speech goes on. So marks after the last word stay open (pending). The next
utterance is read together with the end of this one and continues its text, so the model itself decides whether a mark
belongs there and how the next word is written. If the two are not read together, or a turn ended between them, the
marks are committed, and a new sentence begins. Words before a confident full stop at a pause are committed at once, but
the mark stays open even then: a model that has ended its sentence too early would have no more text when the speaker
goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from engine.core.plan import TimedToken

_SENTENCE_MARKS = (b".", b"?", b"!")
# Log-probability from which on a full stop at a pause is taken for the end of a sentence. At the ends of complete
# recordings most full stops are above it.
SURE_END = -0.12


def before_marks(new: list[HypothesisToken], count: int, pieces: list[bytes]) -> int:
    """The first `count` tokens without the marks at their end: returns their number. A mark is committed with the word
    after it."""
    while count and is_mark(pieces[new[count - 1].token]):
        count -= 1
    return count


def surely_ends(new: list[HypothesisToken], pieces: list[bytes], policy: Policy) -> bool:
    """Whether the words up to a pause are, with high confidence, a complete sentence."""
    if not new or not pieces[new[-1].token].endswith(_SENTENCE_MARKS):
        return False
    return new[-1].log_probability >= SURE_END and all(token.log_probability >= policy.sure for token in new)


class UtteranceJoiner:
    """Joins the texts of two successive utterances of a stream: decides on marks and capitals. Has no state."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        tokens = {piece: token for token, piece in enumerate(pieces)}
        # Token that begins a word -> the same with a capital.
        self._capitals = {
            token: capital
            for token, piece in enumerate(pieces)
            if starts_word(piece)
            and (capital := tokens.get(piece[:1] + piece[1:2].upper() + piece[2:])) is not None
            and capital != token
        }

    def prefix(self, tail: Sequence[int], marks: list[TimedToken], committed: list[int]) -> list[int]:
        """The text that a pass continues: the tail of the last utterance (if it is read again) and its committed marks,
        then the committed tokens of this utterance."""
        if tail:
            return [*tail, *(timed.token for timed in marks), *committed]
        while committed and is_mark(self._pieces[committed[0]]):  # it belongs to words that are not read again
            committed = committed[1:]
        return committed

    def join(
        self, marks: list[TimedToken], new: list[HypothesisToken], pending: bool, continues_tail: bool
    ) -> tuple[list[TimedToken], list[HypothesisToken]]:
        """Decide, with the first words of an utterance (`new`), whether the marks of the last one are kept. Returns the
        kept marks, and `new` with the right capital.

        `pending`: the marks are not committed yet. `continues_tail`: the model continued the words before the marks,
        without the marks. Then its text decides, unless it begins a new sentence without a mark.
        """
        begins_with_mark = is_mark(self._pieces[new[0].token])
        if pending and continues_tail and (begins_with_mark or not self._begins_sentence(new[0])):
            return [], new
        return marks, self.capitalised(marks[-1].token, new) if marks else new

    def capitalised(self, last: int, new: list[HypothesisToken]) -> list[HypothesisToken]:
        """`new`, which follows the token `last`: after a full stop with a capital, if the vocabulary has such a token.
        Not after a question mark, because the sentence may go on: "Why? he asked"."""
        if not self._pieces[last].endswith(b"."):
            return new
        token = self._capitals.get(new[0].token, new[0].token)
        return [HypothesisToken(token, new[0].peak, new[0].log_probability), *new[1:]]

    def _begins_sentence(self, first: HypothesisToken) -> bool:
        """Whether a word is written as at the beginning of a sentence. "I" and names do not count: they are always
        capitalised, and the vocabulary has no other form of them."""
        return first.token in self._capitals.values() and self._pieces[first.token] != b" I"


# Commit decisions.

POSITIONS_PER_SECOND = 12.5

# Marks that belong to the word before them and may follow it later.
_MARKS = frozenset(b".,?!;:")
_SENTENCE_ENDS = frozenset(b".?!")
_MUSIC = "\u266a".encode()
# A word is within this distance of the position where attention to it peaks.
_WORD_REACH = 0.35 * POSITIONS_PER_SECOND
# Attention that peaks this far before the end of the earlier text is more than noise.
FAR_BACK = 0.8 * POSITIONS_PER_SECOND
# The same at the end of audio that was cut off within speech: the text has reached the last half second (_AT_THE_END)
# and then goes back by this much. The audio has no more words then, and the model invents some.
_BACK_FROM_END = 0.25 * POSITIONS_PER_SECOND
_AT_THE_END = 0.5 * POSITIONS_PER_SECOND
# At most one word begins in the last tenth of a second.
_LAST_WORD = 0.1 * POSITIONS_PER_SECOND
# Longest phrase, in tokens, that the loop check looks for, and how many repetitions make a loop.
_LOOP_TOKENS = 12
_LOOP_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds of the commit decisions: lengths in positions, confidence as log-probabilities."""

    # Distance from the live edge at which a token may be committed: `agreed_margin` if its log-probability is at least
    # `certain`, or at least `sure` and two passes agree on it; `doubtful_margin` if neither holds; else `lone_margin`.
    agreed_margin: float = 0.4 * POSITIONS_PER_SECOND
    lone_margin: float = 1.2 * POSITIONS_PER_SECOND
    doubtful_margin: float = 1.2 * POSITIONS_PER_SECOND
    sure: float = -0.7
    certain: float = inf
    # A word has ended if the token after it, which begins another word, has at least this log-probability.
    word_end: float = -inf
    # A window longer than this is cut at its best pause or end of a sentence.
    cut_beyond: float = 10.0 * POSITIONS_PER_SECOND
    # Audio that a cut should leave in the window after it.
    keep_behind: float = 3.0 * POSITIONS_PER_SECOND
    # A window shorter than `short_below` has little context: margins of tokens that are not certain grow by
    # `short_margin`.
    short_below: float = 3.0 * POSITIONS_PER_SECOND
    short_margin: float = 0.6 * POSITIONS_PER_SECOND
    # The end of an utterance (tail) is context for the next one: length that is kept, longest gap after which it still
    # helps, and the length of the next window from which on it is not needed.
    tail_length: float = 2.0 * POSITIONS_PER_SECOND
    tail_gap: float = 2.0 * POSITIONS_PER_SECOND
    tail_until: float = 2.5 * POSITIONS_PER_SECOND
    # Speech never has more tokens per second than this; a longer hypothesis is a loop.
    tokens_per_second: float = 6.5
    # Mean log-probability below which a whole utterance is taken for noise. Short utterances of non-native speakers are
    # above it; most noise for which a model invents words is below.
    doubt: float = -0.9


# For models that encode audio in blocks. Tuned on development clips: below `sure` one token in three still changed, and
# more distance from the edge did not help.
BLOCK_POLICY = Policy(
    agreed_margin=0.15 * POSITIONS_PER_SECOND,
    lone_margin=0.35 * POSITIONS_PER_SECOND,
    sure=-0.4,
    certain=-0.05,
    word_end=-1.0,
    short_margin=0.3 * POSITIONS_PER_SECOND,
)


@dataclass(slots=True)
class HypothesisToken:
    """A token of the current window."""

    token: int
    # Position of the stream that the token attends to most.
    peak: float
    log_probability: float = 0.0


def starts_word(piece: bytes) -> bool:
    """Whether a token begins a word."""
    return piece[:1] == b" "


def is_mark(piece: bytes) -> bool:
    """Whether a token is punctuation that follows a word."""
    return bool(piece) and all(byte in _MARKS for byte in piece)


def without_second_mark(before: list[int], new: list[HypothesisToken], pieces: list[bytes]) -> list[HypothesisToken]:
    """`new` without leading marks that cannot follow the text `before`: a second mark after a mark, or a mark at the
    start of an utterance, which belongs to text that is already committed."""
    if not before or is_mark(pieces[before[-1]]):
        while new and is_mark(pieces[new[0].token]):
            new = new[1:]
    return new


def rising(peaks: list[float], floor: float) -> list[float]:
    """The peaks, made monotonic: speech never goes backwards, attention sometimes does. A peak far after the next one
    is an outlier, and is replaced by the next."""
    result = []
    for peak, following in pairwise([*peaks, inf]):
        floor = max(floor, following if peak > following + FAR_BACK else peak)
        result.append(floor)
    return result


def steady(peaks: list[float], floor: float) -> list[float]:
    """The monotonic positions that are closest to the peaks. A few outliers, as at the beginning of a window that is
    read for the first time, do not move the others.

    Neighbours that go backwards are merged at the median of their peaks, until none do (isotonic regression).
    """
    groups: list[list[float]] = []
    for peak in peaks:
        groups.append([max(peak, floor)])
        while len(groups) > 1 and _median(groups[-2]) > _median(groups[-1]):
            last = groups.pop()
            groups[-1] = sorted(groups[-1] + last)
    return [_median(group) for group in groups for _ in group]


def _median(values: list[float]) -> float:
    """Median of sorted values; of two in the middle the lower one."""
    return values[(len(values) - 1) // 2]


class Progress:
    """Tracks, token by token, up to which position the audio has text, and detects a text that begins again.

    `text_until`: end of the text before. `far_back`: distance by which a repetition goes back.

    The first token of an utterance may attend to anything, and other tokens sometimes do. So a peak counts only if the
    one before or after it is near. Otherwise one outlier would make all words after it look repeated.
    """

    __slots__ = ("_behind", "_far_back", "_last", "_text_until")

    def __init__(self, text_until: float, far_back: float) -> None:
        self._text_until = self._last = text_until
        self._far_back = far_back
        self._behind = 0

    def begins_again(self, peak: float) -> bool:
        """Add the peak of the next token; True if it is the second in a row that attends far back."""
        self._behind = self._behind + 1 if peak < self._text_until - self._far_back else 0
        near = abs(peak - self._last) <= self._far_back
        self._text_until = max(self._text_until, peak if near else min(peak, self._last))
        self._last = peak
        return self._behind == 2


def spoken_before_the_end(
    tokens: list[int], peaks: list[float], window: tuple[float, float], pieces: list[bytes]
) -> int:
    """How many leading tokens of a hypothesis were really spoken, if the audio was cut off within speech. `window`: the
    end of the committed text and the end of the audio.

    If the audio ends within a word, the model continues with likely text, because it has learnt that sentences end.
    Real words follow each other in the audio; invented ones attend back from its end, or have no audio of their own.
    """
    floor, edge = window
    count = len(tokens)
    progress, reached = Progress(floor, _BACK_FROM_END), floor
    for index, peak in enumerate(peaks):
        again = progress.begins_again(peak)
        if again and reached >= edge - _AT_THE_END:
            count = index - 1
            break
        reached = max(reached, peak)
    starts = [index for index in range(count) if starts_word(pieces[tokens[index]])]
    if count < len(tokens) and starts and not starts_word(pieces[tokens[count]]) and not is_mark(pieces[tokens[count]]):
        count = starts.pop()  # the rest of that word is invented
    last_starts = [index for index in starts if index < count and peaks[index] > edge - _LAST_WORD]
    return last_starts[1] if len(last_starts) > 1 else count


def rereads_from(peaks: list[float], floor: float) -> int | None:
    """Index at which a hypothesis starts to repeat committed text: two tokens in a row attend far back; else None."""
    progress = Progress(floor, FAR_BACK)
    for index, peak in enumerate(peaks):
        if progress.begins_again(peak):
            return index - 1
    return None


def without_repeat(
    committed: list[int],
    new: list[HypothesisToken],
    peaks: list[float],
    window: tuple[float, float],
    pieces: list[bytes],
) -> list[HypothesisToken]:
    """`new` up to where it repeats committed text. `peaks`: raw peaks of `new`. `window`: the end of the committed
    text, and the position from which on a peak is at the edge. Words at the edge just before the repetition belong to
    the repetition if they precede the same words in the earlier text: the model had no more audio and began the text
    again."""
    floor, edge = window
    again = rereads_from(peaks, floor)
    if again is None or again >= len(new):
        return new
    text = [pieces[token].lower() for token in (*committed, *(token.token for token in new))]
    start = len(committed) + again
    repeated = text[start : start + 2]
    earlier = next((index for index in range(start - 1, -1, -1) if text[index : index + 2] == repeated), 0)
    while again and earlier and peaks[again - 1] >= edge and text[len(committed) + again - 1] == text[earlier - 1]:
        again, earlier = again - 1, earlier - 1
    return new[:again]


def committable(
    new: list[HypothesisToken],
    ended: bool,
    previous: list[int],
    window: tuple[float, float],
    pieces: list[bytes],
    policy: Policy,
) -> int:
    """How many leading tokens of the uncommitted hypothesis may be committed.

    `window`: the start of the window and the live edge. `previous`: the tokens of the last pass in the same place.
    `ended`: the model ended its text after the last token, rather than being stopped there.
    """
    base, edge = window
    short_margin = policy.short_margin if edge - base < policy.short_below else 0.0
    agreed = 0
    while agreed < min(len(new), len(previous)) and new[agreed].token == previous[agreed]:
        agreed += 1
    count = 0
    for index, token in enumerate(new):
        if token.peak > edge - _margin(token.log_probability, index < agreed, short_margin, policy):
            break
        count += 1
    while count and not _word_ends(count, new, ended, pieces, policy):
        count -= 1
    return count


def _margin(log_probability: float, agreed: bool, short_margin: float, policy: Policy) -> float:
    """Distance from the live edge at which a token may be committed: see `Policy`."""
    if log_probability >= policy.certain:
        return policy.agreed_margin
    sure = log_probability >= policy.sure
    if agreed and sure:
        return policy.agreed_margin + short_margin
    return short_margin + (policy.lone_margin if agreed or sure else policy.doubtful_margin)


def _word_ends(count: int, new: list[HypothesisToken], ended: bool, pieces: list[bytes], policy: Policy) -> bool:
    """Whether a word ends after the first `count` tokens: the next token starts a word or is a mark. If that token is
    unlikely, as at the live edge, the word may go on: "discourage" became "discouragement"."""
    if count == len(new):
        return ended
    following = pieces[new[count].token]
    return (starts_word(following) or is_mark(following)) and new[count].log_probability >= policy.word_end


def spans(tokens: list[HypothesisToken], before: float, after: float) -> list[tuple[float, float]]:
    """The interval of each token: around its peak, up to halfway to its neighbours, at most `_WORD_REACH` on each side.
    `before`, `after`: peaks of the neighbours of the first and of the last token."""
    peaks = [before, *(token.peak for token in tokens), after]
    borders = [(left + right) / 2 for left, right in pairwise(peaks)]
    return [
        (max(start, token.peak - _WORD_REACH), min(max(end, token.peak), token.peak + _WORD_REACH))
        for token, start, end in zip(tokens, borders[:-1], borders[1:], strict=True)
    ]


def loop_start(tokens: list[int]) -> int | None:
    """If a hypothesis ends in a repeated phrase: the index after its first occurrence; else None."""
    for length in range(1, min(_LOOP_TOKENS, len(tokens) // _LOOP_REPEATS) + 1):
        phrase = tokens[-length:]
        repeats, start = 1, len(tokens) - 2 * length
        while start >= 0 and tokens[start : start + length] == phrase:
            repeats, start = repeats + 1, start - length
        if repeats >= _LOOP_REPEATS:
            return start + 2 * length
    return None


def is_noise(text: bytes, log_probabilities: list[float], doubt: float) -> bool:
    """Whether an utterance should be dropped: its text has a note (the model's sign for music) or only marks, or its
    mean log-probability is below `doubt`."""
    if not log_probabilities:
        return False
    return is_mark(text.replace(b" ", b"")) or _MUSIC in text or sum(log_probabilities) / len(log_probabilities) < doubt


def best_cut(
    committed: list[HypothesisToken], next_peak: float, edge: float, pieces: list[bytes], policy: Policy
) -> tuple[int, float] | None:
    """Where to cut a window that is too long: (number of committed tokens before the cut, position); None: nowhere.
    `next_peak`: peak of the first token that is not committed.

    A long pause is best, the end of a sentence nearly as good. Where possible, some audio with committed text stays in
    the window, as context for the rest.
    """
    best: tuple[float, int, float] | None = None
    peaks = [*(token.peak for token in committed), next_peak]
    for index in range(1, len(committed) + 1):
        if index < len(committed) and not starts_word(pieces[committed[index].token]):
            continue
        pause = peaks[index] - peaks[index - 1]
        ending = pieces[committed[index - 1].token][-1:]
        bonus = 0.0
        if ending and ending[0] in _MARKS:
            bonus = 8.0 if ending[0] in _SENTENCE_ENDS else 3.0
        cut = peaks[index - 1] + min(pause / 2, _WORD_REACH)
        missing = max(0.0, policy.keep_behind - (edge - cut))
        excess = max(0.0, (edge - cut) - 2 * policy.keep_behind)
        # All terms are in positions: a sentence end is worth as much as a pause of 0.64 s.
        score = min(pause, 12.0) + bonus - 0.5 * missing - 0.5 * excess
        if best is None or score >= best[0]:
            best = (score, index, cut)
    return None if best is None else (best[1], best[2])
