"""The terminal display of live captions: finished lines scroll, the current line grows, a status line shows the delay.

`captions.py` feeds it with words. Without a terminal (a pipe, a log) only finished lines are written. It knows neither
engine nor server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from realtime.session.words import ends_sentence

# A line ends with its turn, with a sentence after `ENOUGH_CHARACTERS`, or after `MOST_CHARACTERS`.
ENOUGH_CHARACTERS = 60
MOST_CHARACTERS = 200
REFRESH_PER_SECOND = 8
# Words whose delays are kept for the median.
RECENT_WORDS = 500


@dataclass(frozen=True, slots=True)
class ShownWord:
    """A word with the seconds of audio it spans."""

    text: str
    start: float
    end: float
    confidence: float | None = None
    speaker: int | None = None


class CaptionView:
    """Shows text as it arrives. `now` is in seconds of audio time: the time since the audio began."""

    def __init__(self, console: Console, *, show_words: bool = False) -> None:
        self.delays: deque[float] = deque(maxlen=RECENT_WORDS)
        self._console = console
        self._show_words = show_words
        self._line = ""
        self._words: list[ShownWord] = []
        # For each shown word that has no times yet: when it was shown. Times arrive when a word is complete.
        self._shown: deque[float] = deque(maxlen=RECENT_WORDS)
        self._last: ShownWord | None = None
        self._now = 0.0
        self._note = ""
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self._render, transient=True
        )

    def __enter__(self) -> CaptionView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_line()
        if self._console.is_terminal:
            self._live.stop()
        if self.typical_delay is not None:
            said = f"words were shown {self.typical_delay:.2f} s after they were spoken (median of {len(self.delays)})"
            self._print(Text(said, "dim"))

    def add(self, delta: str, words: Sequence[ShownWord], now: float) -> None:
        """Add final text, and the words that it completes."""
        self._now = max(now, self._now)
        self._line += delta
        self._note_shown(delta, now)
        for word in words:
            self.delays.append((self._shown.popleft() if self._shown else now) - word.end)
            self._words.append(word)
            self._last = word
        if len(self._line) > MOST_CHARACTERS or (len(self._line) > ENOUGH_CHARACTERS and ends_sentence(self._line)):
            self.end_line()

    def _note_shown(self, delta: str, now: float) -> None:
        pieces = delta.split()
        if pieces and self._shown and not delta[0].isspace():
            # The rest of the last word. Punctuation after a word does not count for its delay.
            if delta[0].isalnum():
                self._shown[-1] = now
            pieces = pieces[1:]
        self._shown.extend(now for _ in pieces)

    def end_turn(self) -> None:
        """End the turn: the next text begins a new word."""
        self.end_line()
        self._shown.clear()

    def heard(self, now: float) -> None:
        """Advance the clock, with or without speech."""
        self._now = max(now, self._now)

    def note(self, text: str) -> None:
        """Show a problem, such as a lost connection; an empty text removes it."""
        if text and not self._console.is_terminal and text != self._note:
            self._print(Text(text, "yellow"))
        self._note = text

    def gap(self, start: float, end: float) -> None:
        """Show that audio is missing between these seconds, below the line of the words before it."""
        if self._words and self._words[-1].start < start:
            self.end_line()
        self._print(Text(f"{clock(start)}  [no sound until {clock(end)}]", "yellow"))

    def end_line(self) -> None:
        line, words = self._line.strip(), self._words
        self._line, self._words = "", []
        if not line:
            return
        if self._live.is_started:
            # Remove the line from the live area before it is printed above it.
            self._live.refresh()
        at = words[0].start if words else self._now
        shown = Text.assemble((f"{clock(at)}  ", "dim"), line)
        self._print(shown)
        if self._show_words and words:
            times = "  ".join(f"{word.text.strip()} {word.start:.2f}-{word.end:.2f}" for word in words)
            self._print(Text(times, "dim"))

    def _print(self, text: Text) -> None:
        # Do not wrap lines in a pipe.
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    @property
    def typical_delay(self) -> float | None:
        """Median of the recent delays, in seconds from the end of a word to its display."""
        ordered = sorted(self.delays)
        return ordered[len(ordered) // 2] if ordered else None

    def _render(self) -> Group:
        status = [f"● {clock(self._now)}"]
        if self.delays:
            status.append(f"behind {self.delays[-1]:.2f} s (typically {self.typical_delay:.2f} s)")
        if self._last is not None:
            status.append(f"“{self._last.text.strip()}” {self._last.start:.2f}-{self._last.end:.2f} s")
        lines = [Text(self._line.strip(), "bold"), Text("  ".join(status), "dim")]
        if self._note:
            lines.append(Text(self._note, "yellow"))
        return Group(*lines)


def clock(seconds: float) -> str:
    minutes, rest = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes:02}:{rest:04.1f}"
