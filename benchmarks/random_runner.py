"""A runner of Voxtral Realtime with random weights, warm and with full pages: for the engine alone and for a server."""

from __future__ import annotations

import torch

from benchmarks.random_voxtral import random_model, tiny_config
from engine.models.voxtral_realtime import STREAMING_PAD, voxtral_mini_4b
from engine.runner.device import free_memory, require_device
from engine.runner.frames.memory import plan_memory
from engine.runner.frames.runner import NOT_FORCED, RunnerSettings, VoxtralRunner

KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


# Of ten frames so many are text: 3.75 words a second, where people say two to three, of one token or two each.
WORDS_IN_TEN_FRAMES = 3


class SpeakingRunner(VoxtralRunner):
    """Says as much as speech does, where random weights would say a word in nearly every frame. Everything is computed
    as it is; that an output is known beforehand is one more number that a step is given, as after an engine's death."""

    def _forced_at(self, slots: list[int], positions: list[int]) -> list[int]:
        known = super()._forced_at(slots, positions)
        return [
            STREAMING_PAD if token == NOT_FORCED and (7 * slot + position) % 10 >= WORDS_IN_TEN_FRAMES else token
            for slot, position, token in zip(slots, positions, known, strict=True)
        ]


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
    runner = SpeakingRunner(model, vocabulary, memory, settings)
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
