"""Who speaks in a file: names and colours on the page, in large captions and saved files; calm with one speaker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.realtime.gateway_doubles import ENGLISH, silence, tone
from tests.web.conftest import PageServer, write_wav
from tests.web.devtools import Page
from tests.web.shown import DONE, PROBLEM, RESTORED, STATE, TURNS, send_file

HOSTILE = "<i>Ann</i> --> &amp;"
WHO = "[...document.querySelectorAll('#turns .who')].map((who) => [who.textContent, who.dataset.colour])"
SPEAKERS = f"{TURNS}.map((li) => li.turn.words.map((word) => word.speaker))"


@pytest.fixture
def conversation(tmp_path: Path) -> Path:
    """Long enough that the engine says who spoke before the end; two words of one speaker follow two of the other."""
    rate = 16_000
    pcm = b"".join(silence(0.9, rate) + tone(seconds, rate) for seconds in (1.25, 1.65, 1.25, 1.65) * 4)
    return write_wav(tmp_path / "conversation.wav", pcm + silence(0.8, rate), rate)


def label(server: PageServer) -> None:
    server.engine.takes(replace(ENGLISH, speakers=True))


async def saved(page: Page, kind: str) -> str:
    await page.click("#save")
    await page.click(f"[data-format={kind}]")
    return await page.downloaded(kind)


async def test_a_server_without_the_weights_is_not_asked(page: Page, server: PageServer, conversation: Path) -> None:
    server.engine.takes(ENGLISH)
    await page.open(server.url)
    await send_file(page, conversation)
    assert await page.evaluate(PROBLEM) is None and await page.evaluate(WHO) == []
    assert not any("speakers" in (opened["options"] or {}) for opened in server.engine.opened)


async def test_a_file_of_one_speaker_is_calm(page: Page, server: PageServer, conversation: Path) -> None:
    label(server)
    server.engine.one_voice = True
    await page.open(server.url)
    await send_file(page, conversation)
    assert "speakers" in server.engine.opened[-1]["options"]
    assert await page.evaluate(WHO) == []
    assert {name for turn in await page.evaluate(SPEAKERS) for name in turn} == {"A"}
    assert "Speaker" not in await saved(page, "vtt")


@pytest.mark.parametrize("window", [0.0, 6.0, 30.0])
async def test_speakers_of_a_file_have_names_colours_and_files(
    page: Page, server: PageServer, conversation: Path, window: float
) -> None:
    """Read word by word or in windows: labels come after the words, and every word has its own."""
    label(server)
    server.engine.file_window_s = window
    await page.open(server.url)
    await send_file(page, conversation)
    spoken = [name for turn in await page.evaluate(SPEAKERS) for name in turn]
    assert spoken == [("A", "B")[n // 2 % 2] for n in range(len(spoken))] and len(spoken) >= 12
    names = await page.evaluate(WHO)
    assert ["Speaker A", "0"] in names and ["Speaker B", "1"] in names
    await page.evaluate(f"(window.prompt = () => {HOSTILE!r}, undefined)")
    await page.evaluate("[...document.querySelectorAll('.who')].find((who) => who.speaker === 'A').click()")
    await page.until(f"{WHO}.some(([name]) => name === {HOSTILE!r})")
    assert await page.evaluate("document.querySelectorAll('#turns i').length") == 0
    vtt = await saved(page, "vtt")
    assert "<v &lt;i&gt;Ann&lt;/i&gt; --&gt; &amp;amp;>" in vtt and "<v Speaker B>" in vtt and "<i>" not in vtt
    assert (await saved(page, "txt")).startswith(f"{HOSTILE}: ")
    # In the large captions too.
    await page.click("#open-overlay")
    lines = "[...document.querySelectorAll('#overlay-lines .speaker')].map((who) => who.textContent)"
    assert {f"{HOSTILE}: ", "Speaker B: "} >= set(await page.until(f"{lines}.length && {lines}"))
    assert await page.evaluate("document.querySelectorAll('#overlay-lines i').length") == 0
    await page.click("#overlay-close")
    # Names are kept.
    await page.reload()
    await page.until(RESTORED)
    assert [HOSTILE, "0"] in await page.evaluate(WHO)


async def test_speakers_of_another_file_are_not_taken_for_the_first_ones(
    page: Page, server: PageServer, conversation: Path
) -> None:
    label(server)
    await page.open(server.url)
    await send_file(page, conversation)
    first = await page.evaluate(f"{TURNS}.length")
    await page.choose_file("#file", conversation)
    await page.until(f"{STATE} === 'Ready' && {DONE}.length > {first}")
    shown = await page.evaluate(SPEAKERS)
    assert {name for turn in shown[:first] for name in turn} == {"A", "B"}
    assert {name for turn in shown[first:] for name in turn} == {"C", "D"}
    turns = json.loads(await saved(page, "json"))["turns"]
    assert turns[-1]["words"][-1]["speaker"] in ("C", "D")


async def test_one_speaker_who_goes_on_stays_calm(page: Page, server: PageServer, talk: Path) -> None:
    label(server)
    server.engine.one_voice = True
    await page.open(server.url)
    await send_file(page, talk)
    await page.choose_file("#file", talk)
    await page.until(f"{STATE} === 'Ready' && {DONE}.length === 6")
    assert await page.evaluate(WHO) == []


async def test_a_label_looks_at_few_turns_however_many_there_are(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    looked = await page.evaluate(
        """(async () => {
          const { Transcript } = await import("./transcript.js");
          const looked = [];
          for (const count of [50, 5000]) {
            const t = new Transcript();
            let reads = 0;
            const counted = { get: (turn, name) => ((reads += 1), turn[name]) };
            const turn = (n) => ({ number: n, state: "done", text: "word", start: n, end: n + 0.9,
              words: [{ word: "word", start: n, end: n + 0.9 }] });
            t.load(Array.from({ length: count }, (_, n) => new Proxy(turn(n), counted)));
            reads = 0;
            t.label("A", 10, 10.9);
            looked.push([reads, t.entries.map(({ words }) => words[0].speaker).indexOf("A"), t.voices.size]);
          }
          return looked;
        })()"""
    )
    assert [place for _, place, _ in looked] == [10, 10]
    assert looked[1][0] < looked[0][0] + 20
