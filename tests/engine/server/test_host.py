"""Wrong messages of a gateway fail a stream or a command; the engine and its other gateways continue."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Batch, PayloadPlace, encode_command
from engine.boundary.items import hash_payload
from engine.messages import Item
from engine.server.host import DRAIN_STEP_SECONDS, MAX_UNREADABLE, DrainRequest, EngineHost
from engine.server.loop import EngineLoop
from engine.server.main import run_engine
from tests.engine import fakes

SPEC = fakes.FRAMES
SAMPLES = SPEC.look_back_samples + SPEC.samples_per_position + SPEC.look_ahead_samples


@dataclass
class Line:
    """An engine's socket whose other ends are here."""

    arriving: deque[tuple[bytes, list[Any]]] = field(default_factory=deque)
    left: list[tuple[bytes, Any]] = field(default_factory=list)
    gone: set[bytes] = field(default_factory=set)

    def wait(self, seconds: float) -> bool:
        return bool(self.arriving)

    def receive(self) -> tuple[bytes, list[Any]] | None:
        return self.arriving.popleft() if self.arriving else None

    def send(self, name: bytes, frames: list[Any]) -> bool:
        self.left.append((name, codec.decode([bytes(frames[0])], to_engine=False)))
        return name not in self.gone


class Host:
    """A host under test, and a gateway for every name that is used."""

    def __init__(self, loop: EngineLoop | None = None) -> None:
        self.line, self.loop, self.now = Line(), loop or fakes.build(detects=True), 0.0
        self.host = EngineHost(self.loop, self.line, "e", lambda: self.now)  # type: ignore[arg-type]
        self.numbers: dict[bytes, int] = {}

    def greet(self, name: bytes) -> None:
        hello = codec.Hello(codec.WIRE_VERSION, "1", name.decode(), 1 << 20)
        self.line.arriving.append((name, codec.encode(hello)))
        self.numbers[name] = 0
        self.tick()

    def tick(self) -> None:
        self.now += 0.01
        self.host.tick()
        while self.loop.has_work():
            self.host.tick()
        self.loop.scheduler.check_integrity()
        self.check_roster()

    def check_roster(self) -> None:
        """Host and loop know the same streams."""
        hosted_streams = self.host.hosted
        assert set(hosted_streams.streams) == set(self.loop.scheduler.streams)
        for peer in self.host.peers.values():
            assert all(hosted_streams.streams[name].name == stream for stream, name in peer.streams.items())
            assert set(peer.streams.values()) <= set(hosted_streams.streams)
        names = [name for peer in self.host.peers.values() for name in peer.streams.values()]
        names += [name for name, hosted in hosted_streams.streams.items() if hosted.peer is None]
        assert sorted(names) == sorted(hosted_streams.streams), "a stream that takes no commands was left behind"

    def send(self, name: bytes, *commands: msgspec.Raw, audio: tuple[np.ndarray, ...] = ()) -> None:
        self.post(name, *commands, audio=audio)
        self.tick()

    def post(self, name: bytes, *commands: msgspec.Raw, audio: tuple[np.ndarray, ...] = ()) -> None:
        """A batch that waits for the engine's next turn."""
        self.numbers[name] += 1
        ends = np.cumsum([payload.nbytes for payload in audio]).tolist()
        data = [
            PayloadPlace(hash_payload(payload), end - payload.nbytes, payload.nbytes, None)
            for payload, end in zip(audio, ends, strict=True)
        ]
        batch = Batch(self.numbers[name], 0, data, list(commands))
        self.line.arriving.append((name, codec.encode(batch, [payload.data for payload in audio])))

    def said(self, name: bytes) -> list[messages.Output]:
        """Everything a gateway was told so far."""
        updates = [message for to, message in self.line.left if to == name and isinstance(message, codec.Update)]
        return [output for update in updates for output in update.outputs]

    def believed(self, name: bytes) -> set[str]:
        """The streams that a gateway takes for open after all it was told."""
        open_streams: set[str] = set()
        for output in self.said(name):
            if isinstance(output, messages.Opened):
                open_streams.add(output.stream)
            elif isinstance(output, (messages.Closed, messages.Failed)):
                open_streams.discard(output.stream)
        return open_streams

    def text(self, name: bytes, stream: str) -> str:
        return "".join(o.delta for o in self.said(name) if isinstance(o, messages.Text) and o.stream == stream)

    def failures(self, name: bytes) -> list[tuple[str, str]]:
        return [(output.stream, output.code) for output in self.said(name) if isinstance(output, messages.Failed)]


def command(message: messages.Command, *items: messages.Item) -> msgspec.Raw:
    return encode_command(message, list(items))


def audio(seed: int) -> np.ndarray:
    return fakes.speech(1, seed)[:SAMPLES]


def feed(stream: str, position: int, data: int = 0) -> msgspec.Raw:
    item = messages.Item(SPEC.prefix_positions + position, 1, position * SPEC.samples_per_position, data=data)
    return command(messages.Feed(stream, []), item)


def say_all(host: Host, name: bytes, stream: str, positions: range) -> None:
    for position in positions:
        host.send(name, feed(stream, position), audio=(audio(position),))


@pytest.fixture(scope="module")
def calm() -> str:
    """The words of an undisturbed stream."""
    host = Host()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("good")))
    say_all(host, b"g", "good", range(20))
    host.send(b"g", command(messages.Finish("good")))
    text = host.text(b"g", "good")
    assert text
    return text


def raw(*parts: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(list(parts)))


def good_item(**changes: Any) -> list[Any]:
    fields = {"offset": SPEC.prefix_positions, "length": 1, "sample": 0, "data": 0, "mask": None, "samples": None}
    return list((fields | changes).values())


POISON: dict[str, tuple[msgspec.Raw, list[tuple[str, str]]]] = {
    "samples that are no number": (raw("feed", "bad", [good_item(samples="x")]), [("bad", "BadItem")]),
    "an offset before the beginning": (raw("feed", "bad", [good_item(offset=-1)]), [("bad", "BadItem")]),
    "an offset beyond all sessions": (raw("feed", "bad", [good_item(offset=2**53)]), [("bad", "BadItem")]),
    "a length beyond all sessions": (raw("feed", "bad", [good_item(length=2**52)]), [("bad", "BadItem")]),
    "no length": (raw("feed", "bad", [good_item(length=0)]), [("bad", "BadItem")]),
    "more samples than positions hold": (raw("feed", "bad", [good_item(samples=129)]), [("bad", "BadItem")]),
    "a mask of another length": (raw("feed", "bad", [good_item(mask=[True, False])]), [("bad", "BadItem")]),
    "audio of another length": (raw("feed", "bad", [good_item(length=2)]), [("bad", "BadItem")]),
    "a gap with audio": (raw("feed", "bad", [good_item(mask=[False])]), [("bad", "BadItem")]),
    "audio that did not come": (raw("feed", "bad", [good_item(data=7)]), [("bad", "BadItem")]),
    "audio for nothing": (raw("feed", "bad", [good_item(data=None, mask=[True])]), [("bad", "BadItem")]),
    "items that are a text": (raw("feed", "bad", "items"), [("bad", "BadItem")]),
    "a flush without a number": (raw("flush", "bad", None, False), [("bad", "BadItem")]),
    "an unknown command": (raw("dance", "bad"), [("bad", "BadItem")]),
    "options that are lists": (
        raw("open", "other", True, None, {"language": ["en", "de"]}, [], None, [], 0, None),
        [("other", "BadOption")],
    ),
    "an option this model does not take": (
        command(messages.Open("other", options={"x": "y"})),
        [("other", "BadOption")],
    ),
    "a state that is none": (
        command(messages.Open("other", state=messages.StreamState("other", 0, 0, 0, {"runner": {}}))),
        [("other", "BadItem")],
    ),
    "a command of nobody": (raw("feed", 5, []), []),
    "a number": (raw(5), []),
    "nothing": (msgspec.Raw(b"\xc0"), []),
}


@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_command_costs_its_own_stream_at_most(poison: str, calm: str) -> None:
    bad, failures = POISON[poison]
    host = Host()
    for name in (b"g", b"h"):
        host.greet(name)
        host.send(name, command(messages.Open("good")), command(messages.Open("bad")))
        say_all(host, name, "good", range(10))
    # In the middle of a batch of others, which also brings their audio.
    host.send(b"g", feed("good", 10), bad, feed("good", 11, 1), audio=(audio(10), audio(11)))
    host.send(b"h", feed("good", 10), feed("good", 11, 1), audio=(audio(10), audio(11)))
    for name in (b"g", b"h"):
        say_all(host, name, "good", range(12, 20))
        host.send(name, command(messages.Finish("good")))
    assert host.failures(b"g") == failures and host.failures(b"h") == []
    assert host.text(b"g", "good") == host.text(b"h", "good") == calm
    assert not [message for _, message in host.line.left if isinstance(message, codec.Unwelcome)]


def test_a_connection_that_greets_again_as_another_gateway_leaves_no_streams_behind() -> None:
    host = Host()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("a")))
    hello = codec.Hello(codec.WIRE_VERSION, "1", "somebody else", 1 << 20)
    host.line.arriving.append((b"g", codec.encode(hello)))
    host.tick()
    assert not host.loop.scheduler.streams


def test_the_cache_does_not_depend_on_what_can_be_read() -> None:
    host = Host()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("a")), command(messages.Open("bad")))
    host.send(b"g", raw("feed", "bad", "x"), feed("a", 0), audio=(audio(0),))
    host.send(b"g", feed("a", 1), audio=())
    (peer,) = host.host.peers.values()
    assert peer.cache.keys() == [hash_payload(audio(0))]


def test_audio_that_is_none_costs_the_streams_that_refer_to_it(calm: str) -> None:
    host = Host()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("good")), command(messages.Open("bad")))
    say_all(host, b"g", "good", range(10))
    host.numbers[b"g"] += 1
    good = audio(10)
    data = [
        PayloadPlace(hash_payload(good), 0, good.nbytes, None),
        PayloadPlace(b"b" * 16, good.nbytes, 3, None),
        PayloadPlace(b"c" * 16, 9 * good.nbytes, 4, None),
    ]
    batch = Batch(host.numbers[b"g"], 0, data, [feed("good", 10), feed("bad", 0, 1)])
    host.line.arriving.append((b"g", codec.encode(batch, [good.data, memoryview(b"odd")])))
    host.tick()
    say_all(host, b"g", "good", range(11, 20))
    host.send(b"g", command(messages.Finish("good")))
    assert host.failures(b"g") == [("bad", "BadItem")]
    assert host.text(b"g", "good") == calm


def test_a_message_that_is_none_is_borne_and_a_gateway_that_has_no_other_connects_anew(calm: str) -> None:
    host = Host()
    for name in (b"g", b"h"):
        host.greet(name)
        host.send(name, command(messages.Open("good")))
    for position in range(20):
        # One that was spoilt on its way is asked for again and then taken.
        host.line.arriving.append((b"g", [b"\xc1 nonsense"]))
        say_all(host, b"g", "good", range(position, position + 1))
    host.send(b"g", command(messages.Finish("good")))
    assert host.text(b"g", "good") == calm
    for _ in range(MAX_UNREADABLE):
        host.line.arriving.append((b"g", [b"\xc1 nonsense"]))
        host.tick()
    assert [to for to, message in host.line.left if isinstance(message, codec.Unwelcome)] == [b"g"]
    say_all(host, b"h", "good", range(20))
    host.send(b"h", command(messages.Finish("good")))
    assert host.text(b"h", "good") == calm
    host.greet(b"g")
    assert isinstance(host.line.left[-1][1], codec.Welcome)


def test_an_output_without_bytes_ends_its_stream_alone(calm: str) -> None:
    class Talkative(fakes.FakeDetector):
        def listen(self, batch: list[Any]) -> list[messages.Speech]:
            found = super().listen(batch)
            return [
                replace(speech, probabilities=[np.float64(1)]) if speech.stream.endswith("bad") else speech
                for speech in found
            ]

    loop = fakes.build()
    host = Host(EngineLoop(loop.scheduler, loop.runner, Talkative()))
    host.greet(b"g")
    host.send(b"g", command(messages.Open("good")), command(messages.Open("bad")))
    say_all(host, b"g", "good", range(10))
    host.send(b"g", feed("good", 10), feed("bad", 0), audio=(audio(10),))
    say_all(host, b"g", "good", range(11, 20))
    host.send(b"g", command(messages.Finish("good")))
    assert host.failures(b"g") == [("bad", "StreamFailed")]
    assert host.text(b"g", "good") == calm


def test_a_name_that_is_used_again_at_once_is_another_stream() -> None:
    host = Host()
    host.greet(b"g")
    host.send(b"g", *(command(kind("a")) for kind in (messages.Open, messages.Abort, messages.Open)))
    assert host.believed(b"g") == {"a"}, "the end of the first says nothing of the second"
    host.send(b"g", feed("a", 0), command(messages.Finish("a")), audio=(audio(1),))
    assert [type(output).__name__ for output in host.said(b"g")][-1] == "Closed"
    assert not host.loop.scheduler.streams


KINDS = st.sampled_from(["open", "feed", "bad feed", "unreadable", "flush", "finish", "abort"])


@given(st.lists(st.lists(st.tuples(KINDS, st.sampled_from("ab"), st.sampled_from([b"g", b"h"])), max_size=6)))
@settings(max_examples=60, deadline=None)
def test_any_order_of_commands_leaves_host_and_loop_with_the_same_streams(
    batches: list[list[tuple[str, str, bytes]]],
) -> None:
    host = Host()
    for name in (b"g", b"h"):
        host.greet(name)
    for batch in batches:
        for name in (b"g", b"h"):
            commands = []
            for kind, stream, to in batch:
                commands += [_random_command(kind, stream)] if to == name else []
            host.send(name, *commands, audio=(audio(1),))
        for name in (b"g", b"h"):
            assert host.believed(name) == set(host.host.peers[name].streams)
    host.host._drop(host.host.peers[b"g"])
    host.tick()
    assert {hosted.peer.name for hosted in host.host.hosted.streams.values()} <= {b"h"}


def _random_command(kind: str, stream: str) -> msgspec.Raw:
    return {
        "open": command(messages.Open(stream)),
        "feed": feed(stream, 0),
        "bad feed": raw("feed", stream, [good_item(samples=10**6)]),
        "unreadable": raw("feed", stream, 1),
        "flush": command(messages.Flush(stream, 1)),
        "finish": command(messages.Finish(stream)),
        "abort": command(messages.Abort(stream)),
    }[kind]


def test_a_batch_that_breaks_the_intake_costs_its_gateway_the_connection(
    calm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    for name in (b"g", b"h"):
        host.greet(name)
        host.send(name, command(messages.Open("good")))
    with monkeypatch.context() as patched:
        patched.setattr(host.host._intake, "apply", lambda *_: 1 / 0)
        host.send(b"g", feed("good", 0), audio=(audio(0),))
    assert [to for to, message in host.line.left if isinstance(message, codec.Unwelcome)] == [b"g"]
    say_all(host, b"h", "good", range(20))
    host.send(b"h", command(messages.Finish("good")))
    assert host.text(b"h", "good") == calm


def test_an_engine_closes_its_runner_once() -> None:
    loop, closed, ticks = fakes.build(), [], iter([False] * 3 + [True])
    loop.runner.close = lambda: closed.append(1)  # type: ignore[method-assign]
    run_engine("inproc://closed-once", lambda: loop, lambda: next(ticks), warm=False)
    assert closed == [1]


def test_an_item_is_made_of_what_came() -> None:
    host = Host()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("a")), feed("a", 0), audio=(audio(3),))
    (stream,) = host.loop.scheduler.streams.values()
    item = stream.timeline.item(0)
    assert structs.replace(item, arrival=0, payload=None) == Item(
        SPEC.prefix_positions, 1, 0, hash_payload(audio(3)), None, None, None, 0, 1
    )


def test_an_engine_that_drains_takes_nothing_new_says_so_and_ends_when_it_is_empty() -> None:
    host, drain = Host(), DrainRequest(lambda: True, 60.0)
    host.greet(b"g")
    host.send(b"g", command(messages.Open("a")))
    assert not host.host.drain(drain.seconds)
    host.line.left.clear()
    host.send(b"g", command(messages.Open("b")))
    updates = [message for _, message in host.line.left if isinstance(message, codec.Update)]
    assert updates[-1].status.draining
    (refused,) = [output for update in updates for output in update.outputs if isinstance(output, messages.Failed)]
    assert (refused.stream, refused.code) == ("b", "AtCapacity")
    host.send(b"g", command(messages.Abort("a")))
    host.host.serve(lambda: False, drain)


@pytest.mark.parametrize(("windowed", "apart"), [(False, DRAIN_STEP_SECONDS), (True, 0.01)])
def test_a_draining_engine_leaves_its_device_to_others(
    windowed: bool, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps in a row take most of a GPU that is shared; a windowed model computes when a stride is complete."""
    host, began = Host(fakes.build(windowed, detects=True)), list[float]()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("a")))

    def tick() -> None:
        began.append(host.now)
        host.now += 0.01

    def sleep(seconds: float) -> None:
        host.now += seconds

    monkeypatch.setattr(host.host, "tick", tick)
    monkeypatch.setattr("engine.server.host.time.sleep", sleep)
    asked = False
    host.host.serve(lambda: len(began) == 3, DrainRequest(lambda: asked, 60.0))
    assert np.diff(began) == pytest.approx(0.01)
    asked, began[:] = True, []
    host.host.serve(lambda: len(began) == 5, DrainRequest(lambda: asked, 60.0))
    assert np.diff(began) == pytest.approx(apart)


def test_an_engine_that_is_not_emptied_in_time_ends_all_the_same() -> None:
    host = Host()
    host.greet(b"g")
    host.send(b"g", command(messages.Open("a")))
    assert not host.host.drain(60.0)
    host.now += 60.0
    assert host.host.drain(60.0)


class FloodedLine(Line):
    """A socket at which a stranger sends faster than the engine reads: there is always another message."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host, self.reads = host, 0

    def receive(self) -> tuple[bytes, list[Any]]:
        self.host.now += 0.005
        self.reads += 1
        assert self.reads < 10_000, "the engine reads messages and does nothing else"
        return super().receive() or (b"stranger", [b"\xc1"])


def test_a_peer_that_sends_without_a_pause_does_not_keep_the_engine_from_its_streams(calm: str) -> None:
    host = Host()
    host.line = host.host._socket = FloodedLine(host)  # type: ignore[assignment]
    host.greet(b"g")
    host.send(b"g", command(messages.Open("good")))
    say_all(host, b"g", "good", range(20))
    host.send(b"g", command(messages.Finish("good")))
    assert host.text(b"g", "good") == calm


def test_gateways_that_send_replays_share_what_may_be_under_way() -> None:
    host = Host()
    for name in (b"g", b"h", b"i"):
        host.greet(name)
    allowed = host.loop.replay_positions_under_way

    def shared_by(count: int) -> bool:
        host.tick()
        return host.host.load.status.replay_positions == -(-host.loop.replay_positions_under_way // count)

    assert allowed and shared_by(3), "any of them may begin"
    host.send(b"g", command(messages.Open("s", forced_tokens=[1] * 40)))
    assert shared_by(1)
    host.send(b"g", command(messages.Open("t", forced_tokens=[1] * 40)))
    host.send(b"h", command(messages.Open("s", forced_tokens=[1] * 40)))
    assert shared_by(2)
