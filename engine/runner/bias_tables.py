"""Keyword trees of many streams on a device: the choice and the state of each row, without the host.

A step runs while the host does not know yet what the one before it said, so where a stream stands in its tree is kept
on the device, beside the tree. A tree is a row of edges, as many for every slot: from which state, by which token, to
which state, for how much. All of it is read in every step, at fixed places, so that a step can be recorded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.runner.bias import AT_WORD, MAX_EDGES, STAY, KeywordTree, Spelling
from engine.runner.device import upload

# Where edges come from that come from no state of their own: those that lead away from all states, and unused ones.
_ANYWHERE, _NOWHERE = -1, -2
_ROWS = 4
# What a slot holds, and what a step needs of it at the same time: a copy, token numbers of 8 bytes, values and masks.
BYTES_PER_SLOT = _ROWS * MAX_EDGES * 4
BYTES_PER_ROW = BYTES_PER_SLOT + 16 * MAX_EDGES


class BiasTables:
    def __init__(self, slots: int, spelling: Spelling, device: torch.device, edges: int = MAX_EDGES) -> None:
        self._states = torch.full((slots,), AT_WORD, dtype=torch.int64, device=device)
        # By slot: from, token, to, and the bonus, whose bits are those of a float.
        self._edges = torch.full((slots, _ROWS, edges), _NOWHERE, dtype=torch.int32, device=device)
        self._rests = torch.tensor(spelling.rests, device=device)
        self._filled: set[int] = set()

    @property
    def in_use(self) -> bool:
        """Whether any stream has keywords."""
        return bool(self._filled)

    def set_tree(self, slot: int, tree: KeywordTree | None) -> None:
        """A slot belongs to another stream, which has said nothing yet."""
        if slot in self._filled:
            self._edges[slot, 0] = _NOWHERE
            self._filled.remove(slot)
        if tree is not None:
            self._filled.add(slot)
            rows = _rows(tree)
            self._edges[slot, :, : rows.shape[1]] = upload(rows, self._edges.device)
            self.set_state(slot, AT_WORD)

    def set_state(self, slot: int, state: int) -> None:
        self._states[slot] = state

    def choose(self, slots: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """What to say in place of the best `tokens` [rows]; logits [rows, vocabulary]."""
        states = self._states[slots][:, None]
        origins, choices, _, bonuses = self._edges[slots].unbind(dim=1)
        open_edges = (states >= 0) & ((origins == states) | (origins == _ANYWHERE))
        favoured = logits.gather(1, choices.clamp(min=0).long()) + bonuses.view(torch.float32)
        best, edges = favoured.masked_fill(~open_edges, float("-inf")).max(dim=1, keepdim=True)
        return torch.where(best[:, 0] > logits.logsumexp(dim=1), choices.gather(1, edges)[:, 0].long(), tokens)

    def advance(self, slots: Tensor, tokens: Tensor) -> None:
        """Each row has said its token."""
        states = self._states[slots]
        nodes = torch.maximum(states, ~states)
        origins, choices, targets, _ = self._edges[slots].unbind(dim=1)
        said = choices == tokens[:, None]
        # An edge of the state itself goes before one that leads away from everywhere.
        fits = said * (2 * (origins == nodes[:, None]).byte() + (origins == _ANYWHERE).byte())
        found, edges = fits.max(dim=1, keepdim=True)
        rests = self._rests[tokens]
        outside = torch.where(rests >= 0, rests, torch.where(rests == STAY, nodes, ~nodes))
        self._states[slots] = torch.where(found[:, 0] > 0, targets.gather(1, edges)[:, 0].long(), outside)


def _rows(tree: KeywordTree) -> np.ndarray:
    edges = [(_ANYWHERE, token, edge.node, edge.bonus) for token, edge in tree.entries.items()]
    for state, leading in enumerate(tree.edges):
        edges += [(state, token, edge.node, edge.bonus) for token, edge in leading.items()]
    origins, tokens, nodes, bonuses = zip(*edges, strict=True)
    numbers = np.array([origins, tokens, nodes], np.int32)
    return np.vstack((numbers, np.array(bonuses, np.float32).view(np.int32)))
