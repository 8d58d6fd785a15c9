"""`tickertape plan`: the number of engines follows from measured figures, and every assumption is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from realtime import cli
from realtime.commands.plan import MEASURED, Engine, plan

SMALL = Engine("small", "a box", speaking=10, streams=40, source="a test", silence_is_free=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sessions", "0"], "--sessions must be at least 1"),
        (["--sessions", "5", "--silent", "50"], "a share from 0 to 1"),
        (["--sessions", "5", "--headroom", "1"], "--headroom must be"),
        (["--sessions", "5", "--cores", "4"], "--cores is for models that run on the CPU"),
        (["--sessions", "5", "--server", "http://127.0.0.1:1", "--cores", "4"], "leave --model and --cores out"),
        (["--sessions", "5", "--server", "ftp://127.0.0.1"], "ftp"),
    ],
)
def test_bad_numbers_get_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("sessions", "silent", "headroom", "engines", "limit"),
    [
        (1, 0.0, 0.2, 1, "speaking streams"),
        (8, 0.0, 0.2, 1, "speaking streams"),
        (9, 0.0, 0.2, 2, "speaking streams"),
        (16, 0.5, 0.2, 1, "speaking streams"),
        (400, 1.0, 0.2, 10, "open streams"),
        (30, 0.0, 0.0, 3, "speaking streams"),
    ],
)
def test_engines_follow_from_speech_and_from_memory(
    sessions: int, silent: float, headroom: float, engines: int, limit: str
) -> None:
    found = plan(sessions, silent, headroom, SMALL)
    assert (found.engines, found.limit) == (engines, limit)


def test_gateways_follow_from_sessions_and_silence_is_free_only_where_it_was_measured() -> None:
    assert plan(301, 1.0, 0.0, SMALL).gateways == 3
    assert plan(700, 0.5, 0.0, MEASURED["voxtral"]).engines == 2


def test_the_answer_states_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--sessions", "20", "--silent", "0.5", "--model", "moonshine-tiny", "--cores", "8"]) == 0
    shown = capsys.readouterr().out
    assert "engines    1 (moonshine-tiny, 8 cores each)" in shown and "only 2 cores were measured" in shown
    assert "counts as speaking for 30 s" in shown and "20% of each engine stay free" in shown


class _Server(BaseHTTPRequestHandler):
    answer: dict[str, Any] = {}

    def do_GET(self) -> None:
        body = json.dumps(self.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as listening:
        thread = Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_running_server_gives_its_own_figures(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"engines": [{"model": "m"}, {"model": "m"}], "load_per_stream": 0.0, "streams_that_hold": 40}
    answer["streams_total"] = 128
    monkeypatch.setattr(_Server, "answer", {"engines": []})
    assert cli.main(["plan", "--sessions", "50", "--server", server]) == 1
    assert "has no engine at the moment" in capsys.readouterr().err
    monkeypatch.setattr(_Server, "answer", answer)
    assert cli.main(["plan", "--sessions", "50", "--server", server]) == 1
    assert "has not measured the cost of a stream yet" in capsys.readouterr().err
    monkeypatch.setattr(_Server, "answer", {**answer, "load_per_stream": 0.05})
    assert cli.main(["plan", "--sessions", "50", "--server", server, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"]["speaking"] == 20 and found["engine"]["streams"] == 64
    assert found["engines"] == 4 and found["engines_with_one_lost"] == 5 and server in found["assumptions"][0]
