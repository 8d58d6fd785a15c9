"""Engines that die at any moment: streams continue, and their transcripts are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from engine.client.engine_handles import EngineProcess, EngineThread, RemoteEngine
from engine.errors import EngineUnreachable
from engine.messages import Closed, Dead, Failed
from tests.engine import fakes

SESSIONS = 4
SECONDS = 20


async def brief(piece: int) -> None:
    await asyncio.sleep(0.02)


def is_stopped(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def undisturbed(windowed: bool, audio: list[np.ndarray]) -> list[fakes.Transcript]:
    async with fakes.running(EngineThread(partial(fakes.build, windowed=windowed, detects=True))) as client:
        return [await fakes.transcribe(client, f"s{i}", samples) for i, samples in enumerate(audio)]


async def killed(windowed: bool, audio: list[np.ndarray], kills: int, seconds: float, **settings: object) -> None:
    """Feed all sessions side by side while the engine is killed at random moments; compare with a run without kills."""
    expected = await undisturbed(windowed, audio)
    engine = fakes.process(partial(fakes.build, windowed=windowed, detects=True))
    chance = random.Random(kills)
    descriptors: list[int] = []
    kill_at = set(chance.sample(range(5, 170), kills))
    async with fakes.running(engine, **settings) as client:

        async def between(piece: int) -> None:
            await asyncio.sleep(seconds / 180)
            if piece in kill_at:
                kill_at.discard(piece)
                await fakes.until(lambda: client.ready)
                await asyncio.sleep(chance.uniform(0, 0.1))
                descriptors.append(len(os.listdir("/proc/self/fd")))
                fakes.kill(engine.pid)

        transcripts = await asyncio.gather(
            *(fakes.transcribe(client, f"s{i}", samples, between=between) for i, samples in enumerate(audio))
        )
        metrics = client.metrics()
    assert metrics.restarts == kills
    assert metrics.streams_given_up == metrics.crashing_streams == 0
    assert metrics.streams_recovered >= len(audio)
    assert descriptors[-1] <= descriptors[0] + 2, "each death leaves something open"
    for transcript, wanted in zip(transcripts, expected, strict=True):
        assert transcript.text == wanted.text
        assert transcript.words == wanted.words
        assert transcript.tags == wanted.tags
        assert transcript.last == wanted.last
        if windowed:
            assert transcript.speech == wanted.speech, "the detector goes on from its own state"
            continue
        # The detector starts anew within a frame of where it was; nothing is reported twice or left out.
        starts = [sample for sample, _ in transcript.speech]
        assert all(fakes.FRAME <= after - before < 2 * fakes.FRAME for before, after in pairwise(starts))
        assert wanted.speech[-1][0] - starts[-1] < 2 * fakes.FRAME


@pytest.mark.parametrize("windowed", [False, True])
async def test_killed_twice_the_words_are_the_same(windowed: bool) -> None:
    audio = [fakes.speech(SECONDS, seed) for seed in range(SESSIONS)]
    await killed(windowed, audio, kills=2, seconds=2)


async def test_a_session_longer_than_what_is_kept_goes_on_after_a_kill() -> None:
    """Positions start again at the new engine; the fake's words depend on one token back, so they are the same."""
    audio = [fakes.speech(SECONDS, seed) for seed in range(2)]
    await killed(False, audio, kills=1, seconds=2, keep_seconds=3.0)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("windowed", [False, True])
async def test_killed_twenty_times_the_words_are_the_same(windowed: bool) -> None:
    audio = [fakes.speech(SECONDS, seed) for seed in range(SESSIONS)]
    await killed(windowed, audio, kills=20, seconds=40)


async def test_streams_of_a_dead_engine_move_to_the_others() -> None:
    audio = [fakes.speech(10, seed) for seed in range(4)]
    expected = await undisturbed(False, audio)
    engines = [fakes.process(fakes.build), fakes.process(fakes.build)]
    killed = asyncio.Event()

    async def wait_for_the_kill(piece: int) -> None:
        if piece == 20:
            await killed.wait()

    async with fakes.running(*engines) as client:
        streams = [
            asyncio.create_task(fakes.transcribe(client, f"s{i}", samples, between=wait_for_the_kill))
            for i, samples in enumerate(audio)
        ]
        pool = client.supervisor.pool.all
        # A stream that was never opened is not recovered: its opener tries again.
        await fakes.until(
            lambda: sum(stream.was_opened for pooled in pool for stream in pooled.streams.values()) == len(audio)
        )
        # Where streams go is drawn: one of the engines has some.
        lost = max(range(2), key=lambda number: len(pool[number].streams))
        fakes.kill(engines[lost].pid)
        killed.set()
        transcripts = await asyncio.gather(*streams)
        await fakes.until(lambda: client.metrics().restarts == 1)
        metrics = client.metrics()
    assert [transcript.words for transcript in transcripts] == [wanted.words for wanted in expected]
    assert 0 < metrics.streams_recovered <= 4


@pytest.mark.parametrize("die_with", [signal.SIGSEGV, signal.SIGKILL])
async def test_a_poisonous_session_is_ended_alone(die_with: signal.Signals) -> None:
    audio = [fakes.speech(10, seed) for seed in range(3)]
    expected = await undisturbed(False, audio)
    poisoned = fakes.speech(4, 9)
    poisoned[3000] = fakes.POISON
    engine = fakes.process(partial(fakes.build, die_with=int(die_with)))
    async with fakes.running(engine) as client:
        others = [
            asyncio.create_task(fakes.transcribe(client, f"s{i}", samples, between=brief))
            for i, samples in enumerate(audio)
        ]
        poison = await fakes.transcribe(client, "poison", poisoned)
        transcripts = await asyncio.gather(*others)
        metrics = client.metrics()
        await fakes.until(lambda: client.ready)
    assert isinstance(poison.last, Failed)
    assert "engine died each time" in poison.last.message
    assert [transcript.words for transcript in transcripts] == [wanted.words for wanted in expected]
    assert metrics.crashing_streams == 1
    # A signal may come from outside; it takes one more crash to be sure.
    assert metrics.restarts == (2 if die_with == signal.SIGSEGV else 3)


async def test_a_lone_poisonous_session_is_found_at_once() -> None:
    poisoned = fakes.speech(4, 9)
    poisoned[3000] = fakes.POISON
    engine = fakes.process(partial(fakes.build, die_with=int(signal.SIGSEGV)))
    async with fakes.running(engine) as client:
        poison = await fakes.transcribe(client, "poison", poisoned)
        assert isinstance(poison.last, Failed)
        await fakes.until(lambda: client.ready)
        assert client.metrics().restarts == 2


@pytest.mark.parametrize("count", [1, 5])
async def test_streams_that_come_and_go_with_a_poisonous_one_are_not_blamed(count: int) -> None:
    """All fed at once and as fast as it goes: they share the steps in which the engine dies."""
    audio = [fakes.speech(6, seed) for seed in range(count)]
    expected = await undisturbed(True, audio)
    poisoned = fakes.speech(6, 9)
    poisoned[7000] = fakes.POISON
    engine = fakes.process(partial(fakes.build, windowed=True, detects=True, die_with=int(signal.SIGSEGV)))
    async with fakes.running(engine) as client:
        *transcripts, poison = await asyncio.gather(
            *(fakes.transcribe(client, f"s{i}", samples) for i, samples in enumerate([*audio, poisoned]))
        )
        metrics = client.metrics()
    assert isinstance(poison.last, Failed)
    assert [transcript.words for transcript in transcripts] == [wanted.words for wanted in expected]
    assert (metrics.crashing_streams, metrics.restarts) == (1, 2)


async def test_an_engine_killed_between_steps_makes_nobody_suspect() -> None:
    engine = fakes.process(fakes.build)
    async with fakes.running(engine) as client:
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        for deaths in range(1, 6):
            await stream.feed(fakes.speech(0.5, deaths))
            await fakes.until(lambda: client.ready and stream.placement.lost_at is None)
            await asyncio.sleep(0.1)
            fakes.kill(engine.pid)
            await fakes.until(lambda seen=deaths: client.metrics().restarts == seen)
            assert stream.suspicion.strikes == 0
        await stream.finish()
        await reader
        assert isinstance(transcript.last, Closed)


class UnseenEngine(EngineProcess):
    """Like an engine on another machine: what it was doing when it died is not known."""

    def in_flight(self) -> None:
        return None


async def test_a_poisonous_session_is_found_even_if_the_last_step_is_unknown() -> None:
    audio = [fakes.speech(5, seed) for seed in range(2)]
    expected = await undisturbed(False, audio)
    poisoned = fakes.speech(4, 9)
    poisoned[3000] = fakes.POISON
    engine = UnseenEngine(partial(fakes.build, die_with=int(signal.SIGSEGV)), preload=())
    async with fakes.running(engine) as client:
        *transcripts, poison = await asyncio.gather(
            *(fakes.transcribe(client, f"s{i}", samples) for i, samples in enumerate([*audio, poisoned]))
        )
        metrics = client.metrics()
    assert isinstance(poison.last, Failed)
    assert [transcript.words for transcript in transcripts] == [wanted.words for wanted in expected]
    assert metrics.crashing_streams == 1
    assert metrics.restarts <= 6


@pytest.mark.parametrize("owner_is_innocent", [True, False])
async def test_the_only_stream_of_a_gateway_outlives_the_poison_of_another(
    owner_is_innocent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that started the engine knows its last step; the other one only that it is gone."""
    monkeypatch.setattr("engine.boundary.crash_suspects.random.uniform", lambda low, high: low + 0.5)
    audio, poisoned = fakes.speech(6, 1), fakes.speech(6, 9)
    poisoned[3000] = fakes.POISON
    (expected,) = await undisturbed(False, [audio])
    engine = fakes.process(partial(fakes.build, die_with=int(signal.SIGSEGV)), address=f"ipc://{tmp_path}/shared")
    async with fakes.running(engine) as owner, fakes.running(RemoteEngine(engine.address)) as other:
        innocent, guilty = (owner, other) if owner_is_innocent else (other, owner)
        transcript, poison = await asyncio.gather(
            fakes.transcribe(innocent, "only", audio), fakes.transcribe(guilty, "poison", poisoned)
        )
        assert innocent.metrics().crashing_streams == 0
    assert isinstance(poison.last, Failed)
    assert transcript.words == expected.words
    assert isinstance(transcript.last, Closed)


async def test_when_no_engine_comes_back_the_streams_end_with_a_clear_word() -> None:
    engine = fakes.process(fakes.build)
    async with fakes.running(engine, recovery_timeout_s=0.5) as client:
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        await stream.feed(fakes.speech(1, 1))
        engine._build = _broken_build
        fakes.kill(engine.pid)
        await asyncio.wait_for(reader, 20)
        assert isinstance(transcript.last, Dead)
        assert "0.5 s" in transcript.last.message
        assert not client.ready


def _broken_build() -> None:
    raise RuntimeError("no weights")


async def in_two_parts(engine: EngineThread | EngineProcess, audio: np.ndarray, kill: bool) -> fakes.Transcript:
    async with fakes.running(engine) as client:
        stream = await client.open("s0")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        await stream.feed(audio[:5000])
        if kill:
            assert isinstance(engine, EngineProcess)
            fakes.kill(engine.pid)
            await fakes.until(lambda: not client.ready)
        await stream.feed(audio[5000:])
        await stream.flush()
        await stream.finish()
        await reader
    return transcript


async def test_audio_and_flushes_given_while_the_engine_is_away_are_not_lost() -> None:
    audio = fakes.speech(8, 5)
    expected = await in_two_parts(EngineThread(fakes.build), audio, kill=False)
    transcript = await in_two_parts(fakes.process(fakes.build), audio, kill=True)
    assert transcript.words == expected.words != []
    assert transcript.text == expected.text
    assert transcript.tags == [1]
    assert isinstance(transcript.last, Closed)


async def test_flush_at_a_pause_behind_which_no_audio_comes_is_answered_all_the_same() -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        await stream.feed(fakes.speech(2, 5))
        await stream.flush(pause=0)
        await fakes.until(lambda: transcript.tags == [1])
        await stream.feed(fakes.speech(1, 6))
        await stream.finish()
        await reader
    assert isinstance(transcript.last, Closed) and transcript.words


async def test_an_open_that_dies_with_the_engine_leaves_no_ghost() -> None:
    engine = fakes.process(fakes.build)
    async with fakes.running(engine) as client:
        opening = asyncio.create_task(client.open("a"))
        await asyncio.sleep(0)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        await fakes.until(lambda: is_stopped(engine.pid))
        fakes.kill(engine.pid)
        with pytest.raises(EngineUnreachable):
            await opening
        await fakes.until(lambda: client.ready)
        assert client.metrics().streams_recovered == 0
        transcript = await fakes.transcribe(client, "a", fakes.speech(1, 1))
        assert isinstance(transcript.last, Closed)


async def test_a_stream_that_is_aborted_while_the_engine_is_away_ends_at_once() -> None:
    engine = fakes.process(fakes.build)
    async with fakes.running(engine) as client:
        stream = await client.open("a")
        await stream.feed(fakes.speech(1, 1))
        fakes.kill(engine.pid)
        await fakes.until(lambda: not client.ready)
        await stream.abort()
        transcript = fakes.Transcript()
        await transcript.collect(stream)
        assert isinstance(transcript.last, Closed)
        with pytest.raises(EngineUnreachable, match="no engine is running"):
            await client.open("b")
        await fakes.until(lambda: client.ready)
        assert client.metrics().streams_recovered == 0


async def test_what_is_kept_of_a_long_session_is_bounded() -> None:
    async with fakes.running(EngineThread(fakes.build), keep_seconds=2.0, ahead_seconds=4.0) as client:
        stream = await client.open("long")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        most = 0
        for _ in range(60):
            await stream.feed(fakes.speech(1, 3))
            most = max(most, len(stream.replay_log))
        await stream.finish()
        await reader
    positions_per_second = fakes.RATE / fakes.POSITION
    assert most <= (2.0 + 4.0 + 1.0) * positions_per_second + 2
