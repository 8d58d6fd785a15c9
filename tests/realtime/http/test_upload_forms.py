"""The storage of uploads: every byte is counted once and released once, and refused at a bound."""

from __future__ import annotations

from typing import Any

import pytest

from realtime.config import LimitsConfig
from realtime.errors import Refusal
from realtime.http.upload_forms import Spool, Upload

LIMITS = LimitsConfig(uploads=1, uploads_waiting=1, spool_bytes=100)


def sender(*pieces: bytes) -> Any:
    waiting = list(pieces)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0)} if waiting else {"type": "http.disconnect"}

    return receive


async def test_places_are_bounded_and_given_back_once() -> None:
    spool = Spool(LIMITS)
    first, second = Upload(spool, 100), Upload(spool, 100)
    with pytest.raises(Refusal) as refused:
        Upload(spool, 100)
    assert refused.value.status == 503 and refused.value.retry_after_s
    await first.close()
    await first.close()
    assert spool.uploads == 1
    third = Upload(spool, 100)
    await second.close()
    await third.close()
    assert spool.uploads == 0


async def test_bytes_are_counted_as_they_arrive() -> None:
    spool = Spool(LIMITS)
    first, second = Upload(spool, 90), Upload(spool, 90)
    receive = first.counted(sender(bytes(50), bytes(40), b"x"))
    await receive()
    await receive()
    with pytest.raises(Refusal) as refused:
        await receive()
    assert refused.value.status == 413 and spool.bytes == 90
    with pytest.raises(Refusal) as refused:
        await second.counted(sender(bytes(20)))()
    assert refused.value.status == 503
    await first.close()
    assert (await second.counted(sender(bytes(20)))())["body"] == bytes(20)
    await second.close()
    assert (spool.uploads, spool.bytes) == (0, 0)
