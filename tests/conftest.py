"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from httpx._transports import default
from hypothesis import settings

# An example may take any time: on a busy machine it is not slow by its own fault.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """Each client of httpx reads the certificates of all authorities, which takes 50 ms of processor time, also if it
    never uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield
