"""Viewers of a published session, all in one process: what each gets, and when. For `benchmarks/server_capacity.py`.

Half of them read server-sent events and half a socket. The delay of a viewer is the time from a text's arrival at the
speaker's client to its arrival at the viewer; it is negative if the viewer has it first.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from benchmarks.clients import PUBLISHED, Arrival
from benchmarks.measuring import percentiles
from realtime.listeners import raise_limit

CONNECTS_AT_ONCE = 50


class Viewer(asyncio.Protocol):
    """Keeps what arrives, with its time; it is parsed when the run is over."""

    def __init__(self, place: str, is_socket: bool) -> None:
        self.received: list[tuple[float, bytes]] = []
        self.is_lost = False
        path = f"/v1/sessions/{PUBLISHED}/events"
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


def watch_session(url: str, viewers: int, pipe: Connection) -> None:
    """Main function of the viewers' process: reports when all are connected, and at the end what they got."""
    raise_limit()
    pipe.send(asyncio.run(_watch(url, viewers, pipe)))


def viewer_figures(watched: tuple[list[list[Arrival]], int], of_speaker: Sequence[Arrival]) -> dict[str, Any]:
    """Seconds from the arrival of each text at the speaker to its arrival at each viewer."""
    came: dict[str, list[tuple[int, float]]] = {}
    for item, length, moment in of_speaker:
        came.setdefault(item, []).append((length, moment))
    arrivals, lost = watched
    delays = []
    for item, length, moment in (arrival for one in arrivals for arrival in one):
        first = next((at for reached, at in came.get(item, ()) if reached >= length), None)
        delays += [] if first is None else [moment - first]
    counts = {"count": len(arrivals), "lost": lost, "without_words": sum(not one for one in arrivals)}
    return {**counts, "texts": len(delays), **percentiles("delay_s", delays, 50, 95, 99)}
