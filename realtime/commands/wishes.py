"""What somebody asks of a model beside the sound: its language, a prompt, words to expect."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from engine.options import Keyword, keywords_text
from realtime.commands.terminal import note


def add_wishes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is spoken, for models that take it")
    group.add_argument("--prompt", metavar="TEXT", help="what was said before, or how the text should look")
    group.add_argument(
        "--keyword", metavar="WORD", action="append", default=[], help="a word to expect; may be given several times"
    )


@dataclass(frozen=True, slots=True)
class Wishes:
    language: str | None = None
    prompt: str | None = None
    keywords: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace) -> Wishes:
        return cls(options.language, options.prompt, tuple(options.keyword))

    def given(self) -> dict[str, str]:
        """By the names that models have for them."""
        all_of_them = {
            "language": self.language,
            "prompt": self.prompt,
            "keywords": keywords_text(map(Keyword, self.keywords)),
        }
        return {name: value for name, value in all_of_them.items() if value}

    def taken_by(self, model: str, known: Sequence[str]) -> dict[str, str]:
        """Those that the model knows. A note says which it does not."""
        given = self.given()
        unknown = [name for name in given if name not in known]
        if unknown:
            note(f"note: {model} takes no {', no '.join(unknown)}; going on without")
        return {name: value for name, value in given.items() if name in known}
