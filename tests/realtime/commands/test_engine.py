"""`tickertape engine`: errors when it cannot start."""

from __future__ import annotations

from typing import Any

import pytest

from engine.boundary.sockets import CannotListen
from realtime.cli import main


def test_address_that_is_taken_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_engine(address: str, *_: Any, **__: Any) -> None:
        raise CannotListen(f"cannot listen on {address!r}: Address already in use; choose another address")

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("realtime.commands.engine.fetch", lambda name: None)
    monkeypatch.setattr("engine.server.main.run_engine", run_engine)
    assert main(["engine", "--listen", "tcp://127.0.0.1:5555"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "error: cannot listen on 'tcp://127.0.0.1:5555': Address already in use; choose another address"
