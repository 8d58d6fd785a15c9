"""Attention kernels alone: checked against the reference, then timed over launch shapes, in bytes per second.

    python -m benchmarks.gpu_kernels [--shapes 2,2 1,3,4]

Every figure reads each stream's whole window once from many layers in turn, so the cache does not help.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

from engine.models import kernels
from engine.models.attention import attend_reference
from engine.models.layers import add_norm_reference, inverse_frequencies, rotary_angles, swiglu_reference
from engine.models.operands import Heads, KvPages, RowScale, Span
from engine.models.voxtral_realtime import voxtral_mini_4b
from engine.runner.frames.kv import PAGE_ROWS

DTYPE = torch.bfloat16


def stacks(decoder_window: int) -> dict[str, tuple[Heads, int]]:
    """Heads and rows per step of each stack."""
    config = voxtral_mini_4b()
    text = config.text.heads
    return {
        "encoder": (config.audio.heads, 4),
        "decoder": (Heads(text.queries, text.keys, text.dim, decoder_window), 1),
    }


def build(
    heads: Heads, rows: int, streams: int, layers: int, eight_bit: bool, firsts: Tensor
) -> tuple[KvPages, Span, Tensor]:
    """Pages full of random rows, scattered over the pool, and a step's fused projections."""
    ring = -(-(heads.window + rows) // PAGE_ROWS) + 1
    storage = torch.float8_e4m3fn if eight_bit else DTYPE
    pages = KvPages.allocate(layers, streams * ring + 1, PAGE_ROWS, heads, storage, "cuda")
    for layer in range(layers):
        noise = torch.randn(pages.data.shape[1:], device="cuda", dtype=DTYPE)
        if pages.scales is None:
            pages.data[layer] = noise
        else:
            pages.scales[layer] = torch.rand(pages.scales.shape[1:], device="cuda") * 0.02 + 0.001
            pages.data[layer] = (noise * 100).clamp(-448, 448).to(storage)
    tables = torch.randperm(streams * ring, device="cuda").view(streams, ring).int()
    numbers = (firsts[:, None] + torch.arange(rows, device="cuda")).flatten()
    cosine, sine = rotary_angles(numbers, inverse_frequencies(heads.dim, 1e6, "cuda"))
    span = Span(tables, torch.randperm(streams, device="cuda"), firsts, rows, cosine, sine)
    return pages, span, torch.randn(streams * rows, heads.fused_width, device="cuda", dtype=DTYPE)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def check_attention(name: str, heads: Heads, rows: int, eight_bit: bool, splits: int | None) -> float:
    """Kernel against a float32 reference: young, wrapping and far-gone streams; outputs and pages poisoned first."""
    windows = heads.window
    firsts = torch.tensor([0, 4, 64, windows - 4, windows, windows + 4, 5 * windows + 8, 200_000_000], device="cuda")
    pages, span, fused = build(heads, rows, len(firsts), 2, eight_bit, firsts)
    twin = KvPages(pages.data.clone(), None if pages.scales is None else pages.scales.clone())
    wanted = attend_reference(fused.float(), 1, twin, span, heads)
    query = torch.full((fused.shape[0], heads.queries * heads.dim), float("nan"), device="cuda", dtype=DTYPE)
    kernels.store(fused, query, 1, pages, span, heads)
    # Freed memory that is not a number: whatever the kernel does not write shows up in the result.
    torch.full((64 << 20,), float("nan"), device="cuda")
    found = kernels.attend_stored(query, 1, pages, span, heads, splits=splits)
    stored = relative(pages.data[1].float(), twin.data[1].float())
    error = relative(found, wanted)
    if not (error < 1e-2 and stored < 1e-2):
        raise SystemExit(f"{name}: attention differs by {error:.2e}, stored rows by {stored:.2e}")
    return error


def check_all(decoder_window: int) -> None:
    for (name, (heads, rows)), eight_bit, splits in itertools.product(
        stacks(decoder_window).items(), (False, True), (1, 5, None)
    ):
        error = check_attention(name, heads, rows, eight_bit, splits)
        print(f"check {name} {'fp8' if eight_bit else 'bf16'} splits={splits}: relative error {error:.1e}")
    for name, error in small_kernel_errors().items():
        print(f"check {name}: relative error {error:.1e}")


def small_kernel_errors() -> dict[str, float]:
    """Relative errors of the norm and gate kernels on fresh random rows."""
    errors = {}
    for width in (1280, 3072):
        residual, delta = torch.randn(2, 37, width, device="cuda", dtype=DTYPE)
        weight = torch.randn(width, device="cuda", dtype=DTYPE)
        scale = RowScale(torch.randn(31, width, device="cuda"), torch.randint(0, 31, (37,), device="cuda"))
        total, normed = kernels.add_norm(residual, delta, weight, 1e-5, scale)
        wanted = add_norm_reference(residual, delta, weight, 1e-5, scale)
        errors[f"sum {width}"] = relative(total, wanted[0])
        errors[f"norm {width}"] = relative(normed, wanted[1])
    gate_up = torch.randn(37, 2 * 9216, device="cuda", dtype=DTYPE)
    errors["gate"] = relative(kernels.swiglu(gate_up), swiglu_reference(gate_up.float()))
    return errors


def time_attention(heads: Heads, rows: int, streams: int, eight_bit: bool, tuning: list[dict[str, int]]) -> None:
    row_bytes = 2 * heads.keys * (heads.dim * (1 if eight_bit else 2) + (2 if eight_bit else 0))
    layer_bytes = streams * heads.window * row_bytes
    layers = max(2, min(16, (2 << 30) // layer_bytes))
    firsts = torch.randint(3 * heads.window, 9 * heads.window, (streams,), device="cuda") // 4 * 4
    pages, span, fused = build(heads, rows, streams, layers, eight_bit, firsts)
    query = torch.randn(streams * rows, heads.queries * heads.dim, device="cuda", dtype=DTYPE)
    for options in tuning:
        try:
            microseconds = time_layers(query, pages, span, heads, layers, options)
        except Exception as error:  # a shape that needs more shared memory than there is
            print(f"    {options}: {type(error).__name__}")
            continue
        print(f"    {options}: {microseconds:8.1f} us  {layer_bytes / microseconds / 1e6:6.2f} TB/s", flush=True)


def time_layers(query: Tensor, pages: KvPages, span: Span, heads: Heads, layers: int, options: dict[str, int]) -> float:
    """Microseconds per layer, from replays of a graph over all layers."""
    kernels.attend_stored(query, 0, pages, span, heads, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            kernels.attend_stored(query, layer, pages, span, heads, **options)
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[3] * 1000 / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], metavar="WARPS,STAGES[,SPLITS]")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--stacks", nargs="+", default=["encoder", "decoder"])
    parser.add_argument("--kv", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--window", type=int, default=1024)
    arguments = parser.parse_args()
    check_all(arguments.window)
    fields = ("warps", "stages", "splits")
    tuning = [dict(zip(fields, map(int, shape.split(",")), strict=False)) for shape in arguments.shapes]
    for name, kv, streams in itertools.product(arguments.stacks, arguments.kv, arguments.streams):
        heads, rows = stacks(arguments.window)[name]
        print(f"{name} {kv} {streams} streams")
        time_attention(heads, rows, streams, kv == "fp8", tuning or [{}])


if __name__ == "__main__":
    with torch.inference_mode():
        main()
