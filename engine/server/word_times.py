"""`WordTimes`: corrects the times of a windowed model's words by the detected speech, in every text before it is sent.

A windowed model locates a word by its attention. That is accurate to a few tenths of a second and changes from pass to
pass: a word may seem to last into the silence after it, or to begin before the word before has ended. The speech
detector finds speech to the frame. So words end with the speech they are in, and do not overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.messages import Saved, Word

SAMPLE_RATE = 16_000
# A word may end this long after the last frame with speech: the detector is a little early where a word fades out.
GRACE_SAMPLES = SAMPLE_RATE // 10
# A word in silence belongs to speech that is detected at most this much later.
ONSET_SAMPLES = 6 * SAMPLE_RATE // 10
# How long intervals of sound before the model's window are kept: unfinished words may come late.
KEPT_SAMPLES = 10 * SAMPLE_RATE


class WordTimes:
    """Where one stream has sound, and the end of its last word."""

    def __init__(self) -> None:
        # Starts and ends (samples) of the intervals of sound. They neither touch nor overlap.
        self._starts: list[int] = []
        self._ends: list[int] = []
        # End of the last word.
        self._said_until = 0

    def add_sounds(self, sounds: Iterable[tuple[int, int]]) -> None:
        """Add the next intervals (start, end) of sound, which the speech track has found."""
        for start, end in sounds:
            if self._ends and self._ends[-1] >= start:
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)

    def forget_before(self, sample: int) -> None:
        """The model needs no audio before this sample any more."""
        old = bisect_left(self._ends, sample - KEPT_SAMPLES)
        del self._starts[:old], self._ends[:old]

    def bound(self, words: Iterable[Word]) -> None:
        """Correct the times of words, in the order in which they were spoken."""
        for word in words:
            word.end_sample = max(self._latest_end(word), self._said_until)
            word.start_sample = min(max(word.start_sample, self._said_until), word.end_sample)
            self._said_until = word.end_sample

    def bound_revised(self, words: Iterable[Word]) -> None:
        """Correct the times of words that replace earlier ones."""
        until = 0
        for word in words:
            word.end_sample = max(self._latest_end(word), until)
            word.start_sample = min(max(word.start_sample, until), word.end_sample)
            until = word.end_sample

    def _latest_end(self, word: Word) -> int:
        """Where the word ends: at the end of the last speech that begins before its end, or at its own end."""
        start, end = word.start_sample, word.end_sample
        behind = bisect_left(self._starts, end)
        if not behind:
            return end
        limit = self._ends[behind - 1] + GRACE_SAMPLES
        follows = behind < len(self._starts) and self._starts[behind] <= end + ONSET_SAMPLES
        if start >= limit and follows:
            return end  # the word begins the next speech, which was detected late
        return min(end, limit)

    def save(self) -> Saved:
        return {"starts": list(self._starts), "ends": list(self._ends), "said_until": self._said_until}

    def resume(self, saved: Saved) -> None:
        self._starts, self._ends = list(saved["starts"]), list(saved["ends"])
        self._said_until = saved["said_until"]
