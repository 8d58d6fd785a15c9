"""Paged attention: equal to dense attention over the true window, however pages are laid out and rows are chunked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models.layers import (
    FP8_MAX,
    Heads,
    KvPages,
    Span,
    attend_reference,
    inverse_frequencies,
    pack,
    rotary_angles,
    rotate,
    unpack,
)

HEADS = Heads(query_heads=4, kv_heads=2, dim=8, window=13)
PAGE_ROWS = 4
RING_PAGES = 5
THETA = 100.0


def dense(fused: Tensor, heads: Heads) -> Tensor:
    """All rows of one stream from row 0 at once, in float64, without pages."""
    count = fused.shape[0]
    cosine, sine = rotary_angles(torch.arange(count), inverse_frequencies(heads.dim, THETA, "cpu"))
    by_head = fused.double().view(count, -1, heads.dim)
    query, key = (
        rotate(part, cosine.double(), sine.double()).double()
        for part in (
            by_head[:, : heads.query_heads],
            by_head[:, heads.query_heads : heads.query_heads + heads.kv_heads],
        )
    )
    value = by_head[:, heads.query_heads + heads.kv_heads :]
    group = heads.query_heads // heads.kv_heads
    out = torch.zeros(count, heads.query_heads, heads.dim, dtype=torch.float64)
    for row in range(count):
        low = max(0, row - heads.window + 1)
        for head in range(heads.query_heads):
            scores = key[low : row + 1, head // group] @ query[row, head] / math.sqrt(heads.dim)
            out[row, head] = scores.softmax(0) @ value[low : row + 1, head // group]
    return out.flatten(1)


def run(fused: Tensor, chunks: list[int], pages: KvPages, tables: Tensor, slot: int, start: int = 0) -> Tensor:
    out = []
    frequencies = inverse_frequencies(HEADS.dim, THETA, "cpu")
    for size in chunks:
        cosine, sine = rotary_angles(torch.arange(start, start + size), frequencies)
        span = Span(tables, torch.tensor([slot]), torch.tensor([start]), size, cosine, sine)
        out.append(attend_reference(fused[start : start + size], 0, pages, span, HEADS))
        start += size
    return torch.cat(out)


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, HEADS.fused_width, generator=torch.Generator().manual_seed(seed))


def new_pages(dtype: torch.dtype = torch.float32) -> tuple[KvPages, Tensor]:
    tables = torch.randperm(3 * RING_PAGES, generator=torch.Generator().manual_seed(9)).view(3, RING_PAGES).int()
    return KvPages.allocate(1, 3 * RING_PAGES, PAGE_ROWS, HEADS, dtype, "cpu"), tables


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=14), st.integers(0, 99))
def test_any_chunking_equals_dense_attention(chunks: list[int], seed: int) -> None:
    pages, tables = new_pages()
    fused = rows(sum(chunks), seed)
    assert (run(fused, chunks, pages, tables, slot=1) - dense(fused, HEADS)).abs().max() < 1e-5


def test_a_chunk_longer_than_the_ring() -> None:
    pages, tables = new_pages()
    fused = rows(70, 1)
    out = run(fused, [3, 60, 1, 1, 5], pages, tables, slot=2)
    assert (out - dense(fused, HEADS)).abs().max() < 1e-5


def test_leftovers_of_another_stream_do_not_leak_in() -> None:
    """A page that comes from a stream full of NaN must not spoil its next owner."""
    pages, tables = new_pages()
    pages.data.fill_(float("nan"))
    fused = rows(30, 4)
    assert (run(fused, [1] * 30, pages, tables, slot=0) - dense(fused, HEADS)).abs().max() < 1e-5


def test_streams_of_different_ages_in_one_batch() -> None:
    pages, tables = new_pages()
    ages = [0, 7, 40]
    fused = [rows(age + 2, 20 + age) for age in ages]
    for slot, age in enumerate(ages):
        if age:
            run(fused[slot], [age], pages, tables, slot)
    first = torch.tensor(ages)
    numbers = (first[:, None] + torch.arange(2)).flatten()
    cosine, sine = rotary_angles(numbers, inverse_frequencies(HEADS.dim, THETA, "cpu"))
    span = Span(tables, torch.arange(3), first, 2, cosine, sine)
    both = attend_reference(torch.cat([part[-2:] for part in fused]), 0, pages, span, HEADS)
    for slot in range(3):
        assert (both[2 * slot : 2 * slot + 2] - dense(fused[slot], HEADS)[-2:]).abs().max() < 1e-5


def test_eight_bit_storage_is_close_and_independent_of_chunking() -> None:
    fused = rows(50, 5)
    results = []
    for chunks in ([50], [1] * 50, [7] * 7 + [1]):
        pages, tables = new_pages(torch.float8_e4m3fn)
        results.append(run(fused, chunks, pages, tables, slot=1))
    wanted = dense(fused, HEADS)
    assert (results[0] - wanted).norm() / wanted.norm() < 0.05
    for other in results[1:]:
        assert (other - results[0]).abs().max() < 1e-5


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 3e4])
def test_eight_bit_rounding_is_bounded_at_every_scale(scale: float) -> None:
    pages = KvPages.allocate(1, 1, PAGE_ROWS, HEADS, torch.float8_e4m3fn, "cpu")
    values = torch.randn(200, 2, 2, 8, generator=torch.Generator().manual_seed(6)) * scale
    stored, scales = pack(values, pages)
    back = unpack(stored, scales, torch.float32)
    assert back.isfinite().all()
    # Half a step of a 3-bit mantissa, and of the smallest subnormal next to the row's largest value.
    largest = values.abs().amax(-1, keepdim=True)
    bound = values.abs() / 16 * 1.01 + largest / FP8_MAX * 2**-9 + 1e-6
    assert ((back - values).abs() <= bound).all()
