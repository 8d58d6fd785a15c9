"""Finds the code of the documentation: fenced blocks, indented blocks, and the command lines in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = "127.0.0.1:8000"
FENCED = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n|\A)((?:^    .*\n|^\n(?=    ))+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    # What follows the fence, such as `python openai`; empty for an indented block.
    kind: str
    text: str

    def at(self, place: str) -> str:
        """The text for a server at another address."""
        return self.text.replace(HERE, place)


def blocks(page: Path) -> list[Block]:
    name, text = page.relative_to(ROOT).as_posix(), page.read_text()
    found = [Block(name, kind.strip(), body) for kind, body in FENCED.findall(text)]
    rest = FENCED.sub("", text)
    return found + [Block(name, "", re.sub(r"^    ", "", body, flags=re.MULTILINE)) for body in INDENTED.findall(rest)]


def block(page: str, kind: str) -> Block:
    """The one block of this kind."""
    (found,) = [one for one in blocks(ROOT / page) if one.kind == kind]
    return found


def lines(page: str, start: str) -> list[str]:
    """The command lines of a page's indented blocks that begin like this."""
    joined = [line for one in blocks(ROOT / page) if not one.kind for line in one.text.replace("\\\n", "").splitlines()]
    found = [line for line in joined if line.startswith(start)]
    assert found, f"{page} has no line that begins with {start!r}"
    return found
