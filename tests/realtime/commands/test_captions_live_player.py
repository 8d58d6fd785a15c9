"""The end of live audio: a late server that still sends is waited for, a silent one is given up."""

from __future__ import annotations

import asyncio

import pytest

from realtime.commands import captions
from realtime.commands.terminal import CommandFailed
from tests.waiting import forever


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "LAST_WORDS_S", 0.5)


async def nothing() -> None:
    pass


async def test_nothing_that_comes_back_is_given_up() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(CommandFailed, match=r"no text arrived for 0\.5 s"):
        await captions.both(nothing(), forever(), lambda: 0.0)
    assert asyncio.get_running_loop().time() - began < 10


async def test_words_that_come_late_are_waited_for() -> None:
    loop = asyncio.get_running_loop()
    news = [0.0]

    async def slow() -> None:
        for _ in range(10):
            await asyncio.sleep(0.1)
            news[0] = loop.time()

    await captions.both(nothing(), slow(), lambda: news[0])


async def test_listener_that_fails_ends_the_feeding() -> None:
    async def fails() -> None:
        raise CommandFailed("the server says: no")

    with pytest.raises(CommandFailed, match="the server says"):
        await captions.both(forever(), fails(), lambda: 0.0)


async def test_sound_that_fails_is_reported_after_the_last_words() -> None:
    said: list[str] = []

    failed = asyncio.Event()

    async def broken() -> None:
        failed.set()
        raise CommandFailed("no sound from the microphone")

    async def listen() -> None:
        await failed.wait()
        said.append("last words")

    with pytest.raises(CommandFailed, match="no sound"):
        await captions.both(broken(), listen(), lambda: 0.0)
    assert said == ["last words"]


async def test_source_that_complains_when_it_is_stopped_is_no_fault() -> None:
    async def microphone() -> captions.AudioSource:
        import numpy as np

        yield np.zeros(10, np.float32)
        raise CommandFailed("arecord says: Interrupted system call")

    assert [len(chunk) async for chunk in captions.until(microphone(), lambda: True)] == []
    heard = []
    with pytest.raises(CommandFailed):
        async for chunk in captions.until(microphone(), lambda: False):
            heard.append(len(chunk))  # noqa: PERF401 (what came before the fault counts)
    assert heard == [10]
