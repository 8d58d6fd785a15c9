"""The process of a WebRTC call: answers the SDP offer, and passes audio and events between client and gateway.

    python -m realtime.webrtc.call_process FD

The gateway (`realtime/serving/webrtc_calls.py`) starts this program once; it loads aiortc and forks a process for each
call. All that a client sends besides HTTP is read in the process of its call: ICE, DTLS, SRTP, SCTP and Opus. The
process has limits on memory, open files and CPU time, so a hostile client can end its own call and nothing else. `Call`
owns one call: its peer connection (`peer_connection.py`) and its audio track (`opus_track.py`).

`GatewayConnection` is the socket to the gateway; the format of its messages is `realtime/serving/media_processes.py`.
It owns a bounded queue of outgoing messages: audio beyond the bound is dropped and reported as lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, BinaryIO, cast

import numpy as np
from aiortc.rtcdtlstransport import RTCCertificate, RTCDtlsFingerprint, RTCDtlsParameters
from aiortc.rtcsctptransport import RTCSctpCapabilities
from numpy.typing import NDArray

from audio.formats import MODEL_RATE
from realtime.serving.media_processes import (
    ANSWER,
    AUDIO,
    CLOSE,
    ENDED,
    EVENT,
    FAULT,
    FRAME,
    LOST,
    MAX_FRAME_BYTES,
    MESSAGE,
    SAMPLES,
    SILENCE,
    ForkServer,
    set_bounds,
)
from realtime.webrtc.opus_track import Heard, MissingAudio, OpusTrack
from realtime.webrtc.peer_connection import (
    BadOffer,
    BoundedSctp,
    CallDtls,
    EventChannel,
    IceLite,
    Local,
    NoPort,
    Offer,
    read_offer,
    write_answer,
)

# Bytes that wait for the gateway: 20 s of audio. Audio beyond it is dropped, and reported as lost when there is room.
MAX_UNREAD_BYTES = 20 * 2 * MODEL_RATE
# Bytes beyond which no message of the client is taken.
MESSAGE_ROOM_BYTES = 64 * 1024
# Address space of a process beyond the shared part.
MAX_CALL_BYTES = 192 * 1024 * 1024
# A process needs the socket to the gateway, one UDP socket, and those of its event loop.
MAX_CALL_FILES = 32
# CPU seconds that a call may use between two checks of its timers, and the share of a core that it may take over some
# seconds. A call of speech takes a few hundredths of a core.
MAX_BUSY_S = 1
MAX_CPU_SHARE = 0.5
CPU_WINDOW_S = 10.0
# Seconds after the deadline of the connection in which a client must take an event. While one waits, the process reads
# nothing from the gateway, and would not notice that the call has been ended.
TAKE_S = 30.0
# Seconds between two checks of the timers.
LOOK_S = 0.1
# Seconds for the last events and messages of a call that ends.
LEAVE_S = 2.0


class GatewayConnection:
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
        samples = heard.samples if isinstance(heard, MissingAudio) else len(heard)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._dropped += samples
            return
        if self._dropped:
            self.tell(LOST, SAMPLES.pack(self._dropped))
            self._dropped = 0
        if isinstance(heard, MissingAudio):
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


def main() -> None:
    ForkServer(socket.socket(fileno=int(sys.argv[1])), _live).serve()


def _live(kind: bytes, line: socket.socket, file: BinaryIO | None) -> None:
    set_bounds(MAX_CALL_BYTES, MAX_CALL_FILES)
    # What a client sends must not fill the log. The gateway logs why a call has ended.
    logging.disable(logging.CRITICAL)
    asyncio.run(_serve(line))


async def _serve(line: socket.socket) -> None:
    # Exceptions in aiortc's own tasks end no more than these tasks.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    gateway = GatewayConnection(line)
    _, content = await gateway.read()
    call = Call(gateway, json.loads(content))
    writing = call.start(gateway.write())
    try:
        await call.run()
        async with asyncio.timeout(LEAVE_S):
            await gateway.flush()
    except TimeoutError:
        pass
    finally:
        writing.cancel()


class Call:
    """One call from its offer to its end."""

    def __init__(self, gateway: GatewayConnection, job: dict[str, Any]) -> None:
        self._gateway = gateway
        self._job = job
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Done when the data channel exists, or the client has offered none (None).
        self._events: asyncio.Future[EventChannel | None] = asyncio.get_running_loop().create_future()
        self._sctp: BoundedSctp | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the call. If it fails, the call ends: without it nothing might end the call."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(f"a part of the call has failed ({type(error).__name__})")

    async def run(self) -> None:
        try:
            offer = read_offer(self._job["offer"])
            ice = IceLite(offer.ufrag)
            await ice.open(self._job["bind"], tuple(self._job["ports"]) if self._job["ports"] else None)
        except BadOffer as error:
            self._refuse(400, "invalid_offer", f"The offer cannot be answered: {error}.", "sdp")
            return
        except NoPort as error:
            self._refuse(503, "no_udp_port", f"No UDP port can be opened for the call: {error}.", None)
            return
        certificate = RTCCertificate.generateCertificate()
        dtls = CallDtls(cast(Any, ice), [certificate])
        dtls.track, dtls.on_heard = OpusTrack(offer.payload_type, time.monotonic), self._gateway.tell_heard
        self._answer(offer, ice, certificate)
        tasks = [self.start(work) for work in (self._watch(ice, dtls), self._connect(offer, ice, dtls), self._read())]
        try:
            why = await self._over
        finally:
            for task in tasks:
                task.cancel()
            with suppress(TimeoutError, Exception):
                async with asyncio.timeout(LEAVE_S):
                    await self._leave(ice, dtls)
        self._gateway.tell(ENDED, why)

    def _refuse(self, status: int, code: str, message: str, param: str | None) -> None:
        self._gateway.tell(FAULT, {"status": status, "code": code, "message": message, "param": param})

    def _end(self, why: str) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def _answer(self, offer: Offer, ice: IceLite, certificate: RTCCertificate) -> None:
        digest = next(each for each in certificate.getFingerprints() if each.algorithm == "sha-256")
        addresses = self._job["addresses"] or [self._job["bind"]]
        fingerprint = (digest.algorithm, digest.value)
        local = Local(addresses, ice.port, ice.ufrag, ice.password, fingerprint, self._job["message_bytes"])
        self._gateway.tell(ANSWER, write_answer(offer, local))

    async def _connect(self, offer: Offer, ice: IceLite, dtls: CallDtls) -> None:
        """ICE, then DTLS, then the data channel."""
        try:
            async with asyncio.timeout(self._job["connect_s"]):
                await ice.connected.wait()
                dtls._set_role("server" if offer.client_begins else "client")
                await dtls.start(RTCDtlsParameters([RTCDtlsFingerprint(*each) for each in offer.fingerprints]))
        except TimeoutError:
            self._end("the client did not connect in time")
            return
        if dtls.state != "connected":
            self._end("the DTLS handshake has failed")
            return
        if offer.data is None:
            self._events.set_result(None)
            return
        self._sctp = BoundedSctp(dtls, self._job["message_bytes"], self._gateway.room, self._end)
        self._events.set_result(EventChannel(self._sctp, self._gateway.tell_text, self._end))
        await self._sctp.start(RTCSctpCapabilities(offer.message_bytes), offer.sctp_port)

    async def _watch(self, ice: IceLite, dtls: CallDtls) -> None:
        """Look at the timers: late packets, a client that has left, and the CPU time."""
        began, used_before = time.monotonic(), time.process_time()
        while True:
            # The signal ends a process that does not come back here.
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_BUSY_S)
            await asyncio.sleep(LOOK_S)
            for heard in dtls.track.look():
                self._gateway.tell_heard(heard)
            if dtls.state == "closed":
                self._end("the client has left")
            elif ice.is_gone:
                self._end("the client does not answer any more")
            now, used = time.monotonic(), time.process_time()
            if now - began >= CPU_WINDOW_S:
                if used - used_before > MAX_CPU_SHARE * (now - began):
                    self._end("the call takes too much CPU time")
                began, used_before = now, used

    async def _read(self) -> None:
        """Send the gateway's events to the client, until the gateway ends the call."""
        try:
            while True:
                kind, content = await self._gateway.read()
                if kind == CLOSE:
                    break
                async with asyncio.timeout(self._job["connect_s"] + TAKE_S):
                    channel = await self._events
                    # A client without a data channel reads no events.
                    if kind == EVENT and channel is not None:
                        await channel.send(content.decode())
        except TimeoutError:
            self._end("the client does not read its events")
        except (EOFError, OSError):
            pass
        self._end("the server has ended the call")

    async def _leave(self, ice: IceLite, dtls: CallDtls) -> None:
        if self._sctp is not None and dtls.state == "connected":
            await self._flush()
            await self._sctp.stop()
        await dtls.stop()
        ice.close()

    async def _flush(self) -> None:
        channel = self._events.result()
        if channel is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S / 2):
                    await channel.flush()


if __name__ == "__main__":
    main()
