"""Keeps webhooks that wait for delivery in an SQLite file, so that they survive a restart of the gateway.

It is used if `webhooks.folder` is set. Every gateway process has a file of its own in that folder: the first one that
it can lock. At its start it also takes over the webhooks in files whose processes have ended. The event loop never
waits for the disk: changes are collected, and a thread writes them in batches. What is written survives the end of the
process, but not a power failure.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from realtime.serving.daemon_thread import in_thread

log = logging.getLogger("tickertape.webhooks")

# Files of one folder, each of one gateway process.
MAX_FILES = 256
# Seconds after which a failed write is tried again.
RETRY_S = 5.0
_TABLE = (
    "create table if not exists events (number integer primary key, account text, url text, session text, kind text, "
    "at real, dropped integer, data blob, named integer)"
)
# For a file of an older server, which had no such column: its URLs are checked like those that clients name.
_ADDED_COLUMN = "alter table events add column named integer default 1"


@dataclass(slots=True)
class StoredEvent:
    """An event that waits, with the number of its row and the time (of day) at which it happened. `named`: a client has
    named its URL."""

    number: int
    account: str
    url: str
    session: str
    kind: str
    at: float
    dropped: int
    data: bytes
    named: bool = False


class WebhookStore:
    """The file of this process. Opened by `open`; `add` and `remove` return at once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file: sqlite3.Connection | None = None
        # Held while the file is used: closing it while another thread writes would crash the process.
        self._file_lock = threading.Lock()
        self.unwritten: dict[int, StoredEvent] = {}
        # Numbers of events that are in the file, or in the write that runs; and those of them to be deleted.
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._has_failed = False

    async def open(self) -> list[StoredEvent]:
        """Lock a file for this process. Returns its events, and those of processes that have ended. Raises OSError."""
        events = await in_thread(self._lock_files, "webhook store")
        self._stored = {event.number for event in events}
        self._writing = asyncio.create_task(self._write_all(), name="webhook store")
        return events

    def add(self, event: StoredEvent) -> None:
        self.unwritten[event.number] = event
        self._changed.set()

    def remove(self, number: int) -> None:
        # Also what was added and not yet written: an older row of the event may be in the file. Without one there is
        # nothing to remember: a disk may be full for days.
        self.unwritten.pop(number, None)
        if number in self._stored:
            self._removed.add(number)
            self._changed.set()

    async def close(self, seconds: float) -> bool:
        """Write what is left, for at most this time. Returns whether all of it was written."""
        if self._writing is None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self.unwritten or self._removed) and not self._has_failed:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        self._writing = None
        await asyncio.wait((in_thread(self._close, "webhook store"),), timeout=seconds)
        return not self.unwritten and not self._removed

    async def _write_all(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Copies: what changes during the write is in the next batch.
            added, removed = list(self.unwritten.values()), set(self._removed)
            if not added and not removed:
                continue
            new = {event.number for event in added} - self._stored
            self._stored |= new
            try:
                await in_thread(lambda a=added, r=removed: self._write(a, r), "webhook store")  # type: ignore[misc]
            except (sqlite3.Error, OSError) as error:
                self._has_failed = True
                # A write is done whole or not at all.
                self._stored -= new
                self._removed -= new
                log.error("webhooks.folder: cannot write (%s); waiting webhooks are in memory only", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()
                continue
            self._has_failed = False
            self._stored -= removed - {event.number for event in added}
            self._removed -= removed
            for event in added:
                # Else it was changed or removed while it was written.
                if self.unwritten.get(event.number) is event:
                    del self.unwritten[event.number]

    # In a thread

    def _close(self) -> None:
        with self._file_lock:
            if self._file is not None:
                self._file.close()

    def _write(self, added: Iterable[StoredEvent], removed: Iterable[int]) -> None:
        assert self._file is not None
        with self._file_lock, self._file as file:
            file.executemany("delete from events where number = ?", [(number,) for number in removed])
            file.executemany("insert or replace into events values (?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, added))

    def _lock_files(self) -> list[StoredEvent]:
        problem = f"{MAX_FILES} processes use it"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            events, unreadable = self._read_free_files()
            if self._file is not None:
                return events
            problem = unreadable or problem
        except (OSError, sqlite3.Error) as error:
            if self._file is not None:
                self._file.close()
            problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OSError(f"webhooks.folder: cannot use {str(self._folder)!r}: {problem}")

    def _read_free_files(self) -> tuple[list[StoredEvent], str]:
        """The events of all files that no other process has, and why a file cannot be read (empty if all can)."""
        events: list[StoredEvent] = []
        problem = ""
        for number in range(MAX_FILES):
            path = self._folder / f"webhooks-{number}.sqlite"
            if self._file is not None and not path.exists():
                continue
            try:
                file = _locked(path)
                if file is None:
                    continue
                rows = [StoredEvent(*row) for row in file.execute("select * from events order by number")]
            except sqlite3.DatabaseError as error:
                log.error("webhooks.folder: cannot read %s (%s); it is left as it is", path, error)
                problem = str(error)
                continue
            if self._file is None:
                self._file = file
                events = rows
                continue
            # Copied before it is deleted: an end of this process between the two delivers some events twice.
            first = max((event.number for event in events), default=0) + 1
            for place, event in enumerate(rows):
                event.number = first + place
            with closing(file):
                self._write(rows, ())
                with file:
                    file.execute("delete from events")
            events += rows
        return events, problem


def _row(event: StoredEvent) -> tuple[object, ...]:
    return (
        event.number,
        event.account,
        event.url,
        event.session,
        event.kind,
        event.at,
        event.dropped,
        event.data,
        int(event.named),
    )


def _locked(path: Path) -> sqlite3.Connection | None:
    """The file, locked for this process as long as it is open; None if another process has it. A file is never removed,
    because another process may be about to lock it."""
    path.touch(mode=0o600)
    file = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        file.execute("pragma locking_mode = exclusive")
        file.execute("pragma journal_mode = truncate")
        file.execute("pragma synchronous = off")
        file.execute("begin exclusive")
        file.execute(_TABLE)
        if "named" not in [column[1] for column in file.execute("pragma table_info(events)")]:
            file.execute(_ADDED_COLUMN)
        file.commit()
    except sqlite3.OperationalError as error:
        file.close()
        if "locked" in str(error) or "busy" in str(error):
            return None
        raise
    return file
