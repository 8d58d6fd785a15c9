"""Writes the index of all product files into docs/architecture.md: `python -m tests.file_index`.

tests/test_docs.py compares. Besides the Python packages it lists the scripts of the web page.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("audio", "engine", "realtime", "fleet")
# The index follows this line, up to the end of the page.
HEAD = "Generated from the first sentence of each file by `python -m tests.file_index`.\n"
WEB = "realtime/web"
ABOUT_WEB = "The web page: scripts without a build step; `index.html` loads `app.js`, `watch.html` loads `watch.js`"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    return _sentence(ast.get_docstring(ast.parse(path.read_text())) or "")


def first_comment_sentence(path: Path) -> str:
    """The first sentence of the comment at the head of a JavaScript file, on one line."""
    lines = itertools.takewhile(lambda line: line.startswith("//"), path.read_text().split("\n"))
    return _sentence("\n".join(line.removeprefix("//").strip() for line in lines))


def _sentence(text: str) -> str:
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
            sections.append(_section(name, about, {path: first_sentence(path) for path in files}))
        if WEB.startswith(f"{package}/"):
            scripts = sorted((ROOT / WEB).glob("*.js"))
            sections.append(_section(WEB, ABOUT_WEB, {path: first_comment_sentence(path) for path in scripts}))
    return "\n".join(sections)


def _section(name: str, about: str, files: dict[Path, str]) -> str:
    title = f"### {name}\n\n{about + chr(10) + chr(10) if about else ''}"
    rows = [f"| `{path.relative_to(ROOT).as_posix()}` | {text.replace('|', '/')} |" for path, text in files.items()]
    return title + "| file | what it is for |\n|---|---|\n" + "\n".join(rows) + "\n"


def page() -> str:
    """The whole page, with the index as it should be."""
    explanation, found, _ = PAGE.read_text().partition(HEAD)
    assert found, f"{PAGE} has no line {HEAD!r}"
    return explanation + HEAD + "\n" + index()


if __name__ == "__main__":
    PAGE.write_text(page())
