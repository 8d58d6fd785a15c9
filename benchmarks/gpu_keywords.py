"""What keywords cost in a recorded step: the choice of a token for many rows, with keyword trees and without.

    python -m benchmarks.gpu_keywords [--rows 512] [--keywords 100 100 500]

Logits are random, of a vocabulary of 131,072 tokens in bf16, as Voxtral Realtime has. Slots have trees of random words
in turns. Both choices are recorded, as the step is; times are those of the device, medians of 30. The recorded choice
is then compared with that of the trees on the host, for every eighth row. With --small it runs on the CPU, unrecorded:
that checks the benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.options import Keyword
from engine.runner.bias import AT_WORD, KeywordTree, Spelling
from engine.runner.bias_tables import BiasTables
from engine.vocabulary import Vocabulary

VOCABULARY = 131_072
LETTERS = "abcdefghij"
STEPS = 12


def random_vocabulary(size: int, draw: random.Random) -> Vocabulary:
    """A tenth of it spells words of ten letters; the rest are pieces that no keyword has."""
    pieces = {" "}
    for start in ("", " "):
        pieces |= {start + "".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(size // 20)}
    spelled = [b"", b"", *(piece.encode() for piece in sorted(pieces))]
    return Vocabulary([*spelled, *(b"\x01%d" % number for number in range(size - len(spelled)))], word_marker=1)


def random_tree(words: int, spelling: Spelling, draw: random.Random) -> KeywordTree:
    return KeywordTree([Keyword("".join(draw.choices(LETTERS, k=draw.randint(5, 11)))) for _ in range(words)], spelling)


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def median_ms(work: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(30 if device.type == "cuda" else 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return float(np.median(times))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--keywords", type=int, nargs="+", default=[100, 100, 500], help="of the slots, in turns")
    parser.add_argument("--small", action="store_true", help="a small vocabulary on the CPU, to check the benchmark")
    options = parser.parse_args(given)
    device, draw = torch.device("cpu" if options.small else "cuda"), random.Random(1)
    vocabulary = random_vocabulary(VOCABULARY // 256 if options.small else VOCABULARY, draw)
    spelling, rows = Spelling(vocabulary), options.rows
    trees = [random_tree(words, spelling, draw) for words in options.keywords]
    tables = BiasTables(rows + 1, spelling, device)
    slots = torch.arange(rows, device=device)
    logits = torch.randn(rows, len(vocabulary.pieces), device=device).bfloat16()
    said = torch.zeros(rows, dtype=torch.int64, device=device)

    def plain() -> None:
        said.copy_(logits.max(dim=-1).indices)

    def favoured() -> None:
        values, tokens = logits.max(dim=-1)
        said.copy_(tables.choose(slots, logits, tokens))
        tables.advance(slots, said)

    choose = recorded(favoured, device)
    print(f"edges of the trees: {', '.join(str(tree.edge_count) for tree in trees)}")
    print(f"choice of {rows} rows: {median_ms(recorded(plain, device), device):.3f} ms without keywords, ", end="")
    print(f"{median_ms(choose, device):.3f} ms with them")
    for slot in range(rows):
        tables.set_tree(slot, trees[slot % len(trees)])
    states, wrong, changed = [AT_WORD] * rows, 0, 0
    for _ in range(STEPS):
        logits.copy_(2.0 * torch.randn(logits.shape, device=device))
        choose()
        values, tokens = logits.float().cpu().numpy(), said.tolist()
        for row in range(0, rows, 8):
            best = int(values[row].argmax())
            expected = trees[row % len(trees)].choose(states[row], values[row], best)
            # Two tokens may tie in bf16.
            wrong += expected != tokens[row] and values[row][expected] != values[row][tokens[row]]
            changed += expected != best
        states = [trees[row % len(trees)].after(states[row], token) for row, token in enumerate(tokens)]
    print(f"against the host: {wrong} differences, {changed} choices changed by keywords")
    return int(wrong > 0 or tables._states[:rows].tolist() != states)


if __name__ == "__main__":
    raise SystemExit(main())
