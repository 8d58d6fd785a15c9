"""The pace lets a second's worth through and then slows; the turnstile lets one client by in each round of the loop."""

from __future__ import annotations

import asyncio

import pytest

from realtime.serving.quota import FairTurns, Pace


async def count_rounds(rounds: list[int]) -> None:
    while True:
        await asyncio.sleep(0)
        rounds[0] += 1


async def test_one_client_has_a_turn_in_each_round_of_the_loop() -> None:
    fair_turns, rounds, turns = FairTurns(), [0], []

    async def push(name: str) -> None:
        for _ in range(5):
            await fair_turns.wait()
            turns.append((rounds[0], name))

    counting = asyncio.create_task(count_rounds(rounds))
    await asyncio.gather(push("a"), push("b"), push("c"))
    counting.cancel()
    numbers = [number for number, _ in turns]
    assert len(set(numbers)) == len(numbers) == 15, "two turns in one round"
    assert [name for _, name in turns] == ["a", "b", "c"] * 5


async def test_whoever_gives_up_waiting_is_passed_over() -> None:
    fair_turns, passed = FairTurns(), []

    async def push(name: str) -> None:
        await fair_turns.wait()
        passed.append(name)

    tasks = [asyncio.create_task(push(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert passed == ["b", "d"]
    await asyncio.wait_for(fair_turns.wait(), 1)


def test_pace_lets_a_second_through_and_then_slows() -> None:
    now = 0.0
    pace = Pace(10.0, lambda: now)
    assert [pace.delay() for _ in range(10)] == [0.0] * 10
    assert pace.delay() == pytest.approx(0.1) and pace.delay() == pytest.approx(0.2)
    now = 10.0
    assert pace.delay() == 0.0


def test_to_ask_whether_one_may_pass_takes_nothing() -> None:
    now = [0.0]
    pace = Pace(2.0, lambda: now[0])
    for _ in range(2):
        assert pace.may_pass() and pace.may_pass()
        assert pace.delay() == 0
    assert not pace.may_pass()
    now[0] = 0.5
    assert pace.may_pass()
