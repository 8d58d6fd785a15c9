"""The same weights without a live edge: whole clips, greedy. What a live transcript is compared with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.text import Detokenizer, Vocabulary
from engine.models.seq2seq import SpeechModel
from engine.runner.speech import SpeechDetector

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
        self._vocabulary = Vocabulary(pieces)
        self._detector = detector

    def transcribe(self, samples: Samples) -> str:
        return " ".join(self._decode(piece) for piece in self._cut(samples)).strip()

    @torch.inference_mode()
    def _decode(self, samples: Samples) -> str:
        model = self._model
        if len(samples) < model.min_samples:
            samples = np.pad(samples, (0, model.min_samples - len(samples)))
        encoded = model.encode(torch.from_numpy(samples)[None], [len(samples)])
        most = min(model.max_tokens - len(model.start_tokens), int(len(samples) / 16_000 * TOKENS_PER_SECOND) + 8)
        state = model.new_state(1, len(model.start_tokens) + most)
        text, detokenizer = "", Detokenizer(self._vocabulary)
        fed, position = list(model.start_tokens), 0
        for _ in range(most):
            positions = torch.arange(position, position + len(fed))[None]
            hidden, _ = model.decode(torch.tensor([fed]), positions, state, encoded)
            position += len(fed)
            scores = model.logits(hidden[:, -1])[0]
            scores[model.suppressed] = float("-inf")
            token = int(scores.argmax())
            if token == model.end_token:
                break
            text += detokenizer.push(token)
            fed = [token]
        return (text + detokenizer.flush()).strip()

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
