"""Small random Voxtral models, and a driver that builds step plans by hand to run a runner with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.plan import SILENCE_ROW, DecodeResult, DecodeTask, EncodeTask, OpenTask, StepPlan
from engine.models.layers import Heads
from engine.models.voxtral_realtime import STREAMING_WORD, Stack, VoxtralConfig, VoxtralRealtime, tensor_shapes
from engine.runner.frames.memory import plan_memory
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.spec import Vocabulary

# Tiny matrices: a second thread costs more than it helps.
torch.set_num_threads(1)

SMALL = VoxtralConfig(
    # Windows of 11 positions (45 rows) and 24 tokens wrap many times in any test.
    audio=Stack(32, 2, 48, Heads(2, 2, 16, 42), 1e6, 1e-5, biased=True),
    text=Stack(48, 2, 64, Heads(4, 2, 16, 64), 1e6, 1e-5, biased=False),
    mel_bins=16,
    rows_per_position=4,
    vocabulary=96,
    default_delay=6,
)
WINDOW = 24
LOOK_BACK, STEP, LOOK_AHEAD = 680, 1280, 40


def random_tensors(config: VoxtralConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights large enough that every part of the model matters to the tokens."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm.weight" in name or "layernorm.weight" in name:
            tensors[name] = 1.0 + 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 0.1 * noise
        else:
            tensors[name] = noise * (0.05 if "embed_tokens" in name else shape[1] ** -0.5)
    return tensors


def small_runner(
    streams: int = 1,
    *,
    window: int = WINDOW,
    kv_dtype: torch.dtype = torch.float32,
    guard: bool = False,
    config: VoxtralConfig = SMALL,
    seed: int = 0,
    embeds: int | None = None,
    pieces: list[bytes] | None = None,
) -> VoxtralRunner:
    settings = RunnerSettings("cpu", torch.float32, kv_dtype, window, streams, blank_guard=guard)
    memory = plan_memory(
        config, 8 << 30, decoder_window=window, dtype=torch.float32, kv_dtype=kv_dtype, max_streams=streams
    )
    if embeds is not None:
        memory = replace(memory, cache_embeds=embeds)
    vocabulary = Vocabulary(pieces or [b""] * config.vocabulary, STREAMING_WORD)
    return VoxtralRunner(VoxtralRealtime(config, random_tensors(config, seed)), vocabulary, memory, settings)


class LogitsTap:
    """Keeps every row of logits that a runner's model computes."""

    def __init__(self, runner: VoxtralRunner) -> None:
        self.rows: list[Tensor] = []
        model = runner.passes.model
        compute = model.logits

        def tapped(hidden: Tensor) -> Tensor:
            logits = compute(hidden)
            self.rows.append(logits.clone())
            return logits

        model.logits = tapped  # type: ignore[method-assign]


def speech_like(positions: int, seed: int) -> NDArray[np.float32]:
    """Noise whose loudness and colour change, after 40 silent samples (see docs/voxtral.md, the opening)."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal(positions * STEP).astype(np.float32)
    loudness = np.repeat(random.uniform(0.0, 0.3, positions), STEP).astype(np.float32)
    smooth = np.convolve(noise, np.ones(5, np.float32) / 5, mode="same").astype(np.float32)
    audio = np.where(np.repeat(random.random(positions) < 0.5, STEP), noise, smooth) * loudness
    audio[:LOOK_AHEAD] = 0.0
    return audio.astype(np.float32)


def payload(audio: NDArray[np.float32], position: int, count: int = 1) -> NDArray[np.float32]:
    """Samples of `count` positions with what surrounds them; silence beyond both ends."""
    padded = np.concatenate([np.zeros(LOOK_BACK, np.float32), audio, np.zeros(LOOK_AHEAD, np.float32)])
    start = position * STEP
    return padded[start : start + LOOK_BACK + count * STEP + LOOK_AHEAD].copy()


@dataclass
class Feed:
    """One stream of the driver; `gaps` are positions without an embedding."""

    slot: int
    audio: NDArray[np.float32]
    delay: int = 6
    gaps: set[int] = field(default_factory=set)
    forced: list[int] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    done: int = 0
    opened: bool = False
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def name(self) -> str:
        return f"slot {self.slot}"


class Driver:
    """Plays scheduler: slot s owns an equal share of the pages and of the slab's rows."""

    def __init__(self, runner: VoxtralRunner) -> None:
        self.runner = runner
        self.step_number = 0

    def step(self, work: list[tuple[Feed, int]], closed: list[int] | None = None) -> list[DecodeResult]:
        """Advance each feed by its number of positions, all in one plan."""
        self.step_number += 1
        plan = StepPlan(self.step_number, closed=closed or [])
        for feed, count in work:
            self._add(plan, feed, count)
        results = self.runner.execute(plan)
        for (feed, count), result in zip(work, results, strict=True):
            feed.tokens += result.tokens
            feed.done += count
        return results

    def _add(self, plan: StepPlan, feed: Feed, count: int) -> None:
        spec, prefix = self.runner.spec, self.runner.spec.prefix_positions
        if not feed.opened:
            plan.opened.append(OpenTask(feed.slot, feed.name, feed.delay, feed.options, feed.forced))
            feed.opened = True
        share = (self.runner.memory.cache_embeds - 1) // self.runner.memory.streams
        rows, real, targets = [], [], []
        for offset in range(count):
            if feed.done + offset in feed.gaps:
                rows.append(SILENCE_ROW)
                real.append(False)
            else:
                rows.append(1 + feed.slot * share + offset)
                targets.append(rows[-1])
                real.append(True)
        if targets:
            mask = None if all(real) else real
            plan.encode.append(EncodeTask(feed.name, payload(feed.audio, feed.done, count), mask, targets))
        start, end = prefix + feed.done, prefix + feed.done + count
        pages = []
        for group, kv in enumerate(spec.kv_groups):
            blocks = min(-(-end // kv.page_positions), kv.ring_pages)
            pages += [(group, r, feed.slot * kv.ring_pages + r) for r in range(feed.blocks[group], blocks)]
            feed.blocks[group] = max(feed.blocks[group], blocks)
        plan.decode.append(DecodeTask(feed.slot, feed.name, start, start, end, rows, pages, False))
