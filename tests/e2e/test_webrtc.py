"""WebRTC calls over real UDP: aiortc is the client."""

from __future__ import annotations

from tests.e2e.conftest import Serve
from tests.realtime.gateway_doubles import silence, tone
from tests.waiting import until
from tests.webrtc_client import RATE, call

SPEECH = silence(0.5, RATE) + tone(1.3, RATE) + silence(1.0, RATE)
COMPLETED = "conversation.item.input_audio_transcription.completed"


async def test_words_of_a_call_come_on_its_data_channel(serve: Serve) -> None:
    async with serve() as running:
        async with call(f"{running.http}/v1/whip", SPEECH) as speaker:
            events = await speaker.until(COMPLETED)
            assert events[0]["type"] == "session.created"
            assert events[-1]["transcript"] == "w1 w2 w3"
            assert running.metric("sessions_opened_total", dialect="webrtc") == 1
        await until(lambda: len(running.gateway.sessions) == 0)
