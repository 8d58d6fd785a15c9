"""The composition root: which errors of the event loop are logged as errors."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from realtime.app import on_loop_error


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(OSError(errno.ENOTCONN, "Transport endpoint is not connected"), False), (ValueError("a fault of ours"), True)],
)
async def test_a_client_that_resets_its_connection_is_no_error(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context = {"message": "Fatal error on transport TCPTransport", "exception": error, "transport": object()}
    on_loop_error(asyncio.get_running_loop(), context)
    assert any(record.levelno >= logging.ERROR for record in caplog.records) is is_logged
