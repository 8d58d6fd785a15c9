"""The log: clients' texts stay within their line, and no kind of line can flood it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import logs
from engine.logs import CONTINUED, MAX_LINES, PERIOD_S, JsonFormatter, LineFormatter, RateLimitedHandler, printable

ROOT = Path(__file__).parents[2]
FORGED = "2026-01-01 00:00:00 ERROR tickertape: the engine is on fire"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A logger whose lines can be read."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.stream = io.StringIO()
        self.handler = RateLimitedHandler(self.stream, self.clock)
        self.handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def complain(self, value: object) -> None:
        self.logger.warning("a client said %s", value)


@pytest.fixture
def log() -> Log:
    return Log()


def test_no_process_of_the_server_sets_its_log_up_by_itself() -> None:
    """What is escaped and limited holds for all of them, also for what libraries log."""
    elsewhere = [
        path.relative_to(ROOT).as_posix()
        for package in ("audio", "engine", "fleet", "realtime")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"basicConfig|dictConfig|addHandler|StreamHandler|FileHandler", path.read_text())
    ]
    assert elsewhere == ["engine/logs.py"]


@settings(deadline=None)
@given(st.text())
def test_a_text_is_one_line_without_control_characters(text: str) -> None:
    line = printable(text)
    assert len(line.splitlines()) <= 1 and not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in line)
    line.encode()


def test_ordinary_text_of_any_alphabet_stays_as_it_is() -> None:
    assert printable("žluťoučký 🐎 C:\\n") == "žluťoučký 🐎 C:\\n"
    assert printable("a\r\nb\x1b[2Jc\u2028d\u202e") == "a\\r\\nb\\x1b[2Jc\\u2028d\\u202e"


def test_a_value_cannot_begin_a_line(log: Log) -> None:
    log.complain(f"hello\r\n{FORGED}\x1b[1A")
    assert log.lines == [f"WARNING test: a client said hello\\r\\n{FORGED}\\x1b[1A"]


def test_an_error_cannot_begin_a_line_either(log: Log) -> None:
    try:
        try:
            raise ValueError(f"bad header\n{FORGED}")
        except ValueError as error:
            raise ExceptionGroup("several\n", [error, KeyError(f"\x1b]0;\n{FORGED}")]) from error
    except ExceptionGroup:
        log.logger.exception("failed")
    first, *others = log.lines
    assert first == "ERROR test: failed"
    assert len(others) > 10 and all(line.startswith(CONTINUED) for line in others)
    assert not any(ord(letter) < 32 for line in others for letter in line)
    # It is a stack trace all the same.
    assert any(__file__ in line for line in others)


def test_a_trace_that_another_handler_has_written_before_is_marked_too(log: Log) -> None:
    try:
        raise ValueError(f"\n{FORGED}")
    except ValueError:
        record = logging.LogRecord("test", logging.ERROR, "", 0, "failed", None, sys.exc_info())
    logging.Formatter().format(record)
    log.handler.handle(record)
    assert all(line.startswith(CONTINUED) for line in log.lines[1:]) and len(log.lines) > 3


def test_lines_of_a_kind_are_counted_beyond_so_many(log: Log) -> None:
    for number in range(MAX_LINES + 37):
        log.complain(number)
    log.logger.warning("something else")
    assert len(log.lines) == MAX_LINES + 1
    log.clock.now = PERIOD_S - 1
    log.logger.warning("something else again")
    assert len(log.lines) == MAX_LINES + 2
    log.clock.now = PERIOD_S
    log.complain("after a minute")
    assert log.lines[-2:] == [
        f"WARNING test: 37 more like this: a client said {MAX_LINES + 36}",
        "WARNING test: a client said after a minute",
    ]
    log.handler.close()
    assert "more like this" not in log.lines[-1], "it is told once"


def test_a_line_that_differs_in_every_word_is_of_its_kind(log: Log) -> None:
    """Libraries write messages that are made before they are logged."""
    for number in range(1000):
        log.logger.error(f"Exception in callback {number}: {'x' * number}")  # noqa: G004
    assert len(log.lines) == MAX_LINES and len(log.handler._kinds) == 1
    log.handler.close()
    assert f"{1000 - MAX_LINES} more like this: " in log.lines[-1] and len(log.lines[-1]) < 400


def test_what_was_left_out_is_told_without_another_line(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PERIOD_S", 0.05)
    told = threading.Event()
    monkeypatch.setattr(log.stream, "write", lambda text: told.set() if "3 more like this" in text else None)
    for number in range(MAX_LINES + 3):
        log.complain(number)
    assert told.wait(20)


def test_what_was_left_out_is_told_when_the_process_ends(log: Log) -> None:
    for number in range(MAX_LINES + 2):
        log.complain(number)
    log.handler.close()
    assert log.lines[-1] == f"WARNING test: 2 more like this: a client said {MAX_LINES + 1}"


def test_lines_for_those_who_debug_are_not_limited(log: Log) -> None:
    for number in range(2 * MAX_LINES):
        log.logger.debug("detail %d", number)
    assert len(log.lines) == 2 * MAX_LINES


def test_a_line_that_was_left_out_keeps_nothing_alive(log: Log) -> None:
    class Value:
        alive = 0

        def __init__(self) -> None:
            Value.alive += 1

        def __del__(self) -> None:
            Value.alive -= 1

    for _ in range(2 * MAX_LINES):
        log.complain(Value())
    assert Value.alive == 0
    log.handler.close()


def test_a_process_that_cannot_start_a_thread_goes_on_and_reports_with_the_next_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    now, written = [0.0], io.StringIO()
    handler = RateLimitedHandler(written, clock=lambda: now[0])
    for number in range(MAX_LINES + 5):
        handler.handle(logging.LogRecord("log", logging.WARNING, "here", 1, "line %d", (number,), None))
    now[0] = PERIOD_S + 1
    handler.handle(logging.LogRecord("log", logging.WARNING, "there", 2, "another", (), None))
    assert written.getvalue().count("line ") == MAX_LINES + 1
    assert "5 more like this: line 24" in written.getvalue()
    handler.close()


def test_json_lines_are_one_object_each_and_cannot_be_forged() -> None:
    log = Log()
    log.handler.setFormatter(JsonFormatter())
    log.logger.warning("client says %s", f"x\n{FORGED}\u2028\u202e\ud800")
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.logger.exception("it failed")
    log.logger.info("GET", extra={"fields": {"path": "/v1", "status": 200}})
    text = log.stream.getvalue()
    assert text.isascii()
    said, failed, request = map(json.loads, text.splitlines())
    assert said["message"].startswith(f"client says x\n{FORGED}") and said["level"] == "warning"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"]) and said["process"] == os.getpid()
    assert failed["exception"].startswith("Traceback") and failed["logger"] == "test"
    assert request["path"] == "/v1" and request["status"] == 200


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_processes_that_a_process_starts_log_in_its_format(log_format: str) -> None:
    """Engines and workers are started before they have a configuration."""
    child = "import logging; from engine import logs; logs.set_up_logging(); logging.error('from the child')"
    parent = f"import subprocess, sys; from engine import logs; logs.set_up_logging(log_format={log_format!r})"
    script = f"{parent}; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "from the child" in done.stderr and done.stderr.startswith("{") is (log_format == "json")


def test_the_access_log_is_not_limited() -> None:
    log = Log()
    log.logger.name = logs.ACCESS_LOG
    for number in range(2 * MAX_LINES):
        log.logger.info("GET %d", number)
    assert len(log.stream.getvalue().splitlines()) == 2 * MAX_LINES
