"""The messages of Twilio Media Streams, as Twilio documents them, for tests that play a phone call."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

RATE = 8_000
CHUNK_MS = 20
CALL = "CA" + "0123456789abcdef" * 2
STREAM = "MZ" + "fedcba9876543210" * 2
FORMAT = {"encoding": "audio/x-mulaw", "sampleRate": RATE, "channels": 1}
CONNECTED = {"event": "connected", "protocol": "Call", "version": "1.0.0"}


def mulaw(pcm: bytes) -> bytes:
    """16-bit samples as mu-law bytes (G.711)."""
    samples = np.frombuffer(pcm, "<i2").astype(np.int32)
    size = np.minimum(np.abs(samples), 32_635) + 132
    exponent = np.floor(np.log2(size)).astype(np.int32) - 7
    mantissa = (size >> (exponent + 3)) & 0x0F
    code = np.where(samples < 0, 0x80, 0) | (exponent << 4) | mantissa
    return (~code & 0xFF).astype(np.uint8).tobytes()


def start_message(tracks: Sequence[str] = ("inbound",), **changes: Any) -> dict[str, Any]:
    """The `start` of a call; `changes` are fields of its object, such as `customParameters`."""
    start = {
        "accountSid": "AC" + "0" * 32,
        "streamSid": STREAM,
        "callSid": CALL,
        "tracks": list(tracks),
        "mediaFormat": FORMAT,
        "customParameters": {},
        **changes,
    }
    return {"event": "start", "sequenceNumber": "1", "start": start, "streamSid": STREAM}


class PhoneCall:
    """Twilio's side of a stream. All numbers are strings, as Twilio writes them."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.sequence = 1
        # Milliseconds of each track so far.
        self.at = {"inbound": 0, "outbound": 0}

    async def send(self, message: dict[str, Any]) -> None:
        await self.socket.send(json.dumps(message))

    async def send_next(self, event: str, **fields: Any) -> None:
        """A message with the next sequence number."""
        self.sequence += 1
        await self.send({"event": event, "sequenceNumber": str(self.sequence), "streamSid": STREAM, **fields})

    async def media(self, audio: bytes, track: str = "inbound") -> None:
        """Mu-law audio in chunks of 20 ms."""
        size = RATE * CHUNK_MS // 1000
        for start in range(0, len(audio), size):
            chunk, at = audio[start : start + size], self.at[track]
            payload = base64.b64encode(chunk).decode()
            media = {"track": track, "chunk": str(at // CHUNK_MS + 1), "timestamp": str(at), "payload": payload}
            await self.send_next("media", media=media)
            self.at[track] += CHUNK_MS

    async def dtmf(self, digit: str = "1") -> None:
        await self.send_next("dtmf", dtmf={"track": "inbound_track", "digit": digit})

    async def stop(self) -> None:
        await self.send_next("stop", stop={"accountSid": "AC" + "0" * 32, "callSid": CALL})


@asynccontextmanager
async def phone_call(
    port: int, start: dict[str, Any] | None = None, url: str = "", **options: Any
) -> AsyncIterator[PhoneCall]:
    """A stream that has connected and, unless `start` is empty, started. `url` is that of the TwiML."""
    options = {"compression": None, "proxy": None, "close_timeout": 1, "host": "127.0.0.1", "port": port, **options}
    async with connect(url or f"ws://127.0.0.1:{port}/v1/twilio", **options) as socket:
        call = PhoneCall(socket)
        await call.send(CONNECTED)
        message = start_message() if start is None else start
        if message:
            await call.send(message)
        yield call
