"""What a browser kept for the page and the page cannot read: it is left out, told once, and everything works."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import PageServer
from tests.web.devtools import Page
from tests.web.page_server import SENTENCES
from tests.web.shown import PROBLEM, RESTORED, ROWS, TURNS, keep_transcripts, send_file, texts, transcript

MARKUP = "<img src=x onerror='window.harmed = true'>"
DEFAULT_SIZE = "getComputedStyle(document.documentElement).getPropertyValue('--caption-scale').trim()"
POISONED_CHOICES = [
    "{broken",
    "null",
    "[1, 2]",
    '"text"',
    json.dumps({"keywords": 5, "size": "1e9", "theme": MARKUP, "overlay": {}, "device": ["x"], "eagerness": MARKUP}),
    json.dumps({"keywords": "word, " * 300_000, "size": 1e9, "announce": "no", "__proto__": {"key": "x"}}),
]
# Turns of a transcript. Texts of those at the beginning can be read.
READ = ["no words", "no times", "words that are none", "a state that is none", "odd extras"]
POISONED_TURNS: list[dict[str, Any]] = [
    {"number": 1, "text": "no words", "state": "done", "start": 1, "end": 2},
    {"number": 2, "text": {"is": "none"}, "state": "done", "start": 1, "end": 2, "words": []},
    {"number": 3, "text": "no times", "state": "done", "start": "x", "end": None, "words": []},
    {"number": 4, "text": "words that are none", "state": "done", "start": 1, "end": 2, "words": [None, 5]},
    {"number": 5, "text": "a state that is none", "state": MARKUP, "start": 1, "end": 2, "words": []},
    {"number": 8, "text": "odd extras", "state": "done", "start": 1, "end": 2, "words": [], "heard": 5, "sure": MARKUP},
    {"number": "6", "text": "a number that is none", "state": "done", "start": 1, "end": 2, "words": []},
    {"number": 7, "text": "long " * 200_000, "state": "done", "start": 1, "end": 2, "words": []},
]
POISONED_HEADS: list[dict[str, Any]] = [
    {"id": "text", "title": "x", "name": "", "seconds": 1},
    {"id": 1e300, "title": "x", "name": "", "seconds": 1},
    {"id": -5, "title": "x", "name": "", "seconds": 1},
    {"id": 5, "title": 7, "name": {}, "seconds": "long"},
]


async def check_works(page: Page, talk: Path) -> None:
    await send_file(page, talk)
    assert (await texts(page))[-3:] == list(SENTENCES[:3])
    assert not await page.evaluate("window.harmed")


async def put(page: Page, url: str, script: str) -> None:
    """Run a script in a page of the server that uses none of the browser's storage."""
    await page.open(url + "health")
    await page.evaluate(f"(async () => {{ {script} }})()")


@pytest.mark.parametrize("stored", POISONED_CHOICES, ids=range(len(POISONED_CHOICES)))
async def test_choices_that_cannot_be_read_are_as_at_first(page: Page, server: PageServer, stored: str) -> None:
    await put(page, server.url, f"localStorage.setItem('tickertape.choices', {json.dumps(stored)})")
    await page.open(server.url)
    told = "document.querySelector('#problem:not([hidden]) p')?.textContent?.includes('choices')"
    if stored != "null":
        await page.until(told)
    assert await page.evaluate(DEFAULT_SIZE) == "1"
    assert await page.evaluate("document.querySelector('#keywords').value") == ""
    assert await page.evaluate("document.querySelector('#announce').checked")
    await page.reload()
    await page.until("document.querySelector('#state-text').textContent === 'Ready'")
    assert not await page.evaluate(PROBLEM)


async def test_choices_that_can_be_read_stay_beside_those_that_cannot(
    page: Page, server: PageServer, talk: Path
) -> None:
    kept = json.dumps({"size": 1.5, "keywords": 5, "theme": "dark"})
    await put(page, server.url, f"localStorage.setItem('tickertape.choices', {json.dumps(kept)})")
    await page.open(server.url)
    assert await page.evaluate(DEFAULT_SIZE) == "1.5"
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
    await check_works(page, talk)


async def test_transcripts_that_cannot_be_read_are_left_out(page: Page, server: PageServer, talk: Path) -> None:
    good = transcript([f"{MARKUP} said."], 500, name=f"{MARKUP} named")
    good["turns"] += POISONED_TURNS
    await keep_transcripts(page, server.url, good, *({"head": head, "turns": []} for head in POISONED_HEADS))
    await page.open(server.url)
    await page.until(f"{RESTORED} && {PROBLEM}?.includes('could not be read')")
    assert await page.evaluate(f"{TURNS}.map((li) => li.turn.text)") == [f"{MARKUP} said.", *READ]
    await page.click("#open-library")
    await page.until("document.querySelector('#library').open")
    # One has a number that can be a time, and nothing else.
    await page.until(f"{ROWS}.length === 2 && {ROWS}[0].textContent.includes('named')")
    assert await page.evaluate(f"{ROWS}[1].textContent.includes('(no words)')")
    await page.press("Escape")
    await check_works(page, talk)
    # What could not be read has gone: it is told once.
    await page.reload()
    await page.until(f"{RESTORED} && {TURNS}.length === {4 + len(READ)}")
    assert not await page.evaluate(PROBLEM)


@pytest.mark.parametrize("name", ["tickertape", "tickertape-sound"])
async def test_a_database_of_another_shape_is_made_anew(page: Page, server: PageServer, talk: Path, name: str) -> None:
    other = f"""
      const request = indexedDB.open("{name}", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("turns", {{ keyPath: "other" }});
      await new Promise((done) => (request.onsuccess = done));
      request.result.close();
    """
    await put(page, server.url, other)
    await page.open(server.url)
    await check_works(page, talk)
    await page.reload()
    await page.until(f"{RESTORED} && {TURNS}.length === 3")
    assert not await page.evaluate(PROBLEM)


async def test_sound_that_cannot_be_read_is_left_out(page: Page, server: PageServer, talk: Path) -> None:
    began = round(time.time() * 1000)
    spans = [
        {"id": began, "start": 0},
        {"id": began, "start": 1, "end": "x", "bytes": "many"},
        {"id": "text", "start": MARKUP, "end": 2, "bytes": 5},
        {"id": began, "start": 3, "end": 4, "bytes": 1e300, "rate": MARKUP},
    ]
    script = f"""
      const {{ SoundStore }} = await import("{server.url}sound-store.js");
      const sounds = new SoundStore();
      await sounds.opened;
      const transaction = sounds.database.transaction("spans", "readwrite");
      for (const span of {json.dumps(spans)}) transaction.objectStore("spans").put(span);
      await new Promise((done) => (transaction.oncomplete = done));
    """
    await put(page, server.url, script)
    await page.open(server.url)
    await page.until("document.querySelector('#sound-size').textContent === 'No sound is kept yet.'")
    await check_works(page, talk)
