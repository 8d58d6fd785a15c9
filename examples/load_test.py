"""A small load test: N clients play the same WAV at real-time pace, and the time to final is measured.

    pip install websockets
    python examples/load_test.py talk.wav 8 [ws://127.0.0.1:8000/v1/realtime]

For a search for the largest load, word error rates, and a generator in processes of its own: `tickertape bench`.
"""

import asyncio
import base64
import json
import os
import random
import sys
import time
import wave

from websockets.asyncio.client import connect

CHUNK_MS = 100
SILENCE_MS = 500
TRANSCRIPTION = "conversation.item.input_audio_transcription"


async def client(url: str, audio: bytes, rate: int, finals: list[float]) -> None:
    # Clients start at different times, so that they do not all send at the same moment.
    await asyncio.sleep(random.uniform(0, 2))
    key = os.environ.get("TICKERTAPE_API_KEY", "none")
    async with connect(url, additional_headers={"Authorization": f"Bearer {key}"}, proxy=None) as socket:
        turns = {"type": "server_vad", "silence_duration_ms": SILENCE_MS}
        audio_input = {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": turns}
        session = {"type": "transcription", "audio": {"input": audio_input}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        began = time.perf_counter()
        sending = asyncio.create_task(play(socket, audio, rate, began))
        speech_ends: dict[str, float] = {}
        unfinished, cleared = set(), False
        async for frame in socket:
            event = json.loads(frame)
            match event["type"]:
                case "input_audio_buffer.speech_stopped":
                    # The turn ended before the silence by which the server detected its end.
                    speech_ends[event["item_id"]] = began + (event["audio_end_ms"] - SILENCE_MS) / 1000
                case "input_audio_buffer.committed":
                    unfinished.add(event["item_id"])
                case kind if kind == f"{TRANSCRIPTION}.completed":
                    unfinished.discard(event["item_id"])
                    if event["item_id"] in speech_ends:
                        finals.append(time.perf_counter() - speech_ends[event["item_id"]])
                case "input_audio_buffer.cleared":
                    cleared = True
            if cleared and not unfinished:
                break
        await sending


async def play(socket, audio: bytes, rate: int, began: float) -> None:
    size = rate * CHUNK_MS // 1000 * 2
    for start in range(0, len(audio), size):
        chunk = audio[start : start + size]
        await asyncio.sleep(max(0.0, began + (start + len(chunk)) / 2 / rate - time.perf_counter()))
        encoded = base64.b64encode(chunk).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": encoded}))
    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
    await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))


async def main(path: str, count: int, url: str) -> None:
    with wave.open(path) as file:
        if file.getsampwidth() != 2 or file.getnchannels() != 1:
            sys.exit(f"{path} must be 16-bit mono")
        rate, audio = file.getframerate(), file.readframes(file.getnframes())
    finals: list[float] = []
    outcomes = await asyncio.gather(*(client(url, audio, rate, finals) for _ in range(count)), return_exceptions=True)
    failed = [outcome for outcome in outcomes if outcome is not None]
    finals.sort()
    print(f"{count} streams, {len(failed)} failed, {len(finals)} finals")
    if finals:
        p50, p95 = (finals[int((len(finals) - 1) * share)] for share in (0.5, 0.95))
        print(f"time to final: p50 {p50:.2f} s, p95 {p95:.2f} s, at most {finals[-1]:.2f} s")
    for error in failed[:3]:
        print(f"failed: {error!r}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["ws://127.0.0.1:8000/v1/realtime"])[0]))
