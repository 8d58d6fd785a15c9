"""Skipped silence: words and times are those of the audio without it, also after a crash of the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from engine.boundary.replay import join
from engine.core.scheduler import Limits, Scheduler
from engine.messages import (
    SKIPPED,
    Abort,
    Closed,
    Command,
    Failed,
    Feed,
    Finish,
    Flush,
    Flushed,
    Item,
    Open,
    Output,
    Speech,
    Text,
)
from engine.server.loop import EngineLoop
from engine.server.skipped_silence import skip_settings
from engine.server.speech_track import GateSettings
from tests.engine import fakes
from tests.engine.server.test_loop_failures import items_of

SPEC = fakes.FRAMES
SETTLED, PRE_ROLL = 10 * fakes.POSITION, 2 * fakes.POSITION
SETTINGS = GateSettings(
    evidence=0.001,
    conversation_evidence=0.001,
    pre_roll_samples=PRE_ROLL,
    pause_samples=fakes.FRAME,
    hang_over_samples=SETTLED,
    hold_samples=20 * fakes.POSITION,
)


def build(cuts: bool = True, overlaps: bool = False, seed: int = 0) -> EngineLoop:
    runner = fakes.LaunchingFrames(chance=random.Random(seed)) if overlaps else fakes.FakeFrames()
    detector = fakes.LaunchingFakeDetector() if overlaps else fakes.FakeDetector()
    scheduler = Scheduler(SPEC, Limits(max_streams=3, cache_embeds=900), fakes.VOCABULARY)
    return EngineLoop(scheduler, runner, detector, skipping=SETTINGS if cuts else None)


def conversation(seed: int, turns: int = 3) -> NDArray[np.float32]:
    """Speech and a quiet room in turns, of any lengths."""
    chance = np.random.default_rng(seed)
    lengths = (chance.uniform(0.1, 4.0, 2 * turns) * fakes.RATE).astype(int)
    loudness = np.repeat([1.0, 0.01] * turns, lengths)
    return (loudness * chance.standard_normal(len(loudness))).astype(np.float32)


class Run:
    """A stream's way through a loop: what came out, and which items the scheduler was given."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.outputs: list[Output] = []
        self.given: list[Item] = []
        feed = loop.scheduler.feed

        def noting(name: str, items: list[Item], now: int) -> None:
            self.given += [structs.replace(item) for item in fakes.single_items(items, SPEC)]
            feed(name, items, now)

        loop.scheduler.feed = noting  # type: ignore[method-assign]

    def step(self) -> None:
        step = self.loop.step()
        self.outputs += [] if step is None else step.outputs
        self.loop.scheduler.check_integrity()

    def drain(self) -> Run:
        while self.loop.has_work():
            self.step()
        return self

    def submit(self, *commands: Command) -> Run:
        self.loop.submit([*commands], 0)
        return self

    @property
    def said(self) -> fakes.Transcript:
        return fakes.Transcript(self.outputs)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs if isinstance(output, Text) for token in output.tokens]


def live(audio: NDArray[np.float32], loop: EngineLoop, name: str = "a") -> Run:
    """Frame by frame."""
    run = Run(loop).submit(Open(name)).drain()
    for item in items_of(SPEC, audio):
        run.submit(Feed(name, [item])).drain()
    return run.submit(Finish(name)).drain()


def without_the_cuts(run: Run) -> Run:
    """The items that were given, to an engine that cuts nothing."""
    other = Run(build(cuts=False)).submit(
        Open("a"), Feed("a", [structs.replace(item) for item in run.given]), Finish("a")
    )
    return other.drain()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_as_if_the_silence_had_never_been_sent(seed: int, overlaps: bool) -> None:
    audio = conversation(seed)
    run = live(audio, build(overlaps=overlaps))
    whole = items_of(SPEC, audio)
    assert len(run.given) < len(whole)
    ends = [item.offset + item.length for item in run.given]
    assert [item.offset for item in run.given] == [SPEC.prefix_positions, *ends[:-1]], "positions are contiguous"
    other = without_the_cuts(run)
    assert (run.said.text, run.said.words, run.said.last) == (other.said.text, other.said.words, other.said.last)
    assert run.said.text and [token for token in run.tokens if token != SKIPPED] == other.tokens
    # A token or a cut for every position that was sent.
    assert len(run.tokens) == sum(item.length for item in whole)
    assert isinstance(run.outputs[-1], Closed) and run.outputs[-1].sample == len(audio)


def test_what_is_cut_is_silence_and_words_keep_their_times() -> None:
    quiet = 0.01 * fakes.speech(6, 2)
    audio = np.concatenate([fakes.speech(1, 1), quiet, fakes.speech(1, 3)])
    run = live(audio, build())
    given = {item.sample for item in run.given}
    missing = [item.sample for item in items_of(SPEC, audio) if item.sample not in given]
    assert fakes.RATE + SETTLED <= min(missing) < fakes.RATE + SETTLED + 2 * fakes.POSITION
    # The first frame of speech may be a soft one.
    heard_at = 7 * fakes.RATE + fakes.FRAME
    assert heard_at - PRE_ROLL - 2 * fakes.POSITION < max(missing) + fakes.POSITION <= heard_at - PRE_ROLL
    assert max(word.end_sample for word in run.said.words) > 7 * fakes.RATE
    assert len(run.said.speech) == len(audio) // fakes.FRAME, "all of it is listened to"


def joined(items: list[Item], chance: random.Random) -> Iterator[Item]:
    """The items, some of them as one."""
    while items:
        count = chance.randint(1, 6)
        yield from join(items[:count], SPEC)
        items = items[count:]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_cut_does_not_depend_on_when_verdicts_come(seed: int) -> None:
    """Any packets, joined or not, any number of steps between them, flushes: the same items go on, and the same is
    said."""
    audio, runs, tokens = conversation(seed, turns=2), [], []
    first, second = sorted(random.Random(seed).sample(range(1, len(items_of(SPEC, audio))), 2))
    for way in range(5):
        chance, commands, items = random.Random(seed + way), [Open("a")], items_of(SPEC, audio)
        for number, part in enumerate((items[:first], items[first:second], items[second:])):
            commands += [Feed("a", [item]) for item in (joined(part, chance) if way > 2 else part)]
            commands.append(Flush("a", number) if number < 2 else Finish("a"))
        run = Run(build(overlaps=way > 0, seed=seed))
        while commands:
            count = chance.choice([1, 2, 7, 60]) if way else 1
            run.submit(*commands[:count])
            commands = commands[count:]
            for _ in range(chance.randint(0, 3) if way else 99):
                if run.loop.has_work():
                    run.step()
        run.drain()
        tokens.append(run.tokens)
        runs.append((run.said.text, run.said.words, run.said.tags, [item.sample for item in run.given]))
    assert all(other == runs[0] for other in runs)
    # Silence that is skipped after the last text is not reported.
    told = min(map(len, tokens))
    assert all(other[:told] == tokens[0][:told] for other in tokens)


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_of_joined_audio_skips_the_same(seed: int) -> None:
    """Joined audio may be known in part, and skipped in part."""
    audio, chance = conversation(seed, turns=2), random.Random(seed)
    calm = live(audio, build())
    known = chance.randrange(len(calm.tokens))
    assert SKIPPED in calm.tokens
    again = Run(build()).submit(Open("a", forced_tokens=calm.tokens[:known])).drain()
    for item in joined(items_of(SPEC, audio), chance):
        again.submit(Feed("a", [item])).drain()
    again.submit(Finish("a")).drain()
    assert [item.sample for item in again.given] == [item.sample for item in calm.given]
    assert again.tokens == calm.tokens[known:]


def test_a_flush_in_the_silence_is_answered_for_all_that_came() -> None:
    audio = np.concatenate([fakes.speech(1, 1), 0.01 * fakes.speech(4, 2)])
    run = Run(build()).submit(Open("a")).drain()
    items = items_of(SPEC, audio)
    end = items[-1].offset + items[-1].length
    for item in items:
        run.submit(Feed("a", [item])).drain()
    assert len(run.given) < len(items) and not isinstance(run.outputs[-1], Flushed)
    run.submit(Flush("a", 7)).drain()
    answers = [output for output in run.outputs if isinstance(output, Flushed)]
    assert [(answer.tag, answer.sample) for answer in answers] == [(7, len(audio))]
    assert run.loop.progress_of("a") == end


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_flush_at_a_pause_is_answered_with_the_audio_that_brings_the_words_out(cuts: bool, overlaps: bool) -> None:
    audio = np.concatenate([fakes.speech(1, 1), 0.001 * fakes.speech(2, 2), fakes.speech(1, 3)])
    calm = live(audio, build(cuts, overlaps))
    run = Run(build(cuts, overlaps)).submit(Open("a")).drain()
    spoken, answered_after = fakes.RATE // fakes.POSITION, None
    for index, item in enumerate(items_of(SPEC, audio)):
        run.submit(Feed("a", [item])).drain()
        if index == spoken:
            run.submit(Flush("a", 7, pause=0)).drain()
        if answered_after is None and any(isinstance(output, Flushed) for output in run.outputs):
            answered_after = index - spoken
    run.submit(Finish("a")).drain()
    behind = SPEC.pause_positions_for(SPEC.default_delay_positions)
    assert answered_after is not None and behind - 2 <= answered_after <= behind + 2
    assert run.tokens == calm.tokens and run.said.text == calm.said.text != ""


def test_a_long_silence_keeps_nothing_and_a_declared_one_costs_nothing() -> None:
    run = Run(build()).submit(Open("a"), Feed("a", items_of(SPEC, fakes.speech(1, 1))[:12])).drain()
    hour, position = 45_000, SPEC.prefix_positions + 12
    run.submit(Feed("a", [Item(position, hour, 12 * fakes.POSITION)])).drain()
    stream = run.loop.silence_skipper._streams["a"]
    assert sum(item.length for item in stream.waiting if isinstance(item, Item)) <= 4
    assert run.loop.scheduler.streams["a"].computed < position + 20
    assert run.loop.progress_of("a") > position + hour - 5, "the gateway may send on"
    run.submit(Feed("a", [Item(position + hour, 1, (12 + hour) * fakes.POSITION)])).drain()
    assert len(run.tokens) > hour - 10, "what is cut is told soon"
    assert len(stream._skips) <= 2


def test_mistakes_end_as_before() -> None:
    items = items_of(SPEC, fakes.speech(1, 1))
    run = Run(build()).submit(Open("a"), Feed("a", items[:3]), Finish("a"), Feed("a", items[3:4]), Open("b"))
    run.submit(Feed("b", [structs.replace(items[5], offset=99)]), Feed("b", [items[0]]), Abort("a")).drain()
    assert [output.stream for output in run.outputs if isinstance(output, Failed)] == ["b"]
    assert not run.loop.scheduler.streams and not run.loop.silence_skipper._streams


def test_uploads_and_engines_without_the_setting_compute_everything() -> None:
    audio = np.concatenate([fakes.speech(1, 1), 0.01 * fakes.speech(4, 2)])
    whole = len(items_of(SPEC, audio))
    assert len(live(audio, build(cuts=False)).given) == whole
    run = Run(build()).submit(Open("a", live=False), Feed("a", items_of(SPEC, audio)), Finish("a")).drain()
    assert len(run.given) == whole


def test_a_suspects_spot_and_what_is_announced_are_on_the_gateways_count() -> None:
    audio = np.concatenate([fakes.speech(1, 1), 0.01 * fakes.speech(4, 2), fakes.speech(1, 3)])
    run = live(audio, build())
    tokens, items = run.tokens, items_of(SPEC, audio)
    loop = build()
    told: list[tuple[str, int, int]] = []
    loop.announce = told.extend
    spot, end = items[-10].offset, items[-1].offset + items[-1].length
    loop.submit([Open("a", forced_tokens=tokens, suspect=(spot, spot + 1)), Feed("a", items)], 0)
    (suspect,) = loop.scheduler.suspects.values()
    assert suspect.start == spot - tokens.count(SKIPPED)
    while loop.has_work():
        loop.step()
    assert max(target[2] for target in told) == end


@pytest.mark.parametrize("seed", range(4))
def test_the_gateway_is_told_that_silence_is_skipped_while_it_is(seed: int) -> None:
    """Whenever the gate is closed after a report, and at no other time."""
    run, told = Run(build()).submit(Open("a")).drain(), list[bool]()
    gate = run.loop.silence_skipper.gate("a")
    assert gate is not None
    for item in items_of(SPEC, conversation(seed)):
        known = len(run.outputs)
        run.submit(Feed("a", [item])).drain()
        reports = [output.skipped for output in run.outputs[known:] if isinstance(output, Speech)]
        if reports:
            assert reports[-1] is not gate.is_open
            told += reports
    assert not told[0] and any(told)
    assert sum(told[i] != told[i - 1] for i in range(1, len(told))) <= 6, "each silence is skipped once"


def test_skipped_silence_is_told_from_its_hang_over_to_the_next_speech() -> None:
    audio = np.concatenate([fakes.speech(1, 1), 0.01 * fakes.speech(4, 2), fakes.speech(1, 3)])
    run = live(audio, build())
    reports = [output for output in run.outputs if isinstance(output, Speech)]
    skipped = [report.end for report in reports if report.skipped]
    assert skipped == [report.end for report in reports if skipped[0] <= report.end <= skipped[-1]], "without a break"
    assert 0 <= skipped[0] - (fakes.RATE + SETTLED) < 2 * fakes.POSITION
    assert abs(5 * fakes.RATE - skipped[-1]) < 2 * fakes.POSITION


@pytest.mark.parametrize("opening", [Open("a"), Open("a", live=False)])
@pytest.mark.parametrize("cuts", [False, True])
def test_no_silence_is_told_as_skipped_that_is_computed(opening: Open, cuts: bool) -> None:
    if cuts and opening.live:
        pytest.skip("this one is skipped")
    audio = np.concatenate([fakes.speech(1, 1), 0.01 * fakes.speech(4, 2)])
    run = Run(build(cuts)).submit(structs.replace(opening), Feed("a", items_of(SPEC, audio)), Finish("a")).drain()
    reports = [output for output in run.outputs if isinstance(output, Speech)]
    assert reports and not any(report.skipped for report in reports)


def test_features_of_a_client_end_the_skipping() -> None:
    """The speech detector does not hear them, so the model is given everything from there on."""
    run = Run(build()).submit(Open("a"), Feed("a", items_of(SPEC, 0.01 * fakes.speech(4, 2)))).drain()
    stream = run.loop.silence_skipper._streams["a"]
    stream.add([Item(99, 1, 0, key=b"k", payload=np.zeros((2, 2), np.float32))])
    assert run.loop.silence_skipper.on_track("a", stream._processed, fakes.FRAME) is False


def test_the_settings_of_a_real_engine() -> None:
    real = skip_settings(3.0)
    assert real.hang_over_samples == 48_000 and real.evidence == real.conversation_evidence
