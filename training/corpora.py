"""Speech without transcripts: indexed recordings -> utterances -> windows of one length.

A corpus is a folder of recordings and an index `index.NAME.json`, a list of
`{"file": "a.ogg", "utts": [[id, first sample, last sample + 1], ...]}`. Recordings are 16 kHz mono in any format that
libsndfile reads. Ids sort by speaker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
# What is longer is cut: a window should hold more than one voice's one breath.
_LONGEST_UTTERANCE_SECONDS = 25
_CUT_SECONDS = (4.0, 20.0)
_SHORTEST_SAMPLES = 4_000
_MEAN_PAUSE_SECONDS = 0.3
_SHORTEST_PAUSE_SAMPLES = 500
_LATEST_START_SAMPLES = 5_000
_READERS = 8

Samples = NDArray[np.int16]


class CorpusError(Exception):
    """A corpus cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class Utterance:
    id: str
    samples: Samples


@dataclass(frozen=True, slots=True)
class Speech:
    """Whole files are kept back, the last of each corpus, so that no utterance is on both sides."""

    training: list[Utterance]
    validation: list[Utterance]

    @property
    def training_seconds(self) -> float:
        return sum(len(utterance.samples) for utterance in self.training) / SAMPLE_RATE


def read_corpora(folder: Path, names: Sequence[str], validation_share: float) -> Speech:
    speech = Speech([], [])
    for name in names:
        index = folder / f"index.{name}.json"
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))
            files = [(folder / entry["file"], entry["utts"]) for entry in entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{index} is not an index of recordings: {error}") from error
        kept_back = max(1, round(len(files) * validation_share))
        with ThreadPoolExecutor(_READERS) as readers:
            found = list(readers.map(lambda entry: _utterances(*entry), files))
        for utterances in found[:-kept_back]:
            speech.training.extend(utterances)
        for utterances in found[-kept_back:]:
            speech.validation.extend(utterances)
    return speech


def _utterances(file: Path, bounds: list[tuple[str, int, int]]) -> list[Utterance]:
    samples = read_recording(file)
    return [Utterance(name, samples[first:last]) for name, first, last in bounds]


def read_recording(file: Path) -> Samples:
    try:
        samples, rate = soundfile.read(file, dtype="int16")
    except (OSError, soundfile.LibsndfileError) as error:
        raise CorpusError(f"{file} cannot be read: {error}") from error
    if rate != SAMPLE_RATE or samples.ndim != 1:
        raise CorpusError(f"{file} is not 16 kHz mono")
    return np.asarray(samples, np.int16)


def windows(utterances: Sequence[Utterance], seconds: int, rng: np.random.Generator) -> Samples:
    """[windows, samples]: all utterances twice, once in any order and once speaker by speaker, with pauses."""
    pieces = [piece for utterance in utterances for piece in _pieces(utterance, rng)]
    shuffled = [pieces[place] for place in rng.permutation(len(pieces))]
    by_speaker = sorted(pieces, key=lambda piece: piece.id)
    return np.concatenate([_packed(part, seconds * SAMPLE_RATE, rng) for part in (shuffled, by_speaker)])


def _pieces(utterance: Utterance, rng: np.random.Generator) -> list[Utterance]:
    pieces, rest = [], utterance.samples
    while len(rest) > _LONGEST_UTTERANCE_SECONDS * SAMPLE_RATE:
        cut = int(rng.uniform(*_CUT_SECONDS) * SAMPLE_RATE)
        pieces.append(Utterance(utterance.id, rest[:cut]))
        rest = rest[cut:]
    if len(rest) >= _SHORTEST_SAMPLES:
        pieces.append(Utterance(utterance.id, rest))
    return pieces


def _packed(pieces: Sequence[Utterance], length: int, rng: np.random.Generator) -> Samples:
    """Fill windows one after the other; an utterance that reaches over the end of its window is cut off there."""
    filled: list[Samples] = []
    window = np.zeros(length, np.int16)
    at = int(rng.integers(_LATEST_START_SAMPLES))
    for piece in pieces:
        part = piece.samples[: length - at]
        window[at : at + len(part)] = part
        at += len(piece.samples) + _SHORTEST_PAUSE_SAMPLES + int(rng.exponential(_MEAN_PAUSE_SECONDS) * SAMPLE_RATE)
        if at >= length:
            filled.append(window)
            window = np.zeros(length, np.int16)
            at = int(rng.integers(_LATEST_START_SAMPLES))
    if not filled:
        raise CorpusError(f"not enough speech for one window of {length / SAMPLE_RATE:.0f} s")
    return np.stack(filled)
