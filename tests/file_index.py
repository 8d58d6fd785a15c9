"""Writes docs/files.md, the index of all product files: `python -m tests.file_index`. tests/test_docs.py compares."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_layering import FLOORS, OPENINGS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
PACKAGES = ("audio", "engine", "realtime", "fleet")
HEAD = """# Index of files

Generated from the module docstrings by `python -m tests.file_index`; [architecture.md](architecture.md) explains.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:")


def page() -> str:
    """The whole page: a section for each folder, a row for each file."""
    sections = [HEAD]
    for package in PACKAGES:
        folders = sorted({path.parent for path in (ROOT / package).rglob("*.py")})
        for folder in folders:
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            if not files:
                continue
            name = folder.relative_to(ROOT).as_posix()
            about = first_sentence(folder / "__init__.py") if (folder / "__init__.py").is_file() else ""
            rows = [
                f"| `{path.relative_to(ROOT).as_posix()}` | {first_sentence(path).replace('|', '/')} |"
                for path in files
            ]
            sections.append(
                f"## {name}\n\n{about + chr(10) + chr(10) if about else ''}| file | what it is for |\n|---|---|\n"
                + "\n".join(rows)
                + "\n"
            )
    rows = [
        f"| `{folder}` | {', '.join(f'`{name}`' for name in sorted(below)) or 'no other layer'} |"
        for folder, below in sorted(FLOORS.items())
    ]
    sections.append("## Layers\n\n| folder | may import |\n|---|---|\n" + "\n".join(rows) + "\n")
    single = [
        f"- `{path}` may also import {', '.join(f'`{name}`' for name in sorted(more))}"
        for path, more in sorted(OPENINGS.items())
    ]
    sections.append("Single files:\n\n" + "\n".join(single) + "\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
