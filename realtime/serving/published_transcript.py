"""The newest words of one published session, and the updates that change them.

`SessionPublication` (`publishing.py`) makes the updates from the events of a session. Every process that has the words
of a session keeps a `PublishedTranscript`: the coordinator, and the gateway processes with viewers.
"""

from __future__ import annotations

import msgspec

# Finished turns that a new viewer gets, and the characters of all of them together.
MAX_LINES = 200
MAX_CHARACTERS = 32_000
# Longest text of one turn; of a longer one the end is shown.
MAX_LINE_CHARACTERS = 4_000
# Open turns of one session that are kept; beyond it the oldest is dropped.
MAX_OPEN_TURNS = 32
# Words with times that are kept of one turn, for caption segments.
MAX_TURN_WORDS = 1_000

# (text, start, end) of a word, in seconds of the session's audio.
Word = tuple[str, float, float]


class Line(msgspec.Struct, array_like=True):
    """A turn: its text, and its start and end in seconds of the session's audio. An open turn has no end."""

    id: str
    text: str
    start: float = 0.0
    end: float = 0.0
    words: list[Word] = []


class Begun(msgspec.Struct, tag="begun", array_like=True):
    """The session is published now."""


class Added(msgspec.Struct, tag="added", array_like=True):
    """Text was added to an open turn."""

    id: str
    text: str
    words: list[Word] = []


class Finished(msgspec.Struct, tag="finished", array_like=True):
    """A turn has its final text, which may differ from what was added to it."""

    line: Line


class Removed(msgspec.Struct, tag="removed", array_like=True):
    """An open turn is dropped: it has no words, or its audio was cleared."""

    id: str


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """The session is not published any more."""


Update = Begun | Added | Finished | Removed | Ended


class State(msgspec.Struct, array_like=True):
    """A `PublishedTranscript` as a value, which messages carry to another process."""

    number: int
    is_live: bool
    lines: list[Line]
    open: list[Line]


class PublishedTranscript:
    """The newest words of one published session; its size is bounded. `number` grows with each update."""

    def __init__(self) -> None:
        self.number = 0
        self.is_live = False
        self.lines: dict[str, Line] = {}
        self.open: dict[str, Line] = {}
        self._characters = 0

    def save(self) -> State:
        # Open turns change, so they are copied.
        copies = [Line(line.id, line.text, line.start, line.end, line.words) for line in self.open.values()]
        return State(self.number, self.is_live, list(self.lines.values()), copies)

    def load(self, state: State) -> None:
        self.number, self.is_live = state.number, state.is_live
        self.lines = {line.id: line for line in state.lines}
        self.open = {line.id: line for line in state.open}
        self._characters = sum(_size(line) for line in self.lines.values())

    def add_earlier(self, state: State) -> bool:
        """Put the finished turns of `state` that are missing here before the turns here. Returns whether there were
        any."""
        missing = {line.id: line for line in state.lines if line.id not in self.lines}
        if not missing:
            return False
        for item in missing:
            self.open.pop(item, None)
        self.lines = missing | self.lines
        self._characters = sum(_size(line) for line in self.lines.values())
        self._trim()
        self.number = max(self.number, state.number) + 1
        return True

    def apply(self, update: Update) -> bool:
        """Apply an update. Returns False, with nothing changed, for text of a turn that is finished: a process that
        adopts a session may handle events again that the process before it has handled."""
        if isinstance(update, Added) and update.id in self.lines:
            return False
        self.number += 1
        self._apply(update)
        return True

    def _apply(self, update: Update) -> None:
        match update:
            case Begun():
                self.lines.clear()
                self.open.clear()
                self._characters, self.is_live = 0, True
            case Added(item, text, words):
                line = self.open.setdefault(item, Line(item, "", words[0][1] if words else 0.0))
                line.text = cut_text(line.text + text)
                line.words = newest_words([*line.words, *words])
                if len(self.open) > MAX_OPEN_TURNS:
                    del self.open[next(iter(self.open))]
            case Finished(line):
                self.open.pop(line.id, None)
                self._append(line)
            case Removed(item):
                self.open.pop(item, None)
            case Ended():
                self.open.clear()
                self.is_live = False

    def _append(self, line: Line) -> None:
        known = self.lines.get(line.id)
        self._characters += _size(line) - (0 if known is None else _size(known))
        self.lines[line.id] = line
        self._trim()

    def _trim(self) -> None:
        while len(self.lines) > MAX_LINES or self._characters > MAX_CHARACTERS:
            self._characters -= _size(self.lines.pop(next(iter(self.lines))))


def cut_text(text: str) -> str:
    return text[-MAX_LINE_CHARACTERS:]


def newest_words(words: list[Word]) -> list[Word]:
    """The last words of a turn: bounded in number, and in characters like its text. A client that replaces words can
    make each of them long."""
    kept: list[Word] = []
    room = MAX_LINE_CHARACTERS
    for text, start, end in reversed(words[-MAX_TURN_WORDS:]):
        text = cut_text(text)
        room -= len(text)
        if room < 0:
            break
        kept.append((text, start, end))
    return kept[::-1]


def _size(line: Line) -> int:
    """Characters by which a turn counts: those of its text, or of its words if they have more."""
    return max(len(line.text), sum(max(1, len(text)) for text, _, _ in line.words))
