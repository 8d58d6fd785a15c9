"""A WebRTC client for tests: aiortc publishes PCM in real time, and reads events on the data channel."""

from __future__ import annotations

import asyncio
import fractions
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import av
import httpx
import numpy as np
from aiortc import MediaStreamTrack, RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from tests.e2e.event_checks import check_event
from tests.waiting import PATIENCE_S, until

RATE = 48_000
FRAME = RATE // 50
# Changes the answer, or the offer, on its way.
Change = Callable[[str], str]


class Speaker(MediaStreamTrack):
    """A track that plays PCM once, at the speed of the clock, and then silence."""

    kind = "audio"

    def __init__(self, pcm: bytes) -> None:
        super().__init__()
        self._samples = np.frombuffer(pcm, np.int16)
        self._at = 0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        return self._at / RATE

    async def recv(self) -> av.AudioFrame:
        if self.readyState != "live":
            raise MediaStreamError
        if self._began is None:
            self._began = time.monotonic()
        await asyncio.sleep(self._began + self._at / RATE - time.monotonic())
        block = np.zeros(FRAME, np.int16)
        part = self._samples[self._at : self._at + FRAME]
        block[: len(part)] = part
        frame = av.AudioFrame.from_ndarray(block.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._at, fractions.Fraction(1, RATE)
        self._at += FRAME
        return frame


class Caller:
    """The client's side of one call."""

    def __init__(self, pcm: bytes = b"", channel: str | None = "oai-events") -> None:
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.speaker = Speaker(pcm)
        self.peer.addTrack(self.speaker)
        self.channel: RTCDataChannel | None = None
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.location = ""
        self.closed = asyncio.Event()
        if channel is not None:
            self.channel = self.peer.createDataChannel(channel)
            self.channel.on("message", self._take_event)
            self.channel.on("close", self.closed.set)

    def _take_event(self, text: str) -> None:
        check_event("/v1/whip", text)
        self.events.put_nowait(json.loads(text))

    async def offer(self) -> str:
        # aioice leaves out the loopback address, which is the only network of a test.
        with patch("aioice.ice.get_host_addresses", lambda use_ipv4, use_ipv6: ["127.0.0.1"]):
            await self.peer.setLocalDescription(await self.peer.createOffer())
        return self.peer.localDescription.sdp

    async def take(self, answer: str) -> None:
        await self.peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))

    async def opened(self) -> None:
        """Wait until the data channel is open."""
        await until(lambda: self.channel is not None and self.channel.readyState == "open")

    def send(self, **event: Any) -> None:
        assert self.channel is not None
        self.channel.send(json.dumps(event))

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """All events up to the first of this type."""
        found = []
        async with asyncio.timeout(PATIENCE_S):
            while not found or found[-1]["type"] != kind:
                found.append(await self.events.get())
        return found


@asynccontextmanager
async def caller(pcm: bytes = b"", channel: str | None = "oai-events") -> AsyncIterator[Caller]:
    made = Caller(pcm, channel)
    try:
        yield made
    finally:
        await made.peer.close()


@asynccontextmanager
async def call(
    url: str,
    pcm: bytes = b"",
    *,
    key: str | None = None,
    channel: str | None = "oai-events",
    change: Change = lambda answer: answer,
) -> AsyncIterator[Caller]:
    """A call by WHIP that was answered with 201. `change` rewrites the answer."""
    async with caller(pcm, channel) as made:
        answer = await post(url, await made.offer(), key)
        assert answer.status_code == 201, answer.text
        made.location = answer.headers["location"]
        await made.take(change(answer.text))
        yield made


async def post(url: str, offer: str | bytes, key: str | None = None, kind: str = "application/sdp") -> httpx.Response:
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        return await client.post(url, content=offer, headers=headers)
