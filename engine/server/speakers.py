"""Who speaks: cuts the speech of a stream into pieces, and gives every piece the number of a voice.

`PieceCutter` collects the frames with a voice and cuts them into pieces for the embedding model. Where it cuts
depends on the audio alone, not on how it arrived. `SpeakerLabels` compares the pieces' embeddings with the voices that
it knows and decides. A label is decided when the audio is `lag_samples` past the middle of its piece; it never changes.

Both are pure functions of the stream: a saved state continues with the same labels. Embeddings are rounded to integers
first, and voices are sums of integers, so that the order of additions and the machine do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.options import EMBEDDING_SIZE, MAX_ENROLLED, MAX_NAME_CHARACTERS, PIECE_SAMPLES, ROUNDING

Samples = NDArray[np.float32]
Embedding = NDArray[np.int64]

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 512

# Voices without a name that are kept apart. One more, and the least recent voice is merged with the one nearest to it.
MAX_VOICES = 16
MAX_PENDING = 24
_LARGEST_TOTAL = 2**30
# A bound on a saved state of labels as MessagePack or JSON with encoded bytes.
MAX_STATE_BYTES = 64 * 1024


# Pieces


@dataclass(frozen=True, slots=True)
class CutSettings:
    """Counts are in frames of the detector, 32 ms each."""

    # Speech frames of a piece, and how many of them are new in the next piece.
    piece_frames: int = PIECE_SAMPLES // FRAME_SAMPLES
    hop_frames: int = 16
    # A pause of this many frames ends a run of speech. A piece has frames of one run only.
    pause_frames: int = 10
    # A run with fewer frames gets no piece: it is too short to tell a voice.
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
    # Starts of its frames, with which its audio can be taken from the stream again; empty once it has an embedding.
    starts: tuple[int, ...] = ()


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

    def feed(self, frames: Samples, voiced: Sequence[bool]) -> list[tuple[Piece, Samples]]:
        """The next frames [n, 512], and which of them have a voice -> pieces and their audio."""
        found = []
        for audio, has_voice in zip(frames, voiced, strict=True):
            start, self.sample = self.sample, self.sample + FRAME_SAMPLES
            if has_voice:
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


# Labels

_HOP_SAMPLES = CutSettings().hop_frames * FRAME_SAMPLES


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """Scores are natural logarithms of odds. The defaults were chosen on mixed conversations, see docs/speakers.md."""

    # A piece scores `scale` times its cosine to a voice above `threshold`; a short piece counts less.
    scale: float = 6.0
    threshold: float = 0.366
    # How much lower the threshold of a piece is the shorter it is; of a piece of no length, by this much.
    short: float = 0.145
    # A piece counts for its new speech, in pieces of half a second, up to this.
    most_weight: float = 2.0
    # What a change of voice costs, inside a run of speech and after a pause.
    switch: float = 1.1
    switch_after_pause: float = 0.3
    # What a voice that was never heard costs, and how much of its speech is needed.
    new: float = 5.85
    new_samples: int = 12_500
    # Pieces with a higher cosine to a known voice and shorter pieces are no evidence of a new voice.
    far: float = 0.442
    new_piece_samples: int = 9_000
    # A voice learns from pieces with at least this cosine.
    learn: float = 0.46
    # Voices whose sums have at least this cosine are one voice.
    merge: float = 0.638
    # A label is decided when the audio is this far past the middle of its piece.
    lag_samples: int = 24_000
    # An enrolled voice counts as this much speech of its own.
    enrolled_samples: int = 160_000


@dataclass(frozen=True, slots=True)
class Label:
    """From `start` to `end` (samples), speaker `speaker` was heard. Labels follow each other without overlaps.

    `confidence` is between 0 and 1: how much better the voice fits than the next one."""

    start: int
    end: int
    speaker: int
    confidence: float


@dataclass(slots=True, eq=False)
class Voice:
    """A voice: the sum of its embeddings, each times its number of new samples."""

    number: int
    total: Embedding
    samples: int
    name: str = ""
    # End of the last piece that was assigned to it.
    heard: int = 0
    _direction: NDArray[np.float64] | None = None

    @property
    def direction(self) -> NDArray[np.float64]:
        """The sum with length 1; zero if it has learnt nothing."""
        if self._direction is None:
            self._direction = unit(self.total)
        return self._direction

    def add(self, embeddings: Embedding) -> None:
        self._direction = None
        self.total = self.total + embeddings
        # After hours of one voice: only the direction matters, and the state has 32 bits for each number.
        while np.abs(self.total).max() > _LARGEST_TOTAL:
            self.total = self.total // 2


@dataclass(frozen=True, slots=True)
class _Pending:
    piece: Piece
    embedding: Embedding
    # The embedding with length 1.
    direction: NDArray[np.float64]


def rounded(embedding: NDArray[np.float32]) -> Embedding:
    """An embedding of length 1 as integers."""
    return np.rint(np.asarray(embedding, np.float64) / ROUNDING).astype(np.int64)


def unit(total: Embedding) -> NDArray[np.float64]:
    """A sum of embeddings with length 1; zero stays zero."""
    length = math.sqrt(float(np.dot(total.astype(np.float64), total)))
    return total / length if length else total.astype(np.float64)


def _span(piece: Piece, labelled: int, following: Piece | None) -> tuple[int, int]:
    """Where the label of a piece begins and ends: behind the last label, up to half of the way to the next piece, whose
    own label begins there."""
    start = max(piece.start, labelled)
    if following is None or following.start >= piece.end:
        return start, piece.end
    return start, max(start, (piece.middle + following.middle) // 2)


def _fit(scores: Sequence[float], index: int) -> float:
    """How sure the choice of this index is, by its distance to the best other score: between 0 and 1."""
    others = [score for place, score in enumerate(scores) if place != index]
    margin = scores[index] - max(others) if others else 4.0
    return round(1 / (1 + math.exp(-max(-30.0, min(30.0, margin)))), 3)


class SpeakerLabels:
    """Assigns the pieces of one stream to voices: a Viterbi search over the pieces that are not decided yet.

    A state is a voice or `new`. The path begins at the last decided voice; changing costs, and a new voice costs more
    and needs enough speech. When a piece is due, the best path decides it, and the piece is added to its voice.
    """

    def __init__(self, settings: LabelSettings | None = None) -> None:
        self.settings = settings or LabelSettings()
        self._voices: list[Voice] = []
        self._pending: list[_Pending] = []
        # The number of the next new voice, and of the last decided one.
        self._next = 0
        self._last: int | None = None
        # End of the last label.
        self._labelled = 0
        self._far_samples = 0

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
        mean = unit(np.sum(embeddings, axis=0)) / ROUNDING
        weight = self.settings.enrolled_samples // FRAME_SAMPLES
        total = np.rint(mean * weight).astype(np.int64)
        return self._add(Voice(self._next, total, self.settings.enrolled_samples, name)).number

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

    # Pieces in, labels out

    def push(self, piece: Piece, embedding: Embedding) -> list[Label]:
        """The next piece. Returns the labels that were due before it was cut: they do not depend on it, however late
        its embedding is computed."""
        labels = self.advance(piece.cut_at - 1)
        self._pending.append(_Pending(replace(piece, starts=()), embedding, unit(embedding)))
        while len(self._pending) > MAX_PENDING:
            labels.append(self._decide())
        return labels

    def advance(self, sample: int) -> list[Label]:
        """All pieces that were cut up to `sample` have been pushed. Returns the labels that are decided by now."""
        labels = []
        while self._pending and sample >= self._pending[0].piece.middle + self.settings.lag_samples:
            labels.append(self._decide())
        return labels

    def end(self) -> list[Label]:
        """The stream has ended: decide everything."""
        return [self._decide() for _ in range(len(self._pending))]

    def best_guess(self) -> list[Label]:
        """The likely labels of the pieces that are not decided yet. Changes nothing."""
        if not self._pending:
            return []
        path, _, emissions = self._best_path()
        numbers = [*self.speakers, self._next]
        labels, labelled = [], self._labelled
        for place, (one, index) in enumerate(zip(self._pending, path, strict=True)):
            following = self._pending[place + 1].piece if place + 1 < len(self._pending) else None
            start, labelled = _span(one.piece, labelled, following)
            labels.append(Label(start, labelled, numbers[index], _fit(emissions[place], index)))
        return labels

    # Saved and restored

    def save(self) -> dict[str, Any]:
        """The state as plain data, of at most `MAX_STATE_BYTES` once it is encoded."""
        return {
            "voices": [
                {**{name: getattr(voice, name) for name in _PLAIN}, "total": voice.total.astype("<i4").tobytes()}
                for voice in self._voices
            ],
            "pending": [
                {"piece": asdict(one.piece), "embedding": one.embedding.astype("<i2").tobytes()}
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
            Voice(**{**voice, "total": np.frombuffer(voice["total"], "<i4").astype(np.int64)})
            for voice in saved["voices"]
        ]
        embeddings = [np.frombuffer(one["embedding"], "<i2").astype(np.int64) for one in saved["pending"]]
        labels._pending = [
            _Pending(piece_of(one["piece"]), embedding, unit(embedding))
            for one, embedding in zip(saved["pending"], embeddings, strict=True)
        ]
        labels._next, labels._last, labels._labelled = saved["next"], saved["last"], saved["labelled"]
        return labels

    # Decisions

    def _decide(self) -> Label:
        """Decide the oldest pending piece."""
        piece = self._pending[0].piece
        path, fit, _ = self._best_path()
        index = path[0]
        if index == len(self._voices):
            voice = self._add(Voice(self._next, np.zeros(EMBEDDING_SIZE, np.int64), 0))
        else:
            voice = self._voices[index]
        if self._teaches(self._pending[0], voice):
            voice.add(piece.new // FRAME_SAMPLES * self._pending[0].embedding)
        voice.samples += piece.new
        voice.heard = piece.end
        del self._pending[0]
        voice = self._merged(voice)
        self._last = voice.number
        start, self._labelled = _span(piece, self._labelled, self._pending[0].piece if self._pending else None)
        return Label(start, self._labelled, voice.number, fit)

    def _teaches(self, one: _Pending, voice: Voice) -> bool:
        """Whether a voice learns from a piece. A doubtful piece gets a label, but would make the voice a mixture of two
        people, which fits both from then on."""
        if not voice.total.any():
            return True
        long_enough = one.piece.length >= self.settings.new_piece_samples
        return long_enough and float(one.direction @ voice.direction) >= self.settings.learn

    def _best_path(self) -> tuple[list[int], float, list[list[float]]]:
        """For each pending piece, the index of its voice, or the number of voices for a new one; how sure the first one
        is; and the scores of the pieces. Ties go to the older voice."""
        settings, known = self.settings, len(self._voices)
        emissions: list[list[float]] = self._emissions().tolist()
        may_be_new = known == 0 or self._far_samples >= settings.new_samples
        states = known + 1 if may_be_new else known
        last = next((index for index, voice in enumerate(self._voices) if voice.number == self._last), None)
        is_new = [settings.new if state == known and known else 0.0 for state in range(states)]
        score, back = list[float](), list[list[int]]()
        first: list[float] = []
        for one, emission in zip(self._pending, emissions, strict=True):
            cost = settings.switch_after_pause if one.piece.after_pause else settings.switch
            # What a change to each state adds; staying adds nothing.
            change = [-cost - new for new in is_new]
            if not first:
                begins = [-new for new in is_new] if last is None else change
                score = [emission[state] + (0.0 if state == last else begins[state]) for state in range(states)]
                first = score
                continue
            ranked = sorted(range(states), key=lambda state: (-score[state], state))[:2]
            came = []
            for state in range(states):
                other = ranked[0] if ranked[0] != state else ranked[-1]
                came.append(other if score[other] + change[state] > score[state] else state)
            back.append(came)
            score = [
                (score[state] if origin == state else score[origin] + change[state]) + emission[state]
                for state, origin in enumerate(came)
            ]
        path = [max(range(states), key=lambda state: (score[state], -state))]
        for came in reversed(back):
            path.append(came[path[-1]])
        path.reverse()
        return path, _fit(first, path[0]), emissions

    def _emissions(self) -> NDArray[np.float64]:
        """[pending, voices + 1]: scores of the pieces; the last column is `new`.

        A new voice is compared with the other pending pieces that are far from all voices: they must be alike."""
        settings = self.settings
        centroids = np.array([voice.direction for voice in self._voices]).reshape(-1, EMBEDDING_SIZE)
        pieces = np.array([one.direction for one in self._pending])
        new = np.array([one.piece.new for one in self._pending])
        lengths = np.array([one.piece.length for one in self._pending])
        thresholds = settings.threshold - settings.short * np.maximum(0.0, 1 - lengths / PIECE_SAMPLES)
        weights = settings.scale * np.minimum(new / _HOP_SAMPLES, settings.most_weight)
        near = pieces @ centroids.T
        above = near - thresholds[:, None]
        far = (near < settings.far).all(axis=1) & (lengths >= settings.new_piece_samples)
        self._far_samples = int(new[far].sum())
        others = (far * weights) @ pieces - (far * weights)[:, None] * pieces
        lengths_of_others = np.sqrt((others * others).sum(axis=1))
        alike = np.where(
            lengths_of_others > 0,
            (others * pieces).sum(axis=1) / np.maximum(lengths_of_others, 1e-12) - thresholds,
            0.0,
        )
        return np.concatenate([weights[:, None] * above, (weights * alike)[:, None]], axis=1)

    def _add(self, voice: Voice) -> Voice:
        unnamed = [known for known in self._voices if not known.name]
        if not voice.name and len(unnamed) >= MAX_VOICES:
            oldest = min(unnamed, key=lambda known: known.heard)
            others = [known for known in self._voices if known is not oldest]
            nearest = max(others, key=lambda known: float(known.direction @ oldest.direction))
            self._absorb(nearest, oldest)
        self._voices.append(voice)
        self._next += 1
        return voice

    def _merged(self, voice: Voice) -> Voice:
        """Merge the voice with one that it has grown alike; returns the voice that remains."""
        for other in self._voices:
            if other is voice or (other.name and voice.name) or not voice.samples or not other.samples:
                continue
            if float(other.direction @ voice.direction) >= self.settings.merge:
                older, younger = sorted((other, voice), key=lambda one: (not one.name, one.number))
                self._absorb(older, younger)
                return older
        return voice

    def _absorb(self, kept: Voice, gone: Voice) -> None:
        kept.add(gone.total)
        kept.samples += gone.samples
        kept.heard = max(kept.heard, gone.heard)
        self._voices.remove(gone)
        if self._last == gone.number:
            self._last = kept.number


_PLAIN = ("number", "samples", "name", "heard")
