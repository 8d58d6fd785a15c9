"""The page as people use it: speak, read, stop, save; by mouse, by keyboard, and when things go wrong."""

from __future__ import annotations

import json
from pathlib import Path

from tests.realtime.gateway_doubles import silence, tone
from tests.web.conftest import PageServer, page_server, write_wav
from tests.web.devtools import CTRL, Page, open_page, running_browser
from tests.web.page_server import SENTENCES

TURNS = "[...document.querySelectorAll('#turns li')]"
DONE = f"{TURNS}.filter((li) => li.dataset.state === 'done')"
STATE = "document.querySelector('#state').textContent"
PROBLEM = "document.querySelector('#problem:not([hidden]) p')?.textContent"


async def texts(page: Page) -> list[str]:
    shown: list[str] = await page.evaluate(f"{DONE}.map((li) => li.querySelector('.text').textContent)")
    return shown


async def listen(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening'")


async def stop(page: Page, seconds: float = 15) -> None:
    await page.click("#listen")
    await page.until(f"{STATE} === 'Ready'", seconds)


async def test_speak_read_stop_and_save(page: Page, server: PageServer) -> None:
    await listen(page, server)
    # Text of an open turn is there before the turn is finished, and marked as such.
    await page.until(f"{TURNS}.some((li) => li.dataset.state === 'open' && li.querySelector('.text').textContent)")
    await page.until(f"{DONE}.length === 2")
    assert await texts(page) == list(SENTENCES[:2])
    assert float((await page.evaluate("document.querySelector('#lag').textContent")).split()[0]) < 5
    assert await page.evaluate("document.querySelector('#announcer').textContent") == SENTENCES[1]
    await page.until(f"{TURNS}.length === 3 && {TURNS}[2].querySelector('.text').textContent.startsWith('One')")
    await stop(page)
    said = await texts(page)
    assert said[:2] == list(SENTENCES[:2]) and SENTENCES[2].startswith(said[2])
    # The server keeps no place for somebody who has left.
    assert server.capacity()["sessions"] == 0
    await check_files(page, said)
    assert all(url.startswith((server.url, server.url.replace("http", "ws"))) for url in page.requests)


async def check_files(page: Page, said: list[str]) -> None:
    for name in ("txt", "srt", "vtt", "json"):
        await page.click(f"[data-format={name}]")
        text = await page.downloaded(name)
        if name == "txt":
            assert text.splitlines() == said
        elif name == "json":
            turns = json.loads(text)["turns"]
            assert [turn["text"] for turn in turns] == said
            assert [word["word"] for word in turns[0]["words"]] == said[0].split()
            starts = [word["start"] for turn in turns for word in turn["words"]]
            assert starts == sorted(starts) and 0.5 < starts[0] < starts[-1] < 20
        else:
            assert text.startswith("WEBVTT\n\n00:00:0" if name == "vtt" else "1\n00:00:0")
            assert text.count(" --> ") == 3
            assert " ".join(said[0].split()) in text


async def test_word_times_under_the_pointer_and_by_arrow_keys(page: Page, server: PageServer) -> None:
    await listen(page, server)
    await page.until(f"{DONE}.length === 1")
    await stop(page)
    x, y = await page.evaluate("(({ x, y }) => [x, y])(document.querySelectorAll('.word')[1].getBoundingClientRect())")
    await page.point(x + 9, y + 9)
    tip = "!document.querySelector('#tip').hidden && document.querySelector('#tip').textContent"
    shown = await page.until(tip)
    start, end = (float(part.split(":")[1]) for part in shown.split(" – "))
    assert 0.5 < start < end < start + 0.5
    await page.point(5, 5)
    await page.until("document.querySelector('#tip').hidden")
    await page.evaluate("document.querySelector('#captions').focus()")
    for _ in range(2):
        await page.press("ArrowRight")
        await page.until(tip)
    await page.until(f"document.querySelector('#tip').textContent === {shown!r}")
    assert await page.evaluate("document.querySelector('#announcer').textContent") == f"tide, {shown}"
    await page.press("Escape")
    await page.until("document.querySelector('#tip').hidden")


async def test_keyboard_reaches_everything(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    seen = []
    for _ in range(6):
        await page.press("Tab")
        seen.append(await page.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert await page.evaluate(f"{outline} || document.activeElement.className === 'skip'"), seen
    assert seen == ["skip", "theme", "open-settings", "listen", "device", "open-file"]
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
    with page_server("--key", "sesame-open-up") as server:
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
    with page_server("--slots", "0") as server:
        await page.open(server.url)
        await page.click("#listen")
        await page.until(f"/The server is full: retrying in \\d+ s/.test({STATE})")
        await page.until("!document.querySelector('#retry').hidden")
        await stop(page)


async def test_denied_microphone_is_said(chromium: str, server: PageServer, tmp_path: Path) -> None:
    with running_browser(chromium, microphone=False) as address:
        async with open_page(address, tmp_path) as page:
            await page.open(server.url)
            await page.click("#listen")
            assert "may not use the microphone" in await page.until(PROBLEM)
            assert await page.evaluate(STATE) == "Ready"


async def test_killed_server_is_said_and_the_page_recovers(page: Page) -> None:
    with page_server() as server:
        await kill_and_recover(page, server)


async def kill_and_recover(page: Page, server: PageServer) -> None:
    await listen(page, server)
    await page.until(f"{DONE}.length === 1")
    await page.until(f"{TURNS}[1]?.querySelector('.text').textContent.length > 10")
    server.kill()
    await page.until(f"/Server lost, still recording: retrying in \\d+ s/.test({STATE})")
    assert await texts(page) == [SENTENCES[0]]
    server.start()
    await page.until(f"{STATE} === 'Back, in a new session'", 30)
    # The turn that was cut off is heard again from its start by the new server, whose engine begins its text anew.
    await page.until(f"{DONE}.length === 3", 30)
    await stop(page)
    said = await texts(page)
    assert said[0] == SENTENCES[0]
    assert len(" ".join(said[1:]).split()) == 10
    starts = await page.evaluate(f"{DONE}.map((li) => parseFloat(li.querySelector('time').dateTime.slice(2)))")
    assert 2.8 < starts[1] < 4.0 and starts == sorted(starts)


async def test_file_is_read_as_fast_as_the_server_takes_it(page: Page, server: PageServer, tmp_path: Path) -> None:
    rate = 22_050
    pcm = b"".join(tone(3.2, rate) + silence(1.0, rate) for _ in range(6))
    await page.open(server.url)
    await page.evaluate("document.querySelector('#pace').value = 'fast'")
    await page.evaluate("document.querySelector('#pace').dispatchEvent(new Event('change'))")
    await page.choose_file("#file", write_wav(tmp_path / "talk.wav", pcm, rate))
    await page.until(f"{STATE} === 'Ready' && {DONE}.length === 6")
    # One word for each 0.4 s of sound, give or take where the engine's frames fall.
    assert 47 <= len(" ".join(await texts(page)).split()) <= 49
    assert await page.evaluate("document.querySelector('#elapsed').textContent") == "0:25"


async def test_dropped_file_that_is_no_sound_is_said(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    await page.evaluate(
        """(() => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File(["this is not music"], "notes.mp3"));
          document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        })()"""
    )
    assert "could not be read as sound" in await page.until(PROBLEM)
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
