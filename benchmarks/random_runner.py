"""A runner of Voxtral Realtime with random weights, warm and with full pages: for the engine alone and for a server."""

from __future__ import annotations

import torch

from benchmarks.random_voxtral import random_model, tiny_config
from engine.models.voxtral_realtime import voxtral_mini_4b
from engine.runner.device import free_memory, require_device
from engine.runner.frames.memory import plan_memory
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner

KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def build_runner(kv: str, window: int, max_streams: int | None, small: bool = False) -> VoxtralRunner:
    """At full dimensions on a GPU; with `small`, a tiny one on the CPU for a few streams."""
    device = require_device("cpu" if small else "cuda")
    config = tiny_config() if small else voxtral_mini_4b()
    settings = RunnerSettings(kv_dtype=KV_TYPES[kv], decoder_window=window, max_streams=max_streams)
    if small:
        torch.set_num_threads(1)
        settings = RunnerSettings("cpu", torch.float32, torch.float32, decoder_window=24, max_streams=max_streams or 8)
    memory = plan_memory(
        config,
        free_memory(device),
        decoder_window=settings.decoder_window,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        max_streams=settings.max_streams,
    )
    model, vocabulary = random_model(config, settings.dtype, device)
    runner = VoxtralRunner(model, vocabulary, memory, settings)
    _fill_pages(runner)
    runner.warm_up()
    return runner


def _fill_pages(runner: VoxtralRunner) -> None:
    """Random rows: zeros could be faster than real ones."""
    for cache in runner._caches:
        for layer in cache.pages.data:
            if layer.dtype == torch.float8_e4m3fn:
                layer.view(torch.uint8).random_(0x20, 0x50)  # bit patterns of moderate values
            else:
                layer.normal_()
        if cache.pages.scales is not None:
            cache.pages.scales.fill_(0.01)
