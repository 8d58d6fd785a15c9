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

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from benchmarks.clients import PLAIN_SESSION, PacedClient, appends_of, own_part
from benchmarks.measuring import RunFailed, parser_of, percentiles, run_command, show, spawned
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
        lags = [self.lag_s(word["end"], now) for word in event.get("words", ())]
        self.lags += [lag for lag in lags if lag is not None]


class Viewer(asyncio.Protocol):
    """Keeps what arrives, with its time; it is parsed when the run is over."""

    def __init__(self, place: str, is_socket: bool) -> None:
        self.received: list[tuple[float, bytes]] = []
        self.is_lost = False
        path = f"/v1/sessions/{NAME}/events"
        self._socket = ClientProtocol(parse_uri(f"ws://{place}{path}")) if is_socket else None
        self._request = f"GET {path} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode()
        if self._socket is not None:
            self._socket.send_request(self._socket.connect())
            self._request = b"".join(self._socket.data_to_send())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Each event with the time at which its last byte arrived."""
        rest = b""
        for came, data in self.received:
            if self._socket is not None:
                self._socket.receive_data(data)
                frames = [frame for frame in self._socket.events_received() if isinstance(frame, Frame)]
                texts = [bytes(frame.data) for frame in frames if frame.opcode is Opcode.TEXT]
            else:
                *lines, rest = (rest + data).split(b"\n")
                texts = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
            for text in texts:
                yield came, json.loads(text)

    def arrivals(self) -> list[Arrival]:
        lengths: dict[str, int] = {}
        arrivals: list[Arrival] = []
        for came, event in self.events():
            if event["type"] == "snapshot":
                lengths = {turn["id"]: len(turn["text"]) for turn in event["open"]}
            elif event["type"] == "delta":
                lengths[event["id"]] = lengths.get(event["id"], 0) + len(event["text"])
                arrivals.append((event["id"], lengths[event["id"]], came))
        return arrivals


async def _watch(url: str, viewers: int, pipe: Connection) -> tuple[list[list[Arrival]], int]:
    place = urlsplit(url)
    loop, made = asyncio.get_running_loop(), [Viewer(place.netloc, bool(number % 2)) for number in range(viewers)]
    for start in range(0, viewers, CONNECTS_AT_ONCE):
        batch = made[start : start + CONNECTS_AT_ONCE]
        for viewer in batch:
            await loop.create_connection(lambda viewer=viewer: viewer, place.hostname, place.port)  # type: ignore[misc]
        while not all(viewer.received for viewer in batch):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    pipe.send("ready")
    while not pipe.poll():  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return [viewer.arrivals() for viewer in made], sum(viewer.is_lost for viewer in made)


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    use_default_model(options)
    sound = pcm16(speech(options.audio) if options.audio or not options.model else sample_speech())
    sounds = [own_part(sound, number, options.seconds) for number in range(options.speakers)]
    with Server(options, counts_streams_only=True) as server:
        url = server.urls[0]
        if not options.small:
            asyncio.run(speak(url, [own_part(sound, 0, 8.0)]))  # what runs for the first time is slow
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
    delay = percentiles("delay", behind, 50, 95, 99)
    report: dict[str, Any] = {
        "viewers": {"count": options.viewers, "lost": lost, "texts": len(behind), **delay},
        "speakers": {
            "alone": {"words": len(alone), **lag_alone},
            "with viewers": {"words": len(beside), **lag_beside},
            **{name.replace("lag", "lag_ratio"): lag_beside[name] / lag_alone[name] for name in lag_alone},
        },
        "gateway_cpu_seconds": {"alone": spent[0], "with viewers": spent[1]},
    }
    show(f"{options.viewers} viewers beside {options.speakers} speakers", report)
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_server_options(parser)
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--speakers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    run_command(parser, arguments, measure, null=True, workers=1, viewers=20, speakers=2, seconds=2.0)


if __name__ == "__main__":
    main()
