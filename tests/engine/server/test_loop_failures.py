"""An unexpected error in work for one stream ends that stream; the words of the others do not change."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.boundary.items import make_cutter, prepare
from engine.core.plan import DecodeResult, DecodeTask
from engine.core.scheduler import Limits, Scheduler
from engine.errors import EngineDead
from engine.messages import (
    Abort,
    Closed,
    Command,
    Dead,
    Failed,
    Feed,
    Finish,
    Flush,
    Item,
    Open,
    Opened,
    Output,
    Saved,
    Speech,
    Text,
)
from engine.server.loop import EngineLoop
from engine.server.speech_track import GateSettings
from engine.spec import ModelSpec
from tests.engine import fakes

# Samples no other audio has: the part of the engine that meets one breaks.
BREAKS_DETECTOR, BREAKS_GATE, BREAKS_COMMIT = np.float32(71), np.float32(72), np.float32(73)
SETTINGS = GateSettings(
    pre_roll_samples=64, pause_samples=128, hang_over_samples=640, evidence=0.001, conversation_evidence=0.001
)


@dataclass
class PoisonDetector(fakes.FakeDetector):
    def listen(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        if any((samples == BREAKS_DETECTOR).any() for _, samples in batch):
            raise RuntimeError("the detector met the poison")
        found = super().listen(batch)
        for speech in found:
            if any(stream == speech.stream and (samples == BREAKS_GATE).any() for stream, samples in batch):
                speech.probabilities = ["loud"]  # type: ignore[list-item]
        return found

    def close(self, stream: str) -> None:
        del self.ears[stream]

    def open(self, stream: str, sample: int = 0) -> None:
        assert stream not in self.ears, "a detector listens to a stream once"
        super().open(stream, sample)


@dataclass
class PoisonRunner(fakes.FakeWindowed):
    """Says tokens that do not exist, or has no state to save, once it has met the poison."""

    bad_rows: set[int] = field(default_factory=set)
    bad_slots: set[int] = field(default_factory=set)
    breaks: str = "commit"

    def encode(self, payload: NDArray[np.float32], rows: list[int]) -> None:
        super().encode(payload, rows)
        self.bad_rows.difference_update(rows)
        if (payload == BREAKS_COMMIT).any():
            self.bad_rows.update(rows)

    def decode(self, task: DecodeTask) -> DecodeResult:
        result = super().decode(task)
        self.bad_slots.discard(task.slot)
        if self.bad_rows.intersection(task.rows):
            self.bad_slots.add(task.slot)
            if self.breaks == "commit":
                result.keep_from = "nowhere"  # type: ignore[assignment]
        return result

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        if slot in self.bad_slots and self.breaks == "save":
            raise KeyError("no such state")
        return super().save(slot, base, end)


def loop_of(spec: ModelSpec, gated: bool, breaks: str = "commit") -> EngineLoop:
    runner = PoisonRunner(spec, breaks=breaks) if spec.rereads_window else fakes.FakeFrames(spec)
    scheduler = Scheduler(spec, Limits(max_streams=8, cache_embeds=900), fakes.VOCABULARY)
    return EngineLoop(scheduler, runner, PoisonDetector(), SETTINGS if gated else None)


def items_of(spec: ModelSpec, audio: NDArray[np.float32]) -> list[Item]:
    cutter = make_cutter(spec)
    return prepare(cutter, cutter.cut(audio), spec) + prepare(cutter, cutter.flush(2), spec)


def commands_of(spec: ModelSpec, name: str, seed: int) -> list[Command]:
    chance = random.Random(seed)
    audio = fakes.speech(4, seed)
    audio[len(audio) // 3 : len(audio) // 2] = 0
    items, commands = items_of(spec, audio), [Open(name)]
    while items:
        count = chance.randint(1, 6)
        commands.append(Feed(name, items[:count]))
        items = items[count:]
        if chance.random() < 0.1:
            commands.append(Flush(name, len(commands), chance.random() < 0.5))
    return [*commands, Finish(name)]


def poisoned(spec: ModelSpec, name: str, seed: int, sample: np.float32) -> list[Command]:
    """The same with a sample somewhere that breaks a part of the engine."""
    commands = commands_of(spec, name, seed)
    feeds = [command for command in commands if isinstance(command, Feed)]
    victims = [item for feed in feeds for item in feed.items if item.payload is not None]
    victim = victims[random.Random(seed).randrange(4, 14)]
    victim.payload = victim.payload.copy()
    victim.payload[spec.look_back_samples + 5] = sample
    victim.key = b"poisoned %7d" % seed
    return commands


def run(loop: EngineLoop, sessions: dict[str, list[Command]], seed: int) -> dict[str, list[Output]]:
    """All sessions mixed, each in its own order; what was said to each. The books are checked after every step."""
    chance, said = random.Random(seed), {name: [] for name in sessions}
    waiting = {name: list(commands) for name, commands in sessions.items()}
    while any(waiting.values()) or loop.has_work():
        batch: list[Command] = []
        for name in chance.sample(sorted(waiting), len(waiting)):
            count = chance.randint(0, 3)
            batch += waiting[name][:count]
            waiting[name] = waiting[name][count:]
        loop.submit(batch, chance.randint(0, 10**6))
        loop.scheduler.check_integrity()
        step = loop.step()
        loop.scheduler.check_integrity()
        for output in [] if step is None else step.outputs:
            assert not isinstance(output, Dead), output.message
            said[output.stream].append(output)
    assert not loop.scheduler.streams
    return said


def text(outputs: list[Output]) -> str:
    return "".join(output.delta for output in outputs if isinstance(output, Text))


POISONS: dict[str, Any] = {
    "a detector that fails": BREAKS_DETECTOR,
    "a gate that fails": BREAKS_GATE,
    "a commit that fails": BREAKS_COMMIT,
    "a state that cannot be saved": BREAKS_COMMIT,
}


@pytest.mark.parametrize("poison", POISONS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_only_the_stream_at_fault_ends(poison: str, seed: int) -> None:
    breaks = "save" if "saved" in poison else "commit"
    spec, good = fakes.WINDOWED, ["a", "b", "c"]
    calm = run(loop_of(spec, True), {name: commands_of(spec, name, index) for index, name in enumerate(good)}, seed)
    sessions = {name: commands_of(spec, name, index) for index, name in enumerate(good)}
    sessions["bad"] = poisoned(spec, "bad", seed, POISONS[poison])
    said = run(loop_of(spec, True, breaks), sessions, seed)
    for name in good:
        assert text(said[name]) == text(calm[name]) != ""
        assert isinstance(said[name][-1], Closed)
    failures = [output for output in said["bad"] if isinstance(output, Failed)]
    assert len(failures) == 1 and failures[0].code == "StreamFailed"
    assert "poison" not in failures[0].message, "what a client is told says nothing of our insides"


@pytest.mark.parametrize("spec", [fakes.FRAMES, fakes.WINDOWED], ids=["frames", "windowed"])
def test_a_stream_that_cannot_be_planned_ends_alone(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = {name: commands_of(spec, name, index) for index, name in enumerate(["a", "b", "bad"])}
    calm = run(loop_of(spec, False), dict(sessions), 1)
    loop = loop_of(spec, False)
    sessions = {name: commands_of(spec, name, index) for index, name in enumerate(["a", "b", "bad"])}
    loop.submit([sessions["bad"].pop(0)], 0)
    # Its items cannot be found any more once it has been heard for a while.
    timeline = loop.scheduler.streams["bad"].timeline
    window = type(timeline).window

    def broken(self: Any, start: int, end: int) -> tuple[int, int]:
        if self is timeline and start > 8:
            raise IndexError("a hole in the timeline")
        return window(self, start, end)

    monkeypatch.setattr(type(timeline), "window", broken)
    monkeypatch.setattr(type(timeline), "single_position_item", lambda self, index, position: None)
    said = run(loop, sessions, 1)
    assert [text(said[name]) for name in "ab"] == [text(calm[name]) for name in "ab"]
    assert [output.code for output in said["bad"] if isinstance(output, Failed)] == ["StreamFailed"]


def test_a_command_that_breaks_the_engine_ends_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of(fakes.WINDOWED, True)
    good = {"a": commands_of(fakes.WINDOWED, "a", 1)}
    calm = run(loop_of(fakes.WINDOWED, True), dict(good), 3)
    good = {"a": commands_of(fakes.WINDOWED, "a", 1)}
    nonsense: list[Command] = [
        Open("bad"),
        Feed("bad", [Item("x", 1, 0, b"k", np.zeros(128, np.float32))]),  # type: ignore[arg-type]
        Open("worse"),
        Feed("worse", "items"),  # type: ignore[arg-type]
        Open("worst", delay_positions="no"),  # type: ignore[arg-type]
    ]
    loop.submit(nonsense, 0)
    said = run(loop, {**good, "bad": [], "worse": [], "worst": []}, 3)
    assert text(said["a"]) == text(calm["a"])
    for name in ("bad", "worse", "worst"):
        assert [output.code for output in said[name] if isinstance(output, Failed)] == ["StreamFailed"]
    assert "TypeError" in caplog.text, "the log says where it came up"


def test_books_that_do_not_add_up_end_the_engine_cleanly(caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of(fakes.WINDOWED, True)
    loop.submit([Open("a"), Open("bad")], 0)
    loop.scheduler._free_slots.pop()
    loop.submit([Feed("bad", "items")], 0)  # type: ignore[arg-type]
    assert loop.has_work()
    step = loop.step()
    assert step is not None and isinstance(step.outputs[-1], Dead) and "is inconsistent" in step.outputs[-1].message
    with pytest.raises(EngineDead):
        loop.step()


def test_an_error_that_belongs_to_nobody_ends_the_engine_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(fakes.WINDOWED, True)
    loop.submit([Open("a")], 0)
    monkeypatch.setattr(loop.scheduler, "plan", lambda *_: 1 / 0)
    step = loop.step()
    assert step is not None and step.outputs[-1] == Dead("the engine failed: ZeroDivisionError: division by zero")


@pytest.mark.parametrize("gated", [False, True])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_commands_leaves_no_ghosts(gated: bool, data: st.DataObject) -> None:
    """A name is open or it is not: what was answered says which, however often it was opened in one batch."""
    loop = loop_of(fakes.WINDOWED, gated)
    item = items_of(fakes.WINDOWED, fakes.speech(1, 1))[0]
    kinds = st.sampled_from(["open", "feed", "bad feed", "flush", "finish", "abort"])
    balance = Counter({"a": 0, "b": 0})
    for batch in data.draw(st.lists(st.lists(st.tuples(kinds, st.sampled_from("ab")), max_size=6), max_size=5)):
        commands: list[Command] = []
        for kind, name in batch:
            commands.append(
                {
                    "open": Open(name),
                    "feed": Feed(name, [Item(0, 1, 0, item.key, item.payload)]),
                    "bad feed": Feed(name, [Item(0, 1, 0)]),
                    "flush": Flush(name, 1),
                    "finish": Finish(name),
                    "abort": Abort(name),
                }[kind]
            )
        loop.submit(commands, 0)
        loop.scheduler.check_integrity()
        while loop.has_work():
            step = loop.step()
            for output in [] if step is None else step.outputs:
                assert not isinstance(output, Dead)
                balance[output.stream] += isinstance(output, Opened) - isinstance(output, (Closed, Failed))
            loop.scheduler.check_integrity()
        known = set(loop.scheduler.streams)
        assert balance == {name: int(name in known) for name in "ab"}
        assert loop.listener is not None and loop.listener._open == known
        assert set(loop.listener._detector.ears) == known  # type: ignore[attr-defined]


class DeafDetector(PoisonDetector):
    """Hears nothing any more, of whatever stream."""

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Any:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("together", [True, False])
def test_a_detector_that_fails_for_everybody_ends_the_engine_and_no_stream(together: bool) -> None:
    """The streams are rebuilt elsewhere, which they would not be if each of them had failed."""
    scheduler = Scheduler(fakes.WINDOWED, Limits(max_streams=8, cache_embeds=900), fakes.VOCABULARY)
    loop = EngineLoop(scheduler, PoisonRunner(fakes.WINDOWED), DeafDetector(), SETTINGS)
    outputs: list[Output] = []
    for index in range(8):
        loop.submit([Open(f"s{index}")], 0)
    for index in range(8):
        loop.submit([Feed(f"s{index}", items_of(fakes.WINDOWED, fakes.speech(1, index))[:3])], index)
        if together and index < 7:
            continue
        step = loop.step()
        outputs += [] if step is None else step.outputs
        if outputs and isinstance(outputs[-1], Dead):
            break
    assert isinstance(outputs[-1], Dead) and "detector" in outputs[-1].message
    assert sum(isinstance(output, Failed) for output in outputs) <= (0 if together else 3)


def test_streams_that_are_opened_are_announced() -> None:
    """A saved state may be the end of an engine before any of its audio is computed."""
    loop, told = loop_of(fakes.WINDOWED, True), list[set[str]]()
    loop.announce = lambda targets: told.append({name for name, *_ in targets})
    loop.submit([Open("a")], 0)
    loop.step()
    assert {"a"} in told
