"""Keyword trees on a device choose the same tokens as on the host, for random words and random logits."""

from __future__ import annotations

import random

import numpy as np
import torch

from engine.options import Keyword
from engine.runner.bias import BiasTables, KeywordTree, TokenIndex
from engine.spec import Vocabulary

BLANK, MARKER = 0, 1


def random_vocabulary(draw: random.Random) -> Vocabulary:
    pieces = {"".join(draw.choices("abc", k=draw.randint(1, 3))) for _ in range(25)} | {"a", "b", "c", " "}
    pieces |= {" " + "".join(draw.choices("abC", k=draw.randint(1, 2))) for _ in range(15)} | {"-", "A"}
    marker = draw.choice((MARKER, None))
    return Vocabulary([b"", b"", *(piece.encode() for piece in sorted(pieces))], marker)


def random_word(draw: random.Random) -> str:
    return " ".join("".join(draw.choices("abcA", k=draw.randint(1, 5))) for _ in range(draw.choice((1, 1, 1, 2))))


def test_random_trees_choose_and_advance_as_on_the_host() -> None:
    draw, changed, waited = random.Random(5), 0, 0
    for _ in range(6):
        vocabulary = random_vocabulary(draw)
        index, count = TokenIndex(vocabulary), len(vocabulary.pieces)
        tables = BiasTables(4, index, torch.device("cpu"), edges=300)
        trees: list[KeywordTree | None] = [None] * 4
        for slot in (0, 1, 3, 3):
            words = [Keyword(random_word(draw), draw.uniform(0.25, 2.5)) for _ in range(draw.randint(1, 12))]
            trees[slot] = KeywordTree(words, index)
            tables.set_tree(slot, trees[slot])
        trees[1] = None
        tables.set_tree(1, None)
        slots, states = torch.tensor([3, 0, 2, 1]), dict.fromkeys(range(4), 0)
        for step in range(25):
            logits = torch.from_numpy(np.random.default_rng(step).normal(0.0, 2.0, (4, count)).astype(np.float32))
            best = logits.argmax(dim=1)
            chosen = tables.choose(slots, logits, best)
            for row, slot in enumerate(slots.tolist()):
                tree, own = trees[slot], int(best[row])
                expected = own if tree is None else tree.choose(states[slot], logits[row].numpy(), own)
                assert chosen[row] == expected
                changed += expected != own
                waited += states[slot] < 0
            # Some tokens are forced.
            given = (BLANK, MARKER, draw.randrange(count))
            said = [draw.choice(given) if draw.random() < 0.3 else int(token) for token in chosen]
            tables.advance(slots, torch.tensor(said))
            for token, slot in zip(said, slots.tolist(), strict=True):
                tree = trees[slot]
                states[slot] = tree.after(states[slot], token) if tree is not None else 0
            known = [tables._states[slot].item() for slot in range(4) if trees[slot] is not None]
            assert known == [states[slot] for slot in range(4) if trees[slot] is not None]
    assert changed > 50 and waited > 10


def test_a_state_can_be_set_for_a_stream_that_goes_on() -> None:
    vocabulary = Vocabulary([b"", b" a", b"b", b"c"])
    tree = KeywordTree([Keyword("ab", 5.0)], TokenIndex(vocabulary))
    tables = BiasTables(2, TokenIndex(vocabulary), torch.device("cpu"))
    tables.set_tree(1, tree)
    tables.set_state(1, tree.state_after([1]))
    logits = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    assert tables.choose(torch.tensor([1]), logits, torch.tensor([3])).tolist() == [2]
    tables.set_tree(1, None)
    assert tables.choose(torch.tensor([1]), logits, torch.tensor([3])).tolist() == [3]
