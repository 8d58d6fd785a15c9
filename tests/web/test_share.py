"""A link for viewers, made on the page: only where the server allows it, and ended with the session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from realtime.app import listening
from realtime.config import AuthConfig, Config, LimitsConfig, ServerConfig
from tests.realtime.gateway_doubles import FakeEngine
from tests.web.conftest import PageServer
from tests.web.devtools import Page, open_page
from tests.web.page_server import WORDS
from tests.web.shown import DONE, STATE, choose, listen, send_file, stop

KEY = "the-key-of-the-speaker"
ADDRESS = "document.querySelector('#share-made:not([hidden]) #share-address')?.value"
REFUSED = "document.querySelector('#share-problem').textContent"
OFFERED = "!document.querySelector('#share').hidden"
LINES = "[...document.querySelectorAll('#lines p')].map((p) => p.textContent)"
VIEWED = "document.querySelector('#state-text').textContent"


@pytest.fixture
async def keyed() -> AsyncIterator[PageServer]:
    config = Config(server=ServerConfig(port=0, drain_s=0.0), auth=AuthConfig(keys=(KEY,)))
    engine = FakeEngine(words=WORDS)
    async with listening(engine, config) as running:
        yield PageServer(f"{running.url}/", running.port, engine)


@pytest.fixture
async def private() -> AsyncIterator[PageServer]:
    config = Config(server=ServerConfig(port=0, drain_s=0.0), limits=LimitsConfig(viewers=0))
    engine = FakeEngine(words=WORDS)
    async with listening(engine, config) as running:
        yield PageServer(f"{running.url}/", running.port, engine)


async def test_a_server_that_does_not_publish_is_not_asked(page: Page, private: PageServer) -> None:
    await listen(page, private.url)
    await page.until(f"{DONE}.length >= 1")
    assert not await page.evaluate(OFFERED)
    await stop(page)


async def test_a_file_that_is_sent_whole_is_not_shared(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await page.evaluate(
        """(() => {
          window.offered = false;
          const look = () => (window.offered ||= !document.querySelector('#share').hidden);
          new MutationObserver(look).observe(document.querySelector('#share'), { attributes: true });
        })()"""
    )
    await send_file(page, talk)
    assert await page.evaluate("window.offered") is False


async def test_a_viewer_reads_along_until_sharing_stops(
    page: Page, keyed: PageServer, browser: str, tmp_path: Path
) -> None:
    await page.open(keyed.url)
    await choose(page, "#key", KEY)
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening' && {OFFERED}")
    await page.click("#share")
    # Nothing is public before somebody presses the button.
    assert await page.evaluate(ADDRESS) is None
    await page.click("#share-begin")
    address = await page.until(ADDRESS)
    assert address.startswith(f"{keyed.url}watch/") and "#vl_" in address and KEY not in address
    await page.click("#share-copy")
    await page.until(f"navigator.clipboard.readText().then((text) => text === {address!r})")
    await page.until("document.querySelector('#share').textContent === 'Shared'")
    async with open_page(browser, tmp_path) as viewer:
        await viewer.open(address)
        await viewer.until(f"{VIEWED} === 'Live'")
        await viewer.until(f"{LINES}.length > 0", 60)
        await page.click("#share-stop")
        await page.until("!document.querySelector('#share-begin').hidden")
        assert await page.evaluate(REFUSED) == ""
        await viewer.until(f"{VIEWED} === 'This link is not valid any more'")
        assert not viewer.errors
    await page.press("Escape")
    await stop(page)


async def test_a_key_that_may_not_publish_says_why(page: Page, keyed: PageServer) -> None:
    """The page was given a client secret, which makes no links and publishes under no name of its own."""
    await page.open(keyed.url)
    secret = await page.evaluate(
        f"""fetch("v1/realtime/client_secrets", {{ method: "POST", headers: {{ Authorization: "Bearer {KEY}" }} }})
          .then((answer) => answer.json()).then(({{ value }}) => value)"""
    )
    await choose(page, "#key", secret)
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening' && {OFFERED}")
    await page.click("#share")
    await page.click("#share-begin")
    assert await page.until(REFUSED)
    assert await page.evaluate(ADDRESS) is None
    await page.press("Escape")
    # The session goes on.
    await page.until(f"{DONE}.length >= 1")
    await stop(page)


async def test_sharing_ends_with_the_session(page: Page, server: PageServer) -> None:
    await listen(page, server.url)
    await page.until(OFFERED)
    await page.click("#share")
    await page.click("#share-begin")
    first = await page.until(ADDRESS)
    await page.press("Escape")
    await stop(page)
    assert not await page.evaluate(OFFERED)
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening' && {OFFERED}")
    assert await page.evaluate("document.querySelector('#share').textContent") == "Share"
    await page.click("#share")
    assert await page.evaluate(ADDRESS) is None
    await page.click("#share-begin")
    # Nobody who has the old link reads the new session.
    assert (await page.until(ADDRESS)).split("#")[0] != first.split("#")[0]
    await page.press("Escape")
    await stop(page)
