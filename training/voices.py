"""Estimates how voices differ, from speaker embeddings: their mean and two variances, which speaker labels compare by.

`python -m training voices` writes the `VoiceModel` (`engine/server/speaker_labels.py`). The recordings of each
speaker are placed in a simulated room (`benchmarks/conversations.py`); speech is found, cut into pieces and embedded as
the engine does it. `within` is the variance of pieces around the mean of their speaker, `between` that of the speakers'
means around the mean of all; both are means over the numbers of an embedding.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.conversations import mixed
from benchmarks.speakers import Labeller, Voices
from engine.options import ROUNDING
from engine.server.speaker_labels import CutSettings, LabelSettings, VoiceModel
from training.data import SAMPLE_RATE, CorpusError, Utterance

# Speech of a speaker; with less than the second there are too few pieces.
MOST_SECONDS = 20.0
LEAST_SECONDS = 8.0
LEAST_PIECES = 4

Embeddings = NDArray[np.float64]


def speaker_of(utterance: str) -> str:
    """LibriSpeech writes the speaker before the first hyphen; speechocean762 before the last four digits."""
    name = utterance.split(".")[0]
    return name.split("-")[0] if "-" in name else name[:-4]


def voices_of(utterances: Sequence[Utterance]) -> Voices:
    """The recordings of each speaker with enough speech."""
    found: Voices = defaultdict(list)
    for utterance in utterances:
        found[speaker_of(utterance.id)].append(np.asarray(utterance.samples / 32_768, np.float32))
    return {
        name: recordings
        for name, recordings in sorted(found.items())
        if sum(map(len, recordings)) >= LEAST_SECONDS * SAMPLE_RATE
    }


def embeddings_of(voices: Voices, labeller: Labeller, report: Callable[[str], None]) -> list[Embeddings]:
    """For each speaker the embeddings of pieces that do not overlap, without short ones."""
    settings = CutSettings(hop_frames=CutSettings().piece_frames)
    shortest = LabelSettings().new_speaker_min_samples
    found = []
    for number, (name, recordings) in enumerate(voices.items()):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        seconds = min(MOST_SECONDS, sum(map(len, recordings)) / SAMPLE_RATE)
        heard = mixed(name, {name: recordings}, seconds, seed)
        pieces = labeller.pieces(heard.samples, settings)
        found.append(np.array([embedding for piece, embedding in pieces if piece.length >= shortest], np.float64))
        if number % 20 == 19:
            report(f"{number + 1} of {len(voices)} speakers")
    return found


def estimate(speakers: Sequence[Embeddings]) -> VoiceModel:
    """The model of these speakers' embeddings of length 1. Raises CorpusError."""
    enough = [pieces for pieces in speakers if len(pieces) >= LEAST_PIECES]
    if len(enough) < 2:
        raise CorpusError(f"{len(enough)} speakers have enough speech; at least two are needed")
    counts = np.array([len(pieces) for pieces in enough])
    means = np.array([pieces.mean(axis=0) for pieces in enough])
    off = sum(float(np.square(pieces - mean).mean(axis=1).sum()) for pieces, mean in zip(enough, means, strict=True))
    within = off / float(counts.sum() - len(counts))
    # The mean of a few pieces is off its voice, too.
    between = float(means.var(axis=0, ddof=1).mean()) - within * float(np.mean(1 / counts))
    mean = np.concatenate(enough).mean(axis=0)
    return VoiceModel(np.rint(mean / ROUNDING).astype(np.int64), within, max(between, 1e-6))


def write(model: VoiceModel, path: Path) -> None:
    numbers = {"within": round(model.within, 6), "between": round(model.between, 6)}
    path.write_text(json.dumps({**numbers, "mean": model.mean.tolist()}) + "\n")
