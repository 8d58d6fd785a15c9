"""`examples/browser.html`, opened from disk in a real browser with a microphone that plays a recording."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.snippets import block
from tests.web.conftest import PageServer, page_server
from tests.web.devtools import Page
from tests.web.page_server import WORDS

EXAMPLE = (Path(__file__).parents[2] / "examples" / "browser.html").as_uri()
STATE = "document.querySelector('#state').textContent"
CAPTIONS = "document.querySelector('#captions').innerText"


async def open_example(page: Page, server: PageServer, key: str = "") -> None:
    await page.open(EXAMPLE)
    address = server.url.replace("http", "ws", 1) + "v1/realtime"
    await page.evaluate(f"document.querySelector('#server').value = {address!r}")
    await page.evaluate(f"document.querySelector('#key').value = {key!r}")


async def test_wrong_key_is_no_connection(page: Page) -> None:
    async with page_server(None, "a-long-secret") as server:
        await open_example(page, server, "another-secret")
        await page.click("#start")
        await page.until("document.querySelector('#start').textContent === 'Start' && " + STATE)
        await open_example(page, server, "a-long-secret")
        await page.click("#start")
        await page.until(f"{STATE} === 'listening'")


async def test_a_server_without_keys_does_not_listen_to_a_page_that_it_was_not_told_of(
    page: Page, server: PageServer
) -> None:
    await open_example(page, server)
    await page.click("#start")
    await page.until("document.querySelector('#start').textContent === 'Start' && " + STATE)
    assert not server.engine.opened


async def test_captions_appear_while_the_microphone_plays(page: Page) -> None:
    # To a browser, all pages that are opened from disk have this origin.
    async with page_server(origins=("null",)) as server:
        await open_example(page, server)
        await page.click("#start")
        await page.until("document.querySelector('#captions span')?.textContent")
        await page.until(f"{CAPTIONS}.includes({WORDS[4]!r})")
        said = (await page.evaluate(CAPTIONS)).split()
        assert said == WORDS[: len(said)]
        await page.click("#start")
        await page.until(f"{STATE} === 'stopped'")


async def test_the_snippet_of_the_documentation_opens_a_session_with_a_client_secret(page: Page) -> None:
    async with page_server(None, "a-long-secret") as server:
        await page.open(server.url)
        place = server.url.removeprefix("http://").rstrip("/")
        snippet = block("docs/clients.md", "js browser").at(place).replace("Bearer KEY", "Bearer a-long-secret")
        notes = "window.told = []; console.log = (text) => window.told.push(text);"
        await page.evaluate(f"(async () => {{ {notes}\n{snippet} }})()")
        await page.until("window.told.includes('session.created')")
