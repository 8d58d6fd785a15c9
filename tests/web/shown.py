"""What the page shows and keeps, and what must hold of it however much sound a busy machine loses."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.web.page_server import WORDS
from tests.web.tab import Tab

TURNS = "[...document.querySelectorAll('#turns li')]"
DONE = f"{TURNS}.filter((li) => li.dataset.state === 'done')"
STATE = "document.querySelector('#state').textContent"
RESTORED = "!document.querySelector('#restored').hidden"
# Transcripts in the library.
ROWS = "[...document.querySelectorAll('#library-list li')]"
PROBLEM = "document.querySelector('#problem:not([hidden]) p')?.textContent"
OPEN_TEXT = f"{TURNS}.find((li) => li.dataset.state === 'open')?.querySelector('.text').textContent"
# All that was spoken has been heard, and turned into text.
ALL_HEARD = f"document.querySelector('#elapsed').textContent >= '0:08' && !{OPEN_TEXT}"


@dataclass(frozen=True, slots=True)
class Turn:
    """A caption as the page holds it; times in seconds since the first recording began."""

    state: str
    text: str
    start: float
    end: float | None
    words: tuple[str, ...]
    word_ends: tuple[float, ...]


async def turns(page: Tab) -> list[Turn]:
    found: list[Any] = await page.evaluate(
        f"{TURNS}.map((li) => ({{...li.turn, shown: li.querySelector('.text').textContent}}))"
    )
    assert all(turn["shown"] == turn["text"] for turn in found)
    return [
        Turn(
            turn["state"],
            turn["text"],
            turn["start"],
            turn["end"],
            tuple(word["word"] for word in turn["words"]),
            tuple(word["end"] for word in turn["words"]),
        )
        for turn in found
    ]


async def texts(page: Tab) -> list[str]:
    """Of the turns that are finished."""
    return [turn.text for turn in await turns(page) if turn.state == "done"]


def check_said(shown: list[Turn]) -> None:
    """All words of the server's engine are there once and in order, in turns that follow each other."""
    said = " ".join(turn.text for turn in shown).split()
    assert said == [WORDS[number % len(WORDS)] for number in range(len(said))]
    check_order(shown)


def check_order(shown: list[Turn]) -> None:
    for before, after in zip(shown, shown[1:], strict=False):
        assert before.end is not None and before.start < before.end <= after.start
    ends = [end for turn in shown for end in turn.word_ends]
    assert ends == sorted(ends)


async def listen(page: Tab, url: str) -> None:
    await page.open(url)
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening'")


async def stop(page: Tab, seconds: float = 30) -> None:
    await page.click("#listen")
    await page.until(f"{STATE} === 'Ready'", seconds)


async def send_file(page: Tab, file: Path) -> None:
    """Captions in no time: the file goes whole, and its words come back as fast as they can."""
    await page.choose_file("#file", file)
    await page.until(f"{STATE} === 'Ready' && {TURNS}.length > 0")


async def play_at_pace(page: Tab, url: str, file: Path) -> None:
    await page.open(url)
    await choose(page, "#pace", "real")
    await page.choose_file("#file", file)


async def choose(page: Tab, selector: str, value: str) -> None:
    """As if chosen in a list or typed into a field."""
    script = "(e) => { e.value = %s; for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind)); }"
    await page.evaluate(f"({script % json.dumps(value)})(document.querySelector({selector!r}))")


def transcript(said: Sequence[str], seconds_ago: float = 0.0, **head: Any) -> dict[str, Any]:
    """A transcript as the page keeps it, with a turn of one second for each text."""
    began = round((time.time() - seconds_ago) * 1000)
    turns = [
        {"number": number, "text": text, "state": "done", "words": [], "start": number, "end": number + 1}
        for number, text in enumerate(said)
    ]
    kept = {"id": began, "title": said[0], "seconds": len(said), "updated": began, **head}
    return {"head": kept, "turns": turns}


async def keep_transcripts(page: Tab, url: str, *transcripts: dict[str, Any]) -> None:
    """Put transcripts into the browser's store, the newest last, from a page of the server that does not use it."""
    await page.open(url + "health")
    await page.evaluate(
        f"""(async () => {{
          const {{ TranscriptStore }} = await import("{url}transcript-store.js");
          const store = new TranscriptStore();
          await store.open();
          for (const {{ head, turns }} of {json.dumps(transcripts)}) await store.write(head, turns, []);
        }})()"""
    )
