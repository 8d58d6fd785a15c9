"""Nothing in the gateway may block the event loop."""

from __future__ import annotations

from typing import Any

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def blockbuster() -> Any:
    with blockbuster_ctx() as guard:
        yield guard
