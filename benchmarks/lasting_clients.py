"""One process of clients that outlive their connections, for `benchmarks.gpu_server` and `benchmarks.workers`.

Each speaks for so long at the pace of speech, goes on with its session when a connection is lost, and waits for its
last words. Orders come on stdin; when all is prepared, `ready` goes to stdout; then the moments to begin come, and the
findings go out at the end, all of it line by line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speech_sound import SAMPLE_RATE, speech
from realtime.client import lasting_session
from realtime.client.lasting_session import LastingSession
from realtime.client.wire_client import COMPLETED, CannotConnect, SessionWishes

PACKET_S = 0.08


class Speaker(LastingSession):
    """A client that speaks at the pace of speech and waits for the last word."""

    def __init__(self, url: str, audio: bytes) -> None:
        detection = {"type": "server_vad", "silence_duration_ms": 500}
        super().__init__(url, None, SessionWishes(SAMPLE_RATE, detection))
        self.events: list[dict[str, Any]] = []
        self.resumed_s: list[float] = []
        self._audio = audio
        self._lost_at: float | None = None

    async def speak(self) -> None:
        telling = asyncio.create_task(self.run(self.events.append, self._line))
        await self._say()
        await telling

    async def _say(self) -> None:
        size, due = int(PACKET_S * SAMPLE_RATE) * 2, time.perf_counter()
        for start in range(0, len(self._audio), size):
            due += PACKET_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.append(self._audio[start : start + size])
        self.finish()

    def _line(self, text: str) -> None:
        """The line is lost, or is back."""
        if text:
            self._lost_at = self._lost_at or time.perf_counter()
        elif self._lost_at is not None:
            self.resumed_s.append(time.perf_counter() - self._lost_at)
            self._lost_at = None

    @property
    def transcripts(self) -> list[str]:
        return [event["transcript"] for event in self.events if event["type"] == COMPLETED]

    @property
    def wrong_numbers(self) -> int:
        numbers = [event["seq"] for event in self.events if "seq" in event]
        return sum(number != place for place, number in enumerate(numbers, 1))

    @property
    def wrong_items(self) -> int:
        done = [event["item_id"] for event in self.events if event["type"] == COMPLETED]
        committed = [event["item_id"] for event in self.events if event["type"] == "input_audio_buffer.committed"]
        return len(done) - len(set(done)) + len(set(committed) ^ set(done))


@dataclass(frozen=True)
class Orders:
    """What one process of clients is to do. Each session speaks a part of the sound of its own, the same every time."""

    url: str
    sessions: list[int]
    seconds: float
    recording: str | None


@dataclass
class Findings:
    """Of all sessions of a process, in the order of `sessions`."""

    texts: list[str] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    wrong_numbers: int = 0
    wrong_items: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of sessions to which something happened. Seconds from each loss of a connection to going on."""

    what: str
    sessions: int
    losses: int
    resumed_p50_s: float
    resumed_max_s: float
    # Words of all sessions, and those that differ from a run in which nothing happened.
    words: int
    words_that_differ: int
    sessions_that_differ: int
    wrong_numbers: int
    wrong_items: int
    failures: list[str]


def differing_words(texts: Sequence[str], calm: Sequence[str]) -> list[int]:
    """Of each text, how many words are not those of the other."""
    found = []
    for text, other in zip(texts, calm, strict=True):
        left, right = text.split(), other.split()
        same = sum(block.size for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks())
        found.append(max(len(left), len(right)) - same)
    return found


def moved(what: str, findings: Sequence[dict[str, Any]], calm: Sequence[str]) -> Moved:
    texts = [text for found in findings for text in found["texts"]]
    waits = sorted(wait for found in findings for wait in found["resumed_s"]) or [0.0]
    differing = differing_words(texts, calm)
    return Moved(
        what,
        len(texts),
        sum(len(found["resumed_s"]) for found in findings),
        waits[len(waits) // 2],
        waits[-1],
        sum(len(text.split()) for text in texts),
        sum(differing),
        sum(map(bool, differing)),
        sum(found["wrong_numbers"] for found in findings),
        sum(found["wrong_items"] for found in findings),
        [text for found in findings for text in found["failures"]][:20],
    )


def own_part(sound: bytes, number: int, seconds: float) -> bytes:
    """So many seconds of the sound, from a place of this session's own on."""
    samples = len(sound) // 2
    start = int(np.random.default_rng(number).integers(0, samples))
    wanted = 2 * int(seconds * SAMPLE_RATE)
    around = sound[2 * start :] + sound
    while len(around) < wanted:
        around += sound
    return around[:wanted]


async def play(orders: Orders, sound: bytes, begins: float, join_s: float, all_sessions: int) -> Findings:
    findings = Findings()
    speakers = [Speaker(orders.url, own_part(sound, number, orders.seconds)) for number in orders.sessions]

    async def one(number: int, speaker: Speaker) -> None:
        await asyncio.sleep(max(0.0, begins + number / all_sessions * join_s - time.monotonic()))
        try:
            await speaker.speak()
        except CannotConnect as error:
            findings.failures.append(str(error))

    await asyncio.gather(*map(one, orders.sessions, speakers))
    for speaker in speakers:
        findings.texts.append(" ".join(speaker.transcripts))
        findings.resumed_s += speaker.resumed_s
        findings.wrong_numbers += speaker.wrong_numbers
        findings.wrong_items += speaker.wrong_items
    return findings


def main() -> None:
    orders = Orders(**json.loads(sys.stdin.readline()))
    samples = speech(None if orders.recording is None else Path(orders.recording))
    sound = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    # People look again at once; it is the server's time that is measured.
    lasting_session.FIRST_WAIT_S = 0.1
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    moments = json.loads(sys.stdin.readline())
    findings = asyncio.run(play(orders, sound, **moments))
    sys.stdout.write(json.dumps(asdict(findings)) + "\n")


if __name__ == "__main__":
    main()
