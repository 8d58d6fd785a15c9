"""Every attack, by name, in the order in which they are run."""

from __future__ import annotations

from tests.attacks import (
    frames,
    handshake,
    messages,
    phone_calls,
    pulled_streams,
    sound,
    timing,
    tokens,
    uploads,
    viewers,
    webhooks,
    webrtc_calls,
    websites,
)
from tests.attacks.target import ATTACKS

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
