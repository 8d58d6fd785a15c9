"""Captions outlive the page: a reload, a crash of the tab, a browser that keeps nothing or has no room."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from tests.web.conftest import PageServer
from tests.web.devtools import Page, open_page
from tests.web.page_server import SENTENCES
from tests.web.shown import (
    DONE,
    OPEN_TEXT,
    PROBLEM,
    RESTORED,
    ROWS,
    STATE,
    TURNS,
    check_order,
    keep_transcripts,
    listen,
    send_file,
    stop,
    texts,
    transcript,
    turns,
)

KEPT = """(async () => {
  const open = indexedDB.open("tickertape");
  const db = await new Promise((done) => (open.onsuccess = () => done(open.result)));
  const all = db.transaction("turns").objectStore("turns").getAll();
  const turns = await new Promise((done) => (all.onsuccess = () => done(all.result)));
  db.close();
  return turns.map((turn) => turn.text);
})()"""


async def test_reload_shows_the_captions_and_goes_on_with_them(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    before = await turns(page)
    assert [turn.text for turn in before] == list(SENTENCES[:3])
    await page.reload()
    await page.until(RESTORED)
    assert await turns(page) == before and await page.evaluate(STATE) == "Ready"
    await page.click("#go-on")
    await page.until(f"{DONE}.length > 3")
    await stop(page)
    after = await turns(page)
    # The clock goes on where it was, and the words of the earlier visit still have their times.
    assert after[:3] == before
    check_order(after)
    assert await page.evaluate("document.querySelectorAll('.word').length") == sum(len(turn.words) for turn in after)


async def test_crashed_tab_loses_nothing_that_was_shown(
    page: Page, server: PageServer, browser: str, tmp_path: Path
) -> None:
    await listen(page, server.url)
    await page.until(f"{DONE}.length >= 1")
    shown = await page.until(OPEN_TEXT)
    await page.until(f"{KEPT}.then((kept) => kept.some((text) => text.startsWith({shown!r})))")
    before = await turns(page)
    await page.crash()
    async with open_page(browser, tmp_path, page.context) as later:
        await later.open(server.url)
        await later.until(RESTORED)
        after = await turns(later)
        assert later.errors == []
    assert after[0] == before[0]
    # What was open is there as far as it had been shown, and marked as cut off.
    assert after[-1].state == "cut" and after[-1].text.startswith(shown)


async def test_second_window_does_not_write_into_the_transcript_of_the_first(
    page: Page, server: PageServer, browser: str, tmp_path: Path, talk: Path
) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    async with open_page(browser, tmp_path, page.context) as second:
        await second.open(server.url)
        await second.click("#open-library")
        await second.until(f"{ROWS}.length === 1")
        await second.click("#library-list .title")
        await second.until(f"{ROWS}[0].textContent.includes('Another window goes on with this one.')")
        assert await turns(second) == []
        assert second.errors == []


async def test_earlier_transcripts_are_listed_opened_and_deleted(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.reload()
    await page.until(RESTORED)
    await page.click("#afresh")
    await page.until(f"{TURNS}.length === 0")
    # A new transcript begins its clock anew.
    assert await page.evaluate("document.querySelector('#elapsed').textContent") == "0:00"
    await send_file(page, talk)
    await page.click("#open-library")
    await page.until(f"{ROWS}.length === 2")
    assert await page.evaluate(f"{ROWS}[0].textContent.includes('on the page') && {ROWS}[0].children[0].disabled")
    await page.click("#library-list li:nth-child(2) .title")
    await page.until(f"!document.querySelector('#library').open && {RESTORED}")
    assert await texts(page) == list(SENTENCES[:3])
    await page.click("#open-library")
    await page.until("document.querySelector('#library').open")
    # What is deleted is gone for good, so the page asks first.
    await page.evaluate("(window.confirm = () => ((window.asked = true), false), undefined)")
    await page.click("#library-list li:nth-child(1) .quiet:last-child")
    await page.until("window.asked")
    assert await page.evaluate(f"{ROWS}.length") == 2
    await page.evaluate("(window.confirm = () => true, undefined)")
    await page.click("#library-list li:nth-child(1) .quiet:last-child")
    await page.until(f"{ROWS}.length === 1")
    assert len(await page.evaluate(KEPT)) == 3
    await page.press("Escape")
    # Also if it came from the store and nothing was added.
    await page.evaluate("(window.confirm = () => ((window.asked = false), false), undefined)")
    await page.click("#clear")
    await page.until(f"window.asked === false && {TURNS}.length === 3")
    await page.evaluate("(window.confirm = () => true, undefined)")
    await page.click("#clear")
    await page.until(f"{TURNS}.length === 0")
    await page.until(f"{KEPT}.then((kept) => kept.length === 0)")


async def test_choice_after_a_reload_is_in_view(page: Page, server: PageServer) -> None:
    """However long the captions are, and on a phone too."""
    await keep_transcripts(page, server.url, numbered(200))
    for size in ((1200, 800), (360, 640)):
        await page.size(*size, mobile=size[0] < 500)
        await page.open(server.url)
        await page.until(RESTORED)
        await page.until("document.documentElement.scrollTop > 1000")
        for button in ("#go-on", "#afresh"):
            seen = f"""(() => {{
              const {{ x, y, width, height }} = document.querySelector({button!r}).getBoundingClientRect();
              return document.elementFromPoint(x + width / 2, y + height / 2)?.id;
            }})()"""
            assert f"#{await page.evaluate(seen)}" == button
    # Next after the captions, and the button in them, for users without a pointer.
    await page.evaluate("document.querySelector('#captions').focus()")
    for button in ("earlier", "go-on", "afresh"):
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.id") == button


def numbered(count: int, **head: Any) -> dict[str, Any]:
    """A transcript that was recorded an hour ago."""
    said = [f"turn {number}." for number in range(count)]
    return transcript(said, 3600, updated=round(time.time() * 1000), **head)


async def test_earlier_transcripts_have_their_date_and_length(page: Page, server: PageServer) -> None:
    """Also one whose last turn was open when it was kept, and one that was kept without a length."""
    await keep_transcripts(page, server.url, numbered(75, seconds=0))
    await page.open(server.url)
    await page.until(RESTORED)
    await page.click("#afresh")
    await page.click("#listen")
    await page.until(OPEN_TEXT)
    await page.click("#open-library")
    await page.until(f"{ROWS}.length === 2")
    here, earlier = await page.evaluate(f"{ROWS}.map((row) => row.querySelector('small').textContent)")
    assert re.search(r", 0:0[1-9] long, on the page$", here)
    began = await page.evaluate(
        "new Date(Date.now() - 3.6e6).toLocaleString([], { dateStyle: 'medium', timeStyle: 'short' })"
    )
    # The minute may have changed since.
    assert earlier.endswith(", 1:15 long") and earlier.split(",")[0] == began.split(",")[0]
    await page.press("Escape")
    await stop(page)


async def test_forbidden_storage_is_said_and_captions_work(page: Page, server: PageServer, talk: Path) -> None:
    await page.before_load(
        "IDBFactory.prototype.open = () => { throw new DOMException('not here', 'SecurityError'); };"
    )
    await page.open(server.url)
    assert "keeps no captions" in await page.until(PROBLEM)
    await send_file(page, talk)
    assert await texts(page) == list(SENTENCES[:3])
    await page.click("#open-library")
    await page.until("document.querySelector('#library-none').textContent.includes('keeps no captions')")
    await page.press("Escape")
    # Leaving would lose them, so the browser asks.
    asked = "dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    assert await page.evaluate(asked) is False
    await page.open(server.url)
    assert await texts(page) == []


async def test_full_storage_makes_room_and_then_says_so(page: Page, server: PageServer, talk: Path) -> None:
    """Writes fail while more than `room` transcripts are kept, as a disk quota would have it."""
    await page.before_load(
        """const put = IDBObjectStore.prototype.put;
        window.room = 99;
        IDBObjectStore.prototype.put = function (value) {
          if (this.name === "turns" && window.room < 1) throw new DOMException("no room", "QuotaExceededError");
          return put.call(this, value);
        };
        const remove = IDBObjectStore.prototype.delete;
        IDBObjectStore.prototype.delete = function (key) {
          if (this.name === "transcripts") window.room += 1;
          return remove.call(this, key);
        };"""
    )
    await page.open(server.url)
    await send_file(page, talk)
    await page.reload()
    await page.until(RESTORED)
    await page.click("#afresh")
    await page.until(f"{TURNS}.length === 0")
    await page.evaluate("window.room = 0")
    await send_file(page, talk)
    # The older transcript has made room.
    await page.until(f"window.room === 1 && {KEPT}.then((kept) => kept.length === 3)")
    assert await page.evaluate(PROBLEM) is None
    await page.evaluate("window.room = 0")
    await send_file(page, talk)
    assert "no room left" in await page.until(PROBLEM)
    assert await texts(page) == list(SENTENCES[:3]) * 2
    # A new transcript would cost these, so the page asks first.
    await page.evaluate("(window.confirm = (text) => ((window.asked = text), false), undefined)")
    await page.click("#open-library")
    await page.until("document.querySelector('#library').open")
    await page.click("#library-new")
    assert "could not be kept" in await page.until("window.asked")
    assert await texts(page) == list(SENTENCES[:3]) * 2
    # With room again, everything is written after all.
    await page.evaluate("window.room = 99")
    await send_file(page, talk)
    await page.until(f"{KEPT}.then((kept) => kept.length === 9)")


async def test_transcript_store_is_bounded(page: Page, server: PageServer) -> None:
    await page.open(server.url + "health")
    kept = await page.evaluate(
        f"""(async () => {{
          const {{ TranscriptStore }} = await import("{server.url}transcript-store.js");
          const store = new TranscriptStore({{ turns: 10, transcripts: 3 }});
          await store.open();
          for (let id = 1; id <= 5; id += 1) {{
            const turns = [0, 1, 2, 3].map((number) => ({{ number, text: `${{id}}.${{number}}` }}));
            await store.write({{ id, title: `t${{id}}` }}, turns, []);
          }}
          await store.trim(5);
          const heads = await store.heads();
          const texts = await Promise.all(heads.map(({{ id }}) => store.turns(id)));
          return [heads.map(({{ id }}) => id), texts.flat().length, texts.at(-1).map((turn) => turn.text)];
        }})()"""
    )
    # The oldest transcripts go, and of the oldest that is left its oldest turns.
    assert kept == [[5, 4, 3], 10, ["3.2", "3.3"]]
