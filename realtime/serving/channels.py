"""Several channels of audio on one socket: each is a session with a stream of its own, behind one reader and writer.

The client's samples are interleaved; they are dealt out to the channels' inboxes, and what the channels have to say is
sent in turn. Admission and limits count every channel as a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from realtime.serving.inbox import FED_BYTES, Inbox
from realtime.serving.live_session import LiveSession
from realtime.serving.outbox import Outbox
from realtime.serving.socket_extras import Part
from realtime.session.events import Hangup

# Ends of a channel that the others may outlast.
ORDERLY = ("finished", "drain")


class ChannelInbox:
    """Deals the client's messages out: to each channel its samples, to all of them what is not audio."""

    def __init__(self, inboxes: Sequence[Inbox], sample_bytes: int) -> None:
        self._inboxes = inboxes
        self._frame_bytes = sample_bytes * len(inboxes)
        self._sample_bytes = sample_bytes
        # Bytes of a frame whose other samples have yet to come.
        self._rest = b""

    def settle(self) -> None:
        for inbox in self._inboxes:
            inbox.settle()

    def take_now(self, text: str) -> bool:
        """Their audio comes in binary frames, and has to be dealt out."""
        return False

    async def take(self, text: str | None, data: bytes | None, gone: Callable[[], bool], *, more: bool = False) -> bool:
        """As the inbox of one channel does."""
        if data:
            return await self.take_part(Part(data, is_text=False, is_last=True), gone)
        for inbox in self._inboxes:
            # A mistake is answered once, not by every channel.
            if await inbox.take(text, data, gone, more=more):
                return True
        return False

    async def take_part(self, part: Part, gone: Callable[[], bool]) -> bool:
        """The same for a part of a long message."""
        if part.is_text:
            return await self._inboxes[0].take_part(part, gone)
        for start in range(0, len(part.data), FED_BYTES):
            for inbox, samples in zip(self._inboxes, self._deal(part.data[start : start + FED_BYTES]), strict=True):
                await inbox.take_part(Part(samples, is_text=False, is_last=part.is_last), gone)
            if start + FED_BYTES < len(part.data):
                await asyncio.sleep(0)
        return False

    def _deal(self, data: bytes) -> list[bytes]:
        joined = self._rest + data
        whole = len(joined) // self._frame_bytes * self._frame_bytes
        self._rest = joined[whole:]
        frames = np.frombuffer(joined, np.uint8, whole).reshape(-1, len(self._inboxes), self._sample_bytes)
        return [frames[:, channel].tobytes() for channel in range(len(self._inboxes))]


class ChannelGroup:
    """The channels' sessions as the connection sees one session."""

    def __init__(self, lives: Sequence[LiveSession]) -> None:
        self.id = lives[0].id
        self.clock = lives[0].clock
        self.outbox = _Outboxes([live.outbox for live in lives])
        self._lives = lives
        # Channels that have said everything.
        self._ended: dict[int, Hangup] = {}

    @property
    def full(self) -> bool:
        return any(live.full for live in self._lives)

    async def room(self) -> None:
        for live in self._lives:
            await live.room()

    async def next_frames(self) -> list[str] | Hangup:
        """What is sent next; the end comes when all channels have come to theirs, or one of them breaks."""
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
    """All channels' outboxes; a channel that has something wakes their one reader."""

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
        """Until something was put since all of it was taken."""
        self._wake.clear()
        await self._wake.wait()
