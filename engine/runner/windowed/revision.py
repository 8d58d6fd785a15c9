"""The second pass: decodes an utterance again after its end, with all of its audio, for a final text with fewer errors.

The engine loop submits utterances to `UtteranceReviser`, a background model with threads of its own, always on the CPU.
Streamed words are decoded with little audio after them, by an encoder with bounded context per frame. The published
encoder used here sees the whole utterance. The streamed tokens are the draft: one pass of the decoder checks them, and
decoding continues from the first one that differs, so a draft without errors costs one pass. The result depends on the
audio, and on the draft only where two tokens are so close that rounding decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch.nn.functional import pad

from engine.core.plan import TimedToken
from engine.models.int8 import inference_thread, prepare_kernels
from engine.models.seq2seq import SpeechModel
from engine.runner.background import ONE_BY_ONE, BackgroundModel
from engine.runner.base import EndedUtterance, Reviser
from engine.runner.bias import KeywordTrees
from engine.runner.windowed.decoder import Decode, GreedyDecoder, Row
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION
from engine.runner.windowed.stability import (
    HypothesisToken,
    Policy,
    Progress,
    is_noise,
    loop_start,
    spans,
    starts_word,
    steady,
    without_second_mark,
)

SAMPLE_RATE = 16_000


class UtteranceReviser(BackgroundModel[EndedUtterance, list[TimedToken]], Reviser):
    """Decodes an utterance again after its end, with all of its audio, always on the CPU.

    `readers` are the numbers of its threads among those that use the model; `decode` replaces its own method.
    """

    def __init__(
        self,
        model: SpeechModel,
        pieces: list[bytes],
        policy: Policy,
        keywords: KeywordTrees,
        readers: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        super().__init__("revise", torch.device("cpu"), len(readers), ONE_BY_ONE)
        self._model = model
        self._pieces = pieces
        self._policy = policy
        self._keywords = keywords
        self._readers = readers
        self._decoder = GreedyDecoder(model, decode=decode)
        self.prepare()

    def _load(self, number: int) -> None:
        inference_thread.number = self._readers[number]
        prepare_kernels(self._model)

    def _compute(self, batch: list[EndedUtterance]) -> list[list[TimedToken]]:
        return [self.revise(utterance) for utterance in batch]

    @torch.inference_mode()
    def revise(self, utterance: EndedUtterance) -> list[TimedToken]:
        """The tokens of an utterance; positions are counted from the start of its audio."""
        model, said = self._model, list(utterance.said)
        samples = torch.from_numpy(utterance.samples)[None]
        samples = pad(samples, (0, max(0, model.min_samples - samples.shape[1])))
        encoded = model.encode(samples, [samples.shape[1]])
        room = model.max_tokens - len(model.start_tokens) - len(said) - 1
        if room < 1:
            return []
        seconds = len(utterance.samples) / SAMPLE_RATE
        most = max(1, min(room, round(seconds * self._policy.tokens_per_second) + 4 - len(said)))
        tree = self._keywords.lazy_tree(utterance.options)
        row = Row(
            committed=said,
            draft=list(utterance.draft[:most]),
            most=most,
            stop_frame=None,
            frames=encoded.audio[0],
            progress=Progress(-inf, inf),
            keywords=None if tree is None else tree.tree,
            tries_rest=True,
        )
        self._decoder.run([row], encoded)
        return self._timed(row, utterance)

    def _after_context(self, tokens: list[int], places: list[float], start: float) -> int:
        """The number of leading tokens that belong to the context: words that were not among its streamed ones.

        One token alone may attend to anything, so it counts only together with the next one.
        """
        count = 0
        while count + 1 < len(tokens) and max(places[count : count + 2]) < start:
            count += 1
        # A mark at the beginning belongs to the context too.
        while start and count < len(tokens) and not starts_word(self._pieces[tokens[count]]):
            count += 1
        return count

    def _timed(self, row: Row, utterance: EndedUtterance) -> list[TimedToken]:
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        start, end = utterance.start / SAMPLES_PER_POSITION, len(utterance.samples) / SAMPLES_PER_POSITION
        if not row.ended or loop_start(row.committed + row.tokens) is not None:
            return []  # the text was not decoded to its end
        raw = [peak * scale for peak in row.peaks]
        first = self._after_context(row.tokens, raw, start)
        places = steady(raw[first:], start)
        new = [
            HypothesisToken(*each)
            for each in zip(row.tokens[first:], places, row.log_probabilities[first:], strict=True)
        ]
        new = without_second_mark(row.committed, new, self._pieces)
        text = b"".join(self._pieces[token] for token in row.tokens)
        if is_noise(text, row.log_probabilities, self._policy.doubt):
            return []
        return [
            TimedToken(heard.token, first, last, heard.log_probability)
            for heard, (first, last) in zip(new, spans(new, start, end), strict=True)
        ]
