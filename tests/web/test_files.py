"""A file in the page: its captions and their times, its progress, and its end without text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import av
import httpx
import numpy as np
import pytest

from tests.realtime.gateway_doubles import ENGLISH, silence, tone
from tests.web.conftest import PageServer, page_server, spoken, write_wav
from tests.web.devtools import Page, open_page
from tests.web.line import line_to
from tests.web.page_server import SENTENCES
from tests.web.shown import (
    DONE,
    OPEN_TEXT,
    PROBLEM,
    STATE,
    TURNS,
    check_said,
    choose,
    play_at_pace,
    send_file,
    stop,
    texts,
    turns,
)

JOB = "document.querySelector('#job:not([hidden])')"
JOB_NAME = f"{JOB}?.querySelector('#job-name').textContent"
JOB_FACTS = f"{JOB}?.querySelector('#job-facts').textContent"
PROGRESS = f"{JOB}?.querySelector('progress')"
DROP_NOTES = """(() => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File(["this is not music"], "notes.mp3"));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
})()"""
LISTEN = "document.querySelector('#listen').textContent"


@pytest.fixture
def lecture(tmp_path: Path) -> Path:
    """Two minutes without a pause."""
    return write_wav(tmp_path / "lecture.wav", tone(120, 16_000), 16_000)


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    return write_wav(tmp_path / "quiet.wav", silence(3, 16_000), 16_000)


async def test_speech_without_pauses_becomes_captions_of_whole_sentences(
    page: Page, server: PageServer, lecture: Path
) -> None:
    await page.open(server.url)
    await send_file(page, lecture)
    shown = await turns(page)
    check_said(shown)
    assert sum(len(turn.words) for turn in shown) == 300
    assert {turn.state for turn in shown} == {"done"} and len(shown) > 8
    assert all(turn.text.endswith(".") and 30 < len(turn.text) < 300 for turn in shown[:-1])
    assert all(turn.end is not None and turn.end - turn.start < 30 for turn in shown)
    assert await page.evaluate(f"{TURNS}[0].querySelector('time').textContent") == "0:00"
    assert await page.evaluate(f"{TURNS}.at(-1).querySelector('time').textContent") > "1:40"
    await page.click("#save")
    await page.click("[data-format=json]")
    saved = json.loads(await page.downloaded("json"))["turns"]
    assert [turn["text"] for turn in saved] == [turn.text for turn in shown]


async def test_words_without_marks_are_cut_too(page: Page, server: PageServer, lecture: Path) -> None:
    server.engine.words = ["word"]
    await page.open(server.url)
    await send_file(page, lecture)
    lengths = [len(turn.text) for turn in await turns(page)]
    assert sum(lengths) > 1000 and max(lengths) <= 400


async def test_name_share_and_time_left_are_shown(page: Page, server: PageServer, tmp_path: Path) -> None:
    """The line lets a part through, then the engine takes its time."""
    server.engine.file_window_s = 2.0
    # More than the sockets on its way hold.
    large = write_wav(tmp_path / "an hour with the harbour master.wav", tone(12, 1_000_000), 1_000_000)
    talk = write_wav(tmp_path / "talk.wav", tone(60, 16_000), 16_000)
    async with line_to(server.port) as line:
        await page.open(line.url)
        line.clog()
        await page.choose_file("#file", large)
        await page.until(f"{STATE} === 'Sending' && /^Sent [1-9]\\d* %/.test({JOB_FACTS})")
        assert await page.evaluate(JOB_NAME) == large.name
        assert 0 < await page.evaluate(f"{PROGRESS}.value") < 1
        assert await page.evaluate(LISTEN) == "Cancel"
        await page.click("#listen")
        await page.until(f"{STATE} === 'Ready' && !{JOB}")
        line.clear()
        server.engine.feed_delay_s = 0.1
        await page.choose_file("#file", talk)
        await page.until(f"{STATE} === 'Transcribing' && /^\\d+ %, .* left$/.test({JOB_FACTS})")
        assert await page.evaluate(JOB_NAME) == talk.name
        # Text is there while the rest is read.
        await page.until(OPEN_TEXT)
        await page.until(f"{STATE} === 'Ready' && !{JOB}")
    check_said(await turns(page))


async def test_cancelled_file_says_what_is_missing(page: Page, server: PageServer, lecture: Path) -> None:
    server.engine.file_window_s = 2.0
    server.engine.feed_delay_s = 0.3
    await page.open(server.url)
    await page.choose_file("#file", lecture)
    await page.until(f"{DONE}.length > 0")
    await stop(page)
    note = (await turns(page))[-1]
    assert note.state == "note" and re.fullmatch(r"lecture\.wav was stopped at 0:\d\d of 2:00", note.text)


@pytest.mark.parametrize("whole", [True, False])
async def test_silent_file_is_said(page: Page, server: PageServer, quiet: Path, whole: bool) -> None:
    if whole:
        await page.open(server.url)
        await page.choose_file("#file", quiet)
    else:
        await play_at_pace(page, server.url, quiet)
    assert await page.until(PROBLEM) == "No speech was found in quiet.wav."
    assert await page.evaluate(STATE) == "Ready"
    # It is no fault, and the next file takes it away.
    assert await page.evaluate("document.querySelector('#problem').dataset.kind") == "notice"
    server.engine.feed_delay_s = 0.3
    await page.choose_file("#file", quiet)
    await page.until(f"!{PROBLEM}")


async def test_sentence_of_the_server_is_shown(page: Page, server: PageServer, tmp_path: Path) -> None:
    """For a film without sound, and for what is no sound at all."""
    film = tmp_path / "film.mp4"
    with av.open(str(film), "w") as container:
        pictures = container.add_stream("mpeg4", rate=5)
        pictures.width = pictures.height = 64
        for _ in range(5):
            container.mux(pictures.encode(av.VideoFrame(64, 64, "yuv420p")))
        container.mux(pictures.encode())
    notes = tmp_path / "notes.mp3"
    notes.write_text("this is not music")
    await page.open(server.url)
    for file in (film, notes):
        async with httpx.AsyncClient(trust_env=False) as client:
            form = {"file": (file.name, file.read_bytes())}
            answer = await client.post(f"{server.url}v1/audio/transcriptions", files=form)
        assert answer.status_code == 400
        await page.choose_file("#file", file)
        said = f"{file.name} could not be read: {answer.json()['error']['message']}"
        await page.until(f"{PROBLEM} === {said!r}")
        assert await page.evaluate(STATE) == "Ready"


async def test_recording_of_a_phone_is_read(page: Page, server: PageServer, tmp_path: Path) -> None:
    """An M4A as phones and ffmpeg write it, with its index at the end."""
    memo = tmp_path / "memo.m4a"
    with av.open(str(memo), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        samples = np.frombuffer(spoken(16_000) + silence(0.8, 16_000), "<i2").reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, "s16", "mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert memo.read_bytes().index(b"moov") > memo.read_bytes().index(b"mdat")
    await page.open(server.url)
    await send_file(page, memo)
    assert await texts(page) == list(SENTENCES[:3])


async def test_file_waits_for_a_server_that_starts(page: Page, server: PageServer, talk: Path) -> None:
    server.engine.ready = False
    await page.open(server.url)
    await page.choose_file("#file", talk)
    await page.until(f"/^The server is starting: retrying in [1-3] s$/.test({STATE})")
    assert await page.evaluate(JOB_NAME) == talk.name
    server.engine.ready = True
    await page.until(f"{STATE} === 'Ready' && {TURNS}.length > 0")
    assert await texts(page) == list(SENTENCES[:3])


async def test_file_is_sent_again_when_the_line_broke_before_its_first_word(
    page: Page, server: PageServer, talk: Path
) -> None:
    server.engine.feed_delay_s = 0.3
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.choose_file("#file", talk)
        await page.until(f"{STATE} === 'Transcribing'")
        line.close_for_good()
        await page.until(f"/^Server lost: retrying in \\d+ s$/.test({STATE})")
        server.engine.feed_delay_s = 0.0
        line.open_again()
        await page.until(f"{STATE} === 'Ready'")
    assert await texts(page) == list(SENTENCES[:3])


async def test_dead_line_is_said_while_a_file_is_transcribed(page: Page, server: PageServer, talk: Path) -> None:
    """No text may come for long, so the page asks the server something else before it says so."""
    server.engine.feed_delay_s = 2.0
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.choose_file("#file", talk)
        await page.until(f"{STATE} === 'Transcribing'")
        await page.until("performance.now() > 12000")
        assert await page.evaluate(STATE) == "Transcribing"
        line.freeze()
        await page.until(f"/^No answer from the server \\(\\d+ s\\)$/.test({STATE})")
        line.clear()
        await page.until(f"{STATE} === 'Ready'")
    assert await texts(page) == list(SENTENCES[:3])


async def test_large_file_without_a_key_says_that_a_key_is_needed(page: Page, tmp_path: Path) -> None:
    """The server answers before it has read the file, which a browser may take for a broken line."""
    large = write_wav(tmp_path / "large.wav", tone(12, 1_000_000), 1_000_000)
    async with page_server(None, "sesame-open-up") as server:
        await page.open(server.url)
        await page.choose_file("#file", large)
        assert "needs an access key" in await page.until(PROBLEM)
        assert await page.evaluate("document.activeElement.id") == "key"


async def test_problem_is_in_view_however_long_the_captions(page: Page, server: PageServer, lecture: Path) -> None:
    await page.open(server.url)
    await send_file(page, lecture)
    await page.until("document.documentElement.scrollTop > 300")
    await page.evaluate(DROP_NOTES)
    await page.until(PROBLEM)
    box = await page.evaluate("document.querySelector('#problem').getBoundingClientRect().toJSON()")
    assert 0 <= box["top"] and box["bottom"] <= 800
    await page.click("#dismiss")
    await page.until(f"!{PROBLEM}")


async def test_page_that_goes_in_mid_file_notes_where_it_stopped(
    page: Page, server: PageServer, browser: str, tmp_path: Path, lecture: Path
) -> None:
    server.engine.file_window_s = 2.0
    server.engine.feed_delay_s = 0.3
    await page.open(server.url)
    await page.choose_file("#file", lecture)
    await page.until(f"{DONE}.length > 0")
    # As the browser tells a page that goes; its own question about leaving cannot be answered without a window.
    await page.evaluate("dispatchEvent(new Event('pagehide'))")
    await page.until(f"{STATE} === 'Ready'")
    async with open_page(browser, tmp_path, page.context) as later:
        await page.open("about:blank")
        await later.open(server.url)
        await later.until("!document.querySelector('#restored').hidden")
        assert "lecture.wav was stopped at 0:" in (await turns(later))[-1].text


async def test_of_several_files_the_others_are_named(page: Page, server: PageServer) -> None:
    server.engine.feed_delay_s = 0.5
    await page.open(server.url)
    sounds = """(async () => {
      const sound = await (await fetch("/favicon.svg")).blob();
      const dataTransfer = new DataTransfer();
      for (const name of ["a.mp3", "b.mp3", "c.mp3"]) dataTransfer.items.add(new File([sound], name));
      window.seen = [];
      const text = document.querySelector("#problem-text");
      new MutationObserver(() => window.seen.push(text.textContent)).observe(text, { childList: true });
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    })()"""
    await page.evaluate(sounds)
    said = "One file at a time: a.mp3 is transcribed, the other 2 were left out."
    await page.until(f"window.seen.includes({said!r})")


async def test_captions_of_one_file_are_saved_under_its_name(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    assert await page.evaluate("document.querySelector('#announcer').textContent") == "talk.wav is transcribed."
    for again, name in ((False, "talk.srt"), (True, "captions-")):
        if again:
            await send_file(page, talk)
        await page.click("#save")
        await page.click("[data-format=srt]")
        await page.downloaded("srt")
        assert page.saved_as.startswith(name)


async def test_wrong_field_is_not_blamed_on_the_file(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await page.until("!document.querySelector('#language-box').hidden")
    await choose(page, "#language", "fr")
    # A server that was started again with another model does not have the language.
    server.engine.takes(ENGLISH)
    await page.choose_file("#file", talk)
    said = await page.until(PROBLEM)
    assert "fr" in said and "could not be read" not in said


async def test_language_reaches_a_server_that_was_starting_when_the_page_came(
    page: Page, server: PageServer, talk: Path
) -> None:
    await page.open(server.url)
    await page.until("!document.querySelector('#language-box').hidden")
    await choose(page, "#language", "fr")
    await page.before_load("const ask = fetch; window.fetch = (what, how) => ask(window.late ? what : 'gone', how);")
    await page.open(server.url)
    await page.until("document.querySelector('#language-box').hidden")
    await page.evaluate("(window.late = true, undefined)")
    await send_file(page, talk)
    assert server.engine.opened[-1]["options"] == {"language": "fr"}
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening' && document.querySelector('#elapsed').textContent > '0:08'")
    await stop(page)
    assert server.engine.opened[-1]["options"] == {"language": "fr"}
