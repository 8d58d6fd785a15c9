"""The connection between page and server breaks or stalls: the page says so, and no word is lost or doubled.

Where words are compared with what was spoken, a file is played at its own pace: it takes the same way as a microphone,
and a browser on a busy machine loses nothing of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.web.conftest import PageServer
from tests.web.devtools import Page
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
    listen,
    play_at_pace,
    stop,
    texts,
    turns,
)

LAG = "parseFloat(document.querySelector('#lag').textContent)"
WARNED = "document.querySelector('#waiting-box').classList.contains('warning')"
WAITING = "parseFloat(document.querySelector('#waiting').textContent)"


async def test_cut_line_is_resumed_without_losing_a_word(page: Page, server: PageServer, talk: Path) -> None:
    async with line_to(server.port) as line:
        await play_at_pace(page, line.url, talk)
        await page.until(f"{DONE}.length >= 1")
        await page.until(OPEN_TEXT)
        line.cut()
        await page.until(f"/Server lost: retrying in \\d+ s/.test({STATE})")
        await page.until(f"{STATE} === 'Resumed, nothing lost'")
        await page.until(f"{STATE} === 'Ready'", 30)
    assert await texts(page) == list(SENTENCES[:3])
    check_order(await turns(page))
    assert server.engine.active == set()


async def test_retry_button_does_not_wait(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        line.cut()
        await page.until(f"/Server lost, still recording: retrying in \\d+ s/.test({STATE})")
        assert await page.evaluate(f"document.querySelector('#retry').click(), {STATE}") == "Server lost, reconnecting…"
        await page.until(f"{STATE} === 'Resumed, nothing lost'")
        await stop(page)
    check_said(await turns(page))


async def test_clogged_line_is_shown_and_then_caught_up(page: Page, server: PageServer, talk: Path) -> None:
    async with line_to(server.port) as line:
        await play_at_pace(page, line.url, talk)
        await page.until(OPEN_TEXT)
        line.clog()
        await page.until(f"{WAITING} > 2")
        line.clear()
        await page.until(f"{STATE} === 'Ready'", 30)
    assert await texts(page) == list(SENTENCES[:3])


async def test_slow_server_is_shown_while_somebody_speaks(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        line.clog()
        await page.until(WARNED)
        line.clear()
        await page.until(f"!{WARNED}")
        await stop(page)
    check_said(await turns(page))


async def test_dead_line_is_said_within_seconds_and_the_lag_grows(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.until(f"{DONE}.length >= 1")
        await page.evaluate(
            f"""(() => {{
              window.said = null;
              const look = () => {{ if (/^No answer/.test({STATE})) window.said ??= {WAITING}; }};
              const changes = {{ subtree: true, childList: true }};
              new MutationObserver(look).observe(document.querySelector("#state"), changes);
            }})()"""
        )
        line.freeze()
        await page.until(f"/^No answer from the server, still recording \\(\\d+ s\\)$/.test({STATE})")
        # Counted in sound that waits, which is recorded in real time.
        assert 2 <= await page.evaluate("window.said") <= 5
        lag = await page.evaluate(LAG)
        assert lag > 2
        await page.until(f"{LAG} > {lag} + 1")
        line.clear()
        await page.until(f"{STATE}.startsWith('Listening') || {STATE}.startsWith('Resumed')")
        await stop(page)
    check_said(await turns(page))


async def test_line_that_stays_dead_is_tried_anew_and_loses_no_word(page: Page, server: PageServer, talk: Path) -> None:
    """Also connections that are begun meanwhile get no answer, so waiting for them must end."""
    async with line_to(server.port) as line:
        await play_at_pace(page, line.url, talk)
        await page.until(OPEN_TEXT)
        line.freeze()
        await page.until(f"/^Server lost: retrying in \\d+ s$/.test({STATE})")
        await page.until(f"{STATE}.includes('reconnecting')")
        await page.until(f"/^Server lost: retrying in \\d+ s$/.test({STATE})")
        line.clear()
        await page.until(f"{STATE} === 'Ready'", 45)
    assert await page.evaluate(PROBLEM) is None
    assert await texts(page) == list(SENTENCES[:3])


async def test_server_on_this_machine_is_heard_without_a_network(page: Page, server: PageServer) -> None:
    """A browser that is offline still reaches its own machine; it is named only when nothing comes back."""
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.evaluate("Object.defineProperty(navigator, 'onLine', { get: () => false })")
        await page.evaluate("dispatchEvent(new Event('offline'))")
        await page.until(f"{DONE}.length >= 1")
        assert await page.evaluate(STATE) == "Listening"
        line.freeze()
        await page.until(f"/^This device is offline, still recording/.test({STATE})")
        line.clear()
        await page.until(f"{STATE}.startsWith('Listening') || {STATE}.startsWith('Resumed')")
        await stop(page)


async def test_device_that_is_online_again_does_not_wait_for_the_next_try(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.evaluate("Math.random = () => 1")
        line.close_for_good()
        await page.until(f"/retrying in [4-9] s/.test({STATE})")
        line.open_again()
        await page.evaluate("dispatchEvent(new Event('online'))")
        await page.until(f"{STATE} === 'Resumed, nothing lost' || {STATE} === 'Listening'", 3)
        await stop(page)


async def test_page_in_the_background_comes_back_without_its_timers(page: Page, server: PageServer) -> None:
    """Browsers run the timers of a hidden page once a minute; its audio continues."""
    await page.before_load(
        """const [once, often] = [setTimeout, setInterval];
        const late = (delay) => (window.hushed && delay > 100 ? 6e4 : delay);
        window.setTimeout = (action, delay, ...rest) => once(action, late(delay), ...rest);
        window.setInterval = (action, delay, ...rest) => often(() => window.hushed || action(), delay, ...rest);"""
    )
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.evaluate("(window.hushed = true, undefined)")
        line.cut()
        await page.until(f"{STATE}.startsWith('Server lost')")
        await page.until(f"{STATE} === 'Resumed, nothing lost'", 15)
        line.freeze()
        await page.until(f"{STATE}.startsWith('Server lost')", 20)
        line.clear()
        await page.until(f"{STATE} === 'Resumed, nothing lost'", 20)
        await page.evaluate("(window.hushed = false, undefined)")
        await stop(page)
    check_said(await turns(page))


async def test_turns_without_words_share_one_row(page: Page, server: PageServer, talk: Path) -> None:
    """After an outage all sound comes at once: speech is found soon, and its words come later."""
    server.engine.mute_first = 1
    server.engine.mute_flush = True
    await play_at_pace(page, server.url, talk)
    waiting = f"{TURNS}.filter((li) => li.dataset.state === 'open' && !li.turn.text)"
    await page.until(f"{waiting}.length >= 2")
    assert await page.evaluate(f"{waiting}.filter((li) => li.checkVisibility()).length") == 1
    # The one that is next to get words.
    assert await page.evaluate(f"{waiting}[0].checkVisibility()")
    await page.click("#listen")
    await page.click("#listen")
    await page.until(f"{STATE} === 'Ready'")
    assert await page.evaluate(f"{waiting}.length") == 0


async def test_server_that_starts_is_tried_every_few_seconds(page: Page, server: PageServer) -> None:
    server.engine.ready = False
    await page.open(server.url)
    await page.click("#listen")
    await page.evaluate(
        """(() => {
          window.shown = [];
          const look = () => {
            const text = document.querySelector("#countdown").textContent;
            if (text && text !== window.shown.at(-1)) window.shown.push(text);
          };
          new MutationObserver(look).observe(document.querySelector("#state"), { subtree: true, childList: true });
        })()"""
    )
    asked = sum(url.endswith("/ready") for url in page.requests)
    while sum(url.endswith("/ready") for url in page.requests) < asked + 5:
        await page.until(f"{STATE}.startsWith('The server is starting')")
    shown = await page.evaluate("window.shown")
    assert shown and all(text in (f": retrying in {n} s" for n in range(4)) for text in shown)
    server.engine.ready = True
    await page.until(f"{STATE} === 'Listening'", 10)
    await stop(page)


async def test_sentence_of_a_refused_page_is_shown(page: Page, server: PageServer, talk: Path) -> None:
    """A proxy gives the server another name than the browser has, so the page is not the server's own.

    A browser hides from a page why a socket was refused; the same question by HTTP has the sentence.
    """
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.until("document.readyState === 'complete'")
        line.host = f"localhost:{server.port}"
        line.cut()
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{server.url}v1/audio/transcriptions", headers={"Origin": line.url[:-1]})
        said = answer.json()["error"]["message"]
        assert answer.status_code == 403 and "server.allowed_origins" in said
        await page.click("#listen")
        await page.until(f"{PROBLEM} === {json.dumps(said)} && {STATE} === 'Ready'")
        await page.click("#dismiss")
        await page.choose_file("#file", talk)
        await page.until(f"{PROBLEM} === {json.dumps(said)} && {STATE} === 'Ready'")


async def test_stopping_without_a_server_keeps_the_text_and_says_what_is_missing(
    page: Page, server: PageServer
) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.until(OPEN_TEXT)
        line.close_for_good()
        await page.until(WARNED)
        before = [turn.text for turn in await turns(page) if turn.text]
        await stop(page)
    *said, note = await turns(page)
    assert [turn.text for turn in said] == before and {turn.state for turn in said} <= {"done", "cut"}
    assert note.state == "note" and "were not transcribed" in note.text
    await page.click("#save")
    await page.click("[data-format=txt]")
    assert await page.downloaded("txt") == "".join(f"{text}\n" for text in before)
