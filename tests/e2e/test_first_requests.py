"""All code is loaded before the first request of a kind: an import would block the event loop and all clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# In a process of its own, because tests and their clients have loaded most of it here.
PROGRAM = """
import asyncio, json, sys
from tests.e2e.conftest import running_server

BODY = b"--b\\r\\nContent-Disposition: form-data; name=\\"file\\"; filename=\\"a.wav\\"\\r\\n\\r\\n" + bytes(3 * 2**20)
BODY += b"\\r\\n--b--\\r\\n"
HEAD = "%s %s HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n"
HEAD += "Content-Length: %d\\r\\nContent-Type: %s\\r\\n\\r\\n"
FORM, JSON = "multipart/form-data; boundary=b", "application/json"

async def ask(port, method, path, body=b"", kind=JSON):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((HEAD % (method, path, len(body), kind)).encode() + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 "), answer
    return answer

async def main():
    async with running_server() as running:
        before = set(sys.modules)
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/render"):
            await ask(running.port, "POST", path, BODY, FORM)
        await ask(running.port, "POST", "/v1/listen", bytes(3 * 2**20), "audio/wav")
        await ask(running.port, "POST", "/v1/realtime/client_secrets", b"{}")
        for path in ("/", "/metrics", "/capacity", "/ready", "/v1/models", "/v1/realtime", "/nothing"):
            await ask(running.port, "GET", path)
        loaded = sorted(set(sys.modules) - before)
    # Decoders are loaded in the threads that decode.
    print(json.dumps([name for name in loaded if not name.startswith("av.")]))

asyncio.run(main())
"""


def test_no_request_loads_code_while_others_are_served() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "[]"
