"""How the windows of streams are distributed over the threads that read them."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from engine.core.plan import DecodeResult, DecodeTask
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.runner.windowed.encoders import EncodedAudio, WindowEncoder
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import HostWindows, Results

PATIENCE_S = 10.0


CONFIG = MoonshineConfig(32, 64, 1, 1, 4, 8, 10_000.0, 60, start_token=1, end_token=2)


def windows_of(threads: int) -> HostWindows:
    model = Moonshine(CONFIG)
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


class Interrupted(WindowEncoder):
    """Notes the number of threads of its two pieces of work, and fails in the last one if it `breaks`."""

    breaks = False

    def encode_in_pieces(self, task: DecodeTask, audio: Tensor) -> Generator[None, None, EncodedAudio]:
        self.threads = [torch.get_num_threads()]
        yield
        self.threads.append(torch.get_num_threads())
        if self.breaks:
            raise ValueError("this window cannot be encoded")
        return (yield from super().encode_in_pieces(task, audio))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("breaks", [False, True])
def test_an_encoder_has_several_threads_only_while_it_encodes_a_window_of_an_upload(breaks: bool) -> None:
    model = Moonshine(CONFIG).eval()
    encoder = Interrupted(model, [b""] * 60, Policy())
    encoder.breaks = breaks
    windows = HostWindows(model, encoder, encoder, 10, encoder_threads=lambda: 2)
    between: list[int] = []
    with torch.inference_mode(), pytest.raises(ValueError) if breaks else nullcontext():
        between += [torch.get_num_threads() for _ in windows.encode(tasks_of(1), False, {0})]
    assert encoder.threads == [2, 2] and set(between) <= {1} and torch.get_num_threads() == 1
    encoder.breaks = False
    with torch.inference_mode():
        list(windows.encode(tasks_of(1), True, {0}))
    assert encoder.threads == [1, 1]
