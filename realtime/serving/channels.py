"""Sockets with several audio channels: each channel is a session with its own engine stream.

They are used for Deepgram's multichannel audio and for the two tracks of a Twilio call. `ChannelInbox` takes the
client's messages in place of a single `Inbox`: it de-interleaves the samples, or passes every message to all channels
if messages name their channel (Twilio). `ChannelGroup` takes the place of a single live session: it merges the events
of all channels for the connection's writer. Admission and limits count every channel as a session.
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
