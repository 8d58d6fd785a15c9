"""The same weights without a live edge: whole clips, greedy. What a live transcript is compared with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.text import Detokenizer
from engine.models.seq2seq import SpeechModel
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


class OfflineTranscriber:
    def __init__(self, model: SpeechModel, pieces: list[bytes], detector: SpeechDetector) -> None:
        self._model = model
        self._decoder = GreedyDecoder(model)
        self._vocabulary = Vocabulary(pieces)
        self._detector = detector

    def transcribe(self, samples: Samples) -> str:
        return " ".join(self._decode(piece) for piece in self._cut(samples)).strip()

    @torch.inference_mode()
    def _decode(self, samples: Samples) -> str:
        model = self._model
        samples = np.pad(samples, (0, max(0, model.min_samples - len(samples))))
        encoded = model.encode(torch.from_numpy(samples)[None], [len(samples)])
        room = model.max_tokens - len(model.start_tokens) - 1
        most = min(room, int(len(samples) / 16_000 * TOKENS_PER_SECOND) + 8)
        row = Row(committed=[], draft=[], most=most, stop_frame=None, frames=encoded.audio[0])
        self._decoder.run([row], encoded)
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
