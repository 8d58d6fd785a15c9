"""Command-line options that the transcribing commands share: model, prompt, keywords, translation, caption output.

The `add_...` functions describe them to argparse. `TranscriptionOptions` turns the given ones into engine options and
names those that the model does not support. The options of a server's session are `realtime/session/settings.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.options import TRANSLATE
from engine.spec import ModelSpec
from realtime.commands.pull import model_name
from realtime.commands.terminal import CommandFailed, UsageError, note
from realtime.config import ModelConfig
from realtime.errors import ClientFault
from realtime.session.settings import NAME_RULE, PUBLISHED_NAME, Settings, listed_words


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that load a model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default=ModelConfig().name, help="a name from `tickertape models`, or a path to a checkpoint"
    )
    group.add_argument("--device", default=ModelConfig().device, choices=("auto", "cpu", "cuda"))
    group.add_argument("--language", metavar="CODE", help="the spoken language, for models with several languages")


def add_transcription_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of the model, if it supports them")
    group.add_argument("--prompt", metavar="TEXT", help="text before the audio, or an example of the style")
    group.add_argument(
        "--keyword", metavar="WORD", action="append", default=[], help="a word to expect; may be given several times"
    )
    group.add_argument("--translate", action="store_true", help="translate speech in other languages to English")


def add_caption_options(parser: argparse.ArgumentParser) -> None:
    """Options for what live captions show, and for the file that they are saved to."""
    parser.add_argument("--words", action="store_true", help="also show the times of every word")
    parser.add_argument(
        "--speakers", action="store_true", help="say who speaks; words are shown when that is known, about 2 s later"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="save the captions to this file as they arrive")
    parser.add_argument("--format", choices=("txt", "json", "srt", "vtt"), help="the format of --output")
    parser.add_argument(
        "--publish", metavar="NAME", help="publish the words for viewers at /watch/NAME of the server; needs --server"
    )


def check_caption_options(options: argparse.Namespace) -> None:
    """Raises UsageError."""
    if options.format and not options.output:
        raise UsageError("--format is the format of --output; add --output FILE")
    if options.publish and not options.server:
        raise UsageError("--publish needs a server that viewers can reach; add --server URL")
    if options.publish and not PUBLISHED_NAME.fullmatch(options.publish):
        raise UsageError(f"--publish must be a name. {NAME_RULE}")


def has_speakers() -> bool:
    """Whether the weights for speaker labels are in the cache."""
    from engine.options import cache_folder

    return (cache_folder() / "speakers").exists()


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """The options for the model, as given on the command line."""

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
        """The given options that only some models support, by name. `speakers` and `task` are not among them."""
        options = {"language": self.language, "prompt": self.prompt, "keywords": ", ".join(self.keywords)}
        return {name: value for name, value in options.items() if value}

    def without_unsupported(self, model: str) -> TranscriptionOptions:
        """The options that this model supports, as far as that is known before it is loaded.

        Prints a note about the others. Raises CommandFailed for a language or task that the model lacks.
        """
        from audio.formats import MODEL_RATE
        from engine.weights import registry

        name = model_name(model)
        options = registry.options_of(name)
        if options is None:
            return self
        # `engine_options` reads only the name and the options of this spec.
        known = replace(options, speakers=has_speakers())
        self.engine_options(ModelSpec(Path(name).name, MODEL_RATE, samples_per_position=1, options=known))
        supported = self.supported(options.names)
        return replace(
            self,
            language=supported.get("language"),
            prompt=supported.get("prompt"),
            keywords=self.keywords if "keywords" in supported else (),
        )

    def engine_options(self, spec: ModelSpec) -> dict[str, str]:
        """The options for an engine with this model. Prints a note about unsupported ones. Raises CommandFailed."""
        words = tuple((word, 1.0) for word in self.keywords)
        if self.speakers and not spec.options.speakers:
            raise CommandFailed("--speakers needs weights that are not here; run `tickertape pull speakers` first")
        settings = Settings(
            language=self.language, prompt=self.prompt or "", keywords=words, task=self.task, speakers=self.speakers
        )
        try:
            settings = settings.in_force(spec)
        except ClientFault as fault:
            raise CommandFailed(fault.message) from fault
        self.note_unsupported(spec.name, spec.options.names)
        return settings.engine_options()

    def note_unsupported(self, model: str, known: Sequence[str]) -> None:
        """Print a note about the options that are not among `known`, which the model supports."""
        supported = self.supported(known)
        unknown = [name for name in self.given() if name not in supported]
        if unknown:
            note(f"note: {model} does not support {', '.join(unknown)}; continuing without")

    def supported(self, known: Sequence[str]) -> dict[str, str]:
        """The options among `known`. A prompt that is a list of words counts as keywords."""
        names = {*known, "prompt"} if "keywords" in known and listed_words(self.prompt or "") else set(known)
        return {name: value for name, value in self.given().items() if name in names}
