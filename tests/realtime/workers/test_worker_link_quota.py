"""The quota over all workers: a grant that comes too late, or to a worker that has ended, is released."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from realtime.config import LimitsConfig
from realtime.serving.quota import Admission, Figures
from realtime.workers import worker_link
from realtime.workers.worker_link import Enter, Leave, OwnFigures, QuotaCoordinator, SharedQuota, WorkerConnection


class Parent:
    """A parent that answers when it is told to, over the real line."""

    def __init__(self, line: WorkerConnection, target: QuotaCoordinator) -> None:
        self.target = target
        self.unheard: asyncio.Queue[Any] = asyncio.Queue()
        self._line = line

    async def read(self) -> None:
        async for message in self._line:
            self.unheard.put_nowait(message)

    async def hear(self, kind: type) -> None:
        """The next message, which is of this kind."""
        message = await asyncio.wait_for(self.unheard.get(), 10)
        assert isinstance(message, kind), message
        self.target.on_message(1, message)


@asynccontextmanager
async def two_sides(**limits: int) -> AsyncIterator[tuple[SharedQuota, Parent]]:
    ours, theirs = [await WorkerConnection.from_socket(end) for end in socket.socketpair()]
    target = QuotaCoordinator(LimitsConfig(**limits), lambda: 0.0)
    target.add(1, ours)
    quota, parent = SharedQuota(theirs, lambda: 100.0), Parent(ours, target)

    async def hear() -> None:
        async for message in theirs:
            quota.on_message(message)

    tasks = [asyncio.create_task(parent.read()), asyncio.create_task(hear())]
    try:
        yield quota, parent
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in (ours, theirs):
            line.close()
            await line._writer.wait_closed()


async def test_a_grant_that_comes_after_its_worker_has_stopped_waiting_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "ANSWER_S", 0.02)
    async with two_sides(max_sessions=8) as (quota, parent):
        assert (await quota.enter("a caller", 8)).reason == "capacity"
        await parent.hear(Enter)
        assert parent.target.counts.total() == 8
        await parent.hear(Leave)
        assert parent.target.counts.total() == 0
        monkeypatch.setattr(worker_link, "ANSWER_S", 10.0)
        asking = asyncio.create_task(quota.enter("another caller", 8))
        await parent.hear(Enter)
        assert (await asking).reason is None


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "with the answer"])
async def test_a_grant_to_a_cancelled_request_is_given_back(answered: bool) -> None:
    async with two_sides(max_sessions=8) as (quota, parent):
        admission = Admission(quota, "a caller")
        asking = asyncio.create_task(admission.enter(3))
        while parent.unheard.empty():  # noqa: ASYNC110
            await asyncio.sleep(0)
        if answered:
            await parent.hear(Enter)
            # The answer is there, and the task that asked has not gone on yet.
            while quota.asked:  # noqa: ASYNC110
                await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        admission.release()
        if not answered:
            await parent.hear(Enter)
        await parent.hear(Leave)
        assert parent.target.counts.total() == 0 and parent.unheard.empty()


async def test_a_late_refusal_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "ANSWER_S", 0.02)
    async with two_sides(max_sessions=2) as (quota, parent):
        parent.target.counts.add(1, "a caller", 2)
        assert (await quota.enter("a caller", 1)).reason == "capacity"
        await parent.hear(Enter)
        while quota.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        quota.tick(Figures())
        await parent.hear(OwnFigures)
        assert parent.target.counts.total() == 2


async def test_questions_to_a_parent_that_does_not_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "ANSWER_S", 0.001)
    monkeypatch.setattr(worker_link, "MOST_QUESTIONS", 5)
    async with two_sides() as (quota, parent):
        for _ in range(20):
            assert (await quota.enter("a caller", 1)).reason == "capacity"
        assert len(quota.asked) == 5
        for _ in range(5):
            await parent.hear(Enter)
        for _ in range(5):
            await parent.hear(Leave)
        assert parent.target.counts.total() == 0 and not quota.asked


async def test_what_a_worker_said_before_it_ended_is_not_counted_after() -> None:
    async with two_sides(max_sessions=8) as (quota, parent):
        quota.enter_again("a caller")
        asking = asyncio.create_task(quota.enter("a caller", 2))
        quota.tick(Figures(sessions=3))
        while parent.unheard.qsize() < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        parent.target.remove(1)
        for _ in range(3):
            parent.target.on_message(1, parent.unheard.get_nowait())
        assert parent.target.counts.total() == 0
        asking.cancel()


async def test_drain_waits_until_the_last_byte_is_sent() -> None:
    """A worker ends after it, and the rest of its buffer with it."""
    end, other = socket.socketpair()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    other.setblocking(False)
    line = await WorkerConnection.from_socket(end)
    with other:
        for _ in range(30):
            line.send(Leave("x" * 1000))
        draining = asyncio.create_task(line.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        received = b""
        while received.count(b"\n") < 30:
            received += await asyncio.get_running_loop().sock_recv(other, 1 << 16)
        await draining
        line.close()
        await line._writer.wait_closed()
