"""A realtime session that survives lost connections: it reconnects, resumes, and sends unacknowledged audio again.

Live captions (`realtime/commands/captions.py`) and the clients in `benchmarks/` use it; one connection is a
`WireSession` of `wire_client.py`. `UnacknowledgedAudio` buffers the audio that the server has not acknowledged, up to
`KEEP_S`. Beyond that the oldest audio is dropped, and the server gets a gap of the same length, so that times stay
right. Audio that the source itself lost is sent as a gap too. If a session cannot be resumed, a new one begins with the
buffered audio, and the times of its words are shifted.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed

from realtime.client.wire_client import CannotConnect, OpenTurns, Refused, SessionOptions, WireSession, open_session

BYTES_PER_SAMPLE = 2


class UnacknowledgedAudio:
    """Buffers the 16-bit samples `first` to `end` of the audio; beyond `max_samples` the oldest are dropped.

    A chunk is bytes, or the number of samples of a gap, which is not counted.
    """

    def __init__(self, max_samples: int) -> None:
        self.first = 0
        self.end = 0
        # Samples that were dropped before the server had acknowledged them.
        self.lost = 0
        self._max_samples = max_samples
        self._chunks: deque[bytes | int] = deque()
        # Samples in the chunks, without gaps.
        self._buffered = 0

    @property
    def room(self) -> int:
        """Samples that can be appended before the oldest are dropped."""
        return self._max_samples - self._buffered

    def append(self, pcm16: bytes) -> None:
        if not _length(pcm16):
            return
        self._chunks.append(pcm16)
        self._buffered += len(pcm16) // BYTES_PER_SAMPLE
        self.end += len(pcm16) // BYTES_PER_SAMPLE
        while self._buffered > self._max_samples:
            oldest = self._chunks[0]
            if isinstance(oldest, int):
                self._drop(oldest)
                continue
            excess = min(self._buffered - self._max_samples, _length(oldest))
            self.lost += excess
            self._drop(excess)

    def append_gap(self, samples: int) -> None:
        if self._chunks and isinstance(last := self._chunks[-1], int):
            self._chunks[-1] = last + samples
        else:
            self._chunks.append(samples)
        self.end += samples

    def acknowledge(self, sample: int) -> None:
        """The server has everything before this sample: drop it."""
        self._drop(min(sample, self.end) - self.first)

    def since(self, sample: int, max_samples: int) -> bytes | int:
        """Up to `max_samples` samples as bytes, from `sample` on; or the length of the gap at `sample`, from there on.

        `sample` must not be before `first`.
        """
        found = bytearray()
        start = self.first
        for chunk in self._chunks:
            length = _length(chunk)
            if start + length > sample:
                if isinstance(chunk, int):
                    if found:
                        break
                    return start + length - sample
                found += chunk[BYTES_PER_SAMPLE * max(0, sample - start) :]
                if len(found) >= BYTES_PER_SAMPLE * max_samples:
                    break
            start += length
        return bytes(found[: BYTES_PER_SAMPLE * max_samples])

    def _drop(self, samples: int) -> None:
        """Drop the oldest samples."""
        while samples > 0:
            chunk = self._chunks.popleft()
            length = _length(chunk)
            if length > samples:
                rest = chunk - samples if isinstance(chunk, int) else chunk[BYTES_PER_SAMPLE * samples :]
                self._chunks.appendleft(rest)
                length = samples
            if not isinstance(chunk, int):
                self._buffered -= length
            self.first += length
            samples -= length


def _length(chunk: bytes | int) -> int:
    return chunk if isinstance(chunk, int) else len(chunk) // BYTES_PER_SAMPLE


# Seconds of audio that are buffered for the server.
KEEP_S = 120
# Most samples in one message.
SEND_SAMPLES = 16_000
# The longest gap in one event, in seconds. By default a server accepts a day.
SEND_GAP_S = 600
# Seconds before a reconnect: of the first attempt, doubled with each attempt, and at most.
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 10.0
# A longer Retry-After of a server is shortened to this.
MAX_RETRY_AFTER_S = 60.0
# Seconds without an answer to a ping after which the connection is closed.
PING_TIMEOUT_S = 20.0
# HTTP statuses: the session cannot be resumed; the server refuses this client for good.
GONE = (404, 410)
REFUSED_FOR_GOOD = (400, 401, 403, 405)
# Close code: another socket has resumed the session.
TAKEN_OVER = 4409
# Seconds before a name that is taken is requested again for the published session.
NAME_WAIT_S = 5.0
INCLUDE = ("session.resume", "input_audio_buffer.acks")


def jittered(wait_s: float, retry_after_s: float = 0.0) -> float:
    """A random time around `wait_s`, and not before the server's Retry-After.

    It is random so that clients that lost their server at the same moment do not all return at once.
    """
    least_s = min(retry_after_s, MAX_RETRY_AFTER_S)
    return max(wait_s * random.uniform(0.5, 1.5), least_s * random.uniform(1.0, 1.5))


class _NameTaken(Exception):
    """The name under which the session is to be published is taken."""


def _is_name_taken(event: dict[str, Any]) -> bool:
    return event.get("type") == "error" and event["error"].get("code") == "name_taken"


class ResumingSession:
    """A session over any number of connections. `append` and `finish` never wait for the network; `run` serves the
    session until its last text has arrived."""

    def __init__(self, url: str, key: str | None, session_options: SessionOptions) -> None:
        self.unacknowledged = UnacknowledgedAudio(KEEP_S * session_options.rate)
        self._url = url
        self._key = key
        self._options = session_options
        # Set when there is something to send, and when audio was acknowledged.
        self._has_work = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._finished = False
        self.token: str | None = None
        # Whether the server acknowledges audio; None before the first session was configured.
        self._acknowledges: bool | None = None
        # Sequence number of the last event received.
        self._seq = 0
        self._turns = OpenTurns()
        # The sample of our audio at which the server's session began.
        self._base = 0
        # The sample of our audio up to which it was sent on this connection.
        self._sent = 0

    def append(self, pcm16: bytes) -> None:
        self.unacknowledged.append(pcm16)
        self._has_work.set()

    def append_gap(self, samples: int) -> None:
        """Append a gap: audio of this length is missing at the source."""
        self.unacknowledged.append_gap(samples)
        self._has_work.set()

    async def wait_for_room(self, samples: int) -> None:
        """Wait until this many samples can be appended without dropping others. For sources that can wait."""
        while self.unacknowledged.room < samples:
            self._acknowledged.clear()
            await self._acknowledged.wait()

    def finish(self) -> None:
        self._finished = True
        self._has_work.set()

    async def run(self, on_event: Callable[[dict[str, Any]], None], on_line: Callable[[str], None]) -> None:
        """Serve the session until its last text: pass events to `on_event`, and problems to `on_line`.

        `on_line` gets a text when the connection is lost, and an empty text when it is restored.

        Raises CannotConnect if the first connection fails, or the server refuses this client.
        """
        wait_s, connected_once = FIRST_WAIT_S, False
        while True:
            retry_after_s = 0.0
            try:
                if self.token is None:
                    self._turns = OpenTurns()
                async with open_session(self._target(), self._key, self._turns, PING_TIMEOUT_S) as session:
                    connected_once, wait_s = True, FIRST_WAIT_S
                    self._sent = await self._begin(session)
                    on_line("")
                    await self._talk(session, on_event)
                if self._turns.is_over:
                    return
                reason = "the server closed the connection"
            except Refused as error:
                if not connected_once or error.status in REFUSED_FOR_GOOD:
                    raise
                if error.status in GONE:
                    self.token = None
                reason, retry_after_s = str(error), error.retry_after_s
            except CannotConnect as error:
                if not connected_once:
                    raise
                reason = str(error)
            except _NameTaken as error:
                reason, wait_s = str(error), NAME_WAIT_S
            except ConnectionClosed as error:
                if error.rcvd is not None and error.rcvd.code == TAKEN_OVER:
                    raise CannotConnect("the session was resumed by another client") from error
                reason = f"the connection broke off ({error.rcvd.reason if error.rcvd else 'no close frame'})"
            on_line(f"{reason}; trying again")
            await asyncio.sleep(jittered(wait_s, retry_after_s))
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _target(self) -> str:
        if self.token is None:
            return self._url
        split = urlsplit(self._url)
        query = urlencode({"resume": self.token, "after": self._seq})
        return urlunsplit((split.scheme, split.netloc, split.path, query, ""))

    async def _begin(self, session: WireSession) -> int:
        """Read the first event and configure a new session. Returns the sample from which audio has to be sent."""
        first_event = await session.receive()
        if first_event.get("type") == "session.resumed":
            received = self._base + int(first_event["received_samples"])
            self._acknowledge(received)
            self._turns.resume()
            return received
        self.token, self._seq, self._base = None, 0, self.unacknowledged.first
        await session.configure(self._options, INCLUDE)
        return self._base

    async def _talk(self, session: WireSession, on_event: Callable[[dict[str, Any]], None]) -> None:
        sending = asyncio.create_task(self._send(session), name="send audio")
        try:
            async for event in session.events():
                # The name may still belong to this client's former session, whose lost connection the server has not
                # noticed yet.
                if self._acknowledges is not None and _is_name_taken(event):
                    raise _NameTaken(event["error"].get("message"))
                self._note(event)
                on_event(shifted(event, self._base / self._options.rate))
                if session.is_over:
                    return
        finally:
            sending.cancel()
            with suppress(ConnectionClosed, asyncio.CancelledError):
                await sending

    def _note(self, event: dict[str, Any]) -> None:
        self._seq = event.get("seq", self._seq)
        if event.get("type") == "session.updated":
            self.token = (event["session"].get("resume") or {}).get("token")
            self._acknowledges = self.token is not None
            self._acknowledge_sent()
        elif event.get("type") == "input_audio_buffer.acknowledged":
            self._acknowledge(self._base + event["samples"])

    def _acknowledge(self, sample: int) -> None:
        self.unacknowledged.acknowledge(sample)
        self._acknowledged.set()

    def _acknowledge_sent(self) -> None:
        """For a server that does not acknowledge audio: count everything that was sent as received."""
        if self._acknowledges is False:
            self._acknowledge(self._sent)

    async def _send(self, session: WireSession) -> None:
        """Send all audio that was not sent yet, until the audio is finished."""
        while True:
            if (first := self.unacknowledged.first) > self._sent:
                await self._send_gap(session, first - self._sent)
            elif data := self.unacknowledged.since(self._sent, SEND_SAMPLES):
                if isinstance(data, int):
                    await self._send_gap(session, data)
                else:
                    await session.append(data)
                    self._sent += len(data) // BYTES_PER_SAMPLE
                self._acknowledge_sent()
            elif self._finished:
                return await session.finish()
            else:
                self._has_work.clear()
                await self._has_work.wait()

    async def _send_gap(self, session: WireSession, samples: int) -> None:
        samples = min(samples, SEND_GAP_S * self._options.rate)
        await session.send("input_audio_buffer.gap", samples=samples)
        self._sent += samples


def shifted(event: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The event with the times of its words shifted by these seconds."""
    if not seconds or not event.get("words"):
        return event
    words = [word | {"start": word["start"] + seconds, "end": word["end"] + seconds} for word in event["words"]]
    return event | {"words": words}
