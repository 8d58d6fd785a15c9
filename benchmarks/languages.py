"""Whether languages are told apart and obeyed, on prompts that people recorded: the sounds of `voice_prompts`.

    python -m benchmarks.languages [--lists FOLDER] [--languages es,ru] [--model NAME] [--live] [--limit N]
                                   [--json FILE]

Every prompt goes through the real engine twice, as an upload or with --live as by a microphone: without a language, and
with its own. Printed for each language: how many were told right, also by length, and the word error rates, where
FOLDER has the list of what is said (`core-sounds-es.txt`). Then a few prompts are answered with their translation.
Exit status: 0 done, 1 the engine failed, 2 sounds, lists or the model cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import combining, normalize

import torch

from benchmarks.file_run import FileOutcome, FileRun
from benchmarks.live_run import LiveRun, RunFailed, VirtualClock, complain
from benchmarks.recordings import Clip, one_session_per_clip
from benchmarks.scoring import plain_words, pooled, score
from benchmarks.voice_prompts import DIGESTS, PromptsError, choose, fetch, read_list
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.options import TRANSLATE
from engine.server.build import build_loop
from engine.server.loop import EngineLoop
from engine.server.main import warm_up

AT_ONCE = 4
PAUSE_SECONDS = 1.5
# Where a length belongs to the next group, in seconds.
LENGTHS = (2.5, 4.0)
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of a prompt, and the language that was told with it; both are empty if nothing was said."""

    clip: Clip
    text: str
    language: str


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_arguments(arguments)
    torch.set_num_threads(1)
    try:
        prompts = {language: _prompts(language, options) for language in options.languages}
        loop = build_loop(EngineConfig(options.model, "cpu", max_streams=AT_ONCE, threads=1))
        warm_up(loop)
        report = {language: _measure(loop, language, clips, options.live) for language, clips in prompts.items()}
    except (PromptsError, EngineError, RunFailed) as error:
        return complain(error)
    if options.json is not None:
        report = {"model": options.model, "live": options.live, "languages": report}
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.languages", description=__doc__.split("\n")[0])
    parser.add_argument("--lists", type=Path, help="folder with core-sounds-es.txt and others: what is said")
    parser.add_argument("--languages", default=",".join(DIGESTS), help="codes with commas between them")
    parser.add_argument("--model", default="whisper-tiny", help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--live", action="store_true", help="at the pace of a microphone instead of as uploads")
    parser.add_argument("--limit", type=int, default=60, help="most prompts of a language")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    options.languages = options.languages.split(",")
    if unknown := [language for language in options.languages if language not in DIGESTS]:
        parser.error(f"no prompts in {', '.join(unknown)}; there are {', '.join(DIGESTS)}")
    if options.limit < 1:
        parser.error("--limit must be at least 1")
    return options


def _prompts(language: str, options: argparse.Namespace) -> list[Clip]:
    listed = None if options.lists is None else options.lists / f"core-sounds-{language}.txt"
    words = read_list(listed) if listed is not None and listed.exists() else None
    return choose(fetch(language), words, options.limit)


def _measure(loop: EngineLoop, language: str, clips: list[Clip], live: bool) -> dict[str, Any]:
    found = _transcribe(loop, clips, {}, live)
    told = _transcribe(loop, clips, {"language": language}, live)
    report = figures(language, found, told)
    print_figures(language, report)
    examples = sorted(clips, key=lambda clip: clip.seconds)[-EXAMPLES:]
    said = {answer.clip.path: answer.text for answer in told}
    for answer in _transcribe(loop, examples, {"language": language, "task": TRANSLATE}, live):
        print(f"  {answer.clip.text or said[answer.clip.path]}\n    -> {answer.text}")
    return report


def _transcribe(loop: EngineLoop, clips: Sequence[Clip], options: Mapping[str, str], live: bool) -> list[Answer]:
    if live:
        sessions = one_session_per_clip(clips, PAUSE_SECONDS)
        run = LiveRun(loop, VirtualClock(), AT_ONCE, {session.name: dict(options) for session in sessions})
        played = run.play(sessions, lambda run: None)
        return [Answer(run.session.clips[0], run.emissions.text.strip(), run.language) for run in played]
    outcomes: list[FileOutcome] = []
    FileRun(loop, AT_ONCE, options).send(clips, outcomes.append)
    return [Answer(outcome.transcript.clip, outcome.transcript.text, outcome.language) for outcome in outcomes]


def unmarked_words(text: str) -> list[str]:
    """Without accents: some lists leave them out."""
    return plain_words("".join(letter for letter in normalize("NFKD", text) if not combining(letter)))


def error_rate(answers: Sequence[Answer]) -> float | None:
    """Of those whose words are known; None if there are none."""
    known = [answer for answer in answers if answer.clip.text]
    scores = [score(unmarked_words(answer.clip.text), unmarked_words(answer.text)) for answer in known]
    return pooled([each.errors for each in scores]).rate


def figures(language: str, found: Sequence[Answer], told: Sequence[Answer]) -> dict[str, Any]:
    by_length: dict[str, list[bool]] = {}
    bounds = (0.0, *LENGTHS)
    for answer in found:
        least = max(bound for bound in bounds if answer.clip.seconds >= bound)
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


def print_figures(language: str, report: Mapping[str, Any]) -> None:
    lengths = ", ".join(f"{name}: {right} of {of}" for name, (right, of) in report["told_right_by_length"].items())
    print(f"\n{language}: {report['prompts']} prompts, {report['seconds'] / 60:.1f} minutes")
    print(f"  told right {report['told_right']} of {report['prompts']} ({lengths})")
    others = ", ".join(f"{code} {count}" for code, count in report["taken_for"].items()) or "none"
    print(f"  taken for others: {others}; nothing said: {report['nothing_said']}")
    if report["wer_found"] is not None:
        found, told = 100 * report["wer_found"], 100 * report["wer_told"]
        print(f"  word errors of {report['words']} words: {found:.1f} % without, {told:.1f} % with the language told")


if __name__ == "__main__":
    sys.exit(main())
