"""How sure the server is that a turn is over, as a quiet sign beside the caption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.realtime.gateway_doubles import ENGLISH
from tests.web.conftest import PageServer
from tests.web.devtools import Page
from tests.web.shown import DONE, STATE, choose, stop

SCORED = "[...document.querySelectorAll('#turns .scored')]"


@pytest.mark.parametrize("eagerness", ["", "medium"])
async def test_a_turn_has_a_sign_if_a_detector_has_ended_it(page: Page, server: PageServer, eagerness: str) -> None:
    server.engine.takes(replace(ENGLISH, turn_detector=True))
    await page.open(server.url)
    await choose(page, "#eagerness", eagerness)
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening'")
    await page.until(f"{DONE}.length >= 1", 60)
    if not eagerness:
        assert await page.evaluate(f"{SCORED}.length") == 0
    else:
        # Drawn as a part of a circle, and said in words to whoever points at the time.
        sure = await page.evaluate(f"{DONE}[0].turn.sure")
        assert 0 < sure <= 1
        assert float(await page.evaluate(f"{DONE}[0].style.getPropertyValue('--sure')")) == sure
        title = await page.evaluate(f"{DONE}[0].querySelector('time').title")
        assert title.endswith(f"the server is {int(100 * sure)} % sure that the turn is over")
    await stop(page)


async def test_the_sign_of_a_pause_goes_when_the_speaker_goes_on(page: Page, server: PageServer) -> None:
    await page.open(server.url)
    steps = await page.evaluate(
        """(async () => {
          const { Transcript } = await import("./transcript.js");
          const { Captions } = await import("./captions.js");
          const t = new Transcript();
          const made = (name) => document.createElement(name);
          const list = made("ol");
          new Captions(t, { list, earlier: made("button"), later: made("button"), live: made("button") });
          const said = "conversation.item.input_audio_transcription.delta";
          const pause = "input_audio_buffer.pause_scored";
          const scored = (item_id, at, sure) =>
            t.apply({ type: pause, item_id, audio_end_ms: at, end_of_turn_confidence: sure }, 0);
          const say = (delta, start) =>
            t.apply({ type: said, item_id: "a", delta, words: [{ word: delta, start, end: start + 0.3 }] }, 0);
          // A turn that is not known, or has no words yet, has no sign.
          scored("x", 100, 0.9);
          t.apply({ type: "input_audio_buffer.speech_started", item_id: "a", audio_start_ms: 0 }, 0);
          scored("a", 200, 0.9);
          const steps = [t.entries.length, t.entries[0].sure];
          say("Well", 1);
          scored("a", 2000, 0.4);
          steps.push(t.entries[0].sure);
          // A word from before the pause, late; then one after it.
          say("then", 1.5);
          steps.push(t.entries[0].sure);
          say("go", 2.5);
          steps.push(t.entries[0].sure, list.querySelector(".text").textContent);
          return steps;
        })()"""
    )
    assert steps == [1, None, 0.4, 0.4, None, "Wellthengo"]
