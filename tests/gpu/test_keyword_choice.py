"""The choice of a token with keyword trees on a device is that of the trees on the host.

`pytest tests/gpu/test_keyword_choice.py -rP` prints what the recorded choice takes for 512 rows on a GPU, with and
without keywords. The vocabulary has 131,072 tokens, as that of Voxtral Realtime, and logits are random.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.options import Keyword
from engine.runner.bias import AT_WORD, BiasTables, KeywordTree, TokenIndex
from engine.spec import Vocabulary

VOCABULARY = 131_072
LETTERS = "abcdefghij"


def recorded(work: Callable[[], object], device: str) -> Callable[[], object]:
    if device == "cpu":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def random_vocabulary(size: int, draw: random.Random) -> Vocabulary:
    """A vocabulary: a tenth spells words of ten letters, the rest are tokens that no keyword contains."""
    pieces = {" "}
    for start in ("", " "):
        pieces |= {start + "".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(size // 20)}
    spelled = [b"", b"", *(piece.encode() for piece in sorted(pieces))]
    return Vocabulary([*spelled, *(b"\x01%d" % number for number in range(size - len(spelled)))], word_marker=1)


class KeywordChoice:
    """A recorded choice of a token for many rows, whose slots get trees of random words in turns."""

    def __init__(self, rows: int, keywords: list[int], device: str, vocabulary_size: int) -> None:
        draw = random.Random(1)
        vocabulary = random_vocabulary(vocabulary_size, draw)
        spelling = TokenIndex(vocabulary)
        words = [["".join(draw.choices(LETTERS, k=draw.randint(5, 11))) for _ in range(count)] for count in keywords]
        self.trees = [KeywordTree([Keyword(word) for word in group], spelling) for group in words]
        self.tables = BiasTables(rows + 1, spelling, torch.device(device))
        self.logits = torch.randn(rows, len(vocabulary.pieces), device=device).bfloat16()
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, device=device)
        self.choose = recorded(self._choose, device)
        self.choose_plainly = recorded(self._choose_plainly, device)
        for slot in range(rows):
            self.tables.set_tree(slot, self.trees[slot % len(self.trees)])

    def _choose_plainly(self) -> None:
        self.tokens.copy_(self.logits.max(dim=-1).indices)

    def _choose(self) -> None:
        self.tokens.copy_(self.tables.choose(self._slots, self.logits, self.logits.max(dim=-1).indices))
        self.tables.advance(self._slots, self.tokens)


def compare_choices(choice: KeywordChoice, steps: int = 12) -> int:
    """The choice on the device, step after step, against that of the trees on the host, for every eighth row. Returns
    how many of them keywords changed."""
    rows, trees, marker = len(choice.tokens), choice.trees, 1
    states, changed, draw = [AT_WORD] * rows, 0, random.Random(2)
    for _ in range(steps):
        choice.logits.copy_(2.0 * torch.randn(choice.logits.shape, device=choice.logits.device))
        # The marker of a word is likeliest, and the beginning of a keyword a little less.
        begins = [draw.choice(list(trees[row % len(trees)].entries)) for row in range(rows)]
        choice.logits[range(rows), begins] = 30.0
        choice.logits[:, marker] = 30.25
        choice.choose()
        values, tokens = choice.logits.float().cpu().numpy(), choice.tokens.tolist()
        for row in range(0, rows, 8):
            best = int(values[row].argmax())
            expected = trees[row % len(trees)].choose(states[row], values[row], best)
            # Two tokens may tie in bf16.
            assert expected == tokens[row] or values[row][expected] == values[row][tokens[row]]
            changed += expected != best
        states = [trees[row % len(trees)].after(states[row], token) for row, token in enumerate(tokens)]
    assert choice.tables._states[:rows].tolist() == states
    return changed


@torch.inference_mode()
def test_keywords_change_a_choice_on_the_cpu_as_the_host_would() -> None:
    assert compare_choices(KeywordChoice(64, [20, 40], "cpu", VOCABULARY // 16)) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_keywords_change_a_recorded_choice_as_the_host_would() -> None:
    from benchmarks.engine_capacity import device_ms

    choice = KeywordChoice(512, [100, 100, 500], "cuda", VOCABULARY)
    assert compare_choices(choice) > 100
    print(f"without keywords {device_ms(choice.choose_plainly, 30):.2f} ms")
    print(f"with keywords {device_ms(choice.choose, 30):.2f} ms")
