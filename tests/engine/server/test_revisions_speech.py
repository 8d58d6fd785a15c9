"""Finals of the embedded model on real speech: better words than the streamed ones, and the same after a rebuild.

Needs the model and a recording in the cache, and is skipped without them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from audio.containers import read_file
from engine.boundary.items import make_cutter, prepare
from engine.messages import (
    Closed,
    Command,
    Feed,
    Finish,
    Flush,
    Flushed,
    Item,
    Open,
    Output,
    Revised,
    StreamState,
    Text,
)
from engine.options import DEFAULT_MODEL, REVISED, EngineConfig
from engine.runner.base import EndedUtterance
from engine.server import revisions
from engine.server.loop import EngineLoop
from engine.server.main import build_loop
from engine.weights.store import pull
from tests.cached_models import skip_unless_cached

RECORDING = "sample-two-cities"
PACKET = 1_280


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    skip_unless_cached(DEFAULT_MODEL, RECORDING)
    # A busy machine must not change what is tested.
    monkeypatch = pytest.MonkeyPatch()
    for patience in ("PATIENCE_SECONDS", "UNHURRIED_SECONDS"):
        monkeypatch.setattr(revisions, patience, 600.0)
    # All parts are decoded again.
    monkeypatch.setattr(revisions, "SURE", 2.0)
    made = build_loop(EngineConfig(DEFAULT_MODEL, "cpu", max_streams=4, threads=1))
    yield made
    made.close()
    monkeypatch.undo()


@pytest.fixture(scope="module")
def recording() -> NDArray[np.float32]:
    return np.concatenate(list(read_file(pull(RECORDING))))


def run(loop: EngineLoop, *commands: Command) -> list[Output]:
    """Submit commands and step until nothing more comes."""
    loop.submit(commands, 0)
    outputs: list[Output] = []
    while loop.has_work() or loop.waits_for_results:
        done = loop.step()
        outputs += [] if done is None else done.outputs
        time.sleep(0 if loop.has_work() else 0.005)
    return outputs


def items_of(loop: EngineLoop, sound: NDArray[np.float32]) -> list[list[Item]]:
    spec = loop.scheduler.spec
    cutter = make_cutter(spec)
    return [prepare(cutter, cutter.cut(sound[at : at + PACKET]), spec) for at in range(0, len(sound), PACKET)]


def text_of(revised: list[Revised]) -> str:
    return " ".join(word.text for one in revised for word in one.words or ())


def finals(outputs: list[Output]) -> list[Revised]:
    return [output for output in outputs if isinstance(output, Revised)]


def test_a_final_has_words_that_were_misheard_while_they_were_spoken(
    loop: EngineLoop, recording: NDArray[np.float32]
) -> None:
    outputs = run(loop, Open("a", options={REVISED: "yes"}))
    for items in items_of(loop, recording):
        outputs += run(loop, Feed("a", items))
    outputs += run(loop, Flush("a", 1), Finish("a"))
    streamed = "".join(output.delta for output in outputs if isinstance(output, Text))
    parts = finals(outputs)
    final = text_of(parts)
    # Parts follow each other without a gap, and the last one ends with the flush.
    assert all(before.end == after.start for before, after in zip(parts, parts[1:], strict=False))
    flushed = next(output for output in outputs if isinstance(output, Flushed))
    assert parts[-1].end == flushed.sample and isinstance(outputs[-1], Closed)
    assert len(parts) > 1, "longer than one part"
    assert "in short, the period" in final.lower() and "in short, the period" not in streamed.lower()
    # Words have times in order, within their parts.
    for part in parts:
        times = [time for word in part.words or () for time in (word.start_sample, word.end_sample)]
        assert times == sorted(times) and part.start <= times[0] and times[-1] <= part.end


def test_a_final_is_the_same_after_its_stream_was_rebuilt(loop: EngineLoop, recording: NDArray[np.float32]) -> None:
    sound = recording[: 8 * 16_000]

    def play(name: str, packets: list[list[Item]]) -> list[Output]:
        return [output for items in packets for output in run(loop, Feed(name, items))]

    expected = run(loop, Open("b", options={REVISED: "yes"})) + play("b", items_of(loop, sound))
    expected += run(loop, Flush("b", 1), Finish("b"))
    for lost_at in (20, 60, 90):
        run(loop, Open("c", options={REVISED: "yes"}))
        outputs = play("c", items_of(loop, sound)[:lost_at])
        run(loop, Finish("c"))
        state = next(output for output in reversed(outputs) if isinstance(output, StreamState))
        state.stream = "d"
        packets = items_of(loop, sound)
        sent = [item for items in packets[:lost_at] for item in items]
        known = [item for item in sent if state.audio_from <= item.offset < state.position]
        again = run(loop, Open("d", options={REVISED: "yes"}, state=state, items=known))
        again += play("d", [[item for item in sent if item.offset >= state.position], *packets[lost_at:]])
        again += run(loop, Flush("d", 1), Finish("d"))
        assert text_of(finals(again)) == text_of(finals(expected)) != ""


def test_words_of_the_context_do_not_come_again(loop: EngineLoop, recording: NDArray[np.float32]) -> None:
    reviser, pieces = loop.runner.reviser, loop.runner.vocabulary.pieces
    assert reviser is not None
    sound = recording[: 8 * 16_000]
    whole = reviser.submit(EndedUtterance(sound, [], {})).result(60)
    sentence = next(at for at, timed in enumerate(whole) if pieces[timed.token] == b".") + 1
    start = int(whole[sentence].start * 1280)
    for missing in (0, 1, 2, 5):
        said = [timed.token for timed in whole[: sentence - missing]]
        found = reviser.submit(EndedUtterance(sound, [], {}, start, said)).result(60)
        text = b"".join(pieces[timed.token] for timed in found)
        assert text.startswith(b" It was the age of wisdom"), f"{missing} tokens of the context are missing: {text!r}"
        assert found[0].start * 1280 >= start - 1280
