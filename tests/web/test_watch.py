"""The page of an audience in a real browser: it follows, pauses, comes back, and is an overlay for OBS."""

from __future__ import annotations

import httpx

from tests.e2e.raw_client import greeted_client
from tests.e2e.viewing import publish, say
from tests.realtime.gateway_doubles import FakeEngine
from tests.web.conftest import PageServer, page_server
from tests.web.devtools import Page
from tests.web.line import line_to
from tests.web.page_server import WORDS

KEY = "the-key-of-the-speaker"
LINES = "[...document.querySelectorAll('#lines p')].map((p) => p.textContent)"
# Pixels below what is shown.
GAP = """(({ scrollHeight, scrollTop, clientHeight }) =>
  scrollHeight - scrollTop - clientHeight)(document.querySelector('#captions'))"""
STATE = "document.querySelector('#state-text').textContent"


def socket_of(server: PageServer) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/realtime"


async def test_the_page_follows_pauses_and_comes_back(page: Page, server: PageServer) -> None:
    await page.before_load("Object.defineProperty(navigator, 'languages', { get: () => ['de-AT', 'en'] })")
    async with line_to(server.port) as line:
        await page.open(f"{line.url}watch/talk")
        # Before the speaker comes; in the language of the browser.
        await page.until(f"{STATE} === 'Noch spricht niemand'")
        assert await page.evaluate("document.documentElement.lang") == "de"
        async with greeted_client(socket_of(server), max_queue=None) as client:
            await publish(client, "talk")
            await page.until(f"{STATE} === 'Live'")
            await say(client, 1.3)
            await page.until(f"{LINES}.length === 1 && !document.querySelector('#lines .open')")
            first = await page.evaluate(f"{LINES}[0]")
            assert first == " ".join(WORDS[:3])
            # Paused, nothing moves; then everything is there.
            await page.press(" ")
            await say(client, 1.7)
            await page.until("document.querySelector('#announcer').textContent.startsWith('Boats')")
            assert await page.evaluate(LINES) == [first]
            await page.click("#pause")
            await page.until(f"{LINES}.length === 2")
            # A lost line: the page comes back and misses nothing.
            line.cut()
            await page.until(f"{STATE}.startsWith('Verbindung verloren')")
            await say(client, 1.3)
            await page.until(f"{STATE} === 'Live' && {LINES}.length === 3")
            size = "parseFloat(getComputedStyle(document.querySelector('#lines p')).fontSize)"
            before = await page.evaluate(size)
            await page.press("+")
            await page.until(f"{size} > {before}")
            # A reader who scrolls back is left alone, and finds the way to the newest words.
            for _ in range(12):
                await say(client, 1.3)
            await page.until(f"{LINES}.length === 15")
            await page.until(f"{GAP} < 5")
            await page.evaluate("document.querySelector('#captions').scrollTop = 0")
            await page.until("!document.querySelector('#follow').hidden")
            await say(client, 1.3)
            await page.until(f"{LINES}.length === 16")
            assert await page.evaluate("document.querySelector('#captions').scrollTop") == 0
            await page.click("#follow")
            await page.until(f"{GAP} < 5 && document.querySelector('#follow').hidden")
        await page.until(f"{STATE} === 'Die Sitzung ist beendet'")


async def test_a_link_opens_the_page_until_it_is_revoked(page: Page) -> None:
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with page_server(FakeEngine(words=WORDS), KEY) as server, httpx.AsyncClient(trust_env=False) as http:
        links = f"{server.url}v1/sessions/talk/links"
        made = (await http.post(links, headers=bearer)).json()
        async with greeted_client(socket_of(server), additional_headers=bearer, max_queue=None) as client:
            await publish(client, "talk")
            await say(client)
            await page.open(server.url.rstrip("/") + made["watch"])
            await page.until(f"{STATE} === 'Live' && {LINES}.length === 1")
            assert (await http.delete(f"{links}/{made['id']}", headers=bearer)).status_code == 200
            await page.until(f"{STATE} === 'This link is not valid any more'")
            # The words that were shown stay.
            assert len(await page.evaluate(LINES)) == 1
        # The browser logs the refusals.
        page.errors.clear()


async def test_the_overlay_shows_the_newest_words_on_nothing(page: Page, server: PageServer) -> None:
    async with greeted_client(socket_of(server), max_queue=None) as client:
        await publish(client, "talk")
        await page.open(f"{server.url}watch/talk?overlay&lines=2&size=6")
        for count in range(1, 4):
            await say(client)
            await page.until(f"{LINES}.length === {min(2, count)} && !document.querySelector('#lines .open')")
        style = "getComputedStyle(document.querySelector({!r})).{}"
        for element in ("html", "body"):
            assert await page.evaluate(style.format(element, "backgroundColor")) == "rgba(0, 0, 0, 0)"
        assert await page.evaluate(style.format(".watch-bar", "display")) == "none"
        assert await page.evaluate(style.format("#lines p", "color")) == "rgb(255, 255, 255)"
        bottom = "document.querySelector('#lines p:last-child').getBoundingClientRect().bottom"
        assert 0 < await page.evaluate(bottom) <= await page.evaluate("innerHeight")


async def test_words_are_text_and_never_markup(page: Page) -> None:
    words = ["<img", "src=x", "onerror=document.title='bad'>"]
    async with (
        page_server(FakeEngine(words=words)) as server,
        greeted_client(socket_of(server), max_queue=None) as client,
    ):
        await publish(client, "talk")
        await page.open(f"{server.url}watch/talk")
        await say(client)
        await page.until(f"{LINES}[0]?.startsWith('<img')")
        assert await page.evaluate("document.title") == "talk"
