"""Reads a TOML file that an operator names, with bounded time and memory: the configuration, or the fleet file.

`realtime/config.py` and `fleet/plan.py` call `read_toml` and check the contents themselves.
"""

from __future__ import annotations

import os
import re
import select
import time
import tomllib
from pathlib import Path
from typing import Any

# A longer file is refused, and so is a pipe or device that has not delivered its content within this time.
MAX_FILE_BYTES = 1024 * 1024
MAX_READ_SECONDS = 10.0
# Parts of a dotted key. The time that tomllib needs for a key grows with the square of the number of its parts.
MAX_KEY_PARTS = 16
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"""(?<![A-Za-z0-9_."'-]){_PART}(?:\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}""")


class BadTomlFile(ValueError):
    """The file cannot be used. The text says why: a predicate whose subject is the file ("is not valid TOML")."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read and parse the file, which may also be a pipe. Raises BadTomlFile, or OSError if it cannot be opened."""
    content = _read(path)
    try:
        # Some editors write a byte order mark.
        text = content.decode("utf-8-sig")
        if _LONG_KEY.search(text):
            raise BadTomlFile(f"has a key with more than {MAX_KEY_PARTS} parts")
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise BadTomlFile("is nested too deeply") from None
    except BadTomlFile:
        raise
    except ValueError as error:  # Not TOML, not UTF-8, or a number with thousands of digits.
        raise BadTomlFile(f"is not valid TOML: {error}") from None


def _read(path: str | Path) -> bytes:
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + MAX_READ_SECONDS
        while size <= MAX_FILE_BYTES:
            # A FIFO that no writer has opened yet reads as empty, so it is not read before `poll` reports an event.
            if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                raise BadTomlFile(f"has not arrived within {MAX_READ_SECONDS:g} s; is it a pipe without a writer?")
            try:
                parts.append(os.read(file, 64 * 1024))
            except BlockingIOError:
                continue
            if not parts[-1]:
                return b"".join(parts)
            size += len(parts[-1])
        raise BadTomlFile(f"has more than {MAX_FILE_BYTES // 1024} KiB")
    finally:
        os.close(file)
