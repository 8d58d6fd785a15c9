"""Prints every change that text formatting makes to the reference texts of a manifest, for review by a person.

    python -m benchmarks.formatting MANIFEST.jsonl

The rules are those of `realtime/session/formatting.py`; there is no audio and no model. A line of the manifest is a
JSON object with `id` and `text`. A line of the output has the words around the change, the words before and the text
after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from realtime.session.events import TimedWord
from realtime.session.formatting import format_final
from realtime.session.formatting_options import Formatting, make_formatting

CONTEXT = 3


def changes(text: str, formatting: Formatting) -> list[str]:
    """The changes of one text, each with the words around it. A word has its index as its time."""
    said = text.split()
    words = [TimedWord(word, at, at + 1) for at, word in enumerate(said)]
    final = format_final(text, words, formatting).words
    out = []
    for word in final:
        before = " ".join(said[word.start : word.end])
        if before != word.text:
            left, right = " ".join(said[max(0, word.start - CONTEXT) : word.start]), said[word.end : word.end + CONTEXT]
            out.append(f"{left} [{before} -> {word.text}] {' '.join(right)}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    options = parser.parse_args()
    formatting = make_formatting(smart=True, numerals=False, profanity_filter=True, redact=[])
    texts = changed = 0
    for line in options.manifest.read_text().splitlines():
        item = json.loads(line)
        if item.get("text"):
            texts += 1
            for change in changes(item["text"], formatting):
                changed += 1
                print(f"{item['id']}: {change}")
    print(f"{changed} changes in {texts} texts")


if __name__ == "__main__":
    main()
