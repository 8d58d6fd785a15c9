"""Language detection, and the use of a given language, on voice prompts of human speakers in five languages.

    python -m benchmarks.languages [--lists FOLDER] [--model NAME] [--language CODE] [--live] [--limit N] [--json FILE]

The prompts are Asterisk's, from Debian packages. They are fetched with apt into the cache folder and not installed;
they are not part of this project (CC BY-SA 3.0: en, es, fr; CC BY 3.0: it, ru). Their texts are in lists named
`core-sounds-es.txt`, which are in Asterisk's own archives of these sounds and in Debian's source package, not in the
packages.

Every prompt goes through the real engine twice, as an upload or with --live as by a microphone: without a language, and
with its own. Printed for each language: how many were detected, also by length, and the word error rates if FOLDER has
the list of texts. Then a few prompts are translated.

Exit status: 0 done, 1 the engine failed, 2 sounds, lists or the model cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import combining, normalize

from benchmarks.measuring import parser_of, positive, show, write_json
from benchmarks.playing import PAUSE_SECONDS, Run, warm_loop
from benchmarks.recordings import (
    SMALL_MODEL,
    BadManifest,
    Clip,
    exit_status,
    manifest_of,
    one_session_per_clip,
    read_manifest,
)
from benchmarks.scoring import plain_words, pooled
from engine.options import TRANSLATE, cache_folder
from engine.runner.device import compute_on_one_thread
from engine.server.loop import EngineLoop
from realtime.bench.words import word_errors

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
NO_SPEECH = {
    *("ascending-2tone", "beep", "beeperr", "confbridge-join", "confbridge-leave", "descending-2tone", "tt-monkeys")
}
# Lists put a description of a sound without speech in brackets. A digit may be written in two ways, both right.
NOT_WORD_FOR_WORD = re.compile(r"[\[\](){}<>0-9]")

AT_ONCE = 4
# Bounds of the groups by length, in seconds.
LENGTHS = (2.5, 4.0)
EXAMPLES = 3

Report = dict[str, Any]


# Prompts


class PromptsError(BadManifest):
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
    """The texts by the name of the prompt; only those that are written word for word."""
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
    """Sentences of at least `SHORTEST_SECONDS`, at most `limit`, evenly out of all; with `words` only those it has."""
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


# Answers


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of a prompt, and the language that came with it; both are empty without text."""

    clip: Clip
    text: str
    language: str


def transcribe(loop: EngineLoop, clips: Sequence[Clip], options: Mapping[str, str], live: bool) -> list[Answer]:
    sessions = one_session_per_clip(clips, PAUSE_SECONDS if live else 0.0)
    run = Run(loop, AT_ONCE, AT_ONCE, {session.name: dict(options) for session in sessions})
    played = run.play(live=sessions) if live else run.play(uploads=sessions)
    return [Answer(one.session.clips[0], one.emissions.text.strip(), one.language) for one in played]


def unmarked_words(text: str) -> list[str]:
    """Without accents: some lists leave them out."""
    return plain_words("".join(letter for letter in normalize("NFKD", text) if not combining(letter)))


def error_rate(answers: Sequence[Answer]) -> float | None:
    """The word error rate of answers whose words are known; None if there are none."""
    known = [answer for answer in answers if answer.clip.text]
    return pooled(word_errors(unmarked_words(one.clip.text), unmarked_words(one.text)) for one in known).rate


def figures(language: str, found: Sequence[Answer], told: Sequence[Answer]) -> Report:
    """Figures of answers without a given language, and of answers with one."""
    by_length: dict[str, list[bool]] = {}
    for answer in found:
        least = max(bound for bound in (0.0, *LENGTHS) if answer.clip.seconds >= bound)
        by_length.setdefault(f"from {least:g} s", []).append(answer.language == language)
    return {
        "prompts": len(found),
        "seconds": round(sum(answer.clip.seconds for answer in found), 1),
        "told_right": sum(answer.language == language for answer in found),
        "taken_for": dict(Counter(a.language for a in found if a.language not in ("", language)).most_common()),
        "nothing_said": sum(not answer.language for answer in found),
        "nothing_said_when_told": sum(not answer.text for answer in told),
        "told_right_by_length": {name: [sum(right), len(right)] for name, right in sorted(by_length.items())},
        "words": sum(len(unmarked_words(answer.clip.text)) for answer in found),
        "wer_found": error_rate(found),
        "wer_told": error_rate(told),
    }


def measure(loop: EngineLoop, language: str, clips: list[Clip], options: argparse.Namespace) -> Report:
    found = transcribe(loop, clips, {}, options.live)
    told = transcribe(loop, clips, {"language": language}, options.live)
    report = figures(language, found, told)
    show(language, report)
    if not options.small:
        examples = sorted(clips, key=lambda clip: clip.seconds)[-EXAMPLES:]
        texts = {answer.clip.path: answer.text for answer in told}
        for answer in transcribe(loop, examples, {"language": language, "task": TRANSLATE}, options.live):
            print(f"  {answer.clip.text or texts[answer.clip.path]}\n    -> {answer.text}")
    return report


def prompts_of(language: str, options: argparse.Namespace) -> list[Clip]:
    listed = None if options.lists is None else options.lists / f"core-sounds-{language}.txt"
    words = read_list(listed) if listed is not None and listed.exists() else None
    return choose(fetch(language), words, options.limit)


def run(options: argparse.Namespace) -> None:
    with manifest_of(options) if options.small else nullcontext() as sample:
        # A small run has English speech instead of prompts.
        languages = [options.language] if options.language else DIGESTS
        prompts = {"en": read_manifest(sample)} if sample else {name: prompts_of(name, options) for name in languages}
        loop = warm_loop(options.model, AT_ONCE)
        report = {language: measure(loop, language, clips, options) for language, clips in prompts.items()}
    write_json(options, {"model": options.model, "live": options.live, "languages": report})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--lists", type=Path, help="folder with the prompts' texts, core-sounds-es.txt and others")
    parser.add_argument("--model", default="whisper-tiny", help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--language", choices=DIGESTS, help="only this one")
    parser.add_argument("--live", action="store_true", help="at the pace of a microphone instead of as uploads")
    parser.add_argument("--limit", type=positive, default=60, help="prompts of each language")
    parser.set_defaults(manifest=None)
    options = parser.parse_args(arguments)
    if options.small:
        options.model = SMALL_MODEL
    compute_on_one_thread()
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
