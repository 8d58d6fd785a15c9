"""`python -m benchmarks`: lists the benchmarks with one line each, the first lines of their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """By name, what each measures: the modules that take the common options."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        source = path.read_text()
        if "parser_of(__doc__)" in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
    return found


if __name__ == "__main__":
    for name, title in benchmarks().items():
        print(f"python -m benchmarks.{name:16} {title}")
    print("\nEach takes --help, --json FILE and --small: a run of seconds that shows that it works.")
