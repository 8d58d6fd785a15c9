"""The same weights without a live edge: whole clips, greedy. What a live transcript is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.text import Detokenizer
from engine.models.seq2seq import Encoded, SpeechModel
from engine.options import Keyword
from engine.runner.bias import KeywordTree, Spelling
from engine.runner.speech import SpeechDetector
from engine.runner.windowed.greedy import GreedyDecoder, Row
from engine.vocabulary import Vocabulary

# Windowed models are trained on at most half a minute. What is longer is cut where it is quietest, which no listener
# would hear as a cut.
LONGEST_PIECE_SAMPLES = 30 * 16_000
SHORTEST_PIECE_SAMPLES = 20 * 16_000
# More than anybody says in a second; a model that repeats itself stops here.
TOKENS_PER_SECOND = 6.5

Samples = NDArray[np.float32]


@dataclass(slots=True)
class Piece:
    """A part of a clip: what is heard in it, the most tokens it can have, and what was said of it last: a draft, which
    saves time and changes nothing."""

    encoded: Encoded
    most: int
    said: list[int] = field(default_factory=list)


class OfflineTranscriber:
    def __init__(self, model: SpeechModel, pieces: list[bytes], detector: SpeechDetector) -> None:
        self._model = model
        self._decoder = GreedyDecoder(model)
        self._vocabulary = Vocabulary(pieces)
        self._spelling = Spelling(self._vocabulary)
        self._detector = detector

    def transcribe(self, samples: Samples) -> str:
        return self.say(self.hear(samples))

    @torch.inference_mode()
    def hear(self, samples: Samples) -> list[Piece]:
        """A clip, encoded, to be transcribed once or several times."""
        return [self._hear(piece) for piece in self._cut(samples)]

    @torch.inference_mode()
    def say(self, pieces: Sequence[Piece], keywords: Sequence[Keyword] = ()) -> str:
        tree = KeywordTree(keywords, self._spelling) if keywords else None
        return " ".join(self._say(piece, tree) for piece in pieces).strip()

    def _hear(self, samples: Samples) -> Piece:
        model = self._model
        samples = np.pad(samples, (0, max(0, model.min_samples - len(samples))))
        encoded = model.encode(torch.from_numpy(samples)[None], [len(samples)])
        room = model.max_tokens - len(model.start_tokens) - 1
        return Piece(encoded, min(room, int(len(samples) / 16_000 * TOKENS_PER_SECOND) + 8))

    def _say(self, piece: Piece, keywords: KeywordTree | None) -> str:
        row = Row([], piece.said, piece.most, None, piece.encoded.audio[0], keywords=keywords)
        self._decoder.run([row], piece.encoded)
        piece.said = row.tokens
        detokenizer = Detokenizer(self._vocabulary)
        text = "".join(detokenizer.push(token) for token in row.tokens) + detokenizer.flush()
        return text.strip()

    def _cut(self, samples: Samples) -> list[Samples]:
        if len(samples) <= LONGEST_PIECE_SAMPLES:
            return [samples]
        self._detector.open("offline")
        heard = self._detector.detect([("offline", samples)])[0]
        self._detector.close("offline")
        # The quietest quarter of a second: the mean of the probabilities around each frame.
        calm = np.convolve(heard.probabilities, np.full(8, 1 / 8), mode="same")
        pieces, start = [], 0
        while len(samples) - start > LONGEST_PIECE_SAMPLES:
            first = (start + SHORTEST_PIECE_SAMPLES) // heard.frame_samples
            last = (start + LONGEST_PIECE_SAMPLES) // heard.frame_samples
            end = int(first + calm[first:last].argmin()) * heard.frame_samples
            pieces.append(samples[start:end])
            start = end
        return [*pieces, samples[start:]]
