"""Live captions of your microphone from any server that speaks the OpenAI realtime wire.

pip install websockets sounddevice
python examples/microphone.py [ws://127.0.0.1:8000/v1/realtime]
"""

import asyncio
import base64
import json
import os
import sys

import sounddevice
from websockets.asyncio.client import connect

RATE = 24_000  # the rate of OpenAI's own servers
CHUNK_SAMPLES = RATE // 10
# Audio that may wait while the network is slow: ten seconds. Then the oldest is dropped, so that captions stay live.
MAX_WAITING = 100
TRANSCRIPTION = "conversation.item.input_audio_transcription"


async def main(url: str) -> None:
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)

    def put(chunk: bytes) -> None:
        if chunks.full():
            chunks.get_nowait()
            print("\n[the server is too slow: a tenth of a second was lost]", file=sys.stderr)
        chunks.put_nowait(chunk)

    def on_sound(data, frames, times, status) -> None:
        """Called on a separate thread: passes the bytes to the event loop."""
        loop.call_soon_threadsafe(put, bytes(data))

    key = os.environ.get("TICKERTAPE_API_KEY", "none")
    async with connect(url, additional_headers={"Authorization": f"Bearer {key}"}, proxy=None) as socket:
        audio_input = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": {"type": "server_vad"}}
        session = {"type": "transcription", "audio": {"input": audio_input}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        printing = asyncio.create_task(show(socket))
        microphone = sounddevice.RawInputStream(
            samplerate=RATE, channels=1, dtype="int16", blocksize=CHUNK_SAMPLES, callback=on_sound
        )
        with microphone:
            print("speak; Ctrl-C stops", file=sys.stderr)
            while not printing.done():
                audio = base64.b64encode(await chunks.get()).decode()
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await printing


async def show(socket) -> None:
    async for frame in socket:
        event = json.loads(frame)
        if event["type"] == f"{TRANSCRIPTION}.delta":
            print(event["delta"], end="", flush=True)
        elif event["type"] == f"{TRANSCRIPTION}.completed":
            print()
        elif event["type"] == "error":
            sys.exit(f"error: {event['error']['message']}")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000/v1/realtime"))
    except KeyboardInterrupt:
        print()
