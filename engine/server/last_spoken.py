"""Where somebody was last heard speaking in a stream, and who waits to be told.

A pause is asked for when the audio before it has come, and answered when that audio was listened to: the answer depends
on the audio alone, not on when the device said what it had found. Nobody waits for the device for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.messages import Speech
from engine.server.gate import GateSettings

# A frame of at least this probability may be speech.
SPOKEN = GateSettings().stop_threshold


class LastSpoken:
    """Of one stream, in its samples."""

    def __init__(self) -> None:
        # Up to where the audio has come, and up to where text was wanted of all of it, whatever was said.
        self.came = self.asked_until = 0
        self._until = 0
        # How far it was listened to, and the shortest frame that was.
        self._judged = self._frame = 0
        # Ends of the audio behind which a pause was asked for, and whom to tell.
        self._asked: deque[tuple[int, Callable[[int], None]]] = deque()

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def ask(self, then: Callable[[int], None]) -> None:
        """Have `then` told where the last speech ended, in the audio that has come."""
        self._asked.append((self.came, then))
        self._answer()

    def answer_all(self) -> None:
        """By what is known; no more will be listened to before something else is done."""
        while self._asked:
            self._asked.popleft()[1](self._until)

    def note(self, speech: Speech) -> None:
        frame, count = speech.frame_samples, len(speech.probabilities)
        if not count:
            return
        self._frame = min(self._frame, frame) or frame
        if self._asked:
            self._answer()  # it may be the first frame, so that its length was not known
            for number in range(count):
                self._take(speech.probabilities[number : number + 1], speech.sample + number * frame, frame)
                self._answer()
        else:
            self._take(speech.probabilities, speech.sample, frame)

    def _take(self, probabilities: list[float], sample: int, frame: int) -> None:
        self._judged = sample + len(probabilities) * frame
        for number in range(len(probabilities), 0, -1):
            if probabilities[number - 1] >= SPOKEN:
                self._until = sample + number * frame
                return

    def _answer(self) -> None:
        """What is left of the audio before the pause is less than a frame."""
        while self._asked and self._asked[0][0] < self._judged + self._frame:
            self._asked.popleft()[1](self._until)
