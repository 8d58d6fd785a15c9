"""Finds the ends of utterances (`UtteranceWatch`): gaps in the text after the last word, for Deepgram's `UtteranceEnd`.

A part of the session core, without I/O; `boundaries.py` feeds it and sends the events. The end of a turn is found in
the audio, the end of an utterance in the text. For that the text of all audio in the gap is needed, and models send it
late. So the engine is flushed when the gap may have passed: at a pause, or, while noise sounds like speech, when the
words of the gap should have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realtime.session.events import TimedWord

# Silence after which the engine is flushed.
PAUSE_SECONDS = 0.25
# While the audio sounds like speech, the engine is flushed this long after the gap: then its words should have come.
LATE_SECONDS = 2.0
# The engine is flushed again after this time, because a stream that was replaced lost the first flush.
FLUSH_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SavedUtterances:
    """The saved state of an `UtteranceWatch`."""

    last_word: int | None
    last_speech: int
    settled: int
    asked: int | None


class UtteranceWatch:
    """Finds gaps of `gap_ms` after words. Samples are those of the session.

    `judged_until`: the sample up to which the speech track has judged the audio.
    """

    def __init__(self, gap_ms: int, sample_rate: int) -> None:
        self._gap = gap_ms * sample_rate // 1000
        self._rate = sample_rate
        # End of the last word; None once its utterance has ended.
        self._last_word: int | None = None
        # End of the last frame with speech.
        self._last_speech = 0
        # All text of the audio before this sample has arrived.
        self._settled = 0
        # The sample at which a flush was last needed.
        self._flushed_at: int | None = None

    def save(self) -> SavedUtterances:
        return SavedUtterances(self._last_word, self._last_speech, self._settled, self._flushed_at)

    def load(self, saved: SavedUtterances) -> None:
        """Continue from a saved watch."""
        self._last_word, self._last_speech = saved.last_word, saved.last_speech
        self._settled, self._flushed_at = saved.settled, saved.asked

    def on_words(self, words: Sequence[TimedWord]) -> int | None:
        """Add new words. Returns the end of the utterance before them, if there is a gap between."""
        last, self._last_word = self._last_word, words[-1].end
        return last if last is not None and words[0].start - last >= self._gap else None

    def on_speech(self, until: int) -> None:
        """There was speech until this sample."""
        self._last_speech = max(self._last_speech, until)

    def settle(self, sample: int) -> None:
        """All text of the audio before this sample has arrived."""
        self._settled = max(self._settled, sample)

    def ended(self, judged_until: int) -> int | None:
        """The end of the last utterance, if the gap after it has passed and has no word; each end is returned once."""
        last = self._last_word
        if last is None:
            return None
        is_silent = judged_until >= last + self._gap and self._settled >= self._last_speech
        if not is_silent and self._settled < last + self._gap:
            return None
        self._last_word = None
        return last

    def flush_needed(self, judged_until: int) -> bool | None:
        """Whether the engine must be flushed now: True in a pause, False while audio sounds like speech; None: no
        flush."""
        last = self._last_word
        if last is None or judged_until < last + self._gap:
            return None
        if self._flushed_at is not None and judged_until - self._flushed_at < FLUSH_AGAIN_SECONDS * self._rate:
            return None
        is_pause = judged_until - self._last_speech >= PAUSE_SECONDS * self._rate
        if not is_pause and judged_until < last + self._gap + LATE_SECONDS * self._rate:
            return None
        self._flushed_at = judged_until
        return is_pause
