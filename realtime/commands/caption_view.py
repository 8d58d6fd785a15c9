"""Shows live captions in the terminal: lines of final text scroll, the text of open turns grows below them.

A status line shows the delay. Without a terminal (a pipe, a log) only final lines are written.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from realtime.commands.terminal import harmless
from realtime.session.words import (
    ends_sentence,
)

# A line ends with its turn, with the first sentence after this many characters, or after this many in any case.
SENTENCE_CHARACTERS = 60
MAX_CHARACTERS = 200
REFRESH_PER_SECOND = 8
# Words whose delays are kept for the median.
RECENT_WORDS = 500


@dataclass(frozen=True, slots=True)
class ShownWord:
    """A word with its start and end in seconds of audio."""

    text: str
    start: float
    end: float
    confidence: float | None = None
    speaker: int | None = None


def count_characters(text: str) -> int:
    """The number of characters that are not spaces."""
    return sum(map(len, text.split()))


def split_at_word(text: str, words: Sequence[ShownWord], count: int) -> tuple[str, str]:
    """Split a text after its first `count` words.

    The place is found by the number of characters, because the text may spell words in another way.
    """
    remaining = sum(count_characters(word.text) for word in words[:count])
    for token in re.finditer(r"\S+", text):
        if remaining <= 0:
            return text[: token.start()], text[token.start() :]
        remaining -= len(token.group())
    return text, ""


def caption_lines(text: str, words: Sequence[ShownWord]) -> list[tuple[str, list[ShownWord]]]:
    """Text and its words, broken into lines: after a sentence, or where a line is too long."""
    lines, line, rest = list[tuple[str, list[ShownWord]]](), "", deque(words)
    for token in re.findall(r"\s*\S+", text):
        line += token
        if len(line) > MAX_CHARACTERS or (len(line) > SENTENCE_CHARACTERS and ends_sentence(line)):
            lines.append((line.strip(), _pop_words(rest, count_characters(line))))
            line = ""
    if line or rest:
        lines.append((line.strip(), list(rest)))
    return lines


def _pop_words(words: deque[ShownWord], characters: int) -> list[ShownWord]:
    """Remove and return the first words, as many as have this number of characters."""
    popped: list[ShownWord] = []
    while words and characters > 0:
        characters -= count_characters(words[0].text)
        popped.append(words.popleft())
    return popped


class CaptionView:
    """Shows captions in the terminal: final lines, below them the text that may still change, and a status line.

    `now` is in seconds of audio time: the time since the audio began.
    """

    def __init__(self, console: Console, *, show_words: bool = False) -> None:
        self.delays: deque[float] = deque(maxlen=RECENT_WORDS)
        self._console = console
        self._show_words = show_words
        # The text of turns that are not final.
        self._open = ""
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
        if self._console.is_terminal:
            self._live.stop()
        if self.typical_delay is not None:
            summary = (
                f"words were shown {self.typical_delay:.2f} s after they were spoken (median of {len(self.delays)})"
            )
            self._print(Text(summary, "dim"))

    def show_open(self, text: str) -> None:
        """Show this text of turns that are not final, in place of the text before."""
        self._open = harmless(text).strip()

    def measure_delays(self, shown: deque[float], delta: str, words: Sequence[ShownWord], now: float) -> None:
        """Measure the delays of the words that `delta`, shown now, completes.

        `shown` has the times at which the turn's incomplete words were shown, and is updated.
        """
        self._now = max(now, self._now)
        pieces = delta.split()
        if pieces and shown and not delta[0].isspace():
            # The first piece completes the last word. Punctuation after a word does not count for its delay.
            if delta[0].isalnum():
                shown[-1] = now
            pieces = pieces[1:]
        shown.extend(now for _ in pieces)
        for word in words:
            self.delays.append((shown.popleft() if shown else now) - word.end)
            self._last = replace(word, text=harmless(word.text))

    def advance(self, now: float) -> None:
        """Advance the clock, with or without speech."""
        self._now = max(now, self._now)

    def note(self, text: str) -> None:
        """Show a problem, such as a lost connection; an empty text removes it."""
        text = harmless(text)
        if text and not self._console.is_terminal and text != self._note:
            self._print(Text(text, "yellow"))
        self._note = text

    def gap(self, start: float, end: float) -> None:
        """Show that audio is missing between these seconds."""
        self._print(Text(f"{clock(start)}  [no sound until {clock(end)}]", "yellow"))

    def add_line(self, line: str, words: Sequence[ShownWord]) -> None:
        """Show a line that does not change any more."""
        line = harmless(line).strip()
        if not line:
            return
        second = words[0].start if words else self._now
        self._print(Text.assemble((f"{clock(second)}  ", "dim"), line))
        if self._show_words and words:
            times = "  ".join(f"{harmless(word.text).strip()} {word.start:.2f}-{word.end:.2f}" for word in words)
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
        lines = [Text(self._open, "bold"), Text("  ".join(status), "dim")]
        if self._note:
            lines.append(Text(self._note, "yellow"))
        return Group(*lines)


def clock(seconds: float) -> str:
    """A time as minutes, seconds and tenths, with hours if there are any."""
    minutes, rest = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes:02}:{rest:04.1f}"
