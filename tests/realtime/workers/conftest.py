"""Clients of these tests resume at once, and engines start on their event loop, which reads files."""

from __future__ import annotations

import pytest

from realtime.client import resuming_session


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_session, "FIRST_WAIT_S", 0.05)


@pytest.fixture(autouse=True)
def blockbuster() -> None:
    """Not here: what starts an engine and its client may block."""
