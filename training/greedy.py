"""What a model says, many rows at a time: the teacher's texts for training, and the texts that evaluation scores."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.moonshine import Moonshine
from engine.models.seq2seq import Encoded, cross_keys_values

# More than anybody says in a second, and what the engine allows.
TOKENS_PER_SECOND = 6.5
_CHECK_EVERY = 8


def token_limit(seconds: float, model: Moonshine) -> int:
    return min(model.max_tokens - 2, int(seconds * TOKENS_PER_SECOND) + 8)


@torch.no_grad()
def greedy_tokens(model: Moonshine, frames: Tensor, lengths: list[int], limits: list[int]) -> list[list[int]]:
    """frames: [batch, frames, width], `lengths` of them real -> the tokens of each row, at most `limits`."""
    keys, values = cross_keys_values(model.cross_kv(frames), model.config.decoder_layers, model.config.heads)
    encoded = Encoded(keys, values, lengths)
    batch, most = len(lengths), max(limits)
    state = model.new_state(batch, most + 1)
    said = torch.full((batch, most), model.end_token, device=frames.device)
    token = torch.full((batch, 1), model.start_tokens[0], device=frames.device)
    last = torch.tensor(limits, device=frames.device)
    done = torch.zeros(batch, dtype=torch.bool, device=frames.device)
    for place in range(most):
        positions = torch.full((batch, 1), place, device=frames.device)
        hidden, _ = model.decode(token, positions, state.first(place + 1), encoded)
        best = model.logits(hidden[:, 0]).argmax(dim=-1)
        done = done | (best == model.end_token) | (place >= last)
        token = torch.where(done, model.end_token, best)[:, None]
        said[:, place] = token[:, 0]
        # Asking the device whether all are done makes it wait, so it is not asked every time.
        if place % _CHECK_EVERY == 0 and bool(done.all()):
            break
    return [[token for token in row if token != model.end_token] for row in said.tolist()]
