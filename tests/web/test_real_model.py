"""The page with the embedded model: a person reads, the words appear."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.weights.store import cache_folder, pull
from tests.web.conftest import server_process
from tests.web.devtools import open_page, running_browser
from tests.web.shown import STATE, stop, texts

NEEDED = ("moonshine-tiny", "sample-two-cities")


@pytest.mark.timeout(300)
async def test_read_aloud_and_read_back(chromium: str, tmp_path: Path) -> None:
    missing = [name for name in NEEDED if not (cache_folder() / name).exists()]
    if missing:
        pytest.skip("not in the cache; run " + " and ".join(f"`tickertape pull {name}`" for name in missing))
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
