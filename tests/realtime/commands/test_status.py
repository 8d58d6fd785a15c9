"""`tickertape status`: servers that are missing, foreign, not ready or gone are named; figures are the server's."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realtime import cli
from realtime.client.wire_client import HttpClient
from realtime.commands import status_view
from realtime.commands.status import own_url
from realtime.commands.status_view import Histogram, Quantile, Snapshot, StatusView
from realtime.config import ServerConfig
from tests.realtime.plain_server import answering, reply

ENGINE = {"streams_used": 3, "streams_total": 8, "speaking": 2, "load": 0.5, "lag_ms": 120}
CAPACITY: dict[str, Any] = {
    "sessions": 4,
    "connected": 3,
    "speaking": 2,
    "streams_used": 3,
    "streams_total": 8,
    "streams_counted": 2,
    "streams_that_hold": 5,
    "streams_free": 3,
    "load": 0.5,
    "load_per_stream": 0.15,
    "max_load": 0.95,
    "engines_wanted": 2,
    "engines": [ENGINE],
}
METRICS = """\
# TYPE tickertape_lag_seconds histogram
tickertape_lag_seconds_bucket{le="0.1"} 50
tickertape_lag_seconds_bucket{le="0.5"} 100
tickertape_lag_seconds_bucket{le="+Inf"} 100
# TYPE tickertape_refused counter
tickertape_refused_total{reason="capacity"} 7
# TYPE tickertape_engine_restarts counter
tickertape_engine_restarts_total 1
"""


@contextmanager
def server(port: int = 0, state: str = "ready", **answers: tuple[str, str]) -> Iterator[str]:
    known = {
        "/ready": ("200 OK" if state == "ready" else "503 Service Unavailable", json.dumps({"status": state})),
        "/capacity": ("200 OK", json.dumps(CAPACITY)),
        "/metrics": ("200 OK", METRICS),
    } | {f"/{path}": answer for path, answer in answers.items()}

    def answer(connection: socket.socket) -> None:
        path = connection.recv(65536).split(b" ")[1].decode()
        status, body = known[path]
        reply(connection, status, body.encode())

    with answering(answer, port) as url:
        yield url


@pytest.mark.parametrize("how", [[], ["--json"], ["--ready"]])
def test_nobody_there_is_an_error_in_one_line(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "127.0.0.1:9", *how]) == 1
    shown = capsys.readouterr()
    assert "no server answers at http://127.0.0.1:9" in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("capacity", ("404 Not Found", ""), "/capacity refused with 404: it gives no reason"),
        ("capacity", ("200 OK", "<html>hello</html>"), "does not answer as a Tickertape server does"),
        ("capacity", ("200 OK", "[1]"), "does not answer as a Tickertape server does"),
        ("capacity", ("200 OK", '{"sessions": "many"}'), "does not answer as a Tickertape server does"),
        ("ready", ("301 Moved", ""), "/ready refused with 301"),
        ("metrics", ("401 No", '{"error": {"message": "A key is required."}}'), "refused with 401: A key is required."),
        ("metrics", ("200 OK", "not { metrics"), "cannot be read"),
    ],
)
def test_what_is_no_tickertape_is_said(
    path: str, answer: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(**{path: answer}) as url:
        assert cli.main(["status", "--json", url]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("ready", "code"), [("ready", 0), ("starting", 1), ("draining", 1)])
def test_ready_is_an_exit_code(ready: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with server(state=ready) as url:
        assert cli.main(["status", "--ready", url]) == code
    assert capsys.readouterr().out == f"{ready}\n"


def test_json_is_one_object_with_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as url:
        assert cli.main(["status", "--json", url]) == 0
    shown = capsys.readouterr().out
    body = json.loads(shown)
    assert shown.count("\n") == 1
    assert (body["url"], body["status"], body["sessions"], body["load"]) == (url, "ready", 4, 0.5)
    assert body["lag_seconds"] == {"p50": 0.1, "p95": 0.46, "p99": 0.492, "count": 100, "last_bound": 0.5}
    assert body["final_seconds"] == {"p50": None, "p95": None, "p99": None, "count": 0, "last_bound": None}
    assert body["engines"] == [ENGINE] and body["engine_restarts"] == 1 and body["refused"] == {"capacity": 7}


def looks(*steps: Callable[[], object]) -> Callable[[float], None]:
    """In place of sleeping: something happens before each next look, and Ctrl-C after the last."""
    left = list(steps)

    def sleep(seconds: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    return sleep


def test_server_that_goes_away_is_said_once_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as first, ExitStack() as second:
        url = first.enter_context(server())
        port = int(url.rpartition(":")[2])
        sleep = looks(first.close, lambda: None, lambda: second.enter_context(server(port, state="starting")))
        with pytest.raises(KeyboardInterrupt):
            status_view.watch(HttpClient(url), 1.0, sleep)
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in capsys.readouterr().out.splitlines()]
    figures = "sessions=4 connected=3 speaking=2 free=3 load=0.50 lag_p95={} final_p95=n/a engines=1/2"
    assert lines[0] == f"ready {figures.format('0.46')}"
    assert lines[1].startswith("no answer: no server answers at") and lines[1].endswith("; trying again")
    assert lines[2] == f"starting {figures.format('n/a')}" and len(lines) == 3


def snapshot(lag: Histogram, **changes: Any) -> Snapshot:
    return Snapshot("ready", CAPACITY | changes, lag, Histogram(), 1, {"capacity": 7})


def shown(view: StatusView) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(view.screen("12:00:00"))
    return capture.get()


def test_screen_keeps_the_last_figures_while_nobody_answers() -> None:
    view = StatusView("http://box:8000")
    view.add(snapshot(Histogram({0.1: 10, float("inf"): 10})), 0.0)
    assert "no answer" not in shown(view)
    view.add_failure("no server answers", "12:03:05")
    view.add_failure("timed out", "12:03:06")
    text = shown(view)
    assert "no answer since 12:03:05: no server answers; trying again" in text
    assert "4 open, 3 connected, 2 speaking" in text and "1 of 2 connected, 1 restart" in text
    assert "7 (capacity)" in text and "3 of 8 streams open, 2 speaking, load 50%, 0.12 s of audio not" in text
    view.add(snapshot(Histogram(), sessions=9), 60.0)
    assert "no answer" not in shown(view) and "9 open, 3 connected" in shown(view)


def test_lag_is_that_of_the_last_minute() -> None:
    view = StatusView("http://box:8000")
    for second, slow in ((0, 0), (30, 100), (61, 100), (100, 100)):
        view.add(snapshot(Histogram({0.1: 100 + second, 8.0: 100 + second + slow})), float(second))
        if second == 30:
            assert "p95 7" in shown(view), "a hundred slow ones have come since the first look"
    assert "p95 0.10" in shown(view), "the slow ones were seen more than a minute ago"


def test_server_started_again_counts_from_zero() -> None:
    now, before = Histogram({0.1: 5.0}), Histogram({0.1: 50.0})
    assert now.since(before) is now and before.since(now).total == 45


def test_quantiles_lie_within_their_bucket() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram({0.1: 10, 0.5: 20, float("inf"): 20}).quantile(0.75) == Quantile(pytest.approx(0.3))


def test_what_lies_beyond_the_last_bound_is_no_measurement() -> None:
    """A server that takes longer than its histogram can tell: "8.00 s" would not be a measured value."""
    slow = Histogram({0.1: 0, 8.0: 1, float("inf"): 3})
    assert slow.quantile(0.3) == Quantile(pytest.approx(7.21)) and slow.quantile(0.5) == Quantile(8.0, is_beyond=True)
    assert slow.as_json() == {"p50": None, "p95": None, "p99": None, "count": 3, "last_bound": 8.0}
    view = StatusView("http://box:8000")
    view.add(snapshot(slow), 0.0)
    assert "p50 > 8 s, p95 > 8 s, p99 > 8 s from received to processed audio" in shown(view)
    assert "lag_p95=>8 final_p95=n/a" in view.line("12:00:00")


def test_what_was_not_measured_is_said_in_words() -> None:
    view = StatusView("http://box:8000")
    view.add(snapshot(Histogram(), load_per_stream=0, engines=[], load=1.0, streams_free=1), 0.0)
    text = shown(view)
    assert "3 of 8 open; 1 more session can start; how many can speak at once is not measured yet" in text
    assert "n/a: no engine is connected" in text and "n/a: no audio came in the last minute" in text
    assert "n/a: no turn ended in the last minute" in text and "load=n/a" in view.line("12:00:00")
    missing = {"name": "", "address": "tcp://box:9", "problem": "another secret"}
    view.add(snapshot(Histogram(), engines_missing=[missing]), 1.0)
    text = shown(view)
    assert "3 of 8 open; 2 speaking, 5 can speak at once; 3 more sessions can start" in text
    assert "the engine is busy 50% of the time; new sessions are refused above 95%" in text
    assert "tcp://box:9: another secret" in text


@pytest.mark.parametrize(
    ("state", "said"), [("starting", "until an engine has loaded"), ("draining", "no new sessions")]
)
def test_a_server_that_takes_no_sessions_is_said_in_words(state: str, said: str) -> None:
    view = StatusView("http://box:8000")
    view.add(replace(snapshot(Histogram()), status=state), 0.0)
    assert f"{state}: it takes no" in shown(view) and said in shown(view)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (ServerConfig(), "http://127.0.0.1:8000"),
        (ServerConfig(host="0.0.0.0", port=9), "http://127.0.0.1:9"),
        (ServerConfig(host="::"), "http://[::1]:8000"),
        (ServerConfig(host="10.0.0.7", tls_cert="c", tls_key="k"), "https://10.0.0.7:8000"),
    ],
)
def test_own_server_is_where_the_configuration_says(settings: ServerConfig, url: str) -> None:
    assert own_url(settings) == url


def test_without_a_url_the_environment_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server() as url:
        monkeypatch.setenv("TICKERTAPE_SERVER_PORT", url.rpartition(":")[2])
        assert cli.main(["status", "--ready"]) == 0
        monkeypatch.delenv("TICKERTAPE_SERVER_PORT")
        file = tmp_path / "tickertape.toml"
        file.write_text(f"[server]\nport = {url.rpartition(':')[2]}\n")
        assert cli.main(["status", "--ready", "--config", str(file)]) == 0
    monkeypatch.setenv("TICKERTAPE_SERVER_PORT", "many")
    assert cli.main(["status", "--ready"]) == 2
    assert "server.port must be a whole number" in capsys.readouterr().err
