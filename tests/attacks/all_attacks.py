"""Every attack, by name, in the order in which they are run."""

from __future__ import annotations

from tests.attacks import handshake, phone_calls, sound, timing, viewers, webhooks, websites
from tests.attacks.target import ATTACKS
from tests.e2e.test_api_documents import pulled_streams, webrtc_calls
from tests.engine.boundary.test_input_cache import messages
from tests.engine.runner.windowed.test_runner import tokens
from tests.realtime.commands.test_hostile_servers import uploads
from tests.realtime.serving.test_uvicorn_protocols_frames import frames

__all__ = [
    "ATTACKS",
    "frames",
    "handshake",
    "messages",
    "phone_calls",
    "pulled_streams",
    "sound",
    "timing",
    "tokens",
    "uploads",
    "viewers",
    "webhooks",
    "webrtc_calls",
    "websites",
]
