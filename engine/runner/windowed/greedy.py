"""Greedy decoding for a batch of windows: known text in one pass, then token by token until every row has stopped.

A row brings the text it has committed and a draft, what it said in its last pass. The draft is only a guess to save
time: it is checked in the same pass as the committed text, and kept as far as the model would say the same again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from engine.models.seq2seq import DecoderState, Encoded, SpeechModel


@dataclass(slots=True)
class Row:
    """One stream's part of a decoding pass; the lists are filled in by it."""

    committed: list[int]
    draft: list[int]
    # Most new tokens; and the frame at which decoding stops, because a token there is too close to the live edge (None:
    # it does not stop).
    most: int
    stop_frame: float | None
    # Frames that hold audio; attention to padding behind them says nothing.
    frames: int
    # Two tokens in a row that attend to frames so far before what is said already: the text begins again, and decoding
    # stops. `said_until` moves on with the text.
    far_back: float = inf
    said_until: float = -inf
    tokens: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    # The model said that the text ends here.
    ended: bool = False
    done: bool = False
    _behind: int = 0

    def take(self, token: int, log_probability: float, peak: int, end_token: int) -> None:
        if token == end_token:
            self.ended = self.done = True
            return
        self.tokens.append(token)
        self.peaks.append(peak)
        self.log_probabilities.append(log_probability)
        self._behind = self._behind + 1 if peak < self.said_until - self.far_back else 0
        self.said_until = max(self.said_until, peak)
        at_edge = self.stop_frame is not None and peak >= self.stop_frame
        if len(self.tokens) >= self.most or at_edge or self._behind == 2:
            self.done = True


class GreedyDecoder:
    def __init__(self, model: SpeechModel) -> None:
        self._model = model
        self._suppressed = torch.tensor(model.suppressed, dtype=torch.int64)

    def run(self, rows: list[Row], encoded: Encoded) -> None:
        for _ in self.passes(rows, encoded):
            pass

    def passes(self, rows: list[Row], encoded: Encoded) -> Iterator[None]:
        """One pass of the model at a time; the caller may do something else between them."""
        model = self._model
        starts = [len(model.start_tokens) + len(row.committed) for row in rows]
        lengths = [start + len(row.draft) for start, row in zip(starts, rows, strict=True)]
        capacity = max(start + max(row.most, len(row.draft)) for start, row in zip(starts, rows, strict=True)) + 1
        state = model.new_state(len(rows), max(capacity, max(lengths)))
        last = self._check_drafts(rows, starts, lengths, state, encoded)
        while not all(row.done for row in rows):
            yield
            tokens = torch.tensor([[token] for token, _ in last])
            positions = torch.tensor([[position] for _, position in last])
            hidden, attention = model.decode(tokens, positions, state, encoded)
            best, chances = self._choose(hidden[:, 0])
            peaks = _peaks(attention[:, 0], [row.frames for row in rows])
            for index, row in enumerate(rows):
                if row.done:
                    continue
                row.take(best[index], chances[index], peaks[index], model.end_token)
                last[index] = (best[index], last[index][1] + 1)

    def _check_drafts(
        self, rows: list[Row], starts: list[int], lengths: list[int], state: DecoderState, encoded: Encoded
    ) -> list[tuple[int, int]]:
        """Run everything known; returns the token each row goes on from, and its position."""
        model = self._model
        width = max(lengths)
        known = [[*model.start_tokens, *row.committed, *row.draft] for row in rows]
        tokens = torch.tensor([row + [model.end_token] * (width - len(row)) for row in known])
        positions = torch.arange(width).expand(len(rows), -1)
        hidden, attention = model.decode(tokens, positions, state, encoded)
        # Only outputs from the last committed token on say something new.
        places = [(index, at) for index, row in enumerate(rows) for at in range(starts[index] - 1, lengths[index])]
        batch, column = (torch.tensor(part) for part in zip(*places, strict=True))
        best, chances = self._choose(hidden[batch, column])
        peaks = _peaks(attention[batch, column], [rows[index].frames for index, _ in places])
        last: list[tuple[int, int]] = [(0, 0)] * len(rows)
        for (index, at), token, chance, peak in zip(places, best, chances, peaks, strict=True):
            row = rows[index]
            agreed = at == starts[index] - 1 or (
                len(row.tokens) == at - starts[index] + 1 and row.tokens[-1] == known[index][at]
            )
            if row.done or not agreed:
                continue
            row.take(token, chance, peak, model.end_token)
            last[index] = (token, at + 1)
        return last

    def _choose(self, hidden: Tensor) -> tuple[list[int], list[float]]:
        logits = self._model.logits(hidden).float()
        if len(self._suppressed):
            logits[:, self._suppressed] = float("-inf")
        values, tokens = logits.max(dim=-1)
        chances = values - logits.logsumexp(dim=-1)
        return tokens.tolist(), chances.tolist()


def _peaks(attention: Tensor, frames: list[int]) -> list[int]:
    """[rows, frames] -> the frame each row attends to most, among those that hold audio."""
    real = torch.arange(attention.shape[1]) < torch.tensor(frames)[:, None]
    return attention.masked_fill(~real, -1.0).argmax(dim=1).tolist()
