"""Greedy decoding for a batch of windows: known text in one pass, then token by token until every row has stopped.

A row brings the text it has committed and a draft, what it said in its last pass. The draft is only a guess to save
time: it is checked in the same pass as the committed text, and kept as far as the model would say the same again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

import numpy as np
import torch
from torch import Tensor

from engine.messages import Saved
from engine.models.compiled import Decode
from engine.models.seq2seq import DecoderState, Encoded, SpeechModel
from engine.options import Options
from engine.runner.bias import AT_WORD, KeywordTree
from engine.runner.device import upload
from engine.runner.windowed.stability import Policy, Progress


@dataclass(frozen=True, slots=True)
class DecodedToken:
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

    def favour(self, answer: DecodedToken, state: int, logits: Tensor) -> DecodedToken:
        """What to say instead, if a keyword may begin or go on there. How sure the model is of it is what the model
        itself says: a keyword is no evidence."""
        if self.keywords is None:
            return answer
        values = logits.cpu().numpy()
        token = self.keywords.choose(state, values, answer.token)
        lead = float(values[answer.token] - values[token])
        return replace(answer, token=token, log_probability=answer.log_probability - lead)

    def take(self, answer: DecodedToken, end_token: int) -> None:
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

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[DecodedToken]:
        """Text that is known, as one pass; answers for some of its places, as (row, column), and logits for those of
        them that have these numbers."""
        return answers_of(self._read(known, places, kept))

    def say(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
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


def answers_of(chosen: Tensor) -> list[DecodedToken]:
    tokens, chances, peaks = chosen.tolist()
    return [
        DecodedToken(int(token), chance, int(peak)) for token, chance, peak in zip(tokens, chances, peaks, strict=True)
    ]


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

        def decoder_batch(text: int) -> DecoderBatch:
            state = self._model.new_state(len(rows), text)
            return DecoderBatch(self._model, self._barred, encoded, audio, state, self._decode)

        return self._passes(rows, decoder_batch)

    def _passes(self, rows: list[Row], decoder_batch_for: Callable[[int], DecoderBatch]) -> Iterator[None]:
        """`speaker_for` gets the longest text that the rows can come to, in tokens."""
        prefixes = [[*(row.opening or self._model.start_tokens), *row.committed] for row in rows]
        texts = [len(prefix) + max(row.most, len(row.draft)) + 1 for prefix, row in zip(prefixes, rows, strict=True)]
        decoder_batch = decoder_batch_for(max(texts))
        last = self._check_drafts(decoder_batch, rows, prefixes)
        while not all(row.done for row in rows):
            yield
            for index, (row, answer) in enumerate(zip(rows, decoder_batch.say(last), strict=True)):
                if not row.done:
                    answer = row.favour(answer, row.state, decoder_batch.logits[index])
                    row.take(answer, self._model.end_token)
                    last[index] = (answer.token, last[index][1] + 1)

    def _check_drafts(
        self, decoder_batch: DecoderBatch, rows: list[Row], prefixes: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Run everything known; returns the token each row goes on from, and its position."""
        known = [prefix + row.draft for prefix, row in zip(prefixes, rows, strict=True)]
        # Only outputs from the last committed token on say something new.
        places = [
            (index, at) for index, prefix in enumerate(prefixes) for at in range(len(prefix) - 1, len(known[index]))
        ]
        biased = [number for number, (index, _) in enumerate(places) if rows[index].keywords is not None]
        answers = decoder_batch.read(known, places, biased)
        states = [state for row in rows for state in row.states()]
        for number, logits in zip(biased, decoder_batch.logits, strict=True):
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


# What a model thinks of a window before it reads it: whether anybody speaks, and in which language.
#
# A stream whose language was not told has it found out in the first window that is long enough to tell. From then on
# it stays: one short word that sounds like another language would otherwise change the language of what is said in
# it, and with it words that were right. Whoever changes the language tells it, or opens another stream. Where the
# model is not sure, its best guess counts for the one utterance, and the next one is asked again.

# Positions of speech in which a language can be told from others, and how likely it must be then to stay.
# Seen with Whisper tiny and the voices of espeak-ng in German, French, Spanish and Italian: of two seconds one was told
# right, of four seconds all were.
TELLING_POSITIONS = 50
SURE_LANGUAGE = 0.5
# Where the model says with this probability that nobody speaks, doubtful words are not believed. OpenAI's own bound.
NO_SPEECH_PROBABILITY = 0.6
# Where it has heard an utterance to its end and says so with less than this, somebody speaks, and words are believed
# down to a lower mean log-probability. Measured with whisper-tiny: of 300 prompts in five languages three are not below
# it; of 28 noises in two lengths only one piece of music is, whose notes have -2.0. Of these prompts 21 were below the
# bound for all others, and three are below this one, taken for other words of their own language or another.
SPEECH_PROBABILITY = 0.3
SPOKEN_DOUBT = -1.5


@dataclass(frozen=True, slots=True)
class Judgement:
    no_speech: float
    # How likely each of the model's languages is, if it is one of them.
    languages: list[float]


def judge(model: SpeechModel, encoded: Encoded) -> list[Judgement]:
    """One for each row, from the first token that the model would say."""
    judging = model.judging
    assert judging is not None, "this model cannot say"
    rows, device = len(encoded.lengths), encoded.keys.device
    tokens = torch.full((rows, 1), judging.start, device=device)
    hidden, _ = model.decode(tokens, torch.zeros_like(tokens), model.new_state(rows, 1), encoded)
    logits = model.logits(hidden[:, 0]).float()
    nobody = logits.softmax(dim=-1)[:, judging.no_speech].tolist()
    spoken = logits[:, list(judging.languages)].softmax(dim=-1).tolist()
    return [Judgement(*each) for each in zip(nobody, spoken, strict=True)]


@dataclass(slots=True)
class LanguageState:
    """What a stream was told, and what its model has found out."""

    task: str
    prompt: list[int]
    # Codes that may be spoken.
    languages: Sequence[str]
    # The code of what is spoken; empty if that is not known, or goes without saying.
    language: str = ""
    # The language stays.
    settled: bool = False
    # How likely nobody speaks in the window, if the model says so.
    no_speech: float | None = None

    @classmethod
    def of(cls, options: Options, given: Mapping[str, str], prompt: list[int]) -> LanguageState:
        languages = given["languages"].split(",") if "languages" in given else options.languages
        told = given.get("language", "")
        settled = bool(told) or not options.detects_language
        return cls(given.get("task", ""), prompt, languages, told, settled)

    def waits(self, positions: int) -> bool:
        """Whether a window of so many positions, to which more will come, is too short to tell its language."""
        return not self.settled and positions < TELLING_POSITIONS

    def hear(self, judgement: Judgement, options: Options, positions: int) -> None:
        self.no_speech = judgement.no_speech
        if self.settled:
            return
        likely = dict(zip(options.languages, judgement.languages, strict=True))
        self.language = max(self.languages, key=lambda code: likely[code])
        share = likely[self.language] / sum(likely[code] for code in self.languages)
        self.settled = share >= SURE_LANGUAGE and positions >= TELLING_POSITIONS

    def doubt(self, policy: Policy, to_end: bool) -> float:
        """Mean log-probability below which an utterance is taken for noise. How unsure a translation is says little
        about what was heard. `to_end`: it was heard to its end."""
        nobody = math.nan if self.no_speech is None else self.no_speech
        if nobody > NO_SPEECH_PROBABILITY:
            return policy.sure
        if self.task:
            return -math.inf
        return min(policy.doubt, SPOKEN_DOUBT) if to_end and nobody < SPEECH_PROBABILITY else policy.doubt

    def save(self) -> Saved:
        return {"language": self.language, "settled": self.settled, "no_speech": self.no_speech}

    def resume(self, saved: Saved) -> None:
        self.language, self.settled, self.no_speech = saved["language"], saved["settled"], saved["no_speech"]


# The decoder's step on a device, one token for every row, in places that do not move: on CUDA it is a recording.
#
# The places are sized for the largest batch, the longest window and the longest text. A batch uses the beginning of
# them, in one of a few shapes: rows, frames and tokens are rounded up to the next recorded size, because what a
# recording reads it always reads, used or not.


def sizes_up_to(largest: int, smallest: int, growth: float) -> list[int]:
    """Sizes worth a recording, each so much larger than the one before."""
    sizes = [largest]
    while sizes[-1] / growth >= smallest:
        sizes.append(int(sizes[-1] / growth))
    return sizes[::-1]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of batches that a step can have, smallest first."""

    rows: Sequence[int]
    frames: Sequence[int]
    tokens: Sequence[int]

    @classmethod
    def up_to(cls, rows: int, frames: int, tokens: int, least_frames: int = 200) -> Shapes:
        return cls(sizes_up_to(rows, 1, 2.0), sizes_up_to(frames, least_frames, 1.6), sizes_up_to(tokens, 60, 2.0))

    def fit(self, rows: int, frames: int, tokens: int) -> Shape:
        return Shape(_next(self.rows, rows), _next(self.frames, frames), _next(self.tokens, tokens))

    def all(self) -> list[Shape]:
        """The largest first: recordings share one pool of memory."""
        return [Shape(*sizes) for sizes in product(self.rows[::-1], self.frames[::-1], self.tokens[::-1])]


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    frames: int
    tokens: int


def _next(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


class Stage:
    """The places, and the recordings that work on them."""

    def __init__(
        self,
        model: SpeechModel,
        barred: Tensor,
        shapes: Shapes,
        dtype: torch.dtype,
        tokens_at_once: int,
        records: bool,
    ) -> None:
        self._model = model
        self.barred = barred
        self.shapes = shapes
        # Known text that is read at once, over all rows.
        self.tokens_at_once = tokens_at_once
        device, decoder = barred.device, model.decoder_shape
        rows, frames, tokens = shapes.rows[-1], shapes.frames[-1], shapes.tokens[-1]
        heard = decoder.layers, rows * decoder.heads * decoder.dim * frames
        said = decoder.layers, rows * decoder.heads * decoder.dim * tokens
        self._cross_keys, self._cross_values = torch.zeros(2, *heard, dtype=dtype, device=device)
        self._keys, self._values = torch.zeros(2, *said, dtype=dtype, device=device)
        self.real = torch.zeros(rows * frames, dtype=torch.bool, device=device)
        self.audio = torch.ones(rows, dtype=torch.int64, device=device)
        self.given = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(3, rows, device=device)
        # [rows, vocabulary], for rows that favour keywords; made by the first step.
        self.logits: Tensor | None = None
        self._records = records
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def encoded(self, shape: Shape) -> Encoded:
        """What a batch of this shape hears, to be written into."""
        layers, heads, dim = self._sizes()
        keys = self._cut(self._cross_keys, layers, shape.rows, heads, dim, shape.frames)
        values = self._cut(self._cross_values, layers, shape.rows, heads, shape.frames, dim)
        real = self.real[: shape.rows * shape.frames].view(shape.rows, 1, 1, shape.frames)
        return Encoded(keys, values, [shape.frames] * shape.rows, real=real)

    def state(self, shape: Shape) -> DecoderState:
        layers, heads, dim = self._sizes()
        sizes = layers, shape.rows, heads, shape.tokens, dim
        return DecoderState(self._cut(self._keys, *sizes), self._cut(self._values, *sizes))

    def record(self) -> None:
        """Once, before the first batch."""
        if not self._records:
            return
        pool = torch.cuda.graph_pool_handle()
        self.real.fill_(True)
        for shape in self.shapes.all():
            # The first run lets the libraries choose algorithms, which a recording cannot hold.
            self._step(shape)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(shape)
            self._graphs[shape] = graph

    def run(self, shape: Shape) -> None:
        if self._records:
            self._graphs[shape].replay()
        else:
            self._step(shape)

    def _step(self, shape: Shape) -> None:
        """Reads and writes fixed places only."""
        decoder_batch = DecoderBatch(
            self._model, self.barred, self.encoded(shape), self.audio[: shape.rows], self.state(shape)
        )
        self.chosen[:, : shape.rows] = decoder_batch.next(self.given[: shape.rows], shape.tokens)
        if self.logits is None:
            self.logits = decoder_batch.logits.new_zeros(self.shapes.rows[-1], decoder_batch.logits.shape[1])
        self.logits[: shape.rows] = decoder_batch.logits

    def _sizes(self) -> tuple[int, int, int]:
        decoder = self._model.decoder_shape
        return decoder.layers, decoder.heads, decoder.dim

    @staticmethod
    def _cut(whole: Tensor, layers: int, *sizes: int) -> Tensor:
        """The beginning of every layer's part, as a tensor of this shape."""
        count = torch.Size(sizes).numel()
        return whole[:, :count].view(layers, *sizes)


class RecordedDecoderBatch(DecoderBatch):
    """A batch on a stage: known text runs as it comes, and what is said token by token runs as a recording."""

    def __init__(self, model: SpeechModel, stage: Stage, heard: Sequence[Encoded], audio: list[int], text: int) -> None:
        rows, frames = len(audio), max(part.values.shape[3] for part in heard)
        self._stage = stage
        self._shape = shape = stage.shapes.fit(rows, frames, text)
        whole, state = stage.encoded(shape), stage.state(shape)
        _copy(heard, whole)
        # What is masked still has to be numbers.
        state.keys.zero_()
        state.values.zero_()
        stage.audio[:rows].copy_(upload(np.array(audio, np.int64), stage.barred.device))
        super().__init__(model, stage.barred, whole, stage.audio[: shape.rows], state)

    def say(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        stage, rows = self._stage, len(last)
        stage.given[:rows].copy_(upload(np.array(last, np.int64), stage.barred.device))
        stage.run(self._shape)
        assert stage.logits is not None
        self.logits = stage.logits
        return answers_of(stage.chosen[:, :rows])

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        """A few rows at a time: attention to all frames of all rows, for all tokens, would take much memory."""
        count = max(1, self._stage.tokens_at_once // max(map(len, known)))
        chosen, logits, wanted = [], [], set(kept)
        for first in range(0, len(known), count):
            part = slice(first, min(first + count, len(known)))
            numbers = [number for number, (row, _) in enumerate(places) if part.start <= row < part.stop]
            own = [(places[number][0] - first, places[number][1]) for number in numbers]
            decoder_batch = self._rows(part)
            own_kept = [place for place, number in enumerate(numbers) if number in wanted]
            chosen.append(decoder_batch._read(known[part], own, own_kept))
            logits.append(decoder_batch.logits)
        self.logits = torch.cat(logits)
        return torch.cat(chosen, dim=1)

    def _rows(self, part: slice) -> DecoderBatch:
        whole, state = self._encoded, self._state
        assert whole.real is not None
        lengths = whole.lengths[part]
        encoded = Encoded(whole.keys[:, part], whole.values[:, part], lengths, real=whole.real[part])
        state = DecoderState(state.keys[:, part], state.values[:, part])
        return DecoderBatch(self._model, self._barred, encoded, self._audio[part], state)


def _copy(heard: Sequence[Encoded], whole: Encoded) -> None:
    """Batches that were encoded one after the other, as one. Rows that nobody hears listen to something all the same:
    an empty row would have no attention at all."""
    assert whole.real is not None
    whole.real.zero_()
    whole.real[..., 0] = True
    first = 0
    for part in heard:
        rows, frames = slice(first, first + len(part.lengths)), part.values.shape[3]
        whole.keys[:, rows, :, :, :frames] = part.keys
        whole.values[:, rows, :, :frames] = part.values
        whole.values[:, rows, :, frames:] = 0.0  # what is masked still has to be numbers
        whole.real[rows, ..., :frames] = True if part.real is None else part.real
        first = rows.stop
