"""Which text belongs to which turn: routing text, speaking of one turn at a time, completing turns; pure.

Text comes in the order it was spoken. It goes to the oldest turn that still waits for text, or, where speech detection
ended that turn and the word was spoken after its end, to a later one. Only the oldest unfinished turn may speak to
the client; what later turns get is held until then.

What is kept of an open turn is bounded: one that lasts too long ends after a word, is completed at once, and the next
turn goes on with the word behind it. The engine is not asked for anything, so the cut changes no word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from engine import messages
from realtime.errors import IllegalEvent
from realtime.session.events import (
    Committed,
    Completed,
    Delta,
    ServerEvent,
    SpeechStarted,
    SpeechStopped,
    TimedWord,
)
from realtime.session.words import WordCutter, first_word

# Text heard outside any turn joins the next turn if it was spoken this shortly before; otherwise it was not speech.
STRAY_SECONDS = 1.0
# A turn with more text than this ends, however short it is: about three hours of speech.
MAX_TURN_CHARACTERS = 150_000


class TurnState(Enum):
    OPEN = auto()
    COMMITTED = auto()
    COMPLETED = auto()
    FAILED = auto()
    CLEARED = auto()


TURN_MOVES: dict[TurnState, frozenset[TurnState]] = {
    TurnState.OPEN: frozenset({TurnState.COMMITTED, TurnState.CLEARED}),
    TurnState.COMMITTED: frozenset({TurnState.COMPLETED, TurnState.FAILED}),
    TurnState.COMPLETED: frozenset(),
    TurnState.FAILED: frozenset(),
    TurnState.CLEARED: frozenset(),
}


@dataclass(slots=True)
class Turn:
    """One utterance, from its first audio to its completed transcript."""

    item_id: str
    start: int
    end: int | None = None
    state: TurnState = TurnState.OPEN
    # The client was told that speech started.
    announced: bool = False
    # Speech detection set the end: words from here on belong to later turns. None: a flush of the engine marks it.
    words_until: int | None = None
    # The engine was asked for the rest of this turn's text.
    flushed: bool = False
    ended_at: float = 0.0
    sent: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    words: list[TimedWord] = field(default_factory=list)
    # How many of `words` have gone out with a delta.
    words_sent: int = 0
    tokens: int = 0
    # Length of all its text, sent and held.
    characters: int = 0

    def move(self, to: TurnState) -> None:
        if to not in TURN_MOVES[self.state]:
            raise IllegalEvent(f"a turn cannot go from {self.state.name} to {to.name}")
        self.state = to


@dataclass(frozen=True, slots=True)
class SavedTurns:
    """The turns as a value. `loose_turn` is a place in `[*ended, current]`, or `GONE`; None if there is none."""

    current: Turn | None
    ended: list[Turn]
    last_committed: str | None
    stray: list[tuple[str, TimedWord]]
    loose: str
    given: int
    loose_turn: int | None


# The loose end went to a turn that is over.
GONE = 1_000_000


class Turns:
    """The turns of a session that still matter: the open one, and those that wait for their last text."""

    def __init__(
        self, new_item_id: Callable[[], str], sample_rate: int, *, trim_start: bool, max_seconds: float
    ) -> None:
        self.current: Turn | None = None
        self.ended: deque[Turn] = deque()
        self.last_committed: str | None = None
        self.trim_start = trim_start
        self._new_item_id = new_item_id
        self._stray: deque[tuple[str, TimedWord]] = deque(maxlen=256)
        self._cutter = WordCutter()
        # Where the loose end went; the rest of its word must follow it.
        self._loose_turn: Turn | None = None
        self._stray_samples = int(STRAY_SECONDS * sample_rate)
        self._max_samples = int(max_seconds * sample_rate)

    def save(self) -> SavedTurns:
        loose, given = self._cutter.save()
        places = [*self.ended, self.current]
        loose_turn = None
        if self._loose_turn is not None:
            loose_turn = next((place for place, turn in enumerate(places) if turn is self._loose_turn), GONE)
        return SavedTurns(
            self.current, list(self.ended), self.last_committed, list(self._stray), loose, given, loose_turn
        )

    def load(self, saved: SavedTurns, shift: float) -> None:
        """Go on with the turns of another session, on a clock that shows `shift` more. They are this one's now."""
        self.current, self.ended, self.last_committed = saved.current, deque(saved.ended), saved.last_committed
        self._stray.extend(saved.stray)
        self._cutter.load(saved.loose, saved.given)
        if saved.loose_turn is not None:
            over = Turn("", 0, state=TurnState.COMPLETED)
            self._loose_turn = over if saved.loose_turn == GONE else [*saved.ended, saved.current][saved.loose_turn]
        for turn in self.ended:
            turn.ended_at += shift

    def open(self, start: int) -> Turn:
        """Reserve an item for audio from `start` on."""
        assert self.current is None
        self.current = turn = Turn(self._new_item_id(), start)
        while self._stray:
            text, word = self._stray.popleft()
            if word.end >= start - self._stray_samples:
                turn.held.append(text)
                turn.words.append(self._as_written(word, turn))
        return turn

    def end(self, end: int, now: float, words_until: int | None) -> Turn:
        """Close the open turn at sample `end`; it now waits for its last text, of the words before `words_until`."""
        assert self.current is not None
        turn, self.current = self.current, None
        turn.move(TurnState.COMMITTED)
        # Detection may see a pause before the last word, where a long turn was cut.
        turn.end, turn.ended_at, turn.words_until = max(end, turn.start), now, words_until
        self.last_committed = turn.item_id
        self.ended.append(turn)
        return turn

    def clear(self, start: int, end: int) -> None:
        """Forget the open turn; text that still comes for audio before `end` goes nowhere."""
        turn = self.current or Turn("", start)
        self.current = None
        self._stray.clear()
        turn.move(TurnState.CLEARED)
        turn.end, turn.flushed = end, True
        self.ended.append(turn)

    def drop(self) -> None:
        """Forget the open turn, whose text has all come."""
        if self.current is not None:
            self.current.move(TurnState.CLEARED)
        self.current = None
        self._stray.clear()

    def current_text(self) -> str:
        """What the open turn says so far, sent or not; only its last pieces matter to callers."""
        if self.current is None:
            return ""
        return "".join(self.current.sent[-4:] + self.current.held[-4:])

    def route(self, text: messages.Text, base: int, now: float) -> list[ServerEvent]:
        """Route new text of the engine stream whose first sample is `base`."""
        taker = self.ended[0] if self.ended else self.current
        if taker is not None:
            taker.tokens += len(text.tokens)
        out: list[ServerEvent] = []
        for piece in self._cutter.cut_words(text, base):
            place = self._loose_turn if piece.continues else self._place(piece.word)
            self._give(piece.fresh, piece.word, place)
            out += self._complete_passed(piece.word)
            if self._is_too_long(piece.word):
                out += self._cut_after(piece.word, now)
        return out + self.release()

    def release(self) -> list[ServerEvent]:
        """Send what may go out now: text of the oldest unfinished turn."""
        if not self.ended and self.current is not None:
            loose = self._cutter.take_loose()
            if loose:
                self._loose_turn = self.current
                self.current.held.append(loose)
        front = next((turn for turn in self.ended if turn.state is TurnState.COMMITTED), self.current)
        return [] if front is None else self._speak(front)

    def settle(self) -> list[ServerEvent]:
        """The engine has said all about the audio so far: the loose end is complete."""
        loose = self._cutter.cut_loose()
        taker = self.ended[0] if self.ended else self.current
        if loose and taker is not None and taker.state is not TurnState.CLEARED:
            taker.held.append(loose)
        return self.release()

    def complete_until(self, sample: int) -> list[ServerEvent]:
        """Finish every ended turn whose audio lies before `sample`."""
        out: list[ServerEvent] = []
        while self.ended and self.ended[0].end is not None and self.ended[0].end <= sample:
            out += self._complete(self.ended.popleft())
        return out + self.release()

    def fail_ended(self) -> list[Turn]:
        """Give up on the turns that wait for text; returns those the client was promised an answer for."""
        failed = [turn for turn in self.ended if turn.state is TurnState.COMMITTED]
        for turn in failed:
            turn.move(TurnState.FAILED)
        self.ended.clear()
        self._cutter.cut_loose()
        return failed

    def check_integrity(self) -> None:
        assert self.current is None or self.current.state is TurnState.OPEN
        ends = [turn.end for turn in self.ended]
        assert None not in ends
        assert ends == sorted(end for end in ends if end is not None)
        assert all(turn.state in (TurnState.COMMITTED, TurnState.CLEARED) for turn in self.ended)

    def _place(self, word: TimedWord) -> Turn | None:
        return next((turn for turn in self.ended if turn.words_until is None or _within(word, turn)), self.current)

    def _give(self, text: str, word: TimedWord, turn: Turn | None) -> None:
        if turn is None:
            self._stray.append((text, word))
        elif turn.state in (TurnState.OPEN, TurnState.COMMITTED):
            turn.held.append(text)
            turn.words.append(self._as_written(word, turn))
            turn.characters += len(text)

    def _as_written(self, word: TimedWord, turn: Turn) -> TimedWord:
        return first_word(word) if self.trim_start and not turn.words else word

    def _is_too_long(self, word: TimedWord) -> bool:
        """Whether the open turn must end after this word. Not if it was given the beginning of the next word too."""
        turn = self.current
        if turn is None or self.ended or self._cutter.gave_loose:
            return False
        return word.end - turn.start >= self._max_samples or turn.characters >= MAX_TURN_CHARACTERS

    def _cut_after(self, word: TimedWord, now: float) -> list[ServerEvent]:
        """End the open turn after its last word, and go on with another."""
        assert self.current is not None
        out, previous = self._speak(self.current), self.last_committed
        turn = self.end(word.end, now, words_until=word.end)
        assert turn.end is not None
        if turn.announced:
            out.append(SpeechStopped(turn.item_id, turn.end))
        self.ended.remove(turn)
        out += [Committed(turn.item_id, previous), *self._complete(turn, goes_on=True)]
        following = self.open(turn.end)
        following.announced = turn.announced
        if following.announced:
            out.append(SpeechStarted(following.item_id, following.start))
        return out

    def _complete_passed(self, word: TimedWord) -> list[ServerEvent]:
        """Finish turns that no flush was asked for, once a word was spoken after their end.

        Text comes in order, so nothing more belongs to them. Word times need not be exact: the silence that ended a
        turn lies between its last word and its end.
        """
        out: list[ServerEvent] = []
        while self.ended and not self.ended[0].flushed and not _within(word, self.ended[0]):
            out += self._complete(self.ended.popleft())
        return out

    def _complete(self, turn: Turn, *, goes_on: bool = False) -> list[ServerEvent]:
        if turn.state is TurnState.CLEARED:
            return []
        out = self._speak(turn)
        turn.move(TurnState.COMPLETED)
        assert turn.end is not None
        transcript = "".join(turn.sent)
        words = tuple(turn.words)
        done = Completed(
            turn.item_id, transcript, words, turn.start, turn.end, turn.tokens, turn.ended_at, goes_on=goes_on
        )
        return [*out, done]

    def _speak(self, turn: Turn) -> list[ServerEvent]:
        if not turn.held:
            return []
        text = "".join(turn.held)
        if self.trim_start and not turn.sent:
            text = text.lstrip()
        turn.held.clear()
        if not text:
            return []
        turn.sent.append(text)
        words, turn.words_sent = turn.words[turn.words_sent :], len(turn.words)
        return [Delta(turn.item_id, text, tuple(words))]


def _within(word: TimedWord, turn: Turn) -> bool:
    end = turn.end if turn.words_until is None else turn.words_until
    return end is None or (word.start + word.end) // 2 < end
