"""Detects that this gateway process stood still, and holds its sockets until the engines say which sessions it owns.

A process that was stopped (SIGSTOP), or got no CPU time, does not notice that time has passed. Meanwhile its clients
may have resumed at another gateway: an engine gives a session away if its owner does not answer for `RELEASE_SECONDS`.
So after a standstill of nearly that length the gateway asks the engines which sessions it still owns. Until they
answer, it reads nothing from clients, sends them nothing and resumes no session. Every read and send is checked,
because after a standstill any of them may run before a timer does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any

from realtime.serving.socket_extras import SocketExtras, TextHandler

log = logging.getLogger("tickertape.sessions")

# Seconds between two ticks that count as a standstill: less than the time after which engines take a session from an
# owner that does not answer, and more than the lag of a busy event loop.
STANDSTILL_S = 0.75

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class PauseDetector:
    """Notices a standstill by the time between two ticks of the ticker, from the first tick on. `confirm` asks the
    engines which sessions are still ours."""

    def __init__(self, clock: Callable[[], float], confirm: Callable[[], Awaitable[None]]) -> None:
        self._clock = clock
        self._confirm = confirm
        self._ticked_at: float | None = None
        # Whether there was a standstill after the engines were last asked.
        self._must_ask = False
        self._asking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def ownership_is_unknown(self) -> bool:
        """Whether another process may own some of our sessions by now."""
        return self._asking is not None or self._is_late(self._clock())

    async def wait_for_ownership(self) -> None:
        """Wait until the engines have said which sessions are still ours."""
        while self.ownership_is_unknown:
            self._over.clear()
            await self._over.wait()

    def tick(self) -> None:
        """Called by the ticker; starts to ask the engines if the last call was too long ago."""
        now = self._clock()
        if self._is_late(now):
            assert self._ticked_at is not None
            log.warning(
                "this process stood still for %.1f s; asking the engines which sessions it still owns",
                now - self._ticked_at,
            )
            self._must_ask = True
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(), name="whose sessions")
        self._ticked_at = now

    def guard(
        self, receive: Receive, send: Send, extras: SocketExtras, is_ours: Callable[[], bool]
    ) -> tuple[Receive, Send, SocketExtras]:
        """Wrap a socket so that reads and sends wait while the owner of its session is not known; closing does not
        wait.

        Messages of a session that is not ours any more are dropped: the new owner sends them.
        """

        async def receive_guarded() -> Message:
            message = await receive()
            if self.ownership_is_unknown:
                await self.wait_for_ownership()
            return message

        async def send_guarded(message: Message) -> None:
            if message["type"] == "websocket.send":
                if self.ownership_is_unknown:
                    await self.wait_for_ownership()
                if not is_ours():
                    return
            await send(message)

        def send_now(text: str) -> bool:
            return not self.ownership_is_unknown and is_ours() and extras.send_now(text)

        def offer_to(handler: TextHandler) -> None:
            extras.offer_to(lambda text: not self.ownership_is_unknown and handler(text))

        return receive_guarded, send_guarded, replace(extras, send_now=send_now, offer_to=offer_to)

    def _is_late(self, now: float) -> bool:
        return self._ticked_at is not None and now - self._ticked_at > STANDSTILL_S

    async def _ask(self) -> None:
        try:
            while self._must_ask:
                self._must_ask = False
                await self._confirm()
                # Another standstill after the engines answered makes their answers worthless.
                self._must_ask = self._must_ask or self._is_late(self._clock())
        except Exception:
            log.exception("the engines could not be asked which sessions this process still owns")
        finally:
            self._asking = None
            self._over.set()
