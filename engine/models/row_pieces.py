"""8-bit products in pieces of two sizes, for kernels that make a plan for every number of rows.

On ARM such a plan brings all weights into another order: for 24 rows that takes as long as the product itself, for the
few rows of a decoder's outputs six times as long. Two plans are kept for each matrix. Live text is of another length in
every pass, so nearly every product would need a new one.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# Rows of the larger pieces. Kernels take eight rows at a time, which is the smaller size; a block of the encoder has 39
# frames, and every piece has a row that spans the range.
PIECE_ROWS = 40


def _product_in_pieces(
    level: Tensor,
    whole_range: Tensor,
    weights: torch.classes.quantized.LinearPackedParamsBase,  # type: ignore[name-defined]
) -> Tensor:
    """[rows, inputs] between -1 and 1, and rows that span that range to fill pieces up with -> [rows, outputs]"""
    rows, largest = level.size(0), whole_range.size(0)
    # Beside many rows a plan costs little.
    if rows > 4 * largest:
        product: Tensor = torch.ops.quantized.linear_dynamic(torch.cat((level, whole_range[:1])), weights)
        return product[:rows]
    parts: list[Tensor] = []
    done = 0
    while done < rows or done == 0:
        # Two small pieces cost less than a large one.
        size = 8 if rows - done <= 2 * (8 - 1) else largest
        part = level[done : done + size - 1]
        piece = torch.cat((part, whole_range[: size - part.size(0)]))
        parts.append(torch.ops.quantized.linear_dynamic(piece, weights)[: part.size(0)])
        done += size - 1
    return parts[0] if len(parts) == 1 else torch.cat(parts)


with warnings.catch_warnings():
    # It is called from traces, which know no loops. What torch would rather have us use needs a C++ compiler.
    warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
    product_in_pieces = torch.jit.script(_product_in_pieces)
