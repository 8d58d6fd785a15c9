"""Scrapes need no key, so any number of them must cost a bounded share of the time."""

from __future__ import annotations

import asyncio

import pytest

from realtime.http.info_routes import KEPT_TIMES, Scrapes


class Maker:
    """Figures that take a second of a clock that only they move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0
        self.fails = False
        self.scrapes = Scrapes(self.make, lambda: self.now)

    async def make(self) -> bytes:
        await asyncio.sleep(0)
        self.now += 1.0
        self.made += 1
        if self.fails:
            raise TimeoutError
        return b"%d" % self.made


async def test_all_who_ask_at_once_get_the_same() -> None:
    maker = Maker()
    assert await asyncio.gather(*(maker.scrapes.read() for _ in range(100))) == [b"1"] * 100
    assert maker.made == 1


async def test_a_flood_makes_them_for_a_bounded_share_of_the_time() -> None:
    maker = Maker()
    for _ in range(1000):
        await maker.scrapes.read()
        maker.now += 0.1
    assert maker.made <= maker.now / KEPT_TIMES + 1
    maker.now += KEPT_TIMES
    made = maker.made
    assert await maker.scrapes.read() == b"%d" % (made + 1), "one who asks later gets fresh figures"


async def test_one_who_leaves_and_one_failure_cost_nobody_else_anything() -> None:
    maker = Maker()
    leaving, staying = (asyncio.create_task(maker.scrapes.read()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"1"
    maker.now += 2 * KEPT_TIMES
    maker.fails = True
    with pytest.raises(TimeoutError):
        await maker.scrapes.read()
    maker.fails = False
    assert await maker.scrapes.read() == b"3"
