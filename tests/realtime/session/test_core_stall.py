"""The stall guard of the session core: the audio that it keeps, and when it reports missing text."""

from __future__ import annotations

import numpy as np

from engine import messages
from realtime.session.core import StallGuard

RATE = 16_000


def test_kept_audio_is_forgotten_to_the_sample() -> None:
    guard = StallGuard(RATE, 1.0, 10.0)
    guard.keep(0, np.arange(1000, dtype=np.float32))
    guard.keep(1000, 500)
    guard.keep(1500, np.arange(1500, 2000, dtype=np.float32))
    guard.forget_before(300)
    anchor = guard.reanchor(2000, 0.0)
    assert anchor.base == 300 and anchor.replay[1] == 500
    first = anchor.replay[0]
    assert not isinstance(first, int) and first[0] == 300 and len(first) == 700
    guard.forget_before(1200)
    assert guard.reanchor(2000, 0.0).replay[0] == 300
    guard.forget_before(9999)
    assert guard.reanchor(2000, 0.0).base == 2000


def test_stall_needs_speech_and_time_and_can_be_switched_off() -> None:
    guard, off = StallGuard(RATE, 1.0, 10.0), StallGuard(RATE, 0.0, 10.0)
    for watched in (guard, off):
        watched.add_speech(2 * RATE, 0.0)
    assert not guard.is_stalled(0.5) and guard.is_stalled(1.0) and not off.is_stalled(100.0)
    guard.add_text(messages.Text("s", "x", [], []), 0, 1.0)
    assert not guard.is_stalled(100.0)
    guard.add_speech(0, 101.0)
    assert not guard.is_stalled(200.0)


def test_tiny_pieces_are_kept_together() -> None:
    """A sample a message, declared or sent, must not cost an object a sample."""
    guard = StallGuard(RATE, 8.0, 30.0)
    audio = np.arange(5000, dtype=np.float32)
    for sample in range(5000):
        guard.keep(sample, audio[sample : sample + 1])
    for sample in range(5000, 10_000):
        guard.keep(sample, 1)
    replay = guard.reanchor(10_000, 0.0).replay
    assert len(replay) <= 5 and guard.kept_samples == 10_000
    assert replay[-1] == 5000
    np.testing.assert_array_equal(np.concatenate([piece for piece in replay if not isinstance(piece, int)]), audio)
