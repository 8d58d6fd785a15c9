"""Human speech in several languages: the voice prompts of Asterisk, as Debian packages carry them.

Sounds are fetched with apt into the cache folder, without being installed; nothing of them is part of this project
(CC BY-SA 3.0: en, es, fr; CC BY 3.0: it, ru). What is said in them is told by lists named `core-sounds-es.txt`, which
are in Asterisk's own archives of these sounds and in Debian's source package, not in the packages.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import wave
from collections.abc import Mapping
from pathlib import Path

from benchmarks.recordings import Clip
from engine.weights.store import cache_folder

VERSION = "1.6.1-1"
# By language: the package's digest, as Debian's signed index has it.
DIGESTS = {
    "en": "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    "es": "9283a09a6d56fccdcc2bcfe86c48f0f844289cfbd46a3184d8785a6f7f569903",
    "fr": "8d4e1bc32ed5ba7fbda40841ca1825ed20cc6232724a473c90f8bb0e53e6073e",
    "it": "5a26638089e134b8ac39363fe249c5c93c50cd8bfdc9b2499ae61ec4a35e2fcb",
    "ru": "ccbfaebfa450b7a9ddf644ae0f3d1e9017d5df7c0aebe816e946345589d38201",
}
SHORTEST_SECONDS = 1.5
# Single words, names of letters that are foreign words, and silence.
NO_SENTENCES = ("digits", "letters", "phonetic", "silence")
NO_SPEECH = (
    "ascending-2tone",
    "beep",
    "beeperr",
    "confbridge-join",
    "confbridge-leave",
    "descending-2tone",
    "tt-monkeys",
)
# What a list says of a sound in which nobody speaks is in brackets. A digit may be written in two ways, both right.
NOT_WORD_FOR_WORD = re.compile(r"[\[\](){}<>0-9]")


class PromptsError(Exception):
    """The sounds or their list cannot be used; the text says what to do."""


def fetch(language: str) -> Path:
    """The folder with the sounds of a language, from the cache or from apt."""
    package = f"asterisk-core-sounds-{language}-wav"
    folder = cache_folder() / "voice-prompts" / f"{package}-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as work:
            _run(["apt-get", "download", f"{package}={VERSION}"], Path(work))
            (archive,) = Path(work).glob("*.deb")
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != DIGESTS[language]:
                raise PromptsError(f"{archive.name} has digest {found}, expected {DIGESTS[language]}; it was not kept")
            _run(["dpkg-deb", "-x", archive.name, "unpacked"], Path(work))
            (voice,) = Path(work).glob("unpacked/usr/share/asterisk/sounds/*")
            voice.rename(folder)
    return folder


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PromptsError(f"{command[0]} is not here; voice prompts are fetched as Debian packages") from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().splitlines()[-1:] or [f"exit status {error.returncode}"]
        raise PromptsError(f"`{' '.join(command)}` failed: {reason[0]}") from error


def read_list(path: Path) -> dict[str, str]:
    """What is said, by the name of the prompt; only where it is written word for word."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"cannot read {path}: {error}") from error
    words = {}
    for line in lines:
        name, _, text = line.partition(":")
        if not line.startswith(";") and text.strip() and not NOT_WORD_FOR_WORD.search(text):
            words[name.strip().removesuffix(".wav")] = text.strip()
    if not words:
        raise PromptsError(f"{path} names no prompts; a line of it is a name, a colon and what is said")
    return words


def choose(folder: Path, words: Mapping[str, str] | None, limit: int) -> list[Clip]:
    """Sentences of at least `SHORTEST_SECONDS`, at most `limit`, evenly out of all. With `words`: only where they say
    what is said."""
    prompts = []
    for path in sorted(folder.rglob("*.wav")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in NO_SPEECH or name.split("/")[0] in NO_SENTENCES or (words is not None and name not in words):
            continue
        with wave.open(str(path), "rb") as sound:
            seconds = sound.getnframes() / sound.getframerate()
        if seconds >= SHORTEST_SECONDS:
            prompts.append(Clip(path, words[name] if words is not None else "", seconds, "prompts"))
    count = min(limit, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]
