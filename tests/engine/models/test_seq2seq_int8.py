"""8-bit products in pieces: the result of a row depends neither on its piece nor on its neighbours."""

from __future__ import annotations

import pytest
import torch

from engine.models.seq2seq import PIECE_ROWS, in_8_bits, product_in_pieces

ROWS = torch.rand(500, 320, generator=torch.Generator().manual_seed(3)) * 2 - 1
WEIGHT = torch.randn(640, 320, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 14, 15, 39, 40, 53, 78, 79, 160, 161, 500])
def test_pieces_give_what_the_whole_product_gives(rows: int) -> None:
    quantised = torch.quantize_per_tensor(WEIGHT / WEIGHT.abs().max(), 1.0 / 63, 0, torch.qint8)
    in_8_bits(WEIGHT)  # chooses the kernels of this processor
    weights = torch.ops.quantized.linear_prepack(quantised, None)
    whole_range = torch.zeros(PIECE_ROWS, 320)
    whole_range[:, :2] = torch.tensor([-1.0, 1.0])
    whole = torch.ops.quantized.linear_dynamic(torch.cat((ROWS, whole_range[:1])), weights)
    assert torch.equal(product_in_pieces(ROWS[:rows], whole_range, weights), whole[:rows])


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 40, 200])
def test_rows_of_a_layer_are_their_own(rows: int) -> None:
    layer = in_8_bits(WEIGHT)
    assert layer is not None
    assert torch.equal(layer(ROWS[:rows]), layer(ROWS)[:rows])
