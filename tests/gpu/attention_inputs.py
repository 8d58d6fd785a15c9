"""Pages and projections of an attention step at the sizes of Voxtral Realtime."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.layers import Heads, KvPages, Span, inverse_frequencies, rotary_angles
from engine.models.voxtral_realtime import voxtral_mini_4b
from engine.runner.frames.memory import PAGE_ROWS

DTYPE = torch.bfloat16


def stacks(decoder_window: int) -> dict[str, tuple[Heads, int]]:
    """Heads and rows per step of each stack."""
    config = voxtral_mini_4b()
    text = config.text.heads
    return {
        "encoder": (config.audio.heads, 4),
        "decoder": (Heads(text.query_heads, text.kv_heads, text.dim, decoder_window), 1),
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
