"""The model's options on the command line: language, prompt, keywords and translation."""

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
    group = parser.add_argument_group("options of the model, if it supports them")
    group.add_argument("--prompt", metavar="TEXT", help="text before the audio, or an example of the style")
    group.add_argument(
        "--keyword", metavar="WORD", action="append", default=[], help="a word to expect; may be given several times"
    )
    group.add_argument("--translate", action="store_true", help="translate speech in other languages to English")


def has_speakers() -> bool:
    """Whether the weights for speaker labels are in the cache."""
    from engine.weights.store import cache_folder

    return (cache_folder() / "speakers").exists()


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """The options as given on the command line."""

    language: str | None = None
    prompt: str | None = None
    keywords: tuple[str, ...] = ()
    task: str | None = None
    speakers: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> TranscriptionOptions:
        task = TRANSLATE if options.translate else None
        return cls(options.language, options.prompt, tuple(options.keyword), task, getattr(options, "speakers", False))

    def given(self) -> dict[str, str]:
        """The given options that a model may not support, by the models' names for them."""
        all_of_them = {"language": self.language, "prompt": self.prompt, "keywords": ", ".join(self.keywords)}
        return {name: value for name, value in all_of_them.items() if value}

    def fit_for(self, model: str) -> TranscriptionOptions:
        """The options that this model supports, as far as that is known before it is loaded.

        Prints a note about the others. Raises CommandFailed for a language or task that the model lacks.
        """
        from audio.formats import MODEL_RATE
        from engine.weights import registry

        name = model_name(model)
        options = registry.options_of(name)
        if options is None:
            return self
        spec = ModelSpec(
            Path(name).name, MODEL_RATE, samples_per_position=1, options=replace(options, speakers=has_speakers())
        )
        self.options_for(spec)
        taken = self.taken(options.names)
        return replace(
            self,
            language=taken.get("language"),
            prompt=taken.get("prompt"),
            keywords=self.keywords if "keywords" in taken else (),
        )

    def options_for(self, spec: ModelSpec) -> dict[str, str]:
        """The options for an engine with this model. Prints a note about unsupported ones. Raises CommandFailed."""
        words = tuple((word, 1.0) for word in self.keywords)
        if self.speakers and not spec.options.speakers:
            raise CommandFailed("--speakers needs weights that are not here; run `tickertape pull speakers` first")
        asked = Settings(
            language=self.language, prompt=self.prompt or "", keywords=words, task=self.task, speakers=self.speakers
        )
        try:
            taken = asked.in_force(spec)
        except ClientFault as fault:
            raise CommandFailed(fault.message) from fault
        self.taken_by(spec.name, spec.options.names)
        return taken.engine_options()

    def taken_by(self, model: str, known: Sequence[str]) -> dict[str, str]:
        """The options among `known`, which the model supports. Prints a note about the others."""
        taken = self.taken(known)
        unknown = [name for name in self.given() if name not in taken]
        if unknown:
            note(f"note: {model} does not support {', '.join(unknown)}; continuing without")
        return taken

    def taken(self, known: Sequence[str]) -> dict[str, str]:
        """The options among `known`. A prompt that is a list of words counts as keywords."""
        names = {*known, "prompt"} if "keywords" in known and listed_words(self.prompt or "") else set(known)
        return {name: value for name, value in self.given().items() if name in names}
