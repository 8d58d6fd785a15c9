"""Opus packets to samples: times, losses, pauses, and packets that lie."""

from __future__ import annotations

import struct

import av
import numpy as np
import pytest

from realtime.webrtc.opus_track import MAX_AHEAD_S, MissingAudio, OpusTrack, TrackAudio, read_packet

KIND = 111
FRAME = 960


@pytest.fixture(scope="module")
def opus() -> list[bytes]:
    """A second of a tone, in packets of 20 ms."""
    encoder = av.CodecContext.create("libopus", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 48_000, "mono", "s16"
    found: list[bytes] = []
    for number in range(51):
        sine = (np.sin(np.arange(number * FRAME, (number + 1) * FRAME) * 0.05) * 9000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(sine.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = 48_000
        found += [bytes(packet) for packet in encoder.encode(frame)]
    return found[:50]


def rtp(sequence: int, payload: bytes, timestamp: int | None = None, kind: int = KIND, source: int = 1) -> bytes:
    at = sequence * FRAME if timestamp is None else timestamp
    return struct.pack("!BBHII", 0x80, kind, sequence % 65536, at % 2**32, source) + payload


class Playing:
    """A track, and a clock that goes with the packets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.track = OpusTrack(KIND, lambda: self.now)
        self.audio: list[TrackAudio] = []

    def receive(self, data: bytes, seconds: float = 0.02) -> None:
        self.audio += self.track.receive(data)
        self.now += seconds

    @property
    def samples(self) -> int:
        """All samples so far: heard, missing, and those in the resampler."""
        self.audio.append(self.track._resampler.flush())
        return sum(each.samples if isinstance(each, MissingAudio) else len(each) for each in self.audio)

    @property
    def missing(self) -> list[MissingAudio]:
        return [each for each in self.audio if isinstance(each, MissingAudio)]


def test_samples_are_those_of_the_packets(opus: list[bytes]) -> None:
    playing = Playing()
    for number, payload in enumerate(opus):
        playing.receive(rtp(number, payload))
    assert playing.samples == 16_000 and not playing.missing
    sound = np.concatenate([each for each in playing.audio if not isinstance(each, MissingAudio)])
    assert 0.15 < float(np.abs(sound[4000:]).max()) < 0.5


def test_lost_packets_are_a_gap_of_their_length_and_times_stay_right(opus: list[bytes]) -> None:
    playing = Playing()
    for number, payload in enumerate(opus):
        if number not in (20, 30, 31, 32):
            playing.receive(rtp(number, payload))
        else:
            playing.now += 0.02
    playing.now += 1.0
    playing.audio += playing.track.expired()
    assert playing.missing == [MissingAudio(320, True), MissingAudio(960, True)]
    assert playing.samples == 16_000


def test_a_pause_of_the_sender_is_silence_and_not_lost(opus: list[bytes]) -> None:
    """With DTX no packets are sent in silence: sequence numbers go on, timestamps jump."""
    playing = Playing()
    for number in range(10):
        playing.receive(rtp(number, opus[number]))
    playing.now += 0.4
    playing.receive(rtp(10, opus[10], timestamp=(10 + 20) * FRAME))
    assert playing.missing == [MissingAudio(20 * 320, False)]


def test_timestamps_that_jump_make_no_time(opus: list[bytes]) -> None:
    playing = Playing()
    for number in range(50):
        playing.receive(rtp(number, opus[number], timestamp=number * 48_000 * 3600))
    assert playing.samples <= (1.0 + MAX_AHEAD_S + 0.1) * 16_000


def test_timestamps_that_go_back_are_no_gap(opus: list[bytes]) -> None:
    playing = Playing()
    for number in range(50):
        playing.receive(rtp(number, opus[number], timestamp=-number * 48_000))
    assert not playing.missing and playing.samples == 16_000


def test_sequence_numbers_that_jump_make_no_time(opus: list[bytes]) -> None:
    playing = Playing()
    for number in range(50):
        playing.receive(rtp(number * 30_011, opus[number]))
    assert playing.samples <= (1.0 + MAX_AHEAD_S + 0.1) * 16_000


def test_audio_faster_than_the_clock_is_dropped(opus: list[bytes]) -> None:
    playing = Playing()
    for number in range(2000):
        playing.receive(rtp(number, opus[number % 50]), seconds=0.0)
    assert playing.samples <= (MAX_AHEAD_S + 0.1) * 16_000
    # It goes on when the clock has caught up, and what was dropped is told.
    playing.now += 40
    playing.receive(rtp(2000, opus[0]))
    assert sum(each.samples for each in playing.missing) > 30 * 16_000


def test_foreign_payload_types_and_broken_packets_are_dropped(opus: list[bytes]) -> None:
    playing = Playing()
    good = rtp(0, opus[0])
    for data in (b"", b"\x80", good[:12], rtp(0, opus[0], kind=0), rtp(0, opus[0], kind=63), b"\x40" + good[1:]):
        playing.receive(data)
    # An extension that is longer than the packet, and padding that is longer.
    playing.receive(b"\x90" + good[1:12] + b"\xbe\xde\xff\xff")
    playing.receive(b"\xa0" + good[1:12] + b"\xff")
    assert not playing.audio
    # Not Opus, but of its payload type: no samples, no error.
    for number in range(50):
        playing.receive(rtp(number, b"\xff" * 300))
    assert not [each for each in playing.audio if not isinstance(each, MissingAudio)]


def test_an_extension_and_padding_are_not_sound(opus: list[bytes]) -> None:
    plain = rtp(3, opus[3])
    dressed = b"\xb0" + plain[1:12] + b"\xbe\xde\x00\x01abcd" + opus[3] + b"\x00\x00\x03"
    assert read_packet(dressed, KIND) == read_packet(plain, KIND)


def test_another_source_goes_on_with_its_own_count(opus: list[bytes]) -> None:
    playing = Playing()
    for number in range(25):
        playing.receive(rtp(number, opus[number]))
    for number in range(25, 50):
        playing.receive(rtp(50_000 + number, opus[number], timestamp=7, source=2) if number == 25 else b"")
    assert not playing.missing and playing.samples == 26 * 320
