"""Pictures of the page for the README, from the embedded model and the sample recording.

python -m tests.web.screenshots docs/img
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import wave
from pathlib import Path

from engine.weights.store import pull
from realtime.config import ModelConfig
from tests.web.conftest import server_process, write_wav
from tests.web.devtools import Page, find_browser, open_page, running_browser

SECONDS_OF_SPEECH = 24
PHONE = (360, 740)


async def take(page: Page, folder: Path, url: str) -> None:
    """One recording, shown in every way."""
    await page.size(1200, 800)
    await page.media(prefers_color_scheme="light")
    await page.open(url)
    await page.screenshot(folder / "page-empty.png")
    await page.click("#listen")
    await page.point(1, 1)
    await page.until("document.querySelectorAll('#turns li').length >= 2", 60)
    await asyncio.sleep(SECONDS_OF_SPEECH)
    await page.until(
        "document.querySelector('#turns li:last-child[data-state=open] .text')?.textContent.length > 30", 60
    )
    await page.screenshot(folder / "page-light.png")
    await page.media(prefers_color_scheme="dark")
    await asyncio.sleep(0.6)
    await page.screenshot(folder / "page-dark.png")
    await page.click("#open-overlay")
    await page.until("document.querySelector('#overlay p')")
    await page.point(1, 1)
    await asyncio.sleep(0.6)
    await page.screenshot(folder / "page-overlay.png")
    await page.click("#overlay-close")
    await page.until("document.querySelector('#overlay').hidden")
    await page.size(*PHONE, scale=2, mobile=True)
    await page.media(prefers_color_scheme="light")
    await asyncio.sleep(0.6)
    await page.screenshot(folder / "page-phone.png")


async def take_file(page: Page, folder: Path, url: str, recording: Path) -> None:
    """A file on a page that was never used, while the rest of it is transcribed."""
    await page.size(1200, 800)
    await page.media(prefers_color_scheme="light")
    await page.open(url)
    await page.choose_file("#file", recording)
    await page.point(1, 1)
    await page.until("document.querySelectorAll('#turns li').length >= 5", 120)
    await asyncio.sleep(0.6)
    await page.screenshot(folder / "page-file.png")
    await page.click("#listen")


def long_recording(folder: Path) -> Path:
    """The sample so often that it is not over before the picture is taken."""
    with wave.open(str(pull("sample-two-cities"))) as sample:
        return write_wav(
            folder / "a tale of two cities.wav", sample.readframes(sample.getnframes()) * 6, sample.getframerate()
        )


async def visit(address: str, folder: Path, url: str) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        async with open_page(address, Path(downloads)) as page:
            await take(page, folder, url)
        async with open_page(address, Path(downloads)) as page:
            await take_file(page, folder, url, long_recording(Path(downloads)))


def main(folder: Path) -> None:
    browser = find_browser()
    if browser is None:
        raise SystemExit("install the Debian package 'chromium' first")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        server_process("--model", ModelConfig().name) as server,
        running_browser(browser, pull("sample-two-cities")) as address,
    ):
        asyncio.run(visit(address, folder, server.url))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
