"""Reading captions: find, copy, large type, and words with low confidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.web.conftest import PageServer
from tests.web.devtools import SHIFT, Page
from tests.web.page_server import SENTENCES
from tests.web.shown import DONE, STATE, TURNS, check_said, keep_transcripts, listen, send_file, stop, transcript, turns

COUNT = "document.querySelector('#search-count').textContent"
# The text that is marked as found now, over whatever elements it lies in.
MARKED = "[...CSS.highlights.get('found-now')].map(String).join()"
CLIPBOARD = "navigator.clipboard.readText()"


async def test_find_walks_through_all_captions(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.evaluate("document.querySelector('#captions').focus()")
    await page.press("/")
    await page.until("document.activeElement.id === 'search-field'")
    await page.type("LA")
    # Both places, "lay" and "lamp", whatever the case; the newest is shown first.
    await page.until(f"{COUNT} === '2 of 2' && {MARKED} === 'la'")
    assert await page.evaluate("[...CSS.highlights.get('found')].map(String)") == ["la"]
    await page.press("Enter")
    await page.until(f"{COUNT} === '1 of 2'")
    assert await page.evaluate("document.querySelector('#announcer').textContent") == f"1 of 2: {SENTENCES[1]}"
    await page.press("Enter", SHIFT)
    await page.until(f"{COUNT} === '2 of 2'")
    # A match may run over several words, which are elements of their own.
    await page.evaluate("document.querySelector('#search-field').value = ''")
    await page.type("tide fell.")
    await page.until(f"{COUNT} === '1 of 1' && {MARKED} === 'tide fell.'")
    await page.type("(no such thing")
    await page.until(f"{COUNT} === 'Not found'")
    await page.press("Escape")
    assert await page.evaluate("document.querySelector('#search').hidden && CSS.highlights.get('found-now').size === 0")
    assert await page.evaluate("document.activeElement.id") == "captions"


async def test_find_shows_what_is_not_in_the_document(page: Page, server: PageServer, talk: Path) -> None:
    """Two hundred turns, of which the page holds the last eighty."""
    await keep_transcripts(page, server.url, transcript([f"turn {number}." for number in range(200)]))
    await page.open(server.url)
    await page.until(f"{TURNS}.length > 0")
    assert await page.evaluate(f"{TURNS}.length") <= 80
    await page.click("#find")
    await page.type("turn 7.")
    await page.until(f"{COUNT} === '1 of 1' && {MARKED} === 'turn 7.'")
    box = "[...document.querySelectorAll('#turns li')].find((li) => li.turn.number === 7).getBoundingClientRect()"
    assert 0 < (await page.evaluate(box + ".top")) < 800
    assert await page.evaluate(f"{TURNS}.length") <= 80


async def test_copy_all_or_one_caption(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.click("#copy")
    await page.until("document.querySelector('#copy').textContent === 'Copied'")
    assert await page.evaluate(CLIPBOARD) == "".join(f"{text}\n" for text in SENTENCES[:3])
    await page.click("#turns li:nth-child(2) .copy")
    await page.until(f"{CLIPBOARD}.then((text) => text === {SENTENCES[1]!r})")
    # By keyboard: to a word, then C.
    await page.evaluate("document.querySelector('#captions').focus()")
    await page.press("ArrowRight")
    await page.until("!document.querySelector('#tip').hidden")
    await page.press("c")
    await page.until(f"{CLIPBOARD}.then((text) => text === {SENTENCES[0]!r})")
    assert await page.evaluate("document.querySelector('#announcer').textContent") == "Copied"


async def test_copy_works_where_there_is_no_clipboard_for_pages(page: Page, server: PageServer, talk: Path) -> None:
    await page.before_load(
        """Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", () => (window.copied = document.activeElement.value));"""
    )
    await page.open(server.url)
    await send_file(page, talk)
    await page.click("#copy")
    await page.until(f"window.copied === {''.join(f'{text}{chr(10)}' for text in SENTENCES[:3])!r}")
    await page.until("document.querySelector('#copy').textContent === 'Copied'")


async def test_pause_keeps_the_session_and_hears_nothing(page: Page, server: PageServer) -> None:
    await listen(page, server.url)
    await page.until(f"{DONE}.length >= 1")
    await page.click("#pause")
    await page.until(f"{STATE} === 'Paused'")
    # The turn under way ends, and the sound stands still.
    await page.until(f"{TURNS}.every((li) => li.dataset.state === 'done')")
    heard = server.engine.streams[0].samples
    await page.until("document.querySelector('#waiting').textContent === '0.0 s'")
    elapsed = await page.evaluate("document.querySelector('#elapsed').textContent")
    await page.evaluate("new Promise((done) => setTimeout(done, 1200))")
    assert await page.evaluate("document.querySelector('#elapsed').textContent") == elapsed
    assert server.engine.streams[0].samples <= heard + 16_000
    await page.click("#pause")
    await page.until(f"{STATE} === 'Listening'")
    await page.until(f"document.querySelector('#elapsed').textContent > {elapsed!r}")
    await stop(page)
    assert len(server.engine.streams) == 1
    check_said(await turns(page))


async def test_words_the_model_is_unsure_of_are_shaded(page: Page, server: PageServer, talk: Path) -> None:
    server.engine.chances["tide"] = -2.0
    await page.open(server.url)
    await send_file(page, talk)
    assert await page.evaluate("[...document.querySelectorAll('.unsure')].map((word) => word.textContent)") == ["tide"]
    assert await page.evaluate("document.querySelector('.unsure').dataset.time.endsWith(', unsure')")
    await page.click("#save")
    await page.click("[data-format=json]")
    words = json.loads(await page.downloaded("json"))["turns"][0]["words"]
    assert [word["confidence"] for word in words] == pytest.approx([0.779, 0.135, 0.779], abs=1e-3)
