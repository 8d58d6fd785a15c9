"""Writes the index of all product files into docs/architecture.md: `python -m tests.file_index`. tests/test_docs.py
compares."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("audio", "engine", "realtime", "fleet")
# The index follows this line, up to the end of the page.
HEAD = "Generated from the module docstrings by `python -m tests.file_index`.\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:")


def index() -> str:
    """A section for each folder, a row for each file."""
    sections = []
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            if not files:
                continue
            name = folder.relative_to(ROOT).as_posix()
            about = first_sentence(folder / "__init__.py") if (folder / "__init__.py").is_file() else ""
            rows = [
                f"| `{path.relative_to(ROOT).as_posix()}` | {first_sentence(path).replace('|', '/')} |"
                for path in files
            ]
            title = f"### {name}\n\n{about + chr(10) + chr(10) if about else ''}"
            sections.append(title + "| file | what it is for |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(sections)


def page() -> str:
    """The whole page, with the index as it should be."""
    explanation, found, _ = PAGE.read_text().partition(HEAD)
    assert found, f"{PAGE} has no line {HEAD!r}"
    return explanation + HEAD + "\n" + index()


if __name__ == "__main__":
    PAGE.write_text(page())
