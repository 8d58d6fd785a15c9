"""The receiver of docs/webhooks.md, run as it is, with the signing secret that the page computes."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.media_streams import free_port
from tests.realtime.gateway_doubles import silence, tone

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "webhooks.md").read_text()
SECRET = "what-webhooks-are-signed-with"


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Programs are started by the test."""
    yield


async def test_receiver_of_the_page_verifies_what_the_server_sends(serve: Serve) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^    (python -c .*) SECRET KEY$", PAGE, re.MULTILINE)
    computing = [*shlex.split(line)[1:], SECRET, ""]
    made = await asyncio.create_subprocess_exec(sys.executable, *computing, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    secret = (await made.communicate())[0].decode().strip()
    assert secret.startswith("whsec_")
    port = free_port()
    receiving = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(port), secret,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert receiving.stdout is not None
    try:
        hooks = {"on_final": (f"http://127.0.0.1:{port}/hook",), "secret": SECRET}
        async with serve(webhooks=hooks) as running, greeted_client(running.ws) as client:
            await client.append(tone(1.0) + silence(1.0))
            text = (await client.until(COMPLETED))[-1]["transcript"]
            said = await asyncio.wait_for(receiving.stdout.readline(), 60)
            assert json.loads(said.decode().replace("'", '"'))["data"]["text"] == text
            async with httpx.AsyncClient() as http:
                forged = {"webhook-id": "x", "webhook-timestamp": "1700000000", "webhook-signature": "v1,AAAA"}
                answer = await http.post(f"http://127.0.0.1:{port}/", content=b"{}", headers=forged)
                assert answer.status_code == 401
            assert b"wrong signature" in await asyncio.wait_for(receiving.stdout.readline(), 60)
    finally:
        receiving.kill()
        await receiving.wait()
