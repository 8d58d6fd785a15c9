"""The page with the embedded model: a person reads, the words appear."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.weights.store import pull
from tests.web.conftest import READING, real_page
from tests.web.shown import STATE, check_order, stop, texts, turns


@pytest.mark.timeout(300)
async def test_read_aloud_and_read_back(chromium: str, tmp_path: Path) -> None:
    async with real_page(chromium, tmp_path) as (page, _):
        await page.click("#listen")
        await page.until(f"{STATE} === 'Listening'", 30)
        await page.until("document.querySelector('#turns').textContent.includes('best of times')", 60)
        # A browser that draws without a GPU leaves a real model little of two cores.
        await stop(page, 45)
        assert "best of times" in " ".join(await texts(page))


@pytest.mark.timeout(420)
async def test_file_becomes_captions_that_can_be_read(chromium: str, tmp_path: Path) -> None:
    """Three quarters of a minute, which the model reads in two windows."""
    async with real_page(chromium, tmp_path) as (page, _):
        await page.choose_file("#file", pull(READING))
        await page.until(f"{STATE} === 'Ready' && document.querySelectorAll('#turns li').length > 0", 240)
        shown = await turns(page)
    check_order(shown)
    assert "best of times" in shown[0].text and shown[0].start < 2
    assert len(shown) >= 5 and all(len(turn.text) <= 400 for turn in shown)
    # Sentences stay whole, as far as the model marks them.
    assert sum(turn.text.endswith((".", "?", "!")) for turn in shown) >= len(shown) - 1
