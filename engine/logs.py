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

# Layouts of text lines. The second has the process id, because several processes write to one terminal.
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WITH_PROCESS = "%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"
FORMATS = ("text", "json")
# The environment variable that passes the format on to child processes (engines, workers, decoders), which read no
# configuration.
FORMAT_VARIABLE = "_TICKERTAPE_LOG_FORMAT"
# The access log, which is on only if the operator wants every line.
ACCESS_LOG = "tickertape.access"

# At most this many lines of one kind (level, logger and place in the code) are written per period; further ones are
# suppressed and counted.
MAX_LINES = 20
PERIOD_S = 60.0
# The report about suppressed lines quotes the last one, up to this many characters.
MAX_QUOTED_CHARACTERS = 300
# Prefix of the second and later lines of one event, such as a stack trace.
CONTINUED = "    | "

# Control characters, Unicode line separators, characters that change the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# The same without the direction marks U+200E and U+200F, which Hebrew and Arabic texts contain. They are harmless:
# unlike overrides and embeddings (U+202A to U+202E) they do not reverse the letters around them.
_UNPRINTABLE_IN_TEXT = re.compile(_UNPRINTABLE.pattern.replace("\u200e\u200f", ""))


def printable(text: str, marks: bool = False) -> str:
    """The text in one line, with control characters and direction characters escaped. With `marks`, the marks U+200E
    and U+200F are kept."""
    pattern = _UNPRINTABLE_IN_TEXT if marks else _UNPRINTABLE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
    """Formats each record as a JSON object in one line. All characters but ASCII are escaped, so that no text can forge
    a line. A record's attribute `fields` adds its entries to the object."""

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
    """Counts of one kind of line in the period that began at `began` (seconds of the handler's clock)."""

    began: float
    written: int = 0
    # Lines that were not written and not reported yet, and the beginning of the last one.
    suppressed: int = 0
    last_suppressed: str = ""


class RateLimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most `MAX_LINES` lines of a kind per period, and after the period how many more there were."""

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
        self.report_suppressed()
        now = self._clock()
        kind = self._kinds.setdefault((record.name, record.levelno, record.pathname, record.lineno), _Kind(now))
        if now - kind.began >= PERIOD_S:
            kind.began, kind.written = now, 0
        if kind.written < MAX_LINES:
            kind.written += 1
            super().emit(record)
            return
        kind.suppressed += 1
        kind.last_suppressed = record.getMessage()[:MAX_QUOTED_CHARACTERS]
        if self._timer is None:
            # The suppressed lines are reported even if nothing else is logged. If no thread can be started, the next
            # log line causes the report.
            timer = threading.Timer(PERIOD_S, self._on_timer)
            timer.daemon = True
            with suppress(RuntimeError):
                timer.start()
                self._timer = timer

    def report_suppressed(self, *, include_running: bool = False) -> None:
        """Log how many lines were suppressed in finished periods, and with `include_running` also in the running ones.
        The caller holds the handler's lock."""
        now = self._clock()
        for (name, level, path, line), kind in self._kinds.items():
            if kind.suppressed and (include_running or now - kind.began >= PERIOD_S):
                args = (kind.suppressed, kind.last_suppressed)
                kind.suppressed, kind.last_suppressed = 0, ""
                super().emit(logging.LogRecord(name, level, path, line, "%d more like this: %s", args, None))

    # `Handler.lock` may be None by its declared type; `Handler.__init__` always sets it.

    def _on_timer(self) -> None:
        with self.lock or threading.RLock():
            self._timer = None
            self.report_suppressed(include_running=True)

    def close(self) -> None:
        with self.lock or threading.RLock():
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            self.report_suppressed(include_running=True)
        super().close()


def set_up_logging(layout: str = PLAIN, level: str = "info", log_format: str = "") -> None:
    """Send the log of this process, libraries included, to its standard error.

    `log_format` is one of `FORMATS`; empty: the format of the parent process. Child processes use the same format.
    `layout` is the layout of text lines (`PLAIN` or `WITH_PROCESS`); JSON ignores it.
    """
    if log_format:
        os.environ[FORMAT_VARIABLE] = log_format
    handler = RateLimitedHandler()
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
