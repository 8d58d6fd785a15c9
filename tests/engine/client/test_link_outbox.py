"""Live audio first: the replays of fifty streams neither delay a live stream nor accumulate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import decode_commands
from engine.boundary.items import make_cutter, prepare
from engine.boundary.replay import FlushRequest, Replay
from engine.boundary.sockets import SILENCE_SECONDS
from engine.client import link as link_module
from engine.client.link import (
    BATCH_BYTES,
    MAX_PARALLEL_REPLAYS,
    POSITIONS_A_REPLAY,
    REBUILT_TURNS,
    REPLAY_WINDOW_BYTES,
    SAMPLE_BYTES,
    EngineLink,
    LinkEvents,
    OutgoingBatch,
    SendQueue,
)
from engine.client.stream import REPLAY_ITEMS, Delivery
from engine.errors import EngineUnreachable
from engine.messages import Abort, Feed, Finish, Flush, Item, Open
from tests.engine import fakes

MOVED = 100
# One position of the largest model: 80 ms with what is around it.
PAYLOAD = np.zeros(2000, np.float32)
PIECE_BYTES = REPLAY_ITEMS * PAYLOAD.nbytes


def items(stream: str, count: int, start: int = 0) -> list[Item]:
    return [
        Item(position, 1, position * 1280, f"{stream} {position}".encode(), PAYLOAD)
        for position in range(start, start + count)
    ]


def _nothing() -> None:
    """No test waits for the end of a replay here."""


def commands_of(batch: codec.Batch) -> list[messages.Command]:
    return decode_commands(batch.commands)


class FakeSocket:
    """Welcomes at once, if it is not told to wait, and keeps what is sent."""

    made: list[FakeSocket] = []
    waits = False

    def __init__(
        self, context: Any, address: str, on_frames: Any, on_disconnect: Any, on_refused: Any, keys: Any
    ) -> None:
        self.receive = lambda message: on_frames(codec.encode(message))
        self.disconnect = on_disconnect
        self.batches: list[codec.Batch] = []
        self.message_bytes: list[int] = []
        self.payload_bytes: list[int] = []
        self.closed = False
        self.made.append(self)

    def send(self, frames: Any) -> None:
        message = codec.decode([memoryview(frame).cast("B") for frame in frames], to_engine=True)
        if isinstance(message, codec.Hello) and not self.waits:
            self.welcome()
        elif isinstance(message, codec.Batch):
            self.batches.append(message)
            self.message_bytes.append(sum(memoryview(frame).nbytes for frame in frames))
            self.payload_bytes.append(sum(memoryview(frame).nbytes for frame in frames[1:]))

    def welcome(self) -> None:
        self.receive(codec.Welcome(codec.WIRE_VERSION, "1", "engine", fakes.FRAMES, codec.Status(slots_total=100)))

    def close(self, last: Any = None) -> None:
        self.closed = True

    def take_all(self) -> None:
        """The engine has taken everything so far."""
        self.receive(codec.Beat(0, len(self.batches)))


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(link_module, "GatewaySocket", FakeSocket)
    monkeypatch.setattr(link_module, "TICK_SECONDS", 0.0)
    yield
    FakeSocket.made.clear()


def new_link(lost: list[str] | None = None) -> EngineLink:
    on_lost = (lambda why: None) if lost is None else lost.append
    return EngineLink("ipc:///x", 0, LinkEvents(lambda output: None, lambda progress: None, lambda: None, on_lost))


async def connected() -> tuple[EngineLink, FakeSocket]:
    link = new_link()
    await link.connect(zmq.Context.instance(), "gateway", None, 5.0)
    return link, FakeSocket.made[-1]


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def replayed(link: EngineLink, name: str, positions: int) -> Delivery:
    replay = Replay(0, 0, list(items(name, positions)), [7] * positions)
    return Delivery(link, Open(name), replay, fakes.FRAMES, finished=False, on_done=_nothing)


async def test_live_audio_leaves_with_the_next_batch_however_much_is_replayed() -> None:
    link, socket = await connected()
    moved = [replayed(link, f"moved {number}", 1024) for number in range(MOVED)]
    await turns()
    assert sum(socket.payload_bytes) == 0, "an engine is asked first, and sent the audio when it has said yes"
    for delivery in moved:
        delivery.opened()
    await turns()
    # All 400 MB wait; what is under way is bounded, and so is each batch.
    assert 0.99 * REPLAY_WINDOW_BYTES <= sum(socket.payload_bytes) <= REPLAY_WINDOW_BYTES + PIECE_BYTES
    assert max(socket.message_bytes) <= BATCH_BYTES + 2 * PIECE_BYTES
    for number in range(20):
        before = len(socket.batches)
        link.send(Feed("live", []), items("live", 1, number))
        await turns()
        first = commands_of(socket.batches[before])[0]
        assert isinstance(first, messages.Feed) and first.stream == "live"
        under_way = link.outbox._replay_bytes
        assert under_way <= REPLAY_WINDOW_BYTES + 2 * PIECE_BYTES
        socket.take_all()
        await turns()
    link.close()


async def test_an_engine_bounds_the_replays_that_its_live_audio_waits_for() -> None:
    """It applies the commands of a gateway in order, so replays that it cannot rebuild soon must not be under way."""
    link, socket = await connected()
    moved = [replayed(link, f"moved {number}", 1024) for number in range(8)]
    positions, sent = 256, 0
    socket.receive(codec.Beat(0, 0, codec.Status(replay_positions=positions)))
    for delivery in moved:
        delivery.opened()
    window = positions * fakes.FRAMES.samples_per_position * SAMPLE_BYTES
    while any(not delivery.is_done for delivery in moved):
        await turns()
        under_way, sent = sum(socket.payload_bytes) - sent, sum(socket.payload_bytes)
        assert 0 < under_way <= window + PIECE_BYTES
        socket.take_all()
    # The engine allows more: it is used at once, although nothing is acknowledged.
    more = [replayed(link, f"more {number}", 1024) for number in range(8)]
    for delivery in more:
        delivery.opened()
    await turns()
    before = sum(socket.payload_bytes)
    socket.receive(codec.Beat(0, len(socket.batches) - 1, codec.Status(replay_positions=1 << 20)))
    await turns()
    assert sum(socket.payload_bytes) > before + window
    assert link.outbox.window_bytes == REPLAY_WINDOW_BYTES
    link.close()


async def test_audio_that_is_rebuilt_is_sent_before_the_rest() -> None:
    """What came while there was no engine is computed more slowly than it is sent. So the streams whose known tokens
    have been sent get little until those of all others have, but some at once: their next words are in it."""
    link, socket = await connected()
    socket.receive(codec.Beat(0, 0, codec.Status(replay_positions=2 * POSITIONS_A_REPLAY)))
    names, prefix = [f"moved {number}" for number in range(8)], fakes.FRAMES.prefix_positions
    for name in names:
        audio = items(name, 3 * REPLAY_ITEMS, prefix)
        replay = Replay(0, 0, audio, [7] * (2 * REPLAY_ITEMS))
        delivery = Delivery(link, Open(name), replay, fakes.FRAMES, finished=False, on_done=_nothing)
        delivery.opened()
    sent: list[str] = []
    while len(sent) < 3 * len(names):
        await turns()
        sent = [c.stream for batch in socket.batches for c in commands_of(batch) if isinstance(c, messages.Feed)]
        socket.take_all()
    pieces = {name: [number for number, stream in enumerate(sent) if stream == name] for name in names}
    assert sent[:4] == ["moved 0", "moved 1"] * 2, "two at a time, as the engine allows"
    assert all(pieces[name][1] - pieces[name][0] <= 3 for name in names), "a stream is rebuilt without a pause"
    others = [number for name in names for number in pieces[name][2:] if number < pieces[names[-1]][1]]
    assert 0 < len(others) <= 2 * len(names) / REBUILT_TURNS + 1
    link.close()


async def test_streams_take_turns_and_all_of_every_replay_arrives_in_order() -> None:
    link, socket = await connected()
    moved = {f"moved {number}": replayed(link, f"moved {number}", 160) for number in range(MOVED)}
    for name, delivery in moved.items():
        delivery.opened()
        # What comes while the replay waits follows it.
        delivery.send(Feed(name, []), items(name, 2, 160))
        delivery.send(Finish(name))
    sent = 0
    while True:
        await turns()
        if len(socket.batches) == sent:
            break
        sent = len(socket.batches)
        socket.take_all()
    got: dict[str, list[Any]] = {name: [] for name in moved}
    order = []
    for batch in socket.batches:
        for command in commands_of(batch):
            if isinstance(command, messages.Feed):
                got[command.stream] += [item.offset for item in command.items]
                order.append(command.stream)
            elif isinstance(command, messages.Finish):
                got[command.stream].append("finish")
    assert all(positions == [*range(162), "finish"] for positions in got.values())
    first = list(moved)[:MAX_PARALLEL_REPLAYS]
    assert order[:MAX_PARALLEL_REPLAYS] == order[MAX_PARALLEL_REPLAYS : 2 * MAX_PARALLEL_REPLAYS] == first, (
        "one piece each"
    )
    # A stream that has caught up is live.
    moved["moved 3"].send(Flush("moved 3", 9))
    await turns()
    assert isinstance(commands_of(socket.batches[-1])[0], messages.Flush)
    link.close()


async def test_audio_that_came_while_a_replay_waited_is_joined_up_to_the_next_command() -> None:
    """An engine that was away for half a minute has hundreds of positions of each stream to take in."""
    link, socket = await connected()
    cutter = make_cutter(fakes.FRAMES)
    cut = prepare(cutter, cutter.cut(fakes.speech(5.0, 1)), fakes.FRAMES)
    delivery = Delivery(
        link, Open("w"), Replay(0, 0, list(cut[:8]), [7] * 8), fakes.FRAMES, finished=False, on_done=_nothing
    )
    for item in cut[8:18]:
        delivery.send(Feed("w", []), [item])
    delivery.send(Flush("w", 1))
    for item in cut[18:40]:
        delivery.send(Feed("w", []), [item])
    delivery.opened()
    await turns()
    sent = [command for batch in socket.batches for command in commands_of(batch)][1:]
    assert [[item.length for item in command.items] if isinstance(command, Feed) else "flush" for command in sent] == [
        [8, 10],  # with known tokens, and without
        "flush",
        [16, 6],
    ]
    assert delivery.is_done
    link.close()


async def test_a_replay_with_a_saved_state_asks_in_its_turn_and_an_abort_stops_it() -> None:
    link, socket = await connected()
    known = items("w", 8)
    replay = Replay(0, 0, [FlushRequest(1), *items("w", 4, 8)], before_state=known)
    asked = Delivery(link, Open("w"), replay, fakes.FRAMES, finished=True, on_done=_nothing)
    never_asked = Delivery(link, Open("v"), replay, fakes.FRAMES, finished=True, on_done=_nothing)
    assert not never_asked.abort(), "the engine has not heard of it"
    await turns()
    (batch,) = socket.batches
    (opening,) = commands_of(batch)
    assert isinstance(opening, messages.Open) and len(opening.items) == 8
    asked.opened()
    assert asked.abort()
    await turns()
    assert [type(command) for command in commands_of(socket.batches[1])] == [messages.Abort]
    assert len(socket.batches) == 2
    link.close()


def batch_of(outbox: SendQueue) -> list[Any]:
    """What the next batch of this queue holds."""
    batch, contents = OutgoingBatch(), list[Any]()

    def add(queued: Any) -> int:
        contents.append(queued)
        return batch.add(*queued)

    outbox.fill(1, add)
    return contents


def test_live_commands_never_starve_replays() -> None:
    outbox = SendQueue()
    commands: list[Any] = [(messages.Flush("replayed", tag), []) for tag in range(3)]

    class Source:
        is_rebuilt = False

        def next_piece(self) -> Any:
            return commands.pop(0) if commands else None

    outbox.add_source(Source())
    for _ in range(20):
        outbox.put((Feed("upload", []), items("upload", 200)))
    for left in (2, 1, 0):
        assert any(command.stream == "upload" for command, _ in batch_of(outbox))
        assert len(commands) == left, "each batch carries a piece of a replay, however much live audio waits"


def test_a_source_that_is_paced_twice_is_asked_once_in_a_round() -> None:
    outbox = SendQueue()

    class Source:
        is_rebuilt = False
        pieces = [(Abort("a"), []), (Abort("b"), [])]

        def next_piece(self) -> Any:
            return self.pieces.pop(0) if self.pieces else None

    source = Source()
    outbox.add_source(source)
    outbox.add_source(source)
    assert [command.stream for command, _ in batch_of(outbox)] == ["a", "b"]  # type: ignore[union-attr]
    assert not outbox.has_more


async def test_a_link_that_breaks_as_it_is_welcomed_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSocket, "waits", True)
    link = new_link()
    connecting = asyncio.create_task(link.connect(zmq.Context.instance(), "gateway", None, 5.0))
    await asyncio.sleep(0)
    # The welcome arrives, and the connection breaks before the task that waits for it can run.
    FakeSocket.made[-1].welcome()
    FakeSocket.made[-1].disconnect()
    with pytest.raises(EngineUnreachable, match="broke"):
        await connecting


async def test_a_link_that_breaks_later_says_so() -> None:
    lost: list[str] = []
    link = new_link(lost)
    await link.connect(zmq.Context.instance(), "gateway", None, 5.0)
    FakeSocket.made[-1].disconnect()
    assert len(lost) == 1 and "broke" in lost[0]


async def test_what_is_collected_travels_with_the_batch_it_was_collected_for() -> None:
    link, socket = await connected()
    asked: list[str] = []

    def collect(name: str) -> None:
        asked.append(name)
        if name == "broken":
            raise ValueError("a bug")
        link.send(Feed(name, []), items(name, 1))

    for name in ("one", "broken", "two"):
        link.collect(partial(collect, name))
    link.send(Feed("live", []), items("live", 1))
    await turns()
    assert asked == ["one", "broken", "two"], "each is asked once, and none stops another"
    (batch,) = socket.batches
    assert {command.stream for command in commands_of(batch)} == {"live", "one", "two"}
    link.close()


async def test_to_wait_for_what_leaves_is_to_wait_for_credit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    link, socket = await connected()
    monkeypatch.setattr(type(link.numbering), "may_send", False)
    link.collect(lambda: link.send(Feed("live", []), items("live", 1)))
    leaving = asyncio.create_task(link.wait_sent())
    await turns()
    assert not leaving.done() and not socket.batches, "it must not be reported as sent"
    monkeypatch.undo()
    monkeypatch.setattr(link_module, "TICK_SECONDS", 0.0)
    link.send(Feed("other", []), items("other", 1))
    await turns()
    assert leaving.done() and len(socket.batches) == 1
    link.close()


async def test_nobody_waits_for_a_link_that_is_lost() -> None:
    link, _ = await connected()
    link.collect(lambda: None)
    leaving = [asyncio.create_task(link.wait_sent()) for _ in range(2)]
    await asyncio.sleep(0)
    leaving[0].cancel()
    link.close()
    await turns()
    assert leaving[0].cancelled() and leaving[1].done()
    await link.wait_sent()


def test_more_replays_than_an_engine_rebuilds_together_take_no_turns() -> None:
    """The first ones are done, and go on, before the last ones begin."""
    outbox, taken = SendQueue(), list[int]()

    class Source:
        is_rebuilt = True

        def __init__(self, number: int) -> None:
            self.number, self.left = number, 4

        def next_piece(self) -> Any:
            if not self.left:
                return None
            self.left -= 1
            taken.append(self.number)
            return messages.Flush(str(self.number), 1), []

    for number in range(3 * MAX_PARALLEL_REPLAYS):
        outbox.add_source(Source(number))
    while outbox.has_more:
        batch_of(outbox)
    assert taken[: 2 * MAX_PARALLEL_REPLAYS] == [*range(MAX_PARALLEL_REPLAYS)] * 2
    first = [number for number in taken if number < MAX_PARALLEL_REPLAYS]
    assert taken.index(MAX_PARALLEL_REPLAYS) >= len(first) - MAX_PARALLEL_REPLAYS
    assert taken.index(3 * MAX_PARALLEL_REPLAYS - 1) > 2 * len(first) - MAX_PARALLEL_REPLAYS


def test_a_replay_is_sent_a_whole_step_in_its_turn_however_short_its_turns_of_speech_are() -> None:
    """Otherwise half of the streams have too little audio for their part of a step."""
    outbox, taken = SendQueue(), list[str]()
    outbox.allow_replays(4096, PAYLOAD.nbytes)

    class Source:
        is_rebuilt = True

        def __init__(self, name: str, length: int) -> None:
            self.name, self.length, self.sent = name, length, 0

        def next_piece(self) -> Any:
            taken.append(self.name)
            self.sent += self.length
            return Feed(self.name, []), items(self.name, self.length, self.sent - self.length)

    outbox.add_source(Source("long", 64))
    outbox.add_source(Source("short", 16))
    outbox.add_source(Source("middle", 40))
    while outbox.has_more:
        batch_of(outbox)
    turn = ["long", *["short"] * 4, *["middle"] * 2]
    assert taken[: 3 * len(turn)] == turn * 3


LONG = 300_000
STATE = messages.StreamState("s", 0, 0, 0, {"decoder": {"text": "x" * LONG}})
LONG_COMMANDS = [
    messages.SaveHandoff("s", "key", 1, 0, [bytes(1000)] * (LONG // 1000)),
    messages.SaveHandoff("s", "key", 1, 0, [], base=bytes(LONG // 2), chunk=bytes(LONG // 2)),
    messages.Claim("", 1, [("sess_" + "k" * 40, messages.LARGEST_COUNT, True)] * (LONG // 50)),
    messages.Open("s", options={"keywords": "k" * LONG}),
    messages.Open("s", forced_tokens=[messages.LARGEST_COUNT] * (LONG // 9)),
    messages.Open("s", state=STATE),
    messages.Open("s", labels={"voices": [0.5] * (LONG // 9)}),
    messages.Feed("s", [Item(position, 1, 0, mask=[True] * 1000) for position in range(LONG // 1000)]),
    messages.Feed("s", [Item(position, 1, 0, bytes(16), None) for position in range(LONG // 20)]),
]


@pytest.mark.parametrize("command", LONG_COMMANDS, ids=lambda command: type(command).__name__)
@pytest.mark.parametrize("replayed_too", [False, True])
async def test_a_batch_counts_the_bytes_of_every_command(command: Any, replayed_too: bool) -> None:
    """Not only audio is long: saved states, handoffs, options and places of cached audio count too."""
    link, socket = await connected()
    items = command.items if isinstance(command, Feed) else []
    count = 60

    class Source:
        is_rebuilt = False
        left = count

        def next_piece(self) -> Any:
            self.left -= 1
            return (command, items) if self.left >= 0 else None

    if replayed_too:
        link.send_paced(Source())
    else:
        for _ in range(count):
            link.send(command, items)
    sent = -1
    while len(socket.batches) != sent:
        sent = len(socket.batches)
        await turns()
        socket.take_all()
    assert sum(len(batch.commands) for batch in socket.batches) == count
    assert max(socket.message_bytes) <= BATCH_BYTES + 2 * LONG
    link.close()


async def test_a_gateway_that_was_stopped_does_not_take_the_engine_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the machine was suspended, the first beat comes late, and the engine's messages have not been read yet."""
    lost: list[str] = []
    link = new_link(lost)
    await link.connect(zmq.Context.instance(), "gateway", None, 5.0)
    later = [0.0]
    true_time = link._loop.time
    monkeypatch.setattr(link, "_loop", SimpleNamespace(time=lambda: true_time() + later[0], call_later=lambda *_: None))
    later[0] = 10 * SILENCE_SECONDS
    link.beat()
    assert not lost
    for _ in range(int(SILENCE_SECONDS) - 5):
        later[0] += 1
        link.beat()
    assert not lost
    later[0] += 5.9
    link.beat()
    assert "has been silent for 30 s" in lost[0], "from then on the silence counts"
