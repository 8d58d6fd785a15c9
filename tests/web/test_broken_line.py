"""The way between page and server breaks or clogs: the page says so, and no word is lost or said twice.

Where words are compared with what was spoken, a file is played at its own pace: it takes the same way as a microphone,
and a browser on a busy machine loses nothing of it.
"""

from __future__ import annotations

from pathlib import Path

from tests.web.conftest import PageServer
from tests.web.devtools import Page
from tests.web.line import line_to
from tests.web.page_server import SENTENCES
from tests.web.shown import (
    DONE,
    OPEN_TEXT,
    STATE,
    check_order,
    check_said,
    listen,
    play_at_pace,
    stop,
    texts,
    turns,
)

WARNED = "document.querySelector('#waiting-box').classList.contains('warning')"
WAITING = "parseFloat(document.querySelector('#waiting').textContent)"


async def test_cut_line_is_resumed_without_losing_a_word(page: Page, server: PageServer, talk: Path) -> None:
    async with line_to(server.port) as line:
        await play_at_pace(page, line.url, talk)
        await page.until(f"{DONE}.length >= 1")
        await page.until(OPEN_TEXT)
        line.cut()
        await page.until(f"/Server lost: retrying in \\d+ s/.test({STATE})")
        await page.until(f"{STATE} === 'Resumed, nothing lost'")
        await page.until(f"{STATE} === 'Ready'", 30)
    assert await texts(page) == list(SENTENCES[:3])
    check_order(await turns(page))
    assert server.engine.active == set()


async def test_retry_button_does_not_wait(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        line.cut()
        await page.until(f"/Server lost, still recording: retrying in \\d+ s/.test({STATE})")
        assert await page.evaluate(f"document.querySelector('#retry').click(), {STATE}") == "Server lost, reconnecting…"
        await page.until(f"{STATE} === 'Resumed, nothing lost'")
        await stop(page)
    check_said(await turns(page))


async def test_clogged_line_is_shown_and_then_caught_up(page: Page, server: PageServer, talk: Path) -> None:
    async with line_to(server.port) as line:
        await play_at_pace(page, line.url, talk)
        await page.until(OPEN_TEXT)
        line.clog()
        await page.until(f"{WAITING} > 2")
        line.clear()
        await page.until(f"{STATE} === 'Ready'", 30)
    assert await texts(page) == list(SENTENCES[:3])


async def test_slow_server_is_shown_while_somebody_speaks(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        line.clog()
        await page.until(WARNED)
        line.clear()
        await page.until(f"!{WARNED}")
        await stop(page)
    check_said(await turns(page))


async def test_stopping_without_a_server_keeps_the_text_and_says_what_is_missing(
    page: Page, server: PageServer
) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.until(OPEN_TEXT)
        line.close_for_good()
        await page.until(WARNED)
        before = [turn.text for turn in await turns(page) if turn.text]
        await stop(page)
    *said, note = await turns(page)
    assert [turn.text for turn in said] == before and {turn.state for turn in said} <= {"done", "cut"}
    assert note.state == "note" and "were not transcribed" in note.text
    await page.click("#save")
    await page.click("[data-format=txt]")
    assert await page.downloaded("txt") == "".join(f"{text}\n" for text in before)
