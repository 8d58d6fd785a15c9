"""Synthetic conversations: mixes recordings of single speakers, and keeps who speaks when. With numpy only.

Test audio for `benchmarks/speakers.py` and `training/`. Two to four people speak in turn: long turns, short replies,
pauses, turns that begin before the last one ends, and replies into another turn. Each person has a loudness and a room;
some are on a telephone. The same recordings and seed always give the same conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.sounds import SAMPLE_RATE, Samples

# The reference has one column for each 10 ms.
COLUMN_SAMPLES = 160
COLUMNS_PER_SECOND = SAMPLE_RATE // COLUMN_SAMPLES
# Speech is what is at most this much softer than the voice's loud parts; shorter gaps count as speech.
SPEECH_RANGE_DB = 30.0
GAP_COLUMNS = 25
# A piece of speech for each word where the real words are not known.
WORD_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Conversation:
    """`loudness` has a row for each person: the power of the person's speech in each column, 0 where silent."""

    name: str
    people: tuple[str, ...]
    samples: Samples
    loudness: NDArray[np.float32]

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE

    def speaker_at(self, second: float) -> str | None:
        """Who speaks there; in an overlap, the louder one over a tenth of a second. None: no person speaks within a
        quarter of a second, or several are equally loud."""
        middle = round(second * COLUMNS_PER_SECOND)
        for reach in (5, 25):
            near = self.loudness[:, max(0, middle - reach) : middle + reach + 1].sum(axis=1)
            if near.any():
                loudest = near == near.max()
                return self.people[int(near.argmax())] if loudest.sum() == 1 else None
        return None

    def words(self) -> list[tuple[float, float]]:
        """Start and end of stretches of each person's speech as long as a word, in order, without those that a louder
        person covers: a recogniser does not hear them either."""
        found = []
        for person, row in zip(self.people, self.loudness, strict=True):
            for first, last in stretches(row > 0):
                count = max(1, round((last - first) / COLUMNS_PER_SECOND / WORD_SECONDS))
                edges = np.linspace(first, last, count + 1) / COLUMNS_PER_SECOND
                words = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
                found += [(start, end) for start, end in words if self.speaker_at((start + end) / 2) == person]
        return sorted(found)


def stretches(active: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First column and the one after the last, of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], active, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def loudness_of(samples: Samples) -> NDArray[np.float32]:
    """The power of each column of a recording of one person; 0 where the person is silent."""
    columns = len(samples) // COLUMN_SAMPLES
    if not columns:
        return np.zeros(0, np.float32)
    power = np.square(samples[: columns * COLUMN_SAMPLES]).reshape(columns, COLUMN_SAMPLES).mean(axis=1)
    smooth = np.convolve(power, np.full(5, 0.2), mode="same")
    active = smooth > np.quantile(smooth, 0.95) * 10 ** (-SPEECH_RANGE_DB / 10)
    for first, last in stretches(~active):
        if last - first <= GAP_COLUMNS and first > 0 and last < columns:
            active[first:last] = True
    return np.where(active, np.maximum(smooth, 1e-12), 0).astype(np.float32)


class _Person:
    """A voice in a room, and where its recordings have been played to."""

    def __init__(self, name: str, recordings: Sequence[Samples], random: np.random.Generator) -> None:
        self.name = name
        order = random.permutation(len(recordings))
        joined = np.concatenate([recordings[index] for index in order])
        level = np.sqrt(np.mean(np.square(joined))) + 1e-9
        # -29 to -17 dB.
        self._said = (joined * (10 ** (random.uniform(-29, -17) / 20) / level)).astype(np.float32)
        self._loudness = loudness_of(self._said)
        self._room = _room(random)
        self._telephone = random.random() < 0.15
        self._at = 0

    def speak(self, seconds: float) -> tuple[Samples, NDArray[np.float32]]:
        """About `seconds` of the recordings, up to a quiet place, with the sound of the room; and their loudness."""
        columns = len(self._loudness)
        if self._at + round(seconds * COLUMNS_PER_SECOND) + 40 > columns:
            self._at = 0
        while self._at < columns - 1 and self._loudness[self._at] == 0:
            self._at += 1
        wanted = self._at + round(seconds * COLUMNS_PER_SECOND)
        first, last = max(self._at + 30, wanted - 30), min(columns, wanted + 30)
        end = first + int(self._loudness[first:last].argmin()) if last > first else columns
        dry = self._said[self._at * COLUMN_SAMPLES : end * COLUMN_SAMPLES]
        loudness = self._loudness[self._at : end]
        self._at = end
        return self._heard(dry), loudness

    def _heard(self, dry: Samples) -> Samples:
        length = len(dry) + len(self._room) - 1
        spectrum = np.fft.rfft(dry, length) * np.fft.rfft(self._room, length)
        if self._telephone:
            frequency = np.fft.rfftfreq(length, 1 / SAMPLE_RATE)
            spectrum[(frequency < 300) | (frequency > 3400)] = 0
        return np.fft.irfft(spectrum, length).astype(np.float32)


def _room(random: np.random.Generator) -> Samples:
    """An impulse response: the direct sound, and echoes that fade by 60 dB in 0.1 to 0.5 s."""
    fade = random.uniform(0.1, 0.5)
    time = np.arange(round(fade * SAMPLE_RATE)) / SAMPLE_RATE
    echoes = random.standard_normal(len(time)) * 10 ** (-3 * time / fade)
    echoes[: SAMPLE_RATE // 500] = 0
    ratio_db = random.uniform(3, 18)
    echoes *= 10 ** (-ratio_db / 20) / (np.linalg.norm(echoes) + 1e-9)
    echoes[0] = 1.0
    return echoes.astype(np.float32)


def mixed(name: str, voices: Mapping[str, Sequence[Samples]], seconds: float, seed: int) -> Conversation:
    """A conversation of these people."""
    random = np.random.default_rng(seed)
    people = [_Person(voice, recordings, random) for voice, recordings in voices.items()]
    # Some people speak more than others.
    shares = random.dirichlet(np.full(len(people), 4.0))
    length = round(seconds * SAMPLE_RATE)
    sound = np.zeros(length, np.float32)
    loudness = np.zeros((len(people), length // COLUMN_SAMPLES), np.float32)

    def place(person: int, start: int, lasting: float) -> int:
        heard, loud = people[person].speak(lasting)
        heard = heard[: max(0, length - start * COLUMN_SAMPLES)]
        sound[start * COLUMN_SAMPLES : start * COLUMN_SAMPLES + len(heard)] += heard
        loud = loud[: max(0, loudness.shape[1] - start)]
        loudness[person, start : start + len(loud)] += loud
        return start + len(loud)

    at, last = 30, -1
    while at < loudness.shape[1]:
        others = shares.copy()
        if last >= 0 and len(people) > 1 and random.random() < 0.9:
            others[last] = 0
        person = int(random.choice(len(people), p=others / others.sum()))
        kind = random.random()
        shortest, longest = (0.6, 1.5) if kind < 0.25 else (1.5, 5.0) if kind < 0.65 else (5.0, 14.0)
        lasting = random.uniform(shortest, longest)
        start, at = at, place(person, at, lasting)
        if len(people) > 1 and lasting > 4 and random.random() < 0.2:
            other = (person + 1 + int(random.integers(len(people) - 1))) % len(people)
            place(other, int(random.integers(start + 100, max(start + 101, at - 100))), random.uniform(0.4, 1.0))
        step = random.random()
        if step < 0.2:
            at -= int(random.uniform(0.1, 0.8) * COLUMNS_PER_SECOND)
        elif step < 0.85:
            at += int(random.uniform(0.1, 1.2) * COLUMNS_PER_SECOND)
        at, last = max(at, start + 20), person
    noise = 10 ** (random.uniform(-65, -50) / 20) * random.standard_normal(length)
    return Conversation(name, tuple(voices), np.clip(sound + noise, -1, 1).astype(np.float32), loudness)
