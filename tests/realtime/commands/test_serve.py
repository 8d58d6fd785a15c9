"""Readiness notifications for systemd and others: a bad descriptor is refused, a closed listener does no harm."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from realtime import cli
from realtime.commands import serve
from realtime.commands.serve import Readiness
from realtime.commands.terminal import CommandFailed


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.mark.parametrize("number", ["987", "-1", "99999999999999"])
def test_descriptor_that_is_not_open_is_a_usage_error(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--ready-fd", number, "--port", "0"]) == 2
    assert f"--ready-fd {number}: " in capsys.readouterr().err


def test_descriptor_open_for_reading_only_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/null") as file:
        assert cli.main(["serve", "--ready-fd", str(file.fileno()), "--port", "0"]) == 2
    assert "open it for writing" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["/no/such/socket", "@nobody-there", "relative", "/" + "x" * 200])
def test_nobody_at_the_socket_is_said_and_survived(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    Readiness().ready("http://127.0.0.1:1")
    assert f"cannot notify {address}: " in capsys.readouterr().err


def test_reader_of_the_descriptor_that_left_is_said_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    readiness = Readiness(writer)
    os.close(reader)
    readiness.ready("http://127.0.0.1:1")
    assert "cannot write to file descriptor" in capsys.readouterr().err


def test_systemd_is_told_and_children_are_not_asked_to_speak(systemd: socket.socket) -> None:
    readiness = Readiness()
    assert "NOTIFY_SOCKET" not in os.environ
    readiness.ready("http://127.0.0.1:8000")
    assert systemd.recv(4096) == b"READY=1\nSTATUS=listening on http://127.0.0.1:8000\n"
    readiness.stopping()
    assert systemd.recv(4096).startswith(b"STOPPING=1\n")


def test_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"tickertape-test-{os.getpid()}"
        listener.bind("\0" + name)
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        Readiness().stopping()
        assert listener.recv(4096).startswith(b"STOPPING=1")


def test_descriptor_gets_the_address_in_a_line_and_is_closed() -> None:
    reader, writer = os.pipe()
    Readiness(writer).ready("http://127.0.0.1:8000")
    with os.fdopen(reader) as file:
        assert file.read() == "http://127.0.0.1:8000\n", "the end is seen, so it was closed"


def test_a_user_who_may_start_too_few_threads_is_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, left = threading.Thread.start, [serve.MIN_THREADS - 1]

    def limited(self: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(self)

    serve.check_threads()
    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(CommandFailed, match=r"only 23 of at least 24 threads .* \(ulimit -u\)"):
        serve.check_threads()
    assert threading.active_count() == before
