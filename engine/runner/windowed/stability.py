"""One text out of many utterances: marks and capitals between them. Pure.

A model that hears an utterance to its end puts a full stop there, for all it knows: a pause in the middle of a sentence
sounds like its end until somebody speaks on. So marks behind the last word stay open. The next utterance is heard
together with the end of this one and goes on from its last word, and so the model says itself whether a mark belongs
between them, and how the next word is written. If the end of this one was not heard with the next, or if a turn ended
between them, the marks stand, and a sentence begins behind them. Words before a full stop at a pause that the model
does not doubt are shown at once; the mark itself stays open even then, or a model that has ended its sentence too early
would have nothing more to say while the speaker goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from engine.core.plan import TimedToken

_SENTENCE_MARKS = (b".", b"?", b"!")
# Log-probability from which on the end of a sentence at a pause is believed. Measured with moonshine-tiny: whole clips
# have 7 of 8 ends above it, and 8 of 33 below.
SURE_END = -0.12


def before_marks(new: list[HypothesisToken], count: int, pieces: list[bytes]) -> int:
    """How many of the first `count` tokens there are without the marks at their end: a mark goes out with the word
    behind it, for which nobody has to wait."""
    while count and is_mark(pieces[new[count - 1].token]):
        count -= 1
    return count


def surely_ends(new: list[HypothesisToken], pieces: list[bytes], policy: Policy) -> bool:
    """Whether words that were heard up to a pause are a sentence that has ended, beyond doubt."""
    if not new or not pieces[new[-1].token].endswith(_SENTENCE_MARKS):
        return False
    return new[-1].log_probability >= SURE_END and all(heard.log_probability >= policy.sure for heard in new)


class Seams:
    """What stands between two utterances of a stream."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        tokens = {piece: token for token, piece in enumerate(pieces)}
        raised = {token: tokens.get(piece[:1] + piece[1:2].upper() + piece[2:]) for token, piece in enumerate(pieces)}
        # Tokens that begin a word, and the same with a capital.
        self._capitals = {
            token: capital
            for token, capital in raised.items()
            if capital is not None and capital != token and starts_word(pieces[token])
        }

    def prefix(self, before: Sequence[int], marks: list[TimedToken], own: list[int]) -> list[int]:
        """Text to go on from: the end of the last utterance as far as it is heard, the marks behind it that were said,
        and this utterance's own."""
        if before:
            return [*before, *(timed.token for timed in marks), *own]
        while own and is_mark(self._pieces[own[0]]):  # it belongs to words that are not heard
            own = own[1:]
        return own

    def join(
        self, marks: list[TimedToken], new: list[HypothesisToken], pending: bool, heard_on: bool
    ) -> tuple[list[TimedToken], list[HypothesisToken]]:
        """The first words of an utterance settle which of the last one's marks stand, and how they are written.

        `pending`: the marks have not been said yet. `heard_on`: the model went on from the words before them, without
        them. Then it has said itself what stands there, unless it begins a sentence and says nothing of the last.
        """
        says_mark = is_mark(self._pieces[new[0].token])
        if pending and heard_on and (says_mark or not self._begins_sentence(new[0])):
            return [], new
        return marks, self.begun(marks[-1].token, new) if marks else new

    def begun(self, last: int, new: list[HypothesisToken]) -> list[HypothesisToken]:
        """The words behind the token `last`: with a capital if that is a full stop, as far as there is a token for it.
        Behind a question somebody may go on, as here: "Why? he asked"."""
        if not self._pieces[last].endswith(b"."):
            return new
        token = self._capitals.get(new[0].token, new[0].token)
        return [HypothesisToken(token, new[0].peak, new[0].log_probability), *new[1:]]

    def _begins_sentence(self, first: HypothesisToken) -> bool:
        """Whether a word is written as at the beginning of a sentence. "I" and names always are: of these the
        vocabulary has no other form."""
        return first.token in self._capitals.values() and self._pieces[first.token] != b" I"


# Which part of a hypothesis may be committed, where its words are, and where a window can be cut. Pure.
#
# A windowed model hears the same audio again and again while a sentence grows. Text near the live edge still changes:
# the word may go on, and the model guesses how. What is committed is never taken back, so only the part that attends
# to audio safely behind the edge is committed, whole words at a time.
#
# Times are positions, as floats, absolute on the stream's clock.

POSITIONS_PER_SECOND = 12.5

# Marks that belong to the word before them and may follow it later.
_MARKS = frozenset(b".,?!;:")
_SENTENCE_ENDS = frozenset(b".?!")
_MUSIC = "\u266a".encode()
# A word is heard within this much of the place where attention to it peaks.
_REACH = 0.35 * POSITIONS_PER_SECOND
# Attention that peaks this far before what was said already is more than noise of the measurement.
FAR_BACK = 0.8 * POSITIONS_PER_SECOND
# The same at the end of a sound that was cut off in the middle of speech: the text has come to the last half second and
# then goes back. There is nothing left to hear then, and the model goes on by itself with words that nobody said.
_BACK_FROM_END = 0.25 * POSITIONS_PER_SECOND
_AT_THE_END = 0.5 * POSITIONS_PER_SECOND
# No second word begins in the last tenth of a second.
_LAST_WORD = 0.1 * POSITIONS_PER_SECOND
# Longest phrase looked for by the loop check, and how often it may be said in a row.
_LOOP_TOKENS = 12
_LOOP_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """How careful to be, in positions."""

    # Distance from the live edge at which a token may be committed: `agreed_margin` if two passes agree on it and its
    # log-probability is at least `sure`, or if that is at least `certain`; `doubtful_margin` if they do not agree and
    # it is not sure either; else `lone_margin`.
    agreed_margin: float = 0.4 * POSITIONS_PER_SECOND
    lone_margin: float = 1.2 * POSITIONS_PER_SECOND
    doubtful_margin: float = 1.2 * POSITIONS_PER_SECOND
    sure: float = -0.7
    certain: float = inf
    # A word has ended if the token behind it, which says so, has at least this log-probability.
    word_end: float = -inf
    # A window longer than this is cut at its best pause or sentence end.
    cut_beyond: float = 10.0 * POSITIONS_PER_SECOND
    # Audio that a cut should leave in the window.
    keep_behind: float = 3.0 * POSITIONS_PER_SECOND
    # A window shorter than this has little context yet: margins of what is not certain are wider by `young_margin`.
    young_below: float = 3.0 * POSITIONS_PER_SECOND
    young_margin: float = 0.6 * POSITIONS_PER_SECOND
    # The end of an utterance helps to understand the next one: how much of it is kept, the longest gap after which it
    # still helps, and the length of the next window from which on it is not needed.
    tail_length: float = 2.0 * POSITIONS_PER_SECOND
    tail_gap: float = 2.0 * POSITIONS_PER_SECOND
    tail_until: float = 2.5 * POSITIONS_PER_SECOND
    # Speech never has more tokens than this; a hypothesis that does is a loop.
    tokens_per_second: float = 6.5
    # Mean log-probability below which a whole utterance is taken for noise. Measured: 25 short utterances, most of
    # non-native speakers, have -0.67 at worst; of 36 noises, those that make whole words up are mostly below -0.9.
    doubt: float = -0.9


# Measured on 6 minutes of development clips while only settled blocks were heard, tokens that one pass had said 0.2 to
# 0.6 s from the edge, with more behind them, and that later passes could change: these kept 117 of 118 with a
# log-probability above -0.1, 77 of 82 between -0.4 and -0.1, 30 of 35 between -0.7 and -0.4, and 50 of 74 below that,
# where more distance did not help. Nor did it at the edge of what a block looked ahead to: 0.25 s and 0.45 s, as many
# word errors on 28 clips and 0.04 s later. Of the last words that passes over 111 clips committed with -0.1 as certain,
# these were wrong: 4 of 613 above -0.01, 23 of 492 above -0.05, 21 of 192 below; 14 of 174 with a token below -1 behind
# them, 34 of 1,123 others.
BLOCK_POLICY = Policy(
    agreed_margin=0.15 * POSITIONS_PER_SECOND,
    lone_margin=0.35 * POSITIONS_PER_SECOND,
    sure=-0.4,
    certain=-0.05,
    word_end=-1.0,
    young_margin=0.3 * POSITIONS_PER_SECOND,
)


@dataclass(slots=True)
class HypothesisToken:
    """A token of the current window, and the position where attention to it peaks."""

    token: int
    peak: float
    log_probability: float = 0.0


def starts_word(piece: bytes) -> bool:
    return piece[:1] == b" "


def is_mark(piece: bytes) -> bool:
    return bool(piece) and all(byte in _MARKS for byte in piece)


def without_second_mark(said: list[int], new: list[HypothesisToken], pieces: list[bytes]) -> list[HypothesisToken]:
    """`new` without leading marks that cannot stand there: a second mark after a committed one (the model changed its
    mind too late), or a mark at the start of an utterance (it belongs to words that are said already)."""
    if not said or is_mark(pieces[said[-1]]):
        while new and is_mark(pieces[new[0].token]):
            new = new[1:]
    return new


def rising(peaks: list[float], floor: float) -> list[float]:
    """Peaks that never run backwards: speech does not, attention now and then does. One that lies far behind the next
    is a stray: its token is where the next one is."""
    result = []
    for peak, following in pairwise([*peaks, inf]):
        floor = max(floor, following if peak > following + FAR_BACK else peak)
        result.append(floor)
    return result


def steady(peaks: list[float], floor: float) -> list[float]:
    """The places that never run backwards and are nearest to the peaks, all in all: a few peaks that lie far off, as at
    the beginning of a window that was never heard before, do not move the others.

    Neighbours that run backwards are put together, at the median of their peaks, until none do.
    """
    groups: list[list[float]] = []
    for peak in peaks:
        groups.append([max(peak, floor)])
        while len(groups) > 1 and _median(groups[-2]) > _median(groups[-1]):
            last = groups.pop()
            groups[-1] = sorted(groups[-1] + last)
    return [_median(group) for group in groups for _ in group]


def _median(values: list[float]) -> float:
    """Of sorted values; the lower one of two."""
    return values[(len(values) - 1) // 2]


class Progress:
    """How far the audio is said, token by token, and whether the text begins again.

    The first token of an utterance may attend to anything, and others do now and then. So a peak counts when the one
    before it or the one behind it lies near: if a stray one did, all the words before it would be taken for old ones.
    """

    __slots__ = ("_behind", "_far_back", "_last", "_said_until")

    def __init__(self, said_until: float, far_back: float) -> None:
        self._said_until = self._last = said_until
        self._far_back = far_back
        self._behind = 0

    def begins_again(self, peak: float) -> bool:
        """Take the next token; True if it is the second in a row that looks far back."""
        self._behind = self._behind + 1 if peak < self._said_until - self._far_back else 0
        near = abs(peak - self._last) <= self._far_back
        self._said_until = max(self._said_until, peak if near else min(peak, self._last))
        self._last = peak
        return self._behind == 2


def heard_before_the_end(
    tokens: list[int], places: list[float], window: tuple[float, float], pieces: list[bytes]
) -> int:
    """How many leading tokens of a hypothesis were heard, if the sound was cut off in the middle of speech. `window` is
    where what was said ends and where the sound ends.

    A model that is stopped in the middle of a word goes on with what would be likely: it has learnt that a sentence has
    an end. Words that it heard follow each other in the sound; what it makes up looks back from its end, or has no
    sound of its own.
    """
    floor, edge = window
    count = len(tokens)
    progress, reached = Progress(floor, _BACK_FROM_END), floor
    for index, place in enumerate(places):
        again = progress.begins_again(place)
        if again and reached >= edge - _AT_THE_END:
            count = index - 1
            break
        reached = max(reached, place)
    starts = [index for index in range(count) if starts_word(pieces[tokens[index]])]
    if count < len(tokens) and starts and not starts_word(pieces[tokens[count]]) and not is_mark(pieces[tokens[count]]):
        count = starts.pop()  # the rest of that word was made up
    last = [index for index in starts if index < count and places[index] > edge - _LAST_WORD]
    return last[1] if len(last) > 1 else count


def rereads_from(peaks: list[float], floor: float) -> int | None:
    """Index at which a hypothesis starts to repeat audio that was said before: two tokens in a row look far back."""
    progress = Progress(floor, FAR_BACK)
    for index, peak in enumerate(peaks):
        if progress.begins_again(peak):
            return index - 1
    return None


def without_repeat(
    said: list[int], new: list[HypothesisToken], places: list[float], window: tuple[float, float], pieces: list[bytes]
) -> list[HypothesisToken]:
    """`new` up to where it says again what was said before. `window` is where what was said ends and where the edge
    begins. Words at the edge right before the repetition belong to it if they stand before the same words in the text
    so far: there was no more to hear when they were said, so the text began again."""
    floor, edge = window
    again = rereads_from(places, floor)
    if again is None or again >= len(new):
        return new
    text = [pieces[token].lower() for token in (*said, *(heard.token for heard in new))]
    start = len(said) + again
    earlier = next((at for at in range(start - 1, -1, -1) if text[at : at + 2] == text[start : start + 2]), 0)
    while again and earlier and places[again - 1] >= edge and text[len(said) + again - 1] == text[earlier - 1]:
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
    """How many leading tokens of the uncommitted hypothesis are safe to commit.

    `window` is where the window starts and where the live edge is. `previous` is what the last pass said in the same
    place; `ended` says that the model finished its sentence behind the last token, rather than being stopped there.
    """
    base, edge = window
    young = policy.young_margin if edge - base < policy.young_below else 0.0
    agreed = 0
    while agreed < min(len(new), len(previous)) and new[agreed].token == previous[agreed]:
        agreed += 1
    count = 0
    for index, heard in enumerate(new):
        if heard.peak > edge - _margin(heard.log_probability, index < agreed, young, policy):
            break
        count += 1
    while count and not _complete(count, new, ended, pieces, policy):
        count -= 1
    return count


def _margin(log_probability: float, agreed: bool, young: float, policy: Policy) -> float:
    if log_probability >= policy.certain:
        return policy.agreed_margin
    sure = log_probability >= policy.sure
    if agreed and sure:
        return policy.agreed_margin + young
    return young + (policy.lone_margin if agreed or sure else policy.doubtful_margin)


def _complete(count: int, new: list[HypothesisToken], ended: bool, pieces: list[bytes], policy: Policy) -> bool:
    """Whether a word ends behind the first `count` tokens: the next one starts a word, or is a mark. If that is a mere
    guess, as at the live edge, the word may go on: "discourage" was "discouragement"."""
    if count == len(new):
        return ended
    following = pieces[new[count].token]
    return (starts_word(following) or is_mark(following)) and new[count].log_probability >= policy.word_end


def spans(tokens: list[HypothesisToken], before: float, after: float) -> list[tuple[float, float]]:
    """Where each token is heard: around its peak, up to halfway to its neighbours, never far from it."""
    peaks = [before, *(heard.peak for heard in tokens), after]
    borders = [(left + right) / 2 for left, right in pairwise(peaks)]
    return [
        (max(start, heard.peak - _REACH), min(max(end, heard.peak), heard.peak + _REACH))
        for heard, start, end in zip(tokens, borders[:-1], borders[1:], strict=True)
    ]


def loop_start(tokens: list[int]) -> int | None:
    """If a hypothesis ends in a phrase said over and over: the index after the phrase's first saying."""
    for length in range(1, min(_LOOP_TOKENS, len(tokens) // _LOOP_REPEATS) + 1):
        phrase = tokens[-length:]
        repeats, at = 1, len(tokens) - 2 * length
        while at >= 0 and tokens[at : at + length] == phrase:
            repeats, at = repeats + 1, at - length
        if repeats >= _LOOP_REPEATS:
            return at + 2 * length
    return None


def is_noise(text: bytes, log_probabilities: list[float], doubt: float) -> bool:
    """Whether an utterance is better left unsaid: the model notates music, has no word but marks for it, or does not
    believe its own words."""
    if not log_probabilities:
        return False
    return is_mark(text.replace(b" ", b"")) or _MUSIC in text or sum(log_probabilities) / len(log_probabilities) < doubt


def best_cut(
    committed: list[HypothesisToken], upcoming: float, edge: float, pieces: list[bytes], policy: Policy
) -> tuple[int, float] | None:
    """Where to cut a window that has grown too long: how many committed tokens stay behind, and the position.

    A long pause is best, the end of a sentence nearly as good. Audio that has been understood already helps to
    understand what follows, so some of it stays in the window where the text allows.
    """
    best: tuple[float, int, float] | None = None
    peaks = [*(heard.peak for heard in committed), upcoming]
    for index in range(1, len(committed) + 1):
        if index < len(committed) and not starts_word(pieces[committed[index].token]):
            continue
        pause = peaks[index] - peaks[index - 1]
        ending = pieces[committed[index - 1].token][-1:]
        bonus = 0.0
        if ending and ending[0] in _MARKS:
            bonus = 8.0 if ending[0] in _SENTENCE_ENDS else 3.0
        place = peaks[index - 1] + min(pause / 2, _REACH)
        missing = max(0.0, policy.keep_behind - (edge - place))
        useless = max(0.0, (edge - place) - 2 * policy.keep_behind)
        score = min(pause, 12.0) + bonus - 0.5 * missing - 0.5 * useless
        if best is None or score >= best[0]:
            best = (score, index, place)
    return None if best is None else (best[1], best[2])
