"""Adoption of a stream of another gateway: the words are the same, whether that gateway drained or died."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from engine import messages
from engine.client import handoff
from engine.client.client import EngineClient
from engine.client.engine_handles import EngineThread, RemoteEngine
from engine.client.handoff import AdoptedSession
from engine.client.stream import EngineStream
from engine.errors import EngineUnreachable
from tests.engine import fakes

AUDIO = fakes.speech(20, 3)
PIECE = 137


def entrust(client: EngineClient, stream: EngineStream, consumed: int, *, last: bool = False) -> None:
    target = client.handoff_target(stream)
    assert target is not None
    positions, samples = target.offsets
    target.link.send(
        messages.SaveHandoff(
            stream.id,
            "key",
            1,
            consumed,
            [],
            base=b"value",
            keep_s=60,
            position_offset=positions,
            sample_offset=samples,
            last=last,
        )  # fmt: skip
    )


async def feed(stream: EngineStream, start: int, end: int, flush_at: tuple[int, ...] = ()) -> None:
    """`flush_at` are samples."""
    for first in range(start, end, PIECE):
        for flush in (flush for flush in flush_at if first <= flush < first + PIECE):
            await stream.feed(AUDIO[first:flush])
            await stream.flush()
            first = flush
        await stream.feed(AUDIO[first : min(end, first + PIECE - (first - start) % PIECE)])


async def adopted(client: EngineClient) -> AdoptedSession:
    """What was entrusted comes by another connection, and may come a moment later."""
    while True:
        adopted_session = await client.adopt("key")
        if adopted_session is not None:
            return adopted_session


async def finish(
    adopted_session: AdoptedSession, said: list[messages.Output], flush_at: tuple[int, ...]
) -> fakes.Transcript:
    stream = adopted_session.stream
    assert stream is not None
    whole = fakes.Transcript(said)
    reader = asyncio.create_task(whole.collect(stream))
    await feed(stream, adopted_session.goes_on_at, len(AUDIO), flush_at)
    await stream.finish()
    await reader
    return whole


class Reader:
    """Reads a stream and knows how many outputs of the engine each was."""

    def __init__(self, stream: EngineStream) -> None:
        self.stream = stream
        self.said: list[tuple[int, messages.Output]] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self.stream:
            self.said.append((self.stream.read_count, output))


async def calm_words(client: EngineClient, flushes: tuple[int, ...]) -> fakes.Transcript:
    """The transcript of a stream that nothing happens to."""
    calm, stream = fakes.Transcript(), await client.open("calm")
    reading = asyncio.create_task(calm.collect(stream))
    await feed(stream, 0, len(AUDIO), flushes)
    await stream.finish()
    await reading
    return calm


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("cut", [3000, 9999, 20_000])
@pytest.mark.parametrize("unread", [0, 4])
async def test_words_do_not_change_when_a_stream_moves(windowed: bool, cut: int, unread: int) -> None:
    engine = EngineThread(partial(fakes.build, windowed=windowed, detects=True))
    async with fakes.running(engine) as first, fakes.running(RemoteEngine(engine.address)) as second:
        flushes = (2000, 8000)
        calm = await calm_words(first, flushes)
        stream = await first.open("moving")
        reader = Reader(stream)
        await feed(stream, 0, cut, flushes)
        await fakes.until(lambda: len(reader.said) > 0)
        known = reader.said[: max(0, len(reader.said) - unread)]
        # The entries account for what was read but for the last few outputs.
        entrust(first, stream, known[-1][0] if known else 0, last=True)
        adopted_session = await adopted(second)
        reader.task.cancel()
        stream.release()
        assert adopted_session.base == b"value" and adopted_session.owner_number == 1 + messages.NEXT_OWNER
        assert adopted_session.goes_on_at <= cut
        later = tuple(flush for flush in flushes if flush >= cut)
        whole = await finish(adopted_session, [output for _, output in known], later)
        assert (whole.text, whole.words, whole.speech) == (calm.text, calm.words, calm.speech)
        assert whole.tags == calm.tags == [1, 2]
        assert isinstance(whole.last, messages.Closed)


async def test_a_session_that_nobody_has_is_not_found() -> None:
    engine = EngineThread(fakes.build)
    async with fakes.running(engine) as first:
        assert await first.adopt("nobody") is None


async def test_the_former_owner_hears_that_it_is_wanted_and_then_that_it_is_fenced() -> None:
    engine = EngineThread(fakes.build)
    async with fakes.running(engine) as first, fakes.running(RemoteEngine(engine.address)) as second:
        stream = await first.open("moving")
        heard: list[str] = []
        first.handoffs.on_wanted = lambda key, number: bool(heard.append(f"wanted {key} {number}"))
        first.handoffs.on_fenced = lambda key, number: heard.append(f"fenced {key} {number}")
        entrust(first, stream, 0)
        # It does not answer.
        adopted_session = await adopted(second)
        assert adopted_session.stream is not None
        await fakes.until(lambda: heard == ["wanted key 1", f"fenced key {1 + messages.NEXT_OWNER}"])
        await stream.feed(AUDIO)
        await stream.finish()
        await adopted_session.stream.feed(AUDIO[:1600])
        await adopted_session.stream.finish()
        said = fakes.Transcript()
        await said.collect(adopted_session.stream)
        assert said.last == messages.Closed("moving", 1600), "what the former owner sent was not heard"


async def test_an_adopted_stream_outlives_its_engine_once_enough_was_heard() -> None:
    engine = fakes.process(fakes.build)
    async with fakes.running(engine) as first, fakes.running(RemoteEngine(engine.address)) as second:
        stream = await first.open("moving")
        reader = asyncio.create_task(fakes.Transcript().collect(stream))
        await feed(stream, 0, 5000)
        entrust(first, stream, stream.read_count, last=True)
        adopted_session = await adopted(second)
        assert adopted_session.stream is not None
        stream.release()
        reader.cancel()
        said = fakes.Transcript()
        reader = asyncio.create_task(said.collect(adopted_session.stream))
        await feed(adopted_session.stream, adopted_session.goes_on_at, 15_000)
        fakes.kill(engine.pid)
        await feed(adopted_session.stream, 15_000, len(AUDIO))
        await adopted_session.stream.finish()
        await reader
        assert said.last == messages.Closed("moving", len(AUDIO))


@pytest.mark.parametrize("was_rebuilt", [False, True])
@pytest.mark.parametrize("cut", [600, 3000, 9999, 20_000])
@pytest.mark.parametrize("unread", [0, 4])
async def test_words_do_not_change_when_the_engine_is_lost_right_after_a_stream_was_adopted(
    was_rebuilt: bool, cut: int, unread: int
) -> None:
    """The adopter has fed nothing: the engine has given it the state and the audio from which another one goes on."""
    build = partial(fakes.build, windowed=True, detects=True)
    engine, flushes = fakes.process(build), (2000, 8000)
    async with fakes.running(engine) as first, fakes.running(RemoteEngine(engine.address)) as second:
        calm = await calm_words(first, flushes)
        stream = await first.open("moving")
        reader = Reader(stream)
        await feed(stream, 0, cut, flushes)
        await fakes.until(lambda: len(reader.said) > 0)
        if was_rebuilt:
            # The second engine says some things again, and has not received the flushes that the first one answered.
            (pooled,), lost = second.supervisor.pool.all, stream.placement.link
            connected = pooled.link
            fakes.kill(engine.pid)
            await fakes.until(lambda: stream.target is not None and stream.placement.link is not lost)
            await fakes.until(lambda: pooled.link not in (None, connected))
        known = reader.said[: max(0, len(reader.said) - (0 if was_rebuilt else unread))]
        entrust(first, stream, stream.read_count if was_rebuilt else known[-1][0] if known else 0, last=True)
        adopted_session = await adopted(second)
        reader.task.cancel()
        stream.release()
        fakes.kill(engine.pid)
        later = tuple(flush for flush in flushes if flush >= cut)
        whole = await finish(adopted_session, [output for _, output in known], later)
        assert (whole.text, whole.words, whole.speech) == (calm.text, calm.words, calm.speech)
        assert whole.tags == calm.tags == [1, 2]
        assert isinstance(whole.last, messages.Closed)


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
async def test_of_two_engines_that_have_a_session_the_one_with_the_higher_number_has_it_right(
    numbers: tuple[int, int],
) -> None:
    one, two = EngineThread(fakes.build, warm=False), EngineThread(fakes.build, warm=False)
    addresses = [RemoteEngine(engine.address) for engine in (one, two)]
    async with fakes.running(one, two) as owner, fakes.running(*addresses) as claimant, asyncio.timeout(30):
        await fakes.until(lambda: len(claimant.capacity().engines) == 2)
        for pooled, number in zip(owner.supervisor.pool.all, numbers, strict=True):
            assert pooled.link is not None
            value = f"value {number}".encode()
            pooled.link.send(messages.SaveHandoff("", "key", number, 0, [], base=value, keep_s=60, last=True))
            await pooled.link.wait_acknowledged()
        adopted_session = await claimant.adopt("key")
        assert adopted_session is not None and (adopted_session.base, adopted_session.owner_number) == (
            b"value 2",
            2 + messages.NEXT_OWNER,
        )
        # The other one has forgotten it.
        older = addresses[numbers.index(1)]
        async with fakes.running(RemoteEngine(older.address)) as stranger:
            assert await stranger.adopt("key") is None


@pytest.mark.parametrize(("elsewhere", "ours"), [(1 + 2 * messages.NEXT_OWNER, False), (1, True)])
async def test_an_owner_goes_on_with_a_session_if_no_engine_has_a_higher_number(elsewhere: int, ours: bool) -> None:
    one, two = EngineThread(fakes.build, warm=False), EngineThread(fakes.build, warm=False)
    async with fakes.running(one, two) as owner, asyncio.timeout(30):
        await fakes.until(lambda: len(owner.capacity().engines) == 2)
        links = [pooled.link for pooled in owner.supervisor.pool.all]
        for link, number in zip(links, (2, elsewhere), strict=True):
            assert link is not None
            link.send(messages.SaveHandoff("", "key", number, 0, [], base=b"value", keep_s=60))
            await link.wait_acknowledged()
        assert await owner.renew(handoff.OwnedSession("key", 2, links[0])) == (2 + messages.NEXT_OWNER if ours else 0)


@pytest.mark.parametrize("moved_to", [0, 1])
async def test_an_engine_from_which_a_session_has_moved_does_not_keep_it_from_its_heir(moved_to: int) -> None:
    one, two = EngineThread(fakes.build, warm=False), EngineThread(fakes.build, warm=False)
    addresses = [RemoteEngine(engine.address) for engine in (one, two)]
    async with fakes.running(one, two) as owner, fakes.running(*addresses) as claimant, asyncio.timeout(30):
        await fakes.until(lambda: len(claimant.capacity().engines) == 2)
        links = [pooled.link for pooled in owner.supervisor.pool.all]
        to, former = links[moved_to], links[1 - moved_to]
        assert to is not None and former is not None
        former.send(messages.SaveHandoff("", "key", 1, 0, [], base=b"value 1", keep_s=60))
        await former.wait_acknowledged()
        to.send(messages.SaveHandoff("", "key", 2, 0, [], base=b"value 2", keep_s=60, last=True))
        await to.wait_acknowledged()
        former.send(messages.DropHandoff("", "key", 2))
        await former.wait_acknowledged()
        adopted_session = await claimant.adopt("key")
        assert adopted_session is not None and adopted_session.base == b"value 2"


async def test_an_engine_that_was_lost_a_moment_ago_may_still_have_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineThread(fakes.build, warm=False)
    absent = RemoteEngine("ipc:///nowhere/at/all", start_timeout_s=0.1)
    async with fakes.running(engine, absent) as client:
        with pytest.raises(EngineUnreachable):
            await client.adopt("key")
        monkeypatch.setattr(handoff, "UNSURE_SECONDS", 0.0)
        assert await client.adopt("key") is None


async def test_what_a_gateway_knows_of_sessions_that_are_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_ENDED", 3)
    async with fakes.running(EngineThread(fakes.build, warm=False)) as client:
        desk = client.handoffs
        for number in range(5):
            desk.note_ended(f"s{number}", 1)
        assert list(desk.ended) == ["s2", "s3", "s4"]
        (pooled,) = client.supervisor.pool.all
        desk.claim(pooled)
        assert len(desk.ended) == 3
        monkeypatch.setattr(handoff, "ENDED_SECONDS", -1.0)
        desk.claim(pooled)
        assert not desk.ended
