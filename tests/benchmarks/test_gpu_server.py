"""The benchmark of the whole server, with a tiny model on the CPU: what it counts, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_server import Result, _cpu_of, _with_descendants, main, summary
from benchmarks.paced_clients import Client, Findings, Orders, Schedule, Track

ORDERS = Orders(["ws://one", "ws://two"], [0], 1, 16_000, 80, 480, 0.0, None)
SCHEDULE = Schedule(begins=0.0, join_s=0.0, counts_from=100.0, counts_until=200.0)


def found(lags: list[tuple[float, float]], **changes: object) -> dict[str, object]:
    return {**vars(Findings()), "lags": lags, "appends": 100, "connected": 2, "late_ms": [0.5], **changes}


def result(lags: list[tuple[float, float]], **changes: object) -> Result:
    return summary(2, 10.0, [found(lags, **changes)], cores=[0.5, 0.1, 0.2, 0.2])


def test_a_point_holds_by_its_lag_its_growth_and_its_sessions() -> None:
    steady = [(index / 10, 120.0) for index in range(100)]
    assert result(steady).holds
    assert not result([(moment, lag + 150) for moment, lag in steady]).holds, "late"
    assert not result([(moment, lag + 10 * moment) for moment, lag in steady]).holds, "later and later"
    assert not result(steady, connected=1).holds and not result(steady, failures=["closed"]).holds
    assert not result([]).holds, "nobody said anything"


def test_processor_time_is_counted_per_append() -> None:
    measured = result([(0.0, 1.0), (1.0, 1.0)])
    # 0.4 cores of both gateways for 10 s, and 100 appends.
    assert measured.gateway_us_per_append == pytest.approx(40_000)
    assert measured.engine_us_per_append == pytest.approx(50_000)
    json.dumps(asdict(measured))


def test_a_words_lag_counts_from_the_append_that_held_its_last_sample() -> None:
    findings = Findings()
    track = Track(np.arange(1280 * 20, dtype=np.int16))
    client = Client(3, ORDERS, SCHEDULE, (track, track), findings)
    client._sent = [100.0 + 0.08 * index for index in range(20)]
    client._texts.extend([("lost", 100.1), ("hello", 100.9)])
    client._note({"word": "hello", "start": 0.08, "end": 0.16})
    # The second append, sent at 100.08, ends with that sample; 480 of the 820 ms are the model's.
    assert findings.lags == [(0.9, pytest.approx(340.0))]
    client._note({"word": "unknown", "start": 0.2, "end": 0.3})
    assert len(findings.lags) == 1


def test_processor_time_counts_what_a_process_started() -> None:
    spin = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\ninput()"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        while sum(map(_cpu_of, _with_descendants(process.pid))) < 0.2:
            assert process.poll() is None
            time.sleep(0.01)
        process.communicate(b"\n")
    assert _cpu_of(process.pid) == 0.0


def test_no_two_sessions_send_the_same_frames() -> None:
    track = Track(np.arange(-12_800, 12_800, dtype=np.int16))
    clients = [Client(number, ORDERS, SCHEDULE, (track, track), Findings()) for number in range(50)]
    frames = [{bytes(track.piece(client._start + 1280 * k, 1280)) for k in range(20)} for client in clients]
    assert sum(map(len, frames)) == len(set().union(*frames))


@pytest.mark.timeout(600)
def test_the_whole_server_with_a_tiny_model(tmp_path: Path) -> None:
    arguments = "--small --sessions 2 --seconds 2 --max-streams 4 --clients 1 --silent 0.2 --rate 24000"
    arguments += " --append-ms 50 --max-load 0"
    (measured,) = main([*arguments.split(), "--json", str(tmp_path / "result.json"), "--logs", str(tmp_path)])
    assert measured.connected == 2 and not measured.failures and measured.appends > 10
    assert measured.events["session.updated"] == 2
    assert json.loads((tmp_path / "result.json").read_text())["results"][0]["sessions"] == 2
