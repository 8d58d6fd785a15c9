"""Large captions over the whole screen, and in a small window above all others."""

from __future__ import annotations

from pathlib import Path

from tests.web.conftest import PageServer
from tests.web.devtools import Page
from tests.web.line import line_to
from tests.web.page_server import SENTENCES
from tests.web.shown import listen, send_file, stop

SHOWN = "[...document.querySelectorAll('#overlay:not([hidden]) p')].map((p) => p.textContent)"
SIZE = "parseFloat(getComputedStyle(document.querySelector('#overlay p')).fontSize)"
# A window as `documentPictureInPicture` gives it; headless browsers open none.
SMALL_WINDOW = """
  const frame = document.createElement("iframe");
  const requestWindow = async (wanted) => {
    window.wanted = wanted;
    document.body.append(frame);
    return frame.contentWindow;
  };
  Object.defineProperty(window, "documentPictureInPicture", { value: { requestWindow } });
  window.floating = () => [...frame.contentDocument.querySelectorAll(".floating p")].map((p) => p.textContent);
"""


async def test_large_captions_fill_the_screen_and_follow_the_speaker(page: Page, server: PageServer) -> None:
    await listen(page, server.url)
    await page.evaluate("document.querySelector('#open-overlay').focus()")
    await page.press("Enter")
    await page.until("document.fullscreenElement?.id === 'overlay'")
    open_text = await page.until("document.querySelector('#overlay .open')?.textContent")
    await page.until(f"document.querySelector('#overlay .open')?.textContent.length > {len(open_text)}")
    before = await page.until(SIZE)
    assert before > 36
    await page.press("+")
    await page.until(f"{SIZE} > {before}")
    # What is newest is on the screen, however large the type.
    for _ in range(4):
        await page.press("+")
    low = "[...document.querySelectorAll('#overlay p')].at(-1).getBoundingClientRect().bottom"
    assert await page.evaluate(low) < await page.evaluate("innerHeight")
    await page.click("#overlay-close")
    await page.until("document.querySelector('#overlay').hidden && !document.fullscreenElement")
    await page.until("document.activeElement.id === 'open-overlay'")
    await stop(page)


async def test_large_captions_say_that_the_server_is_lost(page: Page, server: PageServer) -> None:
    async with line_to(server.port) as line:
        await listen(page, line.url)
        await page.click("#open-overlay")
        assert await page.evaluate("document.querySelector('#overlay-state').textContent") == ""
        line.close_for_good()
        await page.until("document.querySelector('#overlay-state').textContent.startsWith('Server lost')")
        box = await page.evaluate("document.querySelector('#overlay-state').getBoundingClientRect().toJSON()")
        assert box["height"] > 0 and box["bottom"] <= await page.evaluate("innerHeight")
        await page.click("#overlay-close")
        await page.until("document.querySelector('#overlay').hidden")
        await stop(page)


async def test_escape_closes_and_the_size_is_remembered(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    await page.click("#open-overlay")
    await page.until(f"{SHOWN}.join() === {','.join(SENTENCES[:3])!r}")
    await page.press("+")
    size = await page.evaluate(SIZE)
    await page.press("Escape")
    await page.until("document.querySelector('#overlay').hidden")
    await page.reload()
    await page.until("!document.querySelector('#restored').hidden")
    await page.click("#open-overlay")
    await page.until(f"{SIZE} === {size}")


async def test_small_window_shows_the_newest_words(page: Page, server: PageServer, talk: Path) -> None:
    await page.before_load(SMALL_WINDOW)
    await page.open(server.url)
    await page.click("#open-overlay")
    await page.click("#overlay-float")
    await page.until("document.querySelector('#overlay').hidden && window.wanted")
    await send_file(page, talk)
    await page.until(f"window.floating().join() === {','.join(SENTENCES[:3])!r}")


async def test_small_window_as_a_video_where_there_are_no_others(page: Page, server: PageServer, talk: Path) -> None:
    await page.before_load(
        """delete window.documentPictureInPicture;
        Object.defineProperty(Document.prototype, "pictureInPictureEnabled", { get: () => true });
        HTMLVideoElement.prototype.requestPictureInPicture = async function () { window.video = this; };
        const fill = CanvasRenderingContext2D.prototype.fillText;
        window.drawn = [];
        CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
          window.drawn.push(text);
          fill.call(this, text, ...at);
        };"""
    )
    await page.open(server.url)
    await send_file(page, talk)
    await page.click("#open-overlay")
    await page.click("#overlay-float")
    await page.until("window.video?.srcObject.getVideoTracks().length === 1 && !window.video.paused")
    await page.until(f"{list(SENTENCES[:3])!r}.every((text) => window.drawn.includes(text))")


async def test_small_window_is_not_offered_where_there_is_none(page: Page, server: PageServer) -> None:
    await page.before_load(
        """delete window.documentPictureInPicture;
        Object.defineProperty(Document.prototype, "pictureInPictureEnabled", { get: () => false });"""
    )
    await page.open(server.url)
    assert await page.evaluate("document.querySelector('#overlay-float').hidden")
