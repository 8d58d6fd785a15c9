"""A client that speaks, loses its connection and resumes; it checks the events that it gets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from realtime.client.resuming_session import ResumingSession
from realtime.client.wire_client import COMPLETED, SessionOptions, WireSession
from tests.realtime.workers.engines import RATE

VAD = {"type": "server_vad", "threshold": 0.3, "silence_duration_ms": 300, "prefix_padding_ms": 0}


class SpeakingClient(ResumingSession):
    """`url` is asked for before every connection."""

    def __init__(
        self,
        url: Callable[[], str],
        audio: bytes,
        turn_detection: dict[str, Any] | None = VAD,
        *,
        speakers: bool = False,
    ) -> None:
        super().__init__(url(), None, SessionOptions(RATE, turn_detection, speakers=speakers))
        self.where = url
        self.audio = audio
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._held_at = len(audio)
        self._let_go = asyncio.Event()
        self._session: WireSession | None = None

    def hold_at(self, seconds: float | None) -> None:
        """Say no more than this for now; None: all of it."""
        self._held_at = len(self.audio) if seconds is None else int(seconds * RATE) * 2
        self._let_go.set()

    def leave(self) -> None:
        """Give the connection up without a word; another one is made at once."""
        assert self._session is not None
        self._session._socket.transport.abort()

    async def _talk(self, session: WireSession, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._session = session
        await super()._talk(session, on_event)

    def _target(self) -> str:
        self._url = self.where()
        return super()._target()

    async def speak(self, pieces: int = 50, pause_s: float = 0.01) -> None:
        """All of the audio in pieces, and everything that is said about it."""
        telling = asyncio.create_task(self.run(self.events.append, self.lines.append))
        size = -(-len(self.audio) // pieces // 2) * 2
        try:
            for start in range(0, len(self.audio), size):
                while start >= self._held_at:
                    self._let_go.clear()
                    await self._let_go.wait()
                self.append(self.audio[start : start + size])
                await asyncio.sleep(pause_s)
            self.finish()
            await telling
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    @property
    def text(self) -> list[str]:
        return [event["transcript"] for event in self.events if event["type"] == COMPLETED]

    @property
    def spoken(self) -> list[tuple[str, Any, list[Any]]]:
        """The transcript of each item, its speaker, and those of its words, in order of their audio."""
        done = [event for event in self.events if event["type"] == COMPLETED]
        done.sort(key=lambda event: event["audio_start_ms"])
        who = [[word.get("speaker") for word in event["words"]] for event in done]
        return [(event["transcript"], event.get("speaker"), by) for event, by in zip(done, who, strict=True)]

    @property
    def losses(self) -> int:
        return sum(bool(line) for line in self.lines)

    def check(self) -> None:
        """Numbers without gap or repeat, ids that come once, one end for each item, and all of it was told in pieces
        before."""
        ids = [event["event_id"] for event in self.events]
        assert len(ids) == len(set(ids)), "two events with one id"
        numbers = [event["seq"] for event in self.events if "seq" in event]
        assert numbers == list(range(1, len(numbers) + 1)), (numbers, self.lines)
        done = [event["item_id"] for event in self.events if event["type"] == COMPLETED]
        assert len(done) == len(set(done))
        committed = [event["item_id"] for event in self.events if event["type"] == "input_audio_buffer.committed"]
        assert done == committed
        deltas: dict[str, str] = {}
        for event in self.events:
            if event["type"].endswith("transcription.delta"):
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        for event in self.events:
            if event["type"] == COMPLETED:
                assert event["transcript"] == deltas.get(event["item_id"], "")
