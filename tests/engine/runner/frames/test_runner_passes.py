"""Greedy choice and the guard against the blank rut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.frames.runner import (
    CHUNK_PASS_MS,
    MOST_CHUNKS,
    choose,
    chunk_passes,
    next_blank_runs,
)

PAD = 32


def logits(lead: float, streams: int = 1) -> torch.Tensor:
    """A blank that leads token 40 by `lead`."""
    rows = torch.zeros(streams, 64)
    rows[:, 40] = 5.0
    rows[:, PAD] = 5.0 + lead
    return rows


def test_broken_logits_are_marked_by_stream() -> None:
    rows = logits(1.0, 4)
    rows[1, 7] = float("nan")
    rows[2] = float("-inf")
    rows[3, 3] = float("inf")
    assert choose(rows, torch.zeros(4), guard=True).failed.tolist() == [False, True, True, True]


def test_no_guard_before_a_long_run_of_blanks() -> None:
    choice = choose(logits(0.1), torch.tensor([200]), guard=True)
    assert choice.tokens.tolist() == [PAD]
    assert not choice.guarded.any()


def test_a_rut_is_left_and_silence_is_not() -> None:
    runs = torch.full((1,), 10_000)
    assert choose(logits(6.6), runs, guard=True).tokens.tolist() == [40]
    assert choose(logits(8.5), runs, guard=True).tokens.tolist() == [PAD]


def test_the_guard_grows_by_half_a_point_per_blank() -> None:
    for run, token in ((206, PAD), (207, 40)):
        choice = choose(logits(3.2), torch.tensor([run]), guard=True)
        assert choice.tokens.tolist() == [token]
        assert choice.guarded.tolist() == [token == 40]


def test_the_guard_is_off_by_a_switch() -> None:
    choice = choose(logits(3.2), torch.full((1,), 10_000), guard=False)
    assert choice.tokens.tolist() == [PAD]
    assert not choice.guarded.any()


def test_a_word_without_the_guards_help_is_not_counted() -> None:
    assert not choose(logits(-1.0), torch.full((1,), 10_000), guard=True).guarded.any()


def test_runs_count_blanks_that_the_model_chose() -> None:
    runs, tokens = torch.tensor([5, 5, 5]), torch.tensor([PAD, 40, PAD])
    assert next_blank_runs(runs, tokens, torch.tensor([True, True, False])).tolist() == [6, 0, 5]


@given(
    chunks=st.one_of(st.lists(st.integers(0, 4), max_size=300), st.lists(st.just(4), max_size=300)),
    most=st.sampled_from(list(CHUNK_PASS_MS)),
)
def test_passes_have_each_chunk_once_and_take_no_longer_than_one_round_after_the_other(
    chunks: list[int], most: int
) -> None:
    passes = list(chunk_passes(chunks, most))
    assert all(0 < len(part) <= most and len(set(part)) == len(part) for part in passes)
    assert [sum(part.count(index) for part in passes) for index in range(len(chunks))] == chunks
    rounds = [sum(count > done for count in chunks) for done in range(max(chunks, default=0))]
    in_rounds = [min(most, count - start) for count in rounds for start in range(0, count, most)]
    assert time_of(len(part) for part in passes) <= 1.2 * time_of(in_rounds)


@pytest.mark.parametrize(
    ("streams", "sizes"), [(37, [32] * 4 + [16, 4]), (17, [16] * 4 + [4]), (24, [24] * 4), (30, [32] * 4), (3, [4] * 4)]
)
def test_a_few_streams_more_than_a_full_pass_do_not_double_the_passes(streams: int, sizes: list[int]) -> None:
    passes = chunk_passes([4] * streams, MOST_CHUNKS)
    assert [recorded_chunks(len(part)) for part in passes] == sizes


def time_of(counts: Iterable[int]) -> float:
    return sum(CHUNK_PASS_MS[recorded_chunks(count)] for count in counts)


def recorded_chunks(count: int) -> int:
    return min(size for size in CHUNK_PASS_MS if size >= count)
