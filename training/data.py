"""Training data: reads recordings of speech, packs them into windows of one length, and augments batches of them.

A corpus is a folder of recordings and an index `index.NAME.json`, a list of `{"file": "a.ogg", "utts": [[id, first
sample, last sample + 1], ...]}`. Recordings are 16 kHz mono in any format that libsndfile reads. Ids sort by speaker.
There are no transcripts: the teacher's own text takes their place (`training/distil.py`).

`augment` makes clean speech sound as it does at a microphone, on the device that trains. Every row of a batch draws its
own room, equaliser, noise, music and level; a fifth of the rows draw only a level.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate, pad

SAMPLE_RATE = 16_000
# Longer utterances are cut, so that a window has more than one utterance.
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
    """Utterances to train with and to validate with. Validation has whole files, the last ones of each corpus."""

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


# Augmentation

_SPEEDS = (0.9, 0.95, 1.0, 1.0, 1.0, 1.05, 1.1)
# Lengths after a change of speed are multiples of this, so that few masks and few transforms are made.
_LENGTH_STEP = 3_200
_CLEAN_SHARE = 0.2
_EQ_BANDS = 10
_LOWEST_HZ, _HIGHEST_HZ = 40.0, 8_000.0
_ROOM_SAMPLES = 9_600


def augment(recorded: Tensor) -> Tensor:
    """int16 [batch, samples] -> float32 [batch, samples of this speed]"""
    clean = _at_speed(recorded.float() / 32_768, random.choice(_SPEEDS))
    x = clean + _some(clean, 0.15) * _scaled(torch.roll(clean, 1, 0), clean, -_between(clean, 5, 25))
    x = _in_a_room(x)
    x = x + _some(x, 0.25) * _scaled(_music(x), x, -_between(x, 3, 25))
    quiet = torch.where(_some(x, 0.6) > 0, _between(x, 5, 30), _between(x, 30, 60))
    x = x + _scaled(_coloured_noise(x), x, -quiet)
    x = torch.where(_some(x, _CLEAN_SHARE) > 0, clean, x)
    x = x / _loudness(x) * _gain(_between(x, -38, -16))
    # The noise of a converter: no microphone gives zeros.
    return x.clamp(-1, 1) + torch.randn_like(x) * _gain(_between(x, -95, -75))


# Draws: one value per row, [batch, 1]


def _between(like: Tensor, low: float, high: float) -> Tensor:
    return torch.rand(like.shape[0], 1, device=like.device) * (high - low) + low


def _some(like: Tensor, share: float) -> Tensor:
    """[batch, 1]: 1 in this share of the rows, 0 in the others."""
    return (torch.rand(like.shape[0], 1, device=like.device) < share).float()


def _gain(decibels: Tensor) -> Tensor:
    return torch.pow(10, decibels / 20)


def _loudness(x: Tensor) -> Tensor:
    return x.square().mean(dim=1, keepdim=True).clamp(min=1e-9).sqrt()


def _scaled(x: Tensor, reference: Tensor, decibels: Tensor) -> Tensor:
    """`x` at the loudness of the reference plus `decibels`."""
    return x / _loudness(x) * _loudness(reference) * _gain(decibels)


# The voice: speed, room, equaliser and band limit


def _at_speed(x: Tensor, speed: float) -> Tensor:
    """Change speed and pitch together, as a tape does."""
    if speed == 1.0:
        return x
    before = x.shape[1]
    after = round(before / speed / _LENGTH_STEP) * _LENGTH_STEP
    spectrum = torch.fft.rfft(x)
    bins = after // 2 + 1
    spectrum = spectrum[:, :bins] if after < before else pad(spectrum, (0, bins - spectrum.shape[1]))
    result: Tensor = torch.fft.irfft(spectrum * (after / before), n=after)
    return result


def _in_a_room(x: Tensor) -> Tensor:
    """Equaliser, band limit and reverberation in one product of spectra."""
    length = x.shape[1]
    hertz = torch.fft.rfftfreq(length, 1 / SAMPLE_RATE, device=x.device)
    response = torch.fft.rfft(_room(x), n=length) * _equaliser(x, hertz) * _band(x, hertz)
    result: Tensor = torch.fft.irfft(torch.fft.rfft(x) * response, n=length)
    return result


def _equaliser(x: Tensor, hertz: Tensor) -> Tensor:
    """Random gains at points evenly apart in octaves, straight lines between them: [batch, bins]"""
    points = torch.randn(x.shape[0], _EQ_BANDS, device=x.device) * _between(x, 0, 5)
    span = math.log(_HIGHEST_HZ / _LOWEST_HZ)
    place = (hertz.clamp(min=_LOWEST_HZ) / _LOWEST_HZ).log() / span * (_EQ_BANDS - 1)
    below = place.floor().long().clamp(max=_EQ_BANDS - 2)
    share = place - below
    return _gain(points[:, below] * (1 - share) + points[:, below + 1] * share)


def _band(x: Tensor, hertz: Tensor) -> Tensor:
    nothing_cut = torch.full((x.shape[0], 1), 9_000.0, device=x.device)
    high = torch.where(_some(x, 0.3) > 0, _between(x, 2_800, 7_500), nothing_cut)
    low = _some(x, 0.4) * _between(x, 40, 300)
    return torch.sigmoid((high - hertz) / _between(x, 30, 200)) * torch.sigmoid((hertz - low) / 15)


def _room(x: Tensor) -> Tensor:
    """The direct sound, and in some rows a tail of noise that dies away: [batch, samples]"""
    seconds = torch.arange(_ROOM_SAMPLES, device=x.device) / SAMPLE_RATE
    tail = torch.randn(x.shape[0], _ROOM_SAMPLES, device=x.device)
    # A thousandth of the level is left after this many seconds.
    tail = tail * torch.exp(-math.log(1000) * seconds / _between(x, 0.08, 0.7)) * (seconds > _between(x, 0.001, 0.01))
    energy = tail.square().sum(dim=1, keepdim=True).clamp(min=1e-9).sqrt()
    response = tail / energy * _gain(-_between(x, 0, 18)) * _some(x, 0.45)
    response[:, 0] += 1
    return response


# Sounds beside the voice: noise and music


def _coloured_noise(x: Tensor) -> Tensor:
    """From white to deeper than pink, coming and going."""
    length = x.shape[1]
    hertz = torch.fft.rfftfreq(length, 1 / SAMPLE_RATE, device=x.device).clamp(min=60)
    spectrum = torch.randn(x.shape[0], len(hertz), dtype=torch.complex64, device=x.device)
    noise: Tensor = torch.fft.irfft(spectrum * hertz ** -_between(x, 0, 1.1), n=length)
    swell = interpolate(torch.randn(x.shape[0], 1, 24, device=x.device), size=length, mode="linear")[:, 0]
    return noise * torch.exp(swell * _between(x, 0, 0.9))


def _music(x: Tensor, voices: int = 4, harmonics: int = 5) -> Tensor:
    """Chords whose notes are struck and die away, with a beat of noise: what lies under speech in films."""
    batch, length = x.shape
    beat = random.randrange(3_200, 12_800)
    beats = -(-length // beat)
    within = (torch.arange(length, device=x.device) % beat) / SAMPLE_RATE
    result = torch.zeros_like(x)
    for _ in range(voices):
        semitones = torch.randint(0, 40, (batch, beats), device=x.device)
        hertz = (80 * 2 ** (semitones / 12)).repeat_interleave(beat, dim=1)[:, :length]
        turns = hertz.div(SAMPLE_RATE).cumsum(dim=1)
        loudness = torch.rand(batch, beats, device=x.device).repeat_interleave(beat, dim=1)[:, :length]
        note = sum(torch.sin(2 * math.pi * order * turns) / order for order in range(1, harmonics + 1))
        result += note * loudness * torch.exp(-within * _between(x, 0.5, 8))
    struck = torch.exp(-within * 40) * torch.randn_like(x)
    return result + struck * _between(x, 0, 3)
