"""The page as people use it: speak, read, stop, save; by mouse, by keyboard, and when things go wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.realtime.gateway_doubles import ENGLISH, FakeEngine
from tests.web.conftest import PageServer, page_server, server_process
from tests.web.devtools import CTRL, Page, open_page
from tests.web.page_server import WORDS
from tests.web.shown import (
    ALL_HEARD,
    DONE,
    OPEN_TEXT,
    PROBLEM,
    STATE,
    check_order,
    check_said,
    listen,
    stop,
    texts,
    turns,
)


async def test_speak_read_stop_and_save(page: Page, server: PageServer) -> None:
    await listen(page, server.url)
    # Text of an open turn is there before the turn is finished, and marked as such.
    await page.until(OPEN_TEXT)
    await page.until(f"{DONE}.length >= 1")
    assert await page.evaluate("document.querySelector('#announcer').textContent") in await texts(page)
    assert await page.until("document.querySelector('#lag').textContent.endsWith(' s')")
    await page.until(OPEN_TEXT)
    await stop(page)
    shown = await turns(page)
    assert {turn.state for turn in shown} == {"done"} and len(shown) > 1
    check_said(shown)
    # The server keeps no session for a client that has left.
    assert server.engine.active == set()
    await check_files(page, [turn.text for turn in shown])
    assert all(url.startswith((server.url, server.url.replace("http", "ws"))) for url in page.requests)


async def check_files(page: Page, said: list[str]) -> None:
    for name in ("txt", "srt", "vtt", "json"):
        await page.click("#save")
        await page.click(f"[data-format={name}]")
        text = await page.downloaded(name)
        if name == "txt":
            assert text.splitlines() == said
        elif name == "json":
            turns = json.loads(text)["turns"]
            assert [turn["text"] for turn in turns] == said
            assert [word["word"] for word in turns[0]["words"]] == said[0].split()
            starts = [word["start"] for turn in turns for word in turn["words"]]
            assert starts == sorted(starts) and 0.2 < starts[0]
        else:
            assert text.startswith("WEBVTT\n\n00:00:0" if name == "vtt" else "1\n00:00:0")
            lines = [line for line in text.splitlines() if " --> " not in line and not line.isdigit()]
            assert " ".join(lines).removeprefix("WEBVTT").split() == " ".join(said).split()


async def test_words_said_while_the_server_starts_are_not_lost(page: Page, server: PageServer) -> None:
    server.engine.ready = False
    await page.open(server.url)
    await page.click("#listen")
    await page.until(f"/The server is starting, still recording: retrying in \\d+ s/.test({STATE})")
    # The first sentence is over before the server can hear it.
    await page.until("document.querySelector('#elapsed').textContent >= '0:03'")
    server.engine.ready = True
    await page.until(f"{DONE}.length >= 1")
    await stop(page)
    shown = await turns(page)
    check_said(shown)
    assert 0 < shown[0].start < 2 < shown[-1].end


async def test_word_times_under_the_pointer_and_by_arrow_keys(page: Page, server: PageServer) -> None:
    await listen(page, server.url)
    await page.until(f"{DONE}.length >= 1")
    await stop(page)
    x, y = await page.evaluate("(({ x, y }) => [x, y])(document.querySelectorAll('.word')[1].getBoundingClientRect())")
    await page.point(x + 9, y + 9)
    tip = "!document.querySelector('#tip').hidden && document.querySelector('#tip').textContent"
    shown = await page.until(tip)
    start, end = (float(part.split(":")[1]) for part in shown.split(" – "))
    assert 0.2 < start < end < start + 0.5
    await page.point(5, 5)
    await page.until("document.querySelector('#tip').hidden")
    await page.evaluate("document.querySelector('#captions').focus()")
    for _ in range(2):
        await page.press("ArrowRight")
        await page.until(tip)
    await page.until(f"document.querySelector('#tip').textContent === {shown!r}")
    assert await page.evaluate("document.querySelector('#announcer').textContent") == f"{WORDS[1]}, {shown}"
    # Escape within the two frames after an arrow key hides the time for good.
    await page.press("ArrowLeft")
    await page.press("Escape")
    await page.until("document.querySelector('#tip').hidden")
    frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
    await page.evaluate(f"new Promise((done) => {frames})")
    assert await page.evaluate("document.querySelector('#tip').hidden")


async def test_keyboard_reaches_everything(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    seen = []
    for _ in range(7):
        await page.press("Tab")
        seen.append(await page.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert await page.evaluate(f"{outline} || document.activeElement.className === 'skip'"), seen
    assert seen == ["skip", "open-overlay", "open-library", "theme", "open-settings", "listen", "open-file"]
    await page.evaluate("document.querySelector('#listen').focus()")
    await page.press("Enter")
    await page.until(f"{STATE} === 'Listening'")
    await page.press("Enter", CTRL)
    await page.until(f"{STATE} === 'Ready'")
    await page.evaluate("document.querySelector('#open-settings').focus()")
    await page.press("Enter")
    await page.until("document.querySelector('#settings').open")
    await page.press("Escape")
    await page.until("!document.querySelector('#settings').open")
    assert await page.evaluate("document.activeElement.id") == "open-settings"


async def test_wrong_key_is_said_and_the_right_one_works(page: Page) -> None:
    async with page_server(None, "sesame-open-up") as server:
        await page.open(server.url)
        await page.click("#listen")
        assert "needs an access key" in await page.until(PROBLEM)
        # The dialog has opened with the field to fill in.
        assert await page.evaluate("document.activeElement.id") == "key"
        await page.type("sesame-closed")
        await page.press("Escape")
        await page.click("#listen")
        assert "does not accept this access key" in await page.until(f"{PROBLEM}?.includes('accept') && {PROBLEM}")
        await page.evaluate("document.querySelector('#key').value = ''; document.querySelector('#key').focus()")
        await page.type("sesame-open-up")
        await page.press("Enter")
        await page.until("!document.querySelector('#settings').open")
        await page.click("#listen")
        await page.until(f"{STATE} === 'Listening'")
        assert await page.evaluate("localStorage.getItem('tickertape.choices')?.includes('sesame') ?? false") is False


async def test_full_server_is_said_and_tried_again(page: Page) -> None:
    async with page_server(FakeEngine(slots=0)) as server:
        await page.open(server.url)
        await page.click("#listen")
        await page.until(f"/The server is full, still recording: retrying in \\d+ s/.test({STATE})")
        await page.until("!document.querySelector('#retry').hidden")
        await stop(page)


async def test_server_that_is_gone_before_the_first_word_is_said(page: Page) -> None:
    with server_process() as server:
        await page.open(server.url)
        server.kill()
        await page.click("#listen")
        said = await page.until(f"{PROBLEM} ?? (/^Server lost/.test({STATE}) && {STATE})")
        assert said.startswith("Server lost")


async def test_denied_microphone_is_said(page: Page, server: PageServer) -> None:
    await page.deny("microphone", server.url)
    await page.open(server.url)
    await page.click("#listen")
    assert "may not use the microphone" in await page.until(PROBLEM)
    assert await page.evaluate(STATE) == "Ready"


async def test_killed_server_is_said_and_the_page_recovers(page: Page) -> None:
    with server_process() as server:
        await listen(page, server.url)
        await page.until(f"{DONE}.length >= 1")
        await page.until(OPEN_TEXT)
        server.kill()
        await page.until(f"/Server lost, still recording: retrying in \\d+ s/.test({STATE})")
        before = await turns(page)
        server.start()
        await page.until(f"{STATE} === 'Back, in a new session'", 30)
        await page.until(ALL_HEARD, 30)
        await stop(page)
    *finished, cut_off = before
    after = await turns(page)
    assert after[: len(finished)] == finished
    # The turn that was cut off is heard again from its start by the new server, whose engine begins its text anew.
    again = after[len(finished) :]
    check_said(again)
    check_order(after)
    assert abs(again[0].start - cut_off.start) < 0.3
    assert again[0].word_ends[-1] > cut_off.word_ends[-1] - 0.4


async def test_dropped_file_that_is_no_sound_is_said(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    await page.evaluate(
        """(() => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File(["this is not music"], "notes.mp3"));
          document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        })()"""
    )
    assert "notes.mp3 could not be read: The stream is none of" in await page.until(PROBLEM)
    assert await page.evaluate(STATE) == "Ready"


async def test_chosen_microphone_is_used_and_remembered(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    chosen = await page.until("document.querySelector('#device').options[2]?.value")
    await page.evaluate(
        f"""(() => {{
          document.querySelector("#device").value = {chosen!r};
          document.querySelector("#device").dispatchEvent(new Event("change"));
          const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
          navigator.mediaDevices.getUserMedia = (wanted) => ask((window.wanted = wanted));
        }})()"""
    )
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening'")
    assert await page.evaluate("window.wanted.audio.deviceId.exact") == chosen
    await stop(page)
    await page.open(server.url)
    await page.until(f"document.querySelector('#device').value === {chosen!r}")


async def test_two_speakers_have_names_and_colours_and_one_is_calm(browser: str, tmp_path: Path) -> None:
    who = "[...document.querySelectorAll('#turns .who')]"
    for one_voice in (True, False):
        engine = FakeEngine(words=WORDS)
        engine.takes(replace(ENGLISH, speakers=True))
        engine.one_voice = one_voice
        async with page_server(engine) as server, open_page(browser, tmp_path) as page:
            await listen(page, server.url)
            await page.until(f"{DONE}.length >= 2")
            if one_voice:
                assert await page.evaluate(f"{who}.length") == 0
            else:
                await page.until(f"{who}.length >= 2")
                names = set(await page.evaluate(f"{who}.map((one) => one.textContent)"))
                assert names == {"Speaker A", "Speaker B"}
                await page.evaluate("window.prompt = () => '<b>Ann</b>'")
                await page.evaluate(f"{who}.find((one) => one.textContent === 'Speaker A').click()")
                await page.until(f"{who}.some((one) => one.textContent === '<b>Ann</b>')")
                assert not await page.evaluate("document.querySelectorAll('#turns b').length")
            await stop(page)
            assert not page.errors
