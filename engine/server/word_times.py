"""Words end with the speech that they were heard in, and follow each other.

A windowed model tells the place of a word by where it looked most while it said it. That is right within a few tenths
of a second, and it changes from one pass to the next: a word may seem to last into the silence behind it, and the next
one to begin before the last has ended. The speech detector knows to a frame when somebody speaks.

Times are samples of the engine's count. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.messages import Saved, Word

SAMPLE_RATE = 16_000
# So long behind the last frame with speech a word may end: the detector is a little early where a word fades out.
GRACE_SAMPLES = SAMPLE_RATE // 10
# A word that seems to be said in silence belongs to speech that is noticed so much later.
ONSET_SAMPLES = 6 * SAMPLE_RATE // 10
# Speech before the window of the model is kept so long: marks and unfinished words may come late.
KEPT_SAMPLES = 10 * SAMPLE_RATE


class WordTimes:
    """Follows one stream. `threshold`: a frame whose probability is below it holds no speech."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        # Where stretches of speech begin, and where each ends. They neither touch nor overlap.
        self._starts: list[int] = []
        self._ends: list[int] = []
        # End of the last word.
        self._said_until = 0

    def hear(self, sample: int, frame_samples: int, probabilities: Iterable[float]) -> None:
        """Frames that were listened to, the first of which begins at `sample`."""
        for probability in probabilities:
            if probability >= self._threshold:
                if self._ends and self._ends[-1] >= sample:
                    self._ends[-1] = sample + frame_samples
                else:
                    self._starts.append(sample)
                    self._ends.append(sample + frame_samples)
            sample += frame_samples

    def forget_before(self, sample: int) -> None:
        """The model needs no audio before this sample any more."""
        old = bisect_left(self._ends, sample - KEPT_SAMPLES)
        del self._starts[:old], self._ends[:old]

    def bound(self, words: Iterable[Word]) -> None:
        """Set the times of words right, in the order in which they were said."""
        for word in words:
            word.end_sample = max(self._latest_end(word), self._said_until)
            word.start_sample = min(max(word.start_sample, self._said_until), word.end_sample)
            self._said_until = word.end_sample

    def _latest_end(self, word: Word) -> int:
        """Where the word ends: with the last speech that begins before its end, or where it seems to."""
        start, end = word.start_sample, word.end_sample
        behind = bisect_left(self._starts, end)
        if not behind:
            return end
        limit = self._ends[behind - 1] + GRACE_SAMPLES
        follows = behind < len(self._starts) and self._starts[behind] <= end + ONSET_SAMPLES
        if start >= limit and follows:
            return end  # the beginning of what follows, which the detector noticed late
        return min(end, limit)

    def save(self) -> Saved:
        return {"starts": list(self._starts), "ends": list(self._ends), "said_until": self._said_until}

    def resume(self, saved: Saved) -> None:
        self._starts, self._ends = list(saved["starts"]), list(saved["ends"])
        self._said_until = saved["said_until"]
