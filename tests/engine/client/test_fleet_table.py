"""The table of engines: files that change, vanish or are invalid."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from engine.client.fleet_table import EngineEntry, TableFile

ENGINE = {"name": "e1", "address": "tcp://127.0.0.1:5000", "state": "serving"}


def put(path: Path, value: Any) -> None:
    """As a supervisor does: another file takes the place of the old one."""
    new = path.with_suffix(".new")
    new.write_text(value if isinstance(value, str) else json.dumps(value))
    os.replace(new, path)


def test_a_newer_table_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    put(path, {"number": 1, "engines": [ENGINE]})
    file = TableFile(path)
    table = file.poll()
    assert table is not None and table.engines == [EngineEntry("e1", "tcp://127.0.0.1:5000")]
    assert file.poll() is None
    put(path, {"number": 2, "engines": [{**ENGINE, "state": "draining"}]})
    table = file.poll()
    assert table is not None and table.engines[0].state == "draining" and file.number == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("", "cannot be used"),
        ("{", "cannot be used"),
        ({"number": 3}, "engines"),
        ({"number": 3, "engines": [{**ENGINE, "state": "asleep"}]}, "asleep"),
        ({"number": 3, "engines": [ENGINE, ENGINE]}, "is used twice"),
        ({"number": 3, "engines": [{**ENGINE, "address": "elsewhere"}]}, "not an engine address"),
        ({"number": 0, "engines": []}, "the first is 1"),
        ({"number": 1, "engines": []}, "older than 2"),
        (None, "No such file"),
    ],
)
def test_the_last_good_table_stays_and_the_problem_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: Any, why: str
) -> None:
    path = tmp_path / "table.json"
    put(path, {"number": 2, "engines": [ENGINE]})
    file = TableFile(path)
    assert file.poll() is not None
    if wrong is None:
        path.unlink()
    else:
        put(path, wrong)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert file.poll() is None
    assert why in file.problem and file.number == 2
    assert len(caplog.records) == 1 and why in caplog.text
    put(path, {"number": 3, "engines": []})
    assert file.poll() is not None and not file.problem


GATEWAY_ADDRESSES = {
    "tcp://127.0.0.1:5700": True,
    "tcp://gateway-1.example_fleet:5700": True,
    "tcp://[fe80::1%eth0]:5700": True,
    "tcp://::1:5700": True,
    "ipc:///tmp/gateway": False,
    "inproc://gateway": False,
    "TCP://127.0.0.1:5700": False,
    "tcp://*:5700": False,
    "tcp://:5700": False,
    "tcp://a host:5700": False,
    "tcp://host:65536": False,
    "tcp://host:*": False,
    "elsewhere": False,
    "": False,
}


@pytest.mark.parametrize(("address", "is_usable"), GATEWAY_ADDRESSES.items())
def test_gateways_have_tcp_addresses_to_which_others_can_connect(tmp_path: Path, address: str, is_usable: bool) -> None:
    put(tmp_path / "table.json", {"number": 1, "engines": [], "gateways": [{"name": "g1", "address": address}]})
    file = TableFile(tmp_path / "table.json")
    assert (file.poll() is not None) == is_usable
    assert is_usable or file.problem.endswith(f"{address!r} is not a gateway address; use tcp://host:port")


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_the_table_does_not_block_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "table.json")
    file = TableFile(tmp_path / "table.json")
    assert file.poll() is None and file.problem.endswith("it is not a regular file")
