"""The gateway's side of calls, without a call: it does not load aiortc, and knows its address."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from realtime.errors import Refusal
from realtime.serving import webrtc_calls
from realtime.serving.media_processes import ANSWER, EVENT, FRAME, MAX_FRAME_BYTES
from realtime.serving.webrtc_calls import CallLine, _address
from tests.waiting import PATIENCE_S


def test_the_gateway_does_not_load_aiortc() -> None:
    program = "import sys, realtime.app; assert not {'aiortc', 'aioice', 'av'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("reached", "told"),
    [("127.0.0.1", "127.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("::1", "::1"), (None, None), ("/run/x", None)],
)
def test_the_address_that_clients_are_told(reached: str | None, told: str | None) -> None:
    assert _address(reached) == told


async def lines(monkeypatch: pytest.MonkeyPatch) -> tuple[CallLine, asyncio.StreamReader, asyncio.StreamWriter]:
    """A line, and the side of its process."""
    monkeypatch.setattr(webrtc_calls._program, "end", lambda number: None)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    return CallLine(ours, 1), reader, writer


async def test_a_process_that_ends_or_lies_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (b"", b"a", FRAME.pack(ANSWER, MAX_FRAME_BYTES + 1), FRAME.pack(ANSWER, 10) + b"short"):
        line, _, writer = await lines(monkeypatch)
        writer.write(said)
        writer.close()
        with pytest.raises(Refusal) as refused:
            await line.begin({})
        assert refused.value.code == "call_failed"
        line.close()


async def test_nothing_follows_a_frame_that_was_sent_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    line, reader, writer = await lines(monkeypatch)
    sending = asyncio.create_task(line.send({"type": "websocket.send", "text": "x" * 3_000_000}))
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.readexactly(FRAME.size) == FRAME.pack(EVENT, 3_000_000)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    with pytest.raises(OSError, match="in part"):
        await line.send({"type": "websocket.send", "text": "more"})
    line.close()
    writer.close()


async def test_a_killed_line_wakes_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    line, _, writer = await lines(monkeypatch)
    receiving = asyncio.create_task(line.receive())
    await asyncio.sleep(0)
    line.kill()
    async with asyncio.timeout(PATIENCE_S):
        assert (await receiving)["type"] == "websocket.disconnect"
    line.close()
    writer.close()
