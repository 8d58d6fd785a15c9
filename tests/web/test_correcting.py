"""Correcting words and naming a transcript: in place, recoverable, kept, and in every file that is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.web.conftest import PageServer
from tests.web.devtools import Page
from tests.web.page_server import SENTENCES
from tests.web.shown import PROBLEM, RESTORED, TURNS, keep_transcripts, send_file, texts, transcript, turns

HOSTILE = "<img src=x onerror=alert(1)> --> &amp;"
FIELD = "document.activeElement.matches('.edit')"
ANNOUNCED = "document.querySelector('#announcer').textContent"
KEPT = """(async () => {
  const open = indexedDB.open("tickertape");
  const db = await new Promise((done) => (open.onsuccess = () => done(open.result)));
  const read = async (store) => {
    const all = db.transaction(store).objectStore(store).getAll();
    return new Promise((done) => (all.onsuccess = () => done(all.result)));
  };
  const [turns, heads] = [await read("turns"), await read("transcripts")];
  db.close();
  return { texts: turns.map(({ text }) => text), names: heads.map(({ name }) => name) };
})()"""


def word(turn: int, number: int) -> str:
    return f"#turns li:nth-child({turn}) .word:nth-of-type({number})"


async def correct(page: Page, selector: str, text: str) -> None:
    await page.click(selector)
    await page.until(FIELD)
    await page.evaluate("document.activeElement.select()")
    if text:
        await page.type(text)
        await page.press("Enter")
    else:
        await page.click("#word-remove")
    await page.until("!document.querySelector('.edit')")


async def saved(page: Page, kind: str) -> str:
    await page.click("#save")
    await page.click(f"[data-format={kind}]")
    return await page.downloaded(kind)


async def test_markup_in_a_correction_is_only_text_wherever_it_goes(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await correct(page, word(1, 2), HOSTILE)
    assert (await texts(page))[0] == f"The {HOSTILE} fell."
    assert await page.evaluate("document.querySelectorAll('#turns img').length") == 0
    vtt = await saved(page, "vtt")
    assert vtt.count("-->") == 3 and "<img" not in vtt and "&lt;img" in vtt
    # Several lines become one, and nobody pastes a book.
    await page.evaluate(
        """(() => {
          const { turn } = document.querySelector('#turns li');
          window.lines = (text) => import("./transcript.js").then(({ Transcript }) => {
            const t = new Transcript();
            t.load([structuredClone(turn)]);
            t.correct(t.entries[0], t.entries[0].words[0], text);
            return t.entries[0].text;
          });
        })()"""
    )
    assert await page.evaluate(r"lines('a\n\n1\n00:00 --> 00:01\u0000b')") == f"a 1 00:00 --> 00:01 b {HOSTILE} fell."
    assert len(await page.evaluate("lines('x'.repeat(100000))")) < 300


async def test_a_corrected_word_is_in_all_files_and_can_be_taken_back(
    page: Page, server: PageServer, talk: Path
) -> None:
    server.engine.chances["tide"] = -2.0
    await page.open(server.url)
    await send_file(page, talk)
    await correct(page, word(1, 2), "tied rope")
    # Somebody has looked at it, so it is not unsure any more.
    assert await page.evaluate("document.querySelectorAll('.unsure').length") == 0
    assert await page.evaluate(ANNOUNCED) == "Corrected: tied rope"
    await correct(page, word(2, 3), "")
    said = ["The tied rope fell.", "Boats lay out.", SENTENCES[2]]
    assert await texts(page) == said
    assert await saved(page, "txt") == "".join(f"{text}\n" for text in said)
    assert "\nBoats lay out.\n" in await saved(page, "srt")
    told = json.loads(await saved(page, "json"))["turns"]
    assert [turn.get("heard") for turn in told] == [SENTENCES[0], SENTENCES[1], None]
    assert told[0]["words"][1]["heard"] == "tide" and told[1]["words"][2] | {"start": 0, "end": 0, "confidence": 0} == {
        **{"word": "", "heard": "far", "start": 0, "end": 0, "confidence": 0}
    }
    await page.click("#find")
    await page.type("tied")
    await page.until("document.querySelector('#search-count').textContent === '1 of 1'")
    await page.press("Escape")
    # After a reload too; then what was heard comes back, also what was removed.
    await page.until(
        f"{KEPT}.then(({{ texts }}) => texts[0] === 'The tied rope fell.' && texts[1] === 'Boats lay out.')"
    )
    await page.reload()
    await page.until(RESTORED)
    assert await texts(page) == said
    for turn, number in ((1, 2), (2, 3)):
        await page.click(word(turn, number))
        await page.until(FIELD)
        assert (await page.evaluate("document.querySelector('#word-heard').textContent")).startswith("Heard: ")
        await page.click("#word-restore")
        await page.until("!document.querySelector('.edit')")
    assert await texts(page) == list(SENTENCES[:3])
    assert await page.evaluate("document.querySelectorAll('.corrected').length") == 0
    assert "heard" not in await saved(page, "json")


async def test_the_keyboard_corrects_and_leaves_words(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.evaluate("document.querySelector('#captions').focus()")
    await page.press("ArrowRight")
    await page.press("ArrowRight")
    await page.until("document.querySelector('.word.current')?.textContent === 'tide'")
    await page.press("Enter")
    await page.until(FIELD)
    assert await page.evaluate("document.activeElement.ariaLabel.startsWith('Correct “tide”, said at')")
    await page.type("time")
    await page.press("Escape")
    # The keyboard is back at the word, which is as it was.
    await page.until("document.activeElement.id === 'captions'")
    assert await page.evaluate("document.querySelector('.word.current').textContent") == "tide"
    await page.press("Enter")
    await page.until(FIELD)
    await page.type("time")
    await page.press("Enter")
    await page.until("document.querySelector('.word.current')?.textContent === 'time'")
    await page.press("ArrowRight")
    await page.until("document.querySelector('.word.current')?.textContent === 'fell.'")
    # Going elsewhere keeps what was typed.
    await page.press("Enter")
    await page.until(FIELD)
    await page.type("passed.")
    await page.evaluate("document.querySelector('#listen').focus()")
    await page.until("!document.querySelector('.edit')")
    assert (await texts(page))[0] == "The time passed."


async def test_marking_text_or_an_open_turn_opens_no_editor(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.evaluate("getSelection().selectAllChildren(document.querySelector('#turns .text'))")
    await page.evaluate(f"document.querySelector({word(1, 2)!r}).click()")
    assert await page.evaluate("document.querySelector('.edit')") is None
    changed = """(async () => {
      const { Transcript } = await import("./transcript.js");
      const t = new Transcript();
      t.apply({ type: "conversation.item.input_audio_transcription.delta", item_id: "a", delta: "hello",
        words: [{ word: "hello", start: 0, end: 1 }] }, 0);
      t.correct(t.entries[0], t.entries[0].words[0], "bye");
      return t.entries[0].text;
    })()"""
    assert await page.evaluate(changed) == "hello"


async def test_a_correction_that_cannot_be_kept_stays_and_is_said(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.until(f"{KEPT}.then(({{ texts }}) => texts.length === 3)")
    await page.evaluate(
        """IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); }"""
    )
    await correct(page, word(1, 2), "moon")
    assert "no room left" in await page.until(PROBLEM)
    assert (await texts(page))[0] == "The moon fell."


@pytest.mark.parametrize("count", [500, 5000])
async def test_a_correction_costs_the_same_in_a_long_transcript(page: Page, server: PageServer, count: int) -> None:
    """One caption is drawn and one turn is written, however many there are; a speaker's name is written in one go."""
    long = transcript(["some words"] * count)
    for turn in long["turns"]:
        spoken = (("some", 0.0, 0.3, "A"), ("words", 0.4, 0.9, "B"))
        turn["words"] = [
            {"word": text, "start": turn["start"] + start, "end": turn["start"] + end, "speaker": speaker}
            for text, start, end, speaker in spoken
        ]
    await keep_transcripts(page, server.url, long)
    await page.before_load(
        """window.done = { puts: 0, writes: 0 };
        const { put } = IDBObjectStore.prototype, { transaction } = IDBDatabase.prototype;
        IDBObjectStore.prototype.put = function (...all) { window.done.puts += 1; return put.apply(this, all); };
        IDBDatabase.prototype.transaction = function (names, mode, how) {
          if (mode === "readwrite") window.done.writes += 1;
          return transaction.call(this, names, mode, how);
        };"""
    )
    await page.open(server.url)
    await page.until(f"{RESTORED} && {TURNS}.length > 0")
    await page.evaluate(
        """(() => {
          window.drawn = 0;
          const count = (list) => (window.drawn += new Set(list.map(({ target }) => target)).size);
          new MutationObserver(count).observe(document.querySelector("#turns"), { childList: true, subtree: true });
          window.done = { puts: 0, writes: 0 };
        })()"""
    )
    last = "#turns li:last-child .word"
    await correct(page, last, "other")
    await page.until("window.done.puts >= 2")
    # The turn and the head of the transcript.
    assert await page.evaluate("window.done") == {"puts": 2, "writes": 1}
    assert await page.evaluate("window.drawn") <= 6
    await page.evaluate("(window.prompt = () => 'Anna', window.done = { puts: 0, writes: 0 }, undefined)")
    await page.click("#turns li:last-child .who")
    await page.until(f"window.done.puts === {count} + 1")
    assert await page.evaluate("window.done.writes") <= 3


async def test_a_transcript_has_a_name_that_is_only_text(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    assert not await page.evaluate("document.querySelector('#name').checkVisibility()")
    await send_file(page, talk)
    await page.click("#name")
    await page.type(f"../{HOSTILE}")
    await page.press("Enter")
    await page.until(f"{KEPT}.then(({{ names }}) => names[0] === {'../' + HOSTILE!r})")
    await saved(page, "txt")
    assert page.saved_as == "img src=x onerror=alert(1) -- &amp;.txt"
    assert json.loads(await saved(page, "json"))["name"] == "../" + HOSTILE
    await page.click("#open-library")
    await page.until("document.querySelector('#library').open")
    assert await page.evaluate("document.querySelector('#library-list .title').textContent") == "../" + HOSTILE
    assert await page.evaluate("document.querySelectorAll('#library-list img').length") == 0
    await page.press("Escape")
    await page.reload()
    await page.until(RESTORED)
    assert await page.evaluate("document.querySelector('#name').value") == "../" + HOSTILE
    # A new transcript has none.
    await page.click("#afresh")
    await page.until(f"{TURNS}.length === 0")
    assert await page.evaluate("document.querySelector('#name').value") == ""
    before = await turns(page)
    assert before == []
