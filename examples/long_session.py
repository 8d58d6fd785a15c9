"""A session of hours or days that survives lost connections: it reconnects, resumes and sends missing audio again.

    pip install websockets
    arecord -q -t raw -f S16_LE -r 16000 -c 1 | python examples/long_session.py [ws://127.0.0.1:8000/v1/realtime]

Reads raw 16-bit mono at 16 kHz from standard input. Resuming is an extension: the server numbers its events (`seq`),
keeps them for a while, and says how many samples it has received, so that nothing is lost and nothing is sent twice.
"""

import asyncio
import base64
import json
import os
import sys
from collections import deque

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

RATE = 16_000
CHUNK_SAMPLES = RATE // 10
KEEP_SECONDS = 120
LONGEST_WAIT_S = 30.0
TRANSCRIPTION = "conversation.item.input_audio_transcription"


class LongSession:
    def __init__(self, url: str) -> None:
        self.url = url
        self.token: str | None = None
        self.seq = 0
        # Audio that the server may not have yet; audio older than KEEP_SECONDS is dropped.
        self.unconfirmed: deque[bytes] = deque(maxlen=KEEP_SECONDS * 10)
        self.first_kept = 0  # the sample at which `unconfirmed` begins
        self.news = asyncio.Condition()
        self.ended = False

    async def record(self) -> None:
        """Reads standard input into memory, with or without a connection."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
        while chunk := await reader.read(2 * CHUNK_SAMPLES):
            async with self.news:
                if len(self.unconfirmed) == self.unconfirmed.maxlen:
                    self.first_kept += len(self.unconfirmed[0]) // 2
                self.unconfirmed.append(chunk)
                self.news.notify_all()
        async with self.news:
            self.ended = True
            self.news.notify_all()

    async def run(self) -> None:
        recording = asyncio.create_task(self.record())
        wait_s = 0.5
        while True:
            try:
                await self.connected()
                break
            except InvalidStatus as error:
                status = error.response.status_code
                if status in (401, 403):
                    sys.exit(f"the server refuses: HTTP {status}")
                if status in (404, 410):
                    self.token = None  # too late to resume: continue in a new session
                reason = f"HTTP {status}"
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            print(f"\n[connection lost: {reason}; again in {wait_s:g} s]", file=sys.stderr)
            await asyncio.sleep(wait_s)
            wait_s = 0.5 if self.token else min(2 * wait_s, LONGEST_WAIT_S)
        await recording

    async def connected(self) -> None:
        query = f"?resume={self.token}&after={self.seq}" if self.token else "?intent=transcription"
        key = os.environ.get("TICKERTAPE_API_KEY", "none")
        async with connect(
            self.url + query, additional_headers={"Authorization": f"Bearer {key}"}, proxy=None, ping_timeout=20
        ) as socket:
            greeting = json.loads(await socket.recv())
            if greeting["type"] == "session.resumed":
                self.confirm(greeting["received_samples"])
            else:
                # A new session counts its samples from zero: it begins with the kept audio.
                self.seq, self.first_kept = 0, 0
                audio_input = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": {"type": "server_vad"}}
                include = ["session.resume", "input_audio_buffer.acks"]
                session = {"type": "transcription", "audio": {"input": audio_input}, "include": include}
                await socket.send(json.dumps({"type": "session.update", "session": session}))
            sending = asyncio.create_task(self.send(socket))
            try:
                await self.receive(socket)
            finally:
                sending.cancel()

    def confirm(self, samples: int) -> None:
        """Drops audio before this sample: the server has it."""
        while self.unconfirmed and self.first_kept + len(self.unconfirmed[0]) // 2 <= samples:
            self.first_kept += len(self.unconfirmed.popleft()) // 2
        if self.unconfirmed and samples > self.first_kept:
            self.unconfirmed[0] = self.unconfirmed[0][2 * (samples - self.first_kept) :]
            self.first_kept = samples

    async def send(self, socket) -> None:
        next_sample = self.first_kept
        while True:
            async with self.news:
                await self.news.wait_for(lambda sent=next_sample: self.ended or self.end_of_kept() > sent)
                start, waiting = self.first_kept, list(self.unconfirmed)
                finished = self.ended
            if start > next_sample:
                # Dropped audio is replaced by declared silence of the same length, so that times stay right.
                await socket.send(json.dumps({"type": "input_audio_buffer.gap", "samples": start - next_sample}))
                next_sample = start
            for chunk in waiting:
                end = start + len(chunk) // 2
                if end > next_sample:
                    fresh = chunk[2 * max(0, next_sample - start) :]
                    audio = base64.b64encode(fresh).decode()
                    await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                    next_sample = end
                start = end
            if finished and next_sample >= self.end_of_kept():
                await socket.send(json.dumps({"type": "input_audio_buffer.commit", "event_id": "last"}))
                await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
                return

    def end_of_kept(self) -> int:
        return self.first_kept + sum(len(chunk) // 2 for chunk in self.unconfirmed)

    async def receive(self, socket) -> None:
        unfinished, cleared = set(), False
        async for frame in socket:
            event = json.loads(frame)
            self.seq = event.get("seq", self.seq)
            match event["type"]:
                case "session.updated":
                    self.token = (event["session"].get("resume") or {}).get("token")
                case "input_audio_buffer.acknowledged":
                    self.confirm(event["samples"])
                case "input_audio_buffer.committed":
                    unfinished.add(event["item_id"])
                case kind if kind == f"{TRANSCRIPTION}.delta":
                    print(event["delta"], end="", flush=True)
                case kind if kind in (f"{TRANSCRIPTION}.completed", f"{TRANSCRIPTION}.failed"):
                    unfinished.discard(event["item_id"])
                    print()
                case "input_audio_buffer.cleared":
                    cleared = True
                case "error" if event["error"].get("event_id") != "last":
                    print(f"\n[{event['error']['message']}]", file=sys.stderr)
            if cleared and not unfinished:
                return


if __name__ == "__main__":
    asyncio.run(LongSession(sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000/v1/realtime").run())
