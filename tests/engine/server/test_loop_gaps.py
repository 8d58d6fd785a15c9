"""Declared silence is one item with a length: the cost is independent of the length, the text is that of silence."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boundary.codec import encode_command
from engine.boundary.items import make_cutter, prepare
from engine.boundary.replay import ReplayLog, replay_state_for
from engine.messages import Closed, Feed, Finish, Flush, Item, Open, Output, Text
from engine.server.loop import EngineLoop
from engine.server.speech import PendingAudio
from tests.engine.fakes import POSITION, RATE, build, speech

DAYS = 6 * 24 * 3600

# What a session does: hears so many samples, is told of so many samples of silence, or is flushed.
Operation = tuple[str, int]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("audio"), st.integers(0, 900)),
        st.tuples(st.just("gap"), st.integers(0, 6000)),
        st.tuples(st.just("flush"), st.just(0)),
    ),
    max_size=12,
)


def run(loop: EngineLoop) -> list[Output]:
    outputs: list[Output] = []
    while loop.has_work():
        result = loop.step()
        outputs += [] if result is None else result.outputs
    return outputs


def transcript(operations: Sequence[Operation], windowed: bool, declared: bool) -> tuple[str, list[tuple[str, int]]]:
    """The text of a session, with its silence declared or sent."""
    loop = build(windowed=windowed, detects=True)
    spec = loop.scheduler.spec
    cutter, outputs = make_cutter(spec), []
    loop.submit([Open("a")], 0)
    for number, (kind, count) in enumerate(operations):
        if kind == "flush":
            cut = cutter.flush(spec.flush_positions_for(spec.default_delay_positions))
        elif kind == "gap" and declared:
            cut = cutter.cut_gap(count)
        else:
            cut = cutter.cut(np.zeros(count, np.float32) if kind == "gap" else speech(count / RATE, number))
        loop.submit([Feed("a", prepare(cutter, cut, spec))], number)
        if kind == "flush":
            loop.submit([Flush("a", number)], number)
        outputs += run(loop)
        loop.scheduler.check_integrity()
    rest = prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)
    loop.submit([Feed("a", rest), Finish("a")], len(operations))
    outputs += run(loop)
    assert isinstance(outputs[-1], Closed), outputs[-1]
    texts = [output for output in outputs if isinstance(output, Text)]
    words = [(word.text, word.start_sample) for text in texts for word in text.words]
    return "".join(text.delta for text in texts), words


@pytest.mark.parametrize("windowed", [False, True], ids=["frames", "windowed"])
@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS)
def test_any_mix_of_audio_and_gaps_says_what_audio_and_silence_say(windowed: bool, operations: list[Operation]) -> None:
    assert transcript(operations, windowed, declared=True) == transcript(operations, windowed, declared=False)


def cost_of_a_gap(seconds: int, windowed: bool) -> tuple[int, int, int, int]:
    """Items, bytes on the way to the engine, and objects and bytes held once a gap is in the engine's hands."""
    loop = build(windowed=windowed, detects=True)
    spec = loop.scheduler.spec
    cutter, kept, pending_audio = make_cutter(spec), ReplayLog(spec), PendingAudio(spec)
    loop.submit([Open("a")], 0)
    loop.step()
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    items = prepare(cutter, cutter.cut_gap(seconds * RATE), spec)
    frame = bytes(encode_command(Feed("a", []), items))
    kept.add(items)
    pending_audio.add(items)
    loop.submit([Feed("a", items)], 0)
    for _ in range(20):
        loop.step()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return len(items), len(frame), len(gc.get_objects()) - before, held


@pytest.mark.parametrize("windowed", [False, True], ids=["frames", "windowed"])
def test_six_days_cost_what_an_hour_costs(windowed: bool) -> None:
    cost_of_a_gap(3600, windowed)
    items, frame, objects, held = cost_of_a_gap(3600, windowed)
    long_items, long_frame, long_objects, long_held = cost_of_a_gap(DAYS, windowed)
    assert items == long_items == 1
    # Larger numbers take a few bytes more.
    assert long_frame <= frame + 16
    assert abs(long_objects - objects) <= 10
    assert abs(long_held - held) <= 4096


def test_a_long_gap_leaves_no_tokens_behind_on_a_model_with_one_per_position() -> None:
    """A replay needs as much of a gap as it needs of audio."""
    loop = build()
    spec = loop.scheduler.spec
    kept, memory, cutter = ReplayLog(spec), replay_state_for(spec, keep_positions=50), make_cutter(spec)
    kept.add(prepare(cutter, cutter.cut(speech(1, 1)), spec))
    kept.add(prepare(cutter, cutter.cut_gap(DAYS * RATE), spec))
    first = spec.prefix_positions
    for _ in range(40):
        memory.on_text(Text("a", "", [], [0] * 64))
        memory.trim(kept)
    heard = first + 40 * 64
    replay = memory.replay(kept)
    assert len(kept) == 1 and replay.forced_tokens == []
    (gap,) = replay.entries
    assert isinstance(gap, Item) and gap.offset == first and gap.length == kept.end - heard
    assert replay.positions == heard - first and replay.samples == (heard - first) * POSITION
