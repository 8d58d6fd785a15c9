"""From the record of a run to its figures: what counts as a failure, and times from the end of speech."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realtime.bench.load_test import Objective, RunRecord, read_run
from realtime.client.wire_client import COMPLETED, DELTA, FAILED, LAST_COMMIT

OBJECTIVE = Objective(final_p95_s=1.0, lag_p95_s=2.0)


def run_of(tmp_path: Path, *entries: dict[str, Any], clients: int = 1, warm_up_s: float = 0.0) -> RunRecord:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"client": 0, "t": 1.0, **entry}) + "\n" for entry in entries))
    return read_run([path], range(clients), silence_s=0.5, warm_up_s=warm_up_s)


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": {"type": kind, **fields}}


def turn(item: str, end_s: float, final_t: float, text: str = "hello") -> list[dict[str, Any]]:
    return [
        event(end_s, "input_audio_buffer.speech_stopped", item_id=item, audio_end_ms=int(end_s * 1000)),
        event(end_s, "input_audio_buffer.committed", item_id=item),
        event(final_t, COMPLETED, item_id=item, transcript=text),
    ]


END = {"end": 10.0}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "stopped before the client was done"),
        ([{"failure": "refused"}, END], "refused"),
        ([event(1, "input_audio_buffer.committed", item_id="a"), END], "no final for the turn a"),
        ([event(1, FAILED, item_id="a", error={"message": "too hard"}), END], "too hard"),
        ([event(1, "error", error={"message": "go away"}), END], "go away"),
    ],
)
def test_everything_a_user_would_notice_is_a_failure(tmp_path: Path, entries: list[dict[str, Any]], said: str) -> None:
    run = run_of(tmp_path, *entries)
    assert len(run.failures) == 1 and said in run.failures[0]
    assert any("1 failures" in missed for missed in OBJECTIVE.missed(run))


def test_client_without_a_trace_is_a_failure(tmp_path: Path) -> None:
    run = run_of(tmp_path, *turn("a", 2.0, 2.2), END, clients=2)
    assert run.failures == ["client 1: the generator stopped before the client was done"]


def test_nothing_to_commit_at_the_end_is_no_failure(tmp_path: Path) -> None:
    run = run_of(tmp_path, event(1, "error", error={"message": "empty", "event_id": LAST_COMMIT}), END)
    assert run.failures == [] and OBJECTIVE.missed(run) == ["no finals at all"]


def test_time_to_final_counts_from_the_end_of_speech_and_includes_the_silence(tmp_path: Path) -> None:
    run = run_of(tmp_path, *turn("a", 2.0, 2.2), *turn("b", 5.0, 5.1), *turn("noise", 7.0, 9.0, ""), END)
    assert run.finals == [pytest.approx(0.7), pytest.approx(0.6)]
    assert run.clients[0].text == "hello hello" and OBJECTIVE.missed(run) == []


def test_warm_up_is_left_out_of_times_but_not_of_words(tmp_path: Path) -> None:
    run = run_of(tmp_path, *turn("a", 2.0, 4.2), *turn("b", 5.0, 5.1), END, warm_up_s=4.5)
    assert run.finals == [pytest.approx(0.6)] and len(run.lags) == 1 and len(run.clients[0].transcripts) == 2


def test_lag_is_that_of_words_where_the_server_times_them(tmp_path: Path) -> None:
    words = event(3.0, DELTA, delta="x y", words=[{"word": "x", "end": 1.0}, {"word": "y", "end": 2.25}])
    assert [lag for _, lag in run_of(tmp_path, words, *turn("a", 2.0, 2.2), END).lags] == [0.75]
    assert [lag for _, lag in run_of(tmp_path, *turn("a", 2.0, 2.2), END).lags] == [0.0]


def test_growing_lag_misses_the_objective_even_while_it_is_small(tmp_path: Path) -> None:
    def lagging(grows: float) -> RunRecord:
        entries = [
            event(t, DELTA, delta="x", words=[{"word": "x", "end": t - 0.5 - grows * t + 0.01 * (t % 2)}])
            for t in range(1, 60)
        ]
        return run_of(tmp_path, *entries, *turn("a", 2.0, 2.2), END)

    assert OBJECTIVE.missed(lagging(0.0)) == []
    assert "lag grows by" in OBJECTIVE.missed(lagging(0.005))[0]


def test_generator_that_cannot_keep_up_spoils_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, *turn("a", 2.0, 2.2), {"late_ms": [1.0, 2.0, 500.0]}, END)
    assert "generator itself was late" in OBJECTIVE.missed(run)[0]
    assert run.figures()["generator_late_ms"]["max"] == 500.0
