"""Prints every change that text formatting makes to the reference texts of a manifest, for review by a person.

    python -m benchmarks.formatting MANIFEST

The rules are those of `realtime/session/formatting.py`; there is no audio and no model. A line of the output has the
words around the change, the words before and the text after.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.measuring import parser_of, run_command
from benchmarks.recordings import add_manifest, exit_status, manifest_entries, manifest_of
from realtime.session.events import TimedWord
from realtime.session.formatting import format_final
from realtime.session.formatting_options import Formatting, make_formatting

CONTEXT = 3


def changes(text: str, formatting: Formatting) -> list[str]:
    """The changes of one text, each with the words around it. A word has its index as its time."""
    said = text.split()
    out = []
    for word in format_final(text, [TimedWord(word, at, at + 1) for at, word in enumerate(said)], formatting).words:
        before = " ".join(said[word.start : word.end])
        if before != word.text:
            left, right = said[max(0, word.start - CONTEXT) : word.start], said[word.end : word.end + CONTEXT]
            out.append(f"{' '.join(left)} [{before} -> {word.text}] {' '.join(right)}")
    return out


def measure(options: argparse.Namespace) -> dict[str, list[str]]:
    """The changes of each text, by its id."""
    formatting = make_formatting(smart=True, numerals=False, profanity_filter=True, redact=[])
    with manifest_of(options) as manifest:
        texts = {str(item.get("id", item["path"])): item["text"] for item in manifest_entries(manifest)}
    found = {name: changes(text, formatting) for name, text in texts.items() if text}
    for name, changed in found.items():
        for change in changed:
            print(f"{name}: {change}")
    print(f"{sum(map(len, found.values()))} changes in {len(found)} texts")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    return exit_status(lambda: run_command(parser, arguments, measure))


if __name__ == "__main__":
    sys.exit(main())
