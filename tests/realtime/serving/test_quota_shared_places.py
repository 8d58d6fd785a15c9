"""Places that keys share: work of one key that waits keeps no place from another, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from realtime.serving.quota import FairPlaces
from tests.waiting import until


class Work:
    """Pieces of work that hold a place until they are told to end."""

    def __init__(self, places: FairPlaces) -> None:
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._places = places
        self._ends: dict[str, asyncio.Event] = {}

    async def add(self, name: str) -> None:
        """Work that is named after its caller, and a number."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name))
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        async with self._places.place(name[0]):
            self.begun.append(name)
            await self._ends[name].wait()


def keys(number: int) -> Callable[[], int]:
    return lambda: number


async def test_one_of_several_keys_runs_on_half_of_the_places() -> None:
    work = Work(FairPlaces(4, keys(2)))
    for name in ("a1", "a2", "a3", "a4", "b1"):
        await work.add(name)
    assert work.begun == ["a1", "a2", "b1"]
    await work.end("a1")
    assert work.begun == ["a1", "a2", "b1", "a3"]


async def test_a_server_with_one_key_or_none_gives_it_all_places() -> None:
    for number in (0, 1):
        work = Work(FairPlaces(4, keys(number)))
        for name in ("a1", "a2", "a3", "a4", "a5"):
            await work.add(name)
        assert work.begun == ["a1", "a2", "a3", "a4"]


@pytest.mark.parametrize("number", [0, 3])
async def test_callers_have_a_single_place_in_turn(number: int) -> None:
    work = Work(FairPlaces(1, keys(number)))
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        await work.add(name)
    for name in ("a1", "a2", "b1", "c1", "a3", "b2"):
        assert work.begun[-1] == name
        await work.end(name)
    await work.add("a4")
    assert work.begun[-1] == "a4"


async def test_work_that_is_given_up_leaves_its_place_at_any_moment() -> None:
    work = Work(FairPlaces(1, keys(2)))
    for name in ("a1", "a2", "b1", "a3"):
        await work.add(name)
    # One that waits, one that has just got the place and does not know it yet, and the one after it in the same round.
    work.tasks["a2"].cancel()
    work.tasks["a1"].cancel()
    await asyncio.sleep(0)
    work.tasks["b1"].cancel()
    await until(lambda: work.begun[-1] == "a3")
    await work.end("a3")
    await work.add("c1")
    assert work.begun[-1] == "c1"


async def test_callers_that_have_left_are_not_remembered() -> None:
    places = FairPlaces(2, keys(0))
    for number in range(50):
        async with places.place(f"address {number}"):
            pass
    assert places.callers == 0
