"""Every command and snippet of the documentation is in docs/commands.md: with the test that runs it, or with the reason
why none does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.snippets import blocks
from tests.test_docs import PAGES, ROOT, commands

PAGE = ROOT / "docs" / "commands.md"
TESTED = [page for page in PAGES if page.name not in ("CHANGELOG.md", PAGE.name)]
PROGRAMS = {
    *("tickertape", "make", "python", "pytest", "curl", "ffmpeg", "helm", "promtool", "docker", "systemctl", "kubectl"),
    *("pip", "pipx", "uv", "uvx", "npm", "apt-get", "openssl", "eval", "echo", "tail", "nginx", "caddy", "ray", "git"),
    *("sudo", "bash", "sh", "wget", "node", "."),
}
# Blocks of commands, which are in the table line by line.
SHELLS = {"", "sh", "bash", "console"}
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|$", re.MULTILINE)
SNIPPET = re.compile(r"^\| (\S+\.md) \| `([^`]+)` \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def shown(words: list[str]) -> str:
    """A command as the table has it: without a prompt and the path of an environment."""
    return " ".join(words).removeprefix("$ ").removeprefix(".venv/bin/")


def row_of(command: str, rows: dict[str, str]) -> str | None:
    """The longest row that the command begins with."""
    fitting = [row for row in rows if command == row or command.startswith(f"{row} ") or begins_a_module(command, row)]
    return max(fitting, key=len, default=None)


def begins_a_module(command: str, row: str) -> bool:
    return row.startswith("python -m ") and command.startswith(f"{row}.")


def commands_of(page: Path) -> set[str]:
    return {command for words in commands(page) if (command := shown(words)).split()[0] in PROGRAMS}


ROWS = dict(ROW.findall(PAGE.read_text()))
SNIPPETS = {(page, kind): about for page, kind, about in SNIPPET.findall(PAGE.read_text())}


@pytest.mark.parametrize("page", TESTED, ids=lambda page: page.name)
def test_every_command_is_in_the_table(page: Path) -> None:
    missing = sorted(command for command in commands_of(page) if row_of(command, ROWS) is None)
    assert not missing, (
        f"say in docs/commands.md which test runs these commands of {page.name}, or why none does: {missing}"
    )


def test_every_row_has_a_command() -> None:
    used = {row_of(command, ROWS) for page in TESTED for command in commands_of(page)}
    assert len(ROWS) > 50 and not set(ROWS) - used


def test_every_fenced_block_is_in_the_table() -> None:
    found = {(one.page, one.kind) for page in TESTED for one in blocks(page) if one.kind not in SHELLS}
    assert found == set(SNIPPETS)


@pytest.mark.parametrize("about", sorted({*ROWS.values(), *SNIPPETS.values()}))
def test_a_row_names_a_test_that_exists_or_gives_a_reason(about: str) -> None:
    named = TEST.findall(about)
    assert named or "not run" in about or "this suite" in about, about
    for file, test in named:
        assert re.search(rf"def {test}\b" if test else "", (ROOT / file).read_text()), f"{file}::{test}"


@pytest.mark.parametrize("row", sorted(row for row in ROWS if row.startswith("tickertape ")))
def test_a_test_that_runs_a_command_names_it(row: str) -> None:
    """Its flags, or else its subcommand, are texts in the file of a test that is said to run it."""
    about = ROWS[row]
    subcommand, *rest = row.split()[1:]
    if "not run" in about or subcommand == "COMMAND":
        return
    flags = [word for word in rest if word.startswith("--") and "without the flag" not in about]
    sources = [(ROOT / file).read_text() for file, _ in TEST.findall(about) if "snippets" not in file]
    for word in flags or [subcommand]:
        told = re.compile(rf"[\"' ]{re.escape(word)}[\"' =]")
        assert not sources or any(map(told.search, sources)), f"no test of this row runs {word}"


def test_a_command_that_is_not_listed_is_found() -> None:
    rows = {"tickertape serve": "", "python -m benchmarks": ""}
    assert row_of("tickertape serve --port 1", rows) == "tickertape serve"
    assert row_of("python -m benchmarks.turns M", rows) == "python -m benchmarks"
    assert row_of("tickertape server", rows) is None
