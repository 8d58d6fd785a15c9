"""The page's modules on their own, run inside the browser: files, filters, memory, and pages of captions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from realtime.session.events import TimedWord
from realtime.session.words import subtitles, to_srt, to_vtt
from tests.web.conftest import page_server
from tests.web.devtools import open_page

TURN = """
const started = (id, at) => ({ type: "input_audio_buffer.speech_started", item_id: id, audio_start_ms: at });
const completed = (id, start, end, transcript, words) => ({
  type: "conversation.item.input_audio_transcription.completed", item_id: id, transcript, words,
  audio_start_ms: start, audio_end_ms: end,
});
"""


MODULES = ("captions", "decimator", "export", "format", "sample-buffer", "transcript", "turn-cutter", "waveform")
Run = Callable[[str], Awaitable[Any]]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(browser: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    """Runs a script with every module's exports in scope, in one tab for all tests."""
    async with page_server() as server, open_page(browser, tmp_path_factory.mktemp("downloads")) as page:
        await page.open(server.url)
        imports = "".join(f"Object.assign(all, await import('{server.url}{name}.js'));" for name in MODULES)

        async def script(body: str) -> Any:
            return await page.evaluate(f"(async () => {{ const all = {{}}; {imports} {TURN} {body} }})()")

        yield script
        assert not page.errors


async def test_captions_are_cut_as_the_server_cuts_them(run: Run) -> None:
    spoken = (
        "A short one. Then comes a sentence that nobody could ever read in one go on a screen, <so> it is cut somewhere"
    )
    words = [{"word": word, "start": 0.5 * n, "end": 0.5 * n + 0.4} for n, word in enumerate(spoken.split())]
    timed = [TimedWord(word, 8_000 * n, 8_000 * n + 6_400) for n, word in enumerate(spoken.split())]
    lines = subtitles(timed, 16_000)
    files = await run(
        f"""const t = new all.Transcript();
        t.apply(completed("a", 0, 20000, {json.dumps(spoken)}, {json.dumps(words)}), 0);
        t.apply(started("b", 21000), 0);
        return [all.toSrt(t), all.toVtt(t), all.toText(t), all.toJson(t)];""",
    )
    assert files[0] == to_srt(lines)
    assert files[1] == to_vtt(lines) and "&lt;so&gt;" in files[1]
    assert files[2] == spoken + "\n"
    assert json.loads(files[3])["turns"][0]["words"] == words


async def test_times_of_a_new_session_continue_the_old_clock(run: Run) -> None:
    turns = await run(
        """const t = new all.Transcript();
        t.apply(started("a", 500), 0);
        t.apply({ type: "conversation.item.input_audio_transcription.delta", item_id: "a", delta: "half a" }, 0);
        const open = t.openSince;
        t.abandonOpen({ resend: true });
        t.apply(completed("b", 0, 900, "half a word", [{ word: "half", start: 0.1, end: 0.3 }]), 60.5);
        t.apply(completed("c", 1000, 1200, "  ", []), 60.5);
        t.apply(started("d", 2000), 60.5);
        t.apply({ type: "conversation.item.input_audio_transcription.delta", item_id: "d", delta: "lost" }, 60.5);
        t.abandonOpen({ resend: false });
        return [open, t.openSince, ...t.entries];""",
    )
    assert turns[:2] == [0.5, None]
    assert [(turn["text"], turn["state"]) for turn in turns[2:]] == [("half a word", "done"), ("lost", "cut")]
    assert turns[2]["start"] == 60.5 and turns[2]["words"][0]["start"] == pytest.approx(60.6)


async def test_aligning_words_loses_no_character(run: Run) -> None:
    pieces = await run(
        """const word = (word) => ({ word, start: 0, end: 1 });
        return all.alignWords("Oh, “well”, the the end…", ["Oh,", "well", "missing", "the", "the", "end"].map(word))
          .map(({ text, word }) => [text, word?.word ?? null]);""",
    )
    assert "".join(text for text, _ in pieces) == "Oh, “well”, the the end…"
    assert [word for _, word in pieces if word] == ["Oh,", "well", "the", "the", "end"]


async def test_step_leaves_a_whole_rate_that_speech_needs(run: Run) -> None:
    rates = (8_000, 16_000, 22_050, 44_100, 48_000, 88_200, 96_000, 176_400, 192_000)
    steps = await run(f"return {list(rates)}.map(all.stepFor);")
    left = [rate / step for rate, step in zip(rates, steps, strict=True)]
    assert all(rate == int(rate) and 8_000 <= rate < 32_000 for rate in left)
    assert left[3:5] == [22_050, 16_000]


@pytest.mark.parametrize("rate", [48_000, 44_100, 96_000])
async def test_decimator_keeps_speech_drops_the_rest_however_cut(run: Run, rate: int) -> None:
    speech, above, same = await run(
        f"""const rate = {rate};
        const wave = (hertz) => (_, n) => Math.sin(2 * Math.PI * hertz * n / rate);
        const sine = (hertz) => Float32Array.from({{ length: rate }}, wave(hertz));
        const level = (hertz) => {{
          const out = new all.Decimator(rate).push(sine(hertz)).slice(200);
          return Math.sqrt(2 * out.reduce((sum, x) => sum + x * x, 0) / out.length);
        }};
        const sound = sine(440), whole = new all.Decimator(rate).push(sound);
        const cut = new all.Decimator(rate), parts = [];
        for (let at = 0; at < rate; at += 128) parts.push(...cut.push(sound.subarray(at, at + 128)));
        const same = parts.length === whole.length && parts.every((x, n) => Math.abs(x - whole[n]) < 1e-6);
        return [level(1000), level(rate * 0.47), same];""",
    )
    assert same and speech == pytest.approx(1, abs=0.02) and above < 0.01


async def test_sample_buffer_is_bounded_and_reads_back_exactly(run: Run) -> None:
    result = await run(
        """const b = new all.SampleBuffer(1000);
        for (let n = 0; n < 50; n += 1) b.push(Int16Array.from({ length: 60 }, (_, i) => n * 60 + i));
        const bounds = [b.start, b.end, b.end - b.start <= 1000 + 60];
        b.dropBefore(2500);
        return [...bounds, b.start, [...b.read(2530, 200)], b.read(2990, 100).length, b.read(3000, 10).length];""",
    )
    assert result[1:3] == [3000, True] and 2400 <= result[3] <= 2500
    assert result[4] == list(range(2530, 2730)) and result[5:] == [10, 0]


async def test_hours_of_captions_keep_the_document_small(run: Run) -> None:
    shown = await run(
        """const t = new all.Transcript();
        const make = (name) => document.body.appendChild(document.createElement(name));
        const parts = { list: make("ol"), earlier: make("button"), later: make("button"), live: make("button") };
        new all.Captions(t, parts);
        let most = 0;
        const words = Array.from({ length: 10 }, (_, n) => ({ word: `w${n}`, start: n, end: n + 1 }));
        const text = words.map(({ word }) => word).join(" ");
        for (let n = 0; n < 1000; n += 1) {
          t.apply(started(`i${n}`, n * 3000), 0);
          t.apply(completed(`i${n}`, n * 3000, n * 3000 + 2500, text, words), 0);
          most = Math.max(most, parts.list.children.length);
        }
        const first = () => parts.list.firstElementChild.turn.id;
        const live = first();
        for (let n = 0; n < 10; n += 1) parts.earlier.click();
        const back = [first(), parts.list.children.length, parts.later.hidden, parts.live.hidden];
        parts.live.click();
        return [most, live, back, parts.list.lastElementChild.turn.id, all.toText(t).split("\\n").length - 1];""",
    )
    assert shown[0] <= 81 and shown[1] == "i920"
    assert shown[2] == ["i520", 80, False, False]
    assert shown[3:] == ["i999", 1000]


SKIPPED = """
const cut = (pieces) => {
  const cutter = new all.TurnCutter();
  const turns = pieces.flatMap(([delta, words]) => cutter.push(delta, words));
  const last = cutter.end();
  return last ? [...turns, last] : turns;
};
const say = (text, seconds, at = 0) =>
  text.split(" ").map((word, n) => ({ word, start: at + n * seconds, end: at + (n + 1) * seconds }));
"""


async def test_text_of_a_file_is_cut_at_pauses_and_after_sentences(run: Run) -> None:
    """However it comes: in one piece, word by word, or with the mark of a window's last word in the next piece."""
    one, two = "He came in. He sat", "down. Nobody spoke."
    turns = await run(
        SKIPPED
        + f"""const first = say({one!r}, 0.3), rest = say({two!r}, 0.3, 1.5);
        const before = say("Later.", 0.3, 5);
        // A word that lasts until the next one begins hides the pause behind it.
        rest[0].end = 3;
        rest[1].start = 3;
        const whole = cut([["{one} {two} Later.", [...first, ...rest, ...before]]]);
        const single = cut([...first, ...rest, ...before].map((word) => [` ${{word.word}}`, [word]]));
        const loose = cut([["{one} down", first], [". Nobody spoke.", rest], [" Later.", before]]);
        return [whole, single, loose];"""
    )
    assert turns[0] == turns[1] == turns[2]
    assert [turn["text"] for turn in turns[0]] == ["He came in. He sat down.", "Nobody spoke.", "Later."]
    assert [turn["start"] for turn in turns[0]] == [0, 3, 5]


async def test_text_of_a_file_without_marks_spaces_or_times_is_cut_all_the_same(run: Run) -> None:
    unmarked, spaceless, timeless, strange = await run(
        SKIPPED
        + """const words = say(Array(300).fill("word").join(" "), 0.3);
        const unmarked = cut([[words.map(({ word }) => word).join(" "), words]]);
        const signs = say(Array(40).fill("潮が引いて船が遠くに").join(" "), 2);
        const spaceless = cut([[signs.map(({ word }) => word).join(""), signs]]);
        const timeless = cut(Array.from({ length: 40 }, () => ["Nobody knows when this was said. ", []]));
        // Words that are written otherwise than the text.
        const strange = cut([["twenty five boats lay out. ", say("25 boats lay out.", 0.3)]]);
        return [unmarked, spaceless, timeless, strange];"""
    )
    for turns in (unmarked, spaceless, timeless):
        assert len(turns) > 1 and all(30 < len(turn["text"]) <= 400 for turn in turns)
    assert "".join(turn["text"] for turn in spaceless) == "潮が引いて船が遠くに" * 40
    assert " ".join(turn["text"] for turn in timeless) == " ".join(["Nobody knows when this was said."] * 40)
    assert all(turn["text"].endswith(".") for turn in timeless)
    assert [turn["text"] for turn in strange] == ["twenty five boats lay out."]


SAID = [
    {"word": "Good", "start": 0.0, "end": 0.4, "speaker": "A"},
    {"word": "day.", "start": 0.5, "end": 0.9, "speaker": "A"},
    {"word": "Hello", "start": 1.0, "end": 1.4, "speaker": "B"},
]
HOSTILE = "</v><img src=x onerror=alert(1)>\n-->"


async def test_files_name_speakers_if_there_are_two(run: Run) -> None:
    one, *two = await run(
        f"""const t = new all.Transcript(), words = {json.dumps(SAID)};
        t.apply(completed("a", 0, 900, "Good day.", words.slice(0, 2)), 0);
        const one = all.toText(t) + all.toSrt(t) + all.toVtt(t);
        t.apply(completed("b", 1000, 1400, "Hello", words.slice(2)), 0);
        return [one, all.toText(t), all.toSrt(t), all.toVtt(t)];""",
    )
    assert "Speaker" not in one
    assert two[0] == "Speaker A: Good day.\nSpeaker B: Hello\n"
    assert "Speaker B: Hello\n" in two[1]
    assert "<v Speaker B>Hello\n" in two[2]


async def test_a_name_holds_for_turns_before_and_after_and_is_only_a_text(run: Run) -> None:
    text, vtt, kept, shown = await run(
        f"""const t = new all.Transcript(), words = {json.dumps(SAID)};
        const touched = [];
        t.addEventListener("renamed", ({{ turn }}) => touched.push(turn.number));
        t.apply(completed("a", 0, 1400, "Good day. Hello", words), 0);
        t.rename("B", {json.dumps(HOSTILE + "x" * 100)});
        t.apply(completed("b", 2000, 2400, "Hello", [{{ word: "Hello", start: 2, end: 2.4, speaker: "B" }}]), 0);
        const list = document.createElement("ol"), button = () => document.createElement("button");
        new all.Captions(t, {{ list, earlier: button(), later: button(), live: button() }}).toLive();
        const names = [...list.querySelectorAll(".who")].map((who) => [who.textContent, who.dataset.colour]);
        return [all.toText(t), all.toVtt(t), touched, [names, list.querySelectorAll("img").length]];""",
    )
    name = (HOSTILE.replace("\n", " ") + "x" * 100)[:64]
    assert text == f"Speaker A: Good day.\n{name}: Hello Hello\n"
    assert vtt.count("-->") == 3 and "<img" not in vtt and vtt.count("<v ") == 3
    assert kept == [0]
    assert shown == [[["Speaker A", "0"], [name, "1"], [name, "1"]], 0]
