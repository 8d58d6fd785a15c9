"""What keywords do to a transcript: rare words that are found, other words that suffer, and words that were never said.

    python -m benchmarks.keywords MANIFEST [--live] [--model NAME] [--limit N] [--wrong N] [--boost B] [--json FILE]

Rare words are those of the references that are not among the 10,000 most frequent ones of English; names are those of
them that the whole table of 82,765 words does not have. Every recording is transcribed three times: without keywords,
with its own rare words as keywords, and with so many that are not said in it (rare words of other recordings, drawn
with a fixed seed). Offline: the weights on whole clips, greedy. With --live: the real engine, fed as by a microphone.
Printed, for all recordings and for either half of them: how many rare words are found, how many of those that are
missed without keywords, the word error rate of all other words, and how many words became a keyword that nobody said.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch

from benchmarks.live_run import LiveRun, VirtualClock
from benchmarks.offline_run import OfflineTranscriber
from benchmarks.recordings import Clip, load_audio, one_session_per_clip, read_manifest
from benchmarks.scoring import align
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.models.silero import load_silero
from engine.options import Keyword, keywords_text
from engine.runner.speech import SpeechDetector
from engine.server.build import build_loop
from engine.server.main import warm_up
from engine.weights.pretrained import load_speech_model
from engine.weights.store import pull, resolve
from realtime.bench.words import Normaliser, english_normaliser

FREQUENT_WORDS = 10_000
SHORTEST_RARE = 4
PAUSE_SECONDS = 1.5

Words = list[str]


@dataclass(frozen=True, slots=True)
class Table:
    """English words: the frequent ones, and all that are known."""

    frequent: frozenset[str]
    known: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> Table:
        words = [line.split()[0] for line in path.read_text(encoding="utf-8-sig").splitlines() if line]
        return cls(frozenset(words[:FREQUENT_WORDS]), frozenset(words))


@dataclass(frozen=True, slots=True)
class Reference:
    """What is said in a clip: its words, and its rare ones as they are written, by their normalised form."""

    words: Words
    rare: dict[str, str]


def reference(text: str, table: Table, normalise: Normaliser) -> Reference:
    rare = {}
    for written in text.split():
        written = written.strip(".,?!;:\"()'")
        word = normalise(written)
        # Numbers and contractions are more words than one, or none.
        if len(word) == 1 and written.isalpha() and len(word[0]) >= SHORTEST_RARE and word[0] not in table.frequent:
            rare[word[0]] = written
    return Reference(normalise(text), rare)


def wrong_keywords(references: Sequence[Reference], count: int) -> list[Words]:
    """For each clip, words of others that are not said in it."""
    draw = random.Random(7)
    every = {word: written for said in references for word, written in said.rare.items()}
    chosen = []
    for said in references:
        others = sorted(every[word] for word in every.keys() - set(said.words))
        chosen.append(draw.sample(others, min(count, len(others))))
    return chosen


@dataclass(slots=True)
class Counts:
    rare: int = 0
    rare_found: int = 0
    names: int = 0
    names_found: int = 0
    # Rare words that are missed without keywords and found with them, and the other way about.
    won: int = 0
    lost: int = 0
    others: int = 0
    other_errors: int = 0
    # Words that were written, and those of them that are keywords nobody said.
    written: int = 0
    made_up: int = 0

    def add(self, said: Reference, heard: Words, wrong: set[str], table: Table) -> set[int]:
        """Returns which words of the reference are rare and were found."""
        found = set()
        for i, j in align(said.words, heard):
            right = i is not None and j is not None and said.words[i] == heard[j]
            if i is None or said.words[i] not in said.rare:
                self.others += i is not None
                self.other_errors += not right
                continue
            name = said.words[i] not in table.known
            self.rare, self.rare_found = self.rare + 1, self.rare_found + right
            self.names, self.names_found = self.names + name, self.names_found + (name and right)
            if right:
                found.add(i)
        self.written += len(heard)
        self.made_up += sum(word in wrong and word not in said.words for word in heard)
        return found


def total(parts: Sequence[Counts]) -> Counts:
    return Counts(*map(sum, zip(*map(astuple, parts), strict=True)))


Transcribe = Callable[[Sequence[Words]], list[str]]
# By what was expected, and then for each clip.
Figures = dict[str, list[Counts]]


def measure(
    references: Sequence[Reference], transcribe: Transcribe, wrong: Sequence[Words], table: Table, normalise: Normaliser
) -> Figures:
    lists: dict[str, Sequence[Words]] = {
        "without": [[] for _ in references],
        "own": [list(said.rare.values()) for said in references],
        "wrong": wrong,
    }
    figures: Figures = {name: [Counts() for _ in references] for name in lists}
    before: list[set[int]] = []
    for name, keywords in lists.items():
        texts = transcribe(keywords)
        for clip, (said, text, others) in enumerate(zip(references, texts, wrong, strict=True)):
            counts = figures[name][clip]
            found = counts.add(said, normalise(text), {word for other in others for word in normalise(other)}, table)
            before += [found] if name == "without" else []
            counts.won, counts.lost = len(found - before[clip]), len(before[clip] - found)
    return figures


def report(title: str, figures: Figures) -> None:
    without, own, wrong = (total(figures[name]) for name in ("without", "own", "wrong"))
    print(f"\n{title}")
    for what, before, after, of in (
        ("rare words found", without.rare_found, own.rare_found, own.rare),
        ("names found", without.names_found, own.names_found, own.names),
    ):
        rise = f"{100 * (after - before) / before:+.1f} %" if before else "-"
        print(f"  {what}: {before} -> {after} of {of} ({rise} relative)")
    missed = without.rare - without.rare_found
    share = 100 * own.won / max(1, missed)
    print(f"  rare words missed without keywords: {own.won} of {missed} are found ({share:.1f} %); {own.lost} are lost")
    rates = [100 * counts.other_errors / max(1, counts.others) for counts in (without, own, wrong)]
    print(f"  errors in all other words: {rates[0]:.2f} % -> {rates[1]:.2f} % of {own.others}", end="")
    print(f"; with wrong keywords {rates[2]:.2f} %")
    share = 100 * wrong.made_up / max(1, wrong.written)
    print(f"  words that are a wrong keyword: {wrong.made_up} of {wrong.written} ({share:.2f} %)", end="")
    print(f"; without keywords {without.made_up}")


def offline(clips: Sequence[Clip], model: str, boost: float) -> Transcribe:
    """Each clip is encoded once; what was said without keywords is the draft of what is said with them."""
    weights, pieces = load_speech_model(resolve(model))
    weights.quantise()
    transcriber = OfflineTranscriber(weights, pieces, SpeechDetector(load_silero(), max_streams=1))
    heard = [transcriber.hear(load_audio(clip.path)) for clip in clips]
    return lambda lists: [
        transcriber.say(sound, [Keyword(word, boost) for word in words])
        for sound, words in zip(heard, lists, strict=True)
    ]


def live(clips: Sequence[Clip], model: str, boost: float) -> Transcribe:
    loop = build_loop(EngineConfig(model, "cpu", max_streams=1, threads=1))
    warm_up(loop)

    def transcribe(lists: Sequence[Words]) -> list[str]:
        sessions = one_session_per_clip(clips, PAUSE_SECONDS)
        options = {
            session.name: {"keywords": keywords_text(Keyword(word, boost) for word in words)} if words else {}
            for session, words in zip(sessions, lists, strict=True)
        }
        texts: dict[str, str] = {}
        run = LiveRun(loop, VirtualClock(), 1, options)
        run.play(sessions, lambda done: texts.update({done.session.name: done.emissions.text}))
        return [texts[session.name] for session in sessions]

    return transcribe


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keywords", description=__doc__.split("\n")[0])
    parser.add_argument("manifest", type=Path, help="JSON lines with path, text and seconds")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--live", action="store_true", help="through the real engine, not on whole clips")
    parser.add_argument("--limit", type=int, help="only the first N recordings that have rare words")
    parser.add_argument("--wrong", type=int, default=100, help="keywords that are not said")
    parser.add_argument("--boost", type=float, default=1.0, help="of every keyword")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    table = Table.read(pull("english-frequency"))
    normalise = english_normaliser(json.loads(pull("english-spelling").read_text()))
    clips = [clip for clip in read_manifest(options.manifest, "clips") if reference(clip.text, table, normalise).rare]
    clips = clips[: options.limit]
    references = [reference(clip.text, table, normalise) for clip in clips]
    wrong = wrong_keywords(references, options.wrong)
    transcribe = (live if options.live else offline)(clips, options.model, options.boost)
    figures = measure(references, transcribe, wrong, table, normalise)
    half = len(clips) // 2
    parts = {"all": slice(None), "the first half": slice(half), "the second half": slice(half, None)}
    print(f"{len(clips)} recordings with rare words, {'live' if options.live else 'offline'}, {options.model}")
    for title, part in parts.items():
        report(title, {name: counts[part] for name, counts in figures.items()})
    if options.json is not None:
        sums = {
            title: {name: asdict(total(counts[part])) for name, counts in figures.items()}
            for title, part in parts.items()
        }
        options.json.write_text(json.dumps(sums, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
