"""Captions of a published session for HLS players: a playlist of WebVTT segments, and the text of each segment.

`Audience` (`viewers.py`) keeps one `CaptionSegments` for a name while players ask for it. A segment covers `SEGMENT_S`
of the server's clock. The playlist has the date of each segment, so a player can show the captions with the video
stream of another server. A word belongs to the segment in which it begins. Words arrive after they are spoken, and
finals later still, so a segment is listed only `HOLD_S` after its end.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from realtime.serving.published_transcript import MAX_OPEN_TURNS, Added, Begun, Finished, Line, Update, Word
from realtime.session.words import MAX_SUBTITLE_CHARACTERS, escaped_cue, vtt_time
from realtime.text_values import date_text

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
