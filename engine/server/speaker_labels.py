"""Speaker labels of one stream: `PieceCutter` cuts its speech into pieces, `SpeakerLabels` assigns these to speakers.

`SpeakerTrack` (`engine/server/speakers.py`) has one of each, and gets the embedding of each piece in between.

Pieces are overlapping windows for the speaker embedding model: about 1 s of speech frames, one about every 0.5 s of
speech. A run of speech that is shorter than a piece is repeated to its length. Where speech is cut does not depend on
how the audio arrived, and a saved state continues with the same pieces.

The labels are an online diarization. `VoiceModel` (a two-covariance model, as in PLDA) scores how well an embedding
fits each known voice or a new one. A small beam search (`_hypotheses`) assigns the pieces that are not decided yet to
voices; once a piece is decided, its voice learns from it (`Voice.learn`), and voices that have grown alike are merged.
A label is decided when the audio is `lag_samples` past the middle of its piece, or when a pause has ended the run of
speech; it never changes. Between two overlapping pieces of the same voice, labels meet halfway. Where the voice
changes, they meet where the embeddings of the pieces' parts change from one voice to the other (`_change`).

Labels are a pure function of the pieces: a saved state continues with the same labels. Embeddings are rounded to
integers first, and voices are sums of integers, so the order of additions and the machine do not matter. A voice is the
model of one speaker here, and speech is everything that the speech detector finds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.options import (
    EMBEDDING_SIZE,
    MAX_ENROLLED,
    MAX_NAME_CHARACTERS,
    PART_HOP_SAMPLES,
    PART_SAMPLES,
    PIECE_SAMPLES,
    ROUNDING,
)
from engine.weights.registry import ShippedFile

# Pieces: speech is cut for the embedding model.

Samples = NDArray[np.float32]

SAMPLE_RATE = 16_000
# Length of a frame of the speech detector.
FRAME_SAMPLES = 512


@dataclass(frozen=True, slots=True)
class CutSettings:
    """Settings of a `PieceCutter`. Counts are in frames of the detector, 32 ms each."""

    # Speech frames of a piece, and how many of them are new in the next piece.
    piece_frames: int = PIECE_SAMPLES // FRAME_SAMPLES
    hop_frames: int = 16
    # A pause of this many frames ends a run of speech. A piece has frames of one run only.
    pause_frames: int = 10
    # A run with fewer frames gets no piece: it is too short to tell the speaker.
    shortest_frames: int = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """Speech from `start` to `end`, in samples of the stream; pauses in between are left out of the audio."""

    start: int
    end: int
    middle: int
    # Speech samples, and those of them that no earlier piece has.
    length: int
    new: int
    # The first piece of a run: a pause is before it.
    after_pause: bool
    # The stream's sample at which the piece was cut: at its end, or after the pause that ended its run.
    cut_at: int
    # Starts of its frames: its audio can be taken from the stream again, and its parts can be found in the stream.
    starts: tuple[int, ...] = ()

    @property
    def ends_run(self) -> bool:
        """Whether a pause follows, which ended its run."""
        return self.cut_at > self.end

    def sample_at(self, offset: int) -> int:
        """The stream's sample of a sample of its audio."""
        frame = min(offset // FRAME_SAMPLES, len(self.starts) - 1)
        return self.starts[frame] + offset - frame * FRAME_SAMPLES


def piece_of(saved: Mapping[str, Any]) -> Piece:
    """A piece from its fields as plain data."""
    return Piece(**{**saved, "starts": tuple(saved["starts"])})


class PieceCutter:
    """Cuts the speech frames of one stream into pieces.

    A run of speech ends with a pause. In a run, a piece ends after its first `piece_frames` frames and after each
    `hop_frames` more, and one piece ends with the run. A run that is shorter than a piece is one piece, whose audio is
    repeated to the length of all others.
    """

    def __init__(self, settings: CutSettings | None = None, sample: int = 0) -> None:
        self.settings = settings or CutSettings()
        # Start of the next frame.
        self.sample = sample
        # Starts of the last speech frames of the run, at most a piece, and their audio.
        self._starts: list[int] = []
        self._audio: list[Samples] = []
        # Speech frames of the run, those of them that a piece has had, and frames of silence since.
        self._count = 0
        self._cut = 0
        self._silence = 0

    def feed(self, frames: Samples, is_speech: Sequence[bool]) -> list[tuple[Piece, Samples]]:
        """The next frames [n, 512], and which of them the detector counts as speech -> pieces and their audio."""
        found = []
        for audio, has_speech in zip(frames, is_speech, strict=True):
            start, self.sample = self.sample, self.sample + FRAME_SAMPLES
            if has_speech:
                self._silence = 0
                self._keep(start, audio)
                due = self._count - self.settings.piece_frames
                if due >= 0 and due % self.settings.hop_frames == 0:
                    found.append(self._piece())
            else:
                found += self._quiet()
        return found

    def pass_silence(self, samples: int) -> list[tuple[Piece, Samples]]:
        """`samples` of silence that the detector did not compute, whole frames or not."""
        end = self.sample + samples
        found: list[tuple[Piece, Samples]] = []
        # As if it came frame by frame; a pause that is long enough changes nothing more.
        for _ in range(min(samples // FRAME_SAMPLES, self.settings.pause_frames)):
            self.sample += FRAME_SAMPLES
            found += self._quiet()
        self.sample = end
        return found

    def end(self) -> list[tuple[Piece, Samples]]:
        """The stream has ended: the piece of the last run."""
        self._silence = self.settings.pause_frames
        return self._quiet()

    @property
    def needs_from(self) -> int:
        """The first sample whose audio `resume` needs."""
        return self._starts[0] if self._starts else self.sample

    def save(self) -> dict[str, Any]:
        """The state without its audio, as plain data."""
        counts = {"count": self._count, "cut": self._cut, "silence": self._silence}
        return {"sample": self.sample, "starts": list(self._starts), **counts}

    def resume(self, saved: Mapping[str, Any], audio: Samples) -> None:
        """Restore a saved state; `audio` is that of the stream from its `needs_from` to its `sample`."""
        self.sample, self._starts = saved["sample"], list(saved["starts"])
        self._count, self._cut, self._silence = saved["count"], saved["cut"], saved["silence"]
        first = self.needs_from
        if len(audio) < self.sample - first:
            raise ValueError(f"the state needs {self.sample - first} samples of audio, not {len(audio)}")
        self._audio = [audio[start - first : start - first + FRAME_SAMPLES].copy() for start in self._starts]

    def _keep(self, start: int, audio: Samples) -> None:
        self._count += 1
        self._starts.append(start)
        self._audio.append(audio)
        if len(self._starts) > self.settings.piece_frames:
            del self._starts[0], self._audio[0]

    def _quiet(self) -> list[tuple[Piece, Samples]]:
        self._silence += 1
        if not self._count or self._silence < self.settings.pause_frames:
            return []
        rest = self._count - self._cut
        found = [self._piece()] if rest and self._count >= self.settings.shortest_frames else []
        self._starts, self._audio, self._count, self._cut = [], [], 0, 0
        return found

    def _piece(self) -> tuple[Piece, Samples]:
        starts = self._starts
        piece = Piece(
            start=starts[0],
            end=starts[-1] + FRAME_SAMPLES,
            middle=starts[len(starts) // 2],
            length=len(starts) * FRAME_SAMPLES,
            new=(self._count - self._cut) * FRAME_SAMPLES,
            after_pause=self._cut == 0,
            cut_at=self.sample,
            starts=tuple(starts),
        )
        self._cut = self._count
        return piece, self.filled(np.concatenate(self._audio))

    def filled(self, audio: Samples) -> Samples:
        """The audio of a short piece, repeated to the length of all others."""
        whole = self.settings.piece_frames * FRAME_SAMPLES
        return np.tile(audio, -(-whole // len(audio)))[:whole]


# Labels: pieces are assigned to voices.

Embedding = NDArray[np.int64]
# Embeddings of the parts of a piece [parts, 192], in multiples of `PART_ROUNDING`.
Parts = NDArray[np.int8]
PART_ROUNDING = 1 / 256
_PART_UNIT = round(PART_ROUNDING / ROUNDING)

# Voices without a name that are kept apart. One more, and the least recent voice is merged with the one nearest to it.
MAX_VOICES = 16
# Pieces that wait for a decision. One more, and the oldest is decided at once. Pieces of a `PieceCutter` are four at
# most.
MAX_PENDING = 6
# A bound on a saved state of labels as MessagePack or JSON with encoded bytes.
MAX_STATE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class VoiceModel:
    """Variances of embeddings of length 1, per dimension: of voices around the mean of all voices (`between`), and of
    pieces around their voice (`within`). `python -m training voices` estimates it."""

    mean: Embedding
    within: float
    between: float


@cache
def shipped_model() -> VoiceModel:
    """The model that comes with the package."""
    saved = json.loads(ShippedFile("voices.json").path.read_text())
    return VoiceModel(np.array(saved["mean"], np.int64), saved["within"], saved["between"])


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """Settings of `SpeakerLabels`. Costs are natural logarithms of odds; docs/speakers.md says how they were chosen."""

    # Pieces of one person are not independent of each other: half a second of speech counts as this many pieces.
    evidence: float = 0.53
    # Cost of a change of speaker, inside a run of speech and after a pause.
    switch_cost: float = 3.0
    switch_cost_after_pause: float = 1.2
    # Cost of a new speaker, except for the first of a stream. A piece with fewer samples cannot begin one either.
    new_speaker_cost: float = 26.0
    new_speaker_min_samples: int = 9_000
    # Two voices with at least these log odds of being one speaker are merged. Below 0, because a speaker is more
    # often a known one than a new one.
    merge_log_odds: float = -3.0
    # A voice learns from pieces with at least these log odds.
    learn_log_odds: float = 6.0
    # A label is decided when the audio is this far past the middle of its piece.
    lag_samples: int = 24_000


# The weight of a piece is the number of its new frames, at most two hops, times its share of the full length.
_MOST_WEIGHT = 32
_HOP_WEIGHT = 16
# The weight of an enrolled recording: 20 hops.
_ENROLLED_WEIGHT = 320
# The largest weight of a voice. Above it, all that was learnt is halved, so that a voice follows changes.
_MOST_LEARNT = 512
# Beam width of the search: the number of assignments of the pending pieces that are kept.
_BEAM_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Label:
    """From `start` to `end` (samples), speaker `speaker` was heard. Labels follow each other without overlaps.

    `confidence` is between 0 and 1: how much better the voice fits than the next one."""

    start: int
    end: int
    speaker: int
    confidence: float


@dataclass(slots=True, eq=False)
class Evidence:
    """What is known of a voice: the sum of its embeddings without the mean of all voices, each times its weight, and
    the sum of the weights."""

    total: Embedding
    weight: int
    _square: int | None = None

    @property
    def square(self) -> int:
        if self._square is None:
            self._square = int(self.total @ self.total)
        return self._square


@dataclass(slots=True, eq=False)
class Voice:
    """A speaker of the stream: its number, what is known of its voice, and its name if it was enrolled."""

    number: int
    known: Evidence
    name: str = ""
    # End of the last piece that was assigned to it.
    heard: int = 0

    def learn(self, more: Evidence) -> None:
        total, weight = self.known.total + more.total, self.known.weight + more.weight
        # A person does not stay the same for hours, and the state has 32 bits for each number.
        while weight > _MOST_LEARNT:
            total, weight = total // 2, weight // 2
        self.known = Evidence(total, weight)


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """What the model says of a piece: its embedding, and those of its parts."""

    embedding: Embedding
    parts: Parts


@dataclass(frozen=True, slots=True)
class _Pending:
    piece: Piece
    heard: Heard
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """One assignment of pending pieces: the index of a voice for each, or the number of voices for a new one."""

    score: float
    path: tuple[int, ...]
    # Indices of the pieces of the new voice, and what they tell of it.
    places: tuple[int, ...] = ()
    new: Evidence | None = None


def rounded(embeddings: NDArray[np.float32]) -> Heard:
    """Embeddings of length 1 as integers: the first is of the piece, the others are of its parts."""
    exact = np.asarray(embeddings, np.float64)
    parts = np.clip(np.rint(exact[1:] / PART_ROUNDING), -127, 127)
    return Heard(np.rint(exact[0] / ROUNDING).astype(np.int64), parts.astype(np.int8))


def _overlap(piece: Piece, following: Piece) -> bool:
    """Whether no pause is between two pieces."""
    return following.start < piece.end


def _confidence(hypotheses: Sequence[_Hypothesis], index: int) -> float:
    """How sure the best hypothesis is of a piece, by its distance to the best one that says otherwise: between 0 and
    1."""
    best = hypotheses[0]
    others = (other.score for other in hypotheses if other.path[index] != best.path[index])
    margin = best.score - next(others, best.score - 4.0)
    return round(1 / (1 + math.exp(-min(30.0, margin))), 3)


class SpeakerLabels:
    """Assigns the pieces of one stream to voices.

    A voice is a normal distribution (`VoiceModel`). The more speech of a voice was heard, the better its mean is known.
    The score of a piece compares two hypotheses: its voice said it, or a person without a voice yet said it. The pieces
    of a new voice score how alike they are. When a piece is due, the best assignment of all pending pieces decides it,
    and its voice learns from it.
    """

    def __init__(self, settings: LabelSettings | None = None, model: VoiceModel | None = None) -> None:
        self.settings = settings or LabelSettings()
        self._model = model or shipped_model()
        # The variance between voices divided by that within a voice, per unit of weight; and the factor of squared sums
        # of rounded embeddings in the log likelihood.
        unit = self.settings.evidence / _HOP_WEIGHT
        self._ratio = unit * self._model.between / self._model.within
        self._scale = self._ratio * unit / self._model.within * ROUNDING**2
        self._voices: list[Voice] = []
        self._pending: list[_Pending] = []
        # The number of the next new voice, and of the last decided one.
        self._next = 0
        self._last: int | None = None
        # End of the last label.
        self._labelled = 0

    # Enrolled voices

    def enrol(self, name: str, embeddings: Sequence[Embedding]) -> int:
        """A voice with a name, from the pieces of a reference recording. Returns its number. Raises ValueError."""
        if not name or len(name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"the name of a speaker has 1 to {MAX_NAME_CHARACTERS} characters")
        if not embeddings:
            raise ValueError(f"the reference recording of {name!r} has no speech that is long enough")
        if any(voice.name == name for voice in self._voices):
            raise ValueError(f"two speakers are named {name!r}")
        if sum(bool(voice.name) for voice in self._voices) >= MAX_ENROLLED:
            raise ValueError(f"at most {MAX_ENROLLED} speakers can be enrolled")
        # All references count as much as each other, however long they are.
        mean = np.mean(embeddings, axis=0)
        total = np.rint(_ENROLLED_WEIGHT * (mean - self._model.mean)).astype(np.int64)
        return self._add(Voice(self._next, Evidence(total, _ENROLLED_WEIGHT), name)).number

    @property
    def names(self) -> dict[int, str]:
        return {voice.number: voice.name for voice in self._voices if voice.name}

    @property
    def speakers(self) -> list[int]:
        """Numbers of the voices that are kept apart."""
        return [voice.number for voice in self._voices]

    @property
    def has_pending(self) -> bool:
        """Whether a piece is not decided."""
        return bool(self._pending)

    @property
    def pending_from(self) -> int | None:
        """The first sample of the oldest piece that is not decided."""
        return self._pending[0].piece.start if self._pending else None

    # Pieces in, labels out

    def push(self, piece: Piece, heard: Heard) -> list[Label]:
        """The next piece. Returns the labels that were due before it was cut: they do not depend on it, however late
        its embeddings are computed."""
        labels = self.advance(piece.cut_at - 1)
        self._pending.append(self._weighed(piece, heard))
        while len(self._pending) > MAX_PENDING:
            labels.append(self._decide())
        return labels

    def advance(self, sample: int) -> list[Label]:
        """Call when all pieces cut up to `sample` have been pushed. Returns the labels that can be decided by now."""
        if self._pending and self._pending[-1].piece.ends_run:
            return self.end()
        labels = []
        while self._pending and sample >= self._pending[0].piece.middle + self.settings.lag_samples:
            labels.append(self._decide())
        return labels

    def end(self) -> list[Label]:
        """The stream or a run of speech has ended: decide everything."""
        return [self._decide() for _ in range(len(self._pending))]

    def best_guess(self) -> list[Label]:
        """The likely labels of the pieces that are not decided yet. Changes nothing."""
        if not self._pending:
            return []
        hypotheses = self._hypotheses(self._log_odds())
        numbers = [*self.speakers, self._next]
        labels, labelled = [], self._labelled
        for place, (one, index) in enumerate(zip(self._pending, hypotheses[0].path, strict=True)):
            follows = place > 0 and _overlap(self._pending[place - 1].piece, one.piece)
            start = labelled if follows else max(one.piece.start, labelled)
            labelled = max(start, self._end_of(place, hypotheses[0]))
            labels.append(Label(start, labelled, numbers[index], _confidence(hypotheses, place)))
        return labels

    # Saved and restored

    def save(self) -> dict[str, Any]:
        """The state as plain data, of at most `MAX_STATE_BYTES` once it is encoded."""
        return {
            "voices": [
                {
                    **{name: getattr(voice, name) for name in _PLAIN},
                    "weight": voice.known.weight,
                    "total": voice.known.total.astype("<i4").tobytes(),
                }
                for voice in self._voices
            ],
            "pending": [
                {
                    "piece": asdict(one.piece),
                    "embedding": one.heard.embedding.astype("<i2").tobytes(),
                    "parts": one.heard.parts.tobytes(),
                }
                for one in self._pending
            ],
            "next": self._next,
            "last": self._last,
            "labelled": self._labelled,
        }

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], settings: LabelSettings | None = None) -> SpeakerLabels:
        labels = cls(settings)
        labels._voices = [
            Voice(
                known=Evidence(np.frombuffer(voice["total"], "<i4").astype(np.int64), voice["weight"]),
                **{name: voice[name] for name in _PLAIN},
            )
            for voice in saved["voices"]
        ]
        labels._pending = [
            labels._weighed(
                piece_of(one["piece"]),
                Heard(
                    np.frombuffer(one["embedding"], "<i2").astype(np.int64),
                    np.frombuffer(one["parts"], np.int8).reshape(-1, EMBEDDING_SIZE),
                ),
            )
            for one in saved["pending"]
        ]
        labels._next, labels._last, labels._labelled = saved["next"], saved["last"], saved["labelled"]
        return labels

    # Decisions

    def _decide(self) -> Label:
        """Decide the oldest pending piece."""
        odds = self._log_odds()
        hypotheses = self._hypotheses(odds)
        end = self._end_of(0, hypotheses[0])
        index, first = hypotheses[0].path[0], self._pending.pop(0)
        is_new = index == len(self._voices)
        if is_new:
            voice = self._add(Voice(self._next, first.evidence))
        else:
            voice = self._voices[index]
            if odds[0][index] >= self._least_log_odds(voice):
                voice.learn(first.evidence)
        voice.heard = first.piece.end
        remaining = self._merged(voice)
        if is_new and remaining is not voice:
            self._next -= 1  # the number was never told
        voice = remaining
        self._last = voice.number
        start = max(first.piece.start, self._labelled)
        self._labelled = max(start, end)
        if self._pending and _overlap(first.piece, self._pending[0].piece):
            # The next label begins here, which may be before its piece.
            following = self._pending[0]
            self._pending[0] = replace(following, piece=replace(following.piece, start=self._labelled))
        return Label(start, self._labelled, voice.number, _confidence(hypotheses, 0))

    def _end_of(self, place: int, best: _Hypothesis) -> int:
        """Where the label of a pending piece ends: before a pause with the piece; otherwise halfway to the next piece,
        or where the voice changes."""
        piece = self._pending[place].piece
        if place + 1 == len(self._pending) or not _overlap(piece, self._pending[place + 1].piece):
            return piece.end
        if best.path[place] != best.path[place + 1]:
            return self._change(place, best)
        return (piece.middle + self._pending[place + 1].piece.middle) // 2

    def _change(self, place: int, best: _Hypothesis) -> int:
        """Where one voice ends and another begins, in two overlapping pieces: the parts before this sample fit the
        first voice, and the parts behind it the second voice, better than with any other sample."""
        pair = self._pending[place : place + 2]
        samples = np.array(
            [
                one.piece.sample_at(PART_SAMPLES // 2 + number * PART_HOP_SAMPLES)
                for one in pair
                for number in range(len(one.heard.parts))
            ]
        )
        parts = np.concatenate([one.heard.parts for one in pair]).astype(np.int64) * _PART_UNIT - self._model.mean
        before, after = (self._fit(parts, best, index) for index in best.path[place : place + 2])
        order = np.argsort(samples, kind="stable")
        samples, fits = samples[order], np.cumsum((before - after)[order])
        last = int(fits[:-1].argmax())
        return int(samples[last] + samples[last + 1]) // 2

    def _fit(self, parts: Embedding, best: _Hypothesis, index: int) -> NDArray[np.float64]:
        """How well each part fits a voice: the logarithm of its likelihood times a constant, plus a constant."""
        known = best.new if index == len(self._voices) else self._voices[index].known
        assert known is not None
        # The mean of the voice is `share` times its total.
        share = self._ratio / (1 + self._ratio * known.weight)
        return np.asarray(share * (parts @ known.total) - 0.5 * share**2 * known.square, np.float64)

    def _least_log_odds(self, voice: Voice) -> float:
        """The log odds that a piece needs for its voice to learn from it. A doubtful piece gets a label, but the voice
        does not learn from it: a mixture of two people would match both of them. A voice with less than half a second
        of speech learns from every likely piece, because its odds are small with every person."""
        is_hardly_known = not voice.name and voice.known.weight < _HOP_WEIGHT
        return 0.0 if is_hardly_known else self.settings.learn_log_odds

    def _weighed(self, piece: Piece, heard: Heard) -> _Pending:
        """A piece with its weight: that of its new speech, less for a short piece, which tells less of its voice."""
        weight = min(piece.new // FRAME_SAMPLES, _MOST_WEIGHT) * piece.length // PIECE_SAMPLES
        return _Pending(piece, heard, Evidence(weight * (heard.embedding - self._model.mean), weight))

    def _log_likelihood(self, weight: int, square: int) -> float:
        """The log likelihood that one voice said all of some pieces, from the sum of their weights and the square of
        their total. Terms that do not depend on the speaker are left out."""
        spread = 1 + self._ratio * weight
        return 0.5 * (self._scale * square / spread - EMBEDDING_SIZE * math.log(spread))

    def _log_likelihood_alone(self, one: Evidence) -> float:
        return self._log_likelihood(one.weight, one.square)

    def _log_odds_same(self, one: Evidence, other: Evidence) -> float:
        """The logarithm of the odds that one voice said both."""
        square = one.square + other.square + 2 * int(one.total @ other.total)
        together = self._log_likelihood(one.weight + other.weight, square)
        return together - self._log_likelihood_alone(one) - self._log_likelihood_alone(other)

    def _log_odds(self) -> list[list[float]]:
        """For each pending piece and each voice: the logarithm of the odds that this voice said the piece, and not a
        person without a voice yet."""
        return [[self._log_odds_same(voice.known, one.evidence) for voice in self._voices] for one in self._pending]

    def _hypotheses(self, odds: Sequence[Sequence[float]]) -> list[_Hypothesis]:
        """Assignments of the pending pieces, the best first; ties go to the older voice.

        Voices do not learn from pending pieces, so of the assignments that end with one voice and give the same pieces
        to the new voice, the best is enough."""
        settings, known = self.settings, len(self._voices)
        last = next((index for index, voice in enumerate(self._voices) if voice.number == self._last), None)
        found = [_Hypothesis(0.0, ())]
        for place, one in enumerate(self._pending):
            cost = settings.switch_cost_after_pause if one.piece.after_pause else settings.switch_cost
            may_begin = not known or one.piece.length >= settings.new_speaker_min_samples
            best: dict[tuple[int, tuple[int, ...]], _Hypothesis] = {}
            for so_far in found:
                before = so_far.path[-1] if so_far.path else last
                for index in range(known + 1):
                    score = so_far.score - (cost if before not in (None, index) else 0.0)
                    places, new = so_far.places, so_far.new
                    if index < known:
                        score += odds[place][index]
                    elif new is not None:
                        score += self._log_odds_same(new, one.evidence)
                        new = Evidence(new.total + one.evidence.total, new.weight + one.evidence.weight)
                        places = (*places, place)
                    elif may_begin:
                        score -= settings.new_speaker_cost if known else 0.0
                        places, new = (place,), one.evidence
                    else:
                        continue
                    other = best.get((index, places))
                    if other is None or score > other.score:
                        best[index, places] = _Hypothesis(score, (*so_far.path, index), places, new)
            found = sorted(best.values(), key=lambda one: (-one.score, one.path))[:_BEAM_WIDTH]
        return found

    def _add(self, voice: Voice) -> Voice:
        unnamed = [known for known in self._voices if not known.name]
        if not voice.name and len(unnamed) >= MAX_VOICES:
            oldest = min(unnamed, key=lambda known: known.heard)
            others = [known for known in self._voices if known is not oldest]
            self._absorb(max(others, key=lambda known: self._log_odds_same(known.known, oldest.known)), oldest)
        self._voices.append(voice)
        self._next += 1
        return voice

    def _merged(self, voice: Voice) -> Voice:
        """Merge the voice with one that it has grown alike; returns the voice that remains."""
        for other in self._voices:
            if other is voice or (other.name and voice.name):
                continue
            if self._log_odds_same(other.known, voice.known) >= self.settings.merge_log_odds:
                older, younger = sorted((other, voice), key=lambda one: (not one.name, one.number))
                self._absorb(older, younger)
                return older
        return voice

    def _absorb(self, kept: Voice, gone: Voice) -> None:
        kept.learn(gone.known)
        kept.heard = max(kept.heard, gone.heard)
        self._voices.remove(gone)
        if self._last == gone.number:
            self._last = kept.number


_PLAIN = ("number", "name", "heard")
