"""The file in which a server saves the list of streams that it pulls, to continue them after a restart.

`PulledStreams` uses it if `server.stream_file` is set. The file is written at most once a second, in a thread, and
replaced as a whole. URLs of streams may contain passwords in their query, so only the server's user can read it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from realtime.serving.daemon_thread import in_thread

log = logging.getLogger("tickertape.streams")

# Seconds between two writes, and for the last one.
WRITE_S, LAST_WRITE_S = 1.0, 5.0
# A file that a server has written has a few hundred bytes and a URL for each stream; a larger one is another file.
MAX_FILE_BYTES = 16 * 1024 * 1024


class KeptStream(msgspec.Struct, frozen=True):
    """A stream as it was when the file was written."""

    id: str
    url: str
    # The name of the caller, which is not the key.
    caller: str
    language: str | None
    created: int
    seconds: float
    missing_seconds: float
    last_event: int
    # The stream's own time up to which words were told, and the time of day at which that audio came; None: no audio
    # has come.
    place: tuple[float, float] | None


class StreamFile:
    """`current` returns the streams to keep. The event loop never waits for the disk."""

    def __init__(self, path: str, current: Callable[[], list[KeptStream]]) -> None:
        self._path = Path(path)
        self._current = current
        self._written = b""
        self._has_failed = False
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> list[KeptStream]:
        """The streams that an earlier process has left; from now on the current ones are written."""
        found: list[KeptStream] = []
        try:
            found = await in_thread(self._read, "streams file")
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.error(
                "server.stream_file: cannot read %s (%s); its streams do not go on, and it is kept as %s",
                *(self._path, error, self._unreadable),
            )
            await in_thread(self._set_aside, "streams file")
        self._writing = asyncio.create_task(self._write_all(), name="streams file")
        return found

    def changed(self) -> None:
        """A stream was made or deleted: write soon."""
        self._changed.set()

    async def close(self) -> None:
        """Write the streams as they are now, for the next process."""
        if self._writing is None:
            return
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        self._writing = None
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_S):
                await self._write()

    async def _write_all(self) -> None:
        while True:
            await self._write()
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await self._changed.wait()
            self._changed.clear()

    async def _write(self) -> None:
        content = msgspec.json.encode(self._current())
        if content == self._written:
            return
        try:
            await in_thread(lambda: self._replace(content), "streams file")
        except OSError as error:
            if not self._has_failed:
                log.error("server.stream_file: cannot write %s (%s); trying again", self._path, error)
            self._has_failed = True
            return
        self._written, self._has_failed = content, False

    # In a thread

    def _read(self) -> list[KeptStream]:
        with open(self._path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise OSError(f"it has more than {MAX_FILE_BYTES} bytes")
        return msgspec.json.decode(content, type=list[KeptStream])

    @property
    def _unreadable(self) -> Path:
        return self._path.with_name(f"{self._path.name}.unreadable")

    def _set_aside(self) -> None:
        """Perhaps it is another file, or can be read later: it is not to be overwritten."""
        with suppress(OSError):
            os.replace(self._path, self._unreadable)

    def _replace(self, content: bytes) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        os.replace(partial, self._path)
