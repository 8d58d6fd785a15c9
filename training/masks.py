"""Which frames see which, when a whole utterance goes through the encoder at once.

The frames a block looks ahead to are appended as copies, one set for each block, at their true positions: a copy sees
what its block sees, and is seen by its block alone. So one masked pass gives what block after block gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """frames: how many are real; positions: [count] of these and the copies behind them; mask: [count, count], True
    where the row's frame sees the column's; looking: [copies] the number of the block that looks ahead to a copy."""

    frames: int
    positions: Tensor
    mask: Tensor
    looking: Tensor

    @property
    def ahead(self) -> Tensor:
        """[copies]: the frames they are copies of."""
        return self.positions[self.frames :]


def block_plan(frames: int, block: int, look_ahead: int, left: int, device: torch.device | str) -> BlockPlan:
    own = torch.arange(frames, device=device)
    starts = torch.arange(0, frames, block, device=device)
    ahead = starts[:, None] + block + torch.arange(look_ahead, device=device)  # [blocks, look_ahead]
    there = ahead < frames
    starts_of_copies = starts[:, None].expand_as(ahead)[there]
    positions = torch.cat((own, ahead[there]))
    block_starts = torch.cat((own - own % block, starts_of_copies))  # [count]: where each frame's block begins
    is_copy = torch.arange(len(positions), device=device) >= frames
    same_block = block_starts[:, None] == block_starts
    in_reach = (positions < block_starts[:, None] + block) & (positions >= block_starts[:, None] - left)
    return BlockPlan(frames, positions, torch.where(is_copy, same_block, in_reach), starts_of_copies // block)
