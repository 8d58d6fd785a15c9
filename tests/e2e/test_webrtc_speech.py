"""A WebRTC call with a real model and a person who reads: over a good network, and over one that loses."""

from __future__ import annotations

import re
import wave

import pytest

from engine.weights.store import pull
from tests.cached_models import skip_unless_cached
from tests.lossy_line import lossy_line
from tests.waiting import until
from tests.web.conftest import server_process
from tests.webrtc_client import RATE, Caller, call

NEEDED = ("moonshine-tiny", "sample-two-cities")
COMPLETED = "conversation.item.input_audio_transcription.completed"
SECONDS = 20


@pytest.fixture
def blockbuster() -> None:
    """The test itself starts a server and reads a file."""


def recording() -> bytes:
    skip_unless_cached(*NEEDED)
    with wave.open(str(pull("sample-two-cities"))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        return file.readframes(SECONDS * RATE)


async def words(speaker: Caller, least: int) -> tuple[list[str], int]:
    """The words of the finals until there are so many, and how many gaps were told."""
    found: list[str] = []
    gaps = 0
    while len(found) < least:
        events = await speaker.until(COMPLETED)
        found += re.findall("[a-z]+", events[-1]["transcript"].lower())
        gaps += sum(event["type"] == "call.gap" for event in events)
    return found, gaps


@pytest.mark.timeout(300)
async def test_a_person_reads_and_the_words_come_back() -> None:
    pcm = recording()
    with server_process("--model", "moonshine-tiny") as server:
        async with call(f"{server.url}v1/whip", pcm) as speaker:
            found, gaps = await words(speaker, 20)
            assert "best of times" in " ".join(found) and not gaps


@pytest.mark.timeout(300)
async def test_a_network_that_loses_every_tenth_datagram_leaves_marked_gaps_and_words() -> None:
    pcm = recording()
    with server_process("--model", "moonshine-tiny") as server:
        async with lossy_line(loss=0.0, jitter_s=0.06) as line:
            async with call(f"{server.url}v1/whip", pcm, change=line.through) as speaker:
                await speaker.until("session.created")
                line.loss = 0.1
                found, gaps = await words(speaker, 20)
                assert gaps >= 5 and line.lost >= gaps
                assert len({"times", "wisdom", "age", "epoch", "season"} & set(found)) >= 2, found
                await until(lambda: speaker.peer.connectionState == "connected")
