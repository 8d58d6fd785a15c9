"""Every benchmark has a small run that ends and prints its figures, on a CPU and without recordings of its own."""

from __future__ import annotations

import gc
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import benchmarks
from benchmarks.recordings import SAMPLE
from engine.weights.registry import TURN_DETECTOR
from realtime.client import resuming_session, wire_client
from tests.cached_models import skip_unless_cached

# The command line, and what it prints among others.
RUNS = {
    "step_cost": ["ratio", "512 streams", "linear, 500 items", "bytes at 2000 items"],
    "host_cost": ["us an item"],
    "append_cost": ["16 kHz, 80 ms appends, 4 sessions", "24 kHz, 50 ms appends, 4 sessions", "kB of"],
    "conversation_lag": ["refusals", "p99", "thread busy"],
    "rebuild_lag": ["before", "meanwhile", "pause of a rebuilt stream"],
    "engine_capacity": ["lag p99", "plan p50", "largest N that holds"],
    "server_capacity": ["2 sessions, 24 kHz, appends of 50 ms", "lag p99", "gateway us per append"],
    "server_capacity --kill": ["back s", "next text s p50"],
    "accuracy": ["wer", "emission delay p50", "File is", "Live is"],
    "speakers": ["wrong speaker", "diarisation error rate", "invented speakers", "label delay p95"],
    "start": ["ready", "first caption", "first text", "engine imports", "model load", "warm up"],
    "turns": ["wrong cuts", "end after word s p95", "cpu ms per pause", "fused"],
    "survival spare": ["killed s p50", "spare private bytes"],
    "survival spare --voxtral --spares 1": ["killed s p50", "spare private bytes"],
    "survival server": ["kind worker", "kind engine", "words that differ 0", "lost 0"],
    "survival fleet": ["kind gateway", "kind stop-gateway-3", "went on s p50", "words that differ 0"],
}
NEED_WEIGHTS = {
    **dict.fromkeys(("accuracy", "start"), (SAMPLE, "moonshine-tiny")),
    "speakers": ("speakers",),
    "turns": (SAMPLE, "moonshine-tiny", TURN_DETECTOR),
}
CASES = [pytest.param(run, marks=[pytest.mark.ray] if run.endswith("fleet") else []) for run in RUNS]


@pytest.fixture
def nothing_is_left_changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs may settle the whole process; this one goes on."""
    for module, name in ((resuming_session, "FIRST_WAIT_S"), (wire_client, "OPEN_TIMEOUT_S")):
        monkeypatch.setattr(module, name, getattr(module, name))
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    yield
    torch.set_num_threads(threads)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_is_left_changed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", CASES)
def test_a_small_run_ends_and_prints_its_figures(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = run.split()
    skip_unless_cached(*NEED_WEIGHTS.get(name, ()))
    report = tmp_path / "report.json"
    status = importlib.import_module(f"benchmarks.{name}").main([*arguments, "--small", "--json", str(report)])
    assert not status
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert [figure for figure in RUNS[run] if figure not in printed] == []
    assert json.loads(report.read_text())


def test_no_benchmark_is_left_out() -> None:
    assert {run.split()[0] for run in RUNS} == set(benchmarks())


def test_the_package_lists_its_benchmarks() -> None:
    shown = subprocess.run([sys.executable, "-m", "benchmarks"], capture_output=True, text=True, check=True).stdout
    for name, title in benchmarks().items():
        assert name in shown and title in shown and title.endswith((".", "?"))


def test_an_engine_alone_is_measured_where_the_packages_of_the_server_are_not_installed() -> None:
    """Machines with a GPU may not have the packages of the server."""
    absent = ("zmq", "websockets", "starlette", "uvicorn", "uvloop", "av", "soxr")
    modules = ("benchmarks.engine_capacity", "tests.gpu.steps", "tests.gpu.windowed_words")
    script = f"import sys; sys.modules |= dict.fromkeys({absent}); import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", script], check=True)
