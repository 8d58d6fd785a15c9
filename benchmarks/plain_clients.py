"""Clients that cannot resume, for `benchmarks.survival server --plain`: the openai package with an endless microphone.

When a session is closed they open another one; speech in between is lost. A drain begins for them with the event
`session.closing`. Clients that resume are in `benchmarks/clients.py`.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks.clients import APPEND_MS, TURNS, Orders, Schedule, sleep_until
from benchmarks.measuring import percentiles
from benchmarks.sounds import SAMPLE_RATE, Samples, pcm16, resampled
from realtime.client.wire_client import COMPLETED

SPEECH_STARTED = "input_audio_buffer.speech_started"
# The rate of OpenAI's clients.
RATE = 24_000
ASK_AGAIN_S = 0.5
RESTARTED = 1012


@dataclass
class PlainSession:
    """One session as it ended."""

    # Seconds from the lost session to this one; None for the first.
    reconnected_s: float | None
    words: int = 0
    turns: set[str] = field(default_factory=set)
    told_at: float | None = None
    # The server's close code, and seconds from `session.closing` to it; None: the client itself hung up.
    code: int | None = None
    drained_s: float | None = None


class PlainClient:
    """Speaks until a moment, in as many sessions as it takes."""

    def __init__(self, url: str, audio: bytes, until: float) -> None:
        self.sessions: list[PlainSession] = []
        self.refusals = 0
        address = f"http://{urlsplit(url).netloc}/v1"
        self._openai = AsyncOpenAI(base_url=address, api_key="unused", max_retries=0)
        self._audio, self._until = audio, until

    async def speak(self) -> None:
        lost_at: float | None = None
        while time.monotonic() < self._until:
            try:
                async with self._openai.realtime.connect(extra_query={"intent": "transcription"}) as connection:
                    await connection.recv()
                    self.sessions.append(PlainSession(None if lost_at is None else time.monotonic() - lost_at))
                    await self._converse(connection, self.sessions[-1])
            except ConnectionClosed as closed:
                self._note_close(closed.rcvd.code if closed.rcvd else 1006)
            except (InvalidHandshake, OSError):
                self.refusals += 1
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            lost_at = time.monotonic()

    async def _converse(self, connection: Any, session: PlainSession) -> None:
        audio = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": TURNS}
        await connection.session.update(session={"type": "transcription", "audio": {"input": audio}})
        sending = asyncio.create_task(self._send(connection))
        try:
            async with asyncio.timeout(max(0.0, self._until - time.monotonic())):
                while True:
                    self._take(await connection.recv(), session)
        except TimeoutError:
            pass
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _take(self, event: Any, session: PlainSession) -> None:
        if event.type == SPEECH_STARTED:
            session.turns.add(event.item_id)
        elif event.type == COMPLETED:
            session.turns.discard(event.item_id)
            session.words += len(event.transcript.split())
        elif event.type == "session.closing":
            session.told_at = time.monotonic()

    def _note_close(self, code: int) -> None:
        if self.sessions:
            session = self.sessions[-1]
            session.code = code
            session.drained_s = None if session.told_at is None else time.monotonic() - session.told_at

    async def _send(self, connection: Any) -> None:
        size, due, at = 2 * RATE * APPEND_MS // 1000, time.monotonic(), 0
        while True:
            due += APPEND_MS / 1000
            await sleep_until(due)
            data = self._audio[at : at + size]
            at = (at + size) % len(self._audio)
            await connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())


async def play_plain(orders: Orders, sound: Samples, schedule: Schedule) -> list[tuple[list[PlainSession], int]]:
    """For each client of a process: its sessions, and how often it was refused."""
    audio = pcm16(resampled(sound, SAMPLE_RATE, RATE))

    async def one(number: int) -> tuple[list[PlainSession], int]:
        joins_at = schedule.joins_at(number, orders.all_sessions)
        client = PlainClient(orders.urls[0], audio, joins_at + orders.seconds)
        await sleep_until(joins_at)
        await client.speak()
        return client.sessions, client.refusals

    return await asyncio.gather(*map(one, orders.sessions))


def plain_summary(clients: Sequence[tuple[list[PlainSession], int]]) -> dict[str, Any]:
    sessions = [session for mine, _ in clients for session in mine]
    ended = [session for session in sessions if session.code is not None]
    drained = [session for session in ended if session.code == RESTARTED]
    waits = [session.reconnected_s for session in sessions if session.reconnected_s is not None]
    return {
        "clients": len(clients),
        "sessions": len(sessions),
        "words": sum(session.words for session in sessions),
        "closed_with_1012": len(drained),
        "of_them_told_before": sum(session.told_at is not None for session in drained),
        "closed_otherwise": len(ended) - len(drained),
        "turns_cut": sum(len(session.turns) for session in ended),
        # From `session.closing` to the close.
        **percentiles("drained_s", [one.drained_s for one in drained if one.drained_s is not None], 50, 100),
        **percentiles("reconnected_s", waits, 50, 100),
        "refused": sum(refusals for _, refusals in clients),
    }
