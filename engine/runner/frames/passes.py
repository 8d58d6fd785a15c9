"""Forward passes of `VoxtralRunner` (`ModelPasses`): one position of many streams, chunks of known tokens, openings.

A part of the frame-synchronous runner, which decides what a pass contains. Chunks serve rebuilt streams; an opening is
the silence before every stream. Tokens are chosen greedily, with a guard against endless blanks. The model can emit
blanks for minutes over real speech. The blank's logit then leads by 3.5 to 6.6, in true silence by 8.5 and more. So
after a long run of blanks its logit is lowered step by step, by at most 7: enough to return to words in speech, too
little to invent words in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.plan import SILENCE_ROW
from engine.models.voxtral_realtime import BOS, MAX_DELAY_POSITIONS, STREAMING_PAD, VoxtralRealtime
from engine.runner.bias import BiasTables
from engine.runner.device import upload
from engine.runner.frames.batch import NOT_FORCED, EncoderInputs, SlotState, StepBuffers
from engine.runner.frames.memory import StackCache

GUARD_AFTER_BLANKS = 200
GUARD_STEP = 0.5
GUARD_MOST = 7.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Per stream: the token, whether the logits were not finite, and whether the guard changed the token."""

    tokens: Tensor
    failed: Tensor
    guarded: Tensor


def choose(logits: Tensor, blank_runs: Tensor, guard: bool) -> Choice:
    """Choose a token per stream from logits [streams, vocabulary] and blank_runs [streams]; may change the blank's
    column in place."""
    blank = logits[:, STREAMING_PAD].clone()
    if guard:
        penalty = (GUARD_STEP * (blank_runs - GUARD_AFTER_BLANKS)).clamp(0.0, GUARD_MOST)
        logits[:, STREAMING_PAD] -= penalty.to(logits.dtype)
    best, tokens = logits.max(dim=-1)
    guarded = (tokens != STREAMING_PAD) & (blank > best)
    # max() returns NaN when any logit is NaN; -inf means that no logit was finite.
    return Choice(tokens, ~best.isfinite(), guarded)


def next_blank_runs(blank_runs: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Return the new numbers of consecutive blanks. Positions within the delay (`chosen` is False) do not count."""
    longer = torch.where(tokens == STREAMING_PAD, blank_runs + 1, torch.zeros_like(blank_runs))
    return torch.where(chosen, longer, blank_runs)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive positions of one stream with known tokens: `tokens[i]` is the input token of `position + i`, and row
    `inputs[i]` is its encoder input."""

    slot: int
    position: int
    inputs: Sequence[int]
    tokens: Sequence[int]
    delay: int


class ChunkBuffers:
    """Fixed buffers for the chunks of a pass, all of one length, so that a recorded graph can read and write them."""

    def __init__(self, length: int, streams: int, padding_slot: int, device: torch.device) -> None:
        self.length, self.streams = length, streams
        self._padding = Chunk(padding_slot, 0, [SILENCE_ROW] * length, [STREAMING_PAD] * length, 1)
        self._where = torch.zeros(2, streams, dtype=torch.int64, device=device)
        self._rows = torch.zeros(3, streams * length, dtype=torch.int64, device=device)
        self.upload([])
        # Written by every pass: when it has been downloaded, the pass is over.
        self.done = torch.zeros(1, device=device)

    def upload(self, chunks: Sequence[Chunk]) -> None:
        where, rows = _numbers([*chunks, *[self._padding] * (self.streams - len(chunks))])
        self._where.copy_(upload(where, self._where.device))
        self._rows.copy_(upload(rows, self._rows.device))

    def inputs_of_pass(self, streams: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Slots and positions of the first `streams` chunks; input rows, tokens and delays of their positions."""
        slots, positions = self._where[:, :streams].unbind()
        inputs, tokens, delays = self._rows[:, : streams * self.length].unbind()
        return slots, positions, inputs, tokens, delays


def _numbers(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slot and position of each chunk; input row, token and delay of each position."""
    count = len(chunks[0].inputs)
    where = np.array([[chunk.slot, chunk.position] for chunk in chunks], dtype=np.int64).T
    rows = np.array([[chunk.inputs, chunk.tokens, [chunk.delay] * count] for chunk in chunks], dtype=np.int64)
    return where, rows.transpose(1, 0, 2).reshape(3, -1)


class ModelPasses:
    """Runs the model over the caches. `batch` and `recorded_chunks` read and write fixed buffers only, so that they can
    be recorded as CUDA graphs."""

    def __init__(
        self,
        model: VoxtralRealtime,
        encoder: StackCache,
        decoder: StackCache,
        encoder_inputs: EncoderInputs,
        state: SlotState,
        buffers: StepBuffers,
        bias: BiasTables,
        prefix_positions: int,
        blank_guard: bool,
        recorded: bool,
    ) -> None:
        self.model = model
        self._encoder = encoder
        self._decoder = decoder
        self._encoder_inputs = encoder_inputs
        self._state = state
        self._buffers = buffers
        self._bias = bias
        # A recorded graph must serve streams with keywords and without.
        self._recorded = recorded
        self._prefix = prefix_positions
        self._guard = blank_guard
        self._kernels = model.device.type == "cuda"

    def batch(self, size: int) -> None:
        """Compute one position of each stream in the buffers, `size` rows with padding, and store the results there."""
        state, model = self._state, self.model
        slots, positions, inputs, forced, targets = self._buffers.inputs_of_pass(size)
        self._encoder_inputs.rows.index_copy_(0, targets, model.stem_rows(self._buffers.samples[:size]))
        delays = state.delays[slots]
        hidden = self._forward(slots, positions, 1, inputs, state.tokens[slots], delays)
        logits = model.logits(hidden)
        choice = choose(logits, state.blank_runs[slots], self._guard)
        tokens, biased = choice.tokens, self._recorded or self._bias.in_use
        if biased:
            tokens = self._bias.choose(slots, logits, tokens)
        tokens = torch.where(forced == NOT_FORCED, tokens, forced)
        if biased:
            self._bias.advance(slots, tokens)
        chosen = positions >= self._prefix + delays
        state.blank_runs[slots] = next_blank_runs(state.blank_runs[slots], tokens, chosen)
        state.tokens[slots] = tokens
        guarded = choice.guarded & (forced == NOT_FORCED)
        self._buffers.results[:, :size] = torch.stack([tokens, choice.failed.long(), guarded.long()])

    def chunks(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute chunks of equal length in one pass; returns the last hidden rows, [streams * positions, width]."""
        device, count = self.model.device, len(chunks[0].inputs)
        where, rows = _numbers(chunks)
        slots, positions = upload(where, device)
        inputs, tokens, delays = upload(rows, device)
        return self._forward(slots, positions, count, inputs, tokens, delays)

    def recorded_chunks(self, buffers: ChunkBuffers, streams: int) -> None:
        """Compute the chunks in the buffers, with the padding."""
        slots, positions, inputs, tokens, delays = buffers.inputs_of_pass(streams)
        hidden = self._forward(slots, positions, buffers.length, inputs, tokens, delays)
        buffers.done.copy_(hidden[0, :1])

    def openings(self) -> None:
        """Compute the keys and values of the silence before every stream, for each delay; the encoder's do not depend
        on the delay."""
        model, positions, count = self.model, self._prefix, MAX_DELAY_POSITIONS
        delays = torch.arange(1, count + 1, device=model.device)
        attention = self._encoder.opening_attention(torch.zeros_like(delays[:1]), positions, model.audio_frequencies)
        audio = model.encode(model.opening_rows(positions), attention)
        tokens = torch.full((positions,), STREAMING_PAD, dtype=torch.int64, device=model.device)
        tokens[0] = BOS
        attention = self._decoder.opening_attention(delays - 1, positions, model.text_frequencies)
        model.decode(audio.repeat(count, 1), tokens.repeat(count), delays.repeat_interleave(positions), attention)

    def _forward(
        self,
        slots: Tensor,
        positions: Tensor,
        count: int,
        inputs: Tensor,
        tokens: Tensor,
        delays: Tensor,
    ) -> Tensor:
        """Compute `count` positions of each stream; returns the decoder's last hidden rows [streams * count, width]."""
        model = self.model
        attention = self._encoder.attention(slots, positions, count, model.audio_frequencies, self._kernels)
        audio = model.encode(self._encoder_inputs.rows[inputs], attention)
        attention = self._decoder.attention(slots, positions, count, model.text_frequencies, self._kernels)
        return model.decode(audio, tokens, delays, attention)
