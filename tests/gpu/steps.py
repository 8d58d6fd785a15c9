"""Steps of a Voxtral Realtime in several ways, to be compared: recorded or eager, by kernels or by the reference,
overlapping or one by one; and speech detection on a device against that on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_weights import random_tensors, random_voxtral
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Abort, Feed, Finish, Item, Open, Output
from engine.models.layers import Span, gather_ring
from engine.models.silero import load_silero
from engine.models.voxtral_realtime import FIRST_TEXT_TOKEN, STREAMING_WORD, VoxtralRealtime, voxtral_mini_4b
from engine.runner.base import SynchronousRunner, never
from engine.runner.frames.memory import MAX_MOVES, plan_memory
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.runner.load import frames_limits
from engine.runner.speech import DeviceSpeechDetector, SpeechDetector
from engine.server.loop import EngineLoop
from engine.spec import Vocabulary
from tests.engine.runner.frames.test_memory_parking import tokens_of

# Tokens by stream.
Outputs = dict[str, list[int]]
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
    runner.passes._kernels = kernels
    return runner


def parking_runner(kv_dtype: torch.dtype, streams: int, resident: int) -> VoxtralRunner:
    """A shallow model of full width with pages for `resident` of its streams."""
    config = voxtral_mini_4b()
    config = replace(config, audio=replace(config.audio, layers=2), text=replace(config.text, layers=2))
    model, vocabulary = random_voxtral(config, torch.bfloat16, torch.device("cuda"))
    settings = RunnerSettings(kv_dtype=kv_dtype, decoder_window=64, max_streams=streams)
    memory = plan_memory(
        config, 1 << 40, decoder_window=64, dtype=settings.dtype, kv_dtype=kv_dtype, max_streams=streams
    )
    pages = tuple(count // streams * resident for count in memory.group_pages)
    memory = replace(memory, group_pages=pages, parked=streams - resident, moves=MAX_MOVES)
    return VoxtralRunner(model, vocabulary, memory, settings)


def transcribe(runner: VoxtralRunner, positions: int, forced: dict[str, list[int]]) -> dict[str, list[int]]:
    """Tokens of one stream per delay over the same noise, one position per step; `forced` ones are repeated."""
    memory = runner.memory
    limits = Limits(memory.streams, memory.cache_embeds, memory.group_pages)
    spec = replace(runner.spec, replay_positions=1)
    loop = EngineLoop(Scheduler(spec, limits, runner.vocabulary), runner)
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
    model, vocabulary = random_voxtral(voxtral_mini_4b(), torch.bfloat16, torch.device("cuda"))
    recorded = transcribe(make_runner(model, vocabulary, kv_dtype, graphs=True, kernels=True), positions, {})
    found = tap(model)
    eager = transcribe(make_runner(model, vocabulary, kv_dtype, graphs=False, kernels=True), positions, {})
    wanted = tap(model)
    transcribe(make_runner(model, vocabulary, kv_dtype, graphs=False, kernels=False), positions, eager)
    errors = [float((mine - right).norm() / right.norm()) for mine, right in zip(found, wanted, strict=True)]
    return Outcome(recorded, eager, errors)


class OneByOne(SynchronousRunner):
    """A runner that hides that its steps can overlap."""

    def __init__(self, runner: VoxtralRunner) -> None:
        self.spec, self.vocabulary = runner.spec, runner.vocabulary
        self._runner = runner

    def check_open(self, message: Open) -> None:
        self._runner.check_open(message)

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        return self._runner.execute(plan)


def in_turns(runner: VoxtralRunner, positions: int, overlap: bool) -> dict[str, list[int]]:
    """Tokens of streams in two groups whose steps alternate, so that batches are the same whether they overlap or not.

    A stream joins in the middle, in the place of one that is aborted while its step is under way.
    """
    memory = runner.memory
    limits = Limits(memory.streams, memory.cache_embeds, memory.group_pages)
    loop = EngineLoop(Scheduler(runner.spec, limits, runner.vocabulary), runner if overlap else OneByOne(runner))
    noise = (np.random.default_rng(5).standard_normal((3, positions * 1280 + 2000)) * 0.1).astype(np.float32)
    tokens: dict[str, list[int]] = {}
    fed: dict[str, int] = {}

    commit = loop.scheduler.commit

    def noting(plan: StepPlan, results: list[DecodeResult]) -> list[Output]:
        for task, result in zip(plan.decode, results, strict=True):
            tokens.setdefault(task.stream, []).extend(result.tokens)
        return commit(plan, results)

    loop.scheduler.commit = noting  # type: ignore[method-assign]
    groups = [["a", "b"], ["c"]]
    loop.submit([Open(name) for group in groups for name in group], 0)
    for position in range(positions):
        if position == positions // 2:
            loop.submit([Abort("c"), Open("d")], position)
            groups[1] = ["d"]
        for group in groups:
            feeds = []
            for name in group:
                start = fed[name] = fed.get(name, 0) + 1
                payload = noise["abcd".index(name) % 3][start * 1280 : start * 1280 + 2000]
                item = Item(
                    runner.spec.prefix_positions + start - 1, 1, (start - 1) * 1280, b"%s%d" % (name.encode(), start)
                )
                item.payload = payload
                feeds.append(Feed(name, [item]))
            loop.submit(feeds, position)
            loop.step()
    loop.submit([Finish(name) for name in "abd"], positions)
    while loop.has_work():
        loop.step()
    return tokens


def compare_overlap(kv_dtype: torch.dtype, positions: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Tokens with steps that overlap, and with steps one by one."""
    model, vocabulary = random_voxtral(voxtral_mini_4b(), torch.bfloat16, torch.device("cuda"))
    runner = make_runner(model, vocabulary, kv_dtype, graphs=True, kernels=True)
    return in_turns(runner, positions, overlap=True), in_turns(runner, positions, overlap=False)


def rebuilding_errors(kv_dtype: torch.dtype, known: tuple[int, ...] = (199, 150, 37)) -> dict[str, float]:
    """Streams of so many known tokens, rebuilt together in chunks on the device, against the same streams one position
    at a time in float32 on the CPU: the relative error of the keys and values in the last layer of each stack."""
    config = voxtral_mini_4b()
    config = replace(config, audio=replace(config.audio, layers=2), text=replace(config.text, layers=2))
    tensors = random_tensors(config, torch.bfloat16, torch.device("cpu"))
    runners = []
    for device, dtype, pages in (("cpu", torch.float32, torch.float32), ("cuda", torch.bfloat16, kv_dtype)):
        model = VoxtralRealtime(config, {name: tensor.to(device, dtype) for name, tensor in tensors.items()})
        settings = RunnerSettings(device, dtype, pages, decoder_window=64, max_streams=len(known))
        memory = plan_memory(
            config, 1 << 40, decoder_window=64, dtype=dtype, kv_dtype=pages, max_streams=settings.max_streams
        )
        vocabulary = Vocabulary([b""] * config.vocabulary, STREAMING_WORD)
        runners.append(VoxtralRunner(model, vocabulary, memory, settings))
    by_one, rebuilt = runners
    by_one.spec = replace(by_one.spec, replay_positions=1)
    wanted, found = (_ring_after(runner, known) for runner in (by_one, rebuilt))
    return {
        name: float((found[name] - values).norm() / values.norm()) for name, values in wanted.items() if values.numel()
    }


@torch.inference_mode()
def _ring_after(runner: VoxtralRunner, known: tuple[int, ...]) -> dict[str, Tensor]:
    """Keys and values of streams whose tokens are all known, by stack and stream."""
    draw, loop = (
        np.random.default_rng(6),
        EngineLoop(Scheduler(runner.spec, frames_limits(runner.memory), runner.vocabulary), runner),
    )
    start = runner.spec.prefix_positions
    for stream, count in enumerate(known):
        noise = (draw.standard_normal(count * 1280 + 2000) * 0.1).astype(np.float32)
        tokens = draw.integers(FIRST_TEXT_TOKEN, 10_000, count).tolist()
        items = [
            Item(start + i, 1, i * 1280, b"%d %d" % (stream, i), noise[i * 1280 : i * 1280 + 2000])
            for i in range(count)
        ]
        loop.submit([Open(f"s{stream}", forced_tokens=tokens), Feed(f"s{stream}", items)], stream)
    slots = {name: stream.slot for name, stream in loop.scheduler.streams.items()}
    while loop.has_work():
        loop.step()
    rings = {}
    for stack, cache in zip(("encoder", "decoder"), runner._caches, strict=True):
        for (name, slot), count in zip(slots.items(), known, strict=True):
            assert loop.scheduler.streams[name].computed == start + count
            end = torch.tensor([(start + count) * cache.layout.rows_per_position], device=runner.device)
            span = Span(cache.table, torch.tensor([slot], device=runner.device), end, 1, end, end)
            held, rows = gather_ring(cache.layout.layers - 1, cache.pages, span, torch.float32)
            seen = rows[0] >= end - cache.layout.heads.window
            order = rows[0][seen].argsort()
            rings[f"{stack} {name}"] = held[0][seen][order].cpu()
    return rings


# Positions of the longest piece that the speech detectors get at once.
LONG_POSITIONS = 37


def detection_error(device: str, streams: int = 40, rounds: int = 60) -> float:
    """The largest difference between the probabilities of both detectors, over noise and voices of all phases."""
    mine = DeviceSpeechDetector(load_silero(fft_as_matmul=True).to(device), streams)
    mine.warm_up()
    theirs = SpeechDetector(load_silero(), streams)
    random = np.random.default_rng(3)
    time = np.arange((rounds + LONG_POSITIONS) * 1280) / 16_000
    pending, worst = [], 0.0
    names = [f"s{index}" for index in range(streams)]
    for name in names:
        mine.open(name)
        theirs.open(name)
    audio = []
    for index in range(streams):
        pitch = 90 + 3 * index
        buzz = sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, 25)) * (
            np.sin(2 * np.pi * 3 * time) > -0.3
        )
        row = 0.1 * buzz + 0.003 * random.standard_normal(len(time))
        row[: index * 100] = 0.0
        audio.append(row.astype(np.float32))
    for turn in range(rounds):
        batch = [
            (name, row[turn * 1280 : (turn + 1) * 1280])
            for i, (name, row) in enumerate(zip(names, audio, strict=True))
            if (turn + i) % 5
        ]
        pending.append((mine.launch(batch), theirs.detect(batch)))
    # Silence and replays come in longer pieces.
    batch = [
        (name, row[rounds * 1280 :][: 1280 * (1 + i % LONG_POSITIONS)])
        for i, (name, row) in enumerate(zip(names, audio, strict=True))
    ]
    pending.append((mine.launch(batch), theirs.detect(batch)))
    for answers, wanted in pending:
        by_stream = {speech.stream: speech for speech in answers()}
        assert len(by_stream) == len(wanted)
        for right in wanted:
            found = by_stream[right.stream]
            assert found.sample == right.sample
            worst = max(worst, float(np.abs(np.subtract(found.probabilities, right.probabilities)).max()))
    return worst


def beside_detection(runner: VoxtralRunner, turns: list[tuple[int, int]], streams: int = 40) -> tuple[Outputs, float]:
    """The tokens of these turns with rounds of the speech detector in the device's other queue beside each step, and
    the largest difference of their probabilities from those of the CPU."""
    detector = DeviceSpeechDetector(load_silero(fft_as_matmul=True).to("cuda"), streams)
    detector.warm_up()
    reference = SpeechDetector(load_silero(), streams)
    names = [f"s{index}" for index in range(streams)]
    for name in names:
        detector.open(name)
        reference.open(name)
    random, launch = np.random.default_rng(4), runner.launch
    pending = []

    def with_a_round(plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        length = 1280 * int(random.choice([1, 4, 16]))
        batch = [(name, (0.1 * random.standard_normal(length)).astype(np.float32)) for name in names]
        pending.append((detector.launch(batch), reference.detect(batch)))
        return launch(plan, time_is_up)

    runner.launch = with_a_round  # type: ignore[method-assign]
    tokens, _ = tokens_of(runner, turns)
    worst = 0.0
    for answers, wanted in pending:
        for found, right in zip(answers(), wanted, strict=True):
            worst = max(worst, float(np.abs(np.subtract(found.probabilities, right.probabilities)).max()))
    return tokens, worst
