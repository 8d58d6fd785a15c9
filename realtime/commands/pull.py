"""`tickertape pull` and `tickertape models`: what can be fetched by name, and what is here already."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from realtime.commands.terminal import note, out
from realtime.config import ModelConfig

# Real speech for a first try, and for `tickertape doctor`.
SAMPLE = "sample-two-cities"
PULL_EPILOG = """\
Examples:
  tickertape pull                           the default model, and a recording to try it on
  tickertape pull whisper-base.en
  tickertape pull moonshine-base --fresh    fetch it again, for instance after "the cached copy is damaged"

Prints the folder. What was fetched once works without a network from then on. Every file is checked against its
published digest. TICKERTAPE_CACHE chooses the cache folder.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "pull",
        help="fetch a model or a sample recording",
        description="Fetch a model or a sample recording by name, check its digests, and keep it.",
        epilog=PULL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="*", help="names from `tickertape models`; none means the default model and a sample"
    )
    parser.add_argument("--fresh", action="store_true", help="fetch again, and replace what is in the cache")
    parser.set_defaults(run=run_pull)
    listing: argparse.ArgumentParser = commands.add_parser(
        "models", help="list what can be pulled", description="List what can be pulled by name, and what is here."
    )
    listing.set_defaults(run=run_models)


def run_pull(options: argparse.Namespace) -> int:
    for name in options.name or [default_model(), SAMPLE]:
        out(str(fetch(name, fresh=options.fresh)))
    return 0


def run_models(options: argparse.Namespace) -> int:
    from engine.weights.store import available_models, cache_folder

    models = available_models()
    default = default_model()
    width = max(map(len, models))
    for name, about in models.items():
        here = "here" if (cache_folder() / name).exists() else ""
        star = " (default)" if name == default else ""
        out(f"{name:{width}}  {here:4}  {about}{star}")
    note(f"cache folder: {cache_folder()}")
    return 0


def default_model() -> str:
    """The name behind `default`."""
    from engine.options import DEFAULT_MODEL

    return DEFAULT_MODEL


def model_name(name: str) -> str:
    """A name that can be pulled or a path; `default` becomes the model it stands for."""
    return default_model() if name == ModelConfig().name else name


def fetch(name: str, *, fresh: bool = False) -> Path:
    """The path of a model, fetched if need be; standard error says what is fetched. A path stays itself."""
    from rich.console import Console

    from engine.weights.store import available_models, cache_folder, pull, resolve

    if name not in available_models() or (not fresh and (cache_folder() / name).exists()):
        return pull(name, note, fresh=True) if fresh else resolve(name)
    console = Console(file=sys.stderr)
    with console.status(f"fetching {name}"):
        return pull(name, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True), fresh=fresh)
