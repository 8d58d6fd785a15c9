"""`PieceCutter`: cuts the speech of a stream into pieces of equal length for the speaker embedding model.

It collects the frames in which the speech detector has found a voice. Where it cuts does not depend on how the audio
arrived, and a saved state continues with the same pieces. `SpeakerTrack` (`engine/server/speakers.py`) has one per
stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.options import PIECE_SAMPLES

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

    @property
    def ends_run(self) -> bool:
        """Whether a pause follows, which ended its run."""
        return self.cut_at > self.end


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
