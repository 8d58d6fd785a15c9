"""A gateway learns of a turn's end late, because an engine was lost or is late: words and word times do not change."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from engine.messages import Closed, Flushed, Speech, SpeechEnded, Text, TurnRule, Word
from tests.engine.client.test_recovery_rebuilding import (
    PACKET,
    Build,
    EngineDeath,
    Fate,
    Session,
    build_tiny,
    utterances,
)

__all__ = ["build_tiny"]

RULE = TurnRule(0.5, 1024, 4800)


class Gateway:
    """Asks for the text of each turn, some packets after it has heard of the turn's end."""

    def __init__(self, build: Build, delay: Callable[[], int]) -> None:
        self.session = Session(build, turns=RULE)
        self._delay = delay
        self._heard = 0
        self._due: deque[tuple[int, int]] = deque()
        self.turns = 0

    async def look(self, number: int) -> None:
        await asyncio.sleep(0)
        for speech in self.session.transcript.outputs[self._heard :]:
            self._heard += 1
            for event in speech.events if isinstance(speech, Speech) else ():
                if isinstance(event, SpeechEnded):
                    self._due.append((number + self._delay(), event.sample))
        while self._due and self._due[0][0] <= number:
            self.turns += 1
            await self.session.stream.flush(self._due.popleft()[1])


async def play(build: Build, audio: np.ndarray, delay: Callable[[], int], deaths: list[EngineDeath]) -> Gateway:
    gateway = Gateway(build, delay)
    session = gateway.session
    await session.start()
    reader = asyncio.create_task(session.transcript.collect(session.stream))
    fate = Fate(session, deaths)
    for number in range(-(-len(audio) // PACKET)):
        await session.stream.feed(audio[number * PACKET : (number + 1) * PACKET])
        await fate.look(number)
        if session.link is not None:
            session.run()
            await gateway.look(number)
            session.run()
    if session.link is None:
        await session.start()
        session.run()
    await gateway.look(1 << 40)
    await session.stream.finish()
    session.run()
    await reader
    assert isinstance(session.transcript.last, Closed)
    return gateway


@pytest.mark.parametrize("seed", range(3))
async def test_turns_whose_end_is_heard_of_late_have_the_same_words(build_tiny: Build, seed: int) -> None:
    chance = np.random.default_rng(seed)
    audio = utterances(seed, 6)
    packets = len(audio) // PACKET
    calm = await play(build_tiny, audio, lambda: 0, [])
    assert calm.turns >= 3 and len(calm.session.transcript.words) > 5
    late = await play(build_tiny, audio, lambda: int(chance.integers(0, 40)), [])
    assert late.session.transcript.text == calm.session.transcript.text
    assert late.session.transcript.words == calm.session.transcript.words
    deaths = [
        EngineDeath(int(packet), int(chance.integers(3)), int(chance.integers(40)))
        for packet in chance.integers(packets, size=5)
    ]
    lost = await play(build_tiny, audio, lambda: 0, deaths)
    assert lost.session.transcript.text == calm.session.transcript.text
    assert lost.session.transcript.words == calm.session.transcript.words


async def answered(build: Build, rule: TurnRule | None, asked_at: float) -> tuple[list[Word], list[Word]]:
    """Two utterances, and a flush of what was said before the pause between them; the words before its answer, and all
    of them."""
    loudness = np.repeat([1.4, 0.01, 1.4, 0.01], [32_000, 16_000, 32_000, 16_000])
    audio = (loudness * np.random.default_rng(3).standard_normal(len(loudness))).astype(np.float32)
    session = Session(build, turns=rule)
    await session.start()
    reader = asyncio.create_task(session.transcript.collect(session.stream))
    for start in range(0, len(audio), PACKET):
        await session.stream.feed(audio[start : start + PACKET])
        if start <= asked_at * 16_000 < start + PACKET:
            await session.stream.flush(pause=44_000)
        session.run()
    await session.stream.finish()
    session.run()
    await reader
    outputs = session.transcript.outputs
    (answer,) = [number for number, output in enumerate(outputs) if isinstance(output, Flushed)]
    said = [word for output in outputs[:answer] if isinstance(output, Text) for word in output.words]
    return said, session.transcript.words


@pytest.mark.parametrize("rule", [None, RULE])
async def test_the_answer_comes_behind_the_last_word_before_the_pause(build_tiny: Build, rule: TurnRule | None) -> None:
    said, words = await answered(build_tiny, rule, 2.8)
    assert len(said) > 2 and len(words) > len(said)
    # Speech begins again at the third second.
    for asked_at in (2.95, 3.1, 3.2, 3.3, 3.5, 4.0):
        assert await answered(build_tiny, rule, asked_at) == (said, words)


async def change_of_rule(build: Build, lost: bool) -> tuple[str, list[Word]]:
    """A short pause ends a turn; then turns end by another rule, by which it would not have."""
    loudness = np.repeat([1.4, 0.01, 1.4, 0.01], [32_000, 6_400, 32_000, 16_000])
    audio = (loudness * np.random.default_rng(3).standard_normal(len(loudness))).astype(np.float32)
    session = Session(build, turns=TurnRule(0.5, 1024, 1600))
    await session.start()
    reader = asyncio.create_task(session.transcript.collect(session.stream))
    for start in range(0, len(audio), PACKET):
        second = start / 16_000
        await session.stream.feed(audio[start : start + PACKET])
        if start // PACKET == 34:
            session.stream.change_turns(TurnRule(0.5, 1024, 48_000))
        if lost and session.link is not None and 1.5 < second < 3.0:
            session.die(0)
        if session.link is None and second >= 3.0:
            await session.start()
        if session.link is not None:
            session.run()
    await session.stream.finish()
    session.run()
    await reader
    return session.transcript.text, session.transcript.words


async def test_a_rule_that_changes_while_no_engine_is_there_changes_what_follows_it(build_tiny: Build) -> None:
    calm = await change_of_rule(build_tiny, lost=False)
    assert len(calm[1]) > 3
    assert await change_of_rule(build_tiny, lost=True) == calm
