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

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from engine.messages import Saved
from engine.models.int8 import Int8Linear, copy_for_thread, inference_thread
from engine.models.moonshine import Moonshine
from engine.models.seq2seq import DecoderState, Encoded, SpeechModel
from engine.models.whisper import Whisper
from engine.options import Options
from engine.runner.bias import AT_WORD, KeywordTree
from engine.runner.device import upload
from engine.runner.windowed.stability import Policy, Progress

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


# DetectionTokens a window before it is read: whether it has speech, and in which language.
#
# Without a given language, the language is detected in the first window that is long enough. Then it stays: otherwise
# one short word that sounds like another language would change the language of the text, and words that were right. To
# change it, a client sets it or opens another stream. While the model is not sure, its best guess is used for one
# utterance, and the next utterance is judged again.

# Positions of speech needed to detect a language (four seconds), and the probability from which on it stays.
TELLING_POSITIONS = 50
SURE_LANGUAGE = 0.5
# From this probability of no speech on, doubtful words are not believed. OpenAI's own threshold.
NO_SPEECH_PROBABILITY = 0.6
# If an utterance was read to its end and its probability of no speech is below this, it is speech, and words are
# believed down to the lower mean log-probability SPOKEN_DOUBT: prompts of non-native speakers are often that unsure.
SPEECH_PROBABILITY = 0.3
SPOKEN_DOUBT = -1.5


@dataclass(frozen=True, slots=True)
class Judgement:
    # Probability that the window has no speech.
    no_speech: float
    # Probability of each of the model's languages.
    languages: list[float]


def judge(model: SpeechModel, encoded: Encoded) -> list[Judgement]:
    """One judgement per row, from the model's first token."""
    detection = model.detection_tokens
    assert detection is not None, "this model cannot detect language and speech"
    rows, device = len(encoded.lengths), encoded.keys.device
    tokens = torch.full((rows, 1), detection.start, device=device)
    hidden, _ = model.decode(tokens, torch.zeros_like(tokens), model.new_state(rows, 1), encoded)
    logits = model.logits(hidden[:, 0]).float()
    no_speech = logits.softmax(dim=-1)[:, detection.no_speech].tolist()
    spoken = logits[:, list(detection.languages)].softmax(dim=-1).tolist()
    return [Judgement(*each) for each in zip(no_speech, spoken, strict=True)]


@dataclass(slots=True)
class LanguageState:
    """The language options of a stream, and what the model has detected."""

    task: str
    prompt: list[int]
    # Codes of the languages to choose from.
    languages: Sequence[str]
    # Code of the spoken language; empty if unknown, or if the model has only one.
    language: str = ""
    # The language is not detected any more.
    settled: bool = False
    # Probability that the window has no speech, if the model says so.
    no_speech: float | None = None

    @classmethod
    def of(cls, options: Options, given: Mapping[str, str], prompt: list[int]) -> LanguageState:
        languages = given["languages"].split(",") if "languages" in given else options.languages
        told = given.get("language", "")
        settled = bool(told) or not options.detects_language
        return cls(given.get("task", ""), prompt, languages, told, settled)

    def waits(self, positions: int) -> bool:
        """Whether a growing window of this many positions is still too short to detect its language."""
        return not self.settled and positions < TELLING_POSITIONS

    def update(self, judgement: Judgement, options: Options, positions: int) -> None:
        self.no_speech = judgement.no_speech
        if self.settled:
            return
        likely = dict(zip(options.languages, judgement.languages, strict=True))
        self.language = max(self.languages, key=lambda code: likely[code])
        share = likely[self.language] / sum(likely[code] for code in self.languages)
        self.settled = share >= SURE_LANGUAGE and positions >= TELLING_POSITIONS

    @property
    def finds_no_speech(self) -> bool:
        """Whether the model says that the window has no speech."""
        return self.no_speech is not None and self.no_speech > NO_SPEECH_PROBABILITY

    def doubt(self, policy: Policy, to_end: bool, is_long: bool) -> float:
        """Mean log-probability below which an utterance is taken for noise. `to_end`: it was read to its end. A model
        that does not say whether it hears speech is doubted less in a long utterance (`is_long`), which noise rarely
        is. The confidence in a translation says little about the audio, so it does not count."""
        if self.finds_no_speech:
            return policy.sure
        if self.task:
            return -math.inf
        is_speech = is_long if self.no_speech is None else self.no_speech < SPEECH_PROBABILITY
        return min(policy.doubt, SPOKEN_DOUBT) if to_end and is_speech else policy.doubt

    def save(self) -> Saved:
        return {"language": self.language, "settled": self.settled, "no_speech": self.no_speech}

    def resume(self, saved: Saved) -> None:
        self.language, self.settled, self.no_speech = saved["language"], saved["settled"], saved["no_speech"]


# The decoder's step on a device, one token per row, in fixed buffers: on CUDA it is a recorded graph.
#
# The buffers are sized for the largest batch, the longest window and the longest text. A batch uses the beginning of
# them in one of a few shapes: rows, frames and tokens are rounded up to the next recorded size, because a graph always
# reads everything it was recorded with.


def sizes_up_to(largest: int, smallest: int, growth: float) -> list[int]:
    """Sizes to record up to `largest`, each `growth` times the one before."""
    sizes = [largest]
    while sizes[-1] / growth >= smallest:
        sizes.append(int(sizes[-1] / growth))
    return sizes[::-1]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The batch sizes that are recorded, smallest first."""

    rows: Sequence[int]
    frames: Sequence[int]
    tokens: Sequence[int]

    @classmethod
    def up_to(cls, rows: int, frames: int, tokens: int, least_frames: int = 200) -> Shapes:
        return cls(sizes_up_to(rows, 1, 2.0), sizes_up_to(frames, least_frames, 1.6), sizes_up_to(tokens, 60, 2.0))

    def fit(self, rows: int, frames: int, tokens: int) -> Shape:
        return Shape(_next(self.rows, rows), _next(self.frames, frames), _next(self.tokens, tokens))

    def all(self) -> list[Shape]:
        """Largest first: recordings share one memory pool."""
        return [Shape(*sizes) for sizes in product(self.rows[::-1], self.frames[::-1], self.tokens[::-1])]


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    frames: int
    tokens: int


def _next(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


class DecoderBuffers:
    """The buffers, and the recorded graphs that work on them."""

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
        # Tokens of known text read at once, over all rows.
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
        # [rows, vocabulary], for rows with keywords; allocated by the first step.
        self.logits: Tensor | None = None
        self._records = records
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def encoded(self, shape: Shape) -> Encoded:
        """The encoder-output buffer of a batch of this shape, to be written into."""
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
        """Record a graph for every shape; call once, before the first batch."""
        if not self._records:
            return
        pool = torch.cuda.graph_pool_handle()
        self.real.fill_(True)
        for shape in self.shapes.all():
            # The first run lets the libraries choose algorithms, which cannot be recorded.
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
        """One token per row; reads and writes fixed buffers only."""
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
        """The beginning of every layer's part of a buffer, as a tensor of this shape."""
        count = torch.Size(sizes).numel()
        return whole[:, :count].view(layers, *sizes)


class RecordedDecoderBatch(DecoderBatch):
    """A batch in fixed buffers: known text is read directly, new tokens are decoded by recorded graphs."""

    def __init__(
        self,
        model: SpeechModel,
        buffers: DecoderBuffers,
        heard: Sequence[Encoded],
        audio_frames: list[int],
        text_tokens: int,
    ) -> None:
        rows, frames = len(audio_frames), max(part.values.shape[3] for part in heard)
        self._buffers = buffers
        self._shape = shape = buffers.shapes.fit(rows, frames, text_tokens)
        whole, state = buffers.encoded(shape), buffers.state(shape)
        _copy(heard, whole)
        # Masked entries must be finite, too.
        state.keys.zero_()
        state.values.zero_()
        buffers.audio[:rows].copy_(upload(np.array(audio_frames, np.int64), buffers.barred.device))
        super().__init__(model, buffers.barred, whole, buffers.audio[: shape.rows], state)

    def next_tokens(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        buffers, rows = self._buffers, len(last)
        buffers.given[:rows].copy_(upload(np.array(last, np.int64), buffers.barred.device))
        buffers.run(self._shape)
        assert buffers.logits is not None
        self.logits = buffers.logits
        return answers_of(buffers.chosen[:, :rows])

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        """Read a few rows at a time: attention of all tokens to all frames of all rows would take much memory."""
        count = max(1, self._buffers.tokens_at_once // max(map(len, known)))
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
        return DecoderBatch(self._model, self._barred, encoded, self._audio_frames[part], state)


def _copy(heard: Sequence[Encoded], whole: Encoded) -> None:
    """Copy batches that were encoded one after the other into one. Unused rows get one valid frame, because attention
    over an empty row is undefined."""
    assert whole.real is not None
    whole.real.zero_()
    whole.real[..., 0] = True
    first = 0
    for part in heard:
        rows, frames = slice(first, first + len(part.lengths)), part.values.shape[3]
        whole.keys[:, rows, :, :, :frames] = part.keys
        whole.values[:, rows, :, :frames] = part.values
        whole.values[:, rows, :, frames:] = 0.0  # masked entries must be finite, too
        whole.real[rows, ..., :frames] = True if part.real is None else part.real
        first = rows.stop


# The decoder's pass on a CPU, traced with torch.jit.

# For one token of a small model a CPU runs some hundred short operations, and half of the time is Python between them.
# Only one thread at a time can run Python, so streams that are read in parallel would wait for each other. A traced
# pass runs the same operations in the same order in torch's own interpreter; the results are the same, bit for bit.

Pass = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor]]


class _Pass(nn.Module):
    """A model's `decode` with tensors as arguments.

    Its only attributes are the 8-bit weights of one inference thread, because tracing takes time for each submodule.
    All other tensors of the model become constants of the trace.
    """

    def __init__(self, decode: Decode, layers: list[Int8Linear]) -> None:
        super().__init__()
        self._decode = decode
        for name, weights in _weights_of(layers, 0):
            setattr(self, name, weights)

    def forward(
        self, tokens: Tensor, positions: Tensor, said: tuple[Tensor, Tensor], heard: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        keys, values, real = heard
        return self._decode(tokens, positions, DecoderState(*said), Encoded(keys, values, [], real=real))


def _weights_of(layers: list[Int8Linear], number: int) -> list[tuple[str, torch.ScriptObject]]:
    """The 8-bit weights of one inference thread, by their names in a trace."""
    return [(f"weights_{index}", layer.weights_of(number)) for index, layer in enumerate(layers)]


@torch.inference_mode()
def compiled_decode(model: Moonshine | Whisper, readers: int = 1) -> Decode:
    """A traced `SpeechModel.decode` of a model on a CPU whose decoder does not change any more, for `readers` threads.

    The pass is traced once. The readers share its code, and each has its own 8-bit weights of the decoder's layers; for
    the other layers of the model, call `copy_for_thread`. The rest of the model may change meanwhile on another thread.
    """
    layers = [module for module in model.decoder.modules() if isinstance(module, Int8Linear)]
    # Copies of weights are made on another core while the pass is traced with the weights of the first thread.
    copies = ThreadPoolExecutor(1, "copy weights")
    copying = [copies.submit(copy_for_thread, model.decoder, number) for number in range(1, readers)]
    # Constants of a trace must not need a gradient.
    model.decoder.requires_grad_(False)
    _use_simple_executor()
    traced = _trace(model, layers)
    for done in copying:
        done.result()
    copies.shutdown()
    passes = [_with_weights(traced, _weights_of(layers, number)) for number in range(readers)]

    def decode(tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        real = _all_real(encoded.keys) if encoded.real is None else encoded.real
        own = passes[inference_thread.number]
        # Without optimisations, which take longer than a dozen passes, and find nothing to improve on a CPU.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            hidden, attention = own(tokens, positions, (state.keys, state.values), (encoded.keys, encoded.values, real))
        return hidden, attention

    return decode


def _use_simple_executor() -> None:
    """For all traced models of this process. The other executor prepares a pass twice: before the first call, and again
    with what it has seen in it."""
    torch._C._jit_set_profiling_executor(False)


def _with_weights(traced: torch.jit.ScriptModule, weights: list[tuple[str, torch.ScriptObject]]) -> Pass:
    """The same traced pass with the weights of another inference thread."""
    own = copy(traced._c)
    for name, value in weights:
        own.setattr(name, value)
    decode: Pass = own._get_method("forward")
    return decode


def _trace(model: Moonshine | Whisper, layers: list[Int8Linear]) -> torch.jit.ScriptModule:
    """Trace a pass with the weights of the first inference thread."""
    shape = model.decoder_shape
    # Sizes are not fixed by the trace, as long as none of them is 1.
    rows, count, frames = 2, 2, 3
    tokens = torch.zeros(rows, count, dtype=torch.int64)
    state = model.new_state(rows, count)
    keys, values = (
        state.keys.new_zeros(shape.layers, rows, shape.heads, *size)
        for size in ((shape.dim, frames), (frames, shape.dim))
    )
    example = (
        tokens,
        torch.arange(count).expand(rows, -1),
        (state.keys, state.values),
        (keys, values, _all_real(keys)),
    )
    with warnings.catch_warnings():
        # Warnings about values treated as constants: sizes of the model, which are constant.
        warnings.simplefilter("ignore", TracerWarning)
        # The replacement that torch recommends needs a C++ compiler at run time. The torch version is pinned.
        warnings.filterwarnings("ignore", "`torch.jit.trace", DeprecationWarning)
        traced: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
            _Pass(model.decode, layers), example, check_trace=False
        )
    return traced


def _all_real(keys: Tensor) -> Tensor:
    """The mask of a batch without padding."""
    return keys.new_ones(keys.shape[1], 1, 1, keys.shape[4], dtype=torch.bool)
