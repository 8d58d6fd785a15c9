"""The way between page and server breaks or clogs: the page says so, and no word is lost or said twice."""

from __future__ import annotations

import asyncio

from tests.web.conftest import PageServer, page_server
from tests.web.devtools import Page
from tests.web.line import line_to
from tests.web.page_server import SENTENCES
from tests.web.test_page import DONE, STATE, TURNS, stop, texts

WARNED = "document.querySelector('#waiting-box').classList.contains('warning')"


async def test_cut_line_is_resumed_without_losing_a_word(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.click("#listen")
        await page.until(f"{DONE}.length === 1")
        await page.until(f"{TURNS}[1]?.querySelector('.text').textContent.length > 5")
        line.cut()
        await page.until(f"/Server lost, still recording: retrying in \\d+ s/.test({STATE})")
        await page.until(f"{STATE} === 'Resumed, nothing lost'")
        await page.until(f"{DONE}.length === 3", 20)
        await stop(page)
    assert await texts(page) == list(SENTENCES[:3])
    assert server.capacity()["sessions"] == 0


async def test_retry_button_does_not_wait(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.click("#listen")
        await page.until(f"{STATE} === 'Listening'")
        line.cut()
        await page.until("!document.querySelector('#retry').hidden")
        await page.click("#retry")
        await page.until(f"{STATE} === 'Resumed, nothing lost'", 2)
        await stop(page)


async def test_clogged_line_is_shown_and_then_caught_up(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.click("#listen")
        await page.until(f"{TURNS}[0]?.querySelector('.text').textContent.length > 5")
        line.clog()
        await page.until(WARNED)
        await asyncio.sleep(3)
        line.clear()
        await page.until(f"!{WARNED}")
        await page.until(f"{DONE}.length === 3", 20)
        await stop(page)
    assert await texts(page) == list(SENTENCES[:3])


async def test_stopping_without_a_server_keeps_the_text_and_says_what_is_missing(page: Page) -> None:
    with page_server() as server:
        await page.open(server.url)
        await page.click("#listen")
        await page.until(f"{TURNS}[0]?.querySelector('.text').textContent.length > 5")
        server.kill()
        await page.until(WARNED)
        await stop(page)
    states = await page.evaluate(f"{TURNS}.map((li) => [li.dataset.state, li.querySelector('.text').textContent])")
    assert [state for state, _ in states] == ["cut", "note"]
    assert SENTENCES[0].startswith(states[0][1]) and "were not transcribed" in states[1][1]
    await page.click("[data-format=txt]")
    assert await page.downloaded("txt") == states[0][1] + "\n"
