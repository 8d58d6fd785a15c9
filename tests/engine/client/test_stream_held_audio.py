"""Audio that is sent a little later: the engine gets the same, in the same order, in fewer messages.

Time is a number that the tests change, so every sample's delay is exact.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import messages
from engine.boundary.codec import Status
from engine.boundary.replay import StreamLimits
from engine.client.link import PacedSource
from engine.client.stream import HELD_SECONDS, INAUDIBLE_POWER, LOUDER, MAX_HELD_SECONDS, EngineStream, HeldAudio
from engine.errors import StreamFinished
from engine.messages import Command, Feed, Flush, Item, Open, Speech
from engine.server.host import MAX_MESSAGE_POSITIONS
from tests.engine import fakes
from tests.engine.client import test_recovery_rebuilding
from tests.engine.client.test_recovery_rebuilding import EngineDeath, play
from tests.engine.server import test_skipped_silence as silence_cut

SPEC, RATE, POSITION = fakes.FRAMES, fakes.RATE, fakes.POSITION
QUIET, LOUD = 0.001, 0.1
NO_TURN_RULE, TURN_RULE = None, messages.TurnRule(0.5, 1024, 3200, (3200,))

Samples = NDArray[np.float32]


def noise(samples: int, level: float, seed: int = 0) -> Samples:
    """Every seed is other audio of the same power."""
    found = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), samples)
    return cast(Samples, np.float32(level) * found)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still unless a test moves it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def move(self, seconds: float) -> None:
        """Every timer runs at its own time."""
        end = self.now + seconds
        while due := [timer.when() for timer in self._timers() if timer.when() <= end]:
            self.now = max(self.now, min(due))
            await settle()
        self.now = end

    def _timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    @property
    def has_timers(self) -> bool:
        return bool(self._timers())


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Link:
    """In place of an `EngineLink`: notes what is sent, and when."""

    has_room = True
    lost: str | None = None

    def __init__(self, loop: VirtualLoop, status: Status) -> None:
        self.status = status
        self.sent: list[tuple[float, Command, list[Item]]] = []
        self._loop = loop

    def send(self, command: Command, items: list[Item] | None = None) -> None:
        self.sent.append((self._loop.now, command, list(items or [])))

    def send_paced(self, source: PacedSource) -> None:
        while (piece := source.next_piece()) is not None:
            self.send(cast(Command, piece[0]), piece[1])

    @property
    def feeds(self) -> list[tuple[float, list[Item]]]:
        return [(at, items) for at, command, items in self.sent if isinstance(command, Feed)]

    @property
    def trace(self) -> list[tuple[float, Any]]:
        """Every item and every other command, and when it was sent. How items are joined and put into commands is left
        out."""
        found: list[tuple[float, Any]] = []
        for at, command, items in self.sent:
            if not isinstance(command, Feed):
                found.append((at, command))
            singles = fakes.single_items(items, SPEC)
            found += [(at, (item.offset, item.length, item.sample, item.samples, item.key)) for item in singles]
        return found


@dataclass
class Held:
    """An open stream, its link, and what it has said of the audio that it holds."""

    loop: VirtualLoop
    # The status of every engine.
    status: Status = field(default_factory=Status)
    opening: Open = field(default_factory=lambda: Open("s"))
    stream: EngineStream = field(init=False)
    links: list[Link] = field(default_factory=list)
    ended: list[EngineStream] = field(default_factory=list)

    async def open(self) -> Held:
        self.stream = EngineStream(self.opening, SPEC, StreamLimits(100_000, 100_000), self.ended.append)
        await self.reopen()
        return self

    async def reopen(self) -> None:
        self.links.append(Link(self.loop, self.status))
        opening = asyncio.ensure_future(self.stream.open_on(cast(Any, self.link)))
        await settle()
        self.stream.on_output(messages.Opened("s"))
        await opening

    @property
    def link(self) -> Link:
        return self.links[-1]

    def report(self, is_skipped: bool) -> None:
        sample = self.stream.outputs.reported_until
        self.stream.on_output(Speech("s", sample, fakes.FRAME, [0.0], skipped=is_skipped))

    async def skip(self) -> None:
        """The engine skips the stream's silence, and the level of the silence is known."""
        self.report(True)
        await self.stream.feed(noise(POSITION, QUIET))
        assert not self.stream.holds_audio

    @property
    def sent_until(self) -> int:
        return self.stream.replay_log.end_sample


Story = Callable[[Held], Awaitable[None]]


def run(story: Story, is_held: bool = True, opening: Open | None = None) -> Held:
    """Play a story with virtual time; without `is_held`, all audio is sent at once."""

    async def told() -> Held:
        held = Held(cast(VirtualLoop, asyncio.get_running_loop()), opening=opening or Open("s"))
        await story(await held.open())
        return held

    may_wait = HeldAudio.may_wait if is_held else lambda self, samples, wanted, sent: False
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, mock.patch.object(HeldAudio, "may_wait", may_wait):
        return runner.run(told())


# Which audio waits


def waits(silence: HeldAudio, *levels: float, samples: int = POSITION, wanted: int = 0) -> list[bool]:
    """Whether each of these appends may wait; the engine wants messages of so many samples."""
    return [silence.may_wait(noise(samples, level), wanted, 0) for level in levels]


@pytest.fixture
def silence() -> HeldAudio:
    """Of a stream whose silence is skipped; its level is known."""
    found = HeldAudio(RATE)
    found.note(True)
    assert waits(found, QUIET, QUIET) == [False, True]
    return found


def test_nothing_waits_before_the_engine_skips_and_after_it() -> None:
    found = HeldAudio(RATE)
    assert waits(found, 0, QUIET, 0) == [False] * 3
    found.note(True)
    assert waits(found, QUIET, QUIET) == [False, True], "the first append tells how loud the silence is"
    found.note(True)
    assert waits(found, QUIET) == [True], "a report that says the same changes nothing"
    found.note(False)
    assert waits(found, QUIET, 0) == [False] * 2


def test_audio_that_is_louder_than_the_silence_does_not_wait(silence: HeldAudio) -> None:
    step = LOUDER**0.5
    assert waits(silence, QUIET, 0.9 * step * QUIET, QUIET, 1.2 * step * QUIET) == [True, True, True, False]


def test_audio_that_nobody_can_hear_waits_however_silent_it_was_before() -> None:
    found = HeldAudio(RATE)
    found.note(True)
    audible = INAUDIBLE_POWER**0.5
    assert waits(found, 0, 0, 0.9 * audible, 0, 1.1 * audible) == [False, True, True, True, False]


@pytest.mark.parametrize("samples", [POSITION // 4, POSITION])
def test_speech_that_goes_on_does_not_wait(silence: HeldAudio, samples: int) -> None:
    """The engine needs it to find that it is speech. 30 dB above the silence, for half a second."""
    assert not any(waits(silence, *[QUIET * 32] * (RATE // 2 // samples), samples=samples))


@pytest.mark.parametrize("bang", [0.02, 1.0])
def test_speech_after_a_louder_noise_does_not_wait(silence: HeldAudio, bang: float) -> None:
    assert waits(silence, bang) == [False]
    waits(silence, *[QUIET] * 5)
    assert waits(silence, 10 * QUIET) == [False]


def test_a_room_that_has_become_louder_is_silence_again_after_some_seconds(silence: HeldAudio) -> None:
    louder = waits(silence, *[10 * QUIET] * (10 * RATE // POSITION))
    assert not louder[0] and all(louder[len(louder) // 2 :])


def test_a_long_append_does_not_wait(silence: HeldAudio) -> None:
    """It would be a message of its own anyway."""
    longest = int(HELD_SECONDS * RATE)
    assert waits(silence, QUIET, samples=longest - 1) == [True]
    assert waits(silence, QUIET, 0, samples=longest) == [False, False]


def test_no_more_waits_than_the_bound(silence: HeldAudio) -> None:
    for _ in range(int(MAX_HELD_SECONDS * RATE) // POSITION):
        assert waits(silence, QUIET) == [True]
        silence.add(noise(POSITION, QUIET))
    assert waits(silence, QUIET) == [False]
    assert sum(map(len, silence.take())) <= MAX_HELD_SECONDS * RATE
    assert waits(silence, QUIET) == [True] and not silence.pieces


def test_speech_waits_until_there_is_enough_for_a_message() -> None:
    found = HeldAudio(RATE)
    assert waits(found, LOUD, wanted=0) == [False]
    assert waits(found, LOUD, wanted=POSITION + 1) == [True]
    found.add(noise(POSITION, LOUD))
    assert waits(found, LOUD, wanted=2 * POSITION) == [False]
    assert waits(found, LOUD, wanted=2 * POSITION + 1) == [True]
    assert waits(found, samples=0, wanted=4 * POSITION) == []
    found.note(True)
    assert waits(found, QUIET, LOUD, wanted=4 * POSITION) == [False, False], "the beginning of speech does not wait"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_samples_do_not_wait(silence: HeldAudio, value: float) -> None:
    for _ in range(2):
        assert waits(silence, value, LOUD) == [False, False]
    assert waits(silence, QUIET) == [True]


# The stream


@dataclass(frozen=True)
class Append:
    samples: int
    level: float


@dataclass(frozen=True)
class Report:
    is_skipped: bool


@dataclass(frozen=True)
class Gap:
    samples: int


@dataclass(frozen=True)
class AskFlush:
    pause: bool


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Ask:
    """The engine asks for messages of so many positions."""

    positions: int


@dataclass(frozen=True)
class Do:
    what: str  # "answer", "turns", "lose", "reopen"


Act = Append | Report | Gap | AskFlush | Wait | Ask | Do
APPENDS = st.builds(
    Append, st.integers(1, 3 * POSITION) | st.sampled_from([32, POSITION, RATE, 2 * RATE]),
    st.sampled_from([0.0, QUIET, QUIET, 2 * QUIET, LOUD]),
)  # fmt: skip
ACTS = st.one_of(
    APPENDS,
    APPENDS,
    APPENDS,
    st.builds(Report, st.sampled_from([True, True, True, False])),
    st.builds(Gap, st.integers(1, 4 * POSITION)),
    st.builds(AskFlush, st.booleans()),
    st.builds(Wait, st.sampled_from([0.02, 0.08, 0.25, 1.0])),
    st.builds(Ask, st.integers(1, MAX_MESSAGE_POSITIONS)),
    st.builds(Do, st.sampled_from(["answer", "answer", "answer", "turns", "lose", "reopen"])),
)
# The engine skips silence, and its level is known.
SKIPPING: list[Act] = [Report(True), Append(POSITION, QUIET)]
HELD: list[Act] = [Append(POSITION, QUIET), Wait(0.08), Append(50, QUIET)]


class Acts:
    """Plays acts on a stream, and checks after each what may be held."""

    def __init__(self, acts: list[Act]) -> None:
        self.acts, self.tags, self.answered, self.fed = acts, 0, 0, 0

    async def __call__(self, held: Held) -> None:
        stream = held.stream
        for number, act in enumerate(self.acts):
            await self._play(held, act, number)
            assert sum(map(len, stream._held.pieces)) <= MAX_HELD_SECONDS * RATE
            assert not (stream.holds_audio and not held.loop.has_timers), "a timer sends what is held"
            rest = stream.rest()
            assert len(rest) >= self.fed - held.sent_until, "nothing is missing for another gateway"
        if stream.placement.link is None:
            await held.reopen()
        await stream.finish()
        await held.loop.move(2.0)
        assert not stream.holds_audio and not held.loop.has_timers

    async def _play(self, held: Held, act: Act, number: int) -> None:
        stream = held.stream
        match act:
            case Append(samples, level):
                audio = noise(samples, level, number)
                if number % 2 or not stream.feed_now(audio):
                    await stream.feed(audio)
                audio[:] = 9.0  # the caller may use its array again
                self.fed += samples
            case Report(is_skipped) if stream.placement.link is not None:
                held.report(is_skipped)
            case Gap(samples):
                await stream.gap(samples)
                self.fed += samples
            case AskFlush(pause):
                self.tags = await stream.flush(self.fed if pause else None)
                assert not stream.holds_audio
            case Wait(seconds):
                await held.loop.move(seconds)
            case Ask(positions):
                held.status.message_positions = positions
            case Do("answer") if self.answered < self.tags and stream.placement.link is not None:
                self.answered += 1
                stream.on_output(messages.Flushed("s", self.answered, 0))
            case Do("turns"):
                stream.change_turns(TURN_RULE if number % 2 else NO_TURN_RULE)
                assert not stream.holds_audio
            case Do("lose") if stream.placement.link is not None:
                stream.detach("gone", held.loop.now)
            case Do("reopen") if stream.placement.link is None:
                await held.reopen()
            case _:
                pass


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTS, max_size=30))
@example([*HELD, Gap(300), *HELD, Append(POSITION, LOUD)])
@example([*HELD, Do("turns"), *HELD, AskFlush(True), *HELD, Do("answer"), *HELD, AskFlush(False)])
@example([*HELD, Do("lose"), *HELD, Do("reopen"), *HELD])
@example([Report(False), Ask(3), *[Append(POSITION, LOUD)] * 5, Report(False), Append(9, LOUD), Ask(1), *HELD])
def test_the_engine_gets_the_same_in_the_same_order_a_little_later(acts: list[Act]) -> None:
    acts = [*SKIPPING, *acts]
    found, calm = run(Acts(acts)), run(Acts(acts), is_held=False)
    assert len(found.links) == len(calm.links)
    for number, (link, other) in enumerate(zip(found.links, calm.links, strict=True)):
        trace, whole = link.trace, other.trace
        is_last = number == len(found.links) - 1
        # An engine that is lost may not have been sent yet what was held.
        assert [what for _, what in trace] == [what for _, what in (whole if is_last else whole[: len(trace)])]
        for (at, _), (calm_at, _) in zip(trace, whole, strict=False):
            assert calm_at <= at <= calm_at + HELD_SECONDS + 1e-6
    if len(found.links) == 1:
        assert len(found.link.feeds) <= len(calm.link.feeds)


def test_a_stream_in_skipped_silence_sends_at_most_a_third_of_the_messages() -> None:
    async def story(held: Held) -> None:
        await held.skip()
        for number in range(125):
            await held.stream.feed(noise(POSITION, QUIET, number))
            await held.loop.move(0.08)
        await held.loop.move(HELD_SECONDS)

    calm, found = run(story, is_held=False), run(story)
    assert [what for _, what in found.link.trace] == [what for _, what in calm.link.trace]
    assert len(calm.link.feeds) >= 125
    assert len(found.link.feeds) <= len(calm.link.feeds) / 3


@pytest.mark.parametrize("positions", range(1, MAX_MESSAGE_POSITIONS + 1))
def test_a_busy_engine_gets_speech_in_messages_of_as_many_positions_as_it_asks_for(positions: int) -> None:
    async def story(held: Held) -> None:
        held.status.message_positions = positions
        for number in range(120):
            await held.stream.feed(noise(POSITION, LOUD, number))
            held.report(False)
            await held.loop.move(0.08)

    calm, found = run(story, is_held=False), run(story)
    assert [what for _, what in found.link.trace] == [what for _, what in calm.link.trace]
    late = [at - calm_at for (at, _), (calm_at, _) in zip(found.link.trace, calm.link.trace, strict=True)]
    assert max(late) == pytest.approx((positions - 1) * 0.08)
    # The first message has the model's look-ahead to wait for, so it has one position less.
    assert len(calm.link.feeds) >= 119 and len(found.link.feeds) <= 120 // positions
    assert all(len(items) == 1 for _, items in found.link.feeds), "the audio of a message is joined"


def test_messages_of_streams_that_began_at_different_times_stay_spread_over_the_time() -> None:
    """All streams change the length of their messages at once. Then a third of them sends in each position's time."""

    def sent_at(begun: int) -> list[int]:
        async def story(held: Held) -> None:
            for number in range(12):
                held.status.message_positions = 1 if number < begun else 3
                await held.stream.feed(noise(POSITION, LOUD, number))
                await held.loop.move(0.08)

        return [round(at / 0.08) - begun for at, _ in run(story).link.feeds if round(at / 0.08) >= begun]

    assert {begun: sent_at(begun)[:2] for begun in (3, 4, 5)} == {3: [2, 5], 4: [1, 4], 5: [0, 3]}


@pytest.mark.parametrize("late_s", [0.5, 2.0])
def test_audio_after_an_unanswered_flush_waits_only_if_the_engine_is_late(late_s: float) -> None:
    """The words before the flush need it soon, but the engine computes the audio before it first."""

    async def story(held: Held) -> None:
        for number in range(round(late_s / 0.08)):
            await held.stream.feed(noise(POSITION, LOUD, number))
        await held.stream.flush(0)
        held.status.message_positions = 4
        await held.stream.feed(noise(POSITION // 4, LOUD))
        assert held.stream.holds_audio == (late_s > 1.0)

    run(story)


def test_uploads_are_sent_at_once() -> None:
    async def story(held: Held) -> None:
        held.status.message_positions = 4
        await held.stream.feed(noise(POSITION + SPEC.look_ahead_samples, LOUD))
        assert not held.stream.holds_audio and len(held.link.feeds) == 1

    run(story, opening=Open("s", live=False))


def test_prepared_items_are_refused_after_samples_that_are_held() -> None:
    async def story(held: Held) -> None:
        held.status.message_positions = 4
        await held.stream.feed(noise(POSITION // 4, LOUD))
        assert held.stream.holds_audio
        with pytest.raises(StreamFinished, match="was fed samples"):
            await held.stream.feed_items([Item(0, 3, 0)])

    run(story)


def test_an_engine_that_is_busy_no_longer_gets_what_waits_with_the_next_append() -> None:
    async def story(held: Held) -> None:
        held.status.message_positions = 4
        await held.stream.feed(noise(POSITION, LOUD))
        held.status.message_positions = 1
        assert held.stream.holds_audio
        await held.stream.feed(noise(POSITION, LOUD))
        assert not held.stream.holds_audio and not held.loop.has_timers

    run(story)


def test_loud_audio_goes_at_once_together_with_what_was_held() -> None:
    async def story(held: Held) -> None:
        await held.skip()
        before = len(held.link.feeds)
        for number in range(3):
            await held.stream.feed(noise(POSITION, QUIET, number))
        assert len(held.link.feeds) == before and held.stream.holds_audio
        await held.loop.move(0.1)
        await held.stream.feed(noise(POSITION, LOUD))
        ((at, items),) = held.link.feeds[before:]
        assert at == held.loop.now and sum(item.length for item in items) == 4
        assert not held.stream.holds_audio and not held.loop.has_timers

    run(story)


def test_the_end_of_the_skipping_sends_what_is_held_before_the_report_is_read() -> None:
    async def story(held: Held) -> None:
        await held.skip()
        await held.stream.feed(noise(POSITION, QUIET))
        read: list[bool] = []
        held.stream.subscribe(lambda output: read.append(held.stream.holds_audio))
        held.report(True)
        assert held.stream.holds_audio
        held.report(False)
        assert read[-2:] == [True, False]

    run(story)


def test_the_last_audio_of_a_client_that_stops_comes_in_time() -> None:
    async def story(held: Held) -> None:
        await held.skip()
        for number in range(3):
            await held.stream.feed(noise(POSITION, QUIET, number))
            await held.loop.move(0.05)
        held.stream.on_held_sent = heard = mock.Mock()
        await held.loop.move(HELD_SECONDS - 0.15 - 0.01)
        assert held.stream.holds_audio and not heard.called
        await held.loop.move(0.01)
        assert held.sent_until >= 4 * POSITION - SPEC.look_ahead_samples - POSITION
        assert not held.stream.holds_audio and heard.call_count == 1
        await held.loop.move(1.0)
        assert heard.call_count == 1

    run(story)


def test_audio_goes_at_once_while_a_flush_is_unanswered() -> None:
    async def story(held: Held) -> None:
        await held.skip()
        await held.stream.feed(noise(POSITION, QUIET))
        tag = await held.stream.flush(pause=POSITION)
        for number in range(3):
            before = len(held.link.feeds)
            await held.stream.feed(noise(POSITION, QUIET, number))
            assert len(held.link.feeds) == before + 1
        held.stream.on_output(messages.Flushed("s", tag, POSITION))
        await held.stream.feed(noise(POSITION, QUIET))
        assert held.stream.holds_audio
        assert [command.tag for _, command, _ in held.link.sent if isinstance(command, Flush)] == [tag]

    run(story)


@pytest.mark.parametrize("bad", [np.zeros(POSITION), np.zeros((2, POSITION), np.float32), np.zeros(9, np.int16)])
def test_an_array_of_another_kind_is_refused_at_once_and_costs_no_audio(bad: Any) -> None:
    async def story(held: Held) -> None:
        await held.skip()
        await held.stream.feed(noise(POSITION, QUIET))
        with pytest.raises(ValueError, match="float32"):
            await held.stream.feed(bad)
        for number in range(14):  # more than may be held
            await held.stream.feed(noise(POSITION, QUIET, number))
            with pytest.raises(ValueError, match="float32"):
                held.stream.feed_now(bad)
        await held.loop.move(1.0)
        await held.stream.finish()
        assert held.sent_until == 16 * POSITION

    run(story)


def end_by_engine(held: Held) -> None:
    held.stream.on_output(messages.Failed("s", "EngineError", "broken"))


@pytest.mark.parametrize("end", [end_by_engine, lambda held: held.stream.release(), EngineStream.abort])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_stream_that_has_ended_holds_nothing_and_says_nothing(end: Any, is_later: bool) -> None:
    async def story(held: Held) -> None:
        await held.skip()
        if not is_later:
            await held.stream.feed(noise(POSITION, QUIET))
        held.stream.on_held_sent = heard = mock.Mock()
        if end is EngineStream.abort:
            await held.stream.abort()
        else:
            end(held)
        feeds = len(held.link.feeds)
        if is_later:
            # What crosses with the end is no mistake, but after an abort.
            try:
                await held.stream.feed(noise(POSITION, QUIET))
            except StreamFinished:
                assert end is EngineStream.abort
        assert not held.stream.holds_audio and not held.loop.has_timers
        await held.loop.move(1.0)
        assert len(held.link.feeds) == feeds and not heard.called

    run(story)


def test_another_gateway_gets_what_is_held() -> None:
    async def story(held: Held) -> None:
        await held.skip()
        audio = noise(POSITION, QUIET)
        for number in range(5):
            part = noise(100, QUIET, number + 1)
            await held.stream.feed(part)
            audio = np.concatenate([audio, part])
        assert held.stream.holds_audio
        rest = held.stream.rest()
        np.testing.assert_array_equal(rest, audio[len(audio) - len(rest) :])
        cutter = held.stream._cutter
        assert len(audio) - len(rest) == cutter._next_sample - cutter.context
        held.stream.release()

    run(story)


def test_a_stream_that_leaves_its_engine_takes_what_is_held_to_the_next() -> None:
    async def story(held: Held) -> None:
        held.stream.subscribe(lambda output: None)
        await held.skip()
        for number in range(3):
            await held.stream.feed(noise(POSITION, QUIET, number))
        assert held.stream.can_migrate and held.stream.holds_audio
        held.stream.start_migration(held.loop.now)
        await held.reopen()
        await held.loop.move(HELD_SECONDS)
        assert not held.stream.holds_audio
        first = SPEC.prefix_positions
        items = fakes.single_items((item for _, sent in held.link.feeds for item in sent), SPEC)
        assert [item.offset for item in items] == list(range(first, first + len(items))) and len(items) >= 3
        assert all(items == [] or isinstance(command, Feed) for _, command, items in held.links[0].sent)

    run(story)


# With the loop of an engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("positions", [1, 3])
async def test_words_are_those_of_audio_that_is_sent_at_once(
    positions: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the engine dies. Time is so compressed that the timer never sends."""
    monkeypatch.setattr(test_recovery_rebuilding, "PACKET", POSITION)
    monkeypatch.setattr(EngineStream, "_message_samples", 0 if positions == 1 else positions * POSITION)
    audio, chance = silence_cut.conversation(seed + 40, turns=4), random.Random(seed)
    packets = len(audio) // POSITION
    deaths = [EngineDeath(packet, chance.randrange(4), chance.choice([0, 1, 5])) for packet in range(30, packets, 40)]
    flushes = set(chance.sample(range(packets), 2))
    hold, held = HeldAudio.add, 0

    def counting(self: HeldAudio, samples: Samples) -> None:
        nonlocal held
        held += len(samples)
        hold(self, samples)

    monkeypatch.setattr(HeldAudio, "add", counting)
    found = (await play(silence_cut.build, audio, flushes, deaths)).transcript
    assert held > RATE
    monkeypatch.setattr(HeldAudio, "may_wait", lambda self, samples, wanted, sent: False)
    calm = (await play(silence_cut.build, audio, flushes, [])).transcript
    assert (found.text, found.words, found.tags, found.last) == (calm.text, calm.words, calm.tags, calm.last)
    assert len(calm.words) > 5


@pytest.mark.parametrize("windowed", [True, False])
async def test_without_skipped_silence_nothing_is_held(windowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windowed models skip none, and engines without the setting."""
    monkeypatch.setattr(test_recovery_rebuilding, "PACKET", POSITION)
    monkeypatch.setattr(HeldAudio, "add", mock.Mock(side_effect=AssertionError))
    audio = np.concatenate([fakes.speech(1, 1), np.zeros(20 * RATE, np.float32)])
    session = await play(partial(fakes.build, windowed=windowed, detects=True), audio, set(), [])
    speech = [output for output in session.transcript.outputs if isinstance(output, Speech)]
    assert speech and not any(output.skipped for output in speech)
