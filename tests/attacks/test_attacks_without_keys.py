"""Attacks on a server without keys and with room for few sessions; the checks are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.attacks.all_attacks import ATTACKS
from tests.attacks.checks import harmless
from tests.attacks.conftest import Beside, skip_without_models
from tests.attacks.real_server import WITHOUT_KEYS, RealServer, real_server
from tests.attacks.target import Attack, Target

FOR_IT = {name: attack for name, attack in ATTACKS.items() if attack.few_sessions}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    skip_without_models()
    with real_server(settings=WITHOUT_KEYS) as running:
        yield running


@pytest.mark.parametrize("attack", [pytest.param(attack, id=name) for name, attack in FOR_IT.items()])
def test_attack_harms_nobody(server: RealServer, beside: Beside, attack: Attack) -> None:
    with harmless(server, beside, attack.name, attack.gateway_mib, attack.engine_mib):
        asyncio.run(asyncio.wait_for(attack.run(Target(server.port)), 60))
