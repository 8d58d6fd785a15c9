"""docs/security.md lists exactly the attacks that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.attacks.target import ATTACKS

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


def test_page_lists_every_attack_with_what_it_does() -> None:
    listed = dict(ROW.findall(PAGE.partition("## Every attack")[2]))
    assert listed == {name: f"{attack.about}." for name, attack in ATTACKS.items()}


def test_measured_attacks_exist() -> None:
    table = PAGE.partition("## Before and after")[2].partition("\n## ")[0]
    measured = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(measured) > 15 and set(measured) <= ATTACKS.keys()


def test_page_says_how_many_attacks_there_are() -> None:
    assert f"each of {len(ATTACKS)} attacks" in PAGE
