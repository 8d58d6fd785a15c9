"""The core of the page in a second browser: speak, read, come back after a reload, find, files, large captions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.web.conftest import PageServer
from tests.web.firefox import FirefoxTab, open_tab
from tests.web.line import line_to
from tests.web.page_server import SENTENCES
from tests.web.shown import (
    DONE,
    OPEN_TEXT,
    PROBLEM,
    STATE,
    TURNS,
    check_order,
    check_said,
    choose,
    listen,
    send_file,
    stop,
    texts,
    turns,
)

# On a machine without a sound card this browser's sound stands still, so a timer takes the place of its audio thread:
# three stretches of sound, in the chunks that the page's own recorder would make.
SPEAKER = """
  const rate = 16000, size = 960;
  const loud = [[0.9, 2.15], [3.05, 4.7], [5.6, 6.85]];
  const sample = (n) => loud.some(([from, to]) => n >= from * rate && n < to * rate) ? 9000 * Math.sin(n / 6) : 0;
  window.AudioContext = class {
    sampleRate = rate;
    state = "running";
    audioWorklet = { addModule: async () => {} };
    createMediaStreamSource = () => ({ connect: (node) => node.run() });
    async resume() {}
    async close() {}
  };
  window.AudioWorkletNode = class {
    port = {};
    run() {
      let at = 0;
      setInterval(() => {
        const chunk = Int16Array.from({ length: size }, (_, n) => sample(at + n));
        at += size;
        this.port.onmessage?.({ data: chunk });
      }, 60);
    }
  };
"""
# The browser may take long to start on a busy machine.
pytestmark = pytest.mark.timeout(480)


@pytest.fixture
async def tab(firefox: str) -> AsyncIterator[FirefoxTab]:
    async with open_tab(firefox) as opened:
        yield opened
        assert not opened.errors


async def test_speak_read_pause_and_stop(tab: FirefoxTab, server: PageServer) -> None:
    await tab.before_load(SPEAKER)
    await listen(tab, server.url)
    await tab.until(OPEN_TEXT)
    await tab.until(f"{DONE}.length >= 1")
    await tab.click("#pause")
    await tab.until(f"{STATE} === 'Paused'")
    await tab.click("#pause")
    await tab.until(f"{STATE} === 'Listening'")
    await stop(tab)
    check_said(await turns(tab))
    assert server.engine.active == set()


async def test_cut_line_is_resumed(tab: FirefoxTab, server: PageServer, talk: Path) -> None:
    async with line_to(server.port) as line:
        await tab.open(line.url)
        await choose(tab, "#pace", "real")
        await tab.choose_file("#file", talk)
        await tab.until(OPEN_TEXT)
        line.cut()
        await tab.until(f"{STATE} === 'Resumed, nothing lost'")
        await tab.until(f"{STATE} === 'Ready'")
    assert await texts(tab) == list(SENTENCES[:3])
    # The browser itself reports a line that was cut.
    tab.errors = [error for error in tab.errors if "connection" not in error]


async def test_server_that_starts_and_line_that_is_dead(tab: FirefoxTab, server: PageServer) -> None:
    """This browser holds back sockets to where sockets have failed, so the page must not let them fail often."""
    server.engine.ready = False
    await tab.before_load(SPEAKER)
    await tab.before_load(
        "window.asked = 0; const ask = fetch;"
        "window.fetch = (what, how) => ((window.asked += what === 'ready'), ask(what, how));"
    )
    async with line_to(server.port) as line:
        await tab.open(line.url)
        await tab.click("#listen")
        await tab.until(f"/^The server is starting, still recording: retrying in [0-3] s$/.test({STATE})")
        await tab.until("window.asked >= 4")
        server.engine.ready = True
        await tab.until(f"{STATE} === 'Listening'", 15)
        await tab.until(f"{DONE}.length >= 1")
        line.freeze()
        await tab.until(f"{STATE}.startsWith('No answer from the server, still recording')", 15)
        line.clear()
        await tab.until(f"{STATE}.startsWith('Listening') || {STATE}.startsWith('Resumed')", 15)
        await stop(tab)
    check_said(await turns(tab))
    # The browser itself reports a socket that was refused.
    tab.errors = [error for error in tab.errors if "connection" not in error]


# What is about to be stored when a page goes may be lost; on a busy machine that moment is long.
KEPT_TURNS = """new Promise((resolve) => {
  const request = indexedDB.open("tickertape");
  request.onsuccess = () => {
    const count = request.result.transaction("turns").objectStore("turns").count();
    count.onsuccess = () => { request.result.close(); resolve(count.result); };
  };
})"""


async def test_file_reload_find_and_large_captions(tab: FirefoxTab, server: PageServer, talk: Path) -> None:
    await tab.open(server.url)
    await send_file(tab, talk)
    before = await turns(tab)
    assert [turn.text for turn in before] == list(SENTENCES[:3])
    check_order(before)
    await tab.until(f"({KEPT_TURNS}).then((count) => count === {len(before)})")
    await tab.reload()
    await tab.until("!document.querySelector('#restored').hidden")
    assert await turns(tab) == before
    await tab.click("#find")
    await tab.type("tide fell.")
    await tab.until("document.querySelector('#search-count').textContent === '1 of 1'")
    await tab.until("[...CSS.highlights.get('found-now')].map(String).join() === 'tide fell.'")
    await tab.press("Escape")
    await tab.click("#copy")
    await tab.until("document.querySelector('#copy').textContent === 'Copied'")
    await tab.click("#open-overlay")
    await tab.until(
        f"[...document.querySelectorAll('#overlay p')].map((p) => p.textContent).at(-1) === {SENTENCES[2]!r}"
    )
    await tab.click("#overlay-close")
    await tab.until("document.querySelector('#overlay').hidden")
    await tab.evaluate("(window.confirm = () => true, undefined)")
    await tab.click("#clear")
    await tab.until(f"{TURNS}.length === 0")


async def test_forbidden_storage_is_said(tab: FirefoxTab, server: PageServer) -> None:
    await tab.before_load("IDBFactory.prototype.open = () => { throw new DOMException('not here', 'SecurityError'); };")
    await tab.open(server.url)
    assert "keeps no captions" in await tab.until(PROBLEM)


async def test_a_word_is_corrected_heard_and_found_again(tab: FirefoxTab, server: PageServer, talk: Path) -> None:
    await tab.before_load(
        "window.played = 0; HTMLMediaElement.prototype.play = async function () { window.played += 1; };"
    )
    await tab.open(server.url)
    await tab.evaluate("document.querySelector('#keep-sound').click()")
    await send_file(tab, talk)
    await tab.until("document.querySelector('#sound-size').textContent.includes('MB of sound are kept')")
    await tab.click("#turns li:nth-child(1) .word:nth-of-type(2)")
    await tab.until("document.activeElement.matches('.edit') && window.played === 1")
    await tab.evaluate("document.activeElement.select()")
    await tab.type("<b>moon</b>")
    await tab.press("Enter")
    await tab.until("!document.querySelector('.edit')")
    assert (await texts(tab))[0] == "The <b>moon</b> fell."
    # The keyboard is back at the word.
    assert await tab.evaluate("document.activeElement.id") == "captions"
    await tab.until(f"({KEPT_TURNS}).then((count) => count === 3)")
    await tab.reload()
    await tab.until("!document.querySelector('#restored').hidden")
    assert (await texts(tab))[0] == "The <b>moon</b> fell."
    await tab.click("#open-library")
    await tab.until("document.querySelector('#library').open")
    await tab.click("#library-field")
    await tab.type("moon")
    await tab.until("document.querySelector('#library-list mark')?.textContent === 'moon'")
    await tab.click("#library-list .place")
    await tab.until("document.querySelector('#search-count').textContent === '1 of 1'")
