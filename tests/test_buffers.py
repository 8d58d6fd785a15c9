"""The table of buffers in docs/operations.md against the code: every bound is as stated, and none is left out."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from realtime.config import Config

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
BOUND = re.compile(r"`([a-z_]+(?:\.[a-zA-Z_0-9]+)+)` = ([0-9.]+)")
# Not bounds of anything that a client fills: how long to wait, and an older name.
NO_BOUNDS = {"session.stall_s", "session.resume_s", "limits.outbox_characters"}


def rows() -> list[list[str]]:
    lines = PAGE.read_text().splitlines()
    start = lines.index("| buffer | bound | set by | when full |")
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def bounds() -> list[tuple[str, float]]:
    return [(name, float(value)) for row in rows() for name, value in BOUND.findall(row[2])]


def value_of(name: str) -> float:
    """What a setting's default or a module's constant is."""
    place, _, last = name.rpartition(".")
    owner = getattr(Config(), place) if hasattr(Config(), place) else importlib.import_module(place)
    return float(getattr(owner, last))


@pytest.mark.parametrize(("name", "stated"), bounds())
def test_a_bound_is_what_the_page_says(name: str, stated: float) -> None:
    assert value_of(name) == stated


def test_every_row_says_what_happens_when_the_buffer_is_full() -> None:
    assert len(rows()) > 30
    assert all(len(row) == 4 and row[3] for row in rows())


@pytest.mark.parametrize("part", ["limits", "session"])
def test_every_setting_that_bounds_something_is_in_the_table(part: str) -> None:
    settings = {f"{part}.{field.name}" for field in dataclasses.fields(getattr(Config(), part))}
    assert settings - NO_BOUNDS <= {name for name, _ in bounds()}
