"""The decoder of windowed models: greedy decoding of a batch of windows, language detection, and traced decoder passes.

`windows.py` and the second pass (`engine/runner/background.py`) use it. A row of a batch is one window. It has
committed text and a draft, the hypothesis of its last pass. Both are read in one pass (prefill); then each pass adds
one token per row until every row is done. The draft only saves time: it is checked in the same pass as the committed
text is read, and kept as far as the model would choose the same tokens again. In a batch of a single row with
`retries_draft`, the rest of the draft is tried after a difference, too, a few tokens in each pass (`DraftRest`).

For models with `detection_tokens`, `judge` detects language and speech in a window before it is decoded, and
`LanguageState` keeps a stream's language.

A decoder pass is `SpeechModel.decode`. On CUDA it is recorded as a graph (`recorded_decoder.py`), on a CPU it is traced
with torch.jit (`compiled_decode`), so that it runs as one call without Python.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from engine.messages import Saved
from engine.models.moonshine import Moonshine
from engine.models.seq2seq import DecoderState, Encoded, Int8Linear, SpeechModel, copy_for_thread, inference_thread
from engine.models.whisper import Whisper
from engine.options import Options
from engine.runner.bias import AT_WORD, KeywordTree
from engine.runner.device import upload
from engine.runner.windowed.stability import Policy, Progress

# `SpeechModel.decode` or a traced form of it: tokens, positions, state, encoder output -> hidden rows, attention.
Decode = Callable[[Tensor, Tensor, DecoderState, Encoded], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """A chosen token, its log-probability, and the encoder frame with the most attention."""

    token: int
    log_probability: float
    peak: int


# Tokens of a draft that are tried in one pass: while the text follows the draft, and after a difference. A pass of
# seven tokens (the rows of the smallest piece of an 8-bit product, `product_in_pieces`) takes less than twice as long
# as one of a single token.
GUESSED_TOKENS, GUESSED_AFTER_DIFFERENCE = 6, 2
# How far ahead in a draft a token is looked for.
SEARCHED_TOKENS = 8
# Tokens of a text beyond those that speech of its length has: a very short window may have one word.
SPARE_TOKENS = 4


class DraftRest:
    """The rest of a draft after a difference: aligns the text with it, and guesses the next tokens."""

    def __init__(self, draft: list[int]) -> None:
        self._draft = draft
        # Index of the first token of the draft after the last match, and number of tokens of the text since then.
        self._next = 0
        self._unmatched = 0

    def add_token(self, token: int) -> None:
        expected = self._next + self._unmatched
        near = self._draft[self._next : self._next + SEARCHED_TOKENS]
        if self._draft[expected : expected + 1] == [token]:
            self._next, self._unmatched = expected + 1, 0
        elif token in near:
            self._next, self._unmatched = self._next + near.index(token) + 1, 0
        else:
            self._unmatched += 1

    def guess(self) -> list[int]:
        """The next tokens of the draft, assuming that the unmatched tokens of the text replace as many of the draft."""
        first = self._next + self._unmatched
        return self._draft[first : first + (GUESSED_AFTER_DIFFERENCE if self._unmatched else GUESSED_TOKENS)]


@dataclass(slots=True)
class Row:
    """One window in a decoding batch. The decoder sets the fields from `tokens` on."""

    # Tokens of the window's text that stay.
    committed: list[int]
    # Tokens that may follow them.
    draft: list[int]
    # Most new tokens.
    max_tokens: int
    # Decoding stops at a token whose attention peaks at this frame or later, too close to the live edge. None: it does
    # not stop there.
    stop_frame: float | None
    # Number of frames with audio; attention to the padding after them has no meaning.
    frames: int
    # Detects a text that begins again; decoding stops then.
    progress: Progress = field(default_factory=lambda: Progress(-inf, inf))
    # Keywords to favour, and the state of the text in their tree.
    keywords: KeywordTree | None = None
    keyword_state: int = AT_WORD
    # Tokens that start the text; None: the model's default.
    start_tokens: list[int] | None = None
    # After a difference the rest of the draft is tried again. For a text that differs little from its draft.
    retries_draft: bool = False
    # The text must not be empty: the first token is not the end token.
    has_text: bool = False
    # New tokens, the frame at which the attention of each peaks, and their log-probabilities.
    tokens: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    # The model chose the end token first, and `has_text` replaced it.
    is_forced: bool = False
    # The model chose its end token.
    ended: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        if self.keywords is not None:
            self.keyword_state = self.keywords.state_after(self.committed)

    def keyword_states(self) -> Iterator[int]:
        """The keyword state after the committed text, and after each token of the draft."""
        state = self.keyword_state
        yield state
        for token in self.draft:
            if self.keywords is not None:
                state = self.keywords.after(state, token)
            yield state

    def bias(self, choice: DecodedToken, state: int, logits: Tensor) -> DecodedToken:
        """The choice with the bonus of keywords. Its log-probability is without the bonus: that a word is a keyword is
        no evidence that it was spoken."""
        if self.keywords is None:
            return choice
        values = logits.cpu().numpy()
        token = self.keywords.choose(state, values, choice.token)
        lead = float(values[choice.token] - values[token])
        return replace(choice, token=token, log_probability=choice.log_probability - lead)

    def first_token(self, choice: DecodedToken, logits: Tensor, end_token: int) -> DecodedToken:
        """The first token of the text. With `has_text` it is the best one that does not end the text."""
        if not self.has_text or choice.token != end_token:
            return choice
        values = logits.index_fill(0, torch.tensor([end_token], device=logits.device), -inf)
        token = int(values.argmax())
        lead = float(logits[end_token] - logits[token])
        self.is_forced = True
        return replace(choice, token=token, log_probability=choice.log_probability - lead)

    def add_token(self, choice: DecodedToken, end_token: int) -> None:
        """Append a token, or end the text."""
        if choice.token == end_token:
            self.ended = self.done = True
            return
        if self.keywords is not None:
            self.keyword_state = self.keywords.after(self.keyword_state, choice.token)
        peak = choice.peak
        self.tokens.append(choice.token)
        self.peaks.append(peak)
        self.log_probabilities.append(choice.log_probability)
        at_edge = self.stop_frame is not None and peak >= self.stop_frame
        if self.progress.begins_again(peak) or at_edge or len(self.tokens) >= self.max_tokens:
            self.done = True


class DecoderBatch:
    """A batch that is being decoded. `encoded`: its encoder output. `audio_frames` [rows]: number of frames with audio.
    `state`: keys and values of its text. `suppressed`: tokens that are never chosen. `decode`: a traced pass in place
    of `model.decode`."""

    def __init__(
        self,
        model: SpeechModel,
        suppressed: Tensor,
        encoded: Encoded,
        audio_frames: Tensor,
        state: DecoderState,
        decode: Decode | None = None,
    ) -> None:
        self._model = model
        self._decode = decode or model.decode
        self._suppressed = suppressed
        self._encoded = encoded
        self._audio_frames = audio_frames
        self._state = state
        # Logits of the last choices: of the outputs that `read` was asked for, or of every row.
        self.logits: Tensor

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[DecodedToken]:
        """Read known text in one pass (prefill). Returns the choice at each of `places` (row, column). `logits` are
        then those at `places[index]` for the indices in `kept`."""
        return choices_of(self._read(known, places, kept))

    def next_tokens(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        """One more token per row, given each row's last (token, position)."""
        inputs = upload(np.array(last, np.int64), self._suppressed.device)
        return choices_of(self.next(inputs, max(position for _, position in last) + 1))

    def read_more(self, tokens: list[int], position: int) -> list[DecodedToken]:
        """Read more tokens in a batch of one row, from this position on. Returns the choice after each token."""
        device = self._suppressed.device
        positions = torch.arange(position, position + len(tokens), device=device)[None]
        state = self._state.first(position + len(tokens))
        hidden, attention = self._decode(upload(np.array([tokens], np.int64), device), positions, state, self._encoded)
        return choices_of(self._choose(hidden[0], attention[0], self._audio_frames.expand(len(tokens))))

    def next(self, inputs: Tensor, text_tokens: int) -> Tensor:
        """As `next_tokens`, on the device. `inputs` [rows, 2]: tokens and positions. `text_tokens`: length of the
        longest text."""
        hidden, attention = self._decode(inputs[:, :1], inputs[:, 1:], self._state.first(text_tokens), self._encoded)
        return self._choose(hidden[:, 0], attention[:, 0], self._audio_frames)

    def _read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> Tensor:
        device, width = self._suppressed.device, max(map(len, known))
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
        logits.index_fill_(1, self._suppressed, float("-inf"))
        self.logits = logits
        values, tokens = logits.max(dim=-1)
        frames = torch.arange(attention.shape[1], device=attention.device)
        peaks = attention.masked_fill(frames >= audio_frames[:, None], -1.0).argmax(dim=1)
        return torch.stack((tokens.float(), values - logits.logsumexp(dim=-1), peaks.float()))


def choices_of(chosen: Tensor) -> list[DecodedToken]:
    """The result of `_choose` on the host. Waits for the device."""
    return [DecodedToken(int(token), log_probability, int(peak)) for token, log_probability, peak in chosen.T.tolist()]


class GreedyDecoder:
    """Decodes batches of rows on one device. `decode`: a traced pass in place of `model.decode`."""

    def __init__(self, model: SpeechModel, device: torch.device | str = "cpu", decode: Decode | None = None) -> None:
        self._model = model
        self._decode = decode
        self._suppressed = torch.tensor(model.suppressed, dtype=torch.int64, device=device)

    def run(self, rows: list[Row], encoded: Encoded) -> None:
        """Decode the rows to their ends."""
        for _ in self.passes(rows, encoded):
            pass

    def passes(self, rows: list[Row], encoded: Encoded) -> Iterator[None]:
        """Decode, yielding after each pass of the model, so that the caller may interleave other work."""
        audio_frames = upload(np.array([row.frames for row in rows], np.int64), self._suppressed.device)

        def decoder_batch(text_tokens: int) -> DecoderBatch:
            state = self._model.new_state(len(rows), text_tokens)
            return DecoderBatch(self._model, self._suppressed, encoded, audio_frames, state, self._decode)

        return self._passes(rows, decoder_batch)

    def _passes(self, rows: list[Row], decoder_batch_for: Callable[[int], DecoderBatch]) -> Iterator[None]:
        """`decoder_batch_for` makes the batch for the longest text that the rows can reach, in tokens."""
        prefixes = [[*(row.start_tokens or self._model.start_tokens), *row.committed] for row in rows]
        texts = [
            len(prefix) + max(row.max_tokens, len(row.draft)) + 1 for prefix, row in zip(prefixes, rows, strict=True)
        ]
        decoder_batch = decoder_batch_for(max(texts))
        last = self._check_drafts(decoder_batch, rows, prefixes)
        if len(rows) == 1 and rows[0].retries_draft:
            yield from self._decode_along_draft(decoder_batch, rows[0], last[0][1])
        while not all(row.done for row in rows):
            yield
            for index, (row, choice) in enumerate(zip(rows, decoder_batch.next_tokens(last), strict=True)):
                if not row.done:
                    choice = row.bias(choice, row.keyword_state, decoder_batch.logits[index])
                    row.add_token(choice, self._model.end_token)
                    last[index] = (choice.token, last[index][1] + 1)

    def _decode_along_draft(self, decoder_batch: DecoderBatch, row: Row, position: int) -> Iterator[None]:
        """Decode a batch of one row to its end, trying the rest of its draft. `position`: that of the row's last
        token."""
        rest = DraftRest(row.draft)
        for token in row.tokens:
            rest.add_token(token)
        while not row.done:
            yield
            guess = rest.guess()[: row.max_tokens - len(row.tokens) - 1]
            choices = decoder_batch.read_more([row.tokens[-1], *guess], position)
            for number, choice in enumerate(choices):
                choice = row.bias(choice, row.keyword_state, decoder_batch.logits[number])
                row.add_token(choice, self._model.end_token)
                rest.add_token(choice.token)
                position += 1
                # The next choice is valid only if the guess has this token.
                if row.done or guess[number : number + 1] != [choice.token]:
                    break

    def _check_drafts(
        self, decoder_batch: DecoderBatch, rows: list[Row], prefixes: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Read committed texts and drafts, and add the draft tokens that the decoder chooses, too, and one more.
        Returns the last token of each row and its position."""
        known = [prefix + row.draft for prefix, row in zip(prefixes, rows, strict=True)]
        # Only the outputs from the last committed token on are needed: (row, column).
        places = [
            (index, column)
            for index, prefix in enumerate(prefixes)
            for column in range(len(prefix) - 1, len(known[index]))
        ]
        kept = [
            number
            for number, (index, column) in enumerate(places)
            if rows[index].keywords is not None or (rows[index].has_text and column == len(prefixes[index]) - 1)
        ]
        choices = decoder_batch.read(known, places, kept)
        states = [state for row in rows for state in row.keyword_states()]
        for number, logits in zip(kept, decoder_batch.logits, strict=True):
            index, column = places[number]
            choices[number] = rows[index].bias(choices[number], states[number], logits)
            if column == len(prefixes[index]) - 1:
                choices[number] = rows[index].first_token(choices[number], logits, self._model.end_token)
        last: list[tuple[int, int]] = [(0, 0)] * len(rows)
        for (index, column), choice in zip(places, choices, strict=True):
            row, start = rows[index], len(prefixes[index])
            # A choice is valid only if the decoder has chosen every draft token before it. Places are in order, and
            # `row.tokens` grows in this loop.
            agreed = column == start - 1 or (
                len(row.tokens) == column - start + 1 and row.tokens[-1] == known[index][column]
            )
            if row.done or not agreed:
                continue
            row.add_token(choice, self._model.end_token)
            last[index] = (choice.token, column + 1)
        return last


# Detection of language and speech in a window before it is decoded.
#
# Without a given language, the language is detected in the first window that is long enough. Then it stays: otherwise
# one short word that sounds like another language would change the language of the text, and words that were right. To
# change it, a client sets it or opens another stream. While the model is not sure, its best guess is used for one
# utterance, and detection is repeated in the next one.

# Positions of speech needed to detect a language (four seconds), and the probability from which on it stays.
LANGUAGE_POSITIONS = 50
SURE_LANGUAGE = 0.5
# Above this probability of no speech, doubtful words are taken for noise. OpenAI's own threshold.
NO_SPEECH_PROBABILITY = 0.6
# Below this probability of no speech, an utterance that was read to its end is speech. Then its words are accepted down
# to the mean log-probability SPOKEN_DOUBT: short prompts of non-native speakers are often that unsure.
SPEECH_PROBABILITY = 0.3
SPOKEN_DOUBT = -1.5


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the model detected in a window."""

    # Probability that the window has no speech.
    no_speech: float
    # Probability of each of the model's languages, in the order of its options.
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
    # The language was given or detected for sure, and is not detected any more.
    settled: bool = False
    # Probability that the window has no speech, if the model detects that.
    no_speech: float | None = None

    @classmethod
    def of(cls, options: Options, given: Mapping[str, str], prompt: list[int]) -> LanguageState:
        languages = given["languages"].split(",") if "languages" in given else options.languages
        language = given.get("language", "")
        settled = bool(language) or not options.detects_language
        return cls(given.get("task", ""), prompt, languages, language, settled)

    def waits(self, positions: int) -> bool:
        """Whether a growing window of this many positions is still too short to detect its language."""
        return not self.settled and positions < LANGUAGE_POSITIONS

    def update(self, judgement: Judgement, options: Options, positions: int) -> None:
        """Use what was detected in a window of this many positions."""
        self.no_speech = judgement.no_speech
        if self.settled:
            return
        probabilities = dict(zip(options.languages, judgement.languages, strict=True))
        self.language = max(self.languages, key=lambda code: probabilities[code])
        share = probabilities[self.language] / sum(probabilities[code] for code in self.languages)
        self.settled = share >= SURE_LANGUAGE and positions >= LANGUAGE_POSITIONS

    @property
    def finds_no_speech(self) -> bool:
        """Whether the window probably has no speech."""
        return self.no_speech is not None and self.no_speech > NO_SPEECH_PROBABILITY

    def doubt(self, policy: Policy, to_end: bool, is_long: bool) -> float:
        """Mean log-probability below which an utterance is taken for noise. `to_end`: the utterance was read to its
        end. `is_long`: it is long, which noise rarely is; this counts if the model does not detect speech. The
        log-probabilities of a translation say little about the audio, so there is no limit."""
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


# The decoder's pass on a CPU, traced with torch.jit.
#
# For one token of a small model a CPU runs some hundred short operations, and half of the time is Python between them.
# Only one thread at a time can run Python, so streams that are decoded in parallel would wait for each other. A traced
# pass runs the same operations in the same order in torch's own interpreter; the results are the same, bit for bit.

# A decoder pass with tensors as arguments: tokens, positions, (keys, values) of the text, (keys, values, mask of real
# frames) of the audio -> hidden rows, attention.
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
        self, tokens: Tensor, positions: Tensor, text: tuple[Tensor, Tensor], audio: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        keys, values, real = audio
        return self._decode(tokens, positions, DecoderState(*text), Encoded(keys, values, [], real=real))


def _weights_of(layers: list[Int8Linear], number: int) -> list[tuple[str, torch.ScriptObject]]:
    """The 8-bit weights of one inference thread, by their names in a trace."""
    return [(f"weights_{index}", layer.weights_of(number)) for index, layer in enumerate(layers)]


@torch.inference_mode()
def compiled_decode(model: Moonshine | Whisper, threads: int = 1) -> Decode:
    """A traced `SpeechModel.decode` of a model on a CPU whose decoder does not change any more.

    The pass is traced once, for `threads` inference threads. They share its code, and each has its own 8-bit weights of
    the decoder's layers; for the other layers of the model, call `copy_for_thread`. The rest of the model may be
    changed by another thread meanwhile.
    """
    layers = [module for module in model.decoder.modules() if isinstance(module, Int8Linear)]
    # Copies of weights are made on another core while the pass is traced with the weights of the first thread.
    copies = ThreadPoolExecutor(1, "copy weights")
    copying = [copies.submit(copy_for_thread, model.decoder, number) for number in range(1, threads)]
    # Constants of a trace must not need a gradient.
    model.decoder.requires_grad_(False)
    _use_simple_executor()
    traced = _trace(model, layers)
    for done in copying:
        done.result()
    copies.shutdown()
    passes = [_with_weights(traced, _weights_of(layers, number)) for number in range(threads)]

    def decode(tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        real = _all_real(encoded.keys) if encoded.real is None else encoded.real
        decoder_pass = passes[inference_thread.number]
        # Without optimisations: they take longer than a dozen passes, and improve nothing on a CPU.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            hidden, attention = decoder_pass(
                tokens, positions, (state.keys, state.values), (encoded.keys, encoded.values, real)
            )
        return hidden, attention

    return decode


def _use_simple_executor() -> None:
    """Choose torch's simple executor, for all traced models of this process. The default one optimises a pass twice:
    before its first call, and again with the shapes of that call."""
    torch._C._jit_set_profiling_executor(False)


def _with_weights(traced: torch.jit.ScriptModule, weights: list[tuple[str, torch.ScriptObject]]) -> Pass:
    """The traced pass with the weights of another inference thread."""
    module = copy(traced._c)
    for name, value in weights:
        module.setattr(name, value)
    decode: Pass = module._get_method("forward")
    return decode


def _trace(model: Moonshine | Whisper, layers: list[Int8Linear]) -> torch.jit.ScriptModule:
    """Trace a pass with the weights of the first inference thread."""
    shape = model.decoder_shape
    # The trace works for other sizes, too, as long as none of the example's sizes is 1.
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
