"""The decoder of windowed models: greedy decoding of a batch of windows, language detection, and fast decoder passes.

`windows.py` and the second pass (`engine/runner/background.py`) use it. Known text is read in one pass; then one token
per row and pass until every row has stopped. A row has committed text and a draft, the hypothesis of its last pass. The
draft only saves time: it is checked in the same pass as the committed text, and kept as far as the model would choose
the same tokens again. If the only row of a batch says so, the rest of the draft is tried after a difference too, a few
tokens in each pass (`DraftRest`).

A decoder pass is `SpeechModel.decode`. On CUDA it is recorded as a graph (`RecordedDecoderBatch`). On a CPU it is
traced with torch.jit (`compiled_decode`), so that it runs as one call without Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from engine.models.seq2seq import DecoderState, Encoded, SpeechModel
from engine.runner.bias import AT_WORD, KeywordTree
from engine.runner.device import upload
from engine.runner.windowed.stability import Progress

# `SpeechModel.decode`, or a replacement for it: tokens, positions, state and encoder output -> hidden and attention.
Decode = Callable[[Tensor, Tensor, DecoderState, Encoded], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """The model's choice at one place, its log-probability, and the encoder frame that it attends to most."""

    token: int
    log_probability: float
    peak: int


# Tokens of a draft that are tried in one pass when the text has met the draft again, and before that. A pass of seven
# tokens, the rows of the smallest piece of an 8-bit product (`product_in_pieces`), takes less than twice as long as one
# of a single token.
GUESSED_TOKENS, GUESSED_BEFORE = 6, 2
# How far ahead in a draft a token is looked for.
SEARCHED_TOKENS = 8


class DraftRest:
    """The rest of a draft after a difference: finds the place where the text meets the draft again."""

    def __init__(self, draft: list[int]) -> None:
        self._draft = draft
        # The first token of the draft that was not met, and the tokens of the text since the last one that was.
        self._at = 0
        self._missed = 0

    def add_token(self, token: int) -> None:
        expected = self._at + self._missed
        near = self._draft[self._at : self._at + SEARCHED_TOKENS]
        if self._draft[expected : expected + 1] == [token]:
            self._at, self._missed = expected + 1, 0
        elif token in near:
            self._at, self._missed = self._at + near.index(token) + 1, 0
        else:
            self._missed += 1

    def guess(self) -> list[int]:
        """The tokens that come next if those since the last difference stand for as many tokens of the draft."""
        first = self._at + self._missed
        return self._draft[first : first + (GUESSED_BEFORE if self._missed else GUESSED_TOKENS)]


@dataclass(slots=True)
class Row:
    """One stream's part of a decoding batch. The decoder fills the lists from `tokens` on."""

    committed: list[int]
    draft: list[int]
    # Most new tokens; and the frame from which on a token is too close to the live edge, so decoding stops (None: it
    # does not stop).
    most: int
    stop_frame: float | None
    # Frames with audio; attention to the padding after them means nothing.
    frames: int
    # Notices text that begins again; decoding stops then.
    progress: Progress = field(default_factory=lambda: Progress(-inf, inf))
    # Keywords to favour, and the state of the text in their tree.
    keywords: KeywordTree | None = None
    state: int = AT_WORD
    # Tokens that start the text; None: the model's default.
    opening: list[int] | None = None
    # After a difference the rest of the draft is tried again. For a text that is mostly like its draft.
    tries_rest: bool = False
    # The text is not empty: the model's end token is not the first one.
    has_text: bool = False
    tokens: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    # The model chose its end token first, although the text is not empty.
    is_forced: bool = False
    # The model chose its end token.
    ended: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        if self.keywords is not None:
            self.state = self.keywords.behind(self.committed)

    def states(self) -> Iterator[int]:
        """The keyword state after the committed text, and after each token of the draft."""
        state = self.state
        yield state
        for token in self.draft:
            if self.keywords is not None:
                state = self.keywords.after(state, token)
            yield state

    def favour(self, answer: DecodedToken, state: int, logits: Tensor) -> DecodedToken:
        """The token to use when keywords are considered. Its log-probability is the model's own: a keyword is no
        evidence."""
        if self.keywords is None:
            return answer
        values = logits.cpu().numpy()
        token = self.keywords.choose(state, values, answer.token)
        lead = float(values[answer.token] - values[token])
        return replace(answer, token=token, log_probability=answer.log_probability - lead)

    def first_token(self, answer: DecodedToken, logits: Tensor, end_token: int) -> DecodedToken:
        """The first token: if the text is not empty, the best one that does not end it."""
        if not self.has_text or answer.token != end_token:
            return answer
        values = logits.index_fill(0, torch.tensor([end_token], device=logits.device), -inf)
        token = int(values.argmax())
        lead = float(logits[end_token] - logits[token])
        self.is_forced = True
        return replace(answer, token=token, log_probability=answer.log_probability - lead)

    def add_token(self, answer: DecodedToken, end_token: int) -> None:
        if answer.token == end_token:
            self.ended = self.done = True
            return
        if self.keywords is not None:
            self.state = self.keywords.after(self.state, answer.token)
        peak = answer.peak
        self.tokens.append(answer.token)
        self.peaks.append(peak)
        self.log_probabilities.append(answer.log_probability)
        at_edge = self.stop_frame is not None and peak >= self.stop_frame
        if self.progress.begins_again(peak) or at_edge or len(self.tokens) >= self.most:
            self.done = True


class DecoderBatch:
    """A running batch. `encoded`: its encoder output; `audio_frames` [rows]: number of frames with audio; `state`: keys
    and values of its text; `barred`: tokens that are never chosen; `decode`: replaces the model's own method."""

    def __init__(
        self,
        model: SpeechModel,
        barred: Tensor,
        encoded: Encoded,
        audio_frames: Tensor,
        state: DecoderState,
        decode: Decode | None = None,
    ) -> None:
        self._model = model
        self._decode = decode or model.decode
        self._barred = barred
        self._encoded = encoded
        self._audio_frames = audio_frames
        self._state = state
        # Logits of the last choices: of the places that were asked for, or of every row.
        self.logits: Tensor

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[DecodedToken]:
        """Read known text in one pass. Returns the choices at `places` (row, column); `logits` keeps those of the
        places with the numbers `kept`."""
        return answers_of(self._read(known, places, kept))

    def next_tokens(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        """One more token per row, given each row's last (token, position)."""
        given = upload(np.array(last, np.int64), self._barred.device)
        return answers_of(self.next(given, max(position for _, position in last) + 1))

    def read_on(self, tokens: list[int], position: int) -> list[DecodedToken]:
        """Read more text of the only row, from this position on; returns the choice after each token."""
        device = self._barred.device
        positions = torch.arange(position, position + len(tokens), device=device)[None]
        state = self._state.first(position + len(tokens))
        hidden, attention = self._decode(upload(np.array([tokens], np.int64), device), positions, state, self._encoded)
        return answers_of(self._choose(hidden[0], attention[0], self._audio_frames.expand(len(tokens))))

    def next(self, given: Tensor, text_tokens: int) -> Tensor:
        """As `next_tokens`, on the device: `given` [rows, 2] has tokens and positions, `text_tokens` is the length of
        the longest text."""
        hidden, attention = self._decode(given[:, :1], given[:, 1:], self._state.first(text_tokens), self._encoded)
        return self._choose(hidden[:, 0], attention[:, 0], self._audio_frames)

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        device, width = self._barred.device, max(map(len, known))
        padded = [row + [self._model.end_token] * (width - len(row)) for row in known]
        positions = torch.arange(width, device=device).expand(len(known), -1)
        hidden, attention = self._decode(
            upload(np.array(padded, np.int64), device), positions, self._state.first(width), self._encoded
        )
        row, column = upload(np.array(places, np.int64), device).unbind(dim=1)
        chosen = self._choose(hidden[row, column], attention[row, column], self._audio_frames[row])
        self.logits = self.logits[kept]
        return chosen

    def _choose(self, hidden: Tensor, attention: Tensor, audio_frames: Tensor) -> Tensor:
        """[places, width], [places, frames], [places] -> [3, places] of token, log-probability, peak: one tensor, so
        that one copy brings it to the host. Token and frame numbers are exact in float32."""
        logits = self._model.logits(hidden).float()
        logits.index_fill_(1, self._barred, float("-inf"))
        self.logits = logits
        values, tokens = logits.max(dim=-1)
        frames = torch.arange(attention.shape[1], device=attention.device)
        peaks = attention.masked_fill(frames >= audio_frames[:, None], -1.0).argmax(dim=1)
        return torch.stack((tokens.float(), values - logits.logsumexp(dim=-1), peaks.float()))


def answers_of(chosen: Tensor) -> list[DecodedToken]:
    tokens, chances, peaks = chosen.tolist()
    return [
        DecodedToken(int(token), chance, int(peak)) for token, chance, peak in zip(tokens, chances, peaks, strict=True)
    ]


class GreedyDecoder:
    """Decodes batches of rows on one device."""

    def __init__(self, model: SpeechModel, device: torch.device | str = "cpu", decode: Decode | None = None) -> None:
        self._model = model
        self._decode = decode
        self._barred = torch.tensor(model.suppressed, dtype=torch.int64, device=device)

    def run(self, rows: list[Row], encoded: Encoded) -> None:
        for _ in self.passes(rows, encoded):
            pass

    def passes(self, rows: list[Row], encoded: Encoded) -> Iterator[None]:
        """Decode, yielding after each pass of the model, so that the caller may interleave other work."""
        audio_frames = upload(np.array([row.frames for row in rows], np.int64), self._barred.device)

        def decoder_batch(text_tokens: int) -> DecoderBatch:
            state = self._model.new_state(len(rows), text_tokens)
            return DecoderBatch(self._model, self._barred, encoded, audio_frames, state, self._decode)

        return self._passes(rows, decoder_batch)

    def _passes(self, rows: list[Row], decoder_batch_for: Callable[[int], DecoderBatch]) -> Iterator[None]:
        """`decoder_batch_for` gets the longest text that the rows can reach, in tokens."""
        prefixes = [[*(row.opening or self._model.start_tokens), *row.committed] for row in rows]
        texts = [len(prefix) + max(row.most, len(row.draft)) + 1 for prefix, row in zip(prefixes, rows, strict=True)]
        decoder_batch = decoder_batch_for(max(texts))
        last = self._check_drafts(decoder_batch, rows, prefixes)
        if len(rows) == 1 and rows[0].tries_rest:
            yield from self._rest_of_draft(decoder_batch, rows[0], last[0][1])
        while not all(row.done for row in rows):
            yield
            for index, (row, answer) in enumerate(zip(rows, decoder_batch.next_tokens(last), strict=True)):
                if not row.done:
                    answer = row.favour(answer, row.state, decoder_batch.logits[index])
                    row.add_token(answer, self._model.end_token)
                    last[index] = (answer.token, last[index][1] + 1)

    def _rest_of_draft(self, decoder_batch: DecoderBatch, row: Row, position: int) -> Iterator[None]:
        """Decode the only row to its end; `position` is that of its last token."""
        rest = DraftRest(row.draft)
        for token in row.tokens:
            rest.add_token(token)
        while not row.done:
            yield
            guess = rest.guess()[: row.most - len(row.tokens) - 1]
            answers = decoder_batch.read_on([row.tokens[-1], *guess], position)
            for number, answer in enumerate(answers):
                answer = row.favour(answer, row.state, decoder_batch.logits[number])
                row.add_token(answer, self._model.end_token)
                rest.add_token(answer.token)
                position += 1
                # The next answer counts only if it comes after this token.
                if row.done or guess[number : number + 1] != [answer.token]:
                    break

    def _check_drafts(
        self, decoder_batch: DecoderBatch, rows: list[Row], prefixes: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Read all known text; returns for each row the token to continue from, and its position."""
        known = [prefix + row.draft for prefix, row in zip(prefixes, rows, strict=True)]
        # Only the outputs from the last committed token on are needed.
        places = [
            (index, at) for index, prefix in enumerate(prefixes) for at in range(len(prefix) - 1, len(known[index]))
        ]
        kept = [
            number
            for number, (index, at) in enumerate(places)
            if rows[index].keywords is not None or (rows[index].has_text and at == len(prefixes[index]) - 1)
        ]
        answers = decoder_batch.read(known, places, kept)
        states = [state for row in rows for state in row.states()]
        for number, logits in zip(kept, decoder_batch.logits, strict=True):
            index, at = places[number]
            answers[number] = rows[index].favour(answers[number], states[number], logits)
            if at == len(prefixes[index]) - 1:
                answers[number] = rows[index].first_token(answers[number], logits, self._model.end_token)
        last: list[tuple[int, int]] = [(0, 0)] * len(rows)
        for (index, at), answer in zip(places, answers, strict=True):
            row, start = rows[index], len(prefixes[index])
            # An answer counts only if the decoder has chosen every draft token before it. Places are in order, and
            # `row.tokens` grows in this loop.
            agreed = at == start - 1 or (len(row.tokens) == at - start + 1 and row.tokens[-1] == known[index][at])
            if row.done or not agreed:
                continue
            row.add_token(answer, self._model.end_token)
            last[index] = (answer.token, at + 1)
        return last
