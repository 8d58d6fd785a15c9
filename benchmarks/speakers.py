"""Accuracy of speaker labels: words with a wrong speaker, invented speakers, delay and processor time.

    python -m benchmarks.speakers MANIFEST [--conversations N] [--alone N] [--seconds S] [--half 0|1]
                                  [--meeting RECORDING RTTM] [--json FILE]

Conversations of two to four people are mixed from the manifest's recordings (`speaker` names the person of each line,
benchmarks/conversations.py), and sessions of one person alone. They are labelled as in a stream of the engine, with the
same frames of the detector, embeddings and decisions, but without an engine around them.

Words are stretches of 0.3 s of each person's speech, where the person is the loudest. --half takes one half of the
people, by a hash of their names: settings are chosen on one half and reported on the other. --meeting adds a recording
with a reference of who speaks when; words in overlaps are not counted there, because the reference does not say who is
louder.

Exit status: 0 done, 2 the manifest, the recording or the weights cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.conversations import COLUMNS_PER_SECOND, Conversation, mixed, stretches
from benchmarks.measuring import parser_of, percentiles, run_command, show
from benchmarks.recordings import add_manifest, exit_status, load_audio, manifest_entries
from benchmarks.sounds import SAMPLE_RATE, Samples, speech_probabilities, voice
from engine.models.campplus import load_campplus, trace_for
from engine.models.silero import FRAME_SAMPLES
from engine.runner.device import compute_on_one_thread
from engine.server.speaker_labels import CutSettings, Label, Piece, PieceCutter, SpeakerLabels, rounded
from engine.server.speech_track import voiced_frames
from engine.weights.store import pull
from realtime.bench.clients import BadManifest

# A person with less speech than this is left out of conversations.
LEAST_SECONDS = 8.0
SEED = 27
COLLAR_COLUMNS = COLUMNS_PER_SECOND // 4

Figures = dict[str, Any]
Voices = dict[str, list[Samples]]


@dataclass(frozen=True, slots=True)
class Labelled:
    """The labels of a conversation, the sample at which each was decided, and the processor seconds it took."""

    labels: list[Label]
    decided: list[int]
    speech: NDArray[np.bool_]
    cpu_seconds: float

    def label_at(self, second: float) -> int | None:
        """The index of the label there, or of the nearest one."""
        sample = second * SAMPLE_RATE
        after = bisect_right([label.start for label in self.labels], sample)
        near = [index for index in (after - 2, after - 1, after) if 0 <= index < len(self.labels)]
        return min(near, key=lambda index: self._distance(index, sample), default=None)

    def _distance(self, index: int, sample: float) -> float:
        label = self.labels[index]
        return max(label.start - sample, sample - label.end, 0.0)


class Labeller:
    """A stream with speaker labels, without an engine around it."""

    def __init__(self, weights: Path) -> None:
        self._model = trace_for(load_campplus(weights), CutSettings().piece_frames * FRAME_SAMPLES)

    @torch.inference_mode()
    def label(self, samples: Samples) -> Labelled:
        samples = samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES]
        frames = samples.reshape(-1, FRAME_SAMPLES)
        probabilities, _ = speech_probabilities(samples)
        began = time.process_time()
        cutter, labels = PieceCutter(), SpeakerLabels()
        found: list[Label] = []
        decided: list[int] = []
        for number, has_voice in enumerate(voiced_frames(probabilities)):
            for piece, audio in cutter.feed(frames[number : number + 1], [has_voice]):
                found += labels.push(piece, rounded(self._embeddings(audio)))
            found += labels.advance(cutter.sample)
            decided += [cutter.sample] * (len(found) - len(decided))
        for piece, audio in cutter.end():
            found += labels.push(piece, rounded(self._embeddings(audio)))
        found += labels.end()
        decided += [cutter.sample] * (len(found) - len(decided))
        return Labelled(found, decided, np.array(probabilities) >= 0.5, time.process_time() - began)

    @torch.inference_mode()
    def pieces(self, samples: Samples, settings: CutSettings) -> list[tuple[Piece, Samples]]:
        """The pieces of a recording, and their embeddings of length 1."""
        samples = samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES]
        cutter = PieceCutter(settings)
        found = cutter.feed(samples.reshape(-1, FRAME_SAMPLES), voiced_frames(speech_probabilities(samples)[0]))
        return [(piece, self._embeddings(audio)[0]) for piece, audio in found + cutter.end()]

    def _embeddings(self, audio: Samples) -> Samples:
        """Those of a piece and of its parts."""
        embeddings: Samples = self._model(torch.from_numpy(audio)[None])[0].numpy()
        return embeddings


# Scores


def best_mapping(pairs: Mapping[tuple[str, int | None], int]) -> dict[str, int]:
    """Person -> number, so that as many words as possible are right; each number belongs to one person."""
    people = sorted({person for person, _ in pairs})
    numbers = sorted({number for _, number in pairs if number is not None})

    @cache
    def best(index: int, taken: frozenset[int]) -> tuple[int, tuple[tuple[str, int], ...]]:
        if index == len(people):
            return 0, ()
        found = best(index + 1, taken)
        for number in numbers:
            count = pairs.get((people[index], number), 0)
            if count and number not in taken:
                rest, mapping = best(index + 1, taken | {number})
                if count + rest > found[0]:
                    found = count + rest, ((people[index], number), *mapping)
        return found

    return dict(best(0, frozenset())[1])


def words_told(
    conversation: Conversation, words: Sequence[tuple[float, float]], labelled: Labelled
) -> list[tuple[str, int | None, float]]:
    """For each word of a person: the person, the number in its label, and the seconds from its end to the label."""
    found: list[tuple[str, int | None, float]] = []
    for start, end in words:
        person = conversation.speaker_at((start + end) / 2)
        frame = round((start + end) / 2 * SAMPLE_RATE) // FRAME_SAMPLES
        if person is None or not labelled.speech[max(0, frame - 2) : frame + 3].any():
            continue
        index = labelled.label_at((start + end) / 2)
        if index is None:
            found.append((person, None, 0.0))
        else:
            delay = labelled.decided[index] / SAMPLE_RATE - end
            found.append((person, labelled.labels[index].speaker, delay))
    return found


def error_of_time(conversation: Conversation, labelled: Labelled, mapping: Mapping[str, int]) -> float | None:
    """Diarisation error rate with a collar of 0.25 s: missed, false and confused speech by spoken time, overlaps
    included. None without speech."""
    columns = conversation.loudness.shape[1]
    spoken = conversation.loudness > 0
    told = np.full(columns, -1)
    for label in labelled.labels:
        told[label.start * COLUMNS_PER_SECOND // SAMPLE_RATE : label.end * COLUMNS_PER_SECOND // SAMPLE_RATE] = (
            label.speaker
        )
    frames = np.minimum(
        np.arange(columns) * (SAMPLE_RATE // COLUMNS_PER_SECOND) // FRAME_SAMPLES, len(labelled.speech) - 1
    )
    told[~labelled.speech[frames]] = -1
    counted = np.ones(columns, bool)
    for row in spoken:
        for edges in stretches(row):
            for edge in edges:
                counted[max(0, edge - COLLAR_COLUMNS) : edge + COLLAR_COLUMNS] = False
    right = np.zeros(columns, np.int64)
    for person, row in zip(conversation.people, spoken, strict=True):
        if person in mapping:
            right += row & (told == mapping[person])
    number = spoken.sum(axis=0)
    errors = np.maximum(number, told >= 0) - right
    total = int(number[counted].sum())
    return float(errors[counted].sum() / total) if total else None


@dataclass(frozen=True, slots=True)
class Score:
    """Of one conversation: its people, the numbers they were given, its words, and words with a wrong number."""

    people: int
    speakers: int
    words: int
    wrong: int
    error_of_time: float | None
    # Seconds from the end of each word to its label.
    delays: list[float]

    @property
    def rate(self) -> float:
        return self.wrong / max(1, self.words)


def score(conversation: Conversation, words: Sequence[tuple[float, float]], labelled: Labelled) -> Score:
    told = words_told(conversation, words, labelled)
    pairs = Counter((person, number) for person, number, _ in told)
    mapping = best_mapping(pairs)
    right = sum(pairs[person, number] for person, number in mapping.items())
    people, numbers = {person for person, _, _ in told}, {number for _, number, _ in told if number is not None}
    wrong_time, delays = error_of_time(conversation, labelled, mapping), [delay for _, _, delay in told]
    return Score(len(people), len(numbers), len(told), len(told) - right, wrong_time, delays)


# Audio and words


def read_voices(manifest: Path, half: int | None) -> Voices:
    """The recordings of each person. Raises BadManifest."""
    voices: dict[str, list[Samples]] = defaultdict(list)
    for line in manifest_entries(manifest):
        name = str(line.get("speaker", ""))
        # Film scenes and meetings have several people in a recording.
        if not name or line.get("kind", "clips") != "clips" or str(line.get("style", "")).startswith("dialogue"):
            continue
        if half is None or hashlib.sha256(name.encode()).digest()[0] % 2 == half:
            voices[name].append(load_audio(manifest.parent / line["path"]))
    found = {
        name: recordings
        for name, recordings in voices.items()
        if sum(map(len, recordings)) >= LEAST_SECONDS * SAMPLE_RATE
    }
    if len(found) < 4:
        raise BadManifest(f"{manifest} has {len(found)} people with enough speech; `speaker` must name at least four")
    return found


def read_rttm(name: str, recording: Path, rttm: Path) -> Conversation:
    """A recording with a reference in NIST's format: SPEAKER file channel start duration ... name."""
    samples = load_audio(recording)
    try:
        rows = [line.split() for line in rttm.read_text().splitlines() if line.startswith("SPEAKER")]
        turns = [(row[7], float(row[3]), float(row[4])) for row in rows]
    except (OSError, ValueError, IndexError) as error:
        raise BadManifest(f"cannot read the reference {rttm}: {error}") from error
    people = sorted({person for person, _, _ in turns})
    loudness = np.zeros((len(people), len(samples) * COLUMNS_PER_SECOND // SAMPLE_RATE), np.float32)
    for person, start, lasting in turns:
        first = round(start * COLUMNS_PER_SECOND)
        loudness[people.index(person), first : first + round(lasting * COLUMNS_PER_SECOND)] = 1
    return Conversation(name, tuple(people), samples, loudness)


def conversations_of(voices: Voices, options: argparse.Namespace) -> tuple[list[Conversation], list[Conversation]]:
    """Mixed ones, and people alone."""
    random = np.random.default_rng(SEED)
    names = sorted(voices)
    together = [
        mixed(
            f"mixed-{number}",
            {name: voices[name] for name in random.choice(names, 2 + number % 3, replace=False).tolist()},
            options.seconds,
            SEED + number,
        )
        for number in range(options.conversations)
    ]
    alone = [
        mixed(f"alone-{number}", {name: voices[name]}, options.seconds, SEED + 1000 + number)
        for number, name in enumerate(random.choice(names, options.alone).tolist())
    ]
    return together, alone


# The command


def figures_of(group: Sequence[Conversation], labeller: Labeller) -> Figures:
    labelled = [labeller.label(one.samples) for one in group]
    scores = [score(one, one.words(), labels) for one, labels in zip(group, labelled, strict=True)]
    rates = [one.rate for one in scores]
    times = [one.error_of_time for one in scores if one.error_of_time is not None]
    return {
        "conversations": len(scores),
        "words": sum(one.words for one in scores),
        "wrong_speaker": float(np.mean(rates)),
        "wrong_speaker_max": max(rates),
        "wrong_by_conversation": [round(rate, 3) for rate in rates],
        "diarisation_error_rate": float(np.mean(times)) if times else None,
        "too_many_speakers": sum(one.speakers > one.people for one in scores),
        "too_few_speakers": sum(one.speakers < one.people for one in scores),
        "invented_speakers": sum(one.speakers > 1 == one.people for one in scores),
        **percentiles("label_delay", [delay for one in scores for delay in one.delays], 50, 95, 100),
        "cpu_per_audio_second": sum(one.cpu_seconds for one in labelled) / sum(one.seconds for one in group),
    }


def measure(options: argparse.Namespace) -> Figures:
    if options.manifest is None and not options.small:
        raise BadManifest("the manifest is missing")
    labeller = Labeller(pull("speakers"))
    voices = synthetic_voices() if options.small else read_voices(options.manifest, options.half)
    together, alone = conversations_of(voices, options)
    meetings = [read_rttm("meeting", *options.meeting)] if options.meeting else []
    figures: Figures = {"people": len(voices)}
    show("Speakers", figures)
    for title, group in (("mixed conversations", together), ("one person alone", alone), ("meeting", meetings)):
        if group:
            figures[title] = figures_of(group, labeller)
            show(title.capitalize(), figures[title])
    return figures


def synthetic_voices() -> Voices:
    """For small runs: sounds that a detector takes for speech."""
    return {f"{pitch} Hz": [voice(10.0, pitch, seed)] for seed, pitch in enumerate((95.0, 130.0, 170.0, 210.0))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    parser.add_argument("--conversations", type=int, default=24, help="mixed conversations")
    parser.add_argument("--alone", type=int, default=40, help="sessions of one person")
    parser.add_argument("--seconds", type=float, default=100.0, help="length of each")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only this half of the people")
    parser.add_argument("--meeting", type=Path, nargs=2, metavar=("RECORDING", "RTTM"), help="a recording as it is")
    compute_on_one_thread()
    small = {"conversations": 1, "alone": 1, "seconds": 8.0}
    return exit_status(lambda: run_command(parser, arguments, measure, **small))


if __name__ == "__main__":
    raise SystemExit(main())
