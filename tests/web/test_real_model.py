"""The page with the embedded model: a person reads, the words appear."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.weights.store import cache_folder, pull
from tests.web.conftest import server_process
from tests.web.devtools import open_page, running_browser
from tests.web.shown import STATE, check_order, stop, texts, turns

NEEDED = ("moonshine-tiny", "sample-two-cities")


def check_cache() -> None:
    missing = [name for name in NEEDED if not (cache_folder() / name).exists()]
    if missing:
        pytest.skip("not in the cache; run " + " and ".join(f"`tickertape pull {name}`" for name in missing))


@pytest.mark.timeout(300)
async def test_read_aloud_and_read_back(chromium: str, tmp_path: Path) -> None:
    check_cache()
    # The smaller model: what is tested is the page, and a browser leaves little of two cores.
    with (
        server_process("--model", "moonshine-tiny") as server,
        running_browser(chromium, pull("sample-two-cities")) as address,
    ):
        async with open_page(address, tmp_path) as page:
            await page.open(server.url)
            await page.click("#listen")
            await page.until(f"{STATE} === 'Listening'", 30)
            await page.until("document.querySelector('#turns').textContent.includes('best of times')", 60)
            # A browser that draws without a GPU leaves a real model little of two cores.
            await stop(page, 45)
            assert "best of times" in " ".join(await texts(page))
            assert page.errors == []


@pytest.mark.timeout(300)
async def test_file_becomes_captions_that_can_be_read(chromium: str, tmp_path: Path) -> None:
    """Three quarters of a minute, which the model reads in two windows."""
    check_cache()
    sample = pull("sample-two-cities")
    with server_process("--model", "moonshine-tiny") as server, running_browser(chromium, sample) as address:
        async with open_page(address, tmp_path) as page:
            await page.open(server.url)
            await page.choose_file("#file", sample)
            await page.until(f"{STATE} === 'Ready' && document.querySelectorAll('#turns li').length > 0", 120)
            shown = await turns(page)
            assert page.errors == []
    check_order(shown)
    assert "best of times" in shown[0].text and shown[0].start < 2
    assert len(shown) >= 5 and all(len(turn.text) <= 400 for turn in shown)
    # Sentences stay whole, as far as the model marks them.
    assert sum(turn.text.endswith((".", "?", "!")) for turn in shown) >= len(shown) - 1
