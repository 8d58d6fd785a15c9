"""Keyword trees of many streams on a device (`BiasTables`): chooses tokens and advances states there, without the host.

`VoxtralRunner` uses it; the trees and the rules of keyword biasing are in `engine/runner/bias.py`. A step is launched
before the host knows the tokens of the step before, so the states are on the device, too. Every slot has a table of
edges of the same size: from state, token, to state, bonus. Each step reads all of it, at fixed addresses, so that a
step can be recorded as a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.runner.bias import AT_WORD, END_WAIT, MAX_EDGES, KeywordTree, TokenIndex
from engine.runner.device import upload

# "From" values of edges that do not start at one state: edges from every state, and unused ones.
_ANYWHERE, _NOWHERE = -1, -2
_EDGE_FIELDS = 4
# Bytes of a slot's table, and bytes that a row of a step needs besides: a copy, 8-byte token numbers, values and masks.
BYTES_PER_SLOT = _EDGE_FIELDS * MAX_EDGES * 4
BYTES_PER_ROW = BYTES_PER_SLOT + 16 * MAX_EDGES


class BiasTables:
    """The states and edge tables of all slots on a device."""

    def __init__(self, slots: int, index: TokenIndex, device: torch.device, edges: int = MAX_EDGES) -> None:
        self._states = torch.full((slots,), AT_WORD, dtype=torch.int64, device=device)
        # By slot: from, token, to, and the bits of the float bonus.
        self._edges = torch.full((slots, _EDGE_FIELDS, edges), _NOWHERE, dtype=torch.int32, device=device)
        self._outside_states = torch.tensor(index.outside_states, device=device)
        self._filled: set[int] = set()

    @property
    def in_use(self) -> bool:
        """Whether any stream has keywords."""
        return bool(self._filled)

    def set_tree(self, slot: int, tree: KeywordTree | None) -> None:
        """Set the keywords of a slot's new stream, which has no text yet."""
        if slot in self._filled:
            self._edges[slot, 0] = _NOWHERE
            self._filled.remove(slot)
        if tree is not None:
            self._filled.add(slot)
            rows = _edge_table(tree)
            self._edges[slot, :, : rows.shape[1]] = upload(rows, self._edges.device)
            self.set_state(slot, AT_WORD)

    def set_state(self, slot: int, state: int) -> None:
        """Set the state of a slot, as of `KeywordTree`."""
        self._states[slot] = state

    def choose(self, slots: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """The tokens to use in place of the best `tokens` [rows]; logits [rows, vocabulary]."""
        states = self._states[slots][:, None]
        origins, choices, _, bonuses = self._edges[slots].unbind(dim=1)
        open_edges = (states >= 0) & ((origins == states) | (origins == _ANYWHERE))
        favoured = logits.gather(1, choices.clamp(min=0).long()) + bonuses.view(torch.float32)
        best, edges = favoured.masked_fill(~open_edges, float("-inf")).max(dim=1, keepdim=True)
        return torch.where(best[:, 0] > logits.logsumexp(dim=1), choices.gather(1, edges)[:, 0].long(), tokens)

    def advance(self, slots: Tensor, tokens: Tensor) -> None:
        """Advance the state of each row by its token."""
        states = self._states[slots]
        nodes = torch.maximum(states, ~states)
        origins, choices, targets, _ = self._edges[slots].unbind(dim=1)
        matches = choices == tokens[:, None]
        # An edge of the state itself takes precedence over one from every state.
        fits = matches * (2 * (origins == nodes[:, None]).byte() + (origins == _ANYWHERE).byte())
        found, edges = fits.max(dim=1, keepdim=True)
        fallback = self._outside_states[tokens]
        outside = torch.where(fallback >= 0, fallback, torch.where(fallback == END_WAIT, nodes, ~nodes))
        self._states[slots] = torch.where(found[:, 0] > 0, targets.gather(1, edges)[:, 0].long(), outside)


def _edge_table(tree: KeywordTree) -> np.ndarray:
    """[4, edges] int32: from, token, to, bits of the bonus."""
    edges = [(_ANYWHERE, token, edge.node, edge.bonus) for token, edge in tree.entries.items()]
    for state, leading in enumerate(tree.edges):
        edges += [(state, token, edge.node, edge.bonus) for token, edge in leading.items()]
    origins, tokens, nodes, bonuses = zip(*edges, strict=True)
    numbers = np.array([origins, tokens, nodes], np.int32)
    return np.vstack((numbers, np.array(bonuses, np.float32).view(np.int32)))
