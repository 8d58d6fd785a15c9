"""Deepgram Flux with a real model and a person who reads, with pauses in sentences and between them."""

from __future__ import annotations

import wave

import pytest

from engine.weights.store import pull
from tests.cached_models import skip_unless_cached
from tests.e2e.raw_client import raw_client
from tests.e2e.test_deepgram_client import rest
from tests.realtime.dialects.test_deepgram_flux import Wire
from tests.web.conftest import server_process

NEEDED = ("moonshine-tiny", "sample-two-cities")
RATE = 48_000


@pytest.fixture
def blockbuster() -> None:
    """The test itself starts a server and reads a file."""


def recording() -> bytes:
    with wave.open(str(pull("sample-two-cities"))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        return file.readframes(20 * RATE)


@pytest.mark.timeout(300)
async def test_a_person_reads_and_turns_keep_the_promises_of_the_wire() -> None:
    skip_unless_cached(*NEEDED)
    with server_process("--model", "moonshine-tiny") as server:
        url = f"ws://127.0.0.1:{server.port}/v2/listen?model=flux-general-en&encoding=linear16&sample_rate={RATE}"
        async with raw_client(f"{url}&eot_threshold=0.9&eager_eot_threshold=0.3&eot_timeout_ms=3000") as client:
            await client.socket.send(recording())
            await client.send("CloseStream")
            told, code = await rest(client)
    wire = Wire()
    for message in told:
        if message["type"] == "TurnInfo":
            wire.check(message)
    ends = [message["transcript"] for message in told if message.get("event") == "EndOfTurn"]
    assert code == 1000 and not wire.open and "best of times" in " ".join(ends)
