"""Triton kernels on CUDA: RMSNorm, SwiGLU, rotary positions, cache writes and paged attention of Voxtral Realtime, and
the recurrent part of the speech detector.

`voxtral_realtime.py` calls those of Voxtral for live steps and for chunks of rebuilt streams. Each computes the same as
its reference in `layers.py`, and `recurrent` the same as `SileroVad.steps_reference`. Reading the keys and values of
each stream is most of a step's memory traffic, so the attention kernel keeps many loads in flight: one program per
stream, key head and slice of the window, one page per iteration. Every row of a page is read, without masks, and the
scores of rows outside the window are dropped. Therefore all values in pages must be finite.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads a kernel's parameters by its own rules and its decorator has no types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.layers import FP8_MAX, SMALLEST_SCALE, Heads, KvPages, RowScale, Span

# Warps that keep the memory system busy: about eight per multiprocessor of the largest current GPUs.
WANTED_WARPS = 1024
# With longer slices of a window, multiprocessors are idle while the last programs finish.
MAX_SLICE_ROWS = 1024
# (head dim, 8-bit storage) -> warps, pipeline stages: the fastest on an H200, for many streams and for few.
LAUNCH_SHAPES = {(64, False): (2, 2), (128, False): (2, 2), (64, True): (1, 3), (128, True): (1, 3)}
FEW_STREAMS, FEW_STREAMS_SHAPES = 16, {(128, True): (2, 2)}
DEFAULT_LAUNCH_SHAPE = (2, 2)
# A tensor core multiplies at least 16 rows; a live step has 4 query rows per key head, the rest is padding. A chunk of
# a rebuilt stream has up to 64.
LIVE_QUERY_ROWS, QUERY_TILE, MAX_QUERY_TILE = 4, 16, 64
# The same for chunks: pages in a block, pipeline stages, and the registers of a thread (None: as many as it needs). A
# chunk computes more than it reads, and four programs of 128 registers hide each other's waiting better than three.
CHUNK_WARPS = 4
CHUNK_LAUNCH_SHAPES = {(64, True): (1, 1, 128), (128, True): (2, 1, None)}
DEFAULT_CHUNK_LAUNCH_SHAPE = (1, 2, None)
LOG2_E = 1.4426950408889634


@triton.jit
def _add_norm_kernel(
    residual, delta, weight, table, index, total, normed, width, epsilon,
    HAS_DELTA: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    # Loaded before the sum is known, so that the loads do not wait for it.
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        kind = tl.load(index + row)
        factor *= tl.load(table + kind * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        # The sum is stored rounded, so the norm must use the rounded sum too.
        value = value.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * width + column, value, mask=inside)
    mean_square = tl.sum(value * value, axis=0) / width
    tl.store(normed + row * width + column, value * tl.rsqrt(mean_square + epsilon) * factor, mask=inside)


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, scale: RowScale | None
) -> tuple[Tensor, Tensor]:
    """See `layers.add_norm_reference`."""
    rows, width = residual.shape
    total = residual if delta is None else torch.empty_like(residual)
    normed = torch.empty_like(residual)
    _add_norm_kernel[(rows,)](
        residual,
        residual if delta is None else delta,
        weight,
        weight if scale is None else scale.table,
        weight if scale is None else scale.index,
        total,
        normed,
        width,
        epsilon,
        HAS_DELTA=delta is not None,
        HAS_SCALE=scale is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )
    return total, normed


@triton.jit
def _swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(out + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `layers.swiglu_reference`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = 1024
    _swiglu_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rotate_store_kernel(
    fused, query, data, scales, table, slots, first, cosine, sine, ring_pages,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    EIGHT_BIT: tl.constexpr, FORMAT_MAX: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Process one part of one new row: write rotated queries (part 0), store rotated keys (1) or values (2) in the
    row's page."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half = tl.arange(0, DIM // 2)
    cos = tl.load(cosine + row * (DIM // 2) + half)[None, :]
    sin = tl.load(sine + row * (DIM // 2) + half)[None, :]
    heads = fused + row * (QUERIES + 2 * KEYS) * DIM
    if part == 0:
        # A variable of both branches must have one type in Triton, so those of this branch have names of their own.
        in_query = tl.arange(0, QUERIES)[:, None] * DIM + half[None, :]
        query_low = tl.load(heads + in_query).to(tl.float32)
        query_high = tl.load(heads + in_query + DIM // 2).to(tl.float32)
        rotated_query = query + row * QUERIES * DIM + in_query
        tl.store(rotated_query, query_low * cos - query_high * sin)
        tl.store(rotated_query + DIM // 2, query_high * cos + query_low * sin)
    else:
        number = tl.load(first + row // ROWS) + row % ROWS
        slot = tl.load(slots + row // ROWS)
        page = tl.load(table + slot * ring_pages + (number // PAGE) % ring_pages).to(tl.int64)
        kind = part - 1
        head = tl.arange(0, KEYS)
        source = heads + (QUERIES + kind * KEYS + head)[:, None] * DIM + half[None, :]
        low = tl.load(source).to(tl.float32)
        high = tl.load(source + DIM // 2).to(tl.float32)
        if kind == 0:
            rotated = low * cos - high * sin
            high = high * cos + low * sin
            low = rotated
        # Values that are not finite make this step's logits not finite, too; they must not be stored in a page.
        low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
        high = tl.where(tl.abs(high) < float("inf"), high, 0.0)
        if EIGHT_BIT:
            low = low.to(fused.dtype.element_ty).to(tl.float32)
            high = high.to(fused.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
            scale = tl.maximum(largest / FORMAT_MAX, SMALLEST).to(tl.bfloat16)
            tl.store(scales + ((page * KEYS + head) * PAGE + number % PAGE) * 2 + kind, scale)
            wide = scale.to(tl.float32)[:, None]
            low = tl.clamp(low / wide, -FORMAT_MAX, FORMAT_MAX)
            high = tl.clamp(high / wide, -FORMAT_MAX, FORMAT_MAX)
        # The page's memory: [2 (key, value), heads, page rows, dim].
        line = ((page * 2 + kind) * KEYS + head) * PAGE + number % PAGE
        in_page = data + line[:, None] * DIM + half[None, :]
        tl.store(in_page, low.to(data.dtype.element_ty))
        tl.store(in_page + DIM // 2, high.to(data.dtype.element_ty))


@triton.jit
def _add_page(
    q, k, v, pair, age, window, softmax_scale, acc, running_max, running_sum,
    MASKED: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Add rows of keys and values to the running softmax. `pair` has both scales of each row in one 32-bit word, `age`
    how many rows ago each row was, for each query row; without MASKED all of them are visible."""
    # `softmax_scale` includes log2(e), so that exp2 can be used.
    if EIGHT_BIT:
        # Two bfloat16 in one word: a bfloat16 is the upper half of a float32.
        scores = tl.dot(q, tl.trans(k.to(tl.float16)))
        scores *= ((pair << 16).to(tl.float32, bitcast=True) * softmax_scale)[None, :]
    else:
        scores = tl.dot(q, tl.trans(k)) * softmax_scale
    if MASKED:
        scores = tl.where((age >= 0) & (age < window), scores, -float("inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    safe_max = tl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max
    weight = tl.exp2(scores - safe_max[:, None])
    decay = tl.exp2(running_max - safe_max)
    running_sum = running_sum * decay + tl.sum(weight, axis=1)
    acc *= decay[:, None]
    if EIGHT_BIT:
        # 64 keeps small weights above float16's smallest number.
        weight *= ((pair & -65536).to(tl.float32, bitcast=True) * 64.0)[None, :]
        acc = tl.dot(weight.to(tl.float16), v.to(tl.float16), acc)
    else:
        acc = tl.dot(weight.to(v.dtype), v, acc)
    return acc, new_max, running_sum


@triton.jit
def _query_tile(
    query, first, slots, table, stream, key_head, ring_pages, window,
    GROUP: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """The query rows of one stream and key head: row m is row m // GROUP of the step and head m % GROUP of the group.

    Rows of the stream are counted from the first one in the page of the first visible row, in 32 bits. Returns the
    tile, its lines in `query` and which of them are real, the number of the first query row, the index of the page in
    the stream's ring, and that ring.
    """
    start = tl.load(first + stream)
    aligned = tl.maximum(start - window + 1, 0) // PAGE * PAGE
    ring_start = ((aligned // PAGE) % ring_pages).to(tl.int32)
    m = tl.arange(0, TILE)
    real = m < ROWS * GROUP
    line = (stream.to(tl.int64) * ROWS + m // GROUP) * KEYS * GROUP + key_head * GROUP + m % GROUP
    q = tl.load(query + line[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0)
    if EIGHT_BIT:
        # The hardware widens 8-bit floats to float16 in one instruction; bfloat16 would take three.
        q = q.to(tl.float16)
    return q, line, real, (start - aligned).to(tl.int32), ring_start, table + tl.load(slots + stream) * ring_pages


@triton.jit
def _paged_attention_kernel(
    query, data, scales, table, slots, first, out, partial, partial_max, partial_sum,
    ring_pages, window, softmax_scale,
    GROUP: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Attention of the query rows of one stream and key head over one slice of the window."""
    key_head = tl.program_id(0)
    stream = tl.program_id(1)
    split = tl.program_id(2)
    q, query_line, real, query_start, ring_start, ring = _query_tile(
        query, first, slots, table, stream, key_head, ring_pages, window, GROUP, KEYS, DIM, ROWS, PAGE, TILE, EIGHT_BIT
    )
    query_row = query_start + tl.arange(0, TILE) // GROUP
    d = tl.arange(0, DIM)
    r = tl.arange(0, PAGE)
    running_max = tl.full([TILE], -float("inf"), tl.float32)
    running_sum = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    blocks = tl.cdiv(query_start + ROWS, PAGE)
    per_split = tl.cdiv(blocks, SPLITS)
    for block in range(split * per_split, tl.minimum((split + 1) * per_split, blocks)):
        ring_index = ring_start + block
        ring_index = tl.where(ring_index >= ring_pages, ring_index - ring_pages, ring_index)
        page = tl.load(ring + ring_index).to(tl.int64)
        tile = data + (page * 2 * KEYS + key_head) * PAGE * DIM + r[:, None] * DIM + d[None, :]
        k = tl.load(tile)
        v = tl.load(tile + KEYS * PAGE * DIM)
        pair = tl.load(scales + (page * KEYS + key_head) * PAGE + r) if EIGHT_BIT else 0
        age = query_row[:, None] - (block * PAGE + r)[None, :]
        acc, running_max, running_sum = _add_page(
            q, k, v, pair, age, window, softmax_scale, acc, running_max, running_sum, True, EIGHT_BIT
        )

    if EIGHT_BIT:
        acc *= 1.0 / 64.0
    if SPLITS == 1:
        tl.store(out + query_line[:, None] * DIM + d[None, :], acc / running_sum[:, None], mask=real[:, None])
    else:
        part = query_line * SPLITS + split
        tl.store(partial + part[:, None] * DIM + d[None, :], acc, mask=real[:, None])
        tl.store(partial_max + part, running_max, mask=real)
        tl.store(partial_sum + part, running_sum, mask=real)


@triton.jit
def _add_block(
    q, data, scales, ring, ring_start, ring_pages, block, pages, key_head, query_row, window, softmax_scale,
    acc, running_max, running_sum,
    KEYS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_PAGES: tl.constexpr,
    MASKED: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_PAGES pages to the running softmax. Behind the last page the rows are those of that page, with ages
    below zero."""
    d = tl.arange(0, DIM)
    r = tl.arange(0, BLOCK_PAGES * PAGE)
    if BLOCK_PAGES == 1:
        ring_index = ring_start + block
    else:
        ring_index = ring_start + tl.minimum(block * BLOCK_PAGES + r // PAGE, pages - 1)
    ring_index = tl.where(ring_index >= ring_pages, ring_index - ring_pages, ring_index)
    page = tl.load(ring + ring_index).to(tl.int64)
    tile = data + ((page * 2 * KEYS + key_head) * PAGE + r % PAGE)[:, None] * DIM + d[None, :]
    k = tl.load(tile)
    v = tl.load(tile + KEYS * PAGE * DIM)
    pair = tl.load(scales + (page * KEYS + key_head) * PAGE + r % PAGE) if EIGHT_BIT else 0
    age = query_row[:, None] - (block * BLOCK_PAGES * PAGE + r)[None, :]
    return _add_page(q, k, v, pair, age, window, softmax_scale, acc, running_max, running_sum, MASKED, EIGHT_BIT)


@triton.jit
def _chunk_attention_kernel(
    query, data, scales, table, slots, first, out, ring_pages, window, softmax_scale,
    GROUP: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_PAGES: tl.constexpr, STAGES: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Attention of the query rows of one stream and key head over the whole window, for chunks of known tokens: first
    the blocks that all query rows see whole, without masks, then those at both ends of the window."""
    key_head = tl.program_id(0)
    stream = tl.program_id(1)
    q, query_line, real, query_start, ring_start, ring = _query_tile(
        query, first, slots, table, stream, key_head, ring_pages, window, GROUP, KEYS, DIM, ROWS, PAGE, TILE, EIGHT_BIT
    )
    query_row = query_start + tl.arange(0, TILE) // GROUP
    running_max = tl.full([TILE], -float("inf"), tl.float32)
    running_sum = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    pages = tl.cdiv(query_start + ROWS, PAGE)
    blocks = tl.cdiv(pages, BLOCK_PAGES)
    # Rows of blocks [whole, rest) are visible to the first query row and to the last.
    whole = tl.minimum(tl.cdiv(tl.maximum(query_start + ROWS - window, 0), BLOCK_PAGES * PAGE), blocks)
    rest = tl.maximum((query_start + 1) // (BLOCK_PAGES * PAGE), whole)
    for block in tl.range(whole, rest, num_stages=STAGES):
        acc, running_max, running_sum = _add_block(
            q, data, scales, ring, ring_start, ring_pages, block, pages, key_head, query_row, window, softmax_scale,
            acc, running_max, running_sum, KEYS, DIM, PAGE, BLOCK_PAGES, False, EIGHT_BIT,
        )  # fmt: skip
    for index in tl.range(0, blocks - (rest - whole), num_stages=1):
        block = tl.where(index < whole, index, index + rest - whole)
        acc, running_max, running_sum = _add_block(
            q, data, scales, ring, ring_start, ring_pages, block, pages, key_head, query_row, window, softmax_scale,
            acc, running_max, running_sum, KEYS, DIM, PAGE, BLOCK_PAGES, True, EIGHT_BIT,
        )  # fmt: skip
    if EIGHT_BIT:
        acc *= 1.0 / 64.0
    place = query_line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + place, acc / running_sum[:, None], mask=real[:, None])


@triton.jit
def _combine_kernel(
    partial, partial_max, partial_sum, out, DIM: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """Combine the slices of one query head; a slice without visible rows has weight zero."""
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    inside = split < SPLITS
    top = tl.load(partial_max + line * SPLITS + split, mask=inside, other=-float("inf"))
    weight = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(weight * tl.load(partial_sum + line * SPLITS + split, mask=inside, other=0.0), axis=0)
    parts = tl.load(partial + (line * SPLITS + split)[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
    tl.store(out + line * DIM + d, tl.sum(parts * weight[:, None], axis=0) / total)


def split_count(streams: int, heads: Heads, ring_pages: int, warps: int) -> int:
    """Return the number of slices of the window that keeps the GPU busy; a slice has at least one page."""
    wanted = max(-(-WANTED_WARPS // (warps * streams * heads.kv_heads)), -(-heads.window // MAX_SLICE_ROWS))
    return min(ring_pages, wanted)


def attend(fused: Tensor, layer: int, pages: KvPages, span: Span, heads: Heads, **tuning: Any) -> Tensor:
    """See `layers.attend_reference`. Takes at most 64 query rows per key head, and not more new rows than the ring has
    beyond the window, because the new rows are stored before the old ones are read. `tuning` overrides the launch
    shape, for benchmarks."""
    return attend_stored(store(fused, layer, pages, span, heads), layer, pages, span, heads, **tuning)


def store(fused: Tensor, layer: int, pages: KvPages, span: Span, heads: Heads) -> Tensor:
    """Store rotated keys and values in their pages; returns the rotated queries. See `layers.store_reference`. Raises
    ValueError if the numbers of heads or their width are not powers of two."""
    if any(size & (size - 1) for size in (heads.query_heads, heads.kv_heads, heads.dim)):
        raise ValueError(f"{heads}: the numbers of heads and their width must be powers of two on a GPU")
    query = torch.empty(fused.shape[0], heads.query_heads * heads.dim, dtype=fused.dtype, device=fused.device)
    data, scales = _layer_of(pages, layer)
    _rotate_store_kernel[(fused.shape[0], 3)](
        fused, query, data, scales, span.tables, span.slots, span.first, span.cosine, span.sine, span.tables.shape[1],
        QUERIES=heads.query_heads, KEYS=heads.kv_heads, DIM=heads.dim, ROWS=span.rows, PAGE=pages.page_rows,
        EIGHT_BIT=pages.scales is not None, FORMAT_MAX=FP8_MAX, SMALLEST=SMALLEST_SCALE, num_warps=4,
    )  # fmt: skip
    return query


def attend_stored(
    query: Tensor, layer: int, pages: KvPages, span: Span, heads: Heads,
    warps: int | None = None, stages: int | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of rotated queries [streams * rows, queries * dim] over stored rows. Raises ValueError if there are too
    many query rows for one tile."""
    group = heads.query_heads // heads.kv_heads
    tile = max(QUERY_TILE, triton.next_power_of_2(span.rows * group))
    if tile > MAX_QUERY_TILE:
        raise ValueError(f"{span.rows} rows of {group} heads are more than one tile of {MAX_QUERY_TILE} query rows")
    streams, ring_pages, eight_bit = span.first.shape[0], span.tables.shape[1], pages.scales is not None
    data, scales = _layer_of(pages, layer)
    out = torch.empty_like(query)
    shape = {
        "GROUP": group, "KEYS": heads.kv_heads, "DIM": heads.dim, "ROWS": span.rows, "PAGE": pages.page_rows,
        "TILE": tile, "EIGHT_BIT": eight_bit,
    }  # fmt: skip
    kind = (heads.dim, eight_bit)
    stored = (query, data, scales.view(torch.int32), span.tables, span.slots, span.first)
    sizes = (ring_pages, heads.window, heads.dim**-0.5 * LOG2_E)
    if tile > QUERY_TILE:
        block_pages, chunk_stages, registers = CHUNK_LAUNCH_SHAPES.get(kind, DEFAULT_CHUNK_LAUNCH_SHAPE)
        _chunk_attention_kernel[(heads.kv_heads, streams)](
            *stored, out, *sizes, **shape,
            BLOCK_PAGES=block_pages, STAGES=chunk_stages,
            num_warps=CHUNK_WARPS, num_stages=chunk_stages, maxnreg=registers,
        )  # fmt: skip
        return out
    few = FEW_STREAMS_SHAPES.get(kind) if streams <= FEW_STREAMS else None
    live_shape = few or LAUNCH_SHAPES.get(kind, DEFAULT_LAUNCH_SHAPE)
    warps, stages = warps or live_shape[0], stages or live_shape[1]
    # Chunks of many streams are computed at once, so one slice is enough; each number of slices would need its own
    # kernel.
    is_chunk = span.rows * group > LIVE_QUERY_ROWS
    splits = splits or (1 if is_chunk else split_count(streams, heads, ring_pages, warps))
    lines = query.shape[0] * heads.query_heads
    partial = query.new_empty(lines * splits * (heads.dim if splits > 1 else 0), dtype=torch.float32)
    partial_stats = query.new_empty(2, lines * splits, dtype=torch.float32)
    _paged_attention_kernel[(heads.kv_heads, streams, splits)](
        *stored, out, partial, partial_stats[0], partial_stats[1], *sizes, **shape,
        SPLITS=splits, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(lines,)](
            partial, partial_stats[0], partial_stats[1], out,
            DIM=heads.dim, SPLITS=splits, TILE=triton.next_power_of_2(splits), num_warps=2,
        )  # fmt: skip
    return out


def _layer_of(pages: KvPages, layer: int) -> tuple[Tensor, Tensor]:
    """One layer's pages and scales. Without 8-bit storage the kernels do not read the scales: the pages stand for
    them."""
    data = pages.data[layer]
    return data, data if pages.scales is None else pages.scales[layer]


@triton.jit
def _recurrent_kernel(gates, state_gates, hidden, cell, due, after_each, last_cell, frames, STATE: tl.constexpr):
    """All frames of one stream. The weights are read from the second-level cache for each frame: 256 KiB of float32 do
    not fit into a multiprocessor."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, STATE)
    h = tl.load(hidden + row * STATE + unit)
    c = tl.load(cell + row * STATE + unit)
    weights = state_gates + unit[:, None] * (4 * STATE) + unit[None, :]
    for frame in range(frames):
        given = gates + (row * frames + frame) * 4 * STATE + unit
        state = h[:, None]
        into = tl.load(given) + tl.sum(state * tl.load(weights), axis=0)
        kept = tl.load(given + STATE) + tl.sum(state * tl.load(weights + STATE), axis=0)
        out = tl.load(given + 2 * STATE) + tl.sum(state * tl.load(weights + 2 * STATE), axis=0)
        new = tl.load(given + 3 * STATE) + tl.sum(state * tl.load(weights + 3 * STATE), axis=0)
        # tanh(x) is 2 sigmoid(2 x) - 1.
        next_c = tl.sigmoid(kept) * c + tl.sigmoid(into) * (2.0 * tl.sigmoid(2.0 * new) - 1.0)
        next_h = tl.sigmoid(out) * (2.0 * tl.sigmoid(2.0 * next_c) - 1.0)
        is_due = tl.load(due + row * frames + frame) != 0
        c = tl.where(is_due, next_c, c)
        h = tl.where(is_due, next_h, h)
        tl.store(after_each + (row * frames + frame) * STATE + unit, h)
    tl.store(last_cell + row * STATE + unit, c)


def recurrent(gates: Tensor, state_gates: Tensor, hidden: Tensor, cell: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
    """See `SileroVad.steps_reference`."""
    rows, frames, _ = gates.shape
    after_each = torch.empty(rows, frames, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    last_cell = torch.empty_like(cell)
    _recurrent_kernel[(rows,)](
        gates.contiguous(),
        state_gates,
        hidden,
        cell,
        due.contiguous(),
        after_each,
        last_cell,
        frames,
        STATE=hidden.shape[1],
        num_warps=8,
    )
    return after_each, last_cell
