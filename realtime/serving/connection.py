"""Serves one client's socket: a reader task passes messages to the session, a writer task sends the session's events.

It serves WebSockets and WebRTC calls alike. It moves messages only; the session decides what they mean. A resumable
session outlives its connection and gets another one.

- The reader takes the next message only when the session has room, so TCP slows down a client that sends too fast.
- The writer's queue is the session's outbox. If the limits of the outbox are exceeded, the socket is closed with 1008,
  and aborted if the client does not read the close frame either.
- A typical append is given to the session where its frame is parsed, without the reader task (`_handle_now`).
- `Pace` (`quota.py`) limits how many messages a second a client may send.
- The reader never sends and the writer never reads, so a client that does not read cannot block its own audio.

On a socket with several audio channels each channel is a session with its own engine stream. They are used for
Deepgram's multichannel audio and for the two tracks of a Twilio call. `ChannelInbox` takes the client's messages in
place of a single `Inbox`: it de-interleaves the samples, or passes every message to all channels if messages name their
channel (Twilio). `ChannelGroup` takes the place of a single live session: it merges the events of all channels for the
connection's writer. Admission and limits count every channel as a session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from realtime.errors import CloseCode
from realtime.serving.inbox import FED_BYTES, Inbox
from realtime.serving.live_session import LiveSession, fail
from realtime.serving.outbox import Outbox
from realtime.serving.quota import SHARE_S, FairTurns, Pace
from realtime.serving.socket_extras import PART, Part, SocketExtras
from realtime.session.events import Hangup

log = logging.getLogger("tickertape.connection")

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
SendMessage = Callable[[AsgiMessage], Awaitable[None]]

# Seconds that a client has to read the close frame before its socket is aborted.
CLOSE_GRACE_S = 5.0
# Interval in seconds at which a reader that waits for room checks whether the client has left.
GONE_CHECK_S = 1.0


class MessageHandler(Protocol):
    """The methods of an inbox that the reader calls: those of `Inbox`, `ChannelInbox` and `CallInbox`."""

    def submit_pending(self) -> None: ...

    def handle_now(self, text: str) -> bool: ...

    async def handle(
        self, text: str | None, data: bytes | None, has_left: Callable[[], bool], *, more: bool = False
    ) -> bool: ...

    async def handle_part(self, part: Part, has_left: Callable[[], bool]) -> bool: ...


class Connection:
    """Serves one socket until the client or the server closes it."""

    def __init__(
        self,
        live: LiveSession | ChannelGroup,
        inbox: MessageHandler,
        receive: Receive,
        send: SendMessage,
        extras: SocketExtras,
        fair_turns: FairTurns,
    ) -> None:
        self.live = live
        # When the client's last message arrived.
        self.last_message_at = live.clock()
        # The client closed with 1000, so it will not resume the session.
        self.closed_normally = False
        self._inbox = inbox
        self._receive = receive
        self._send = send
        self._extras = extras
        self._fair_turns = fair_turns
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        # Why the server closes the socket.
        self.hangup: Hangup | None = None
        self._pace: Pace | None = None
        self._fault_pace: Pace | None = None

    async def run(
        self, first_frames: list[str], pace: Pace | None = None, fault_pace: Pace | None = None
    ) -> Hangup | None:
        """Serve the socket until it closes. Returns the Hangup if the server closed it, None if the client left.

        `pace` limits the rate of messages and `fault_pace` the rate of messages that were answered with an error.
        """
        self._pace, self._fault_pace = pace, fault_pace
        if self.hangup is None:
            self.live.outbox.on_overrun = self._overrun
        left = False
        try:
            async with asyncio.TaskGroup() as group:
                self._extras.offer_to(partial(self._handle_now, group))
                self._writer = group.create_task(self._write(first_frames), name=f"writer {self.live.id}")
                self._reader = reader = group.create_task(self._read(), name=f"reader {self.live.id}")
                # `hang_up` may have been called before the tasks existed.
                if self.hangup is None:
                    await asyncio.wait((self._writer, reader), return_when=asyncio.FIRST_COMPLETED)
                left = reader.done() and not reader.cancelled()
                reader.cancel()
                self._writer.cancel()
        finally:
            # A newer connection of the session owns the callback: leave it.
            if self.live.outbox.on_overrun == self._overrun:
                self.live.outbox.on_overrun = None
        if self.hangup is None or left:
            return None
        await self.close(self.hangup)
        return self.hangup

    def hang_up(self, hangup: Hangup) -> None:
        """Close this socket now. Events that wait in the outbox are not sent on it, and its input is ignored."""
        if self.hangup is None:
            self.hangup = hangup
            for task in (self._reader, self._writer):
                if task is not None:
                    task.cancel()

    def _overrun(self) -> None:
        self.hang_up(Hangup(CloseCode.POLICY, "the client does not read", "slow_reader"))

    async def _read(self) -> None:
        # While messages have arrived already, receiving them does not yield to the event loop: they count as one slice
        # of time. After SHARE_S the reader queues with the readers of other connections (`FairTurns`).
        slice_began, starts_slice = 0.0, True
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                self._leave(message)
                return
            now = self.last_message_at = self.live.clock()
            if starts_slice:
                slice_began = now
            more = not self._extras.nothing_waits()
            part, has_left = message.get(PART), self._extras.has_left
            if part is not None:
                was_faulty = await self._inbox.handle_part(part, has_left)
            else:
                # With a pace the next message may be delayed, so audio is not held back to be joined with it.
                may_hold_back = more and self._pace is None
                was_faulty = await self._inbox.handle(
                    message.get("text"), message.get("bytes"), has_left, more=may_hold_back
                )
            if self.live.full and not await self._wait_for_room():
                # The session has no room for what the client sent before it left. Its last message says how it left.
                while message["type"] == "websocket.receive":
                    message = await self._receive()
                self._leave(message)
                return
            if self._pace is not None and (part is None or part.is_last):
                await self._pace.wait()
            if was_faulty and self._fault_pace is not None:
                await self._fault_pace.wait()
            starts_slice = not more
            if part is not None or (more and now - slice_began >= SHARE_S):
                await self._fair_turns.wait()
                starts_slice = True

    def _leave(self, message: AsgiMessage) -> None:
        self._inbox.submit_pending()
        self.closed_normally = message.get("code") == CloseCode.NORMAL

    async def _wait_for_room(self) -> bool:
        """Wait until the session has room for more audio; returns False if the client leaves before."""
        while self.live.full and not self._extras.has_left():
            with suppress(TimeoutError):
                async with asyncio.timeout(GONE_CHECK_S):
                    await self.live.wait_for_room()
        return not self.live.full

    def _handle_now(self, group: asyncio.TaskGroup, text: str) -> bool:
        """Fast path for a message that arrives while the reader waits: handle it without waking the reader task.

        Returns False, with nothing done, unless it is plain audio and neither the session nor the pace has to wait.
        """
        if self.hangup is not None or self.live.full or (self._pace is not None and not self._pace.may_pass()):
            return False
        try:
            taken = self._inbox.handle_now(text)
        except Exception as error:
            # Same result as an error in the reader: this connection ends, others are not affected.
            fail(group, error)
            return True
        if taken:
            self.last_message_at = self.live.clock()
            if self._pace is not None:
                self._pace.delay()
        return taken

    async def _write(self, first_frames: list[str]) -> None:
        frames: list[str] | Hangup = first_frames
        slice_began = self.live.clock()
        try:
            while not isinstance(frames, Hangup):
                for frame in frames:
                    if not self._extras.send_now(frame):
                        await self._send({"type": "websocket.send", "text": frame})
                waits = not len(self.live.outbox)
                if not waits and self.live.clock() - slice_began >= SHARE_S:
                    await self._fair_turns.wait()
                    slice_began = self.live.clock()
                frames = await self.live.next_frames()
                if waits:
                    # This has yielded to the event loop, so a new slice begins.
                    slice_began = self.live.clock()
        except OSError:
            # The client has left; the reader notices it and ends the connection.
            return
        self.hangup = frames

    async def close(self, hangup: Hangup) -> None:
        """Send the close frame; abort the socket if the client does not read it within `CLOSE_GRACE_S`."""
        log.info("session %s: closed by the server with %d: %s", self.live.id, hangup.code, hangup.reason)
        closing = self._send({"type": "websocket.close", "code": int(hangup.code), "reason": hangup.reason})
        try:
            await asyncio.wait_for(closing, CLOSE_GRACE_S)
        except TimeoutError:
            self._extras.abort()
        except Exception as error:
            # The socket is closed already. Which exception says so depends on the ASGI server.
            log.debug("session %s: the close frame could not be sent: %s", self.live.id, error)


# Sockets with several audio channels


# Causes of a hang-up that end one channel only; any other cause closes the socket.
ORDERLY = ("finished", "drain")


class ChannelInbox:
    """Distributes the client's messages: each channel gets its own samples, and all channels get control messages."""

    def __init__(self, inboxes: Sequence[Inbox], sample_bytes: int, *, interleaved: bool = True) -> None:
        self._inboxes = inboxes
        # Binary frames have samples of all channels; otherwise they are JSON, as text frames are.
        self._interleaved = interleaved
        self._frame_bytes = sample_bytes * len(inboxes)
        self._sample_bytes = sample_bytes
        # Bytes of an incomplete frame (one sample of every channel).
        self._incomplete_frame = b""

    def submit_pending(self) -> None:
        for inbox in self._inboxes:
            inbox.submit_pending()

    def handle_now(self, text: str) -> bool:
        """Always False: the audio has to be given to its channel."""
        return False

    async def handle(
        self, text: str | None, data: bytes | None, has_left: Callable[[], bool], *, more: bool = False
    ) -> bool:
        """Handle one message; returns whether it was a mistake of the client, as `Inbox.handle` does."""
        if data and self._interleaved:
            return await self.handle_part(Part(data, is_text=False, is_last=True), has_left)
        for inbox in self._inboxes:
            # Stop at the first channel that reports a mistake, so that the client gets one answer.
            if await inbox.handle(text, data, has_left, more=more):
                return True
        return False

    async def end(self, has_left: Callable[[], bool]) -> None:
        """End the audio of all channels."""
        for inbox in self._inboxes:
            await inbox.end(has_left)

    async def handle_part(self, part: Part, has_left: Callable[[], bool]) -> bool:
        """Handle the next part of a long message, as `Inbox.handle_part` does."""
        if part.is_text or not self._interleaved:
            return await self._inboxes[0].handle_part(part, has_left)
        for start in range(0, len(part.data), FED_BYTES):
            for inbox, samples in zip(
                self._inboxes, self._deinterleave(part.data[start : start + FED_BYTES]), strict=True
            ):
                await inbox.handle_part(Part(samples, is_text=False, is_last=part.is_last), has_left)
            if start + FED_BYTES < len(part.data):
                await asyncio.sleep(0)
        return False

    def _deinterleave(self, data: bytes) -> list[bytes]:
        joined = self._incomplete_frame + data
        whole = len(joined) // self._frame_bytes * self._frame_bytes
        self._incomplete_frame = joined[whole:]
        frames = np.frombuffer(joined, np.uint8, whole).reshape(-1, len(self._inboxes), self._sample_bytes)
        return [frames[:, channel].tobytes() for channel in range(len(self._inboxes))]


class ChannelGroup:
    """The sessions of all channels, with the interface that the connection uses for a single session."""

    def __init__(self, lives: Sequence[LiveSession]) -> None:
        self.id = lives[0].id
        self.clock = lives[0].clock
        self.outbox = _Outboxes([live.outbox for live in lives])
        self._lives = lives
        # Channel number -> its hang-up, for channels whose last event was sent.
        self._ended: dict[int, Hangup] = {}

    @property
    def full(self) -> bool:
        return any(live.full for live in self._lives)

    async def wait_for_room(self) -> None:
        for live in self._lives:
            await live.wait_for_room()

    async def next_frames(self) -> list[str] | Hangup:
        """The next frames of any channel. Returns a Hangup when all channels have ended or one has failed."""
        while True:
            for channel, live in enumerate(self._lives):
                if channel in self._ended or not live.outbox.has_next:
                    continue
                frames = await live.next_frames()
                if not isinstance(frames, Hangup):
                    return frames
                self._ended[channel] = frames
                if frames.cause not in ORDERLY or len(self._ended) == len(self._lives):
                    return frames
            await self.outbox.wait()


class _Outboxes:
    """The outboxes of all channels. They share one wake event, so the single writer wakes for any of them."""

    def __init__(self, outboxes: Sequence[Outbox]) -> None:
        self._outboxes = outboxes
        self._wake = asyncio.Event()
        for outbox in outboxes:
            outbox.wake = self._wake

    def __len__(self) -> int:
        return sum(len(outbox) for outbox in self._outboxes)

    @property
    def on_overrun(self) -> Callable[[], None] | None:
        return self._outboxes[0].on_overrun

    @on_overrun.setter
    def on_overrun(self, told: Callable[[], None] | None) -> None:
        for outbox in self._outboxes:
            outbox.on_overrun = told

    async def wait(self) -> None:
        """Wait until an event is put into one of the outboxes."""
        self._wake.clear()
        await self._wake.wait()
