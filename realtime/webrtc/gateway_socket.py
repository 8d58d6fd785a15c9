"""The socket from a call's process to the gateway: reads the gateway's messages, and sends audio and events.

It runs in the process of the call; the gateway's end is `realtime/serving/calls.py`, and the format is
`realtime/serving/media_processes.py`. `GatewaySocket` owns a bounded queue of outgoing messages: audio beyond the bound
is dropped and reported as lost.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audio.formats import MODEL_RATE
from realtime.serving.media_processes import AUDIO, FRAME, LOST, MAX_FRAME_BYTES, MESSAGE, SAMPLES, SILENCE
from realtime.webrtc.opus_track import Heard, Missing

# Bytes that wait for the gateway: 20 s of audio. Audio beyond it is dropped, and reported as lost when there is room.
MAX_UNREAD_BYTES = 20 * 2 * MODEL_RATE
# Bytes beyond which no message of the client is taken.
MESSAGE_ROOM_BYTES = 64 * 1024


class GatewaySocket:
    """One connection to the gateway. `read` waits for the next frame; the `tell` methods queue frames for `write`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        # Samples dropped here, because the gateway did not read; not reported yet.
        self._dropped = 0
        self._wake = asyncio.Event()
        self._sent, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    async def read(self) -> tuple[bytes, bytes]:
        """The next frame: kind and content. Raises EOFError if the gateway has closed the socket."""
        kind, length = FRAME.unpack(await self._receive(FRAME.size))
        if length > MAX_FRAME_BYTES:
            raise EOFError
        return kind, await self._receive(length)

    def tell(self, kind: bytes, content: bytes | dict[str, Any] | str = b"") -> None:
        if isinstance(content, dict):
            content = json.dumps(content)
        data = content.encode() if isinstance(content, str) else content
        self._put(FRAME.pack(kind, len(data)) + data)

    def tell_text(self, text: str) -> None:
        self.tell(MESSAGE, text)

    def tell_heard(self, heard: Heard) -> None:
        """Queue samples, or the number of missing ones. When the queue is full they are dropped and reported later."""
        samples = heard.samples if isinstance(heard, Missing) else len(heard)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._dropped += samples
            return
        if self._dropped:
            self.tell(LOST, SAMPLES.pack(self._dropped))
            self._dropped = 0
        if isinstance(heard, Missing):
            self.tell(LOST if heard.is_lost else SILENCE, SAMPLES.pack(samples))
        else:
            self.tell(AUDIO, _pcm16(heard))

    async def room(self) -> None:
        """Wait until there is room for a message of the client."""
        await self._room.wait()

    async def write(self) -> None:
        """Send the queued frames until cancelled. Raises OSError if the gateway has closed the socket."""
        while True:
            await self._wake.wait()
            while self._unread:
                data = self._unread[0]
                await self._loop.sock_sendall(self._connection, data)
                self._unread.popleft()
                self._unread_bytes -= len(data)
                if self._unread_bytes < MESSAGE_ROOM_BYTES:
                    self._room.set()
            self._wake.clear()
            self._sent.set()

    async def flush(self) -> None:
        """Wait until the gateway has got everything. `write` must be running."""
        await self._sent.wait()

    def _put(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes >= MESSAGE_ROOM_BYTES:
            self._room.clear()
        self._sent.clear()
        self._wake.set()

    async def _receive(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = await self._loop.sock_recv(self._connection, min(size, 1 << 16))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _pcm16(samples: NDArray[np.float32]) -> bytes:
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
