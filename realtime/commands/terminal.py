"""Helpers that all commands share: output and exit codes, number options, reading the configuration, Ctrl-C.

`CommandFailed` and `UsageError` become one line on standard error and an exit code in `realtime/cli.py`. Text that
comes from files or servers is printed without control characters (`harmless`). `EndOnInterrupt` makes the first Ctrl-C
end the input and the second one the command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from engine.logs import printable
from realtime.config import Config, load_config, shown
from realtime.text_values import plain_float, plain_int

Number = TypeVar("Number", int, float)

# Environment variables that are not keys of the configuration.
CACHE_VARIABLE = "TICKERTAPE_CACHE"
DEBUG_VARIABLE = "TICKERTAPE_DEBUG"
KEY_VARIABLE = "TICKERTAPE_API_KEY"
_NOT_CONFIGURATION = frozenset({CACHE_VARIABLE, DEBUG_VARIABLE, KEY_VARIABLE})

# Standard input as a command-line argument, and its name in messages.
STANDARD_INPUT = Path("-")
STANDARD_INPUT_NAME = "standard input"

# Exit codes.
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandFailed(Exception):
    """The command failed; exit code 1. The text says what to do."""


class UsageError(Exception):
    """The command line is invalid; exit code 2."""


def harmless(text: str) -> str:
    """A text from outside, such as a server's words or a file's name, without characters that control a terminal.

    Line ends and tabs stay, and the marks of Hebrew and Arabic text.
    """
    return "\n".join("\t".join(printable(part, marks=True) for part in line.split("\t")) for line in text.split("\n"))


def out(text: str, end: str = "\n") -> None:
    """Write a result to standard output; a file or a pipe gets it unchanged.

    Raises CommandFailed if it cannot be written, and BrokenPipeError if the reader of the pipe has ended.
    """
    try:
        sys.stdout.write((harmless(text) if sys.stdout.isatty() else text) + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandFailed(f"cannot write to standard output: {error.strerror or error}") from error


def announce(text: str) -> None:
    """Write a line to standard output that is not a result. If that fails, the command continues."""
    try:
        out(text)
    except (CommandFailed, BrokenPipeError) as error:
        note(str(error))


def note(text: str) -> None:
    """Write a message that is not a result to standard error. If that fails, the command continues."""
    with suppress(OSError):
        sys.stderr.write(harmless(text) + "\n")
        sys.stderr.flush()


def drop_unwritten_output() -> None:
    """Drop output that cannot be written, so that Python does not try once more at exit and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
                stream.flush()


def shown_name(file: Path) -> str:
    return STANDARD_INPUT_NAME if file == STANDARD_INPUT else str(file)


def is_debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def read_config(path: str | None, flags: Mapping[str, object]) -> Config:
    """The configuration from file, environment and flags. Raises ConfigError."""
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_CONFIGURATION}
    if is_debugging():
        flags = {"server.log_level": "debug", **flags}
    return load_config(path, environment, flags)


def integer(text: str) -> int:
    """The value of an option that is an integer, for argparse."""
    return _number(plain_int, text)


def decimal(text: str) -> float:
    """The value of an option that is a decimal number, for argparse."""
    return _number(plain_float, text)


def _number(parse: Callable[[str], Number], text: str) -> Number:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {shown(text)}") from None


def check_server(url: str | None) -> None:
    """Raise UsageError if this is not the address of a server. None is accepted: the option was not given."""
    if url is None:
        return
    from realtime.client.wire_client import CannotConnect, split_address

    try:
        split_address(url)
    except CannotConnect as error:
        raise UsageError(str(error)) from error


def check_writable(folder: Path, option: str) -> None:
    """Create the folder. Raise UsageError, which names the option, if no file can be written to it."""
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; name another {option}") from error


class EndOnInterrupt:
    """Context manager for Ctrl-C while audio is read.

    The first Ctrl-C sets `ended`: the audio ends, and its text is still awaited. The second stops the command at once.
    """

    def __init__(self) -> None:
        self.ended = False
        self._previous_handler: Any = signal.SIG_DFL

    def __enter__(self) -> EndOnInterrupt:
        self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.ended = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        note("ending; Ctrl-C again stops at once")
