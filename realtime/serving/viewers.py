"""Writes published sessions to their viewers: each event is encoded once, and the same bytes go to all connections.

`Audience` owns the viewers of this gateway process, by the names that they read; `publishing.py` brings it the words. A
viewer has no queue. If its connection does not take an event at once, the viewer gets no further events until its
connection is empty again, and then a snapshot with the newest words. So a slow viewer costs no memory and no time, and
the speaker never waits. The routes and the admission of viewers are in `realtime/http/viewer_routes.py`.

HLS players read captions instead: a playlist of WebVTT segments, and the text of each segment. `Audience` keeps one
`CaptionSegments` for a name while players ask for it. A segment covers `SEGMENT_S` of the server's clock. The playlist
has the date of each segment, so a player can show the captions with the video stream of another server. A word belongs
to the segment in which it begins. Words arrive after they are spoken, and finals later still, so a segment is listed
only `HOLD_S` after its end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from realtime.serving.metrics import Metrics
from realtime.serving.publishing import (
    MAX_OPEN_TURNS,
    Added,
    Begun,
    Ended,
    Finished,
    Key,
    Line,
    PublishedTranscript,
    Publisher,
    Removed,
    State,
    Update,
    Word,
)
from realtime.session.words import MAX_SUBTITLE_CHARACTERS, escaped_cue, vtt_time
from realtime.text_values import date_text

log = logging.getLogger("tickertape.viewers")

# Events that may wait while a round of writing runs; if there are more, viewers get a snapshot instead.
MAX_PENDING = 256
# Finished turns in the snapshot for a viewer that was behind.
NEWEST_LINES = 3
# After writing to this many viewers, other clients get their turn.
WRITTEN_AT_ONCE = 50
# A round of writing is followed by a pause of this many times its duration, at most `MAX_PAUSE_S`, so that viewers
# leave the event loop to speakers. Updates that arrive during the pause are written together in the next round.
PAUSE_FACTOR = 2
MAX_PAUSE_S = 0.15
TICK_S = 0.25
# Interval in seconds of comments on event streams, which keep proxies from closing them.
KEEPALIVE_S = 15.0
# A viewer whose connection has taken nothing for this many seconds is cut off.
UNREAD_S = 30.0
# Captions for HLS players are made for this many seconds after the last request of a player.
PLAYER_S = 60.0
# Names without a speaker that are followed for the players of one owner. They take no places of viewers.
MAX_AWAITED_NAMES = 16
# Why viewers are closed when the server stops.
RESTARTING = "the server is restarting"

_encode = msgspec.json.Encoder().encode


class Framing(Enum):
    """How events are written on a connection."""

    # Server-sent events in chunks of HTTP/1.1, or as they are.
    CHUNKED = auto()
    PLAIN = auto()
    # WebSocket text frames.
    SOCKET = auto()


def framed(framing: Framing, kind: str, body: bytes) -> bytes:
    """An event as bytes on the wire."""
    if framing is Framing.SOCKET:
        return socket_frame(body)
    event = b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
    return chunk(event) if framing is Framing.CHUNKED else event


def chunk(data: bytes) -> bytes:
    """A chunk of an HTTP/1.1 body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def socket_frame(body: bytes) -> bytes:
    """A final text frame of a server, which has no mask and so is the same for all clients."""
    length = len(body)
    if length < 126:
        return bytes((0x81, length)) + body
    if length < 2**16:
        return bytes((0x81, 126)) + length.to_bytes(2) + body
    return bytes((0x81, 127)) + length.to_bytes(8) + body


# A comment, which clients ignore. Sockets have pings.
_KEEPALIVE = {Framing.CHUNKED: chunk(b":\n\n"), Framing.PLAIN: b":\n\n"}


class Message:
    """An event in JSON, encoded once, and its frames, made once for each framing."""

    __slots__ = ("_frames", "body", "kind", "number")

    def __init__(self, number: int, fields: dict[str, Any]) -> None:
        self.number = number
        self.kind: str = fields["type"]
        self.body = _encode(fields)
        self._frames: dict[Framing, bytes] = {}

    def frame(self, framing: Framing) -> bytes:
        made = self._frames.get(framing)
        if made is None:
            made = self._frames[framing] = framed(framing, self.kind, self.body)
        return made


class _Batch:
    """Messages that are written together."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.last = messages[-1].number
        self.before = messages[0].number - 1
        self._joined: dict[Framing, bytes] = {}

    def frames(self, framing: Framing) -> bytes:
        made = self._joined.get(framing)
        if made is None:
            made = self._joined[framing] = b"".join(message.frame(framing) for message in self.messages)
        return made

    def frames_after(self, number: int, framing: Framing) -> bytes:
        return b"".join(message.frame(framing) for message in self.messages if message.number > number)


def event_fields(update: Update, number: int) -> dict[str, Any]:
    """An update as the event that viewers get."""
    match update:
        case Begun():
            return {"type": "begin", "seq": number}
        case Added(item, text):
            return {"type": "delta", "seq": number, "id": item, "text": text}
        case Finished(line):
            return {"type": "final", "seq": number, **_shown(line), "start": line.start, "end": line.end}
        case Removed(item):
            return {"type": "removed", "seq": number, "id": item}
        case Ended():
            return {"type": "end", "seq": number}


def _shown(line: Line) -> dict[str, Any]:
    return {"id": line.id, "text": line.text}


def snapshot_fields(name: str, transcript: PublishedTranscript, max_lines: int | None = None) -> dict[str, Any]:
    """The event with the words of a session so far: its open turns, and at most `max_lines` finished ones."""
    lines = list(transcript.lines.values())
    lines = lines if max_lines is None else lines[-max_lines:]
    return {
        "type": "snapshot",
        "seq": transcript.number,
        "name": name,
        "live": transcript.is_live,
        "lines": [{**_shown(line), "start": line.start, "end": line.end} for line in lines],
        "open": [_shown(line) for line in transcript.open.values()],
    }


class Viewer:
    """One connection that reads a published session.

    `write` writes bytes if nothing waits in the connection; it returns whether it did. `is_allowed` says whether the
    viewer may still read.
    """

    __slots__ = ("abort", "behind_since", "closed", "framing", "is_allowed", "number", "write")

    def __init__(
        self,
        framing: Framing,
        write: Callable[[bytes], bool],
        abort: Callable[[], None],
        is_allowed: Callable[[], bool],
    ) -> None:
        self.framing = framing
        self.write = write
        self.abort = abort
        self.is_allowed = is_allowed
        # Number of the last update that the viewer has; -1: it needs a snapshot first.
        self.number = -1
        self.behind_since: float | None = None
        # Done with the reason when the server ends the connection.
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def close(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)


class Channel:
    """A followed name in this process: a copy of its words, and its viewers."""

    def __init__(self, key: Key, metrics: Metrics) -> None:
        self.key = key
        self.transcript = PublishedTranscript()
        self.is_current = False
        self.viewers: dict[Viewer, None] = {}
        # Captions for HLS players, once one has asked for them; and until when they are wanted without viewers, by the
        # clock of the event loop.
        self.segments: CaptionSegments | None = None
        self.captions_until = 0.0
        self._metrics = metrics
        self._pending: list[Message] = []
        # A snapshot for all viewers, taken when the words were replaced as a whole; None if there is none to write.
        self._replaced: Message | None = None
        self._writing: asyncio.Task[None] | None = None
        # The last snapshots for new viewers and for viewers that were behind.
        self._snapshots: dict[int | None, Message] = {}

    def add(self, viewer: Viewer) -> None:
        self.viewers[viewer] = None
        if self.is_current:
            self._send_snapshot(viewer, self._snapshot(None))

    def load(self, state: State) -> None:
        """Load the words so far; all viewers get a snapshot."""
        self.transcript.load(state)
        self.is_current = True
        self._pending.clear()
        self._snapshots.clear()
        for viewer in self.viewers:
            viewer.number = -1
        if self.viewers:
            # Made now: what follows, such as the end of the session, is told as events, also to the last viewer.
            self._replaced = self._snapshot(None)
            self._start_writing()

    def update(self, update: Update) -> None:
        if not self.is_current:
            return  # it is in the snapshot that comes
        if not self.transcript.apply(update):
            return
        if self.segments is not None:
            self.segments.update(update, time.time())
        if not self.viewers:
            return
        self._pending.append(Message(self.transcript.number, event_fields(update, self.transcript.number)))
        if len(self._pending) > MAX_PENDING:
            self._pending.clear()
            now = asyncio.get_running_loop().time()
            for viewer in self.viewers:
                self._fall_behind(viewer, now)
        else:
            self._start_writing()

    def captions(self) -> CaptionSegments:
        """The caption segments, which are made from now on, for as long as players ask for them."""
        self.captions_until = asyncio.get_running_loop().time() + PLAYER_S
        if self.segments is None:
            self.segments = CaptionSegments()
        return self.segments

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def _start_writing(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pending(), name=f"viewers of {self.key[1]}")

    async def _write_pending(self) -> None:
        """Write what is pending to all viewers, some at a time, until nothing is pending. Words that were replaced as a
        whole come first, in a round of their own."""
        clock = asyncio.get_running_loop().time
        try:
            while self._pending or self._replaced is not None:
                replaced, self._replaced = self._replaced, None
                batch = None
                if replaced is None:
                    batch, self._pending = _Batch(self._pending), []
                began = clock()
                for count, viewer in enumerate(tuple(self.viewers), start=1):
                    if batch is not None:
                        self._send_batch(viewer, batch, began)
                    elif replaced is not None and viewer in self.viewers and self._needs_snapshot(viewer):
                        self._send_snapshot(viewer, replaced)
                    if count % WRITTEN_AT_ONCE == 0:
                        # The loop sends at the end of each of its rounds.
                        await asyncio.sleep(0)
                        if self._replaced is not None:
                            break  # what this round writes is out of date
                await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_FACTOR * (clock() - began)))
        finally:
            self._writing = None

    @staticmethod
    def _needs_snapshot(viewer: Viewer) -> bool:
        """Whether a viewer has nothing yet. One that is behind gets a newer snapshot from the next tick."""
        return viewer.number < 0 and viewer.behind_since is None

    def _send_batch(self, viewer: Viewer, batch: _Batch, now: float) -> None:
        if viewer not in self.viewers:
            return  # it left during this round
        if viewer.number < batch.before or viewer.behind_since is not None:
            self._catch_up(viewer)
        elif viewer.number < batch.last:
            whole = viewer.number == batch.before
            framing = viewer.framing
            if viewer.write(batch.frames(framing) if whole else batch.frames_after(viewer.number, framing)):
                viewer.number = batch.last
            else:
                self._fall_behind(viewer, now)

    def _fall_behind(self, viewer: Viewer, now: float) -> None:
        if viewer.behind_since is None:
            viewer.behind_since = now
            self._metrics.viewer_skips.inc()

    def _catch_up(self, viewer: Viewer) -> None:
        """Give a viewer a snapshot, if its connection takes it: the first has all words, a later one the newest."""
        self._send_snapshot(viewer, self._snapshot(NEWEST_LINES if viewer.number >= 0 else None))

    def _send_snapshot(self, viewer: Viewer, snapshot: Message) -> None:
        if not viewer.write(snapshot.frame(viewer.framing)):
            self._fall_behind(viewer, asyncio.get_running_loop().time())
            return
        viewer.number, viewer.behind_since = snapshot.number, None

    def _snapshot(self, max_lines: int | None) -> Message:
        made = self._snapshots.get(max_lines)
        if made is None or made.number != self.transcript.number:
            fields = snapshot_fields(self.key[1], self.transcript, max_lines)
            made = self._snapshots[max_lines] = Message(self.transcript.number, fields)
        return made

    def tick(self, viewer: Viewer, now: float, keeps_alive: bool) -> None:
        """Serve a viewer that is behind, cut it off if it reads nothing, and end it if it may not read any more."""
        if viewer not in self.viewers:
            return  # it left during this round
        if not viewer.is_allowed():
            viewer.close("the link has expired or was revoked, or the key was removed")
        elif viewer.behind_since is not None:
            if self.is_current:
                self._catch_up(viewer)
            if viewer.behind_since is not None and now - viewer.behind_since > UNREAD_S:
                viewer.abort()
        elif keeps_alive and viewer.framing in _KEEPALIVE:
            viewer.write(_KEEPALIVE[viewer.framing])


class Audience:
    """All viewers of this process, by the names that they read."""

    def __init__(self, publisher: Publisher, metrics: Metrics) -> None:
        self.channels: dict[Key, Channel] = {}
        self.is_closing = False
        # By owner: the number of viewers, and of published names that HLS players read. Each takes one place.
        self.places: Counter[str] = Counter()
        self.players: Counter[str] = Counter()
        self.publisher = publisher
        self._metrics = metrics
        publisher.reader = self

    def __len__(self) -> int:
        """Places that are taken by viewers."""
        return self.places.total()

    def has_place(self, owner: str, most: int, share: int) -> bool:
        """Whether a viewer of this owner's sessions gets one of `most` places; one owner may have `share` of them."""
        of_owner = self.places[owner] + self.players[owner]
        return len(self) + self.players.total() < most and of_owner < share

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Take a place for the length of the block; the caller has checked that there is one."""
        self.places[owner] += 1
        self._metrics.viewers.set(len(self))
        try:
            yield
        finally:
            self.places[owner] -= 1
            if not self.places[owner]:
                del self.places[owner]
            self._metrics.viewers.set(len(self))

    def join(self, key: Key, viewer: Viewer) -> Channel:
        channel = self.follow(key)
        channel.add(viewer)
        return channel

    def leave(self, channel: Channel, viewer: Viewer) -> None:
        channel.viewers.pop(viewer, None)
        self._drop_unused(channel)

    def follow(self, key: Key) -> Channel:
        """The channel of a name, which is followed from now on."""
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = Channel(key, self._metrics)
            self.publisher.follow(key)
        return channel

    def captions(self, key: Key) -> CaptionSegments:
        """The caption segments of a name, for a player. The caller has checked that there is a place.

        Only a published name takes a place, because a client with a key can make up names. Of the names of an owner
        that are not published, the gateway follows those that players asked for last, so that their captions are
        complete when a session is published under them.
        """
        channel = self.follow(key)
        is_new = channel.segments is None
        segments = channel.captions()
        if is_new and channel.transcript.is_live:
            self.players[key[0]] += 1
        elif is_new:
            awaited = [
                other
                for other in self.channels.values()
                if other.key[0] == key[0] and not other.viewers and not other.transcript.is_live
            ]
            awaited.sort(key=lambda other: other.captions_until)
            for other in awaited[: max(0, len(awaited) - MAX_AWAITED_NAMES)]:
                other.captions_until = 0.0
                self._drop_unused(other)
        return segments

    def _drop_unused(self, channel: Channel) -> None:
        now = asyncio.get_running_loop().time()
        if not channel.viewers and channel.captions_until <= now and self.channels.get(channel.key) is channel:
            del self.channels[channel.key]
            self.publisher.unfollow(channel.key)

    def on_current(self, key: Key, state: State) -> None:
        channel = self.channels.get(key)
        if channel is not None:
            channel.load(state)

    def on_update(self, key: Key, update: Update) -> None:
        channel = self.channels.get(key)
        if channel is not None:
            channel.update(update)

    async def run(self) -> None:
        """Tick until cancelled."""
        clock = asyncio.get_running_loop().time
        kept_alive = clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = clock()
            keeps_alive = now - kept_alive >= KEEPALIVE_S
            if keeps_alive:
                kept_alive = now
            self.players = Counter(
                channel.key[0]
                for channel in self.channels.values()
                if channel.captions_until > now and channel.transcript.is_live
            )
            await self._tick(now, keeps_alive)

    async def _tick(self, now: float, keeps_alive: bool) -> None:
        """Serve all viewers of all names, some at a time."""
        count = 0
        for channel in list(self.channels.values()):
            for viewer in tuple(channel.viewers):
                try:
                    channel.tick(viewer, now, keeps_alive)
                except Exception:
                    log.exception("a tick of a viewer of %s failed", channel.key[1])
                count += 1
                if count % WRITTEN_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._drop_unused(channel)

    async def close(self) -> None:
        """End all viewers: the server stops."""
        self.is_closing = True
        for channel in list(self.channels.values()):
            for viewer in tuple(channel.viewers):
                viewer.close(RESTARTING)
            await channel.close()


# Captions for HLS players


# Seconds of a segment.
SEGMENT_S = 6.0
# Seconds after its end at which a segment is listed.
HOLD_S = 6.0
# Segments in a playlist, and seconds for which a segment can still be read.
LISTED_SEGMENTS = 5
KEPT_S = 10 * SEGMENT_S
# Words of one session that are kept; beyond this number the oldest are dropped.
MAX_SEGMENT_WORDS = 2000
# A session's audio counts as live while the first words of a turn arrive at most this many seconds after they are
# spoken. If they arrive later, the client has paused or sends a recording, and the turn counts as spoken when it
# arrives.
LATE_S = 10.0
# Words that would be shown later than this many seconds from now are dropped: a recording that is sent faster than it
# was spoken must not delay what comes after it.
AHEAD_S = 10.0
# If the server's clock goes back by no more than this many seconds, it is being corrected (NTP), and the captions
# continue.
CLOCK_CORRECTION_S = 1.0
# Ticks per second of the clock of MPEG-TS video.
TICKS = 90_000


@dataclass(frozen=True, slots=True)
class _SpokenWord:
    """A word with its start and end on the server's clock; `turn` is the id of its turn."""

    turn: str
    text: str
    start: float
    end: float


class CaptionSegments:
    """The words of one published session by the time at which they were spoken."""

    def __init__(self) -> None:
        self._words: deque[_SpokenWord] = deque()
        # The time of the session's first sample, estimated from when its words arrive; and the same for each open turn,
        # so that the words of a turn stay together.
        self._session_began: float | None = None
        self._turns: dict[str, float] = {}
        # The text of segments that were requested: it never changes afterwards.
        self._served: dict[int, str] = {}
        # The latest time of the server's clock so far.
        self._now = 0.0

    def update(self, update: Update, now: float) -> None:
        """Apply an update of the session; `now` is the time of day."""
        self._follow_clock(now)
        match update:
            case Begun():
                self._session_began = None
                self._turns.clear()
            case Added(item, _, words):
                self._add_words(item, words, now)
            case Finished(line):
                self._finish(line, now)
            case _:
                pass

    def _follow_clock(self, now: float) -> None:
        """Begin anew if the clock was set back: the words so far would lie in the future, and new ones behind them."""
        if now >= self._now - CLOCK_CORRECTION_S:
            self._now = max(self._now, now)
        else:
            self._words.clear()
            self._turns.clear()
            self._served.clear()
            self._session_began = None
            self._now = now

    def _finish(self, line: Line, now: float) -> None:
        """Replace the words of a turn by its final ones, except in segments that were given out."""
        self._words = deque(word for word in self._words if word.turn != line.id)
        self._add_words(line.id, line.words, now)
        self._turns.pop(line.id, None)

    def _add_words(self, item: str, words: list[Word], now: float) -> None:
        if not words:
            return
        if item not in self._turns:
            self._turns[item] = self._session_began = self._session_start(words, now)
            if len(self._turns) > MAX_OPEN_TURNS:
                del self._turns[next(iter(self._turns))]
        began = self._turns[item]
        spoken = (_SpokenWord(item, text, began + start, began + end) for text, start, end in words)
        self._words.extend(word for word in spoken if word.end <= now + AHEAD_S)
        while len(self._words) > MAX_SEGMENT_WORDS or (self._words and self._words[0].end < now - 2 * KEPT_S):
            self._words.popleft()

    def _session_start(self, words: list[Word], now: float) -> float:
        """Where the session began, for a turn with these first words; no turn begins before the last one has ended."""
        last = words[-1][2]
        late_s = math.inf if self._session_began is None else now - (self._session_began + last)
        began = self._session_began if self._session_began is not None and 0 <= late_s <= LATE_S else now - last
        return max(began, max((word.end for word in self._words), default=0.0) - words[0][1])

    def newest(self, now: float) -> int:
        """The number of the newest segment that is listed."""
        return math.floor((now - HOLD_S) / SEGMENT_S) - 1

    def playlist(self, now: float, query: str = "") -> str:
        """The media playlist; `query` is added to the address of each segment."""
        newest = self.newest(now)
        first = newest - LISTED_SEGMENTS + 1
        lines = [
            "#EXTM3U",
            "#EXT-X-VERSION:3",
            f"#EXT-X-TARGETDURATION:{math.ceil(SEGMENT_S)}",
            f"#EXT-X-MEDIA-SEQUENCE:{first}",
        ]
        for number in range(first, newest + 1):
            lines += [
                f"#EXT-X-PROGRAM-DATE-TIME:{date_text(number * SEGMENT_S)}",
                f"#EXTINF:{SEGMENT_S:.3f},",
                f"captions/{number}.vtt{query}",
            ]
        return "\n".join(lines) + "\n"

    def segment(self, number: int, now: float) -> str | None:
        """The captions of a segment; None if it is not listed yet, or not kept any more."""
        self._follow_clock(now)
        newest = self.newest(now)
        if not newest - KEPT_S / SEGMENT_S < number <= newest:
            return None
        if number not in self._served:
            self._served = {key: text for key, text in self._served.items() if key > newest - KEPT_S / SEGMENT_S}
            self._served[number] = self._write_segment(number)
        return self._served[number]

    def _write_segment(self, number: int) -> str:
        begins, ends = number * SEGMENT_S, (number + 1) * SEGMENT_S
        words = [word for word in self._words if begins <= word.start < ends]
        # Times in the file begin at 0; the map says where that is on the clock of the stream.
        ticks = round(begins * TICKS) % 2**33
        blocks = [f"WEBVTT\nX-TIMESTAMP-MAP=MPEGTS:{ticks},LOCAL:00:00:00.000\n"]
        for cue in _cues(words):
            start, end = cue[0].start - begins, min(max(word.end for word in cue), ends) - begins
            text = escaped_cue(" ".join(word.text for word in cue))
            blocks.append(f"{vtt_time(start)} --> {vtt_time(max(end, start + 0.1))}\n{text}\n")
        return "\n".join(blocks)


def _cues(words: list[_SpokenWord]) -> list[list[_SpokenWord]]:
    """Words of one turn in each cue, as many as fit into two lines, in the order in which the cues begin."""
    cues: list[list[_SpokenWord]] = []
    length = 0
    turns = list(dict.fromkeys(word.turn for word in words))
    for word in sorted(words, key=lambda word: (turns.index(word.turn), word.start)):
        if not cues or cues[-1][-1].turn != word.turn or length + len(word.text) + 1 > MAX_SUBTITLE_CHARACTERS:
            cues.append([])
            length = 0
        cues[-1].append(word)
        length += len(word.text) + 1
    return sorted(cues, key=lambda cue: cue[0].start)
