"""Finding a text in all transcripts that the browser keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import PageServer
from tests.web.devtools import Page, open_page
from tests.web.shown import RESTORED, ROWS, TURNS, keep_transcripts, send_file, stop, transcript

PLACES = "[...document.querySelectorAll('#library-list .place')].map((place) => place.textContent)"
FOUND = "document.querySelector('#library-found').textContent"
NONE = "document.querySelector('#library-none:not([hidden])')?.textContent"


async def keep(page: Page, url: str, transcripts: list[dict[str, Any]]) -> None:
    """Transcripts in the browser's store, the newest last: `{name, texts}`."""
    kept = [
        transcript(one["texts"], 1000 - number, name=one["name"]) for number, one in enumerate(transcripts, start=1)
    ]
    await keep_transcripts(page, url, *kept)
    await page.open(url)


async def look_for(page: Page, text: str) -> None:
    # Before it is open, keys go to the page.
    await page.until("document.querySelector('#library').open")
    await page.evaluate("document.querySelector('#library-field').select()")
    await page.type(text)


async def test_a_text_is_found_in_all_transcripts_and_shown_where_it_stands(page: Page, server: PageServer) -> None:
    long = [f"turn {number}." for number in range(200)]
    long[7] = "Here the Harbour (old) is named."
    await keep(
        page,
        server.url,
        [
            {"name": "", "texts": long},
            {"name": "Harbour <b>plans</b>", "texts": ["Something else."]},
            {"name": "", "texts": ["the harbour, the harbour, the harbour and", "the harbour"]},
        ],
    )
    await page.until(RESTORED)
    await page.click("#open-library")
    await page.until(f"{ROWS}.length === 3")
    await look_for(page, "HARBOUR")
    await page.until(f"{ROWS}.length === 3 && {FOUND} === '5 places in 3 transcripts'")
    # Some places of each, and the name too; nothing of it is markup.
    assert await page.evaluate(f"{ROWS}.map((row) => row.querySelectorAll('.place').length)") == [3, 0, 1]
    assert await page.evaluate(f"{ROWS}[0].textContent.includes('and 1 more')")
    assert await page.evaluate("document.querySelectorAll('#library-list b').length") == 0
    # Signs that mean something to a pattern are only signs.
    await look_for(page, "(old")
    await page.until(f"{PLACES}.length === 1")
    assert await page.evaluate(PLACES) == ["Here the Harbour (old) is named."]
    assert await page.evaluate("document.querySelector('#library-list mark').textContent") == "(old"
    await look_for(page, "no such thing")
    await page.until(f"{NONE} === 'Not found in any transcript.' && {ROWS}.length === 0")
    await look_for(page, "harbour (old)")
    await page.until(f"{PLACES}.length === 1")
    await page.click("#library-list .place")
    # The other transcript is on the page, at this place, with the words marked.
    await page.until(f"!document.querySelector('#library').open && {TURNS}.some((li) => li.turn.number === 7)")
    await page.until("document.querySelector('#search-count').textContent === '1 of 1'")
    box = f"{TURNS}.find((li) => li.turn.number === 7).getBoundingClientRect().top"
    assert 0 < await page.evaluate(box) < 800
    # In the transcript on the page too.
    await page.press("Escape")
    await page.click("#open-library")
    await look_for(page, "turn 199")
    await page.until(f"{PLACES}.length === 1")
    await page.click("#library-list .place")
    await page.until(f"!document.querySelector('#library').open && {TURNS}.some((li) => li.turn.number === 199)")


async def test_a_place_is_not_opened_while_something_is_heard(page: Page, server: PageServer) -> None:
    await keep(page, server.url, [{"name": "", "texts": ["the harbour"]}])
    await page.until(RESTORED)
    await page.click("#afresh")
    await page.until(f"{TURNS}.length === 0")
    await page.click("#listen")
    await page.until(f"{TURNS}.length > 0")
    await page.click("#open-library")
    await page.until("document.querySelector('#library').open")
    await look_for(page, "harbour")
    await page.until(f"{PLACES}.length === 1")
    await page.click("#library-list .place")
    await page.until(f"{ROWS}[0].textContent.includes('Stop listening first.')")
    await page.press("Escape")
    await stop(page)


async def test_a_browser_that_keeps_nothing_offers_no_search(page: Page, server: PageServer, talk: Path) -> None:
    await page.before_load("IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); }")
    await page.open(server.url)
    await send_file(page, talk)
    await page.click("#open-library")
    await page.until(f"{NONE} === 'This browser keeps no captions for this page.'")
    assert await page.evaluate("document.querySelector('#library-field').hidden")


@pytest.mark.parametrize("count", [50, 5000])
async def test_the_store_is_read_once_however_much_is_typed(page: Page, server: PageServer, count: int) -> None:
    texts = [f"turn {number} of many" for number in range(count)]
    await keep(page, server.url, [{"name": "", "texts": texts}, {"name": "", "texts": ["another"]}])
    await page.until(RESTORED)
    await page.click("#open-library")
    await page.until(f"{ROWS}.length === 2")
    await page.evaluate(
        """(() => {
          window.reads = 0;
          const { getAll } = IDBObjectStore.prototype;
          IDBObjectStore.prototype.getAll = function (...all) { window.reads += 1; return getAll.apply(this, all); };
        })()"""
    )
    await page.evaluate("document.querySelector('#library-field').focus()")
    for letter in "turn 4":
        await page.type(letter)
    await page.until(f"{FOUND}.endsWith('in 1 transcript') && {PLACES}.every((text) => text.includes('turn 4'))")
    # Once for each transcript, and few rows for many places.
    assert await page.evaluate("window.reads") == 2
    assert await page.evaluate("document.querySelectorAll('#library-list *').length") < 30


async def test_a_transcript_is_renamed_in_the_list(
    page: Page, server: PageServer, browser: str, tmp_path: Path
) -> None:
    await keep(page, server.url, [{"name": "", "texts": ["the older one"]}, {"name": "", "texts": ["on the page"]}])
    await page.until(RESTORED)
    await page.click("#open-library")
    await page.until(f"{ROWS}.length === 2")
    await page.evaluate("(window.prompt = () => '  <b>Old</b>\\n days ', undefined)")
    for row, title in ((1, "#name"), (2, "")):
        await page.click(f"#library-list li:nth-child({row}) .quiet")
        await page.until(f"{ROWS}[{row - 1}].querySelector('.title').textContent === '<b>Old</b> days'")
        if title:
            assert await page.evaluate(f"document.querySelector({title!r}).value") == "<b>Old</b> days"
    # The words stay, and a window that has it open is not disturbed.
    assert await page.evaluate(f"{TURNS}[0].turn.text") == "on the page"
    async with open_page(browser, tmp_path, page.context) as second:
        await second.open(server.url)
        await second.click("#open-library")
        await second.until(f"{ROWS}.length === 2")
        await second.evaluate("(window.prompt = () => 'mine', undefined)")
        await second.click("#library-list li:nth-child(1) .quiet")
        await second.until(f"{ROWS}[0].textContent.includes('another window goes on with it')")
        assert not second.errors
