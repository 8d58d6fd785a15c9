"""Each attack against the real server beside a good client, whose words, the engine and the memory must not change."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable

import pytest

from tests.attacks.all_attacks import ATTACKS, frames, handshake
from tests.attacks.checks import harmless
from tests.attacks.conftest import Beside
from tests.attacks.real_server import RealServer
from tests.attacks.target import Attack, Target

# How much later than in the calm session a word may come, in the median over all sessions beside attacks.
LATER_S = 5.0


# What libraries parse before our code sees it.
PARSED_BY_LIBRARIES = (handshake.__name__, frames.__name__)


def marks(attack: Attack) -> list[pytest.MarkDecorator]:
    return [pytest.mark.parsers] if attack.run.__module__ in PARSED_BY_LIBRARIES else []


OF_KEYS = {name: attack for name, attack in ATTACKS.items() if not attack.few_sessions}


@pytest.mark.parametrize("attack", [pytest.param(one, id=name, marks=marks(one)) for name, one in OF_KEYS.items()])
def test_attack_harms_nobody(
    server: RealServer, beside: Beside, attack: Attack, record_property: Callable[[str, object], None]
) -> None:
    with harmless(server, beside, attack.name, attack.gateway_mib, attack.engine_mib) as cost:
        asyncio.run(asyncio.wait_for(attack.run(Target(server.port)), 60))
    cost.report(record_property)


@pytest.mark.parsers
def test_words_of_all_sessions_beside_the_attacks_are_those_of_the_calm_one(beside: Beside) -> None:
    beside.wait_for_lap(time.time())
    beside.check()
    assert len(beside.laps) > 1, "the calm session is not one beside an attack"
    calm = statistics.median(beside.calm.delays)
    later = statistics.median(delay for lap in beside.laps[1:] for delay in lap.delays) - calm
    sys.stdout.write(f"\n{len(beside.laps) - 1} sessions beside attacks: words {later:+.2f} s later in the median\n")
    assert later < LATER_S
