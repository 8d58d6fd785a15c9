"""Clients run in processes of their own and may block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield
