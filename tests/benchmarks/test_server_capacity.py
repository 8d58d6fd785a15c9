"""What the benchmark of the whole server counts: lags of words and final texts, and processor time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.clients import Findings, LagClient, Orders, Schedule, Track, own_part
from benchmarks.measuring import cpu_seconds, read_process, with_descendants
from benchmarks.server_capacity import Load, Result, holds, summary

ORDERS = Orders("ws://one", [0], 1, None, delay_ms=480, speech=[(0.0, 1.6)])
SCHEDULE = Schedule(begins=0.0, join_s=0.0, counts_from=100.0, counts_until=200.0)


def result(lags: list[tuple[float, float]], behind_ms: float = 0.0, **changes: object) -> Result:
    findings = Findings(lags, appends=100, connected=2, late_ms=[0.5])
    cores = {"engine": 0.5, "clients": 0.1, "gateway 1": 0.1, "gateway 2": 0.3}
    return summary(Load(2), 10.0, [replace(findings, **changes)], cores, [(7, behind_ms)])


def test_a_point_holds_by_its_lag_its_growth_and_its_sessions() -> None:
    steady = [(index / 10, 120.0) for index in range(100)]
    assert holds(result(steady), windowed=False)
    assert not holds(result([(moment, lag + 150) for moment, lag in steady]), windowed=False), "late"
    assert not holds(result([(moment, lag + 10 * moment) for moment, lag in steady]), windowed=False), "later and later"
    for broken in (result(steady, connected=1), result(steady, failures=["closed"])):
        assert not holds(broken, windowed=False)
    assert not holds(result([]), windowed=False), "without a word there is nothing to hold"


def test_a_windowed_model_is_held_to_final_texts_and_to_what_its_engine_has_read() -> None:
    steady = [(index / 10, 1700.0) for index in range(100)]
    assert holds(result(steady, 900.0, finals=[(0.0, 700.0)] * 20), windowed=True)
    assert not holds(result(steady, 900.0), windowed=True), "no text was ever final"
    assert not holds(result(steady, 900.0, finals=[(0.0, 700.0)] * 18 + [(0.0, 1600.0)] * 2), windowed=True)
    assert not holds(result(steady, 1600.0, finals=[(0.0, 700.0)] * 20), windowed=True)
    assert result(steady)["said_to_hold"] == 7


def test_processor_time_is_counted_per_append() -> None:
    measured = result([(0.0, 1.0), (1.0, 1.0)])
    # 0.4 cores of both gateways for 10 s, and 100 appends.
    assert measured["gateway_us_per_append"] == pytest.approx(40_000)
    assert measured["engine_us_per_append"] == pytest.approx(50_000)
    assert measured["gateway_cores"] == [0.3, 0.1], "each process, the busiest first"
    json.dumps(measured)


def test_a_words_lag_counts_from_the_append_that_held_its_last_sample() -> None:
    findings = Findings()
    track = Track(np.arange(1280 * 20, dtype=np.int16).tobytes())
    client = LagClient(3, ORDERS, SCHEDULE, (track, track), findings)
    client.sent_at = [100.0 + 0.08 * index for index in range(20)]
    client.texts.extend([("lost", 100.1), ("hello", 100.9)])
    client.score({"word": "hello", "start": 0.08, "end": 0.16})
    # The second append, sent at 100.08, ends with that sample; 480 of the 820 ms are the model's.
    assert findings.lags == [(0.9, pytest.approx(340.0))]
    client.score({"word": "unknown", "start": 0.2, "end": 0.3})
    assert len(findings.lags) == 1


def test_words_in_pauses_are_counted_and_not_scored() -> None:
    findings = Findings()
    track = Track(np.zeros(16_000 * 10, dtype=np.int16).tobytes())
    client = LagClient(0, replace(ORDERS, speech=[(2.0, 4.0), (6.0, 8.0)]), SCHEDULE, (track, track), findings)
    client.start = 5 * 16_000
    client.sent_at = [100.0 + 0.08 * index for index in range(200)]
    client.silent = {100, 101}
    # In the sound that is five seconds and a half to seven seconds, which goes round after ten.
    for start, scored in ((0.5, False), (1.2, True), (2.7, True), (2.95, False), (7.5, True), (8.0, False)):
        before = len(findings.lags)
        client.texts.append(("word", 120.0))
        client.score({"word": "word", "start": start, "end": start + 0.1})
        assert (len(findings.lags) > before) == scored, start
    assert findings.in_pauses == 3


def test_a_load_is_written_in_a_word() -> None:
    assert Load.parse("600") == Load(600, 16_000, 80) and Load.parse("500:24000:50") == Load(500, 24_000, 50)
    assert Load.parse("1000:16000:80:0.5").silent == 0.5


def test_each_session_has_a_part_of_the_sound_of_its_own_and_always_the_same() -> None:
    sound = np.arange(16_000, dtype="<i2").tobytes()
    parts = [own_part(sound, number, 2.5) for number in (1, 2, 1)]
    assert parts[0] == parts[2] != parts[1] and {len(part) for part in parts} == {2 * 40_000}


def test_processor_time_counts_what_a_process_started() -> None:
    spin = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\ninput()"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        while sum(map(cpu_seconds, with_descendants(process.pid))) < 0.2:
            assert process.poll() is None
            time.sleep(0.01)
        process.communicate(b"\n")
    assert cpu_seconds(process.pid) == 0.0


def test_a_benchmark_that_is_told_to_stop_ends_its_server() -> None:
    command = [sys.executable, "-m", "benchmarks.server_capacity", "--null", "--workers", "1", "--sessions", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "ready after" in process.stdout.readline()
        started = with_descendants(process.pid)[1:]
        assert len(started) >= 2, "an engine and a gateway"
        process.terminate()
        assert process.wait() != 0
        deadline = time.monotonic() + 60
        while any(read_process(pid, "cmdline") for pid in started):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_no_two_sessions_send_the_same_frames() -> None:
    track = Track(np.arange(-12_800, 12_800, dtype=np.int16).tobytes())
    clients = [LagClient(number, ORDERS, SCHEDULE, (track, track), Findings()) for number in range(50)]
    frames = [{bytes(track.piece(client.start + 1280 * k, 1280)) for k in range(20)} for client in clients]
    assert sum(map(len, frames)) == len(set().union(*frames))


def test_a_final_text_is_late_from_the_end_of_speech_on() -> None:
    findings = Findings()
    track = Track(np.zeros(16_000 * 10, dtype=np.int16).tobytes())
    client = LagClient(0, ORDERS, SCHEDULE, (track, track), findings)
    client.sent_at = [100.0 + 0.08 * index for index in range(50)]
    events = [
        {"type": "input_audio_buffer.speech_stopped", "item_id": "a", "audio_end_ms": 2100},
        {"type": "conversation.item.input_audio_transcription.completed", "item_id": "a", "transcript": "yes"},
        {"type": "conversation.item.input_audio_transcription.completed", "item_id": "b", "transcript": "no end"},
    ]
    for event in events:
        client.take(event, now=102.5)
    # Speech ended half a second before the turn did, at 1.6 s, in the append that was sent at 101.52.
    assert findings.finals == [(2.5, pytest.approx(980.0))]
