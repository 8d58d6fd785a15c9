"""What comes back of a live sound: shown at once, and saved where a file was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from audio.resample import MODEL_RATE
from realtime.client.wire_client import COMPLETED, DELTA, FAILED, is_expected
from realtime.commands.caption_view import CaptionView, ShownWord
from realtime.commands.terminal import CommandFailed
from realtime.commands.transcript_file import TranscriptFile
from realtime.session.events import TimedWord


class AudioClock:
    """How long the sound has been coming: by the clock, or by its own length where it comes faster than that."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began: float | None = None
        self._received = 0

    def heard(self, samples: int) -> None:
        """The first chunk is complete when it comes: its sound began as long ago as the chunk lasts."""
        if self._began is None:
            self._began = self._time() - samples / MODEL_RATE
        self._received += samples

    @property
    def now(self) -> float:
        return 0.0 if self._began is None else max(self._time() - self._began, self._received / MODEL_RATE)


class Listener:
    """Text goes to the terminal and to the file, troubles to the line below the captions."""

    def __init__(self, captions: CaptionView, clock: AudioClock, file: TranscriptFile | None) -> None:
        # When something last came back, by the event loop's clock.
        self.last_news = 0.0
        self._captions = captions
        self._clock = clock
        self._file = file
        self._troubles: dict[str, str] = {}
        # Text of the turn that is open, as long as no word of it came with its times.
        self._untimed = ""
        self._timed = False
        # How many words of the open turn have come with its deltas.
        self._words = 0
        if file is not None:
            file.on_trouble = lambda text: self.trouble("disk", text)

    def heard(self, delta: str, words: Sequence[ShownWord]) -> None:
        """Text that will not change any more, and the words it completed."""
        self.last_news = asyncio.get_running_loop().time()
        self._captions.add(delta, words, self._clock.now)
        self._timed |= bool(words)
        self._words += len(words)
        self._untimed = "" if self._timed else self._untimed + delta
        self._save(words)

    def end_turn(self) -> None:
        self._captions.end_turn()
        # A server that gives no times: the words are saved with the time at which they were all there.
        now = self._clock.now
        self._save([ShownWord(text, now, now) for text in self._untimed.split()])
        self._untimed, self._timed, self._words = "", False, 0

    def trouble(self, kind: str, text: str) -> None:
        """A state worth a word; an empty text takes it back."""
        self._troubles[kind] = text
        self._captions.note("; ".join(filter(None, self._troubles.values())))

    def on_event(self, event: dict[str, Any]) -> None:
        """An event of a server. Raises CommandFailed for an error."""
        match event.get("type"):
            case kind if kind == DELTA:
                self.heard(event["delta"], _shown_words(event))
            case kind if kind == COMPLETED:
                # The last word of a turn is complete when the turn is: it comes with no delta.
                self.heard("", _shown_words(event)[self._words :])
                self.end_turn()
            case kind if kind == FAILED:
                self.end_turn()
                self.trouble("turn", f"a turn failed: {event['error'].get('message')}")
            case "error" if not is_expected(event):
                raise CommandFailed(f"the server says: {event['error'].get('message')}")

    def _save(self, words: Sequence[ShownWord]) -> None:
        if self._file is not None:
            timed = [(word, round(word.start * MODEL_RATE), round(word.end * MODEL_RATE)) for word in words]
            self._file.add([TimedWord(word.text, start, end, confidence=word.confidence) for word, start, end in timed])


def _shown_words(event: dict[str, Any]) -> list[ShownWord]:
    return [
        ShownWord(word["word"], word["start"], word["end"], word.get("confidence")) for word in event.get("words") or ()
    ]
