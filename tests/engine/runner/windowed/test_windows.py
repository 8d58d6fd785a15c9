"""How the windows of live streams are distributed over the threads that decode them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from engine.core.plan import DecodeResult, DecodeTask
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.runner.windowed.encoders import WindowEncoder
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import HostWindows, Results

PATIENCE_S = 10.0


def windows_of(threads: int) -> HostWindows:
    model = Moonshine(MoonshineConfig(32, 64, 1, 1, 4, 8, 10_000.0, 60, start_token=1, end_token=2))
    stream_encoder = WindowEncoder(model, [b""] * 60, Policy())
    return HostWindows(model, stream_encoder, stream_encoder, 10, threads)


def tasks_of(slots: int) -> list[DecodeTask]:
    return [DecodeTask(slot, f"s{slot}", 0, 0, 1, [1], [], False) for slot in range(slots)]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("streams", [1, 2, 5])
def test_every_stream_is_read_once_and_by_itself(threads: int, streams: int) -> None:
    windows, parts = windows_of(threads), []

    def read(tasks: Sequence[DecodeTask]) -> Results:
        parts.append([task.slot for task in tasks])
        return {task.slot: DecodeResult(keep_from=task.slot) for task in tasks}

    results = windows.run_in_parts(tasks_of(streams), read)
    windows.close()
    assert sorted(parts) == [[slot] for slot in range(streams)]
    assert {slot: result.keep_from for slot, result in results.items()} == {slot: slot for slot in range(streams)}


@pytest.mark.parametrize("slow", [0, 1])
def test_streams_do_not_wait_behind_a_long_one_while_a_thread_is_free(slow: int) -> None:
    windows, others_are_read = windows_of(2), threading.Event()
    in_time, read_slots = [], set()

    def read(tasks: Sequence[DecodeTask]) -> Results:
        for task in tasks:
            if task.slot == slow:
                in_time.append(others_are_read.wait(PATIENCE_S))
            read_slots.add(task.slot)
            if len(read_slots - {slow}) == 3:
                others_are_read.set()
        return {task.slot: DecodeResult() for task in tasks}

    windows.run_in_parts(tasks_of(4), read)
    windows.close()
    assert in_time == [True]


def test_what_a_helping_thread_raises_is_raised() -> None:
    windows, both = windows_of(2), threading.Barrier(2, timeout=PATIENCE_S)

    def read(tasks: Sequence[DecodeTask]) -> Results:
        both.wait()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("it cannot be read")
        return {}

    with pytest.raises(ValueError, match="cannot be read"):
        windows.run_in_parts(tasks_of(2), read)
    windows.close()
