"""Uses the official openai package, unmodified, with your own server: a file in one call, and a live session.

pip install "openai[realtime]"
python examples/openai_sdk.py talk.wav [http://127.0.0.1:8000/v1]
"""

import asyncio
import base64
import os
import sys
import wave
from pathlib import Path

from openai import AsyncOpenAI

CHUNK_MS = 100


async def main(path: str, base_url: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=os.environ.get("TICKERTAPE_API_KEY", "none"))

    answer = await client.audio.transcriptions.create(model="default", file=Path(path))
    print("as a file:", answer.text)

    with wave.open(path) as file:
        if file.getsampwidth() != 2 or file.getnchannels() != 1:
            sys.exit(f"{path} must be 16-bit mono for the live part")
        rate, audio = file.getframerate(), file.readframes(file.getnframes())
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        audio_input = {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": {"type": "server_vad"}}
        await connection.session.update(session={"type": "transcription", "audio": {"input": audio_input}})
        sending = asyncio.create_task(speak(connection, audio, rate))
        unfinished, cleared = set(), False
        print("live: ", end="")
        async for event in connection:
            if event.type == "input_audio_buffer.committed":
                unfinished.add(event.item_id)
            elif event.type == "conversation.item.input_audio_transcription.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "conversation.item.input_audio_transcription.completed":
                unfinished.discard(event.item_id)
                print(end=" ")
            elif event.type == "input_audio_buffer.cleared":
                cleared = True
            elif event.type == "error" and event.error.code != "input_audio_buffer_commit_empty":
                sys.exit(f"error: {event.error.message}")
            if cleared and not unfinished:
                break
        await sending
        print()


async def speak(connection, audio: bytes, rate: int) -> None:
    size = rate * CHUNK_MS // 1000 * 2
    for start in range(0, len(audio), size):
        await connection.input_audio_buffer.append(audio=base64.b64encode(audio[start : start + size]).decode())
        await asyncio.sleep(CHUNK_MS / 1000)
    await connection.input_audio_buffer.commit()
    await connection.input_audio_buffer.clear()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1"))
