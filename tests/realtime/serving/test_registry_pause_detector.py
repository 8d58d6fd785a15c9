"""A socket whose process was stopped: nothing passes before the owner of its session is known, and then only if this
process still owns it. Whole gateways are tested in tests/realtime/workers/test_standstill.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from realtime.serving.registry import STANDSTILL_S, PauseDetector
from realtime.serving.socket_extras import SocketExtras


class Line:
    """A socket behind the guard, and engines that answer when they are let."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_ours = True
        self.answered = asyncio.Event()
        self.told: list[str] = []
        self.taken: list[str] = []
        self.taker: Any = None
        self.pause_detector = PauseDetector(lambda: self.now, self._confirm)
        self.pause_detector.tick()
        extras = SocketExtras(send_now=self._send_now, offer_to=self._offer_to)
        self.receive, self.send, self.extras = self.pause_detector.guard(
            self._receive, self._send, extras, lambda: self.is_ours
        )
        self.extras.offer_to(self._take)

    def stand_still(self) -> None:
        self.now += STANDSTILL_S + 0.01

    async def _confirm(self) -> None:
        await self.answered.wait()

    async def _receive(self) -> dict[str, Any]:
        return {"type": "websocket.receive", "text": "heard"}

    async def _send(self, message: Any) -> None:
        self.told.append(message.get("text", message["type"]))

    def _send_now(self, text: str) -> bool:
        self.told.append(text)
        return True

    def _offer_to(self, taker: Any) -> None:
        self.taker = taker

    def _take(self, text: str) -> bool:
        self.taken.append(text)
        return True


def word(text: str) -> dict[str, Any]:
    return {"type": "websocket.send", "text": text}


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_socket_of_a_process_that_runs_is_as_it_was() -> None:
    line = Line()
    assert line.extras.send_now("a") and line.taker("b")
    await line.send(word("c"))
    assert (await line.receive())["text"] == "heard"
    assert (line.told, line.taken) == (["a", "c"], ["b"])


@pytest.mark.parametrize("is_ours", [True, False])
async def test_nothing_passes_before_it_is_known_whose_the_session_is(is_ours: bool) -> None:
    line = Line()
    line.stand_still()
    # Before the first tick after it, in any order.
    assert not line.extras.send_now("at once") and not line.taker("offered")
    waiting = [asyncio.create_task(line.send(word("waited"))), asyncio.create_task(line.receive())]
    line.pause_detector.tick()
    await settled()
    assert not any(task.done() for task in waiting) and line.pause_detector.ownership_is_unknown
    # The socket can be closed all the same.
    await line.send({"type": "websocket.close", "code": 4409})
    assert (line.told, line.taken) == (["websocket.close"], [])
    line.is_ours = is_ours
    line.answered.set()
    await asyncio.gather(*waiting)
    assert line.told[1:] == (["waited"] if is_ours else [])
    assert line.extras.send_now("later") is is_ours
    await line.send(word("last"))
    assert line.told[1:] == (["waited", "later", "last"] if is_ours else [])


async def test_one_that_stands_still_again_asks_again() -> None:
    line = Line()
    line.stand_still()
    line.pause_detector.tick()
    await settled()
    line.stand_still()
    line.pause_detector.tick()
    line.answered.set()
    asked = 0

    async def confirm() -> None:
        nonlocal asked
        asked += 1

    line.pause_detector._confirm = confirm
    await line.pause_detector.wait_for_ownership()
    assert asked == 1
