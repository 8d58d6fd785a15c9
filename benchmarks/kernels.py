"""Parts of a recorded step alone: attention kernels over launch shapes, and the choice of a token with keywords.

    python -m benchmarks.kernels attention [--shapes 2,2 1,3,4]
    python -m benchmarks.kernels keywords

Attention reads each stream's whole window once, from many layers in turn so that the cache does not help, and prints
microseconds per layer and bytes per second. The choice of a token has random logits of a vocabulary of 131,072 tokens
in bf16, as in Voxtral Realtime, and keyword trees of random words in turn; times with and without trees are medians of
30. All run as CUDA graphs, as in the step. `pytest tests/gpu` checks the results of the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import parser_of, show, with_common_options, write_json
from engine.models.attention import attend_reference
from engine.models.layers import inverse_frequencies, rotary_angles
from engine.models.operands import Heads, KvPages, Span
from engine.models.voxtral_realtime import voxtral_mini_4b
from engine.options import Keyword
from engine.runner.bias import BiasTables, KeywordTree, Spelling
from engine.runner.frames.memory import PAGE_ROWS
from engine.spec import Vocabulary

DTYPE = torch.bfloat16
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


def median_ms(work: Callable[[], object], device: str, times: int) -> float:
    """By the device's own clock."""
    took = []
    for _ in range(times):
        if device == "cpu":
            began = time.perf_counter()
            work()
            took.append(1000 * (time.perf_counter() - began))
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end))
    return statistics.median(took)


# Attention


def stacks(decoder_window: int) -> dict[str, tuple[Heads, int]]:
    """Heads and rows per step of each stack."""
    config = voxtral_mini_4b()
    text = config.text.heads
    return {
        "encoder": (config.audio.heads, 4),
        "decoder": (Heads(text.queries, text.keys, text.dim, decoder_window), 1),
    }


def attention_inputs(
    heads: Heads, rows: int, layers: int, eight_bit: bool, firsts: Tensor
) -> tuple[KvPages, Span, Tensor]:
    """Pages full of random rows, scattered over the pool, and a step's fused projections, for a stream at each of these
    first rows."""
    device, streams = firsts.device, len(firsts)
    ring = -(-(heads.window + rows) // PAGE_ROWS) + 1
    storage = torch.float8_e4m3fn if eight_bit else DTYPE
    pages = KvPages.allocate(layers, streams * ring + 1, PAGE_ROWS, heads, storage, str(device))
    for layer in range(layers):
        noise = torch.randn(pages.data.shape[1:], device=device, dtype=DTYPE)
        if pages.scales is None:
            pages.data[layer] = noise
        else:
            pages.scales[layer] = torch.rand(pages.scales.shape[1:], device=device) * 0.02 + 0.001
            pages.data[layer] = (noise * 100).clamp(-448, 448).to(storage)
    tables = torch.randperm(streams * ring, device=device).view(streams, ring).int()
    numbers = (firsts[:, None] + torch.arange(rows, device=device)).flatten()
    cosine, sine = rotary_angles(numbers, inverse_frequencies(heads.dim, 1e6, str(device)))
    span = Span(tables, torch.randperm(streams, device=device), firsts, rows, cosine, sine)
    return pages, span, torch.randn(streams * rows, heads.fused_width, device=device, dtype=DTYPE)


def time_attention(heads: Heads, rows: int, streams: int, eight_bit: bool, shape: dict[str, int]) -> dict[str, float]:
    row_bytes = 2 * heads.keys * (heads.dim * (1 if eight_bit else 2) + (2 if eight_bit else 0))
    layer_bytes = streams * heads.window * row_bytes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = max(2, min(16, (2 << 30) // layer_bytes)) if device == "cuda" else 1
    firsts = torch.randint(3 * heads.window, 9 * heads.window, (streams,), device=device) // 4 * 4
    pages, span, fused = attention_inputs(heads, rows, layers, eight_bit, firsts)
    query = torch.randn(streams * rows, heads.queries * heads.dim, device=device, dtype=DTYPE)

    if device == "cuda":
        from engine.models import kernels

        work = [partial(kernels.attend_stored, query, layer, pages, span, heads, **shape) for layer in range(layers)]
    else:
        # The kernel needs a GPU; the reference shows that the benchmark runs.
        work = [partial(attend_reference, fused.float(), layer, pages, span, heads) for layer in range(layers)]
    all_layers = recorded(lambda: [attend() for attend in work], device)
    microseconds = 1000 * median_ms(all_layers, device, 7) / layers
    return {"us_per_layer": microseconds, "tb_per_second": layer_bytes / microseconds / 1e6}


def attention(options: argparse.Namespace) -> dict[str, Any]:
    window, counts = (64, [1]) if options.small else (1024, [1, 16, 64, 256])
    fields = ("warps", "stages", "splits")
    shapes = [dict(zip(fields, map(int, shape.split(",")), strict=False)) for shape in options.shapes] or [{}]
    report: dict[str, Any] = {}
    for name, kv, streams, shape in itertools.product(("encoder", "decoder"), ("bf16", "fp8"), counts, shapes):
        heads, rows = stacks(window)[name]
        title = f"{name} {kv} {streams} streams {shape or ''}"
        try:
            report[title] = time_attention(heads, rows, streams, kv == "fp8", shape)
        except Exception as error:  # a shape that needs more shared memory than there is
            report[title] = {"failed": type(error).__name__}
        show(title, report[title])
    return report


# The choice of a token


def random_vocabulary(size: int, draw: random.Random) -> Vocabulary:
    """A vocabulary: a tenth spells words of ten letters, the rest are tokens that no keyword contains."""
    pieces = {" "}
    for start in ("", " "):
        pieces |= {start + "".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(size // 20)}
    spelled = [b"", b"", *(piece.encode() for piece in sorted(pieces))]
    return Vocabulary([*spelled, *(b"\x01%d" % number for number in range(size - len(spelled)))], word_marker=1)


class KeywordChoice:
    """A recorded choice of a token for many rows, whose slots get trees of random words in turns."""

    def __init__(self, rows: int, keywords: list[int], device: str, vocabulary_size: int = VOCABULARY) -> None:
        draw = random.Random(1)
        vocabulary = random_vocabulary(vocabulary_size, draw)
        spelling = Spelling(vocabulary)
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


def keywords(options: argparse.Namespace) -> dict[str, Any]:
    device, times = ("cpu", 1) if options.small else ("cuda", 30)
    if options.small:
        choice = KeywordChoice(8, [5, 9], device, VOCABULARY // 256)
    else:
        choice = KeywordChoice(512, [100, 100, 500], device)
    report = {
        "rows": len(choice.tokens),
        "edges_of_trees": [tree.edge_count for tree in choice.trees],
        "ms_without_keywords": median_ms(choice.choose_plainly, device, times),
        "ms_with_keywords": median_ms(choice.choose, device, times),
    }
    show("Choice of a token", report)
    return report


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    one = with_common_options(commands.add_parser("attention"))
    one.add_argument("--shapes", nargs="*", default=[], metavar="WARPS,STAGES[,SPLITS]")
    with_common_options(commands.add_parser("keywords"))
    options = parser.parse_args(arguments)
    if options.small:
        torch.set_num_threads(1)
    write_json(options, {"attention": attention, "keywords": keywords}[options.what](options))


if __name__ == "__main__":
    main()
