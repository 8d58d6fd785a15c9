"""The client that must not notice anything: it speaks at the pace of speech, over and over, and writes down the words.

A program of its own, so that what an attacker does in its own process does not slow it: each line of its output is the
report of one session.

    python -m tests.attacks.good_client WS_URL KEY
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
import wave
from dataclasses import asdict, dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from engine.weights.store import pull

SECONDS = 9.0
CHUNK_S = 0.1
TRAILING_S = 0.8
# A new session may have to wait until places that an attacker took are free again; that is admission, and no harm.
PATIENCE_S = 20.0
TRANSCRIPTION = "conversation.item.input_audio_transcription"
SESSION = {
    "type": "transcription",
    "audio": {"input": {"format": {"type": "audio/pcm", "rate": 48_000}, "turn_detection": None}},
    "include": ["item.input_audio_transcription.words"],
}


@dataclass
class Lap:
    """One session from beginning to end."""

    began: float = 0.0
    ended: float = 0.0
    # Each word with its times, as the server gave them.
    words: list[tuple[str, float, float]] = field(default_factory=list)
    # Seconds from the moment a word had been sent to the moment it came back.
    delays: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def speech(seconds: float = SECONDS) -> bytes:
    """The first seconds of the sample recording, then a pause that ends the last turn."""
    with wave.open(str(pull("sample-two-cities"))) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (48_000, 2, 1)
        return file.readframes(int(seconds * 48_000)) + bytes(2 * int(TRAILING_S * 48_000))


async def one_lap(url: str, key: str, audio: bytes) -> Lap:
    socket = await _connected(url, key)
    lap = Lap(began=time.time())
    async with socket:
        await socket.send(json.dumps({"type": "session.update", "session": SESSION}))
        started = time.perf_counter()
        reader = asyncio.create_task(_read(socket, lap, started))
        chunk = 2 * int(CHUNK_S * 48_000)
        for number, start in enumerate(range(0, len(audio), chunk)):
            await asyncio.sleep(started + number * CHUNK_S - time.perf_counter())
            piece = base64.b64encode(audio[start : start + chunk]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": piece}))
        # Answers come in order: the one to `clear` says that the commit was answered too.
        await socket.send(json.dumps({"type": "input_audio_buffer.commit", "event_id": "last"}))
        await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
        await asyncio.wait_for(reader, 60)
    lap.ended = time.time()
    return lap


async def _connected(url: str, key: str) -> ClientConnection:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            headers = {"Authorization": f"Bearer {key}"}
            return await connect(url, additional_headers=headers, compression=None, proxy=None, open_timeout=30)
        except InvalidStatus as error:
            if error.response.status_code not in (429, 503) or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def _read(socket: ClientConnection, lap: Lap, started: float) -> None:
    open_items: set[str] = set()
    cleared = False
    async for frame in socket:
        event = json.loads(frame)
        kind = event["type"]
        if kind == f"{TRANSCRIPTION}.delta":
            now = time.perf_counter() - started
            for word in event["words"]:
                lap.words.append((word["word"], word["start"], word["end"]))
                lap.delays.append(now - word["end"])
        elif kind == "input_audio_buffer.committed":
            open_items.add(event["item_id"])
        elif kind == f"{TRANSCRIPTION}.completed":
            open_items.discard(event["item_id"])
        elif kind == "input_audio_buffer.cleared":
            cleared = True
        elif kind == f"{TRANSCRIPTION}.failed" or (kind == "error" and event["error"]["event_id"] != "last"):
            # Only the last commit may find nothing left to commit.
            lap.problems.append(str(event))
        if cleared and not open_items:
            return
    lap.problems.append(f"the server closed the socket: {socket.close_code} {socket.close_reason}")


async def main(url: str, key: str) -> None:
    audio = speech()
    while True:
        try:
            lap = await one_lap(url, key, audio)
        except Exception as error:
            lap = Lap(ended=time.time(), problems=[f"{type(error).__name__}: {error}"])
        report: dict[str, Any] = asdict(lap)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
