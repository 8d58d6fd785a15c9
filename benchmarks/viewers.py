"""What viewers of a published session cost: their delay behind the speaker's client, and the speakers' lag beside them.

    python -m benchmarks.viewers [--viewers 1000] [--speakers 4] [--seconds 60] [--model NAME] [--workers 2]

A whole server as processes. The speakers play the sample recording that `tickertape pull` provides, at the pace of
speech, first alone and then again while viewers read the first of them, half of them over server-sent events and half
over sockets. Speakers and viewers are processes on the same machine, so they take processor time from the server.

The delay of a viewer is the time from a text's arrival at the speaker's client to its arrival at the viewer; it is
negative if the viewer has it first. The lag of a speaker is the time from the sending of a word's last sample to the
arrival of its text.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients import PLAIN_SESSION, PacedClient, appends_of, own_part
from benchmarks.measuring import RunFailed, parser_of, percentiles, show, spawned, write_json
from benchmarks.recordings import sample_speech
from benchmarks.servers import Server, add_server_options, use_default_model
from benchmarks.sounds import pcm16, speech
from realtime.client.wire_client import DELTA
from realtime.listeners import raise_limit

NAME = "benchmark"
CONNECTS_AT_ONCE = 50
# (turn, characters of the turn so far, when they arrived)
Arrival = tuple[str, int, float]


class Speaker(PacedClient):
    """Notes the lag of its words and the arrival of its texts."""

    def __init__(self, url: str, appends: list[bytes], is_published: bool) -> None:
        options = replace(PLAIN_SESSION, publish=NAME) if is_published else PLAIN_SESSION
        super().__init__(url, appends, options=options)
        self.lags: list[float] = []
        self.arrivals: list[Arrival] = []
        self._lengths: dict[str, int] = {}

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] != DELTA:
            return
        now, item = time.monotonic(), event["item_id"]
        self._lengths[item] = self._lengths.get(item, 0) + len(event["delta"])
        self.arrivals.append((item, self._lengths[item], now))
        for word in event.get("words", ()):
            append = int(word["end"] / self._append_s - 1e-6)
            if append < len(self.sent_at):
                self.lags.append(now - self.sent_at[append])


class _Viewer(asyncio.Protocol):
    """Keeps what arrives, with its time; it is parsed when the run is over."""

    def __init__(self, request: bytes) -> None:
        self.received: list[tuple[float, bytes]] = []
        self.is_lost = False
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


def request_of(host: str, is_socket: bool) -> bytes:
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += f"Sec-WebSocket-Key: {'A' * 22}==\r\n"
    return f"GET /v1/sessions/{NAME}/events HTTP/1.1\r\nHost: {host}\r\n{upgrade * is_socket}\r\n".encode()


def events_of(received: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a viewer, each with the time at which its last byte arrived."""
    rest, is_open = b"", False
    for came, data in received:
        rest += data
        if not is_open and b"\r\n\r\n" in rest:
            rest, is_open = rest.partition(b"\r\n\r\n")[2], True
        while is_open and (body := _next_event(rest)) is not None:
            event, rest = body
            if event:
                yield came, json.loads(event)


def _next_event(rest: bytes) -> tuple[bytes, bytes] | None:
    """The next event in JSON, empty if it is none, and what follows it; None if it is not complete."""
    if rest[:1] == b"\x81":
        size, head = rest[1:2][0] if len(rest) > 1 else 0, 2
        if size == 126:
            size, head = int.from_bytes(rest[2:4]), 4
        elif size == 127:
            size, head = int.from_bytes(rest[2:10]), 10
        return None if len(rest) < head + size or len(rest) < 2 else (rest[head : head + size], rest[head + size :])
    if rest[:1] in (b"\x89", b"\x8a"):
        return None if len(rest) < 2 or len(rest) < 2 + rest[1] else (b"", rest[2 + rest[1] :])
    line, end, after = rest.partition(b"\n")
    if not end:
        return None
    return (line.removeprefix(b"data: ") if line.startswith(b"data: ") else b""), after


def arrivals_of(received: Sequence[tuple[float, bytes]]) -> list[Arrival]:
    lengths: dict[str, int] = {}
    arrivals: list[Arrival] = []
    for came, event in events_of(received):
        if event["type"] == "snapshot":
            lengths = {turn["id"]: len(turn["text"]) for turn in event["open"]}
        elif event["type"] == "delta":
            lengths[event["id"]] = lengths.get(event["id"], 0) + len(event["text"])
            arrivals.append((event["id"], lengths[event["id"]], came))
    return arrivals


async def _watch(url: str, viewers: int, pipe: Connection) -> tuple[list[list[Arrival]], int]:
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 80
    loop, made = asyncio.get_running_loop(), list[_Viewer]()
    for start in range(0, viewers, CONNECTS_AT_ONCE):
        batch = [
            _Viewer(request_of(place.netloc, bool(n % 2))) for n in range(start, min(viewers, start + CONNECTS_AT_ONCE))
        ]
        for viewer in batch:
            await loop.create_connection(lambda viewer=viewer: viewer, host, port)  # type: ignore[misc]
        made += batch
        while not all(viewer.received for viewer in batch):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    pipe.send("ready")
    while not pipe.poll():  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return [arrivals_of(viewer.received) for viewer in made], sum(viewer.is_lost for viewer in made)


def watch(url: str, viewers: int, pipe: Connection) -> None:
    """Main function of the viewers' process: reports when all are connected, and at the end what they got."""
    raise_limit()
    pipe.send(asyncio.run(_watch(url, viewers, pipe)))


def delays(arrivals: Sequence[Arrival], of_speaker: Sequence[Arrival]) -> list[float]:
    """Seconds from the arrival of each text at the speaker to its arrival at the viewer."""
    came: dict[str, list[tuple[int, float]]] = {}
    for item, length, moment in of_speaker:
        came.setdefault(item, []).append((length, moment))
    found = []
    for item, length, moment in arrivals:
        first = next((at for reached, at in came.get(item, ()) if reached >= length), None)
        if first is not None:
            found.append(moment - first)
    return found


async def speak(url: str, sounds: list[bytes]) -> list[Speaker]:
    speakers = [Speaker(url, appends_of(sound), is_published=not number) for number, sound in enumerate(sounds)]
    await asyncio.gather(*(speaker.speak() for speaker in speakers))
    return speakers


def beside_viewers(url: str, sounds: list[bytes], viewers: int) -> tuple[list[Speaker], list[float], int]:
    """The speakers, the delays of all viewers, and how many viewers lost their connection."""
    with spawned(watch, url, viewers) as (pipe, _):
        try:
            if pipe.recv() != "ready":
                raise RunFailed("the viewers did not connect")
            speakers = asyncio.run(speak(url, sounds))
            pipe.send("stop")
            arrivals, lost = pipe.recv()
        except EOFError as error:
            raise RunFailed("the process of the viewers ended; its error is above") from error
    got = sum(bool(one) for one in arrivals)
    if got < viewers - lost:
        raise RunFailed(f"{viewers - lost - got} viewers got no words")
    return speakers, [delay for one in arrivals for delay in delays(one, speakers[0].arrivals)], lost


def lags(speakers: list[Speaker]) -> list[float]:
    found = [lag for speaker in speakers for lag in speaker.lags]
    if not found:
        raise RunFailed("the speakers got no words")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_server_options(parser)
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--speakers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    if options.small:
        options.null, options.viewers, options.speakers, options.seconds = True, 20, 2, 2.5
    use_default_model(options)
    sound = pcm16(speech(options.audio) if options.audio or not options.model else sample_speech())
    sounds = [own_part(sound, number, options.seconds) for number in range(options.speakers)]
    with Server(options, counts_streams_only=True) as server:
        url = server.urls[0]
        asyncio.run(speak(url, [own_part(sound, 0, min(8.0, options.seconds))]))  # what runs for the first time is slow
        before = server.cpu_seconds()
        alone = lags(asyncio.run(speak(url, sounds)))
        between = server.cpu_seconds()
        speakers, behind, lost = beside_viewers(url, sounds, options.viewers)
        after = server.cpu_seconds()
    beside = lags(speakers)
    spent = [
        sum(seconds - earlier.get(name, 0.0) for name, seconds in later.items() if name != "engine")
        for earlier, later in ((before, between), (between, after))
    ]
    lag_alone: dict[str, Any] = percentiles("lag", alone, 50, 95)
    lag_beside: dict[str, Any] = percentiles("lag", beside, 50, 95)
    report: dict[str, Any] = {
        "viewers": {
            "count": options.viewers,
            "lost": lost,
            "texts": len(behind),
            **percentiles("delay", behind, 50, 95, 99),
        },
        "speakers": {
            "alone": {"words": len(alone), **lag_alone},
            "with viewers": {"words": len(beside), **lag_beside},
            **{name.replace("lag", "lag_ratio"): lag_beside[name] / lag_alone[name] for name in lag_alone},
        },
        "gateway_cpu_seconds": {"alone": spent[0], "with viewers": spent[1]},
    }
    show(f"{options.viewers} viewers beside {options.speakers} speakers", report)
    write_json(options, report)


if __name__ == "__main__":
    main()
