"""The process of a WebRTC call: answers the SDP offer, and passes audio and events between client and gateway.

    python -m realtime.webrtc.call_process FD

The gateway (`realtime/serving/webrtc_calls.py`) starts this program once; it loads aiortc and forks a process for each
call. All that a client sends besides HTTP is read in the process of its call: the offer, ICE, DTLS, SRTP, SCTP and
Opus. The process has limits on memory, open files and CPU time, so a hostile client can end its own call and nothing
else. `Call` owns one call: its offer and answer (`sdp.py`), its transport (`peer_connection.py`) and its audio track
(`opus_track.py`).

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
from realtime.webrtc.opus_track import MissingAudio, OpusTrack, TrackAudio
from realtime.webrtc.peer_connection import BoundedSctp, CallDtls, EventChannel, IceLite, NoPort
from realtime.webrtc.sdp import BadOffer, LocalDescription, Offer, read_offer, write_answer

# Bytes that are queued for the gateway: 20 s of audio. Further audio is dropped, and reported as lost when the queue is
# shorter again.
MAX_UNSENT_BYTES = 20 * 2 * MODEL_RATE
# While this many bytes are queued for the gateway, no message is accepted on the client's data channel.
MAX_MESSAGE_BACKLOG_BYTES = 64 * 1024
# Address space of the process of a call, beyond the part that it shares with its fork server.
MAX_CALL_BYTES = 192 * 1024 * 1024
# A process needs the socket to the gateway, one UDP socket, and those of its event loop.
MAX_CALL_FILES = 32
# CPU seconds that a call may use between two checks of its timers, and the share of a core that it may use within
# `CPU_WINDOW_S`. Speech uses a few hundredths of a core.
MAX_BUSY_S = 1
MAX_CPU_SHARE = 0.5
CPU_WINDOW_S = 10.0
# Seconds in which a client must accept an event, in addition to the time for connecting (`connect_s`). While an event
# waits, the process reads nothing from the gateway, not even that the call is to end.
EVENT_TIMEOUT_S = 30.0
# Seconds between two checks of the timers (`Call._check_timers`).
TIMER_INTERVAL_S = 0.1
# Seconds that sending the last events, and then the last frames for the gateway, may take when a call ends.
CLOSING_TIMEOUT_S = 2.0


class GatewayConnection:
    """One connection to the gateway. `read` waits for the next frame; the `send` methods queue frames for `write`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        # Samples that were dropped because the queue was full, and that are not reported as lost yet.
        self._dropped = 0
        # Set when frames are queued.
        self._wake = asyncio.Event()
        self._all_sent, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    async def read(self) -> tuple[bytes, bytes]:
        """The next frame: kind and content. Raises EOFError if the gateway has closed the socket."""
        kind, length = FRAME.unpack(await self._receive(FRAME.size))
        if length > MAX_FRAME_BYTES:
            raise EOFError
        return kind, await self._receive(length)

    def send(self, kind: bytes, content: bytes | dict[str, Any] | str = b"") -> None:
        if isinstance(content, dict):
            content = json.dumps(content)
        data = content.encode() if isinstance(content, str) else content
        self._put(FRAME.pack(kind, len(data)) + data)

    def send_text(self, text: str) -> None:
        self.send(MESSAGE, text)

    def send_audio(self, audio: TrackAudio) -> None:
        """Queue samples or a gap. If the queue is full, the audio is dropped and reported as lost later."""
        samples = audio.samples if isinstance(audio, MissingAudio) else len(audio)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._dropped += samples
            return
        if self._dropped:
            self.send(LOST, SAMPLES.pack(self._dropped))
            self._dropped = 0
        if isinstance(audio, MissingAudio):
            self.send(LOST if audio.is_lost else SILENCE, SAMPLES.pack(samples))
        else:
            self.send(AUDIO, _pcm16(audio))

    async def wait_for_room(self) -> None:
        """Wait until the queue has room for a message of the client."""
        await self._has_room.wait()

    async def write(self) -> None:
        """Send the queued frames until cancelled. Raises OSError if the gateway has closed the socket."""
        while True:
            await self._wake.wait()
            while self._unsent:
                data = self._unsent[0]
                await self._loop.sock_sendall(self._connection, data)
                self._unsent.popleft()
                self._unsent_bytes -= len(data)
                if self._unsent_bytes < MAX_MESSAGE_BACKLOG_BYTES:
                    self._has_room.set()
            self._wake.clear()
            self._all_sent.set()

    async def flush(self) -> None:
        """Wait until all queued frames are written to the socket. `write` must be running."""
        await self._all_sent.wait()

    def _put(self, data: bytes) -> None:
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes >= MAX_MESSAGE_BACKLOG_BYTES:
            self._has_room.clear()
        self._all_sent.clear()
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
    ForkServer(socket.socket(fileno=int(sys.argv[1])), _run_call).serve()


def _run_call(kind: bytes, line: socket.socket, file: BinaryIO | None) -> None:
    """Serve one call; the function that a forked process runs until it ends."""
    set_bounds(MAX_CALL_BYTES, MAX_CALL_FILES)
    # A client's packets must not fill the log. The gateway logs why a call has ended.
    logging.disable(logging.CRITICAL)
    asyncio.run(_serve(line))


async def _serve(line: socket.socket) -> None:
    # An exception in one of aiortc's own tasks must not end the call.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    gateway = GatewayConnection(line)
    _, content = await gateway.read()
    call = Call(gateway, json.loads(content))
    writing = call.start(gateway.write())
    try:
        await call.run()
        async with asyncio.timeout(CLOSING_TIMEOUT_S):
            await gateway.flush()
    except TimeoutError:
        pass
    finally:
        writing.cancel()


class Call:
    """One call from its offer to its end."""

    def __init__(self, gateway: GatewayConnection, job: dict[str, Any]) -> None:
        self._gateway = gateway
        # The order of the gateway: `JOB` in `media_processes.py`.
        self._job = job
        # Done when the call is to end; the result says why.
        self._end_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The data channel, when it exists; None if the client has offered none.
        self._channel: asyncio.Future[EventChannel | None] = asyncio.get_running_loop().create_future()
        self._sctp: BoundedSctp | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task of the call. If it fails, the call ends, because only the failed task might have ended it."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
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
        dtls.track, dtls.on_audio = OpusTrack(offer.payload_type, time.monotonic), self._gateway.send_audio
        self._answer(offer, ice, certificate)
        parts = self._check_timers(ice, dtls), self._connect(offer, ice, dtls), self._forward_events()
        tasks = [self.start(part) for part in parts]
        try:
            reason = await self._end_reason
        finally:
            for task in tasks:
                task.cancel()
            with suppress(TimeoutError, Exception):
                async with asyncio.timeout(CLOSING_TIMEOUT_S):
                    await self._close(ice, dtls)
        self._gateway.send(ENDED, reason)

    def _refuse(self, status: int, code: str, message: str, param: str | None) -> None:
        self._gateway.send(FAULT, {"status": status, "code": code, "message": message, "param": param})

    def _end(self, reason: str) -> None:
        if not self._end_reason.done():
            self._end_reason.set_result(reason)

    def _answer(self, offer: Offer, ice: IceLite, certificate: RTCCertificate) -> None:
        digest = next(each for each in certificate.getFingerprints() if each.algorithm == "sha-256")
        addresses = self._job["addresses"] or [self._job["bind"]]
        fingerprint = (digest.algorithm, digest.value)
        local = LocalDescription(addresses, ice.port, ice.ufrag, ice.password, fingerprint, self._job["message_bytes"])
        self._gateway.send(ANSWER, write_answer(offer, local))

    async def _connect(self, offer: Offer, ice: IceLite, dtls: CallDtls) -> None:
        """Connect ICE, then DTLS, then the data channel."""
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
            self._channel.set_result(None)
            return
        self._sctp = BoundedSctp(dtls, self._job["message_bytes"], self._gateway.wait_for_room, self._end)
        self._channel.set_result(EventChannel(self._sctp, self._gateway.send_text, self._end))
        await self._sctp.start(RTCSctpCapabilities(offer.message_bytes), offer.sctp_port)

    async def _check_timers(self, ice: IceLite, dtls: CallDtls) -> None:
        """Check at intervals for packets that waited long enough, for a client that has left, and the CPU time."""
        began, used_before = time.monotonic(), time.process_time()
        while True:
            # The signal kills the process if it computes for `MAX_BUSY_S` without returning here.
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_BUSY_S)
            await asyncio.sleep(TIMER_INTERVAL_S)
            for audio in dtls.track.expired():
                self._gateway.send_audio(audio)
            if dtls.state == "closed":
                self._end("the client has left")
            elif ice.client_has_left:
                self._end("the client does not answer any more")
            now, used = time.monotonic(), time.process_time()
            if now - began >= CPU_WINDOW_S:
                if used - used_before > MAX_CPU_SHARE * (now - began):
                    self._end("the call takes too much CPU time")
                began, used_before = now, used

    async def _forward_events(self) -> None:
        """Send the gateway's events to the client until the gateway ends the call."""
        try:
            while True:
                kind, content = await self._gateway.read()
                if kind == CLOSE:
                    break
                async with asyncio.timeout(self._job["connect_s"] + EVENT_TIMEOUT_S):
                    channel = await self._channel
                    # Without a data channel events are dropped.
                    if kind == EVENT and channel is not None:
                        await channel.send(content.decode())
        except TimeoutError:
            self._end("the client does not read its events")
        except (EOFError, OSError):
            pass
        self._end("the server has ended the call")

    async def _close(self, ice: IceLite, dtls: CallDtls) -> None:
        if self._sctp is not None and dtls.state == "connected":
            await self._flush_channel()
            await self._sctp.stop()
        await dtls.stop()
        ice.close()

    async def _flush_channel(self) -> None:
        channel = self._channel.result()
        if channel is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_TIMEOUT_S / 2):
                    await channel.flush()


if __name__ == "__main__":
    main()
