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
from engine.runner.windowed.decoder import SPARE_TOKENS, Decode, GreedyDecoder, Row
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
    """Decodes utterances again after their end, on low-priority threads.

    `thread_numbers`: numbers of its threads, under which the model has weight copies (`int8.inference_thread`).
    `decode`: a traced pass in place of `model.decode`.
    """

    def __init__(
        self,
        model: SpeechModel,
        pieces: list[bytes],
        policy: Policy,
        keywords: KeywordTrees,
        thread_numbers: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        super().__init__("revise", torch.device("cpu"), len(thread_numbers), ONE_BY_ONE)
        self._model = model
        self._pieces = pieces
        self._policy = policy
        self._keywords = keywords
        self._thread_numbers = thread_numbers
        self._decoder = GreedyDecoder(model, decode=decode)
        self.prepare()

    def _load(self, number: int) -> None:
        inference_thread.number = self._thread_numbers[number]
        prepare_kernels(self._model)

    def _compute(self, batch: list[EndedUtterance]) -> list[list[TimedToken]]:
        return [self.revise(utterance) for utterance in batch]

    @torch.inference_mode()
    def revise(self, utterance: EndedUtterance) -> list[TimedToken]:
        """The tokens of an utterance. Positions are counted from the start of its audio, which is the context if it has
        one. Empty if the text is too long for the model, repeats itself, or is noise."""
        model, context_tokens = self._model, list(utterance.context_tokens)
        samples = torch.from_numpy(utterance.samples)[None]
        samples = pad(samples, (0, max(0, model.min_samples - samples.shape[1])))
        encoded = model.encode(samples, [samples.shape[1]])
        room = model.max_tokens - len(model.start_tokens) - len(context_tokens) - 1
        if room < 1:
            return []
        seconds = len(utterance.samples) / SAMPLE_RATE
        # Speech has a limited number of tokens per second; a few more allow for a very short utterance.
        speech_tokens = round(seconds * self._policy.tokens_per_second) + SPARE_TOKENS
        max_tokens = max(1, min(room, speech_tokens - len(context_tokens)))
        tree = self._keywords.lazy_tree(utterance.options)
        row = Row(
            committed=context_tokens,
            draft=list(utterance.draft[:max_tokens]),
            max_tokens=max_tokens,
            stop_frame=None,
            frames=encoded.audio[0],
            progress=Progress(-inf, inf),
            keywords=None if tree is None else tree.tree,
            retries_draft=True,
        )
        self._decoder.run([row], encoded)
        return self._timed(row, utterance)

    def _context_token_count(self, tokens: list[int], peaks: list[float], start: float) -> int:
        """How many leading tokens are words of the context that its streamed text did not have. The context ends at the
        position `start`.

        One token alone may attend to anything, so it counts only together with the next one.
        """
        count = 0
        while count + 1 < len(tokens) and max(peaks[count : count + 2]) < start:
            count += 1
        # Punctuation and the rest of a word at the beginning belong to the context, too.
        while start and count < len(tokens) and not starts_word(self._pieces[tokens[count]]):
            count += 1
        return count

    def _timed(self, row: Row, utterance: EndedUtterance) -> list[TimedToken]:
        """The tokens of a decoded row with their times; empty if the row is not a text of the utterance."""
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        start, end = utterance.context_samples / SAMPLES_PER_POSITION, len(utterance.samples) / SAMPLES_PER_POSITION
        if not row.ended or loop_start(row.committed + row.tokens) is not None:
            return []  # the text was not decoded to its end, or ends in a repeated phrase
        peaks = [peak * scale for peak in row.peaks]
        first = self._context_token_count(row.tokens, peaks, start)
        steady_peaks = steady(peaks[first:], start)
        new = [
            HypothesisToken(*each)
            for each in zip(row.tokens[first:], steady_peaks, row.log_probabilities[first:], strict=True)
        ]
        new = without_second_mark(row.committed, new, self._pieces)
        text = b"".join(self._pieces[token] for token in row.tokens)
        if is_noise(text, row.log_probabilities, self._policy.doubt):
            return []
        return [
            TimedToken(token.token, first, last, token.log_probability)
            for token, (first, last) in zip(new, spans(new, start, end), strict=True)
        ]
