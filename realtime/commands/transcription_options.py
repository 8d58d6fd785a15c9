"""What somebody asks of a model beside the sound: its language, a prompt, words to expect."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.options import TRANSLATE
from engine.spec import ModelSpec
from realtime.commands.pull import model_name
from realtime.commands.terminal import CommandFailed, note
from realtime.errors import ClientFault
from realtime.session.settings import Settings, listed_words


def add_transcription_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is spoken, for models that take it")
    group.add_argument("--prompt", metavar="TEXT", help="what was said before, or how the text should look")
    group.add_argument(
        "--keyword", metavar="WORD", action="append", default=[], help="a word to expect; may be given several times"
    )
    group.add_argument("--translate", action="store_true", help="write in English what is said in another language")


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    language: str | None = None
    prompt: str | None = None
    keywords: tuple[str, ...] = ()
    task: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> TranscriptionOptions:
        return cls(options.language, options.prompt, tuple(options.keyword), TRANSLATE if options.translate else None)

    def given(self) -> dict[str, str]:
        """Those that a model may lack altogether, by the names that models have for them."""
        all_of_them = {"language": self.language, "prompt": self.prompt, "keywords": ", ".join(self.keywords)}
        return {name: value for name, value in all_of_them.items() if value}

    def fit_for(self, model: str) -> TranscriptionOptions:
        """Those that the model of this name or path takes, as far as that is known before it is loaded.

        A note says which it does not take. Raises CommandFailed for a language or a task that it lacks.
        """
        from audio.formats import MODEL_RATE
        from engine.weights import registry

        name = model_name(model)
        options = registry.options_of(name)
        if options is None:
            return self
        spec = ModelSpec(Path(name).name, MODEL_RATE, samples_per_position=1, options=options)
        self.options_for(spec)
        taken = self.taken(options.names)
        return replace(
            self,
            language=taken.get("language"),
            prompt=taken.get("prompt"),
            keywords=self.keywords if "keywords" in taken else (),
        )

    def options_for(self, spec: ModelSpec) -> dict[str, str]:
        """As an engine with this model takes them. A note says which it does not. Raises CommandFailed."""
        words = tuple((word, 1.0) for word in self.keywords)
        asked = Settings(language=self.language, prompt=self.prompt or "", keywords=words, task=self.task)
        try:
            taken = asked.in_force(spec)
        except ClientFault as fault:
            raise CommandFailed(fault.message) from fault
        self.taken_by(spec.name, spec.options.names)
        return taken.engine_options()

    def taken_by(self, model: str, known: Sequence[str]) -> dict[str, str]:
        """Those that the model knows. A note says which it does not."""
        taken = self.taken(known)
        unknown = [name for name in self.given() if name not in taken]
        if unknown:
            note(f"note: {model} takes no {', no '.join(unknown)}; going on without")
        return taken

    def taken(self, known: Sequence[str]) -> dict[str, str]:
        """Those that a model knows. A prompt that is a list of words is taken as keywords."""
        names = {*known, "prompt"} if "keywords" in known and listed_words(self.prompt or "") else set(known)
        return {name: value for name, value in self.given().items() if name in names}
