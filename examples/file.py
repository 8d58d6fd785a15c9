"""Streams a WAV file to a server at the pace of the recording, and prints captions as they arrive.

pip install websockets
python examples/file.py talk.wav [ws://127.0.0.1:8000/v1/realtime]
"""

import asyncio
import base64
import json
import os
import sys
import time
import wave

from websockets.asyncio.client import connect

CHUNK_MS = 100
TRANSCRIPTION = "conversation.item.input_audio_transcription"


async def main(path: str, url: str) -> None:
    with wave.open(path) as file:
        if file.getsampwidth() != 2 or file.getnchannels() != 1:
            sys.exit(f"{path} must be 16-bit mono; convert it: ffmpeg -i {path} -ac 1 -c:a pcm_s16le out.wav")
        rate, audio = file.getframerate(), file.readframes(file.getnframes())
    key = os.environ.get("TICKERTAPE_API_KEY", "none")
    async with connect(url, additional_headers={"Authorization": f"Bearer {key}"}, proxy=None) as socket:
        # Any rate from 8 to 48 kHz; word times are an extension that other servers ignore.
        audio_input = {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": {"type": "server_vad"}}
        session = {
            "type": "transcription",
            "audio": {"input": audio_input},
            "include": ["item.input_audio_transcription.words"],
        }
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        began = time.perf_counter()
        sending = asyncio.create_task(send(socket, audio, rate, began))
        await receive(socket, began)
        await sending


async def send(socket, audio: bytes, rate: int, began: float) -> None:
    size = rate * CHUNK_MS // 1000 * 2
    for start in range(0, len(audio), size):
        chunk = audio[start : start + size]
        # Sleep to an absolute schedule, so that small delays do not add up.
        due = began + (start + len(chunk)) / 2 / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await append(socket, chunk)
    # Finish the last turn. The answer to "clear" comes after the answer to "commit".
    await socket.send(json.dumps({"type": "input_audio_buffer.commit", "event_id": "last"}))
    await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))


async def append(socket, chunk: bytes) -> None:
    audio = base64.b64encode(chunk).decode()
    await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))


async def receive(socket, began: float) -> None:
    unfinished, cleared = set(), False
    async for frame in socket:
        event = json.loads(frame)
        match event["type"]:
            case "input_audio_buffer.committed":
                unfinished.add(event["item_id"])
            case kind if kind == f"{TRANSCRIPTION}.delta":
                print(event["delta"], end="", flush=True)
            case kind if kind == f"{TRANSCRIPTION}.completed":
                unfinished.discard(event["item_id"])
                words = event.get("words") or []
                lag = (
                    f"   [{time.perf_counter() - began - words[-1]['end']:.2f} s after the last word]" if words else ""
                )
                print(lag)
            case kind if kind == f"{TRANSCRIPTION}.failed":
                unfinished.discard(event["item_id"])
                print(f"\na turn failed: {event['error'].get('message')}", file=sys.stderr)
            case "input_audio_buffer.cleared":
                cleared = True
            case "error" if event["error"].get("event_id") != "last":
                sys.exit(f"error: {event['error']['message']}")
        if cleared and not unfinished:
            return


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "ws://127.0.0.1:8000/v1/realtime"))
