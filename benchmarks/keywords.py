"""What keywords do to a transcript: rare words that are found, errors in other words, and unspoken keywords.

    python -m benchmarks.keywords MANIFEST [--live] [--model NAME] [--limit N] [--json FILE]

Rare words are words of the references that are not among the 10,000 most frequent ones of English; names are rare words
that are not in the whole table of 82,765 words. Every recording is transcribed three times: without keywords, with its
own rare words as keywords, and with 100 keywords that are not spoken in it (rare words of other recordings, drawn with
a fixed seed). Without --live: the weights on whole clips, greedy. With --live: the real engine, fed as by a microphone.
Printed for all recordings and for either half of them: how many rare words are found, how many of them are missed
without keywords (`won`) or found only without keywords (`lost`), the errors in all other words, and how many of the
written words are keywords that were not spoken (`made_up`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import SPELLING_TABLE, OfflineTranscriber
from benchmarks.measuring import parser_of, run_command, show
from benchmarks.playing import transcribed, warm_loop
from benchmarks.recordings import (
    SMALL_MODEL,
    Clip,
    add_manifest,
    exit_status,
    load_audio,
    manifest_of,
    read_manifest,
)
from engine.options import DEFAULT_MODEL, Keyword, keywords_text
from engine.runner.device import compute_on_one_thread
from engine.weights.store import pull
from realtime.bench.words import Normaliser, align, english_normaliser

FREQUENT_WORDS = 10_000
SHORTEST_RARE = 4
WRONG_KEYWORDS = 100
# Rare words and those that are found, the same of names; `won` and `lost` against the run without keywords; other words
# and their errors; words that were written, and keywords among them that were not spoken.
COUNTED = (
    *("rare", "rare_found", "names", "names_found", "won", "lost"),
    *("others", "other_errors", "written", "made_up"),
)

Words = list[str]
Transcribe = Callable[[Sequence[Words]], list[str]]


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
    """The words of a clip, and its rare words as written, by their normalised form."""

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
    """For each clip, rare words of other clips that are not spoken in it."""
    draw = random.Random(7)
    every = {word: written for said in references for word, written in said.rare.items()}
    chosen = []
    for said in references:
        others = sorted(every[word] for word in every.keys() - set(said.words))
        chosen.append(draw.sample(others, min(count, len(others))))
    return chosen


def count_words(said: Reference, heard: Words, wrong: set[str], table: Table) -> tuple[Counter[str], set[int]]:
    """The counts of one clip, and which words of the reference are rare and were found."""
    counts, found = Counter(dict.fromkeys(COUNTED, 0)), set[int]()
    for i, j in align(said.words, heard):
        right = i is not None and j is not None and said.words[i] == heard[j]
        if i is None or said.words[i] not in said.rare:
            counts["others"] += i is not None
            counts["other_errors"] += not right
            continue
        is_name = said.words[i] not in table.known
        counts += Counter(rare=1, rare_found=right, names=is_name, names_found=is_name and right)
        found |= {i} if right else set()
    counts["written"] = len(heard)
    counts["made_up"] = sum(word in wrong and word not in said.words for word in heard)
    return counts, found


def measure(
    references: Sequence[Reference], transcribe: Transcribe, wrong: Sequence[Words], table: Table, normalise: Normaliser
) -> dict[str, list[Counter[str]]]:
    """By the list of keywords, and then for each clip."""
    lists: dict[str, Sequence[Words]] = {
        "without": [[] for _ in references],
        "own": [list(said.rare.values()) for said in references],
        "wrong": wrong,
    }
    figures: dict[str, list[Counter[str]]] = {name: [] for name in lists}
    before: list[set[int]] = []
    for name, keywords in lists.items():
        texts = transcribe(keywords)
        for clip, (said, text, others) in enumerate(zip(references, texts, wrong, strict=True)):
            not_said = {word for other in others for word in normalise(other)}
            counts, found = count_words(said, normalise(text), not_said, table)
            before += [found] if name == "without" else []
            counts["won"], counts["lost"] = len(found - before[clip]), len(before[clip] - found)
            figures[name].append(counts)
    return figures


def total(clips: Sequence[Counter[str]]) -> dict[str, int]:
    return {name: sum(counts[name] for counts in clips) for name in COUNTED}


def offline(clips: Sequence[Clip], model: str) -> Transcribe:
    """Each clip is encoded once; the text without keywords is the draft of the text with them."""
    transcriber = OfflineTranscriber.load(model)
    encoded = [transcriber.encode(load_audio(clip.path)) for clip in clips]
    return lambda lists: [
        transcriber.decode(pieces, [Keyword(word) for word in words])
        for pieces, words in zip(encoded, lists, strict=True)
    ]


def live(clips: Sequence[Clip], model: str) -> Transcribe:
    loop = warm_loop(model, streams=1)

    def transcribe(lists: Sequence[Words]) -> list[str]:
        options = [{"keywords": keywords_text(map(Keyword, words))} if words else {} for words in lists]
        return [played.emissions.text for played in transcribed(loop, clips, options, live=True, at_once=1)]

    return transcribe


def compare(options: argparse.Namespace) -> dict[str, Any]:
    if options.small:
        # Without the real table: a table of three words; all other words of the sample are rare.
        table = Table(frozenset({"best", "worst", "times"}), frozenset({"best", "worst", "times", "wisdom"}))
        normalise = english_normaliser({})
    else:
        table = Table.read(pull("english-frequency"))
        normalise = english_normaliser(json.loads(pull(SPELLING_TABLE).read_text()))
    with manifest_of(options) as manifest:
        found = [(clip, reference(clip.text, table, normalise)) for clip in read_manifest(manifest, "clips")]
        found = [(clip, said) for clip, said in found if said.rare][: options.limit]
        clips, references = [clip for clip, _ in found], [said for _, said in found]
        transcribe = (live if options.live else offline)(clips, options.model)
        figures = measure(references, transcribe, wrong_keywords(references, WRONG_KEYWORDS), table, normalise)
    half = len(clips) // 2
    parts = {"all": slice(None), "the first half": slice(half), "the second half": slice(half, None)}
    report = {title: {name: total(counts[part]) for name, counts in figures.items()} for title, part in parts.items()}
    show(f"{len(clips)} recordings with rare words, {'live' if options.live else 'offline'}, {options.model}", report)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--live", action="store_true", help="through the real engine, not on whole clips")
    parser.add_argument("--limit", type=int, help="only the first N recordings that have rare words")
    compute_on_one_thread()
    return exit_status(lambda: run_command(parser, arguments, compare, model=SMALL_MODEL))


if __name__ == "__main__":
    sys.exit(main())
