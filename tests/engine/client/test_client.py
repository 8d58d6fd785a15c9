"""The client against a real engine host: opening, feeding, drift, loss, injection, several engines and gateways."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec import structs

import engine.client.link
import engine.server.host
from engine import messages
from engine.boundary import codec
from engine.boundary.input_cache import ReceiverCache
from engine.boundary.items import hash_payload
from engine.boundary.sockets import EngineSocket, GatewaySocket
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import EngineThread, RemoteEngine
from engine.client.link import EngineMismatch, ItemRefused
from engine.errors import AtCapacity, DuplicateStream, EngineUnreachable, StreamFinished
from engine.messages import Closed, Failed, Item
from engine.server.main import run_engine
from tests.engine import fakes
from tests.waiting import stays

SPEC = fakes.FRAMES
ITEM_BYTES = 4 * (SPEC.look_back_samples + SPEC.samples_per_position + SPEC.look_ahead_samples)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life, and with them repair, more often than in earnest."""
    for module in (engine.server.host, engine.client.link):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)


async def expected(audio: np.ndarray, **options: Any) -> fakes.Transcript:
    async with fakes.running(EngineThread(fakes.build)) as client:
        return await fakes.transcribe(client, "s", audio, **options)


# What must be refused.


def test_a_client_without_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        EngineClient([])


async def test_an_engine_elsewhere_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"ipc://{tmp_path}/later"
    client = EngineClient([RemoteEngine(address, start_timeout_s=0.2)])
    assert (client.ready, client.capacity().total, client.metrics().restarts) == (False, 0, 0)
    await asyncio.wait_for(client.start(), 1)
    await fakes.until(lambda: "start one with `tickertape engine --listen ipc://" in caplog.text)
    assert not client.ready
    for needs_an_engine in (lambda: client.spec, lambda: client.render(fakes.speech(1, 1))):
        with pytest.raises(EngineUnreachable, match="no engine has answered yet"):
            needs_an_engine()
    with pytest.raises(EngineUnreachable, match="no engine is running"):
        await client.open("a")
    async with engine_at(address):
        await asyncio.wait_for(client.wait_until_ready(), 20)
        assert client.ready and client.spec == SPEC
        assert isinstance((await fakes.transcribe(client, "a", fakes.speech(1, 1))).last, Closed)
        await client.close()


@asynccontextmanager
async def engine_at(address: str) -> AsyncIterator[None]:
    """An engine that another process has started."""
    stop = threading.Event()
    engine = threading.Thread(target=run_engine, args=(address, fakes.build, stop.is_set))
    engine.start()
    try:
        yield
    finally:
        stop.set()
        await asyncio.to_thread(engine.join)


async def answering(address: str, answer: Callable[[codec.Hello], Any]) -> None:
    """Something that is not quite an engine."""
    socket = EngineSocket(zmq.Context.instance(), address)
    try:
        assert await asyncio.to_thread(socket.wait, 5)
        arrived = socket.receive()
        assert arrived is not None
        name, frames = arrived
        socket.send(name, codec.encode(answer(codec.decode(frames, to_engine=True))))
    finally:
        socket.close()


async def test_an_engine_of_another_version_is_refused_until_it_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/old"
    other = asyncio.create_task(
        answering(address, lambda hello: codec.Welcome(99, "9.9", "e", SPEC, codec.Status(slots_total=1)))
    )
    client = EngineClient([RemoteEngine(address)])
    await client.start()
    await other
    await fakes.until(lambda: "runs tickertape 9.9 (wire 99)" in caplog.text)
    assert not client.ready
    async with engine_at(address):
        await asyncio.wait_for(client.wait_until_ready(), 20)
        await client.close()


async def test_a_gateway_of_another_version_is_told_so() -> None:
    remote = EngineThread(fakes.build)
    await remote.start()
    answers: asyncio.Queue[Any] = asyncio.Queue()
    socket = GatewaySocket(
        zmq.Context.instance(),
        remote.address,
        lambda frames: answers.put_nowait(codec.decode(frames, to_engine=False)),
        lambda: None,
        lambda: None,
    )
    try:
        socket.send(codec.encode(codec.Hello(99, "9.9", "gateway", 0)))
        answer = await asyncio.wait_for(answers.get(), 5)
        assert isinstance(answer, codec.Unwelcome) and "install the same version" in answer.message
        for nonsense in ([b"nonsense"], codec.encode(codec.Beat(0, 0))):
            socket.send(nonsense)
            assert isinstance(await asyncio.wait_for(answers.get(), 5), codec.Unwelcome)
    finally:
        socket.close()
        await remote.stop()


async def test_an_engine_with_another_model_is_refused() -> None:
    client = EngineClient([EngineThread(fakes.build)], ClientSettings(model="whisper"))
    with pytest.raises(EngineMismatch, match="'fake-frames', the gateway wants 'whisper'"):
        await client.start()


async def test_two_engines_with_different_models_are_refused() -> None:
    client = EngineClient([EngineThread(fakes.build), EngineThread(partial(fakes.build, name="other"))])
    with pytest.raises(EngineMismatch, match="all engines of a gateway must run the same model"):
        await client.start()


async def test_two_engines_with_other_weights_under_one_name_are_refused() -> None:
    engines = [EngineThread(partial(fakes.build, weights="aaaa")), EngineThread(partial(fakes.build, weights="bbbb"))]
    with pytest.raises(EngineMismatch, match=r"'fake-frames' with other weights \((aaaa, not bbbb|bbbb, not aaaa)\)"):
        await EngineClient(engines).start()


async def test_one_of_two_engines_is_enough(tmp_path: Path) -> None:
    absent = RemoteEngine(f"ipc://{tmp_path}/nobody", start_timeout_s=0.2)
    async with fakes.running(absent, EngineThread(fakes.build)) as client:
        assert client.ready
        assert isinstance((await fakes.transcribe(client, "a", fakes.speech(1, 1))).last, Closed)


async def test_bad_options_and_full_engines_are_refused_and_leave_nothing_behind() -> None:
    async with fakes.running(EngineThread(partial(fakes.build, max_streams=1))) as client:
        with pytest.raises(ValueError, match="takes no option 'colour'"):
            await client.open("a", options={"colour": "red"})
        with pytest.raises(ValueError, match="delay of 99"):
            await client.open("a", delay_positions=99)
        first = await client.open("a", options={"language": "en"})
        with pytest.raises(DuplicateStream):
            await client.open("a")
        with pytest.raises(AtCapacity):
            await client.open("b")
        await fakes.until(lambda: client.capacity().used == 1)
        assert client.capacity().total == 1 and client.capacity().retry_after_s == 5.0
        await first.abort()
        await fakes.Transcript().collect(first)
        await (await client.open("b")).abort()


async def test_no_audio_after_the_end() -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        stream = await client.open("a")
        await stream.finish()
        for late in (stream.feed(fakes.speech(1, 1)), stream.gap(5), stream.flush(), stream.finish()):
            with pytest.raises(StreamFinished):
                await late
        await stream.abort()
        await fakes.Transcript().collect(stream)
        await stream.abort()


async def test_an_open_that_nobody_waits_for_any_more_frees_its_place() -> None:
    async with fakes.running(EngineThread(partial(fakes.build, max_streams=1, step_seconds=0.05))) as client:
        opening = asyncio.create_task(client.open("a"))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        async with asyncio.timeout(5):
            while True:
                try:
                    stream = await client.open("a")
                    break
                except AtCapacity:
                    await asyncio.sleep(0.01)
        await stream.abort()


# Text.


@pytest.mark.parametrize("seed", range(4))
async def test_any_chunking_gives_the_same_text(seed: int) -> None:
    audio, chance = fakes.speech(6, 1), random.Random(seed)
    async with fakes.running(EngineThread(fakes.build)) as client:
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        start = 0
        while start < len(audio):
            size = chance.choice([1, 7, 100, 128, 1000, 5000])
            await stream.feed(audio[start : start + size])
            start += size
        await stream.finish()
        await reader
    assert transcript.words == (await expected(audio, flush_every=10**6)).words


async def test_a_gap_is_silence_that_costs_nothing() -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        await stream.gap(100 * SPEC.samples_per_position)
        await stream.finish()
        await reader
        assert transcript.last == Closed("a", 100 * SPEC.samples_per_position)
        assert client.metrics().input_cache.bytes_sent == 0


# Back-pressure.


async def test_a_stream_takes_no_more_audio_than_the_engine_can_follow() -> None:
    slow = EngineThread(partial(fakes.build, step_seconds=0.2), warm=False)
    async with fakes.running(slow, ahead_seconds=2.0) as client:
        stream = await client.open("a", live=False)
        feeding = asyncio.create_task(stream.feed(fakes.speech(30, 1)))
        most = 3.5 * SPEC.sample_rate / SPEC.samples_per_position
        await stays(lambda: not feeding.done() and len(stream.replay_log) <= most)
        feeding.cancel()
        await stream.abort()


async def test_a_stream_nobody_reads_takes_no_more_audio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.stream.MAX_QUEUED_OUTPUTS", 5)
    async with fakes.running(EngineThread(fakes.build)) as client:
        stream = await client.open("a")

        async def feed() -> None:
            for seed in range(100):
                await stream.feed(fakes.speech(1, seed))
                await asyncio.sleep(0.005)

        feeding = asyncio.create_task(feed())
        await fakes.until(lambda: len(stream.outputs) >= 5)
        await stays(lambda: not feeding.done(), 1.0)
        queued = len(stream.outputs)
        reader = asyncio.create_task(fakes.Transcript().collect(stream))
        await feeding
        await stream.finish()
        await reader
    assert queued < 200


async def test_audio_is_taken_at_once_while_there_is_room_for_it() -> None:
    slow = EngineThread(partial(fakes.build, step_seconds=0.2), warm=False)
    async with fakes.running(slow, ahead_seconds=2.0) as client:
        stream = await client.open("a")
        assert not stream.feed_now(fakes.speech(2, 1)), "more than a second has to be taken in turns"
        taken = 0
        while stream.feed_now(fakes.speech(0.5, taken)):
            taken += 1
        assert 3 <= taken <= 7 and len(stream.replay_log) <= 3.5 * SPEC.sample_rate / SPEC.samples_per_position
        await stream.abort()
        assert not stream.feed_now(fakes.speech(0.1, 0))


async def test_a_listener_is_told_what_a_reader_would_be() -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        told: list[list[messages.Output]] = []
        for name in ("read", "listened to"):
            stream = await client.open(name)
            await stream.feed(fakes.speech(2, 1))
            # What has come before there is a listener is told too.
            await fakes.until(lambda stream=stream: len(stream.outputs) > 0)  # type: ignore[misc]
            outputs: list[messages.Output] = []
            if name == "listened to":
                stream.subscribe(outputs.append)
                await stream.finish()
                await fakes.until(lambda: bool(outputs) and isinstance(outputs[-1], messages.Closed))  # noqa: B023
            else:
                await stream.finish()
                outputs = [output async for output in stream]
            told.append(outputs)
            assert stream.read_count == stream.outputs.received_count
    texts = ["".join(output.delta for output in outputs if isinstance(output, messages.Text)) for outputs in told]
    assert texts[0] == texts[1] and texts[0]


# Drift and loss.


class Forgetful(ReceiverCache[Any]):
    """Loses its cache before every third message."""

    count = 0

    def missing(self, items: Any, repaired: Any) -> list[bytes]:
        self.count += not repaired
        if self.count % 3 == 0 and not repaired:
            self.clear()
        return super().missing(items, repaired)


async def test_an_engine_that_loses_its_cache_is_sent_what_it_misses(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio = np.tile(fakes.speech(1, 1), 6)
    wanted = await expected(audio)
    monkeypatch.setattr(engine.server.host, "ReceiverCache", Forgetful)
    async with fakes.running(EngineThread(fakes.build)) as client:
        transcript = await fakes.transcribe(client, "s", audio, between=lambda _: asyncio.sleep(0.005))
        assert client.metrics().input_cache.repairs > 0
    assert transcript.words == wanted.words


async def test_a_gateway_that_loses_its_cache_sends_again_and_repairs_nothing() -> None:
    audio = np.tile(fakes.speech(1, 1), 4)
    wanted = await expected(audio)
    async with fakes.running(EngineThread(fakes.build)) as client:
        (link,) = client.supervisor.pool.links()

        async def forget(piece: int) -> None:
            await asyncio.sleep(0.005)
            if piece % 5 == 0:
                link.cache.clear()

        transcript = await fakes.transcribe(client, "s", audio, between=forget)
        assert client.metrics().input_cache.repairs == 0
    assert transcript.words == wanted.words


@pytest.mark.parametrize("seed", range(3))
async def test_lost_messages_are_sent_again_in_both_directions(
    seed: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio = np.tile(fakes.speech(2, 1), 3)
    wanted = await expected(audio)
    chance = random.Random(seed)
    lost = 0

    def lossy(send: Callable[..., Any]) -> Callable[..., Any]:
        def sometimes(*arguments: Any) -> Any:
            nonlocal lost
            greeting = b"hello" in bytes(arguments[-1][0]) or b"welcome" in bytes(arguments[-1][0])
            if not greeting and chance.random() < 0.25:
                lost += 1
                return True
            return send(*arguments)

        return sometimes

    monkeypatch.setattr(GatewaySocket, "send", lossy(GatewaySocket.send))
    monkeypatch.setattr(EngineSocket, "send", lossy(EngineSocket.send))
    async with fakes.running(EngineThread(fakes.build)) as client:
        transcript = await fakes.transcribe(client, "s", audio, between=lambda _: asyncio.sleep(0.005))
        metrics = client.metrics()
    assert lost > 10
    assert metrics.restarts == 0
    assert transcript.words == wanted.words
    assert transcript.tags == wanted.tags
    assert transcript.last == wanted.last


# Audio that does not cross twice.


async def test_a_muted_microphone_crosses_once() -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        await fakes.transcribe(client, "a", np.zeros(60 * fakes.RATE, np.float32), flush_every=10**6)
        stats = client.metrics().input_cache
    assert stats.bytes_sent == ITEM_BYTES
    assert stats.hits == stats.queries - 1 >= 60 * 12


async def test_two_sessions_with_the_same_audio_and_audio_that_is_sent_again_cross_once() -> None:
    audio = fakes.speech(5, 1)
    async with fakes.running(EngineThread(fakes.build)) as client:
        await fakes.transcribe(client, "a", audio)
        once = client.metrics()
        await asyncio.gather(*(fakes.transcribe(client, name, audio) for name in ("b", "c")))
        thrice = client.metrics()
    assert thrice.input_cache.bytes_sent == once.input_cache.bytes_sent
    assert thrice.input_cache.queries == 3 * once.input_cache.queries
    assert thrice.input_cache.hits == 2 * once.input_cache.queries + once.input_cache.hits
    assert thrice.encoder_queries == 3 * once.encoder_queries > 0


async def test_a_cache_of_no_bytes_counts_nothing_and_loses_nothing() -> None:
    audio = np.tile(fakes.speech(1, 1), 2)
    async with fakes.running(EngineThread(fakes.build), cache_bytes=0) as client:
        transcript = await fakes.transcribe(client, "s", audio)
        stats = client.metrics().input_cache
    assert transcript.words == (await expected(audio)).words
    assert stats.queries == stats.hits == 0


# Injection.


def bare(items: list[Item]) -> list[Item]:
    """Hashes alone."""
    return [structs.replace(item, payload=None) for item in items]


async def test_injected_items_are_not_sent_again_and_counted_like_all_others() -> None:
    audio = fakes.speech(3, 1)
    async with fakes.running(EngineThread(fakes.build)) as elsewhere:
        rendered = elsewhere.render(audio)
        assert elsewhere.metrics().input_cache.queries == 0
    keyed = len([item for item in rendered.items if item.key])
    async with fakes.running(EngineThread(fakes.build)) as client:
        assert await client.inject([None, *rendered.items]) == keyed
        await fakes.until(lambda: client.metrics().input_cache.queries == keyed)
        sent = client.metrics().input_cache.bytes_sent
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        await stream.feed_items(bare(rendered.items))
        await stream.finish()
        await reader
        stats = client.metrics().input_cache
    assert transcript.words == (await expected(audio, flush_every=10**6)).words
    assert stats.bytes_sent == sent
    assert stats.queries == 2 * keyed and stats.hits >= keyed
    assert stats.repairs == 0


async def test_items_of_several_renders_follow_one_another() -> None:
    parts = [fakes.speech(1, 1), fakes.speech(2, 2)]
    async with fakes.running(EngineThread(fakes.build)) as client:
        said = []
        for prepared in (True, False):
            stream = await client.open("a")
            transcript = fakes.Transcript()
            reader = asyncio.create_task(transcript.collect(stream))
            for part in parts:
                if prepared:
                    await stream.feed_items(client.render(part).items)
                else:
                    await stream.feed(part)
                await stream.flush()
            await stream.finish()
            await reader
            said.append(transcript)
    assert said[0].words == said[1].words != []
    assert said[0].tags == [1, 2]


async def test_injecting_without_sending_leaves_both_sides_in_agreement() -> None:
    async with fakes.running(EngineThread(fakes.build), cache_bytes=4 * ITEM_BYTES) as client:
        await client.inject(client.render(fakes.speech(2, 1)).items)
        transcript = await fakes.transcribe(client, "s", np.tile(fakes.speech(1, 1), 3))
        assert client.metrics().input_cache.repairs == 0
    assert transcript.words == (await expected(np.tile(fakes.speech(1, 1), 3))).words


async def test_a_wrong_hash_or_an_unknown_one_is_refused_and_the_stream_goes_on() -> None:
    audio = fakes.speech(1, 1)
    async with fakes.running(EngineThread(fakes.build)) as client:
        items = client.render(audio).items
        forged = [Item(items[0].offset, 1, 0, b"x" * 16, items[0].payload)]
        unknown = [Item(items[0].offset, 1, 0, b"x" * 16)]
        stream = await client.open("a")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        with pytest.raises(ItemRefused, match="not the hash of its data"):
            await client.inject(forged)
        with pytest.raises(ItemRefused, match="not the hash of its data"):
            await stream.feed_items(forged)
        with pytest.raises(ItemRefused, match="never seen 7878"):
            await stream.feed_items(unknown)
        assert client.metrics().input_cache.queries == 0
        await stream.feed_items(items)
        with pytest.raises(StreamFinished, match="prepared items"):
            await stream.feed(audio)
        await stream.finish()
        await reader
    assert transcript.words == (await expected(audio)).words


async def test_a_bare_hash_that_the_engine_has_lost_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.server.host, "ReceiverCache", Forgetful)
    audio = fakes.speech(1, 1)
    async with fakes.running(EngineThread(fakes.build)) as client:
        items = client.render(audio).items
        other = asyncio.create_task(
            fakes.transcribe(client, "other", fakes.speech(2, 2), between=lambda _: asyncio.sleep(0.02))
        )
        failed = None
        for attempt in range(10):
            await client.inject(items)
            stream = await client.open(f"bare-{attempt}")
            transcript = fakes.Transcript()
            reader = asyncio.create_task(transcript.collect(stream))
            await stream.feed_items(bare(items))
            await asyncio.sleep(0.02)
            await stream.finish()
            await reader
            if isinstance(transcript.last, Failed):
                failed = transcript.last
                break
        assert isinstance((await other).last, Closed)
    assert failed is not None and failed.code == "BadItem"
    assert "send the item's data" in failed.message


async def test_injected_items_leave_behind_live_audio_and_within_the_credits() -> None:
    """A slow engine and as much to inject as it takes seconds to take in: a live stream does not notice."""
    slow = EngineThread(partial(fakes.build, step_seconds=0.002), warm=False)
    async with fakes.running(slow, cache_bytes=1 << 30) as client:
        (link,) = client.supervisor.pool.links()
        payloads = np.random.default_rng(1).standard_normal((30_000, ITEM_BYTES // 4), dtype=np.float32)
        items = [Item(index, 1, 0, hash_payload(payload), payload) for index, payload in enumerate(payloads)]
        stream = await client.open("live")
        transcript = fakes.Transcript()
        reader = asyncio.create_task(transcript.collect(stream))
        injecting = asyncio.create_task(client.inject(items))
        most = 0
        for seed in range(20):
            await stream.feed(fakes.speech(0.1, seed))
            most = max(most, link.numbering.unacknowledged_bytes)
            await asyncio.sleep(0.01)
        await stream.finish()
        await asyncio.wait_for(reader, 10)
        assert most < 8 * 1024 * 1024, "room is left for audio"
        assert await injecting == len(items)
    audio = np.concatenate([fakes.speech(0.1, seed) for seed in range(20)])
    assert transcript.words == (await expected(audio, flush_every=10**6)).words


async def test_injecting_ends_with_the_link() -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        (link,) = client.supervisor.pool.links()
        items = client.render(fakes.speech(1, 1)).items
        link.numbering._window_bytes = 0
        injecting = asyncio.create_task(client.inject(items))
        await stays(lambda: not injecting.done(), 0.1)  # it waits for room
        link.close()
        await asyncio.wait_for(injecting, 5)


async def test_injection_without_a_cache_does_nothing() -> None:
    async with fakes.running(EngineThread(fakes.build), cache_bytes=0) as client:
        assert await client.inject(client.render(fakes.speech(1, 1)).items) == 0
        assert client.metrics().input_cache.bytes_sent == 0


# Several of each.


async def test_streams_spread_over_engines_with_room_and_stay_there() -> None:
    engines = [EngineThread(partial(fakes.build, max_streams=10)) for _ in range(2)]
    async with fakes.running(*engines, max_load=0.0) as client:
        streams = [await client.open(f"s{i}") for i in range(18)]
        carried = [len(pooled.streams) for pooled in client.supervisor.pool.all]
        assert sum(carried) == 18 and min(carried) >= 8, "none is asked for more than it has room for"
        for stream in streams:
            await stream.abort()


async def test_two_gateways_share_an_engine_and_use_the_same_names() -> None:
    remote = EngineThread(fakes.build)
    await remote.start()
    audio = [fakes.speech(3, seed) for seed in range(2)]
    try:
        async with (
            fakes.running(RemoteEngine(remote.address)) as one,
            fakes.running(RemoteEngine(remote.address)) as two,
        ):
            transcripts = await asyncio.gather(
                fakes.transcribe(one, "same", audio[0]), fakes.transcribe(two, "same", audio[1])
            )
            assert one.metrics().input_cache.hits == two.metrics().input_cache.hits == 0
            await fakes.transcribe(two, "again", audio[0])
            assert two.metrics().input_cache.hits == 0, "each gateway has a mirror of its own"
    finally:
        await remote.stop()
    for transcript, samples in zip(transcripts, audio, strict=True):
        assert transcript.words == (await expected(samples)).words


async def test_a_gateway_that_leaves_or_falls_silent_gives_its_places_back(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.server.host, "SILENCE_SECONDS", 0.3)
    remote = EngineThread(partial(fakes.build, max_streams=2))
    await remote.start()
    try:
        async with fakes.running(RemoteEngine(remote.address)) as watcher:
            async with fakes.running(RemoteEngine(remote.address)) as leaving:
                await leaving.open("a")
                await fakes.until(lambda: watcher.capacity().used == 1)
            await fakes.until(lambda: watcher.capacity().used == 0)
            silent = EngineClient([RemoteEngine(remote.address)])
            await silent.start()
            await silent.wait_until_ready()
            await silent.open("a")
            (link,) = silent.supervisor.pool.links()
            link._stop_timers()
            await fakes.until(lambda: watcher.capacity().used == 1)
            await fakes.until(lambda: watcher.capacity().used == 0)
            await silent.close()
    finally:
        await remote.stop()
