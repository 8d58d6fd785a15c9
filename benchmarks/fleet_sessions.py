"""The people of `benchmarks.fleet`: sessions that speak one after the other, and note how they fare."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.lasting_clients import Speaker
from realtime.client.wire_client import CannotConnect

AGAIN_S = 0.5
# A client that has its session back after more than this is looked into.
LONG_S = 3.0


class Session(Speaker):
    """A speaker that notes when the engine goes on hearing it: when new sound is acknowledged."""

    def __init__(self, url: str, audio: bytes) -> None:
        super().__init__(url, audio)
        self.is_speaking = True
        # How often the server gave it a session: more than once is a session that was lost.
        self.begun = 0
        self.began_at = 0.0
        self.longest_wait_s = 0.0
        self.lines: list[str] = []
        self._heard_at: float | None = None
        self._marks: list[tuple[int, float, asyncio.Future[float]]] = []

    def mark(self) -> asyncio.Future[float]:
        """Seconds from now until sound that is spoken after now has been heard."""
        told = asyncio.get_running_loop().create_future()
        self._marks.append((self.kept.end + 1, time.perf_counter(), told))
        return told

    async def speak(self) -> None:
        """Raises CannotConnect, and at once: somebody who is not let in does not speak."""
        speaking = asyncio.create_task(self._say())
        telling = asyncio.create_task(self.run(self.events.append, self._line))
        try:
            await asyncio.wait({speaking, telling}, return_when=asyncio.FIRST_COMPLETED)
            self.is_speaking = False
            await telling
        finally:
            self.is_speaking = False
            speaking.cancel()
            for _, _, told in self._marks:
                told.cancel()

    @property
    def text(self) -> str:
        return " ".join(self.transcripts)

    def told(self) -> str:
        numbers = [event["seq"] for event in self.events if "seq" in event]
        jumps = [pair for pair in pairwise(numbers) if pair[1] != pair[0] + 1]
        kinds = [f"{event.get('item_id', '')} {event['type'].rpartition('.')[2]}" for event in self.events]
        items = [kind for kind in kinds if kind.endswith((" committed", " completed", " failed"))]
        errors = [event["error"]["message"] for event in self.events if "error" in event]
        said = f"items {items}, errors {errors}, text {self.text}"
        return f"begun {self.begun}, jumps {jumps[:5]}, lines {self.lines}, {said}"

    def _line(self, text: str) -> None:
        super()._line(text)
        self.lines.append(f"{time.perf_counter() - self.began_at:.2f} {text or 'back'}")

    def _note(self, event: dict[str, Any]) -> None:
        super()._note(event)
        if event["type"] == "session.updated":
            self.begun += 1
            self.began_at = self.began_at or time.perf_counter()

    def _confirm(self, sample: int) -> None:
        before = self.kept.first
        super()._confirm(sample)
        if self.kept.first == before:
            return
        now = time.perf_counter()
        if self._heard_at is not None:
            self.longest_wait_s = max(self.longest_wait_s, now - self._heard_at)
        self._heard_at = now
        while self._marks and self._marks[0][0] <= self.kept.first:
            _, since, told = self._marks.pop(0)
            if not told.done():
                told.set_result(now - since)


class Crowd:
    """So many people at a time. Each says all of the sound in a session, then another one begins."""

    def __init__(self, url: Callable[[], str], audio: bytes, count: int, apart_s: float) -> None:
        self.sessions: list[Session] = []
        self.failures: list[str] = []
        # Of each who was not let in at first: seconds from that until the session began.
        self.refused_s: list[float] = []
        self._url, self._audio = url, audio
        self._is_over = False
        self._people = [asyncio.create_task(self._live(number * apart_s)) for number in range(count)]

    @property
    def speaking(self) -> list[Session]:
        return [session for session in self.sessions if session.is_speaking]

    async def go(self) -> None:
        """Everybody ends what they say, and nobody begins again."""
        self._is_over = True
        await asyncio.gather(*self._people)

    async def until_all_speak(self) -> None:
        while len([session for session in self.speaking if session.begun]) < len(self._people):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def tell_troubles(self, alone: str) -> None:
        """Print what is not as it should be, to look into."""
        for text in self.failures:
            print(f"a session failed: {text}", flush=True)
        for session in self.sessions:
            if session.begun > 1 or session.wrong_numbers or session.wrong_items or session.text != alone:
                print(f"a session differs: {session.told()}", flush=True)
            elif max(session.resumed_s, default=0.0) > LONG_S:
                print(f"a session was away for long: {session.lines}", flush=True)

    async def until_heard(self) -> float:
        """Until all who speak now have been heard further: how long the last of them took."""
        marks = [session.mark() for session in self.speaking]
        if not marks:
            return 0.0
        await asyncio.wait(marks)
        return max((mark.result() for mark in marks if not mark.cancelled()), default=0.0)

    async def _live(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        refused_at: float | None = None
        while not self._is_over:
            session = Session(self._url(), self._audio)
            self.sessions.append(session)
            try:
                await session.speak()
            except CannotConnect as error:
                if not session.begun:
                    self.sessions.remove(session)
                    refused_at = refused_at or time.perf_counter()
                    await asyncio.sleep(AGAIN_S)
                    continue
                self.failures.append(str(error))
            if refused_at is not None:
                self.refused_s.append(session.began_at - refused_at)
                refused_at = None
