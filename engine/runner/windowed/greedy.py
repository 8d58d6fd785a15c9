"""Greedy decoding for a batch of windows: known text in one pass, then token by token until every row has stopped.

A row brings the text it has committed and a draft, what it said in its last pass. The draft is only a guess to save
time: it is checked in the same pass as the committed text, and kept as far as the model would say the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from engine.models.compiled import Decode
from engine.models.seq2seq import DecoderState, Encoded, SpeechModel
from engine.runner.bias import AT_WORD, KeywordTree
from engine.runner.device import upload
from engine.runner.windowed.stability import Progress


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says in one place, how sure it is, and the frame that it attends to."""

    token: int
    log_probability: float
    peak: int


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
    # Tells when the text begins again; then decoding stops.
    progress: Progress = field(default_factory=lambda: Progress(-inf, inf))
    # Words to favour, and where the text stands among them.
    keywords: KeywordTree | None = None
    state: int = AT_WORD
    # What the text begins with; None: as the model's texts do.
    opening: list[int] | None = None
    tokens: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    # The model said that the text ends here.
    ended: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        if self.keywords is not None:
            self.state = self.keywords.behind(self.committed)

    def states(self) -> Iterator[int]:
        """Where the text stands behind what is committed, and behind each token of the draft."""
        state = self.state
        yield state
        for token in self.draft:
            if self.keywords is not None:
                state = self.keywords.after(state, token)
            yield state

    def favour(self, answer: Answer, state: int, logits: Tensor) -> Answer:
        """What to say instead, if a keyword may begin or go on there. How sure the model is of it is what the model
        itself says: a keyword is no evidence."""
        if self.keywords is None:
            return answer
        values = logits.cpu().numpy()
        token = self.keywords.choose(state, values, answer.token)
        lead = float(values[answer.token] - values[token])
        return replace(answer, token=token, log_probability=answer.log_probability - lead)

    def take(self, answer: Answer, end_token: int) -> None:
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


class Speaker:
    """One batch under way: `encoded` is what it hears, `audio` ([rows]) how many of these frames hold audio, `state`
    what it has said. Tokens that are barred are never said. `decode` stands for the model's own."""

    def __init__(
        self,
        model: SpeechModel,
        barred: Tensor,
        encoded: Encoded,
        audio: Tensor,
        state: DecoderState,
        decode: Decode | None = None,
    ) -> None:
        self._model = model
        self._decode = decode or model.decode
        self._barred = barred
        self._encoded = encoded
        self._audio = audio
        self._state = state
        # Behind the last answers: of the places that were asked for, or of every row.
        self.logits: Tensor

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[Answer]:
        """Text that is known, as one pass; answers for some of its places, as (row, column), and logits for those of
        them that have these numbers."""
        return answers_of(self._read(known, places, kept))

    def say(self, last: list[tuple[int, int]]) -> list[Answer]:
        """One more token of every row, each behind its last token at that one's position."""
        given = upload(np.array(last, np.int64), self._barred.device)
        return answers_of(self.next(given, max(position for _, position in last) + 1))

    def next(self, given: Tensor, text: int) -> Tensor:
        """The same for [rows, 2] of tokens and positions, in texts of at most so many tokens."""
        hidden, attention = self._decode(given[:, :1], given[:, 1:], self._state.first(text), self._encoded)
        return self._choose(hidden[:, 0], attention[:, 0], self._audio)

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        device, width = self._barred.device, max(map(len, known))
        padded = [row + [self._model.end_token] * (width - len(row)) for row in known]
        positions = torch.arange(width, device=device).expand(len(known), -1)
        hidden, attention = self._decode(
            upload(np.array(padded, np.int64), device), positions, self._state.first(width), self._encoded
        )
        row, column = upload(np.array(places, np.int64), device).unbind(dim=1)
        chosen = self._choose(hidden[row, column], attention[row, column], self._audio[row])
        self.logits = self.logits[kept]
        return chosen

    def _choose(self, hidden: Tensor, attention: Tensor, audio: Tensor) -> Tensor:
        """[places, width], [places, frames], [places] -> [3, places]: one copy brings all of it to the host. Token and
        frame numbers are small enough for a float32."""
        logits = self._model.logits(hidden).float()
        logits.index_fill_(1, self._barred, float("-inf"))
        self.logits = logits
        values, tokens = logits.max(dim=-1)
        frames = torch.arange(attention.shape[1], device=attention.device)
        peaks = attention.masked_fill(frames >= audio[:, None], -1.0).argmax(dim=1)
        return torch.stack((tokens.float(), values - logits.logsumexp(dim=-1), peaks.float()))


def answers_of(chosen: Tensor) -> list[Answer]:
    tokens, chances, peaks = chosen.tolist()
    return [Answer(int(token), chance, int(peak)) for token, chance, peak in zip(tokens, chances, peaks, strict=True)]


class GreedyDecoder:
    def __init__(self, model: SpeechModel, device: torch.device | str = "cpu", decode: Decode | None = None) -> None:
        self._model = model
        self._decode = decode
        self._barred = torch.tensor(model.suppressed, dtype=torch.int64, device=device)

    def run(self, rows: list[Row], encoded: Encoded) -> None:
        for _ in self.passes(rows, encoded):
            pass

    def passes(self, rows: list[Row], encoded: Encoded) -> Iterator[None]:
        """One pass of the model at a time; the caller may do something else between them."""
        audio = upload(np.array([row.frames for row in rows], np.int64), self._barred.device)

        def speaker(text: int) -> Speaker:
            state = self._model.new_state(len(rows), text)
            return Speaker(self._model, self._barred, encoded, audio, state, self._decode)

        return self._passes(rows, speaker)

    def _passes(self, rows: list[Row], speaker_for: Callable[[int], Speaker]) -> Iterator[None]:
        """`speaker_for` gets the longest text that the rows can come to, in tokens."""
        prefixes = [[*(row.opening or self._model.start_tokens), *row.committed] for row in rows]
        texts = [len(prefix) + max(row.most, len(row.draft)) + 1 for prefix, row in zip(prefixes, rows, strict=True)]
        speaker = speaker_for(max(texts))
        last = self._check_drafts(speaker, rows, prefixes)
        while not all(row.done for row in rows):
            yield
            for index, (row, answer) in enumerate(zip(rows, speaker.say(last), strict=True)):
                if not row.done:
                    answer = row.favour(answer, row.state, speaker.logits[index])
                    row.take(answer, self._model.end_token)
                    last[index] = (answer.token, last[index][1] + 1)

    def _check_drafts(self, speaker: Speaker, rows: list[Row], prefixes: list[list[int]]) -> list[tuple[int, int]]:
        """Run everything known; returns the token each row goes on from, and its position."""
        known = [prefix + row.draft for prefix, row in zip(prefixes, rows, strict=True)]
        # Only outputs from the last committed token on say something new.
        places = [
            (index, at) for index, prefix in enumerate(prefixes) for at in range(len(prefix) - 1, len(known[index]))
        ]
        biased = [number for number, (index, _) in enumerate(places) if rows[index].keywords is not None]
        answers = speaker.read(known, places, biased)
        states = [state for row in rows for state in row.states()]
        for number, logits in zip(biased, speaker.logits, strict=True):
            answers[number] = rows[places[number][0]].favour(answers[number], states[number], logits)
        last: list[tuple[int, int]] = [(0, 0)] * len(rows)
        for (index, at), answer in zip(places, answers, strict=True):
            row, start = rows[index], len(prefixes[index])
            agreed = at == start - 1 or (len(row.tokens) == at - start + 1 and row.tokens[-1] == known[index][at])
            if row.done or not agreed:
                continue
            row.take(answer, self._model.end_token)
            last[index] = (answer.token, at + 1)
        return last
