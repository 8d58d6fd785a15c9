"""The fuzzing side for sockets and requests, as a program of its own: its work must not slow the client beside it.

    python -m tests.attacks.fuzz_wires PORT KEY MESSAGES SEED

Prints how many messages were sent, and every find: an answer that says that something broke here, or an answer that is
none. A find has the seed and the number of its conversation, which is all that is needed to have it again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from random import Random
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from tests.attacks.fuzz_grammar import DIALECTS, http_request, socket_message

SOCKETS = 12
REQUESTS_PER_CONVERSATION = 20
BROKEN = 1011
ANSWER_S = 60.0


@dataclass
class Fuzzer:
    port: int
    key: str
    seed: str
    sent: int = 0
    conversations: int = 0
    finds: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, messages: int) -> None:
        async def one() -> None:
            while self.sent < messages:
                self.conversations += 1
                await self.converse(self.conversations)

        await asyncio.gather(*(one() for _ in range(SOCKETS)))

    async def converse(self, number: int) -> None:
        """The conversation of this number, alone; what is sent depends on nothing else."""
        dice = Random(f"{self.seed}/{number}")
        try:
            async with asyncio.timeout(ANSWER_S):
                if dice.random() < 0.85:
                    await self._socket(number, dice)
                else:
                    await self._requests(number, dice)
        except TimeoutError:
            self._found(number, "nothing came back", "")

    async def _socket(self, number: int, dice: Random) -> None:
        name = dice.choice(list(DIALECTS))
        path, seeds = DIALECTS[name]
        headers = {"Authorization": f"Bearer {self.key}"}
        if name == "beta" and dice.random() < 0.5:
            headers["OpenAI-Beta"] = "realtime=v1"
        last = ""
        try:
            async with connect(
                f"ws://127.0.0.1:{self.port}{path}",
                additional_headers=headers,
                compression=None,
                proxy=None,
                open_timeout=ANSWER_S,
                close_timeout=0.2,
                max_queue=None,
            ) as socket:
                reader = asyncio.create_task(self._read(number, socket))
                for _ in range(dice.randint(1, 250)):
                    message = socket_message(seeds, dice)
                    last = repr(message[:200])
                    await socket.send(message)
                    self.sent += 1
                if dice.random() < 0.5:
                    socket.transport.abort()
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code == BROKEN:
                self._found(number, "closed with 1011", last)
        except InvalidStatus as refused:
            if refused.response.status_code not in (429, 503):
                self._found(number, f"refused with {refused.response.status_code}", path)
            await asyncio.sleep(0.05)
        except (OSError, InvalidHandshake, EOFError) as error:
            self._found(number, repr(error), path)

    async def _read(self, number: int, socket: ClientConnection) -> None:
        """What comes back must be JSON objects with a type, and never a stack trace."""
        async for frame in socket:
            event = json.loads(frame)
            if not isinstance(event, dict) or not isinstance(event.get("type"), str) or "Traceback" in str(frame):
                self._found(number, "no event", str(frame)[:300])

    async def _requests(self, number: int, dice: Random) -> None:
        for _ in range(REQUESTS_PER_CONVERSATION):
            request = http_request(self.key, dice)
            self.sent += 1
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(request)
                # A request may be spoiled so that the server waits for the rest of it.
                writer.write_eof()
                answer = await reader.read()
                writer.transport.abort()
            except OSError:
                # The server had enough of it before all was said.
                continue
            status = answer[9:12]
            if b"Traceback" in answer or (status[:1] == b"5" and status not in (b"501", b"503", b"505")):
                self._found(number, f"answered with {status.decode()}", repr(request[:600]))

    def _found(self, number: int, what: str, last: str) -> None:
        self.finds.append({"seed": self.seed, "conversation": number, "what": what, "last": last})


async def main(port: int, key: str, messages: int, seed: str) -> None:
    fuzzer = Fuzzer(port, key, seed)
    await fuzzer.run(messages)
    sys.stdout.write(json.dumps({"sent": fuzzer.sent, "finds": fuzzer.finds[:20]}) + "\n")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
