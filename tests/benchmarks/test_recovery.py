"""The benchmark of recovery: with engines that cost nothing, and a Voxtral of small dimensions on the CPU, which is the
code that runs on a GPU."""

from __future__ import annotations

import pytest

from benchmarks import recovery
from benchmarks.random_engine import build
from engine.boundary.preparation import make_cutter, prepare
from engine.client.handles import EngineProcess
from engine.messages import Feed, Open, Text
from tests.engine import fakes


def make(share_of: int) -> EngineProcess:
    return fakes.process(fakes.build)


async def test_engines_are_killed_in_turn_and_every_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "ALIVE_S", (0.0, 0.1))
    results = [await recovery.measure(make, recovery.noise(), 2, 1 + spares, spares) for spares in (0, 1)]
    assert [result.spares for result in results] == [0, 1]
    assert [result.streams_recovered for result in results] == [2, 4]
    assert all(0 < result.calm_p50_s and 0 < result.killed_p50_s <= result.killed_max_s for result in results)
    assert results[0].spare_bytes == 0 < results[1].spare_bytes
    recovery.show(results)
    assert capsys.readouterr().out.splitlines()[2].startswith("yes")


def test_random_weights_say_something() -> None:
    loop = build("bf16", 1024, 1, small=True)
    spec = loop.runner.spec
    cutter = make_cutter(spec)
    loop.submit([Open("s")], 0)
    loop.submit([Feed("s", prepare(cutter, cutter.cut(recovery.noise()[:16_000]), spec))], 0)
    said = ""
    while loop.has_work():
        result = loop.step()
        said += "".join(output.delta for output in result.outputs if isinstance(output, Text)) if result else ""
    assert said.split()
