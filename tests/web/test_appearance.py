"""Light and dark, phone width, names for screen readers, no way out to other hosts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.conftest import PageServer
from tests.web.devtools import Page

# Every visible text with a contrast below 4.5 to the nearest painted background.
LOW_CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...rgba(colour)].map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    const { backgroundColor } = getComputedStyle(element);
    if (rgba(backgroundColor)[3] > 250 || !element.parentElement) return backgroundColor;
    return background(element.parentElement);
  };
  const low = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(background(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return low;
})()"""
ADD_CAPTIONS = """(() => {
  document.querySelector("#captions").hidden = false;
  document.querySelector("#problem").hidden = false;
  document.querySelector("#problem-text").textContent = "Something is wrong.";
  document.querySelector("#state").dataset.state = "lost";
  const hidden = ["retry", "restored", "pause", "after", "search", "job"];
  for (const id of hidden) document.querySelector(`#${id}`).hidden = false;
  document.querySelector("#restored-text").textContent = "Captions of 14 November";
  document.querySelector("#job-name").textContent = "a name that is longer than any screen is wide ".repeat(5);
  document.querySelector("#job-facts").textContent = "43 %, about 20 min left";
  for (const state of ["done", "open", "cut", "note"]) {
    const item = document.createElement("li");
    item.dataset.state = state;
    item.innerHTML = "<time>0:01</time><p class='text'>Some words that somebody has said.</p>";
    document.querySelector("#turns").append(item);
  }
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_all_text_can_be_read_in_both_themes(page: Page, server: PageServer, theme: str) -> None:
    await page.media(prefers_color_scheme=theme)
    await page.open(server.url)
    await page.evaluate(ADD_CAPTIONS)
    assert await page.evaluate(LOW_CONTRAST) == []
    await page.evaluate("document.querySelector('#settings').showModal()")
    assert await page.evaluate(LOW_CONTRAST) == []
    await page.evaluate("document.querySelector('#settings').close()")
    await page.evaluate("document.querySelector('#open-library').click()")
    await page.until("document.querySelector('#library').open")
    assert await page.evaluate(LOW_CONTRAST) == []


async def test_theme_follows_the_system_until_chosen_and_is_remembered(page: Page, server: PageServer) -> None:
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    await page.media(prefers_color_scheme="light")
    await page.open(server.url)
    light = await page.evaluate(paper)
    await page.media(prefers_color_scheme="dark")
    assert await page.evaluate(paper) != light
    await page.click("#theme")
    assert await page.evaluate(paper) == light
    await page.open(server.url)
    assert await page.evaluate(paper) == light
    assert await page.evaluate("document.querySelector('#theme').getAttribute('aria-pressed')") == "false"


@pytest.mark.parametrize("width", [360, 768])
async def test_nothing_runs_off_a_small_screen(page: Page, server: PageServer, width: int) -> None:
    await page.size(width, 740, mobile=True)
    await page.open(server.url)
    await page.evaluate(ADD_CAPTIONS)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    small = await page.evaluate(
        """[...document.querySelectorAll("button, select")].filter((e) => e.checkVisibility())
        .filter((e) => e.offsetHeight < 24 || e.offsetWidth < 24).map((e) => e.outerHTML)"""
    )
    assert small == []


async def test_every_control_has_a_name(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    await page.evaluate(ADD_CAPTIONS)
    unnamed, roles = await names(page)
    assert unnamed == [] and {"button", "searchbox", "region", "status", "alert", "progressbar"} <= roles
    # A file has no level.
    await page.evaluate("document.querySelector('#job').hidden = true")
    unnamed, roles = await names(page)
    assert unnamed == [] and "meter" in roles
    # An open dialog hides everything else from a screen reader.
    await page.evaluate("document.querySelector('#settings').showModal()")
    unnamed, roles = await names(page)
    assert unnamed == [] and {"dialog", "textbox", "slider", "checkbox", "combobox"} <= roles


async def names(page: Page) -> tuple[list[Any], set[str]]:
    tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
    nodes = [node for node in tree if not node.get("ignored")]
    asked = {"button", "combobox", "textbox", "slider", "checkbox", "meter", "progressbar", "region", "dialog", "group"}
    unnamed = [node for node in nodes if node["role"]["value"] in asked and not node.get("name", {}).get("value")]
    return unnamed, {node["role"]["value"] for node in nodes}


async def test_reduced_motion_hides_the_waveform_and_stops_all_animation(page: Page, server: PageServer) -> None:
    await page.media(prefers_reduced_motion="reduce")
    await page.open(server.url)
    await page.evaluate(ADD_CAPTIONS)
    assert await page.evaluate("document.querySelector('#waveform').clientHeight") == 0
    assert await page.evaluate("document.getAnimations().length") == 0


async def test_page_cannot_ask_another_host(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    assert await page.evaluate("fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()
    assert all(url.startswith(server.url) for url in page.requests)
