"""Random and mutated messages over real sockets: no crash, no leak, and a good session beside them is unharmed.

`TICKERTAPE_FUZZ_MESSAGES=100000 python -m pytest tests/e2e/test_fuzz.py -s --timeout 3600` is the long form.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import os
import random
import statistics
import sys
import time
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from realtime.host import SessionHost
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.realtime.gateway_doubles import FakeEngine, silence, tone

MESSAGES = int(os.environ.get("TICKERTAPE_FUZZ_MESSAGES", "3000"))
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


async def good_turns(client: Any, until: asyncio.Task[Any], at_least: int) -> list[float]:
    """Speak turn after turn; how long each took from its last audio to its transcript."""
    delays: list[float] = []
    while len(delays) < at_least or not until.done():
        await client.append(tone(0.5))
        await asyncio.sleep(0.01)
        await client.append(silence(0.7))
        begun = time.perf_counter()
        transcript = (await client.until(COMPLETED))[-1]["transcript"]
        delays.append(time.perf_counter() - begun)
        assert 1 <= len(transcript.split()) <= 2
    return delays


@pytest.mark.timeout(3600)
async def test_fuzz_harms_nobody_and_leaves_nothing_behind(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    engine = FakeEngine(slots=500)
    async with serve(engine, session={"resume_s": 0.5}) as running, greeted_client(running.ws) as good:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        calm = await good_turns(good, done, 20)  # type: ignore[arg-type]
        share = -(-MESSAGES // SOCKETS)
        attacks = asyncio.gather(*(attack(running.ws, share, seed) for seed in range(SOCKETS)))
        under_fire = await good_turns(good, attacks, 20)  # type: ignore[arg-type]
        sent = sum(await attacks)
        afterwards = await good_turns(good, done, 20)  # type: ignore[arg-type]
        await asyncio.sleep(1.2)
        assert len(running.gateway.sessions) == 1 and len(engine.active) == 1
        tasks = [task.get_name() for task in asyncio.all_tasks()]
        assert len([name for name in tasks if name.startswith(("writer", "reader", "session", "results"))]) == 4
        gc.collect()
        assert sum(isinstance(item, SessionHost) for item in gc.get_objects()) == 1
    crashes = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not crashes, crashes[0].getMessage()
    assert sent >= MESSAGES
    # A deaf or blocked loop would show here; the clients share the loop and the machine, so the bound is loose.
    assert statistics.median(afterwards) < 5 * statistics.median(calm) + 0.05
    medians = [statistics.median(delays) * 1000 for delays in (calm, under_fire, afterwards)]
    before, during, after = medians
    sys.stdout.write(
        f"fuzz: {sent} messages; final after {before:.1f} ms before, {during:.1f} during, {after:.1f} after\n"
    )
