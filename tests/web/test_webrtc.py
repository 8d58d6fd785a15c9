"""WebRTC in a real browser: the snippet of docs/clients.md publishes a microphone by WHIP, and words come back."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.snippets import block
from tests.lossy_line import lossy_line
from tests.waiting import PATIENCE_S
from tests.web.conftest import page_server, real_page
from tests.web.devtools import Page
from tests.web.page_server import WORDS

KEY = "a-long-secret"
# Keeps the events where the test can see them, and the connection where it can be closed.
KEPT = "globalThis.heard = []; globalThis.peer = peer; events.onmessage = ({data}) => heard.push(JSON.parse(data))\n"
FINALS = (
    "heard.filter(event => event.type.endsWith('transcription.completed')).map(event => event.transcript).join(' ')"
)


async def until_no_session(url: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client, asyncio.timeout(PATIENCE_S):
        while (await client.get(f"{url}capacity")).json()["sessions"]:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.1)


async def check_words(page: Page) -> None:
    """Words of the recording come. Its beginning may be missing: it plays while the call connects."""
    await page.until(f"{FINALS}.split(' ').length >= 40", 120)
    said = await page.evaluate(FINALS)
    assert len({"wisdom", "season", "epoch", "hope", "winter"} & set(re.findall("[a-z]+", said.lower()))) >= 2, said


async def begin(page: Page, place: str) -> None:
    snippet = block("docs/clients.md", "js webrtc").at(place).replace("Bearer KEY", f"Bearer {KEY}")
    lines = snippet.replace("events.onmessage", KEPT + "// ", 1)
    await page.evaluate(f"(async () => {{ {lines} }})()")


async def test_the_snippet_of_the_documentation_publishes_a_microphone_and_reads_words(page: Page) -> None:
    async with page_server(None, KEY) as server:
        await page.open(server.url)
        await begin(page, server.url.removeprefix("http://").rstrip("/"))
        await page.until(f"{FINALS}.includes({WORDS[2]!r})", 60)
        said = (await page.evaluate(FINALS)).split()
        assert said == WORDS[: len(said)]
        assert await page.evaluate("heard[0].type") == "session.created"
        await page.evaluate("peer.close()")
        await until_no_session(server.url)


@pytest.mark.timeout(300)
async def test_a_person_reads_aloud_and_the_words_come_back(chromium: str, tmp_path: Path) -> None:
    async with real_page(chromium, tmp_path) as (page, url):
        await begin(page, url.removeprefix("http://").rstrip("/"))
        await check_words(page)


ANSWER = """(async () => {
    const peer = globalThis.peer = new RTCPeerConnection(), heard = globalThis.heard = []
    const microphone = await navigator.mediaDevices.getUserMedia({audio: true})
    microphone.getTracks().forEach(track => peer.addTrack(track))
    peer.createDataChannel("oai-events").onmessage = ({data}) => heard.push(JSON.parse(data))
    await peer.setLocalDescription(await peer.createOffer())
    const headers = {"Content-Type": "application/sdp"}
    return (await fetch("v1/whip", {method: "POST", headers, body: peer.localDescription.sdp})).text()
})()"""


@pytest.mark.timeout(300)
async def test_what_a_bad_network_loses_is_marked_and_the_words_go_on(chromium: str, tmp_path: Path) -> None:
    """Every tenth datagram is lost in both directions, and others overtake each other."""
    async with real_page(chromium, tmp_path) as (page, _), lossy_line(loss=0.1, jitter_s=0.06) as line:
        answer = line.through(await page.evaluate(ANSWER))
        await page.evaluate(f"peer.setRemoteDescription({{type: 'answer', sdp: {json.dumps(answer)}}})")
        await check_words(page)
        gaps = await page.evaluate("heard.filter(event => event.type === 'call.gap')")
        assert len(gaps) >= 10 and all(gap["audio_start_ms"] < gap["audio_end_ms"] for gap in gaps)
        assert line.lost >= 10
        assert await page.evaluate("peer.connectionState") == "connected"
