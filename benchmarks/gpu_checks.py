"""Is the fast path right at full dimensions? Recorded step against eager step, kernels against the reference.

python -m benchmarks.gpu_checks [--kv fp8]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_voxtral import random_model
from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.messages import Feed, Item, Open
from engine.models.voxtral_realtime import VoxtralRealtime, voxtral_mini_4b
from engine.runner.frames.memory import plan_memory
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.server.loop import EngineLoop
from engine.vocabulary import Vocabulary

DELAYS = (1, 6, 30)


def make_runner(
    model: VoxtralRealtime, vocabulary: Vocabulary, kv_dtype: torch.dtype, *, graphs: bool, kernels: bool
) -> VoxtralRunner:
    settings = RunnerSettings(kv_dtype=kv_dtype, decoder_window=64, max_streams=len(DELAYS), graphs=graphs)
    memory = plan_memory(
        model.config,
        1 << 40,
        decoder_window=settings.decoder_window,
        dtype=settings.dtype,
        kv_dtype=kv_dtype,
        max_streams=settings.max_streams,
    )
    runner = VoxtralRunner(model, vocabulary, memory, settings)
    runner._passes._kernels = kernels
    return runner


def transcribe(runner: VoxtralRunner, positions: int, forced: dict[str, list[int]]) -> dict[str, list[int]]:
    """Tokens of one stream per delay over the same noise, one position per step; `forced` ones are repeated."""
    memory = runner.memory
    limits = Limits(memory.streams, memory.cache_embeds, memory.group_pages)
    loop = EngineLoop(Scheduler(runner.spec, limits, runner.vocabulary), runner)
    noise = (np.random.default_rng(5).standard_normal(positions * 1280 + 2000) * 0.1).astype(np.float32)
    names = {f"delay {delay}": delay for delay in DELAYS}
    loop.submit([Open(name, True, delay, {}, forced.get(name, [])) for name, delay in names.items()], 0)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    execute = runner.execute

    for position in range(positions):
        payload = noise[position * 1280 : position * 1280 + 2000]
        item = (runner.spec.prefix_positions + position, 1, position * 1280, b"%d" % position, payload)
        loop.submit([Feed(name, [Item(*item)]) for name in names], position)
        plan = loop.scheduler.plan()
        results = execute(plan)
        for task, result in zip(plan.decode, results, strict=True):
            tokens[task.stream] += result.tokens
        loop.scheduler.commit(plan, results)
    return tokens


def tap(model: VoxtralRealtime) -> list[Tensor]:
    """Collects all logits from here on."""
    rows: list[Tensor] = []
    compute = VoxtralRealtime.logits

    def tapped(hidden: Tensor) -> Tensor:
        logits = compute(model, hidden)
        rows.append(logits.float())
        return logits

    model.logits = tapped  # type: ignore[method-assign]
    return rows


@dataclass(frozen=True)
class Outcome:
    """Tokens of the recorded and the eager step by stream; relative errors of the logits, kernels to reference."""

    recorded: dict[str, list[int]]
    eager: dict[str, list[int]]
    logit_errors: list[float]


def compare_paths(kv_dtype: torch.dtype, positions: int) -> Outcome:
    model, vocabulary = random_model(voxtral_mini_4b(), torch.bfloat16, torch.device("cuda"))
    recorded = transcribe(make_runner(model, vocabulary, kv_dtype, graphs=True, kernels=True), positions, {})
    found = tap(model)
    eager = transcribe(make_runner(model, vocabulary, kv_dtype, graphs=False, kernels=True), positions, {})
    wanted = tap(model)
    transcribe(make_runner(model, vocabulary, kv_dtype, graphs=False, kernels=False), positions, eager)
    errors = [float((mine - right).norm() / right.norm()) for mine, right in zip(found, wanted, strict=True)]
    return Outcome(recorded, eager, errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--positions", type=int, default=100)
    arguments = parser.parse_args()
    kv_dtype = torch.bfloat16 if arguments.kv == "bf16" else torch.float8_e4m3fn
    outcome = compare_paths(kv_dtype, arguments.positions)
    distinct = {name: len(set(row)) for name, row in outcome.eager.items()}
    errors = outcome.logit_errors
    print(f"{arguments.kv}: distinct tokens {distinct}")
    print(f"{arguments.kv}: recorded step equals eager step: {outcome.recorded == outcome.eager}")
    print(f"{arguments.kv}: logits, kernels against reference: median {np.median(errors):.1e}, worst {max(errors):.1e}")


if __name__ == "__main__":
    main()
