"""What the documentation names exists: files, modules, links; and the page on the architecture agrees with its test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_layering import FLOORS, OPENINGS

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "engine|realtime|fleet|tests|benchmarks|examples|docs|deploy"
FILE = re.compile(rf"(?<![\w./-])((?:audio|{FOLDERS})/[\w./-]*\.(?:py|md|toml|js|json|svg|png|html))\b")
# `audio/...` without a file's ending is a media type.
FOLDER = re.compile(rf"`((?:{FOLDERS})/[\w/-]*)`")
MODULE = re.compile(r"(?:`|-m )((?:audio|engine|realtime|benchmarks)(?:\.[a-z]\w*)+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def defined_in(path: Path) -> set[str]:
    """Names at the top of a module."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def exists(dotted: str) -> bool:
    """Whether a name like `engine.models.mel.item_features` is a module of ours, or something at the top of one."""
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return module.is_file() and path.name in defined_in(module)


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one."""
    text = page.read_text()
    assert f"\n## {heading}\n" in text, f"{page.name} has no section {heading!r}"
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILE.findall(text) if not (ROOT / name).is_file()]
    missing += [name for name in FOLDER.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in MODULE.findall(text) if not exists(name)]
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what is not there: {missing}"


def test_the_order_to_read_the_code_in_is_a_list_of_files() -> None:
    lines = [line for line in section(ARCHITECTURE, "Read this first").splitlines() if line.strip()]
    entries = [re.fullmatch(r"(\d+)\. `([\w/]+\.py)`: .+\.", line) for line in lines]
    assert len(entries) >= 10
    for number, (line, entry) in enumerate(zip(lines, entries, strict=True), 1):
        assert entry is not None and int(entry[1]) == number, line
        assert (ROOT / entry[2]).is_file(), line


def test_the_floors_are_those_that_the_layering_test_holds() -> None:
    text = section(ARCHITECTURE, "The floors")
    rows = re.findall(r"^\| `([\w/]+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    written = {folder: set(re.findall(r"`([\w/]+)`", imported)) for folder, imported in rows}
    assert written == FLOORS
    assert all(f"`{module}`" in text for module in OPENINGS)
