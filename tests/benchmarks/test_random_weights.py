"""Random weights output words: Voxtral during speech, Whisper its script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import pytest
import torch

from benchmarks.random_weights import ScriptedSpeaker, voxtral_loop, whisper_loop
from benchmarks.sounds import speech
from engine.boundary.items import make_cutter, prepare
from engine.messages import Feed, Open, Text
from engine.runner.windowed.decoder import DecodedToken, DecoderBatch, GreedyDecoder, Row
from engine.runner.windowed.stability import Progress
from engine.server.loop import EngineLoop

END, SPACING = 50, 10.0


class Quiet(DecoderBatch):
    """Computes nothing."""

    def __init__(self) -> None:
        self.said = 0

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[DecodedToken]:
        self.logits = torch.zeros(len(kept), 1)
        return []

    def next_tokens(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        self.said += 1
        self.logits = torch.zeros(len(last), 1)
        return []


class FakeModel:
    start_tokens, end_token, suppressed = [1], END, ()


def spoken(rows: list[Row]) -> int:
    """Run the rows to their ends; how many tokens had to be decoded one by one."""
    decoder, quiet = GreedyDecoder(FakeModel()), Quiet()  # type: ignore[arg-type]
    passes: Iterator[None] = decoder._passes(rows, lambda text: ScriptedSpeaker(quiet, rows, SPACING, END))
    for _ in passes:
        pass
    return quiet.said


def row(frames: int, committed: list[int], draft: list[int], said_until: float = 0.0) -> Row:
    return Row(committed, draft, 100, None, frames, Progress(said_until, inf))


def test_a_pass_says_as_much_as_was_spoken_since() -> None:
    first = row(55, [], [])
    assert spoken([first]) == 5 and len(first.tokens) == 5 and first.ended
    assert first.peaks == [10, 20, 30, 40, 50]
    # The next pass hears 25 frames more. The draft holds but for its last token, which was too close to the edge.
    second = row(80, [], first.tokens)
    assert spoken([second]) == 3 and second.tokens[:4] == first.tokens[:4] and second.tokens[4] != first.tokens[4]


def test_text_goes_on_behind_what_is_committed() -> None:
    whole = row(80, [], [])
    spoken([whole])
    later = row(80, whole.tokens[:3], whole.tokens[3:], said_until=30.0)
    spoken([later])
    assert whole.tokens[:3] + later.tokens == whole.tokens and later.peaks == whole.peaks[3:]


@pytest.mark.parametrize(
    "make", [partial(voxtral_loop, "bf16", 1, small=True), partial(whisper_loop, "toy", 1, small=True)]
)
def test_random_weights_say_something(make: Callable[[], EngineLoop]) -> None:
    loop = make()
    spec = loop.runner.spec
    cutter = make_cutter(spec)
    loop.submit([Open("s")], 0)
    loop.submit([Feed("s", prepare(cutter, cutter.cut(speech()[:64_000]), spec))], 0)
    said = ""
    while loop.has_work():
        result = loop.step()
        said += "".join(output.delta for output in result.outputs if isinstance(output, Text)) if result else ""
    assert said.split()
