"""Parked streams in the loop: a device that is lost while pages are copied, and an engine that waits for copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.plan import Moves
from engine.core.scheduler import PARKED_AFTER_NS, Limits, Scheduler
from engine.errors import EngineDead
from engine.messages import Dead, Feed, Flush, Flushed, Open, Output
from engine.server.host import BEAT_SECONDS, COPY_SECONDS
from engine.server.loop import EngineLoop
from engine.spec import KvGroup
from tests.engine import fakes
from tests.engine.server.test_host import Host
from tests.engine.server.test_loop_failures import items_of

SPEC = replace(fakes.FRAMES, kv_groups=(KvGroup("decoder", 16, 4, 1),))


class Copies(Moves):
    """Copies that take as long as a test wants, on a device that may be lost."""

    are_complete = True
    is_lost = False

    def is_restored(self, slot: int) -> bool:
        if self.is_lost:
            raise RuntimeError("device lost")
        return self.are_complete

    def parking_room(self) -> int:
        return 1


def parking_loop(copies: Copies, runner: fakes.FakeFrames | None = None) -> EngineLoop:
    """A loop with two streams that have said something, and pages for one of them: the first is parked."""
    pages = tuple(group.ring_pages for group in SPEC.kv_groups)
    limits = Limits(2, 900, pages, 64, 64, resident_streams=1)
    runner = runner or fakes.FakeFrames(SPEC)
    runner.moves = copies
    loop = EngineLoop(Scheduler(SPEC, limits, fakes.VOCABULARY), runner)
    for index, name in enumerate("ab"):
        loop.submit([Open(name), Feed(name, items_of(SPEC, fakes.speech(1, index))[:4])], index * 2 * PARKED_AFTER_NS)
        steps_of(loop)
    loop.scheduler.advance_clock(4 * PARKED_AFTER_NS)
    assert loop.scheduler.parked == 1
    return loop


def steps_of(loop: EngineLoop, most: int = 200) -> list[Output]:
    outputs: list[Output] = []
    while loop.has_work() and most:
        step = loop.step()
        outputs += [] if step is None else step.outputs
        most -= 1
    return outputs


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_device_that_is_lost_while_pages_are_copied_ends_the_engine(overlaps: bool) -> None:
    copies = Copies()
    loop = parking_loop(copies, fakes.LaunchingFrames(SPEC) if overlaps else None)
    copies.are_complete = False
    loop.submit([Feed("a", items_of(SPEC, fakes.speech(1, 0))[4:6])], 4 * PARKED_AFTER_NS)
    assert not any(isinstance(output, Dead) for output in steps_of(loop, 5))
    copies.is_lost = True
    step = loop.step()
    assert step is not None and isinstance(step.outputs[-1], Dead) and "device lost" in step.outputs[-1].message
    with pytest.raises(EngineDead):
        loop.step()


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_engine_neither_spins_nor_sleeps_while_it_waits_for_a_copy(overlaps: bool) -> None:
    copies = Copies()
    loop = parking_loop(copies, fakes.LaunchingFrames(SPEC) if overlaps else None)
    host = Host(loop).host
    assert host._wait_seconds() == BEAT_SECONDS / 4
    copies.are_complete = False
    loop.submit([Feed("a", items_of(SPEC, fakes.speech(1, 0))[4:6]), Flush("a", 7)], 4 * PARKED_AFTER_NS)
    assert host._wait_seconds() == 0, "the copy has to be started"
    outputs = steps_of(loop, 5)
    assert host._wait_seconds() == COPY_SECONDS
    loop.submit([Feed("b", items_of(SPEC, fakes.speech(1, 1))[4:5])], 4 * PARKED_AFTER_NS)
    assert not any(isinstance(output, Flushed) for output in outputs + steps_of(loop, 5))
    copies.are_complete = True
    assert any(isinstance(output, Flushed) for output in steps_of(loop)), "no further message comes"
