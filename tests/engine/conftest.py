"""Fixtures for all tests of the engine."""

from __future__ import annotations

import pytest

from engine.runner.device import compute_on_one_thread


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models of tests are small: sharing their matrices out costs more than it saves, and threads that wait
    for each other spin, most of all on a busy machine."""
    compute_on_one_thread()
