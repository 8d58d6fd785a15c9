"""Logging set-up of all server processes: log lines as text or JSON, escaped and rate-limited.

Gateways, workers, engines and their background processes call `set_up_logging` at their start. Log lines can contain
text from clients: names, values, and library errors that quote invalid input. Control characters are escaped, so that
such text cannot forge a line or control the operator's terminal. A client can also cause the same line again and again:
each kind of line is written a limited number of times per minute, and the rest is counted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WITH_PROCESS = "%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"
# Formats of the log.
FORMATS = ("text", "json")
# Tells the processes that this one starts how to log: engines, workers and decoders read no configuration.
FORMAT_VARIABLE = "_TICKERTAPE_LOG_FORMAT"
# The access log, which is on only if the operator wants every line.
ACCESS_LOG = "tickertape.access"

# Lines of one kind (one place in the code) per period.
MOST_LINES = 20
PERIOD_S = 60.0
# Characters that are quoted of the last line left out.
LONGEST_REPEATED = 300
# Prefix of the second and later lines of one event, such as a stack trace.
CONTINUED = "    | "

# Control characters, Unicode line separators, what changes the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# The same without U+200E and U+200F, which Hebrew and Arabic texts contain. Such a mark has the effect of a letter that
# is not seen: unlike an override or an embedding it turns no letters around.
_UNPRINTABLE_IN_TEXT = re.compile(_UNPRINTABLE.pattern.replace("\u200e\u200f", ""))


def printable(text: str, marks: bool = False) -> str:
    """The text in one line, with control characters and direction marks escaped; `marks`: left-to-right and
    right-to-left marks stay."""
    pattern = _UNPRINTABLE_IN_TEXT if marks else _UNPRINTABLE
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """Escapes messages, and prefixes the lines of stack traces with `CONTINUED`."""

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


class JsonFormatter(logging.Formatter):
    """One object in one line for each event. Everything but ASCII is escaped, so that no text can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        time_ = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "time": time_,
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def _continued(text: str) -> Iterator[str]:
    return (CONTINUED + printable(line) for line in text.split("\n"))


@dataclass(slots=True)
class _Kind:
    """Counts of one kind of line in the period that began at `began` (clock seconds)."""

    began: float
    written: int = 0
    left_out: int = 0
    last: str = ""


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most `MOST_LINES` lines of a kind per period, and after the period how many more there were."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        # Key: logger, level, path, line number.
        self._kinds: dict[tuple[str, int, str, int], _Kind] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.INFO or record.name == ACCESS_LOG:
            # Debug lines and the access log are not limited.
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
            # Report them even if nothing else is logged. If no thread can be started, the next line reports them.
            timer = threading.Timer(PERIOD_S, self._period_is_over)
            timer.daemon = True
            with suppress(RuntimeError):
                timer.start()
                self._timer = timer

    def tell_left_out(self, *, all_of_them: bool = False) -> None:
        """Log how many lines were left out in finished periods. The caller holds the handler's lock."""
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


def set_up_logging(layout: str = PLAIN, level: str = "info", log_format: str = "") -> None:
    """Send the log of this process, libraries included, to its standard error. The processes that it starts use the
    same format, which is one of `FORMATS`; empty: the one of the process that has started this one."""
    if log_format:
        os.environ[FORMAT_VARIABLE] = log_format
    handler = LimitedHandler()
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonFormatter() if is_json else LineFormatter(layout))
    logging.basicConfig(handlers=[handler])
    set_log_level(level)
    # At lower levels these libraries log what clients send, including keys.
    for name in ("websockets", "python_multipart"):
        logging.getLogger(name).setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """Set the level to one of `realtime.config.LOG_LEVELS`."""
    logging.getLogger().setLevel(level.upper())
