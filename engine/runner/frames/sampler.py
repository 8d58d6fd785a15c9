"""Greedy choice with a guard against the blank rut, for a whole batch on the device.

The model can fall into emitting blanks for minutes over real speech. In a rut the blank leads by 3.5 to 6.6, in true
silence by 8.5 and more; so after a long run of blanks the blank's logit is lowered, slowly, to at most 7 below itself:
enough to leave a rut, too little to invent words in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.voxtral_realtime import STREAMING_PAD

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
