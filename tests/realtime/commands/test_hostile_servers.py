"""Commands against a server that means harm: its text cannot control the terminal, and its answers are bounded."""

from __future__ import annotations

import io
import json
import os
import pty
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realtime import cli
from realtime.client import wire_client
from realtime.client.wire_client import MAX_MESSAGE_CHARACTERS, CannotConnect, HttpClient
from realtime.commands import terminal
from realtime.commands.status_view import Histogram, Snapshot, StatusView
from realtime.commands.transcripts import CaptionView, ShownWord
from tests.realtime.commands.test_status import CAPACITY, METRICS, server
from tests.realtime.plain_server import answering, reply

# Renames the window, clears the screen, moves up and writes over a line, changes the direction of text, C1 codes.
ESCAPES = "\x1b]0;mine\x07\x1b[2J\x1b[1A\rpwned\x7f\x9b31m\u202e"
# What a terminal must not get. Rich writes escape sequences of its own, but none of these.
FORBIDDEN = ("\x1b]", "\x1b[2J\x1b[1A\r", "\x07", "\x7f", "\x9b", "\u202e")


def harmless(text: str) -> bool:
    return "pwned" in text and not any(part in text for part in FORBIDDEN)


def test_error_of_a_server_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"error": {"message": ESCAPES}}).encode()
    with answering(lambda connection: reply(connection, "500 No", body)) as url:
        assert cli.main(["status", "--json", url]) == 1
    assert harmless(capsys.readouterr().err)


def test_state_of_a_server_cannot_control_the_terminal() -> None:
    seen = Snapshot(ESCAPES, CAPACITY | {"engines_missing": [_missing()]}, Histogram(), Histogram(), 0, {ESCAPES: 1})
    view = StatusView("http://x")
    view.add(seen, 0.0)
    view.add_failure(ESCAPES, "12:00:00")
    file = io.StringIO()
    Console(file=file, width=500, force_terminal=True).print(view.screen("12:00:00"))
    assert harmless(file.getvalue()) and file.getvalue().count("pwned") == 4
    assert harmless(view.line("12:00:00"))


def _missing() -> dict[str, Any]:
    return {"name": "", "address": ESCAPES, "problem": ""}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_words_of_a_server_cannot_control_the_terminal(is_terminal: bool) -> None:
    file = io.StringIO()
    view = CaptionView(Console(file=file, width=500, force_terminal=is_terminal), show_words=True)
    with view:
        view.measure_delays(deque(), ESCAPES, [ShownWord(ESCAPES, 0.0, 1.0)], 1.0)
        view.show_open(ESCAPES)
        view.note(ESCAPES)
        view.add_line(ESCAPES, [ShownWord(ESCAPES, 0.0, 1.0)])
    assert harmless(file.getvalue())


def test_result_is_made_harmless_for_a_terminal_and_left_alone_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.out(f"one\n\t{ESCAPES}")
    assert capsys.readouterr().out == f"one\n\t{ESCAPES}\n"
    main, side = pty.openpty()
    try:
        with os.fdopen(side, "w") as screen:
            monkeypatch.setattr("sys.stdout", screen)
            terminal.out(f"one\n\t{ESCAPES}")
            shown = os.read(main, 65536).decode()
    finally:
        os.close(main)
    assert shown.startswith("one\r\n\t\\x1b]0;mine") and harmless(shown)


def test_marks_of_hebrew_and_arabic_text_stay_and_what_turns_letters_around_does_not() -> None:
    said = "\u200f\u05e9\u05dc\u05d5\u05dd, C++\u200e (\u0645\u0631\u062d\u0628\u0627\u061c)"
    file = io.StringIO()
    view = CaptionView(Console(file=file, width=500, force_terminal=False), show_words=False)
    with view:
        view.add_line(said, [ShownWord(said, 0.0, 1.0)])
    assert said in file.getvalue()
    for turns in map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))):
        assert terminal.harmless(f"a{turns}b") == f"a\\u{ord(turns):x}b"


def test_transcript_of_a_server_is_one_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(b"RIFF")
    for body in (
        '{"text": "x", "words": [{"word": 5, "start": 0, "end": 1}]}',
        '{"text": "x", "words": [{"word": "a", "start": 1e999, "end": 1}]}',
        '{"text": "x", "words": [{"word": "a", "start": 0, "end": NaN}]}',
        '{"text": "x", "duration": 1e999}',
        '{"text": ' + "[" * 100_000,
        '{"text": ' + "9" * 5000 + "}",
        "[]",
    ):
        with answering(uploads(body.encode())) as url:
            assert cli.main(["transcribe", "--server", url, str(file)]) == 1
        said = capsys.readouterr().err
        assert "the server's answer is not a transcript" in said and "unexpected" not in said, (body[:60], said)


def uploads(body: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        head = connection.recv(65536)
        if head.startswith(b"GET"):
            return reply(connection, "200 OK", b'{"data": [{"id": "m"}]}')
        while b"--\r\n" not in head[-8:]:
            head = connection.recv(65536)
        return reply(connection, "200 OK", body)

    return answer


@pytest.mark.parametrize("name", ["a [b] [red]c.wav", "\x1b[2Jpwned.wav", "[@click=(.wav"])
def test_file_may_have_any_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(b"RIFF")
    with answering(uploads(b'{"text": "hello"}')) as url:
        assert cli.main(["transcribe", "--server", url, "--output-dir", str(tmp_path), str(tmp_path / name)]) == 0
    shown = capsys.readouterr().err
    assert "\x1b[2J" not in shown and terminal.harmless(name) in shown


def test_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_client, "MAX_STATUS_BYTES", 100_000)

    def flood(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                connection.sendall(bytes(65536))
        except OSError:
            pass

    with answering(flood) as url, pytest.raises(CannotConnect, match="more than 100000 bytes"):
        HttpClient(url).get("/ready")


def test_answer_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_client, "STATUS_S", 0.3)

    def drip(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while True:
                connection.sendall(b" ")
                time.sleep(0.01)
        except OSError:
            pass

    with answering(drip) as url, pytest.raises(CannotConnect, match=r"did not answer within 0.3 s"):
        HttpClient(url).get("/ready")


def test_reason_of_a_refusal_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    for message in ("x" * 10**6, ["x"] * 10**5, {"a": "x" * 10**6}, None, 10**300):
        body = json.dumps({"error": {"message": message}}).encode()
        with answering(lambda connection, body=body: reply(connection, "500 No", body)) as url:
            assert cli.main(["status", "--json", url]) == 1
        assert len(capsys.readouterr().err) < MAX_MESSAGE_CHARACTERS + 200


@pytest.mark.parametrize(
    "changed",
    [
        {"engines": 5},
        {"engines": [5]},
        {"engines": [{}]},
        {"engines": [{"streams_used": 1, "streams_total": 1, "speaking": 1, "load": "x", "lag_ms": 1}]},
        {"engines_missing": [{}]},
        {"engines_missing": "x"},
        {"load": 10**400},
        {"max_load": "x"},
        {"load_per_stream": []},
        {"engines_wanted": {}},
    ],
)
def test_capacity_of_another_shape_is_no_tickertape(
    changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with server(capacity=("200 OK", json.dumps(CAPACITY | changed))) as url:
        assert cli.main(["status", "--json", url]) == 1
        assert "does not answer as a Tickertape server does" in capsys.readouterr().err
        assert cli.main(["plan", "--sessions", "5", "--server", url]) in (0, 1)
        assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize("value", ["+Inf", "NaN", "1e999"])
def test_metrics_that_are_no_numbers_are_said(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with server(metrics=("200 OK", METRICS.replace("restarts_total 1", f"restarts_total {value}"))) as url:
        assert cli.main(["status", "--json", url]) == 1
    assert "/metrics cannot be read" in capsys.readouterr().err
