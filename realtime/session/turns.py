"""The turns of one session: assigns the engine's text to turns, holds it back where needed, and completes them.

A part of the session core, without I/O; `boundaries.py` opens and ends turns. Text arrives in the order of speech. It
goes to the oldest turn that still expects text; if speech detection has ended that turn and the word is later than its
end, it goes to a later turn. Words may come before the report of the speech track about their audio, because a report
waits for the turn detector: such a word is kept until it is known which turn is open there. Only the oldest unfinished
turn sends text to the client; text of later turns is held. If the session has speaker labels or revised words, a final
waits for them, up to a deadline.

The size of an open turn is bounded: one that is too long is ended after a word and completed at once, and the next turn
continues with the next word. The engine is not flushed for that, so the cut changes no text.

If turns end where the speaker changes, a word is held until its speaker is decided: deltas only append, so a word that
was sent for an item cannot move to the next one. The turn is split between two words of different speakers. The place
of the split depends on words and labels alone, and not on when they arrive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from msgspec import structs

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
    WordsLabelled,
)
from realtime.session.formatting import redactor_of
from realtime.session.redaction import Redactor, without_hidden
from realtime.session.settings import Settings
from realtime.session.speakers import SpeakerTimeline
from realtime.session.words import WordCutter, first_word, spelled, text_of

# Text outside any turn is added to the next turn if that begins within this time; otherwise it is dropped.
STRAY_SECONDS = 1.0
# The first part of a word has no time: it waits for the report of the speech track if the engine's text is this far
# beyond the last report. The pause that ends a turn and the delay of text are longer together.
UNREPORTED_SECONDS = 0.4
# How long a complete turn waits for the last labels of its speakers; after that it has the best guess.
LABELS_SECONDS = 0.5
# How long a complete turn waits for a revision. The engine cancels a late revision much sooner, so this limit matters
# only if the engine is lost.
REVISION_SECONDS = 20.0
# If turns end where the speaker changes, a complete turn waits for labels while audio comes that can decide them: until
# this long after the last audio, and at most `REVISION_SECONDS`.
IDLE_SECONDS = 2.0
# A word waits for its label until there are words this many seconds after it. An engine cancels a late label after 16
# s.
MAX_LABEL_SECONDS = 20.0
# Labels that are kept before the start of a turn, for its first words.
LABELS_BEFORE_SECONDS = 2.0
# A turn with more text is ended: about three hours of speech.
MAX_TURN_CHARACTERS = 150_000
# A turn whose final is formatted, redacted or searched is ended after this time, or this many words: the work for one
# final is bounded.
MAX_FORMATTED_SECONDS = 120
MAX_FORMATTED_TURN_WORDS = 300
# A turn whose final lists its words, their log-probabilities or speakers is ended after this time.
MAX_DETAILED_SECONDS = 300
# Words with times that a final lists; if there are more, the newest. Only a turn without word details can have more, if
# its client asks for them just before the end of the turn.
MAX_FINAL_WORDS = 1000


class TurnState(Enum):
    """Where a turn is between its first audio and its end; `TURN_TRANSITIONS` has the allowed transitions."""

    OPEN = auto()
    COMMITTED = auto()
    COMPLETED = auto()
    FAILED = auto()
    CLEARED = auto()


TURN_TRANSITIONS: dict[TurnState, frozenset[TurnState]] = {
    TurnState.OPEN: frozenset({TurnState.COMMITTED, TurnState.CLEARED}),
    TurnState.COMMITTED: frozenset({TurnState.COMPLETED, TurnState.FAILED}),
    TurnState.COMPLETED: frozenset(),
    TurnState.FAILED: frozenset(),
    TurnState.CLEARED: frozenset(),
}


@dataclass(slots=True)
class Turn:
    """One turn, from its first audio to its completed transcript. `start` and `end` are session samples.

    Turns are saved with the session under the names of these fields.
    """

    item_id: str
    start: int
    end: int | None = None
    state: TurnState = TurnState.OPEN
    # Whether the client was sent `SpeechStarted`.
    announced: bool = False
    # Words from this sample on belong to later turns. None: the client set the end of the turn, and all text until the
    # answer to the flush belongs to it.
    words_until: int | None = None
    # Whether the engine was flushed for this turn.
    flushed: bool = False
    # When the turn was committed, on the session's clock.
    ended_at: float = 0.0
    # Text that was sent to the client.
    sent: list[str] = field(default_factory=list)
    # Text that was not sent yet, in pieces of one word.
    held: list[str] = field(default_factory=list)
    # All words of the turn, sent or not.
    words: list[TimedWord] = field(default_factory=list)
    # Number of `words` that were sent with a delta.
    words_sent: int = 0
    # Tokens of the engine for this turn.
    tokens: int = 0
    # Length of `sent` and `held` together.
    characters: int = 0
    # Number of `words` whose speakers were sent.
    words_labelled: int = 0
    # Until when the complete turn waits for labels, and for revisions.
    labelled_by: float = 0.0
    revised_by: float = 0.0
    # If turns end where the speaker changes: the speaker of the turn, and the number of `words` that are decided to
    # belong to the turn.
    speaker: int | None = None
    words_settled: int = 0
    # Scored detection: whether the client was sent `EagerTurnEnd`.
    probably_over: bool = False
    # The probability that the turn was over, and whether the length of the silence alone ended it.
    confidence: float | None = None
    timeout: bool = False
    # Whether text was sent that was not redacted.
    is_raw: bool = False
    # Digits at the end of the text that was redacted and sent (see `redaction.py`).
    digits: int = 0
    # The part of the first word in `held` that was sent before the word was complete.
    begun: str = ""

    def move(self, to: TurnState) -> None:
        if to not in TURN_TRANSITIONS[self.state]:
            raise IllegalEvent(f"a turn cannot change from {self.state.name} to {to.name}")
        self.state = to


@dataclass(frozen=True, slots=True)
class RevisedPart:
    """Better words for the samples from `start` to `end`, in place of the streamed ones."""

    start: int
    end: int
    words: list[TimedWord]


@dataclass(frozen=True, slots=True)
class SavedTurns:
    """The saved state of `Turns`.

    `loose` and `given` are the state of the `WordCutter`. `loose_turn`: the turn of the incomplete word, as an index
    into `[*ended, current]`, or `GONE`; None if no turn has a part of it.
    """

    current: Turn | None
    ended: list[Turn]
    last_committed: str | None
    stray: list[tuple[str, TimedWord]]
    loose: str
    given: int
    loose_turn: int | None
    finishing: list[Turn] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    revised: list[RevisedPart] = field(default_factory=list)
    said_until: int = 0
    digits: int = 0
    unreported: list[tuple[str, TimedWord]] = field(default_factory=list)
    text_until: int = 0


# Instead of an index: the turn that has the first part of the incomplete word is not kept any more.
GONE = 1_000_000


class Turns:
    """The open turn of a session, and the ended turns that wait for their last text."""

    def __init__(
        self, new_item_id: Callable[[], str], sample_rate: int, *, trim_start: bool, max_seconds: float
    ) -> None:
        # The open turn.
        self.current: Turn | None = None
        # Turns that have ended and wait for text, the oldest first.
        self.ended: deque[Turn] = deque()
        # Turns with all of their text, whose finals wait for labels or a revision. Later turns wait behind them.
        self.finishing: deque[Turn] = deque()
        # Session samples at which revisions end that the engine has announced.
        self._awaited_revisions: list[int] = []
        # The revisions that have come and are needed.
        self._revised: deque[RevisedPart] = deque()
        # The end of the last part that the engine has revised or given up.
        self._revised_until = 0
        # The end of the last word of the last complete turn.
        self._final_until = 0
        # Set if text is redacted.
        self.redactor: Redactor | None = None
        # Digits at the end of the last complete turn (see `redaction.py`).
        self._digits = 0
        self._sample_rate = sample_rate
        # Set if speakers are labelled.
        self.speakers: SpeakerTimeline | None = None
        self.last_committed: str | None = None
        self.trim_start = trim_start
        self._new_item_id = new_item_id
        # Text outside any turn, as (text, word).
        self._stray: deque[tuple[str, TimedWord]] = deque(maxlen=256)
        # With turn detection: the sample up to which the speech track has reported. None: it opens and ends no turns.
        self.reported_until: int | None = None
        # Words that begin after it, as (text, word), and the sample up to which the engine's text has come.
        self._unreported: deque[tuple[str, TimedWord]] = deque()
        self._text_until = 0
        self._cutter = WordCutter()
        # The turn that got the first part of an incomplete word; the rest of the word goes there too.
        self._partial_turn: Turn | None = None
        self._stray_samples = int(STRAY_SECONDS * sample_rate)
        self._max_seconds = max_seconds
        self._formats = False
        self._splits_speakers = False
        self._max_samples = int(max_seconds * sample_rate)

    def save(self) -> SavedTurns:
        partial, taken = self._cutter.save()
        places = [*self.ended, self.current]
        loose_turn = None
        if self._partial_turn is not None:
            loose_turn = next((place for place, turn in enumerate(places) if turn is self._partial_turn), GONE)
        return SavedTurns(
            self.current,
            list(self.ended),
            self.last_committed,
            list(self._stray),
            partial,
            taken,
            loose_turn,
            list(self.finishing),
            list(self._awaited_revisions),
            list(self._revised),
            self._final_until,
            self._digits,
            list(self._unreported),
            self._text_until,
        )

    def load(self, saved: SavedTurns, shift: float) -> None:
        """Continue from saved turns, which then belong to this object; `shift` is our clock minus the saved one."""
        self.current, self.ended, self.last_committed = saved.current, deque(saved.ended), saved.last_committed
        self._stray.extend(saved.stray)
        self._unreported.extend(saved.unreported)
        self._text_until = saved.text_until
        self._cutter.load(saved.loose, saved.given)
        if saved.loose_turn is not None:
            gone = Turn("", 0, state=TurnState.COMPLETED)
            self._partial_turn = gone if saved.loose_turn == GONE else [*saved.ended, saved.current][saved.loose_turn]
        self.finishing = deque(saved.finishing)
        self._awaited_revisions, self._revised = saved.awaited, deque(saved.revised)
        self._final_until, self._digits = saved.said_until, saved.digits
        for turn in (*self.ended, *self.finishing):
            turn.ended_at += shift
            turn.labelled_by += shift
            turn.revised_by += shift

    def set_finals(self, settings: Settings) -> None:
        """Apply these settings to unsent text and to finals, and bound the length of a turn by the cost of its
        final."""
        formatting = settings.formatting
        self.redactor = redactor_of(formatting) if formatting.redacts else None
        max_seconds = self._max_seconds
        if settings.lists_words:
            max_seconds = min(max_seconds, MAX_DETAILED_SECONDS)
        self._formats = formatting.redacts or formatting.changes_finals or bool(formatting.search)
        if self._formats:
            max_seconds = min(max_seconds, MAX_FORMATTED_SECONDS)
        self._max_samples = int(max_seconds * self._sample_rate)
        self._splits_speakers = settings.cuts_speakers

    def open(self, start: int) -> Turn:
        """Open a turn, with a new item id, for the audio from sample `start` on."""
        assert self.current is None
        self.current = turn = Turn(self._new_item_id(), start)
        while self._stray:
            text, word = self._stray.popleft()
            if word.end >= start - self._stray_samples:
                turn.held.append(text)
                turn.words.append(self._stripped_if_first(word, turn))
        return turn

    def end(self, end: int, now: float, words_until: int | None) -> Turn:
        """End the open turn at sample `end`; it then waits for the words before sample `words_until`."""
        assert self.current is not None
        turn, self.current = self.current, None
        turn.move(TurnState.COMMITTED)
        # After a long turn was cut, detection may report an end before the start of the next turn.
        turn.end, turn.ended_at, turn.words_until = max(end, turn.start), now, words_until
        self.last_committed = turn.item_id
        self.ended.append(turn)
        return turn

    def clear(self, start: int, end: int) -> None:
        """Drop the open turn; text of audio before sample `end` that arrives later is dropped too."""
        turn = self.current or Turn("", start)
        self.current = None
        self._stray.clear()
        self._unreported.clear()
        self._drop_revised_in_open_turn(turn.start)
        turn.move(TurnState.CLEARED)
        turn.end, turn.flushed = end, True
        self.ended.append(turn)

    def drop_current(self) -> None:
        """Drop the open turn; all its text has arrived."""
        if self.current is not None:
            self._drop_revised_in_open_turn(self.current.start)
            self.current.move(TurnState.CLEARED)
        self.current = None
        self._stray.clear()

    def _drop_revised_in_open_turn(self, start: int) -> None:
        """The open turn, which begins at this sample, is dropped, and its revised words with it."""
        while self._revised and self._revised[-1].start >= start:
            self._revised.pop()

    def current_text(self) -> str:
        """The last pieces of the open turn's text, sent or not; enough to judge whether a sentence is complete."""
        if self.current is None:
            return ""
        return "".join(self.current.sent[-4:] + self.current.held[-4:])

    def route(self, text: messages.Text, base: int, now: float) -> list[ServerEvent]:
        """Assign new text to turns; `base` is the session sample at which its engine stream began."""
        turn = self.ended[0] if self.ended else self.current
        if turn is not None:
            turn.tokens += len(text.tokens)
        self._text_until = max(self._text_until, text.sample + base)
        out: list[ServerEvent] = []
        for piece in self._cutter.cut_words(text, base):
            if not piece.continues and self._is_unreported(piece.word):
                self._unreported.append((piece.fresh, piece.word))
                continue
            place = self._partial_turn if piece.continues else self._turn_of(piece.word)
            if piece.continues and place is not None:
                # The first part of the word was sent before words had to wait for labels: the turn cannot end before
                # it.
                place.begun, place.speaker = spelled(piece.word).removesuffix(piece.fresh), None
            out += self._assign(piece.fresh, piece.word, place, now)
        return out + self.release(now)

    def report(self, until: int | None, now: float) -> list[ServerEvent]:
        """The speech track has reported up to this sample (None: it opens and ends no turns): assign the text before
        it."""
        held_partial, self.reported_until = self._holds_partial, until
        out = self.assign_until(until, now)
        return out + self.release(now) if held_partial else out

    def assign_until(self, sample: int | None, now: float) -> list[ServerEvent]:
        """Assign the words that begin at this sample at the latest (None: all) to the turns that are known by now."""
        if not self._unreported:
            return []
        out: list[ServerEvent] = []
        while self._unreported and (sample is None or self._unreported[0][1].start <= sample):
            text, word = self._unreported.popleft()
            out += self._assign(text, word, self._turn_of(word), now)
        return out + self.release(now)

    def _is_unreported(self, word: TimedWord) -> bool:
        """Whether it is not known yet which turn is open at this word."""
        if self._unreported:
            return True
        if self.reported_until is None or word.start <= self.reported_until:
            return False
        return self._turn_of(word) is self.current

    @property
    def _holds_partial(self) -> bool:
        """Whether the partial word may belong to a turn that is not open yet."""
        if self._unreported:
            return True
        until = self.reported_until
        return until is not None and self._text_until > until + UNREPORTED_SECONDS * self._sample_rate

    def _assign(self, text: str, word: TimedWord, turn: Turn | None, now: float) -> list[ServerEvent]:
        self._add_word(text, word, turn)
        out = self._complete_passed(word, now)
        return out + self._split_after(word, now) if self._is_too_long(word) else out

    def release(self, now: float) -> list[ServerEvent]:
        """The deltas that may be sent now: held text of the oldest unfinished turn."""
        if self.finishing:
            return []
        takes_partial = self.redactor is None and not self._splits_speakers and not self._holds_partial
        if takes_partial and not self.ended and self.current is not None:
            partial = self._cutter.take_partial()
            if partial:
                self._partial_turn = self.current
                self.current.held.append(partial)
        front = next((turn for turn in self.ended if turn.state is TurnState.COMMITTED), self.current)
        if front is None:
            return []
        out, last = self._split_at_speakers(front, now)
        return out + self._emit_delta(last)

    def settle(self, now: float) -> list[ServerEvent]:
        """The engine has sent all text so far: an incomplete word is complete as it is."""
        text = self._cutter.end_partial()
        if self._unreported:
            at = self._unreported[-1][1].end
            if text.strip():
                self._unreported.append((text, TimedWord(text.strip(), at, at)))
            return self.release(now)
        turn = self.ended[0] if self.ended else self.current
        if text and turn is not None and turn.state is not TurnState.CLEARED:
            waits = self._splits_speakers or bool(self.finishing)
            is_word = (waits or self.redactor is not None) and bool(text.strip())
            if is_word or not waits:
                turn.held.append(text)
            if is_word:
                # Text is redacted and labelled as words, also if labels are turned on while it waits. So text without
                # a time becomes a word of no length.
                at = turn.words[-1].end if turn.words else turn.start
                turn.words.append(TimedWord(text.strip(), at, at))
        return self.release(now)

    def complete_until(self, sample: int, now: float) -> list[ServerEvent]:
        """Complete every ended turn whose audio lies before `sample`."""
        out: list[ServerEvent] = []
        while self.ended and self.ended[0].end is not None and self.ended[0].end <= sample:
            out += self._complete_or_wait(self.ended.popleft(), now)
        return out + self.release(now)

    def finish(self, now: float, *, at_once: bool = False) -> list[ServerEvent]:
        """Complete the turns that have their labels and revisions, or have waited for them long enough.

        `at_once`: complete all turns.
        """
        out: list[ServerEvent] = []
        while self.finishing and (at_once or now >= self._due(self.finishing[0])):
            out += self._complete(self.finishing.popleft(), now)
        return out + self.release(now) if out else []

    @property
    def final_due(self) -> float | None:
        """When the oldest final stops waiting; None if none waits."""
        return self._due(self.finishing[0]) if self.finishing else None

    def _due(self, turn: Turn) -> float:
        """The time until which a turn waits for labels and revisions; 0 if it has them."""
        labelled = 0.0 if self._is_labelled(turn) else self._labels_due(turn)
        return max(labelled, turn.revised_by if self._awaits_revision(turn) else 0.0)

    def _labels_due(self, turn: Turn) -> float:
        """The time until which a turn waits for labels.

        It is later after the loss of an engine, because then there is not even a guess for the last words.
        """
        assert self.speakers is not None
        is_late = self.speakers.is_behind and not all(map(self.speakers.has_final_label, turn.words[-1:]))
        return turn.revised_by if is_late else turn.labelled_by

    def note_audio(self, now: float) -> None:
        """More audio has come, which may decide the labels for which turns wait."""
        if self._splits_speakers:
            for turn in self.finishing:
                turn.labelled_by = max(turn.labelled_by, min(now + IDLE_SECONDS, turn.revised_by))

    def await_revision(self, end: int, now: float) -> None:
        """The engine will revise the words before this sample."""
        self._awaited_revisions.append(end)

    def revise(self, start: int, end: int, words: list[TimedWord] | None) -> None:
        """The engine has revised the words between two samples; None: it gave up."""
        self._revised_until = max(self._revised_until, end)
        self._awaited_revisions = [awaited for awaited in self._awaited_revisions if awaited > end]
        has_part = any(part.start < end and start < part.end for part in self._revised)
        if words is not None and not has_part and self._is_needed(end):
            self._revised.append(RevisedPart(start, end, words))

    def forget_awaited_revisions(self) -> None:
        """The engine stream that announced revisions is gone: none of them comes."""
        self._awaited_revisions.clear()

    def _is_needed(self, end: int) -> bool:
        """Whether words before this sample belong to a turn that is not complete."""
        turns = (*self.finishing, *self.ended, self.current)
        return any(turn is not None and turn.start - self._stray_samples < end for turn in turns)

    def _awaits_revision(self, turn: Turn) -> bool:
        """Whether words of this turn may still be revised: the engine revises a stream in order."""
        if turn.end is not None and self._revised_until >= turn.end:
            return False
        return any(end > turn.start for end in self._awaited_revisions)

    def newly_labelled(self, now: float) -> list[ServerEvent]:
        """The events for new labels: of words that were sent before, or the deltas of words that waited for labels."""
        if self._splits_speakers:
            return self.release(now)
        turn = next((turn for turn in self.ended if turn.state is TurnState.COMMITTED), self.current)
        if turn is None or self.speakers is None or self.finishing:
            return []
        # Labels may be turned on after an hour of text: no more words are looked up than a final lists.
        first = turn.words_labelled = max(turn.words_labelled, turn.words_sent - MAX_FINAL_WORDS)
        while turn.words_labelled < turn.words_sent and self.speakers.is_decided(turn.words[turn.words_labelled]):
            turn.words_labelled += 1
        words = tuple(map(self.speakers.with_decided_label, turn.words[first : turn.words_labelled]))
        turn.words[first : turn.words_labelled] = words
        return [WordsLabelled(turn.item_id, words)] if words else []

    def emit_held(self, now: float) -> list[ServerEvent]:
        """The deltas of ended turns whose words wait for labels, before these turns fail. Undecided labels are
        guessed."""
        out: list[ServerEvent] = []
        waiting = [turn for turn in self.ended if turn.state is TurnState.COMMITTED] if self._splits_speakers else []
        for turn in waiting:
            events, last = self._split_at_speakers(turn, now, ends=True)
            out += events + self._emit_delta(last)
        return out

    def fail_ended(self) -> list[Turn]:
        """Drop the turns that wait for text; returns the committed ones, for which the client expects an answer."""
        failed = [turn for turn in self.ended if turn.state is TurnState.COMMITTED]
        for turn in failed:
            turn.move(TurnState.FAILED)
        self.ended.clear()
        self.forget_awaited_revisions()
        self._cutter.end_partial()
        return failed

    def check_integrity(self) -> None:
        assert self.current is None or self.current.state is TurnState.OPEN
        ends = [turn.end for turn in self.ended]
        assert None not in ends
        assert ends == sorted(end for end in ends if end is not None)
        assert all(turn.state in (TurnState.COMMITTED, TurnState.CLEARED) for turn in self.ended)

    def _turn_of(self, word: TimedWord) -> Turn | None:
        return next((turn for turn in self.ended if turn.words_until is None or _within(word, turn)), self.current)

    def _add_word(self, text: str, word: TimedWord, turn: Turn | None) -> None:
        if turn is None:
            self._stray.append((text, word))
        elif turn.state in (TurnState.OPEN, TurnState.COMMITTED):
            turn.held.append(text)
            turn.words.append(self._stripped_if_first(word, turn))
            turn.characters += len(text)

    def _stripped_if_first(self, word: TimedWord, turn: Turn) -> TimedWord:
        is_first = not turn.words or turn.state is TurnState.COMPLETED
        return first_word(word) if self.trim_start and is_first else word

    def _is_too_long(self, word: TimedWord) -> bool:
        """Whether the open turn must end after this word. False if it has the first part of the next word already."""
        turn = self.current
        if turn is None or self.ended or self.finishing or self._cutter.has_taken_partial or self._splits_speakers:
            return False
        if self._formats and len(turn.words) >= MAX_FORMATTED_TURN_WORDS:
            return True
        return word.end - turn.start >= self._max_samples or turn.characters >= MAX_TURN_CHARACTERS

    def _split_after(self, word: TimedWord, now: float) -> list[ServerEvent]:
        """End the open turn after this word, complete it and open the next one."""
        assert self.current is not None
        out, previous = self._emit_delta(self.current), self.last_committed
        turn = self.end(word.end, now, words_until=word.end)
        assert turn.end is not None
        if turn.announced:
            out.append(SpeechStopped(turn.item_id, turn.end))
        self.ended.remove(turn)
        out += [Committed(turn.item_id, previous), *self._complete_whole(turn, goes_on=True)]
        following = self.open(turn.end)
        following.announced = turn.announced
        if following.announced:
            out.append(SpeechStarted(following.item_id, following.start))
        return out

    def _split_at_speakers(self, turn: Turn, now: float, *, ends: bool = False) -> tuple[list[ServerEvent], Turn]:
        """Split off and complete the parts of a turn that end where the speaker changes.

        Returns the events and the last part, which may continue. `ends`: undecided speakers are guessed.
        """
        out: list[ServerEvent] = []
        while self._splits_speakers and (count := self._words_before_split(turn, ends)) is not None:
            events, turn = self._split_before(turn, count, now)
            out += events
        return out, turn

    def _words_before_split(self, turn: Turn, ends: bool) -> int | None:
        """Label the words of a turn as far as their speakers are decided.

        Returns the number of words before the split, if one is found: before a word of another speaker, or before a
        word with which the turn would be too long. A word without a speaker belongs to the word before. `ends`:
        undecided speakers are guessed.
        """
        assert self.speakers is not None
        turn.words_settled = max(turn.words_settled, turn.words_sent)
        while turn.words_settled < len(turn.words):
            place, word = turn.words_settled, turn.words[turn.words_settled]
            is_late = turn.words[-1].end - word.end >= MAX_LABEL_SECONDS * self._sample_rate
            is_settled = self.speakers.has_final_label(word)
            if not (is_settled or is_late or ends):
                return None
            if place and self._is_full(turn, place):
                return place
            word = self.speakers.with_final_label(word) if is_settled else self.speakers.with_best_label(word)
            if word.speaker is not None and turn.speaker not in (None, word.speaker):
                return place
            turn.speaker = turn.speaker if word.speaker is None else word.speaker
            turn.words[place] = word
            turn.words_settled += 1
        return None

    def _is_full(self, turn: Turn, place: int) -> bool:
        """Whether the word at this place must belong to the next turn, because the turn would be too long."""
        if self._formats and place >= MAX_FORMATTED_TURN_WORDS:
            return True
        return turn.words[place].end - turn.start >= self._max_samples

    def _split_before(self, turn: Turn, count: int, now: float) -> tuple[list[ServerEvent], Turn]:
        """Complete a turn after this many words; another turn gets the rest of the words. Returns that turn.

        If the turn is open, it is ended here, and the rest is the open turn. If it has ended before, the rest is a
        committed turn with a new item id.
        """
        sent, following = count - turn.words_sent, turn.words[count]
        at = max(turn.start, (turn.words[count - 1].end + following.start) // 2)
        at = at if turn.end is None else min(at, turn.end)
        rest = replace(
            turn,
            item_id=self._new_item_id(),
            start=at,
            sent=[],
            held=turn.held[sent:],
            words=turn.words[count:],
            words_sent=0,
            words_labelled=0,
            words_settled=0,
            speaker=None,
            is_raw=False,
            digits=0,
            begun="",
        )
        rest.words[0] = first_word(following) if self.trim_start else following
        turn.tokens = 0  # tokens are counted for the last part
        del turn.held[sent:], turn.words[count:]
        if self._partial_turn is turn:
            self._partial_turn = rest
        was_open, previous = turn.state is TurnState.OPEN, self.last_committed
        turn.end = at
        if was_open:
            turn.ended_at = now
            turn.move(TurnState.COMMITTED)
        out = self._emit_delta(turn, ends=True)
        if was_open and turn.announced:
            out.append(SpeechStopped(turn.item_id, at))
        if was_open:
            out.append(Committed(turn.item_id, previous))
            self.last_committed = turn.item_id
        out += self._complete_whole(turn, goes_on=True)
        if not was_open:
            out.append(Committed(rest.item_id, turn.item_id))
            self.last_committed = rest.item_id if previous == turn.item_id else previous
        elif rest.announced:
            out.append(SpeechStarted(rest.item_id, at))
        self._replace(turn, rest)
        return out, rest

    def _replace(self, turn: Turn, rest: Turn) -> None:
        if self.current is turn:
            self.current = rest
        for place, ended in enumerate(self.ended):
            if ended is turn:
                self.ended[place] = rest

    def _complete_passed(self, word: TimedWord, now: float) -> list[ServerEvent]:
        """Complete turns that were not flushed, once a word after their end arrives.

        Text arrives in order, so they get no more. Word times need not be exact, because the silence that ended a turn
        lies between its last word and its end.
        """
        out: list[ServerEvent] = []
        while self.ended and not self.ended[0].flushed and not _within(word, self.ended[0]):
            out += self._complete_or_wait(self.ended.popleft(), now)
        return out

    def _complete_or_wait(self, turn: Turn, now: float) -> list[ServerEvent]:
        """Complete a turn that has all of its text, or let it wait for labels and revisions."""
        turn.labelled_by = now + (IDLE_SECONDS if self._splits_speakers else LABELS_SECONDS)
        turn.revised_by = now + REVISION_SECONDS
        waits = turn.state is TurnState.COMMITTED and self._due(turn) > now
        if not waits and not self.finishing:
            return self._complete(turn, now)
        if turn.state is TurnState.CLEARED:
            return []
        out: list[ServerEvent] = []
        if not self.finishing:
            out, turn = self._split_at_speakers(turn, now)
            out += self._emit_delta(turn, ends=not self._splits_speakers)
        self.finishing.append(turn)
        return out

    def _is_labelled(self, turn: Turn) -> bool:
        """Whether the speakers of all words of a turn are decided."""
        if self.speakers is None:
            return True
        knows = self.speakers.has_final_label if self._splits_speakers else self.speakers.is_decided
        return all(map(knows, turn.words[-1:]))

    def _complete(self, turn: Turn, now: float) -> list[ServerEvent]:
        if turn.state is TurnState.CLEARED:
            return []
        out, last = self._split_at_speakers(turn, now, ends=True)
        return out + self._complete_whole(last)

    def _complete_whole(self, turn: Turn, *, goes_on: bool = False) -> list[ServerEvent]:
        out = self._emit_delta(turn, ends=True)
        turn.move(TurnState.COMPLETED)
        assert turn.end is not None
        transcript, revised = "".join(turn.sent), self._with_revisions(turn)
        final, is_revised = revised or turn.words, bool(revised)
        if self.redactor is not None:
            final = self._redacted_final(turn, final, self.redactor, is_new=is_revised or turn.is_raw)
        if is_revised or self.redactor is not None:
            transcript = text_of(final).lstrip() if self.trim_start else text_of(final)
        if turn.words:
            self._final_until = turn.words[-1].end
        while self._revised and self._revised[0].end <= turn.end:
            self._revised.popleft()
        final = final[-MAX_FINAL_WORDS:]
        if self.speakers is None:
            words = _without_speakers(final)
        else:
            words = tuple(map(self.speakers.with_best_label, self._with_turn_speaker(turn, final)))
        if self.speakers is not None:
            self.speakers.forget_before(turn.start - int(LABELS_BEFORE_SECONDS * self._sample_rate))
        done = Completed(
            turn.item_id,
            transcript,
            words,
            turn.start,
            turn.end,
            turn.tokens,
            turn.ended_at,
            goes_on=goes_on,
            confidence=turn.confidence,
            timeout=turn.timeout,
            is_revised=is_revised,
        )
        return [*out, done]

    def _with_revisions(self, turn: Turn) -> list[TimedWord]:
        """The words of a turn, with revised ones in place of the streamed ones; empty if none are revised.

        A revision may cover several turns. It is divided halfway between the streamed words of two turns: all streamed
        words of the revised audio are known by now. Parts do not overlap, so each word looks for its part in a table.
        """
        parts = sorted(self._revised, key=lambda part: part.start)
        if not parts or not turn.words:
            return []
        starts, used, words = [part.start for part in parts], set[int](), list[TimedWord]()
        for word in turn.words:
            middle = (word.start + word.end) // 2
            place = bisect_right(starts, middle) - 1
            if place >= 0 and middle < parts[place].end:
                used.add(place)
            else:
                words.append(word)
        if not used:
            return []
        first, last = turn.words[0], turn.words[-1]
        later = [word.start for other in (*self.finishing, *self.ended, self.current) if other for word in other.words]
        later += [word.start for _, word in (*self._stray, *self._unreported)]
        low = (self._final_until + first.start) // 2
        assert turn.end is not None
        high = min([turn.end, *([(last.end + min(later)) // 2] if later else [])])
        for place in sorted(used):
            words += [word for word in parts[place].words if low <= (word.start + word.end) // 2 < high]
        words.sort(key=lambda word: word.start)
        return [self._stripped_if_first(word, turn) for word in words[:1]] + words[1:]

    def _redacted_final(self, turn: Turn, final: list[TimedWord], redactor: Redactor, is_new: bool) -> list[TimedWord]:
        """The words of a final; `is_new`: some of them were not redacted as they were sent."""
        if is_new:
            final, turn.digits = redactor.redact(without_hidden(final), self._digits, ends=True)
        if final:
            self._digits = turn.digits
        return final

    def _with_turn_speaker(self, turn: Turn, words: Sequence[TimedWord]) -> Sequence[TimedWord]:
        """If turns end where the speaker changes: the words, with the turn's speaker where they have none."""
        if not self._splits_speakers or turn.speaker is None:
            return words
        return [word if word.speaker is not None else structs.replace(word, speaker=turn.speaker) for word in words]

    def _emit_redacted(self, turn: Turn, redactor: Redactor, ends: bool) -> list[ServerEvent]:
        """Like `_emit_delta`, but only for words that cannot become part of a redaction through later words."""
        words = turn.words[turn.words_sent : self._sendable(turn)]
        count = len(words) if ends else redactor.settled(words)
        if not count:
            return []
        if not turn.words_sent:
            turn.digits = self._digits
        redacted, turn.digits = redactor.redact(words[:count], turn.digits, ends=ends or count == len(words))
        turn.words[turn.words_sent : turn.words_sent + count] = redacted
        sent = self._labelled_now(turn, len(redacted))
        turn.words_settled += len(redacted) - count
        turn.held = [spelled(word) for word in turn.words[turn.words_sent :]]
        text = text_of(redacted).lstrip() if self.trim_start and not turn.sent else text_of(redacted)
        text, turn.begun = text.removeprefix(turn.begun), ""
        turn.sent.append(text)
        return [Delta(turn.item_id, text, sent)]

    def _emit_delta(self, turn: Turn, *, ends: bool = False) -> list[ServerEvent]:
        """The delta with the text that may be sent now. `ends`: the turn has all of its text."""
        if self.redactor is not None:
            return self._emit_redacted(turn, self.redactor, ends)
        sendable = self._sendable(turn)
        pieces = sendable - turn.words_sent if self._splits_speakers else len(turn.held)
        text = "".join(turn.held[:pieces])
        del turn.held[:pieces]
        if self.trim_start and not turn.sent:
            text = text.lstrip()
        if not text:
            # `held` has one piece for each unsent word, even if the piece is empty.
            if self._splits_speakers:
                turn.words_sent = sendable
            else:
                turn.held = [""] * (sendable - turn.words_sent)
            return []
        turn.sent.append(text)
        turn.is_raw = True
        turn.begun = ""
        return [Delta(turn.item_id, text, self._labelled_now(turn, sendable - turn.words_sent))]

    def _sendable(self, turn: Turn) -> int:
        """The number of words that may be sent for this turn."""
        return turn.words_settled if self._splits_speakers else len(turn.words)

    def _labelled_now(self, turn: Turn, count: int) -> tuple[TimedWord, ...]:
        """The next unsent words, which are sent now, with their speakers as far as these are decided. Labels that were
        sent stay."""
        first, turn.words_sent = turn.words_sent, turn.words_sent + count
        words = turn.words[first : turn.words_sent]
        if self.speakers is None:
            return _without_speakers(words)
        labelled = tuple(map(self.speakers.with_decided_label, self._with_turn_speaker(turn, words)))
        turn.words[first : turn.words_sent] = labelled
        return labelled


def _within(word: TimedWord, turn: Turn) -> bool:
    """Whether the middle of the word lies before the end of the turn's words."""
    end = turn.end if turn.words_until is None else turn.words_until
    return end is None or (word.start + word.end) // 2 < end


def _without_speakers(words: Sequence[TimedWord]) -> tuple[TimedWord, ...]:
    """Words for a client that has switched labels off; some may have had one before."""
    return tuple(word if word.speaker is None else structs.replace(word, speaker=None) for word in words)
