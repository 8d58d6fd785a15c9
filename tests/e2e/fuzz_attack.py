"""The attacking side of the fuzz test, as a program of its own: python -m tests.e2e.fuzz_attack URL MESSAGES."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.realtime.gateway_doubles import silence, tone

SOCKETS = 6
MESSAGES_PER_SOCKET = 150

AUDIO = base64.b64encode(tone(0.05) + silence(0.01)).decode()
SEEDS: list[dict[str, Any]] = [
    {"type": "input_audio_buffer.append", "audio": AUDIO},
    {"type": "input_audio_buffer.append", "audio": AUDIO[:-3], "event_id": "e"},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.commit", "final": True},
    {"type": "input_audio_buffer.clear", "event_id": "x"},
    {"type": "input_audio_buffer.gap", "duration_ms": 500},
    {"type": "session.update", "model": "fake-model"},
    {"type": "session.update", "session": {"type": "transcription", "audio": {"input": {"turn_detection": None}}}},
    {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}}},
    {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}},
    {
        "type": "session.update",
        "session": {"audio": {"input": {"format": {"type": "audio/webm", "transport": "binary"}}}},
    },
    {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}},
    {"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": "de", "delay": 3}}}}},
    {"type": "session.update", "session": {"include": ["session.resume", "input_audio_buffer.acks"]}},
    {"type": "transcription_session.update", "session": {"input_audio_format": "g711_alaw"}},
    {"type": "response.create"},
]
STRANGE: list[Any] = [None, True, -1, 0, 1e308, 2**63, "", "\x00", "é", "\ud83d\ude00", [], {}, [[]], "a" * 5000, 0.5]


def mutate(value: Any, dice: random.Random) -> Any:
    """The same shape with something wrong in it."""
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = dice.choice(list(changed))
        action = dice.random()
        if action < 0.15:
            del changed[key]
        elif action < 0.25:
            changed[dice.choice(["type", "session", "audio", "model", "final", "x"])] = dice.choice(STRANGE)
        else:
            changed[key] = mutate(changed[key], dice)
        return changed
    return dice.choice(STRANGE)


def message(dice: random.Random) -> str | bytes:
    kind = dice.random()
    seed = dice.choice(SEEDS)
    if kind < 0.35:
        return json.dumps(seed)
    if kind < 0.7:
        for _ in range(dice.randint(1, 3)):
            seed = mutate(seed, dice)
        return json.dumps(seed)
    if kind < 0.85:
        text = list(json.dumps(seed)[:2000])
        for _ in range(dice.randint(1, 8)):
            text[dice.randrange(len(text))] = chr(dice.randrange(32, 0x2FF))
        return "".join(text[: dice.randint(1, len(text))])
    if kind < 0.95:
        return dice.randbytes(dice.randint(0, 4000))
    return "[" * dice.randint(1, 3000) + '{"type":' * dice.randint(0, 50)


async def attack(url: str, count: int, seed: int) -> int:
    """Send `count` messages over one socket after another; how many were sent."""
    dice = random.Random(seed)
    sent = 0
    while sent < count:
        try:
            async with connect(url, compression=None, open_timeout=30, max_queue=None) as socket:
                reader = asyncio.create_task(read_all(socket))
                for _ in range(min(dice.randint(1, 2 * MESSAGES_PER_SOCKET), count - sent)):
                    await socket.send(message(dice))
                    sent += 1
                if dice.random() < 0.5:
                    socket.transport.abort()
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        except ConnectionClosed:
            continue
    return sent


async def read_all(socket: ClientConnection) -> None:
    """What comes back must be JSON objects with a type, and never a stack trace."""
    async for frame in socket:
        assert isinstance(frame, str) and "Traceback" not in frame
        assert isinstance(json.loads(frame)["type"], str)


async def attack_all(url: str, messages: int) -> int:
    share = -(-messages // SOCKETS)
    return sum(await asyncio.gather(*(attack(url, share, seed) for seed in range(SOCKETS))))


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(attack_all(sys.argv[1], int(sys.argv[2])))}\n")
