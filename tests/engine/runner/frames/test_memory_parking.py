"""Parked streams: their tokens are those of streams that never left the device, and the host memory is bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.scheduler import PARKED_AFTER_NS, Scheduler
from engine.messages import Item, Open
from engine.models.voxtral_realtime import STREAMING_WORD, VoxtralRealtime, voxtral_mini_4b
from engine.runner.device import NotEnoughMemory
from engine.runner.frames.memory import (
    MAX_MOVES,
    SPARE_HOST_BUFFERS,
    STREAMS_PER_MOVE,
    MemoryPlan,
    ParkingBuffers,
    kv_bytes_per_stream,
    plan_memory,
    stack_layouts,
    voxtral_spec,
)
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.runner.load import frames_limits
from engine.spec import Vocabulary
from tests.engine.runner.frames.voxtral_driver import SMALL, STEP, WINDOW, payload, random_tensors, speech_like

STREAMS, RESIDENT = 5, 2
GIB = 1 << 30


def parking_runner(kv_dtype: torch.dtype, resident: int) -> VoxtralRunner:
    """A small model with pages for `resident` of its streams; the others are parked."""
    settings = RunnerSettings("cpu", torch.float32, kv_dtype, WINDOW, STREAMS, blank_guard=False)
    memory = plan_memory(
        SMALL, 8 * GIB, decoder_window=WINDOW, dtype=torch.float32, kv_dtype=kv_dtype, max_streams=STREAMS
    )
    pages = tuple(count // STREAMS * resident for count in memory.group_pages)
    memory = replace(memory, group_pages=pages, parked=STREAMS - resident, moves=MAX_MOVES)
    vocabulary = Vocabulary([b""] * SMALL.vocabulary, STREAMING_WORD)
    return VoxtralRunner(VoxtralRealtime(SMALL, random_tensors(SMALL)), vocabulary, memory, settings)


def tokens_of(
    runner: VoxtralRunner, turns: list[tuple[int, int]], overlap: bool = False
) -> tuple[dict[str, list[int]], int]:
    """Tokens of each stream after these turns of (stream, positions), seconds apart, and how many moves there were."""
    scheduler = Scheduler(runner.spec, frames_limits(runner.memory), runner.vocabulary)
    scheduler.moves = runner.moves
    audio = {f"s{number}": speech_like(sum(count for _, count in turns), number) for number in range(STREAMS)}
    done, tokens = dict.fromkeys(audio, 0), {name: list[int]() for name in audio}
    for number, name in enumerate(audio):
        scheduler.admit(Open(name, delay_positions=1 + number))
    now, moves = 0, 0

    def step() -> None:
        nonlocal moves
        plan = scheduler.plan()
        moves += len(plan.parked) + len(plan.restored)
        results = runner.execute(plan)
        for task, result in zip(plan.decode, results, strict=True):
            assert result.error is None
            tokens[task.stream] += result.tokens
        scheduler.commit(plan, results)
        scheduler.check_integrity()

    for speaker, count in turns:
        now += 2 * PARKED_AFTER_NS
        speakers = [speaker, (speaker + 1) % STREAMS] if overlap else [speaker]
        for name in (f"s{number}" for number in speakers):
            for _ in range(count):
                sound = payload(audio[name], done[name])
                offset = runner.spec.prefix_positions + done[name]
                key = f"{name} {done[name]}".encode()
                scheduler.feed(name, [Item(offset, 1, done[name] * STEP, key, sound)], now)
                done[name] += 1
        steps = 0
        while scheduler.has_work():
            step()
            steps += 1
            assert steps < 1000, "a stream waits for its pages for ever"
    assert {name: len(found) for name, found in tokens.items()} == done
    return tokens, moves


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_parked_streams_say_what_they_would_have_said(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Smaller than a stream: the last piece of a copy is shorter than the others.
    monkeypatch.setattr("engine.runner.frames.memory.COPY_BYTES", 1000)
    turns = [(turn * 3 % STREAMS, 3 + turn * 5 % 17) for turn in range(20)]
    expected, none = tokens_of(parking_runner(kv_dtype, STREAMS), turns)
    found, moves = tokens_of(parking_runner(kv_dtype, RESIDENT), turns)
    assert none == 0 < 20 < moves
    assert found == expected


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, STREAMS - 1), st.integers(1, 30)), min_size=2, max_size=8), st.booleans())
def test_any_turns_of_any_streams(turns: list[tuple[int, int]], overlap: bool) -> None:
    expected, _ = tokens_of(parking_runner(torch.float32, STREAMS), turns, overlap)
    found, _ = tokens_of(parking_runner(torch.float32, RESIDENT), turns, overlap)
    assert found == expected


def test_closed_streams_leave_their_host_memory() -> None:
    runner = parking_runner(torch.float32, RESIDENT)
    scheduler = Scheduler(runner.spec, frames_limits(runner.memory), runner.vocabulary)
    scheduler.moves = runner.moves
    audio = speech_like(4, 0)
    assert runner._parked is not None
    buffers = len(runner._parked._free)
    for round_ in range(30):
        name = f"s{round_}"
        scheduler.admit(Open(name))
        sound = payload(audio, 0)
        item = Item(runner.spec.prefix_positions, 1, 0, name.encode(), sound)
        scheduler.feed(name, [item], round_ * 2 * PARKED_AFTER_NS)
        while scheduler.has_work():
            plan = scheduler.plan()
            scheduler.commit(plan, runner.execute(plan))
        if len(scheduler.streams) == STREAMS:
            assert scheduler.parked >= STREAMS - RESIDENT
            scheduler.abort(f"s{round_ - STREAMS + 1}")
    for name in list(scheduler.streams):
        scheduler.abort(name)
    runner.execute(scheduler.plan())
    assert (scheduler.parked, len(runner._parked._free)) == (0, buffers)


def plan(free: int, parked: int, streams: int | None = None) -> tuple[int, int]:
    memory = plan_memory(
        SMALL,
        free,
        decoder_window=WINDOW,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        max_streams=streams,
        parked_bytes=parked,
    )
    assert memory.total_bytes <= free
    return memory.resident, memory.parked


def test_host_memory_makes_room_for_streams() -> None:
    free = 2 * GIB + 64 * 1024 * 1024
    fits, _ = plan(free, 0)
    resident, parked = plan(free, 1 << 62)
    one = kv_bytes_per_stream(voxtral_spec(SMALL, stack_layouts(SMALL, WINDOW, torch.float32), "small"))
    assert 0 < resident < fits
    assert fits < resident + parked <= 2 * fits
    assert plan(free, (10 + SPARE_HOST_BUFFERS) * one)[1] == 10
    assert plan(free, SPARE_HOST_BUFFERS * one) == (fits, 0)
    # Fewer streams than fit are not parked, and more than fit only as far as the host's memory goes.
    assert plan(free, 1 << 62, streams=fits - 1) == (fits - 1, 0)
    few = plan(free, 1 << 62, streams=fits + 1)
    assert sum(few) == fits + 1
    with pytest.raises(NotEnoughMemory, match="parked_share"):
        plan(free, (10 + SPARE_HOST_BUFFERS) * one, streams=fits + 11)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("gib", [12, 14, 16, 20, 24, 32, 48, 80, 141])
def test_parking_costs_at_most_an_eighth_of_the_streams_that_can_speak_at_once(gib: int, kv_dtype: torch.dtype) -> None:
    """The buffers of the moves take the room of streams; on a small device that would be most of it."""

    def plan(parked_bytes: int, max_streams: int | None = None) -> MemoryPlan:
        return plan_memory(
            voxtral_mini_4b(),
            gib * GIB,
            decoder_window=1024,
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            max_streams=max_streams,
            parked_bytes=parked_bytes,
        )

    without, parking = plan(0), plan(1 << 62)
    assert parking.resident >= 7 * without.resident // 8
    assert parking.total_bytes <= gib * GIB
    assert bool(parking.parked) == bool(parking.moves) == (without.resident >= STREAMS_PER_MOVE)
    if without.resident >= 8:
        asked = plan(1 << 62, max_streams=without.streams + 1)
        assert asked.streams == without.streams + 1 and asked.moves


def test_host_memory_that_cannot_be_had_parks_fewer_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def pin(memory: torch.Tensor) -> None:
        taken.append(memory.numel())
        if len(taken) == 3:
            raise RuntimeError("no more memory")

    monkeypatch.setattr("engine.runner.frames.memory._pin", pin)
    monkeypatch.setattr("engine.runner.frames.memory.PIECE_BYTES", 4096)
    host = ParkingBuffers(100, 1024, pinned=True)
    assert len(host.buffers) == 8
    assert np.all([buffer.numel() == 1024 for buffer in host.buffers])
    assert "8 parking buffers, not for 100" in caplog.text


def test_host_memory_ends_at_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system would end the engine that takes what is promised."""
    monkeypatch.setattr("engine.runner.frames.memory.available_memory", lambda: 600_000)
    monkeypatch.setattr("engine.runner.frames.memory.HOST_RESERVE_BYTES", 100_000)
    monkeypatch.setattr("engine.runner.frames.memory.PIECE_BYTES", 100_000)
    assert len(ParkingBuffers(10, 400_000, pinned=False).buffers) == 10
    for too_little in (100_000, None):
        monkeypatch.setattr("engine.runner.frames.memory.available_memory", lambda left=too_little: left)
        caplog.clear()
        assert not ParkingBuffers(10, 400_000, pinned=False).buffers
        assert "0 parking buffers, not for 10" in caplog.text
