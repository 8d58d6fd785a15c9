"""The streaming encoder: passes come with blocks, any division into tasks gives the same frames, a rebuild is exact,
and speech without pauses costs no more memory than other speech.

The model is tiny and random.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.plan import DecodeTask
from engine.messages import Item
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.moonshine_streaming import NormPrior, StreamingEncoder, StreamingSpec
from engine.runner.windowed.encoders import LONG_FROM_ANCHOR, SAMPLES_PER_POSITION, BlockEncoder, EncodedAudio

BLOCK, LOOK_AHEAD = 26, 13
SPEC = StreamingSpec(blocks=(BLOCK,), look_ahead=LOOK_AHEAD, left=40, norm=NormPrior(0.0, -5.84, 75.0))
TEN_MINUTES = 600 * 16_000 // SAMPLES_PER_POSITION


@pytest.fixture(scope="module")
def model() -> Moonshine:
    torch.manual_seed(6)
    return Moonshine(MoonshineConfig(16, 32, 1, 1, 2, 8, 10_000.0, 20, start_token=1, end_token=2)).eval()


def make_ear(model: Moonshine) -> BlockEncoder:
    return BlockEncoder(model, StreamingEncoder(model.encoder, SPEC, BLOCK))


def sound_of(positions: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, positions * SAMPLES_PER_POSITION, generator=generator) * 0.2


def hear(stream_encoder: BlockEncoder, audio: Tensor, base: int, end: int, pause: bool = False) -> EncodedAudio:
    window = audio[:, base * SAMPLES_PER_POSITION : end * SAMPLES_PER_POSITION]
    with torch.inference_mode():
        return stream_encoder.encode(DecodeTask(0, "s", base, base, end, [], [], False, pause), window)


def test_the_next_pass_is_due_when_the_next_block_is_there(model: Moonshine) -> None:
    stream_encoder, audio = make_ear(model), sound_of(120)
    end, blocks = stream_encoder.first_stride, 0
    # Frames of 24 ms; the last one of the look-ahead hears 895 samples.
    assert end == -(-((BLOCK + LOOK_AHEAD - 1) * 384 + 895) // SAMPLES_PER_POSITION)
    while end < 120:
        before = hear(stream_encoder, audio, 0, end - 1).frames
        sound = hear(stream_encoder, audio, 0, end)
        ahead = LOOK_AHEAD if blocks else 0
        assert (before, sound.frames) == (blocks * BLOCK + ahead, (blocks + 1) * BLOCK + LOOK_AHEAD)
        assert sound.stride is not None
        end, blocks = end + sound.stride, blocks + 1
    assert blocks > 12


def test_what_a_block_looks_ahead_to_is_heard_at_once_and_again_when_it_is_settled(model: Moonshine) -> None:
    stream_encoder, audio = make_ear(model), sound_of(60)
    first = hear(stream_encoder, audio, 0, stream_encoder.first_stride)
    assert first.frames == BLOCK + LOOK_AHEAD and first.edge * SAMPLES_PER_POSITION == first.frames * 384
    second = hear(stream_encoder, audio, 0, 60)
    assert torch.equal(first.encoded.keys[..., :BLOCK], second.encoded.keys[..., :BLOCK])
    ahead, settled = (sound.encoded.keys[..., BLOCK : BLOCK + LOOK_AHEAD] for sound in (first, second))
    assert not torch.allclose(ahead, settled, atol=1e-5)


def test_a_pause_is_heard_to_its_end_and_changes_nothing_of_what_follows(model: Moonshine) -> None:
    audio, plain, paused = sound_of(60), make_ear(model), make_ear(model)
    hear(plain, audio, 0, 20)
    heard = hear(paused, audio, 0, 25, pause=True)
    assert heard.edge > 24 and heard.stride == 28 - 25
    one, other = hear(plain, audio, 0, 60), hear(paused, audio, 0, 60)
    assert torch.equal(one.encoded.keys, other.encoded.keys) and one.edge == other.edge


@pytest.mark.parametrize("cut", [8, 20, 33])
def test_a_rebuilt_ear_hears_what_the_lost_one_would_have(model: Moonshine, cut: int) -> None:
    """Also where the window has just been cut, and the lost one was about to begin anew there."""
    positions = LONG_FROM_ANCHOR + 60
    audio, stream_encoder, rebuilt = sound_of(positions), make_ear(model), make_ear(model)
    hear(stream_encoder, audio, 0, LONG_FROM_ANCHOR + 20)
    saved, audio_from = stream_encoder.save(0, cut, LONG_FROM_ANCHOR + 20)
    assert audio_from == 0
    payload = np.ascontiguousarray(audio[0].numpy())
    with torch.inference_mode():
        rebuilt.resume(0, saved, [Item(0, positions, 0, key=b"k", payload=payload)])
    for end in (LONG_FROM_ANCHOR + 30, positions):
        one, other = hear(stream_encoder, audio, cut, end), hear(rebuilt, audio, cut, end)
        assert torch.equal(one.encoded.keys, other.encoded.keys)
        assert (one.origin, one.edge, one.stride) == (other.origin, other.edge, other.stride)
    assert stream_encoder.save(0, cut, positions) == rebuilt.save(0, cut, positions)


def test_a_state_with_audio_that_is_not_numbers_is_refused_before_it_is_rebuilt(model: Moonshine) -> None:
    payload = np.full(20 * SAMPLES_PER_POSITION, np.nan, np.float32)
    stream_encoder, saved = make_ear(model), {"anchor": 0, "heard": 20, "first": 0}
    with pytest.raises(ValueError, match="NaN or infinite"):
        stream_encoder.resume(0, saved, [Item(0, 20, 0, key=b"k", payload=payload)])
    assert not stream_encoder.must_rebuild(0)


def test_speech_that_never_pauses_holds_no_more_than_its_window(model: Moonshine) -> None:
    """And a rebuild never needs more audio than from the last anchor on."""
    stream_encoder, window, step = make_ear(model), 60, 60
    audio = sound_of(2 * window, seed=1)
    most_frames = most_audio = 0
    for end in range(window, TEN_MINUTES, step):
        base = end - window
        task = DecodeTask(0, "s", base, base, end, [], [], False)
        with torch.inference_mode():
            sound = stream_encoder.encode(task, audio[:, : window * SAMPLES_PER_POSITION])
        most_frames = max(most_frames, sound.frames)
        _, audio_from = stream_encoder.save(0, base, end)
        most_audio = max(most_audio, end - audio_from)
    assert most_frames <= window * SAMPLES_PER_POSITION // 384 + 1
    assert most_audio <= LONG_FROM_ANCHOR + step
    stream_encoder.forget(0)
    assert stream_encoder.save(0, 0, 0) == ({"anchor": None}, 0)
