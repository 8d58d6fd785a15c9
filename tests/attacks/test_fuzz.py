"""Fuzzed conversations and requests against the real server beside a good client.

The short run is part of the suite, the long one of `make soak`: `TICKERTAPE_FUZZ_MESSAGES` is its length. Earlier
findings are in `cases/`, each as the messages that were needed, and are sent again every time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.checks import harmless
from tests.attacks.conftest import Beside, GoodClient
from tests.attacks.real_server import BAD_KEY, RealServer, real_server
from tests.attacks.target import Target

MESSAGES = 3_000
LONG_MESSAGES = int(os.environ.get("TICKERTAPE_FUZZ_MESSAGES", "700000"))
SEED = os.environ.get("TICKERTAPE_FUZZ_SEED", "1")
# The first speech of an engine brings tens of MiB of plans for its products, more on a busy machine.
GATEWAY_MIB, ENGINE_MIB = 64, 96
# Everything may be sent as fast as the gateway takes it: the pace of mistakes has its own tests.
UNPACED = {"limits.mistakes_per_second": "0"}
CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


def fuzz(
    server: RealServer,
    beside: Beside,
    messages: int,
    seed: str,
    record_property: Callable[[str, object], None],
) -> str:
    began = time.monotonic()
    with harmless(server, beside, f"fuzz {seed}", GATEWAY_MIB, ENGINE_MIB) as cost:
        program = (sys.executable, "-m", "tests.attacks.fuzz_wires", str(server.port), BAD_KEY, str(messages), seed)
        done = subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True)
    cost.report(record_property)
    took = time.monotonic() - began
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["sent"] >= messages
    assert not result["finds"], json.dumps(result["finds"], indent=1)
    beside.wait_for_lap(time.time())
    beside.check()
    return f"{result['sent']} messages in {took:.0f} s beside {len(beside.laps)} sessions"


def test_fuzzed_messages_harm_nobody(
    server: RealServer, beside: Beside, record_property: Callable[[str, object], None]
) -> None:
    fuzz(server, beside, MESSAGES, SEED, record_property)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_many_fuzzed_messages_harm_nobody(
    capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    with real_server(settings=UNPACED) as server, GoodClient(server) as beside:
        said = fuzz(server, beside, LONG_MESSAGES, f"long {SEED}", record_property)
    with capsys.disabled():
        sys.stdout.write(f"\nfuzzed wires: {said}\n")


@pytest.mark.parametrize("case", CASES, ids=[case.stem for case in CASES])
def test_finds_of_the_past_stay_repaired(server: RealServer, beside: Beside, case: Path) -> None:
    found = json.loads(case.read_text())
    with harmless(server, beside, case.stem, GATEWAY_MIB, ENGINE_MIB):
        asyncio.run(asyncio.wait_for(replay(Target(server.port), found), 60))


async def replay(target: Target, found: dict[str, Any]) -> None:
    """Send the messages of a case; each is answered or ignored, and none breaks anything."""
    async with target.client(f"ws://127.0.0.1:{target.port}{found['path']}", greeted=False) as client:
        for message in found["messages"]:
            await client.send_raw(message if isinstance(message, str) else bytes(message))
        await client.send("no.such.thing")
        while (await client.receive())["type"].lower() != "error":
            pass
