"""When nothing more was said for a while after the last word; pure.

The end of a turn is what speech detection hears. The end of an utterance is a gap in the text: it needs the text of all
audio in the gap, which models give late. So the engine is asked for it when the gap may have passed: at a pause, or,
where noise sounds like speech, when words would have come by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realtime.session.events import TimedWord

# A frame that is at least so likely speech may become a word.
SPEECH = 0.5
# So long nobody speaks before the engine is asked for what it has.
PAUSE_SECONDS = 0.25
# So long after the gap words may still be on their way while somebody seems to speak.
LATE_SECONDS = 2.0
# The engine is asked again after so long: a stream that was replaced has forgotten the question.
ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SavedUtterances:
    """A watch as a value."""

    last_word: int | None
    last_speech: int
    settled: int
    asked: int | None


class UtteranceWatch:
    """Finds gaps of `gap_ms` after words. Samples are those of the session."""

    def __init__(self, gap_ms: int, sample_rate: int) -> None:
        self._gap = gap_ms * sample_rate // 1000
        self._rate = sample_rate
        # Where the last word ended, until the client was told that nothing followed.
        self._last_word: int | None = None
        self._last_speech = 0
        # All that was said before this has become text.
        self._settled = 0
        self._asked: int | None = None

    def save(self) -> SavedUtterances:
        return SavedUtterances(self._last_word, self._last_speech, self._settled, self._asked)

    def load(self, saved: SavedUtterances) -> None:
        """Go on where another watch stopped."""
        self._last_word, self._last_speech = saved.last_word, saved.last_speech
        self._settled, self._asked = saved.settled, saved.asked

    def say(self, words: Sequence[TimedWord]) -> int | None:
        """New words; returns the end of the utterance before them, if the gap lies in between."""
        last, self._last_word = self._last_word, words[-1].end
        return last if last is not None and words[0].start - last >= self._gap else None

    def hear(self, probability: float, heard: int) -> None:
        """A frame that ends at `heard`, and how likely it is speech."""
        if probability >= SPEECH:
            self._last_speech = heard

    def settle(self, sample: int) -> None:
        """The engine has said all about the audio before this sample."""
        self._settled = max(self._settled, sample)

    def ended(self, heard: int) -> int | None:
        """Where an utterance ended that nothing followed for the gap; each is returned once."""
        last = self._last_word
        if last is None:
            return None
        silent = heard >= last + self._gap and self._settled >= self._last_speech
        if not silent and self._settled < last + self._gap:
            return None
        self._last_word = None
        return last

    def ask(self, heard: int) -> bool | None:
        """Whether the engine must be asked for its text now: at a pause (True), in spite of sound (False), or not."""
        last = self._last_word
        if last is None or heard < last + self._gap:
            return None
        if self._asked is not None and heard - self._asked < ASK_AGAIN_SECONDS * self._rate:
            return None
        paused = heard - self._last_speech >= PAUSE_SECONDS * self._rate
        if not paused and heard < last + self._gap + LATE_SECONDS * self._rate:
            return None
        self._asked = heard
        return paused
