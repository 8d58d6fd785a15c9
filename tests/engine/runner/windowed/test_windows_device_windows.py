"""Windows decoded as batches give the same words as windows decoded one by one.

The device is the CPU here: the code is the same, without CUDA graphs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.plan import DecodeTask, EncodeTask, OpenTask, StepPlan
from engine.messages import Item
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.seq2seq import DetectionTokens
from engine.models.whisper import Whisper, WhisperConfig
from engine.runner import bias
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION, WindowEncoder
from engine.runner.windowed.recorded_decoder import Shape, Shapes
from engine.runner.windowed.runner import WindowedRunner, windowed_spec
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import DeviceWindows, HostWindows, WindowMemory, Windows
from engine.spec import Vocabulary
from tests.engine.runner.windowed.test_runner import STRIDE, WINDOW, Streams, Uploads, speech

VOCABULARY = 60
PIECES = [b"", b"", b""] + [b" w%d" % token if token % 3 else b"x" for token in range(3, VOCABULARY)]
POLICY = Policy(agreed_margin=2.0, lone_margin=4.0, cut_beyond=30.0, doubt=-100.0)
LONGEST = 100 * SAMPLES_PER_POSITION


def sharpened(model: Moonshine | Whisper) -> Moonshine | Whisper:
    """Ties would make comparisons meaningless."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.1)
    return model.eval()


@pytest.fixture(scope="module", params=["moonshine", "whisper"])
def model(request: pytest.FixtureRequest) -> Moonshine | Whisper:
    if request.param == "moonshine":
        config = MoonshineConfig(32, 64, 1, 2, 4, 8, 10_000.0, VOCABULARY, start_token=1, end_token=2)
        return sharpened(Moonshine(config))
    whisper = Whisper(WhisperConfig(80, VOCABULARY, 1500, 32, 4, 1, 64, 4, 2))
    # Markers of the real vocabulary are far behind the end of this one.
    whisper.start_tokens, whisper.end_token, whisper.suppressed = [1], 2, [0]
    whisper.detection_tokens = DetectionTokens(1, 3, ())
    whisper.set_live_padding(full_padding=False)
    return sharpened(whisper)


def on_the_host(model: Moonshine | Whisper) -> Windows:
    return HostWindows(model, WindowEncoder(model, PIECES, POLICY), WindowEncoder(model, PIECES, POLICY), 900)


def on_a_device(model: Moonshine | Whisper) -> DeviceWindows:
    """With room for four windows in a batch, of which the encoder hears two or three at once, and the decoder reads
    one or two."""
    frames = 3 * model.frames_of(30 * SAMPLES_PER_POSITION)
    memory = WindowMemory(8, 4, frames, 20, 0, 0, 0)
    cpu = torch.device("cpu")
    return DeviceWindows(model, PIECES, POLICY, memory, 900, longest=LONGEST, device=cpu, dtype=torch.float32)


def runner_with(model: Moonshine | Whisper, windows: Windows) -> WindowedRunner:
    return WindowedRunner(model, Vocabulary(PIECES), windowed_spec("tiny", WINDOW, STRIDE), POLICY, windows)


def test_streams_say_the_same_as_on_the_host(model: Moonshine | Whisper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five streams in batches of four, two with keywords; utterances end, and the next one begins close behind."""
    monkeypatch.setattr(bias, "FULL_WORTH", 1000.0)
    audio = {slot: speech(10 + slot, 45) for slot in range(5)}
    said = []
    for place in (on_a_device, on_the_host):
        streams = Streams(runner_with(model, place(model)), audio, keywords=(1, 4))
        for step in range(9):
            streams.step(final=step in (3, 8), pause=step == 6)
        said.append(streams)
    assert sum(len(said[1].tokens(slot)) for slot in audio) > 20
    assert [58 in said[1].tokens(slot) for slot in (1, 4)] == [True, True]
    for slot in audio:
        for mine, wanted in zip(said[0].results[slot], said[1].results[slot], strict=True):
            assert [timed.token for timed in mine.timed] == [timed.token for timed in wanted.timed]
            assert mine.keep_from == wanted.keep_from
            for one, other in zip(mine.timed, wanted.timed, strict=True):
                assert (one.start, one.end) == (other.start, other.end)
                assert one.log_probability == pytest.approx(other.log_probability, abs=1e-3)


def test_windows_of_different_lengths_do_not_touch_each_other(model: Moonshine | Whisper) -> None:
    lengths = [1, 3, 9, 17, 26, 40]
    together, plan = runner_with(model, on_a_device(model)), StepPlan(0)
    for slot, length in enumerate(lengths):
        rows = list(range(1 + slot * 100, 1 + slot * 100 + length))
        plan.opened.append(OpenTask(slot, f"s{slot}", 0, {}, []))
        plan.encode.append(EncodeTask(f"s{slot}", speech(50 + slot, length), None, rows))
        plan.decode.append(DecodeTask(slot, f"s{slot}", 0, 0, length, rows, [], True))
    plan.live = len(plan.decode)
    results = together.execute(plan)
    for slot, result in enumerate(results):
        alone = runner_with(model, on_the_host(model))
        part = StepPlan(0, [plan.opened[slot]], [], [plan.encode[slot]], [plan.decode[slot]], 1)
        (wanted,) = alone.execute(part)
        assert [timed.token for timed in result.timed] == [timed.token for timed in wanted.timed]


@pytest.mark.parametrize("pieces", [1, 3, 10_000])
def test_backlog_beside_live_streams_says_the_same(model: Moonshine | Whisper, pieces: int) -> None:
    wanted, _ = Uploads(runner_with(model, on_the_host(model))).read(10_000)
    alone = Streams(runner_with(model, on_the_host(model)), {2: speech(10, 60)})
    beside = Streams(runner_with(model, on_a_device(model)), {2: speech(10, 60)})
    uploads = Uploads(beside.runner)
    for step in range(12):
        for streams in (alone, beside):
            streams.step(final=step == 11)
        if uploads.plan.decode:
            uploads.stint(pieces)
    results, _ = uploads.read(pieces)
    assert beside.tokens(2) == alone.tokens(2)
    for result, other in zip(results, wanted, strict=True):
        assert [timed.token for timed in result.timed] == [timed.token for timed in other.timed]


def test_backlog_that_closes_half_read_leaves_the_others_their_words(model: Moonshine | Whisper) -> None:
    (_, kept), _ = Uploads(runner_with(model, on_a_device(model))).read(10_000)
    uploads = Uploads(runner_with(model, on_a_device(model)))
    uploads.stint(1)
    assert not uploads.results
    uploads.stint(10_000, closed=[0])
    (result,) = uploads.results.values()
    assert [timed.token for timed in result.timed] == [timed.token for timed in kept.timed]


def test_the_next_stream_of_a_slot_does_not_get_the_result_of_a_closed_one(model: Moonshine | Whisper) -> None:
    """The first upload is refused while its batch goes on, and is closed; its slot gets another upload at once."""
    (wanted,), _ = Uploads(runner_with(model, on_a_device(model)), (42,)).read(10_000)
    uploads = Uploads(runner_with(model, on_a_device(model)))
    uploads.plan.encode[0].payload[0] = np.nan
    uploads.stint(1)
    assert not uploads.results
    plan, following = uploads.plan, Uploads(uploads.runner, (42,)).plan
    plan.closed, plan.opened, plan.encode = [0], following.opened, following.encode
    plan.decode = [plan.decode[1], *following.decode]
    *_, result = uploads.runner.compute(plan)
    if result.unfinished:  # it waits for the batch that is under way
        (result,) = uploads.runner.compute(StepPlan(2, decode=following.decode))
    assert result.error is None and [each.token for each in result.timed] == [each.token for each in wanted.timed]


def test_a_stream_goes_on_from_a_saved_state(model: Moonshine | Whisper) -> None:
    audio = speech(70, 40)
    whole = Streams(runner_with(model, on_a_device(model)), {0: audio})
    for step in range(4):
        whole.step(final=step == 3)
    saved, needed = whole.runner.save(0, 20, 20)
    items = [Item(needed, 20 - needed, 0, b"k", audio[needed * SAMPLES_PER_POSITION : 20 * SAMPLES_PER_POSITION])]
    other = runner_with(model, on_a_device(model))
    other.execute(StepPlan(0, opened=[OpenTask(0, "s0", 0, {}, [], saved, items)]))
    rows = list(range(300, 310))
    new = audio[22 * SAMPLES_PER_POSITION : 32 * SAMPLES_PER_POSITION]
    plan = StepPlan(9, encode=[EncodeTask("s0", new, None, rows)])
    plan.decode = [DecodeTask(0, "s0", 22, 22, 32, rows, [], True)]
    plan.live = 1
    assert other.execute(plan) == whole.runner.execute(plan)


def test_what_an_earlier_batch_left_behind_is_not_heard(model: Moonshine | Whisper) -> None:
    """Not even if it was not numbers."""
    fresh, used = on_a_device(model), on_a_device(model)
    buffers = used.decoder._buffers
    assert buffers is not None
    for place in (buffers._cross_keys, buffers._cross_values, buffers._keys, buffers._values):
        place.fill_(torch.nan)
    said = []
    for windows in (fresh, used):
        streams = Streams(runner_with(model, windows), {0: speech(80, 20), 1: speech(81, 20)})
        for step in range(4):
            streams.step(final=step == 3)
        said.append([streams.tokens(slot) for slot in range(2)])
    assert said[0] == said[1] and all(said[0])


def test_audio_that_is_not_numbers_ends_its_stream_alone(model: Moonshine | Whisper) -> None:
    broken = speech(90, 20)
    broken[9 * SAMPLES_PER_POSITION] = np.inf
    streams = Streams(runner_with(model, on_a_device(model)), {0: speech(91, 20)})
    rows = list(range(500, 520))
    plan = StepPlan(1, [OpenTask(1, "bad", 0, {}, [])], [], [EncodeTask("bad", broken, None, rows)])
    plan.decode, plan.live = [DecodeTask(1, "bad", 0, 0, 20, rows, [], True)], 1
    (result,) = streams.runner.execute(plan)
    assert result.error == "its audio has NaN or infinite values"
    for step in range(4):
        streams.step(final=step == 3)
    assert streams.tokens(0)


def test_warm_up_runs_and_leaves_no_trace(model: Moonshine | Whisper) -> None:
    windows = on_a_device(model)
    runner = runner_with(model, windows)
    runner.warm_up()
    assert not runner.slots and not windows.slab.rows.any()
    runner.close()


def test_a_batch_gets_the_smallest_shape_that_holds_it() -> None:
    shapes = Shapes.up_to(rows=128, frames=1500, tokens=448)
    assert shapes.fit(128, 1500, 448) == Shape(128, 1500, 448)
    for shape in shapes.all():
        assert shapes.fit(shape.rows, shape.frames, shape.tokens) == shape
    small = shapes.fit(5, 1, 30)
    assert small.rows == 8 and small.frames < 400 and small.tokens < 120
    assert len(shapes.all()) <= 150, "each costs a recording at the start"
