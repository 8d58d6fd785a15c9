"""The fleet file, the secret, the table of engines and the fleet-wide figures."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from fleet.manager import fleet_capacity, load_of
from fleet.plan import FleetPlan, read_plan
from fleet.state import (
    REPORTERS,
    FleetError,
    FleetFileError,
    Kind,
    Unit,
    UnitState,
    next_table,
    reported_by_others,
    write_table,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_an_empty_file_is_a_fleet_of_one_engine_and_one_gateway(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, ""))
    assert (plan.engine.least, plan.engine.most, plan.gateway.count) == (1, 1, 1)
    assert plan.secret_path == plan.folder / "secret"


def test_the_page_shows_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert tomllib.loads(shown) == json.loads(json.dumps(asdict(FleetPlan())))


def test_paths_are_meant_from_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text("")
    plan = read_plan(written(tmp_path, 'config = "server.toml"\nsecret_file = "secret"'))
    assert (plan.config, plan.secret_path) == (str(tmp_path / "server.toml"), tmp_path / "secret")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'Big Fleet'", "name: 'Big Fleet' must be 1 to 31 small letters"),
        ("[engine]\nmots = 3", "unknown key 'engine.mots'; did you mean 'engine.most'?"),
        ("[engine]\nleast = 3", "engine.least (3) must be 1 or more, and engine.most (1) at least as large"),
        ("[engine]\ngpus = 1.5", "engine.gpus must be a share of one GPU or a whole number, not 1.5"),
        ("[engine]\nleast = '1'", "engine.least must be a whole number, not '1'"),
        ("[engine]\ndrain_s = -1", "engine.drain_s cannot be negative, but is -1"),
        ("[gateway]\nport = 70000", "gateway.port must lie between 1 and 65000, not 70000"),
        ("[gateway]\ncount = 0", "gateway.count must be 1 or more"),
        ("[scale]\nabove = 0.4", "scale.below (0.5) must be less than scale.above (0.4)"),
        ("engine = 3", "engine must be a section with keys"),
        ("config = 'none.toml'", "config: there is no file"),
        ("look_s = 0", "look_s must be at least 0.1"),
        ("[engine", "is not valid TOML"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FleetFileError) as error:
        read_plan(written(tmp_path, text))
    assert said in str(error.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match="cannot read the fleet file"):
        read_plan(tmp_path / "none.toml")


def test_a_secret_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, 'secret_file = "secret"'))
    with pytest.raises(FleetError, match="it must be the same file on every node"):
        plan.read_secret()
    (tmp_path / "secret").write_text("abc")
    with pytest.raises(FleetError, match="has 3 bytes; use 16 to"):
        plan.read_secret()
    (tmp_path / "secret").write_text("a secret that is long enough\n")
    assert plan.read_secret() == b"a secret that is long enough"


def test_engines_are_reported_by_a_few_gateways_however_many_there_are() -> None:
    """Reports to the manager grow with engines and gateways, not with their product."""
    engines = [f"e{n}" for n in range(60)]
    for count in (1, 2, 3, 10, 80):
        gateways = [f"g{n}" for n in range(count)]
        rows = [{"name": name} for name in gateways]
        table = {"number": 1, "engines": [{"name": name} for name in engines], "gateways": rows}
        reporting = Counter(
            engine for gateway in gateways for engine in set(engines) - reported_by_others(gateway, table)
        )
        assert reporting == dict.fromkeys(engines, min(count, REPORTERS))


def test_the_table_has_the_engines_and_its_number_rises_with_a_change(tmp_path: Path) -> None:
    units = [
        Unit("e10", Kind.ENGINE, "n", 5601, 1, UnitState.SERVING, busy=3),
        Unit("e9", Kind.ENGINE, "n", 5600, 1, UnitState.DRAINING),
        Unit("e8", Kind.ENGINE, "n", 5602, 1, UnitState.ENDED),
        Unit("g1", Kind.GATEWAY, "n", 8000, 1),
        Unit("g2", Kind.GATEWAY, "n", 8001, 1, UnitState.STARTING, is_up=True),
        Unit("g3", Kind.GATEWAY, "n", 8002, 1, UnitState.DRAINING, is_up=True),
    ]
    table = next_table({"number": 7, "engines": []}, units, {"n": "10.0.0.1"}, -2300)
    assert table == {
        "number": 8,
        "engines": [
            {"name": "e9", "address": "tcp://10.0.0.1:5600", "state": "draining"},
            {"name": "e10", "address": "tcp://10.0.0.1:5601", "state": "serving"},
        ],
        "gateways": [
            {"name": "g2", "address": "tcp://10.0.0.1:5701", "state": "serving"},
            {"name": "g3", "address": "tcp://10.0.0.1:5702", "state": "draining"},
        ],
    }
    assert next_table(table, units, {"n": "10.0.0.1"}, -2300) is table
    path = tmp_path / "table.json"
    write_table(path, table)
    before = path.stat().st_mtime_ns
    write_table(path, table)
    assert json.loads(path.read_text()) == table and path.stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


def engine(name: str, streams: int, free: int, age: float | None, state: str = "serving") -> dict[str, object]:
    return {
        "name": name,
        "state": state,
        "streams": streams,
        "streams_free": free,
        "load": streams / 100,
        "beat_age_s": age,
    }


def test_an_engine_that_two_gateways_see_is_counted_once() -> None:
    capacities = {
        "g1": {"sessions": 5, "engines": [engine("e1", 10, 90, 0.4), engine("e2", 4, 0, 0.1, "draining")]},
        "g2": {"sessions": 9, "engines": [engine("e1", 12, 88, 0.1), engine("e3", 0, 100, None)]},
    }
    assert load_of(capacities.values(), 2) == load_of(list(capacities.values())[1:], 2)
    assert fleet_capacity(capacities) == {
        "gateways": 2,
        "engines": 2,
        "sessions": 14,
        "streams": 16,
        "streams_possible": 100,
        "streams_free": 88,
        "share": 0.12,
        "load": 0.12,
    }
