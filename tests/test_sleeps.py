"""Tests wait for something to happen; they do not sleep and hope that it has.

A fixed time is too long on a quiet machine and too short on a busy one. What may sleep: a loop that looks again and
again, or sends at a pace, for a tenth of a second at a time at most, and a place that is listed here with its reason.
`tests/waiting.py` has the loops.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
LONGEST_S = 0.1
# File and function -> why time itself has to pass there.
ALLOWED = {
    "attacks/frames.py::stop_short": "the attacker holds its socket for a while",
    "attacks/frames.py::a_frame_that_never_comes": "the attackers hold their sockets for a while",
    "attacks/fuzz_wires.py::_socket": "a client that was refused comes back a little later",
    "attacks/handshake.py::a_flood_of_pipelined_requests": "the attacker reads nothing for a while",
    "attacks/measure.py::measure": "a program: the speaker begins before the attack",
    "attacks/sound.py::a_flac_bomb_on_a_socket": "the attacker lets the server decode for a while",
    "e2e/ecosystem_clients.py::speak": "the package does not tell when its pipeline runs",
    "engine/client/test_client.py::forget": "the pace of a client",
    "engine/client/test_recovery.py::brief": "the pace of a client",
    "fleet/test_ray.py::test_actors_and_ray_that_are_stopped_and_go_on_change_nothing": "how long they are stopped",
    "web/screenshots.py::take": "a program: a picture shows the page when its transitions are over",
    "web/screenshots.py::take_file": "a program: a picture shows the page when its transitions are over",
}


def sleeps(source: str) -> Iterator[tuple[str, int, float, bool]]:
    """Function, line, seconds and whether it is in a loop, of every sleep whose seconds are written down."""

    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, int | float)
    }

    def walk(node: ast.AST, function: str, in_loop: bool) -> Iterator[tuple[str, int, float, bool]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, in_loop = node.name, False
        # What is handed over as a function is called between two pieces of something.
        in_loop = in_loop or isinstance(node, ast.Lambda)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep" and node.args:
            argument = node.args[0]
            seconds = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(argument, ast.Name):
                seconds = constants.get(argument.id)
            if isinstance(seconds, int | float):
                yield function, node.lineno, float(seconds), in_loop
        in_loop = in_loop or isinstance(node, ast.While | ast.For | ast.AsyncFor)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function, in_loop)

    yield from walk(tree, "", False)


def is_hope(seconds: float, in_loop: bool) -> bool:
    return seconds > LONGEST_S or (seconds > 0 and not in_loop)


def test_no_test_sleeps_and_hopes() -> None:
    found, used = [], set()
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        for function, line, seconds, in_loop in sleeps(path.read_text()):
            place = f"{name}::{function}"
            if place in ALLOWED:
                used.add(place)
            elif is_hope(seconds, in_loop):
                found.append(f"{name}:{line} {function} sleeps {seconds:g} s: wait for what is to happen")
    assert not found, "\n".join(found)
    assert used == set(ALLOWED), f"no sleep there any more: {set(ALLOWED) - used}"


def test_what_hopes_is_told_from_what_looks_again() -> None:
    source = """
LONG_S = 2

async def hopes():
    await asyncio.sleep(0.05)
    time.sleep(6)
    time.sleep(LONG_S)

async def looks_again():
    while not done():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0)
    await asyncio.sleep(rest())
"""
    found = list(sleeps(source))
    assert [(function, is_hope(seconds, in_loop)) for function, _, seconds, in_loop in found] == [
        ("hopes", True),
        ("hopes", True),
        ("hopes", True),
        ("looks_again", False),
        ("looks_again", False),
    ]
