"""Ring tables and shared openings on the device; batch buffers and their padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.runner.frames.memory import PAGE_ROWS, StackCache, stack_layouts
from engine.runner.frames.runner import NOT_FORCED, Payloads, SlotState, StepBuffers, StepOutcome, StepRows, outcome_of
from tests.engine.runner.frames.voxtral_driver import SMALL

CPU = torch.device("cpu")


def decoder_cache(streams: int = 3, openings: int = 2) -> StackCache:
    layout = stack_layouts(SMALL, 64, torch.float32)[1]
    pages = streams * layout.group.ring_pages
    return StackCache(layout, pages, streams, openings, 32, torch.float32, CPU)


@pytest.mark.parametrize("window", [0, 65])
def test_a_window_the_model_was_not_trained_for(window: int) -> None:
    with pytest.raises(ValueError, match="choose 1 to 64"):
        stack_layouts(SMALL, window, torch.float32)


def test_a_page_holds_the_same_number_of_rows_in_both_stacks() -> None:
    encoder, decoder = stack_layouts(SMALL, 24, torch.float32)
    assert encoder.page_rows == decoder.page_rows == PAGE_ROWS
    assert encoder.group.page_positions * 4 == decoder.group.page_positions


def test_table_entries_change_by_deltas() -> None:
    cache = decoder_cache()
    before = cache.table.clone()
    cache.update_table([])
    assert torch.equal(cache.table, before)
    cache.update_table([(0, 0, 5), (2, 1, 4)])
    changed = (cache.table != before).nonzero().tolist()
    assert changed == [[0, 0], [2, 1]]
    assert np.array_equal(cache.table.numpy(), cache.host_table)


def test_no_stream_shares_a_page_with_padding_or_openings() -> None:
    cache = decoder_cache()
    handed_out = range(3 * cache.layout.group.ring_pages)
    reserved = set(cache.host_table[cache.padding_slot :].flatten().tolist())
    assert not reserved & set(handed_out)
    assert max(reserved) < cache.pages.data.shape[1]


def test_opening_pages_are_copied_into_the_streams_pages() -> None:
    cache = decoder_cache()
    cache.pages.data.copy_(torch.randn(cache.pages.data.shape, generator=torch.Generator().manual_seed(1)))
    before = cache.pages.data.clone()
    cache.update_table([(0, 0, 3), (1, 0, 1), (2, 0, 5)])
    cache.open_streams([0, 1, 1], [0, 1, 2])
    sources = cache.host_table[[cache.opening_slot, cache.opening_slot + 1, cache.opening_slot + 1], 0].tolist()
    for source, target in zip(sources, (3, 1, 5), strict=True):
        assert torch.equal(cache.pages.data[:, target], before[:, source])
    untouched = [page for page in range(before.shape[1]) if page not in (3, 1, 5)]
    assert torch.equal(cache.pages.data[:, untouched], before[:, untouched])


def test_empty_rows_go_to_the_padding_slot_and_the_spare_row() -> None:
    buffers = StepBuffers(capacity=4, payload_samples=3, padding_slot=9, spare_row=77, device=CPU)
    samples = np.arange(3, dtype=np.float32)
    buffers.upload(StepRows([2, 5], [100, 200], [6, 7], [NOT_FORCED, 32]), Payloads([11], [samples]))
    slots, positions, inputs, forced, targets = (line.tolist() for line in buffers.inputs_of_pass(4))
    assert slots == [2, 5, 9, 9]
    assert positions == [100, 200, 0, 0]
    assert inputs == [6, 7, 0, 0]
    assert forced == [NOT_FORCED, 32, 32, 32]
    assert targets == [11, 77, 77, 77]
    assert buffers.samples[0].tolist() == [0.0, 1.0, 2.0]


def test_results_come_back_without_the_padding() -> None:
    buffers = StepBuffers(capacity=4, payload_samples=3, padding_slot=9, spare_row=77, device=CPU)
    buffers.results.copy_(torch.tensor([[7, 8, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]))
    assert outcome_of(buffers.download(), 2) == StepOutcome(tokens=[7, 8], failed=[1], guarded=2)


def test_slot_state_is_set_by_slot() -> None:
    state = SlotState(4, CPU)
    state.set([3, 0], tokens=[40, 41], delays=[5, 6], runs=[7, 8])
    assert state.tokens.tolist() == [41, 32, 32, 40, 32]
    assert state.delays.tolist() == [6, 1, 1, 5, 1]
    assert state.blank_runs.tolist() == [8, 0, 0, 7, 0]
