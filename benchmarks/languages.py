"""Language detection, and the use of a given language, on short recordings of human speakers in several languages.

    python -m benchmarks.languages MANIFEST [--model NAME] [--language CODE] [--live] [--limit N] [--json FILE]

Each line of the manifest has a `language`; its text may be empty if the words are not known. Every recording goes
through the real engine twice, as an upload or with --live as by a microphone: without a language, and with its own.
Printed for each language: how many were detected, also by length, and the word error rates of recordings with known
words. Then the longest recordings are translated.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import combining, normalize

from benchmarks.measuring import parser_of, positive, run_command, show
from benchmarks.playing import transcribed, warm_loop
from benchmarks.recordings import SMALL_MODEL, Clip, add_manifest, exit_status, manifest_entries, manifest_of
from benchmarks.scoring import plain_words, pooled
from engine.options import TRANSLATE
from engine.runner.device import compute_on_one_thread
from engine.server.loop import EngineLoop
from realtime.bench.clients import BadManifest, read_recordings
from realtime.bench.words import word_errors

AT_ONCE = 4
# Bounds of the groups by length, in seconds.
LENGTHS = (2.5, 4.0)
EXAMPLES = 3

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of a recording, and the language that came with it; both are empty without text."""

    clip: Clip
    text: str
    language: str


def clips_by_language(manifest: Path, limit: int) -> dict[str, list[Clip]]:
    """At most `limit` recordings of each language, evenly out of all. Raises BadManifest."""
    found: dict[str, list[Clip]] = {}
    for clip, line in zip(read_recordings(manifest), manifest_entries(manifest), strict=True):
        found.setdefault(line.get("language", "en"), []).append(clip)
    return {
        language: [clips[number * len(clips) // min(limit, len(clips))] for number in range(min(limit, len(clips)))]
        for language, clips in found.items()
    }


def answers(loop: EngineLoop, clips: Sequence[Clip], options: Mapping[str, str], live: bool) -> list[Answer]:
    played = transcribed(loop, clips, [options] * len(clips), live, AT_ONCE)
    return [Answer(one.session.clips[0], one.emissions.text.strip(), one.language) for one in played]


def unmarked_words(text: str) -> list[str]:
    """Without accents: some references leave them out."""
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
        "recordings": len(found),
        "seconds": round(sum(answer.clip.seconds for answer in found), 1),
        "told_right": sum(answer.language == language for answer in found),
        "taken_for": dict(Counter(a.language for a in found if a.language not in ("", language)).most_common()),
        "nothing_said": sum(not answer.language for answer in found),
        "told_right_by_length": {name: [sum(right), len(right)] for name, right in sorted(by_length.items())},
        "words": sum(len(unmarked_words(answer.clip.text)) for answer in found),
        "wer_found": error_rate(found),
        "wer_told": error_rate(told),
    }


def measure_language(loop: EngineLoop, language: str, clips: list[Clip], options: argparse.Namespace) -> Report:
    told = answers(loop, clips, {"language": language}, options.live)
    report = figures(language, answers(loop, clips, {}, options.live), told)
    show(language, report)
    if not options.small:
        longest = sorted(told, key=lambda answer: answer.clip.seconds)[-EXAMPLES:]
        translate = {"language": language, "task": TRANSLATE}
        for answer, english in zip(
            longest, answers(loop, [one.clip for one in longest], translate, options.live), strict=True
        ):
            print(f"  {answer.clip.text or answer.text}\n    -> {english.text}")
    return report


def measure(options: argparse.Namespace) -> Report:
    with manifest_of(options) as manifest:
        clips = clips_by_language(manifest, options.limit)
        if options.language and options.language not in clips:
            raise BadManifest(f"{manifest} has no recording in {options.language!r}")
        loop = warm_loop(options.model, AT_ONCE)
        chosen = [options.language] if options.language else sorted(clips)
        report = {language: measure_language(loop, language, clips[language], options) for language in chosen}
    return {"model": options.model, "live": options.live, "languages": report}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    parser.add_argument("--model", default="whisper-tiny", help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--language", help="only this one")
    parser.add_argument("--live", action="store_true", help="at the pace of a microphone instead of as uploads")
    parser.add_argument("--limit", type=positive, default=60, help="recordings of each language")
    compute_on_one_thread()
    return exit_status(lambda: run_command(parser, arguments, measure, model=SMALL_MODEL))


if __name__ == "__main__":
    sys.exit(main())
