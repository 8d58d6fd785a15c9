"""The streams that the server itself pulls and transcribes for clients (`POST /v1/streams`).

`PulledStreams` owns those of this gateway. Each `PulledStream` is a session without a socket: `PulledAudio` feeds it,
and its newest events are kept in an `EventLog` for any number of readers (`realtime/http/stream_routes.py`). A stream
goes on until it is deleted, its file ends, or it can never be pulled; if its session ends (no capacity, an internal
error), another one is opened.

Streams end with the process; with `server.stream_file` the next process continues them. `StreamFile` saves their list,
at most once a second, in a thread; the file is replaced as a whole. URLs of streams may contain passwords in their
query, so only the server's user can read it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from audio.formats import MODEL_RATE
from realtime.config import Config
from realtime.dialects.base import encode_json
from realtime.dialects.openai import OpenAIDialect
from realtime.errors import Refusal
from realtime.serving.checked_fetch import NotAllowed, check_url
from realtime.serving.daemon_thread import in_thread
from realtime.serving.isolated_decoder import PulledAudio, PullFailed
from realtime.serving.live_session import LiveSession
from realtime.serving.outbox import EventLog
from realtime.serving.quota import Caller, places_of_one_key
from realtime.serving.registry import Sessions
from realtime.session.events import Append, End, Gap, Hangup, Samples
from realtime.session.settings import INCLUDE_WORDS, AudioFormat, Settings

log = logging.getLogger("tickertape.streams")

# Events of one stream that are kept for readers, and their bytes.
MAX_KEPT_EVENTS = 2000
MAX_KEPT_BYTES = 1024 * 1024
MAX_URL_CHARACTERS = 2000
# Ended streams of all callers that are still listed.
MAX_ENDED_STREAMS = 32
# Seconds before a session is opened again; doubles with each attempt.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
# Seconds by which words arrive later than the engine processes their audio.
WORDS_S = 2.0
# Event numbers that are skipped after a restart: the process before may have sent events after the file was written.
EVENT_NUMBER_GAP = 1000
KEY_REMOVED = "the key that began the stream was removed"

CONNECTING, LIVE, WAITING, ENDED, FAILED = "connecting", "live", "waiting", "ended", "failed"
# Seconds between two writes, and for the last one.
WRITE_S, LAST_WRITE_S = 1.0, 5.0
# A file that a server has written has a few hundred bytes and a URL for each stream; a larger one is another file.
MAX_FILE_BYTES = 16 * 1024 * 1024


class PulledStream:
    """One stream: its state, its events, and the task that runs it."""

    def __init__(
        self, url: str, caller: Caller, settings: Settings, created: int, saved: SavedStream | None = None
    ) -> None:
        """`saved`: the stream as an earlier process has saved it."""
        self.id = f"stream_{secrets.token_hex(12)}" if saved is None else saved.id
        self.url = url
        self.caller = caller
        self.settings = settings
        self.created = created
        self.status = CONNECTING
        # Why the stream waits or has failed.
        self.message: str | None = None
        self.seconds = 0.0 if saved is None else saved.seconds
        self.missing_seconds = 0.0 if saved is None else saved.missing_seconds
        self.events = EventLog(MAX_KEPT_EVENTS, MAX_KEPT_BYTES)
        if saved is not None:
            self.events.last = saved.last_event + EVENT_NUMBER_GAP
        self.readers = 0
        self.task: asyncio.Task[None] | None = None
        self._live: LiveSession | None = None
        self._has_session = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._is_fed = False
        self._has_lost_key = False
        self._place = None if saved is None else saved.place
        self._pulled: PulledAudio | None = None

    def saved(self, wall_clock: float) -> SavedStream:
        """The stream as the next process needs it to continue."""
        place = None if self._pulled is None else self._pulled.position
        # Words come some time after their audio. Audio without words yet is pulled again, or counts as missing.
        without_words = 0.0
        if self._live is not None:
            fed = self._live.session.source_ms / 1000
            without_words = min(fed, fed - self._live.session.covered_seconds + WORDS_S)
        if place is not None:
            end, came_at = place
            place = end - without_words, wall_clock - (asyncio.get_running_loop().time() - came_at) - without_words
        return SavedStream(
            self.id,
            self.url,
            self.caller.name,
            self.settings.language,
            self.created,
            self.seconds - without_words,
            self.missing_seconds,
            self.events.last,
            place if place is not None else self._place,
        )

    def to_json(self) -> dict[str, Any]:
        """The stream as the API shows it."""
        return {
            "id": self.id,
            "object": "stream",
            "url": self.url,
            "created_at": self.created,
            "status": self.status,
            "message": self.message,
            "seconds": round(self.seconds, 3),
            "missing_seconds": round(self.missing_seconds, 3),
            "last_event": self.events.last,
        }

    def set_status(self, status: str, message: str | None = None) -> None:
        if (status, message) != (self.status, self.message):
            self.status, self.message = status, message
            self.add_event("stream.status", status=status, message=message)

    def add_event(self, kind: str, **fields: Any) -> None:
        self.events.add(encode_json({"type": kind, "stream_id": self.id, **fields}))

    def end_without_key(self) -> None:
        """The caller's key is not valid any more: end the stream."""
        if self.task is not None and not self.events.is_closed:
            self._has_lost_key = True
            self.task.cancel()

    async def run(
        self,
        sessions: Sessions,
        hosts: tuple[str, ...],
        vouches_for: Callable[[str], bool],
        wall_clock: Callable[[], float],
    ) -> None:
        """Pull the stream until it ends or fails. `vouches_for` says whether a caller's key is still valid."""
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._keep_a_session(sessions, vouches_for), name=f"session of {self.id}")
                failure = await self._feed(hosts, wall_clock)
                # The words of the audio so far come, and then the session ends.
                self._is_fed = True
                if self._live is not None:
                    self._live.submit(End())
                else:
                    serving.cancel()
            if failure is not None:
                log.info("pulled stream %s failed: %s", self.id, failure)
            self.set_status(ENDED if failure is None else FAILED, None if failure is None else str(failure))
        except* Exception:
            log.exception("pulled stream %s failed", self.id)
            self.set_status(FAILED, "internal error")
        finally:
            if self._has_lost_key:
                log.info("pulled stream %s ended: %s", self.id, KEY_REMOVED)
                self.set_status(FAILED, KEY_REMOVED)
            elif self.status not in (ENDED, FAILED):
                self.set_status(ENDED, "deleted")
            self.events.close()

    async def _feed(self, hosts: tuple[str, ...], wall_clock: Callable[[], float]) -> PullFailed | None:
        """Give the session the audio, until it ends or fails."""
        pulled = PulledAudio(self.url, hosts=hosts, on_status=self._on_connection)
        if self._place is not None:
            end, came_at = self._place
            pulled.resume_at(end, asyncio.get_running_loop().time() - max(0.0, wall_clock() - came_at))
        self._pulled = pulled
        try:
            async with aclosing(pulled.audio()) as audio:
                async for part in audio:
                    await self._has_session.wait()
                    assert self._live is not None
                    self.set_status(LIVE)
                    self._submit(part, self._live)
                    await self._live.wait_for_room()
        except PullFailed as error:
            return error
        return None

    def _submit(self, part: Samples | int, live: LiveSession) -> None:
        samples = part if isinstance(part, int) else len(part)
        milliseconds = samples * 1000 / MODEL_RATE
        if isinstance(part, int):
            start = live.session.source_ms
            self.missing_seconds += samples / MODEL_RATE
            self.add_event("stream.gap", audio_start_ms=round(start), audio_end_ms=round(start + milliseconds))
            live.submit(Gap(samples, samples, milliseconds))
        else:
            live.submit(Append(part, samples, milliseconds))
        self.seconds += samples / MODEL_RATE
        if live.session.closed and not live.outbox.has_next and self._reading is not None:
            # The registry has ended the session without a word to its reader.
            self._reading.cancel()

    def _on_connection(self, text: str) -> None:
        self.set_status(WAITING, text) if text else self.set_status(LIVE)

    async def _keep_a_session(self, sessions: Sessions, vouches_for: Callable[[str], bool]) -> None:
        """Serve sessions one after the other, until the audio has ended or the caller has no key any more."""
        wait_s = FIRST_WAIT_S
        while not self._is_fed:
            if not vouches_for(self.caller.name):
                self.end_without_key()
                return
            try:
                async with sessions.open(self.caller, self.settings, [OpenAIDialect]) as (entry,):
                    wait_s = FIRST_WAIT_S
                    self.add_event("stream.session", session_id=entry.live.id, stream_seconds=round(self.seconds, 3))
                    self._live = entry.live
                    self._has_session.set()
                    self._reading = asyncio.create_task(self._read(entry.live), name=f"events of {self.id}")
                    try:
                        await asyncio.wait((self._reading,))
                    finally:
                        self._live = None
                        self._has_session.clear()
                        self._reading.cancel()
                        await asyncio.gather(self._reading, return_exceptions=True)
            except Refusal as refusal:
                self.set_status(WAITING, refusal.message)
            if not self._is_fed:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _read(self, live: LiveSession) -> None:
        while not isinstance(frames := await live.next_frames(), Hangup):
            for frame in frames:
                self.events.add(frame)


def stream_settings(language: str | None) -> Settings:
    """The settings of a stream's sessions."""
    return Settings(format=AudioFormat("audio/pcm", MODEL_RATE), language=language, include=(INCLUDE_WORDS,))


class PulledStreams:
    """All streams of this gateway."""

    def __init__(
        self,
        sessions: Sessions,
        config: Config,
        wall_clock: Callable[[], float],
        vouches_for: Callable[[str], bool],
        is_alone: bool,
    ) -> None:
        """`vouches_for` says whether the key of a caller, by its name, is still valid. `is_alone`: this gateway is the
        only one of its server; other gateways would not know its streams."""
        self.is_alone = is_alone
        self._sessions = sessions
        self._vouches_for = vouches_for
        self._config = config
        self._wall_clock = wall_clock
        self.by_id: dict[str, PulledStream] = {}
        path = config.server.stream_file if is_alone and config.server.stream_hosts else None
        self._file = None if path is None else StreamFile(path, self._saved_streams)

    async def open(self) -> None:
        """Continue the streams that the process before this one has saved."""
        saved_streams = [] if self._file is None else await self._file.open()
        for saved in saved_streams:
            caller, settings = Caller(saved.caller), stream_settings(saved.language)
            try:
                check_url(saved.url, self._config.server.stream_hosts)
                self._check_room(caller)
            except NotAllowed as error:
                log.warning("pulled stream %s is not continued after the restart: %s", saved.id, error)
                continue
            except Refusal as refusal:
                log.warning("pulled stream %s is not continued after the restart: %s", saved.id, refusal.message)
                continue
            self._start(PulledStream(saved.url, caller, settings, saved.created, saved))
        if self.by_id:
            log.info("%d pulled streams continue after the restart", len(self.by_id))

    def begin(self, url: str, caller: Caller, settings: Settings) -> PulledStream:
        """Begin to pull a stream. Raises Refusal."""
        hosts = self._config.server.stream_hosts
        if len(url) > MAX_URL_CHARACTERS:
            text = f"'url' may have at most {MAX_URL_CHARACTERS} characters."
            raise Refusal(400, "invalid_value", text, param="url")
        try:
            check_url(url, hosts)
        except NotAllowed as error:
            raise Refusal(400, error.code, error.client_message, param="url") from None
        self._check_room(caller)
        self._check_share(caller)
        stream = PulledStream(url, caller, settings, int(self._wall_clock()))
        self._start(stream)
        self._forget_ended()
        return stream

    def _check_room(self, caller: Caller) -> None:
        """Raises Refusal if the server, or this caller, has as many streams as it may have."""
        callers = self._callers()
        limit, per_key = self._config.limits.streams, self._config.limits.sessions_per_key
        if len(callers) >= limit:
            text = f"The server pulls at most {limit} streams at once (limits.streams); delete one."
            raise Refusal(429, "too_many_streams", text, retry_after_s=60)
        # Further streams would get no session, and keep the places of others while they wait for one.
        if per_key and callers.count(caller.name) >= per_key:
            text = f"A key may have {per_key} streams, as many as sessions (limits.sessions_per_key); delete one."
            raise Refusal(429, "too_many_streams", text, retry_after_s=60)

    def _check_share(self, caller: Caller) -> None:
        """Raises Refusal if this caller has as many streams as one of several keys may begin. Streams that go on after
        a restart are not asked: they were allowed when there were fewer keys."""
        share = places_of_one_key(self._config.limits.streams, len(self._config.auth.keys))
        if self._callers().count(caller.name) >= share:
            text = f"One of several keys may have {share} streams, half of limits.streams; delete one."
            raise Refusal(429, "too_many_streams", text, retry_after_s=60)

    def _callers(self) -> list[str]:
        """The caller of each stream that goes on."""
        return [stream.caller.name for stream in self.by_id.values() if not stream.events.is_closed]

    def _forget_ended(self) -> None:
        """Keep a bounded number of ended streams. The caller with most of them loses its oldest."""
        ended: dict[str, list[PulledStream]] = {}
        for stream in self.by_id.values():
            if stream.events.is_closed:
                ended.setdefault(stream.caller.name, []).append(stream)
        for _ in range(sum(map(len, ended.values())) - MAX_ENDED_STREAMS):
            del self.by_id[max(ended.values(), key=len).pop(0).id]

    def of(self, caller: Caller) -> list[PulledStream]:
        return [stream for stream in self.by_id.values() if stream.caller.name == caller.name]

    def find(self, stream_id: str, caller: Caller) -> PulledStream:
        """The stream of this caller. Raises a 404 Refusal, also for a stream of another caller."""
        stream = self.by_id.get(stream_id)
        if stream is None or stream.caller.name != caller.name:
            raise Refusal(404, "stream_not_found", "There is no such stream.", param="id")
        return stream

    def end_without_key(self) -> None:
        """End the streams of keys that were removed."""
        for stream in self.by_id.values():
            if not self._vouches_for(stream.caller.name):
                stream.end_without_key()

    async def delete(self, stream: PulledStream) -> None:
        self.by_id.pop(stream.id, None)
        if self._file is not None:
            self._file.changed()
        await self._stop(stream)

    async def close(self) -> None:
        """End all streams: the server stops."""
        if self._file is not None:
            await self._file.close()
        for stream in list(self.by_id.values()):
            await self._stop(stream)

    def _start(self, stream: PulledStream) -> None:
        self.by_id[stream.id] = stream
        hosts = self._config.server.stream_hosts
        running = stream.run(self._sessions, hosts, self._vouches_for, self._wall_clock)
        stream.task = asyncio.create_task(running, name=f"stream {stream.id}")
        if self._file is not None:
            self._file.changed()

    def _saved_streams(self) -> list[SavedStream]:
        now = self._wall_clock()
        return [stream.saved(now) for stream in self.by_id.values() if not stream.events.is_closed]

    async def _stop(self, stream: PulledStream) -> None:
        if stream.task is not None:
            stream.task.cancel()
            await asyncio.gather(stream.task, return_exceptions=True)


class SavedStream(msgspec.Struct, frozen=True):
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

    def __init__(self, path: str, current: Callable[[], list[SavedStream]]) -> None:
        self._path = Path(path)
        self._current = current
        self._written = b""
        self._has_failed = False
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> list[SavedStream]:
        """The streams that an earlier process has saved; from now on the current ones are written."""
        found: list[SavedStream] = []
        try:
            found = await in_thread(self._read, "streams file")
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.error(
                "server.stream_file: cannot read %s (%s); its streams do not go on, and it is saved as %s",
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

    def _read(self) -> list[SavedStream]:
        with open(self._path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise OSError(f"it has more than {MAX_FILE_BYTES} bytes")
        return msgspec.json.decode(content, type=list[SavedStream])

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
