"""Fuzzed messages against a gateway in this process, where every object can be inspected: none is left over.

The real server gets the same and more in `tests/attacks/test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

from realtime.config import LimitsConfig
from realtime.serving.live_session import LiveSession
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.realtime.gateway_doubles import FakeEngine, silence, tone
from tests.waiting import until

MESSAGES = 3000


async def good_turns(client: Any, at_least: int, until: asyncio.Task[Any] | None = None) -> list[float]:
    """Speak turn after turn; how long each took from its last audio to its transcript."""
    delays: list[float] = []
    while len(delays) < at_least or (until is not None and not until.done()):
        await client.append(tone(0.5))
        await asyncio.sleep(0.01)
        await client.append(silence(0.7))
        begun = time.perf_counter()
        transcript = (await client.until(COMPLETED))[-1]["transcript"]
        delays.append(time.perf_counter() - begun)
        assert 1 <= len(transcript.split()) <= 2
    return delays


def tasks_of_sessions() -> list[str]:
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith(("writer", "reader", "session"))]


def sessions_in_memory() -> int:
    gc.collect()
    # isinstance would ask objects of other libraries for their class, and some of them warn.
    return sum(type(item) is LiveSession for item in gc.get_objects())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistakes_per_second", [0.0, LimitsConfig().mistakes_per_second], ids=["unpaced", "default"])
async def test_fuzz_harms_nobody_and_leaves_nothing_behind(
    serve: Serve, caplog: pytest.LogCaptureFixture, mistakes_per_second: float
) -> None:
    caplog.set_level(logging.WARNING)
    engine = FakeEngine(slots=500)
    limits = {"mistakes_per_second": mistakes_per_second}
    async with serve(engine, session={"resume_s": 0.5}, limits=limits) as running, greeted_client(running.ws) as good:
        calm = await good_turns(good, 20)
        program = (sys.executable, "-m", "tests.attacks.fuzz_wires", str(running.port), "any-key", str(MESSAGES), "7")
        attackers = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
        attacking = asyncio.create_task(attackers.communicate())
        under_fire = await good_turns(good, 20, attacking)
        output, _ = await attacking
        assert attackers.returncode == 0
        result = json.loads(output)
        assert not result["finds"], result["finds"]
        afterwards = await good_turns(good, 20)
        await until(lambda: len(running.gateway.sessions) == 1 and len(engine.active) == 1)
        await until(lambda: len(tasks_of_sessions()) == 3)
        # The last frames of a task that has just ended may still hold their session.
        await until(lambda: sessions_in_memory() == 1)
    crashes = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not crashes, crashes[0].getMessage()
    assert result["sent"] >= MESSAGES
    # A leak or a blocked loop would show here.
    assert statistics.median(afterwards) < 5 * statistics.median(calm) + 0.05
    medians = [statistics.median(delays) * 1000 for delays in (calm, under_fire, afterwards)]
    before, during, after = medians
    sys.stdout.write(
        f"fuzz: {result['sent']} messages; final after {before:.1f} ms before, {during:.1f} during, {after:.1f} after\n"
    )
