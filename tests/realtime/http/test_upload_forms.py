"""The storage of uploads: every byte is counted once and released once, and refused at a bound."""

from __future__ import annotations

from typing import Any

import pytest

from realtime.config import AuthConfig, Config, LimitsConfig
from realtime.errors import Refusal
from realtime.http.upload_forms import Spool, Upload

LIMITS = LimitsConfig(uploads=1, uploads_waiting=1, spool_bytes=100)


def sender(*pieces: bytes) -> Any:
    waiting = list(pieces)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0)} if waiting else {"type": "http.disconnect"}

    return receive


async def test_places_are_bounded_and_given_back_once() -> None:
    spool = Spool(Config(limits=LIMITS))
    first, second = Upload(spool, 100, "a"), Upload(spool, 100, "a")
    with pytest.raises(Refusal) as refused:
        Upload(spool, 100, "a")
    assert refused.value.status == 503 and refused.value.retry_after_s
    await first.close()
    await first.close()
    assert spool.uploads == 1
    third = Upload(spool, 100, "a")
    await second.close()
    await third.close()
    assert spool.uploads == 0


async def test_bytes_are_counted_as_they_arrive() -> None:
    spool = Spool(Config(limits=LIMITS))
    first, second = Upload(spool, 90, "a"), Upload(spool, 90, "a")
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


async def test_one_of_several_keys_takes_half_of_the_places_and_bytes() -> None:
    limits = LimitsConfig(uploads=2, uploads_waiting=4, spool_bytes=100, upload_bytes=20)
    spool = Spool(Config(limits=limits, auth=AuthConfig(("first-key", "second-key"))))
    uploads = [Upload(spool, 100, "a") for _ in range(3)]
    with pytest.raises(Refusal, match="One of several keys may have 3 files at once"):
        Upload(spool, 100, "a")
    await uploads[0].counted(sender(bytes(50)))()
    with pytest.raises(Refusal, match="One of several keys may have 50 bytes of files"):
        await uploads[1].counted(sender(b"x"))()
    for upload in uploads[:2]:
        upload.hold_text(12 * 1024 * 1024, reference=True)
    with pytest.raises(Refusal, match="One of several keys"):
        uploads[2].hold_text(1, reference=True)
    other = Upload(spool, 100, "b")
    await other.counted(sender(bytes(50)))()
    other.hold_text(11 * 1024 * 1024, reference=True)
    for upload in (*uploads, other):
        await upload.close()
    assert (spool.uploads, spool.bytes, spool.reference_bytes) == (0, 0, 0)


async def test_the_share_of_a_key_has_room_for_the_largest_file() -> None:
    limits = LimitsConfig(spool_bytes=100, upload_bytes=90)
    upload = Upload(Spool(Config(limits=limits, auth=AuthConfig(("first-key", "second-key")))), 90, "a")
    await upload.counted(sender(bytes(90)))()
    await upload.close()


@pytest.mark.parametrize("keys", [(), ("first-key",), ("first-key", "first-key")], ids=len)
async def test_where_no_keys_share_a_server_one_client_may_have_all_places(keys: tuple[str, ...]) -> None:
    spool = Spool(Config(limits=LIMITS, auth=AuthConfig(keys)))
    for upload in [Upload(spool, 100, "a") for _ in range(2)]:
        await upload.close()
