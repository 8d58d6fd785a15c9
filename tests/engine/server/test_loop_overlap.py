"""Overlapping steps: the host plans the next step before it has read the last one, and results do not change."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boundary.replay import join
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import (
    Abort,
    Closed,
    Command,
    Dead,
    Failed,
    Feed,
    Finish,
    Flush,
    Flushed,
    Open,
    Opened,
    Output,
    Speech,
)
from engine.runner.base import never
from engine.server.loop import EngineLoop
from tests.engine import fakes
from tests.engine.server.test_loop_failures import commands_of, items_of, text

SPEC = fakes.FRAMES


def loop_of(runner: fakes.FakeFrames, detector: fakes.FakeDetector | None = None) -> EngineLoop:
    limits = Limits(max_streams=3, cache_embeds=900, step_positions=6, step_embeds=6)
    return EngineLoop(Scheduler(SPEC, limits, fakes.VOCABULARY), runner, detector)


def overlapping(seed: int = 0) -> tuple[EngineLoop, fakes.LaunchingFrames]:
    runner = fakes.LaunchingFrames(chance=random.Random(seed))
    return loop_of(runner, fakes.LaunchingFakeDetector()), runner


def summary(outputs: list[Output]) -> tuple[Any, ...]:
    """What a stream was told, apart from how it was cut into messages."""
    said = fakes.Transcript(outputs)
    ends = [output for output in outputs if isinstance(output, (Flushed, Closed, Failed))]
    return said.text, said.words, said.speech, ends


def run(loop: EngineLoop, sessions: list[list[Command]], seed: int) -> list[list[Output]]:
    """Sessions of three names, those of one name one after the other, in any order of events."""
    chance = random.Random(seed)
    waiting = [list(commands) for commands in sessions]
    said: list[list[Output]] = [[] for _ in sessions]
    owner: dict[str, int] = {}
    while any(waiting) or loop.has_work():
        for _ in range(chance.randint(0, 4)):
            index = chance.choice([*(index for index, left in enumerate(waiting) if left), 0])
            if not waiting[index]:
                continue
            command = waiting[index][0]
            if isinstance(command, Open):
                if command.stream in owner:
                    continue
                owner[command.stream] = index
            loop.submit([waiting[index].pop(0)], chance.randint(0, 1000))
            loop.scheduler.check_integrity()
        step = loop.step()
        loop.scheduler.check_integrity()
        for output in [] if step is None else step.outputs:
            assert not isinstance(output, Dead)
            said[owner[output.stream]].append(output)
            if isinstance(output, (Closed, Failed)):
                del owner[output.stream]
    return said


def sessions(seed: int) -> tuple[list[list[Command]], list[int]]:
    """Sessions to mix, and which of them are aborted somewhere."""
    chance = random.Random(seed)
    all_of_them, aborted = [], []
    for index in range(6):
        commands = commands_of(SPEC, "abc"[index % 3], seed + index)
        if chance.random() < 0.4:
            commands[chance.randint(1, len(commands) - 1) :] = [Abort(commands[0].stream)]
            aborted.append(index)
        all_of_them.append(commands)
    return all_of_them, aborted


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_order_of_events_says_what_steps_one_by_one_say(seed: int) -> None:
    wanted = run(loop_of(fakes.FakeFrames(), fakes.FakeDetector()), sessions(seed)[0], seed)
    loop, _ = overlapping(seed)
    commands, aborted = sessions(seed)
    found = run(loop, commands, seed + 1)
    for index, outputs in enumerate(found):
        if index in aborted:
            # How far it came depends on when; what it said until then does not.
            assert text(wanted[index]).startswith(text(outputs)) or text(outputs).startswith(text(wanted[index]))
        else:
            assert summary(outputs) == summary(wanted[index])
            assert isinstance(outputs[0], Opened) and text(outputs)


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    loop, runner = overlapping()
    items = {name: items_of(SPEC, fakes.speech(2, index)) for index, name in enumerate("ab")}
    loop.submit([Open("a"), Open("b")], 0)
    for count in range(8):
        name = "ab"[count % 2]
        loop.submit([Feed(name, [items[name].pop(0)])], count)
        step = loop.step()
    assert runner.most_ahead == 1 and loop.has_launched_step
    # What was fed last is under way, what was fed before it has been said.
    assert step is not None and {output.stream for output in step.outputs if not isinstance(output, Opened)} == {"a"}
    loop.step()
    assert not loop.has_launched_step and not loop.has_work()


def test_what_was_listened_to_comes_with_the_step_and_not_after_the_stream_has_ended() -> None:
    loop, _ = overlapping()
    items = items_of(SPEC, fakes.speech(1, 1))
    loop.submit([Open("a"), Feed("a", items), Finish("a")], 0)
    outputs: list[Output] = []
    while loop.has_work():
        step = loop.step()
        outputs += [] if step is None else step.outputs
    heard = sum(len(output.probabilities) for output in outputs if isinstance(output, Speech))
    assert heard == fakes.RATE // fakes.FRAME and isinstance(outputs[-1], Closed)


def test_a_flush_at_a_pause_does_not_wait_for_the_device() -> None:
    loop, runner = overlapping()
    items = items_of(SPEC, fakes.speech(2, 1))
    loop.submit([Open("a"), Feed("a", items[:6])], 0)
    loop.step()
    assert loop.has_launched_step and loop.listener is not None
    unasked, launches = runner.unasked, loop.listener.launches
    flushes = [Feed("a", items[6:7]), Flush("a", 1, pause=0), Feed("a", items[7:8]), Flush("a", 2, pause=0)]
    loop.submit(flushes, 1)
    assert (runner.unasked, loop.listener.launches) == (unasked, launches), "neither asked nor told to listen"
    outputs: list[Output] = []
    for item in items[8:]:
        loop.submit([Feed("a", [item])], 2)
        step = loop.step()
        outputs += [] if step is None else step.outputs
    answers = [output for output in outputs if isinstance(output, Flushed)]
    assert [answer.tag for answer in answers] == [1, 2] and answers[0].sample < answers[1].sample
    # Speech goes on, and the one who asked is answered all the same.
    loop.submit([Flush("a", 3, pause=0), Finish("a")], 3)
    outputs = []
    while loop.has_work():
        step = loop.step()
        outputs += [] if step is None else step.outputs
    assert [output.tag for output in outputs if isinstance(output, Flushed)] == [3] and isinstance(outputs[-1], Closed)


def test_a_stream_that_ended_under_way_leaves_nothing_to_the_next_of_its_name() -> None:
    loop, _ = overlapping()
    first, second = items_of(SPEC, fakes.speech(1, 1)), items_of(SPEC, fakes.speech(1, 2))
    loop.submit([Open("a"), Feed("a", first[:3])], 0)
    loop.step()
    slot = loop.scheduler.streams["a"].slot
    assert loop.has_launched_step
    loop.submit([Abort("a"), Open("a")], 1)
    assert loop.scheduler.streams["a"].slot == slot, "the case that matters"
    loop.scheduler.check_integrity()
    loop.submit([Feed("a", second), Finish("a")], 2)
    outputs: list[Output] = []
    while loop.has_work():
        step = loop.step()
        outputs += [] if step is None else step.outputs
        loop.scheduler.check_integrity()
    alone = loop_of(fakes.FakeFrames())
    alone.submit([Open("a"), Feed("a", items_of(SPEC, fakes.speech(1, 2))), Finish("a")], 0)
    wanted: list[Output] = []
    while alone.has_work():
        step = alone.step()
        wanted += [] if step is None else step.outputs
    assert text(outputs) == text(wanted) != ""


def test_all_that_is_under_way_is_announced() -> None:
    loop, _ = overlapping()
    told: list[set[str]] = []
    loop.announce = lambda targets: told.append({name for name, *_ in targets})
    loop.submit([Open("a"), Open("b"), Feed("a", items_of(SPEC, fakes.speech(1, 1))[:1])], 0)
    loop.step()
    loop.submit([Feed("b", items_of(SPEC, fakes.speech(1, 2))[:1])], 1)
    loop.step()
    assert told[-1] == {"a", "b"}


def test_positions_that_are_encoded_with_an_item_are_announced() -> None:
    """The encoder may die of audio that is not decoded in the same step."""
    loop, _ = overlapping()
    told: list[tuple[str, int, int]] = []
    loop.announce = told.extend
    others = [Open(name) for name in "bcdef"]
    loop.submit([Open("a"), *others], 0)
    loop.submit([Feed(name, items_of(SPEC, fakes.speech(1, ord(name)))[:1]) for name in "bcdef"], 0)
    loop.submit([Feed("a", join(items_of(SPEC, fakes.speech(1, 1))[:4], SPEC))], 0)
    loop.step()
    first = SPEC.prefix_positions
    assert ("a", first, first + 4) in told and loop.scheduler.streams["a"].computed <= first + 1


def test_a_suspect_is_computed_while_nothing_else_is() -> None:
    loop, _ = overlapping()
    items, bad_items = items_of(SPEC, fakes.speech(2, 1)), items_of(SPEC, fakes.speech(2, 2))
    loop.submit([Open("a"), Open("bad", suspect=(SPEC.prefix_positions, SPEC.prefix_positions + 2))], 0)
    ahead = []
    for index in range(12):
        # The suspect has audio at the positions of its crash in steps 4 and 5.
        bad = [Feed("bad", [bad_items[index - 4]])] if index >= 4 else []
        loop.submit([Feed("a", [items[index]]), *bad], index)
        loop.step()
        ahead.append(loop.has_launched_step)
    assert any(ahead[:4]) and not any(ahead[4:6]) and any(ahead[7:])


@pytest.mark.parametrize("fails", ["launch", "answer"])
def test_a_runner_that_fails_ends_the_engine_once(fails: str) -> None:
    class Failing(fakes.LaunchingFrames):
        def launch(self, plan: StepPlan, time_is_up: Any = never) -> Any:
            if plan.decode and fails == "launch":
                raise RuntimeError("device lost")
            answers = super().launch(plan)
            return answers if not plan.decode else self.lost

        def lost(self) -> list[DecodeResult]:
            raise RuntimeError("device lost")

    loop = loop_of(Failing())
    loop.submit([Open("a"), Feed("a", items_of(SPEC, fakes.speech(1, 1)))], 0)
    outputs: list[Output] = []
    while not any(isinstance(output, Dead) for output in outputs):
        step = loop.step()
        outputs += [] if step is None else step.outputs
    assert outputs[-1] == Dead("the model runner failed: RuntimeError: device lost")


def test_while_streams_are_rebuilt_one_step_is_under_way() -> None:
    loop, _ = overlapping()
    for seed, name in enumerate("abc"):
        items = items_of(SPEC, fakes.speech(4, seed))
        loop.submit([Open(name, forced_tokens=[0] * (len(items) // 2)), Feed(name, items)], 0)
    ahead = []
    while loop.scheduler.rebuilding:
        loop.step()
        ahead.append(len(loop.launched))
    assert max(ahead) == 1
    while loop.has_work():
        loop.step()
    loop.scheduler.check_integrity()
    assert not loop.scheduler.recovering
