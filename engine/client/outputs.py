"""What a stream has to say: handed to a listener as it comes, or a queue, read by iteration until the last output.

The queue promises that nothing is said twice: speech that was told before a replay is left out of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from engine import messages
from engine.errors import AtCapacity, BadOption, EngineError, StreamFailed

# Outputs that may wait for a reader before its stream takes no more audio.
MAX_QUEUED_OUTPUTS = 1024
SPEECH_THRESHOLD = 0.5
_FINAL = (messages.Closed, messages.Failed, messages.Dead)


class Outputs:
    """`on_read` is called when there is room for more."""

    def __init__(self, sample_rate: int, on_read: Callable[[], None]) -> None:
        self._sample_rate = sample_rate
        self._on_read = on_read
        # Each with its number: how many outputs of the engine it was.
        self._queue: deque[tuple[int, messages.Output]] = deque()
        # The number of the last one that was read, and of the last that came.
        self.read = 0
        self.told = 0
        self._news = asyncio.Event()
        self._listener: Callable[[messages.Output], None] | None = None
        # Speech before this sample has been told.
        self._told_until = 0
        # Whether somebody spoke in the last that was told.
        self.speech_goes_on = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) >= MAX_QUEUED_OUTPUTS

    def put(self, output: messages.Output | None) -> None:
        if output is None:
            return
        if self._listener is not None:
            self.read = self.told
            self._listener(output)
        else:
            self._queue.append((self.told, output))
            self._news.set()

    def listen(self, listener: Callable[[messages.Output], None]) -> None:
        """Hand each output over as it comes, to a listener who never has to wait and never raises."""
        self._listener = listener
        while self._queue:
            self.read, output = self._queue.popleft()
            listener(output)

    def begin(self, told: int) -> None:
        """Another engine carries the stream, which has said so much; what still waits here is not of it."""
        self._queue = deque((told, output) for _, output in self._queue)
        self.read = self.told = told

    def put_speech(self, speech: messages.Speech) -> None:
        self.speech_goes_on = speech.probabilities[-1:] >= [SPEECH_THRESHOLD]
        self.put(self._new_part(speech))

    async def __aiter__(self) -> AsyncIterator[messages.Output]:
        while True:
            while self._queue:
                self.read, output = self._queue.popleft()
                self._on_read()
                yield output
                if isinstance(output, _FINAL):
                    return
            self._news.clear()
            await self._news.wait()

    def _new_part(self, speech: messages.Speech) -> messages.Speech | None:
        """The speech without what was told before, if the audio is a replay."""
        if speech.sample >= self._told_until and speech.frame_samples and speech.probabilities:
            self._told_until = speech.sample + len(speech.probabilities) * speech.frame_samples
            return speech
        if speech.frame_samples > self._sample_rate and speech.sample < self._told_until:
            # A long silence is one long frame, of which a part is known.
            known = min(self._told_until - speech.sample, speech.frame_samples)
            speech.sample, speech.frame_samples = speech.sample + known, speech.frame_samples - known
        if not speech.frame_samples:
            return None
        known = max(0, -(-(self._told_until - speech.sample) // speech.frame_samples))
        probabilities = speech.probabilities[known:]
        if not probabilities:
            return None
        sample = speech.sample + known * speech.frame_samples
        self._told_until = sample + len(probabilities) * speech.frame_samples
        return messages.Speech(speech.stream, sample, speech.frame_samples, probabilities)


def error_of(failed: messages.Failed) -> EngineError | ValueError:
    """The error that an engine ended a stream with."""
    text = failed.message.removeprefix(f"stream {failed.stream!r}: ")
    if failed.code == AtCapacity.__name__:
        return AtCapacity(failed.stream, text)
    if failed.code == BadOption.__name__:
        return ValueError(text)
    return StreamFailed(failed.stream, text)
