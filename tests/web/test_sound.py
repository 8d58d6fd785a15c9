"""Sound that the browser keeps on request: bounded, visible, deletable, and heard at a word."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.web.conftest import PageServer
from tests.web.devtools import Page
from tests.web.shown import DONE, PROBLEM, RESTORED, TURNS, listen, play_at_pace, send_file, stop

SIZE = "document.querySelector('#sound-box:not([hidden]) #sound-size')?.textContent"
# What is played: its bytes, where it begins, and its first letters.
PLAYED = """
  window.played = [];
  const made = new Map(), make = URL.createObjectURL;
  URL.createObjectURL = (blob) => { const url = make(blob); made.set(url, blob); return url; };
  HTMLMediaElement.prototype.play = async function () {
    if (window.cannotPlay) throw new DOMException("no", "NotSupportedError");
    const bytes = await made.get(this.src).arrayBuffer();
    const head = String.fromCharCode(...new Uint8Array(bytes, 0, 4));
    window.played.push({ bytes: bytes.byteLength, at: this.currentTime, head });
  };
"""
KEPT = """(async () => {
  const open = indexedDB.open("tickertape-sound");
  const db = await new Promise((done) => (open.onsuccess = () => done(open.result)));
  if (!db.objectStoreNames.contains("spans")) { db.close(); return []; }
  const all = db.transaction("spans").objectStore("spans").getAll();
  const spans = await new Promise((done) => (all.onsuccess = () => done(all.result)));
  db.close();
  return spans;
})()"""


async def keep_sound(page: Page) -> None:
    await page.evaluate("document.querySelector('#keep-sound').click()")


async def test_nothing_is_kept_unless_somebody_asks_for_it(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    assert await page.evaluate(KEPT) == []
    await page.click("#open-settings")
    assert await page.evaluate(SIZE) is None
    await page.press("Escape")
    # A word can be corrected all the same; there is nothing to hear.
    await page.click(".word")
    await page.until("document.querySelector('.edit')")
    assert await page.evaluate("document.querySelector('#word-hear').hidden")


async def test_a_word_of_a_recording_is_heard_also_after_a_reload(page: Page, server: PageServer) -> None:
    await page.before_load(PLAYED)
    await page.open(server.url)
    await keep_sound(page)
    await page.click("#listen")
    await page.until(f"{DONE}.length >= 2")
    await stop(page)
    await page.until(f"{KEPT}.then((spans) => spans.length > 0)")
    await page.click("#open-settings")
    assert "MB of sound are kept in this browser." in await page.until(SIZE)
    await page.press("Escape")
    await page.reload()
    await page.until(RESTORED)
    await page.click(".word")
    await page.until("window.played.length === 1")
    first = await page.evaluate("window.played[0]")
    # A word with a little around it, as a file that every browser plays.
    word = await page.evaluate("document.querySelector('#turns li').turn.words[0]")
    rate = await page.evaluate(f"{KEPT}.then(([span]) => span.rate)")
    wanted = 44 + 2 * round(rate * (word["end"] - word["start"] + 0.3))
    assert first["head"] == "RIFF" and abs(first["bytes"] - wanted) <= 8
    await page.click("#word-hear")
    await page.until("window.played.length === 2")
    await page.press("Escape")
    # By keyboard.
    await page.evaluate("document.querySelector('#captions').focus()")
    await page.press("ArrowRight")
    await page.until("document.querySelector('.word.current')")
    await page.press(" ")
    await page.until("window.played.length === 3")


async def test_a_word_of_a_file_is_heard_in_the_file(page: Page, server: PageServer, talk: Path) -> None:
    await page.before_load(PLAYED)
    await page.open(server.url)
    await keep_sound(page)
    await send_file(page, talk)
    await page.until(f"{KEPT}.then((spans) => spans.length === 1)")
    await page.click("#turns li:nth-child(2) .word")
    await page.until("window.played.length === 1")
    assert await page.evaluate("window.played[0].bytes") == len(await asyncio.to_thread(talk.read_bytes))
    await page.press("Escape")
    await page.evaluate("window.cannotPlay = true")
    await page.click("#turns li:nth-child(1) .word")
    assert await page.until(PROBLEM) == "This browser could not play the kept sound."


async def test_sound_goes_with_its_transcript_or_alone(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await keep_sound(page)
    await send_file(page, talk)
    await page.until(f"{KEPT}.then((spans) => spans.length === 1)")
    await page.evaluate("(window.confirm = () => true, undefined)")
    await page.click("#clear")
    await page.until(f"{KEPT}.then((spans) => spans.length === 0)")
    await send_file(page, talk)
    await page.until(f"{KEPT}.then((spans) => spans.length === 1)")
    await page.click("#open-settings")
    await page.evaluate("document.querySelector('#sound-delete').scrollIntoView()")
    await page.click("#sound-delete")
    await page.until(f"{SIZE} === 'No sound is kept yet.'")
    assert await page.evaluate(KEPT) == []
    assert await page.evaluate(f"{TURNS}.length") == 3


async def test_a_browser_that_keeps_no_sound_says_so_once_and_captions_go_on(
    page: Page, server: PageServer, talk: Path
) -> None:
    await page.before_load(
        """const open = IDBFactory.prototype.open;
        IDBFactory.prototype.open = function (name, ...rest) {
          if (name === "tickertape-sound") throw new DOMException("private", "InvalidStateError");
          return open.call(this, name, ...rest);
        };"""
    )
    await page.open(server.url)
    await keep_sound(page)
    await page.until(f"{SIZE} === 'This browser keeps no sound for this page.'")
    await page.reload()
    await page.until(f"{SIZE} === 'This browser keeps no sound for this page.'")
    await play_at_pace(page, server.url, talk)
    assert (await page.until(PROBLEM)).startswith("This browser keeps no sound for this page.")
    await page.click("#dismiss")
    await page.until(f"{DONE}.length === 3")
    assert await page.evaluate(PROBLEM) is None


async def test_sound_is_bounded_and_the_oldest_goes_first(page: Page, server: PageServer) -> None:
    await page.open(server.url + "health")
    pieces, files, told = await page.evaluate(
        f"""(async () => {{
          const {{ SoundStore }} = await import("{server.url}sound-store.js");
          const sounds = new SoundStore(400_000);
          const told = [];
          sounds.addEventListener("problem", ({{ text }}) => told.push(text));
          const kept = () => sounds.spans.map(({{ id, start, bytes }}) => [id, start, bytes]);
          // Half a minute of two transcripts, in chunks of half a second.
          for (const id of [1, 2]) {{
            for (let n = 1; n <= 60; n += 1) sounds.addSamples(id, new Int16Array(8000), 16_000, n / 2);
            await sounds.flush();
          }}
          const pieces = kept();
          await sounds.addFile(3, new Blob([new Uint8Array(500_000)]), 0, 10);
          await sounds.addFile(4, new Blob([new Uint8Array(390_000)]), 0, 10);
          return [pieces, kept(), told];
        }})()"""
    )
    assert pieces == [[2, 20, 160_000], [2, 25, 160_000]]
    assert files == [[4, 0, 390_000]]
    assert told == ["This file is too large to keep its sound. Captions are kept as before."]


async def test_captions_go_before_sound_where_there_is_no_room(page: Page, server: PageServer, talk: Path) -> None:
    """The browser has room for the captions as soon as the sound of the file has gone."""
    await page.before_load(
        """window.full = false;
        const { put, delete: remove } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.put = function (value) {
          if (window.full) throw new DOMException("full", "QuotaExceededError");
          return put.call(this, value);
        };
        IDBObjectStore.prototype.delete = function (key) {
          if (this.name === "sound") window.full = false;
          return remove.call(this, key);
        };"""
    )
    await page.open(server.url)
    await keep_sound(page)
    await send_file(page, talk)
    await page.until(f"{KEPT}.then((spans) => spans.length === 1)")
    await keep_sound(page)
    await page.evaluate("window.full = true")
    await send_file(page, talk)
    await page.until(f"{KEPT}.then((spans) => spans.length === 0)")
    assert await page.evaluate(PROBLEM) is None
    await page.reload()
    await page.until(f"{RESTORED} && {TURNS}.length === 6")


async def test_no_room_for_sound_is_said_and_captions_stay(page: Page, server: PageServer) -> None:
    await page.before_load(
        """const { put } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.put = function (value) {
          if (this.name === "sound") throw new DOMException("full", "QuotaExceededError");
          return put.call(this, value);
        };"""
    )
    await page.open(server.url)
    await keep_sound(page)
    await listen(page, server.url)
    assert (await page.until(PROBLEM)).startswith("There is no room left in this browser to keep sound.")
    await page.until(f"{DONE}.length >= 2")
    await stop(page)
