"""How processes of the server write their log: one line for one event, whatever strangers have put into it.

Text of clients reaches log lines: names, values, and errors of libraries that repeat what they could not read. Control
characters in them are escaped, so that nobody can forge a line or speak to the operator's terminal. And whoever can
cause a line can cause it without end: of each kind so many lines are written in a minute, and the others are counted.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WITH_PROCESS = "%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"
WITHOUT_TIME = "%(levelname)s %(name)s: %(message)s"

# Lines of one kind, which is one place in the code, in each period.
MOST_LINES = 20
PERIOD_S = 60.0
# So much is repeated of a line that stands for others.
LONGEST_REPEATED = 300
# What follows the first line of an event, such as a stack trace, begins with this.
CONTINUED = "    | "

# Control characters; ends of lines of other alphabets; marks that turn the direction of text; halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text in one line, with everything escaped that is more than text to a terminal or a reader of logs."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """Escapes the whole of a message, and marks what belongs to the line before."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [printable(self.formatMessage(record))]
        if record.exc_info:
            lines += _continued(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _continued(self.formatStack(record.stack_info))
        return "\n".join(lines)


def _continued(text: str) -> Iterator[str]:
    return (CONTINUED + printable(line) for line in text.split("\n"))


@dataclass(slots=True)
class _Kind:
    """Lines of one kind in the period that began at this moment."""

    began: float
    written: int = 0
    left_out: int = 0
    last: str = ""


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes so many lines of a kind in each period, and at the end of the period how many more there were."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        # By logger, level and place in the code.
        self._kinds: dict[tuple[str, int, str, int], _Kind] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.INFO:
            # Whoever debugs wants all of them.
            super().emit(record)
            return
        self.tell_left_out()
        now = self._clock()
        kind = self._kinds.setdefault((record.name, record.levelno, record.pathname, record.lineno), _Kind(now))
        if now - kind.began >= PERIOD_S:
            kind.began, kind.written = now, 0
        if kind.written < MOST_LINES:
            kind.written += 1
            super().emit(record)
            return
        kind.left_out += 1
        kind.last = record.getMessage()[:LONGEST_REPEATED]
        if self._timer is None:
            # Nothing else may be logged that would tell it.
            self._timer = threading.Timer(PERIOD_S, self._period_is_over)
            self._timer.daemon = True
            self._timer.start()

    def tell_left_out(self, *, all_of_them: bool = False) -> None:
        """Say how many lines were left out in periods that are over. The caller has the handler's lock."""
        now = self._clock()
        for (name, level, path, line), kind in self._kinds.items():
            if kind.left_out and (all_of_them or now - kind.began >= PERIOD_S):
                told = (kind.left_out, kind.last)
                kind.left_out, kind.last = 0, ""
                super().emit(logging.LogRecord(name, level, path, line, "%d more like this: %s", told, None))

    def _period_is_over(self) -> None:
        with self.lock or threading.RLock():
            self._timer = None
            self.tell_left_out(all_of_them=True)

    def close(self) -> None:
        with self.lock or threading.RLock():
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            self.tell_left_out(all_of_them=True)
        super().close()


def set_up_logging(layout: str = PLAIN, level: str = "info") -> None:
    """Have all loggers of this process, also those of libraries, write to its error output."""
    handler = LimitedHandler()
    handler.setFormatter(LineFormatter(layout))
    logging.basicConfig(handlers=[handler])
    set_log_level(level)
    # Below that level they log what clients send, keys among it.
    for name in ("websockets", "python_multipart"):
        logging.getLogger(name).setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """One of `realtime.config.LOG_LEVELS`."""
    logging.getLogger().setLevel(level.upper())
