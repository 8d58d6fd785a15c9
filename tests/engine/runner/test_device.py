"""Which device, and how much of it is free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from engine.runner.device import GIB, PROCESS_BYTES, NoDevice, free_memory, require_device, shared_memory


@pytest.mark.parametrize(
    ("name", "text"), [("gpu", "is not a device"), ("mps", "not supported"), ("meta", "not supported")]
)
def test_names_that_will_not_do(name: str, text: str) -> None:
    with pytest.raises(NoDevice, match=text):
        require_device(name)


def test_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="no CUDA device is visible"):
        require_device("cuda")


def test_no_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NoDevice, match="1 CUDA devices are visible"):
        require_device("cuda:1")


def test_the_cpu_has_memory() -> None:
    assert free_memory(require_device("cpu")) > 0


def test_engines_that_share_a_gpu_leave_room_for_the_process_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * GIB, 140 * GIB))
    gpu = torch.device("cuda:0")
    assert [shared_memory(gpu, engines) for engines in (1, 2)] == [140 * GIB - n * PROCESS_BYTES for n in (1, 2)]
    assert PROCESS_BYTES > 0.76 * GIB - 16 * 2**20, "what was measured"
    cpu = torch.device("cpu")
    assert shared_memory(cpu, 1) == shared_memory(cpu, 2) > 0


EIGHT_BITS_ON_ONE_THREAD = """
import os, torch
from engine.models.seq2seq import in_8_bits
from engine.runner.device import compute_on_one_thread

compute_on_one_thread()
threads = len(os.listdir("/proc/self/task"))
in_8_bits(torch.randn(2048, 512))(torch.randn(64, 512))
torch.nn.functional.linear(torch.randn(64, 512), torch.randn(2048, 512))
raise SystemExit(len(os.listdir("/proc/self/task")) - threads)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted as Linux shows them")
def test_products_start_no_threads() -> None:
    # In a process of its own: threads that were started once stay.
    done = subprocess.run([sys.executable, "-c", EIGHT_BITS_ON_ONE_THREAD], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{done.returncode} threads were started; {done.stderr[-2000:]}"


EIGHT_BITS_ON_TWO_THREADS = """
import torch
from engine.models.seq2seq import in_8_bits
from engine.runner.device import compute_on_threads

layer, rows = in_8_bits(torch.randn(2048, 512)), torch.randn(400, 512)
found = []
for count in (1, 2, 1, 2):
    assert compute_on_threads(count) and torch.get_num_threads() == count
    found.append(layer(rows))
assert all(torch.equal(found[0], other) for other in found[1:])
"""


def test_products_on_two_threads_are_those_on_one() -> None:
    # In a process of its own: threads that were started once stay.
    script = EIGHT_BITS_ON_TWO_THREADS
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
