"""Notices that this process stood still, and holds its sockets until it knows which sessions are still its own.

A process that was stopped, or did not get the processor, goes on as if no time had passed: messages of its clients wait
in its sockets, and so do requests of clients that have long gone to another gateway. Engines give a session to another
gateway when its owner has not answered for `RELEASE_SECONDS`. So whoever stood still for nearly that long asks them
first, and until they have answered nothing is read from clients, nothing is told to them, and no session is resumed.

The check is made where something would be said or taken, not by a timer: the first thing that a woken process does
finds out that it stood still, whichever that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any

from realtime.serving.socket_extras import SocketExtras, Taker

log = logging.getLogger("tickertape.sessions")

# More than this between two ticks is a standstill. It is less than the time after which engines take a session away
# from an owner that does not answer, and more than a loop with much to do is late.
STANDSTILL_S = 0.75

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Standstill:
    """`confirm` returns when it is known which sessions are still ours. It begins with the first tick."""

    def __init__(self, clock: Callable[[], float], confirm: Callable[[], Awaitable[None]]) -> None:
        self._clock = clock
        self._confirm = confirm
        self._ticked_at: float | None = None
        # Whether it stood still since engines were last asked.
        self._unasked = False
        self._asking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def is_unsure(self) -> bool:
        """Whether sessions that were ours may be another's by now."""
        return self._asking is not None or self._is_late(self._clock())

    async def over(self) -> None:
        """Until it is known which sessions are still ours."""
        while self.is_unsure:
            self._over.clear()
            await self._over.wait()

    def tick(self) -> None:
        """Called all the time; the more often, the sooner an end of a standstill is noticed."""
        now = self._clock()
        if self._is_late(now):
            assert self._ticked_at is not None
            log.warning("this process stood still for %.1f s; asking whose its sessions are", now - self._ticked_at)
            self._unasked = True
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(), name="whose sessions")
        self._ticked_at = now

    def guard(
        self, receive: Receive, send: Send, extras: SocketExtras, is_ours: Callable[[], bool]
    ) -> tuple[Receive, Send, SocketExtras]:
        """The same socket, held while it is not known whose its session is. It can be closed all the same. Words of a
        session that is not ours any more are dropped: whoever has it tells them."""

        async def receive_surely() -> Message:
            message = await receive()
            if self.is_unsure:
                await self.over()
            return message

        async def send_surely(message: Message) -> None:
            if message["type"] == "websocket.send":
                if self.is_unsure:
                    await self.over()
                if not is_ours():
                    return
            await send(message)

        def send_now(text: str) -> bool:
            return not self.is_unsure and is_ours() and extras.send_now(text)

        def offer_to(taker: Taker) -> None:
            extras.offer_to(lambda text: not self.is_unsure and taker(text))

        return receive_surely, send_surely, replace(extras, send_now=send_now, offer_to=offer_to)

    def _is_late(self, now: float) -> bool:
        return self._ticked_at is not None and now - self._ticked_at > STANDSTILL_S

    async def _ask(self) -> None:
        try:
            while self._unasked:
                self._unasked = False
                await self._confirm()
                # It may have stood still again meanwhile, with the answers before it.
                self._unasked = self._unasked or self._is_late(self._clock())
        except Exception:
            log.exception("engines cannot be asked whose the sessions are")
        finally:
            self._asking = None
            self._over.set()
