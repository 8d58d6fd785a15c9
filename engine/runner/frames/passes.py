"""Greedy choice with a guard against the blank rut, for a whole batch on the device.

The model can fall into emitting blanks for minutes over real speech. In a rut the blank leads by 3.5 to 6.6, in true
silence by 8.5 and more; so after a long run of blanks the blank's logit is lowered, slowly, to at most 7 below itself:
enough to leave a rut, too little to invent words in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.models.voxtral_realtime import BOS, MAX_DELAY_POSITIONS, STREAMING_PAD, VoxtralRealtime
from engine.runner.bias import BiasTables
from engine.runner.device import upload
from engine.runner.frames.batch import NOT_FORCED, EncoderSlab, SlotState, StepBuffers
from engine.runner.frames.memory import StackCache

GUARD_AFTER_BLANKS = 200
GUARD_STEP = 0.5
GUARD_MOST = 7.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Per stream: the token, whether the logits were broken, and whether the guard changed the outcome."""

    tokens: Tensor
    failed: Tensor
    guarded: Tensor


def choose(logits: Tensor, blank_runs: Tensor, guard: bool) -> Choice:
    """logits [streams, vocabulary] (the blank's column may be changed in place), blank_runs [streams]."""
    blank = logits[:, STREAMING_PAD].clone()
    if guard:
        penalty = (GUARD_STEP * (blank_runs - GUARD_AFTER_BLANKS)).clamp(0.0, GUARD_MOST)
        logits[:, STREAMING_PAD] -= penalty.to(logits.dtype)
    best, tokens = logits.max(dim=-1)
    guarded = (tokens != STREAMING_PAD) & (blank > best)
    # max() returns NaN when any logit is NaN; -inf means that no logit was finite.
    return Choice(tokens, ~best.isfinite(), guarded)


def next_blank_runs(blank_runs: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Blanks in a row. Positions before the delay has passed (`chosen` is False) do not count."""
    longer = torch.where(tokens == STREAMING_PAD, blank_runs + 1, torch.zeros_like(blank_runs))
    return torch.where(chosen, longer, blank_runs)


# The passes over the model: one position of many streams, a chunk of one stream, and the openings all streams share.
#
# A batched pass reads and writes fixed places only, so that it can be recorded as a CUDA graph.


class ModelPasses:
    def __init__(
        self,
        model: VoxtralRealtime,
        encoder: StackCache,
        decoder: StackCache,
        slab: EncoderSlab,
        state: SlotState,
        buffers: StepBuffers,
        bias: BiasTables,
        prefix_positions: int,
        blank_guard: bool,
        recorded: bool,
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._decoder = decoder
        self._slab = slab
        self._state = state
        self._buffers = buffers
        self._bias = bias
        # A recording is made once, for streams with keywords and without.
        self._recorded = recorded
        self._prefix = prefix_positions
        self._guard = blank_guard
        self._kernels = model.device.type == "cuda"

    def batch(self, size: int) -> None:
        """One position of each stream in the buffers, `size` rows with the padding; results go to the buffers."""
        state, model = self._state, self._model
        slots, positions, inputs, forced, targets = self._buffers.numbers(size)
        self._slab.rows.index_copy_(0, targets, model.stem_rows(self._buffers.samples[:size]))
        delays = state.delays[slots]
        hidden = self._forward(slots, positions, 1, inputs, state.tokens[slots], delays, self._kernels)
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

    def chunk(self, slot: int, position: int, inputs: list[int], tokens: list[int], delay: int) -> Tensor:
        """Positions of one stream whose tokens are known: `tokens[i]` is what position `position + i` is fed.

        Returns the last hidden rows, [positions, width].
        """
        numbers = upload(np.array([inputs, tokens], dtype=np.int64), self._model.device)
        where = upload(np.array([slot, position], dtype=np.int64), self._model.device)
        delays = torch.full_like(numbers[0], delay)
        return self._forward(where[:1], where[1:], len(inputs), numbers[0], numbers[1], delays, use_kernels=False)

    def openings(self) -> None:
        """Keys and values of the silence before every stream, for each delay. The encoder does not know the delay."""
        model, positions, count = self._model, self._prefix, MAX_DELAY_POSITIONS
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
        use_kernels: bool,
    ) -> Tensor:
        """`count` positions of each stream -> the decoder's last hidden rows, [streams * count, width]."""
        model = self._model
        attention = self._encoder.attention(slots, positions, count, model.audio_frequencies, use_kernels)
        audio = model.encode(self._slab.rows[inputs], attention)
        attention = self._decoder.attention(slots, positions, count, model.text_frequencies, use_kernels)
        return model.decode(audio, tokens, delays, attention)
