"""Audio sources besides the microphone (tabs, files), and options for the model (language, words to expect)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.options import Options
from tests.realtime.gateway_doubles import ENGLISH, MULTILINGUAL, FakeEngine
from tests.web.conftest import PageServer, page_server
from tests.web.devtools import Page
from tests.web.line import line_to
from tests.web.page_server import SENTENCES, WORDS
from tests.web.shown import (
    DONE,
    OPEN_TEXT,
    PROBLEM,
    STATE,
    check_said,
    choose,
    listen,
    play_at_pace,
    send_file,
    stop,
    texts,
    turns,
)

# A tab that plays a tone, as a browser would share it. With `window.silent` no sound is shared.
SHARED_TAB = """
  window.asked = [];
  const microphone = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = (wanted) => (window.asked.push("microphone"), microphone(wanted));
  navigator.mediaDevices.getDisplayMedia = async (wanted) => {
    window.asked.push("tab");
    const context = new AudioContext();
    const tone = context.createOscillator();
    const out = context.createMediaStreamDestination();
    tone.connect(out);
    tone.start();
    const picture = document.createElement("canvas");
    picture.getContext("2d");
    const sound = window.silent ? [] : out.stream.getTracks();
    window.shared = new MediaStream([...picture.captureStream().getTracks(), ...sound]);
    return window.shared;
  };
"""
LANGUAGE = "document.querySelector('#language')"
LANGUAGES = "[...document.querySelector('#language').options].map((option) => option.text)"
SHOWN_LANGUAGE = "!document.querySelector('#language-box').hidden"
# The engine is asked for a stream with the first sound.
SOME_SOUND = "document.querySelector('#elapsed').textContent > '0:00'"
PROGRESS = "document.querySelector('#job:not([hidden]) progress')"


async def listen_briefly(page: Page) -> None:
    """Listen until there is some sound, and stop."""
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening' && {SOME_SOUND}")
    await stop(page)


async def choose_source(page: Page, value: str) -> None:
    await page.until(f"[...document.querySelector('#device').options].some((option) => option.value === {value!r})")
    await choose(page, "#device", value)


@pytest.mark.parametrize(("choice", "asked"), [("tab", ["tab"]), ("tab+microphone", ["tab", "microphone"])])
async def test_sound_of_a_tab_is_heard(page: Page, server: PageServer, choice: str, asked: list[str]) -> None:
    await page.before_load(SHARED_TAB)
    await page.open(server.url)
    await choose_source(page, choice)
    await page.click("#listen")
    await page.until(OPEN_TEXT)
    assert await page.evaluate("window.asked") == asked
    # The picture is not used.
    assert await page.evaluate("window.shared.getVideoTracks().every((track) => track.readyState === 'ended')")
    await stop(page)
    check_said(await turns(page))


SLEEPY_CONTEXT = """
  const Context = AudioContext;
  window.AudioContext = class extends Context {
    constructor(...how) {
      super(...how);
      window.context = this;
    }
    async resume() {
      if (!window.asleep) await super.resume();
    }
  };
"""


async def test_muted_microphone_is_said(page: Page, server: PageServer) -> None:
    await page.before_load(
        """const silent = () => new AudioContext().createMediaStreamDestination().stream;
        navigator.mediaDevices.getUserMedia = async () => silent();"""
    )
    await listen(page, server.url)
    await page.until(f"{STATE} === 'Listening, but the microphone is silent'")
    await page.until("document.querySelector('#elapsed').textContent > '0:05'")
    await stop(page)
    assert "No speech was heard" in await page.until(PROBLEM)


async def test_machine_that_slept_is_said_and_noted(page: Page, server: PageServer) -> None:
    """No sound comes at all, as after sleep or a call on a phone, until the browser gives some again."""
    await page.before_load(SLEEPY_CONTEXT)
    await listen(page, server.url)
    await page.until(OPEN_TEXT)
    await page.evaluate("(window.asleep = true, window.context.suspend())")
    await page.until(f"{STATE} === 'No sound comes from the microphone'")
    await page.evaluate("new Promise((done) => setTimeout(done, 10000))")
    await page.evaluate("(window.asleep = false, undefined)")
    # The page itself asks for sound again.
    await page.until(f"{STATE} === 'Listening'")
    await stop(page)
    [note] = [turn for turn in await turns(page) if turn.state == "note"]
    assert note.text.startswith("No sound for about 1")


async def test_unplugged_microphone_is_said_and_keeps_the_text(page: Page, server: PageServer) -> None:
    await page.before_load(
        """const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (wanted) => (window.stream = await ask(wanted));"""
    )
    await listen(page, server.url)
    shown = await page.until(OPEN_TEXT)
    await page.evaluate("window.stream.getAudioTracks()[0].dispatchEvent(new Event('ended'))")
    assert "was unplugged" in await page.until(f"{STATE} === 'Ready' && {PROBLEM}")
    assert any(turn.text.startswith(shown) for turn in await turns(page))


async def test_tab_that_ends_or_shares_no_sound_is_said(page: Page, server: PageServer) -> None:
    await page.before_load(SHARED_TAB)
    await page.open(server.url)
    await choose_source(page, "tab")
    await page.evaluate("window.silent = true")
    await page.click("#listen")
    assert "No sound was shared" in await page.until(PROBLEM)
    await page.evaluate("window.silent = false")
    await page.click("#listen")
    await page.until(f"{STATE} === 'Listening'")
    await page.evaluate("window.shared.getAudioTracks()[0].dispatchEvent(new Event('ended'))")
    assert "Nothing is shared any more" in await page.until(f"{STATE} === 'Ready' && {PROBLEM}")


async def test_file_goes_whole_and_its_words_come_back_in_turns(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await send_file(page, talk)
    shown = await turns(page)
    assert [turn.text for turn in shown] == list(SENTENCES[:3]) and {turn.state for turn in shown} == {"done"}
    check_said(shown)
    assert 0.7 < shown[0].start < 1.2 and [len(turn.words) for turn in shown] == [3, 4, 3]
    assert await page.evaluate("document.querySelector('#elapsed').textContent") == "0:07"
    assert server.engine.opened[0]["live"] is False
    # A second file follows on the same clock.
    await send_file(page, talk)
    assert (await turns(page))[3].start > 7.6


async def test_progress_of_sending_and_of_reading_is_shown(page: Page, server: PageServer, talk: Path) -> None:
    """The line lets nothing through, then the engine takes its time."""
    server.engine.feed_delay_s = 0.3
    server.engine.file_window_s = 2.0
    async with line_to(server.port) as line:
        await page.open(line.url)
        line.clog()
        await page.choose_file("#file", talk)
        await page.until(f"{STATE} === 'Sending' && {PROGRESS}")
        line.clear()
        await page.until(f"{STATE} === 'Transcribing' && {PROGRESS}?.value > 0.1 && {PROGRESS}.value < 1")
        # Text is there while the rest is read.
        await page.until(OPEN_TEXT)
        await page.until(f"{STATE} === 'Ready'")
    assert await texts(page) == list(SENTENCES[:3])
    assert await page.evaluate(f"{PROGRESS} === null")


async def test_stopped_upload_keeps_what_was_read(page: Page, server: PageServer, talk: Path) -> None:
    server.engine.feed_delay_s = 0.5
    server.engine.file_window_s = 2.0
    await page.open(server.url)
    await page.choose_file("#file", talk)
    shown = await page.until(OPEN_TEXT)
    await stop(page)
    *after, note = await turns(page)
    assert after[-1].state == "cut" and any(turn.text.startswith(shown) for turn in after)
    assert note.state == "note"
    await page.until("document.querySelector('#job').hidden")


async def test_server_that_goes_away_while_it_reads_is_said(page: Page, server: PageServer, talk: Path) -> None:
    server.engine.feed_delay_s = 0.5
    server.engine.file_window_s = 2.0
    async with line_to(server.port) as line:
        await page.open(line.url)
        await page.choose_file("#file", talk)
        shown = await page.until(OPEN_TEXT)
        line.close_for_good()
        assert "went away" in await page.until(PROBLEM)
    assert any(turn.text.startswith(shown) for turn in await turns(page))


async def test_file_can_be_played_at_its_own_pace(page: Page, server: PageServer, talk: Path) -> None:
    await play_at_pace(page, server.url, talk)
    await page.until(f"{STATE} === 'Playing the file'")
    await page.until(OPEN_TEXT)
    await page.click("#pause")
    await page.until(f"{STATE} === 'Paused'")
    await page.click("#pause")
    await page.until(f"{DONE}.length === 3 && {STATE} === 'Ready'")
    assert await texts(page) == list(SENTENCES[:3])
    assert server.engine.opened[0]["live"] is True


@pytest.mark.parametrize(
    ("takes", "told"),
    [
        (MULTILINGUAL, {"language": "fr", "prompt": "Tickertape, Moonshine"}),
        (replace(MULTILINGUAL, prompt=False), {"language": "fr"}),
        (Options(), {}),
    ],
)
async def test_language_and_words_to_expect(page: Page, takes: Options, told: dict[str, str]) -> None:
    engine = FakeEngine(words=WORDS)
    engine.takes(takes)
    async with page_server(engine) as server:
        await page.open(server.url)
        await page.until("document.querySelector('#language-box').hidden === " + str(not takes.languages).lower())
        hidden = await page.evaluate("document.querySelector('#keywords-box').hidden")
        assert hidden is not takes.prompt
        await choose(page, "#language", "fr")
        await choose(page, "#keywords", "Tickertape, Moonshine,")
        await listen_briefly(page)
        assert engine.opened[-1]["options"] == told


async def test_how_turns_end_can_be_chosen_and_is_remembered(page: Page) -> None:
    engine = FakeEngine(words=WORDS)
    async with page_server(engine) as server:
        for eagerness, silence_ms in (("", 500), ("low", 250)):
            await page.open(server.url)
            await choose(page, "#eagerness", eagerness)
            await page.open(server.url)
            assert await page.evaluate("document.querySelector('#eagerness').value") == eagerness
            await page.click("#listen")
            await page.until(f"{STATE} === 'Listening' && {SOME_SOUND}")
            rule = engine.streams[-1].turns
            await stop(page)
            # With eagerness the engine is asked for the text of a pause before the turn ends.
            assert rule is not None and rule.silence_samples == silence_ms * 16


async def test_the_one_language_of_a_model_is_shown_and_is_no_choice(page: Page) -> None:
    """What was chosen for another server is neither sent nor forgotten."""
    engine = FakeEngine(words=WORDS)
    async with page_server(engine) as server:
        await page.open(server.url)
        await page.until(f"{SHOWN_LANGUAGE} && {LANGUAGE}.value === ''")
        await choose(page, "#language", "fr")
        engine.takes(ENGLISH)
        await page.open(server.url)
        await page.until(f"{SHOWN_LANGUAGE} && {LANGUAGES}.join() === 'English'")
        await listen_briefly(page)
        assert "language" not in engine.opened[-1]["options"]
        engine.takes(MULTILINGUAL)
        await page.open(server.url)
        await page.until(f"{SHOWN_LANGUAGE} && {LANGUAGE}.value === 'fr'")


async def test_the_languages_of_the_model_are_offered_by_name(page: Page) -> None:
    """A language that was chosen for a server with more of them is neither offered, nor sent, nor forgotten."""
    engine = FakeEngine(words=WORDS)
    async with page_server(engine) as server:
        await page.open(server.url)
        await page.until(SHOWN_LANGUAGE)
        offered = await page.evaluate(LANGUAGES)
        assert len(offered) == 1 + len(MULTILINGUAL.languages) == len(set(offered))
        assert offered[0] == "as the model hears it" and {"French", "German", "Hawaiian", "Javanese"} < set(offered)
        assert all(name[0].isupper() for name in offered[1:]), "none is shown as a code"
        assert offered[1:] == sorted(offered[1:], key=lambda name: name.replace("ā", "a"))
        await choose(page, "#language", "fr")
        engine.takes(replace(MULTILINGUAL, languages=("en", "de")))
        await page.open(server.url)
        await page.until(f"{SHOWN_LANGUAGE} && {LANGUAGES}.join() === 'as the model hears it,English,German'")
        assert await page.evaluate(f"{LANGUAGE}.value") == ""
        await listen_briefly(page)
        assert "language" not in engine.opened[-1]["options"]
        engine.takes(MULTILINGUAL)
        await page.open(server.url)
        await page.until(f"{LANGUAGE}.value === 'fr'")


async def test_words_to_expect_go_with_a_file_too(page: Page, server: PageServer, talk: Path) -> None:
    await page.open(server.url)
    await page.until("!document.querySelector('#language-box').hidden")
    await choose(page, "#language", "fr")
    await choose(page, "#keywords", "Tickertape")
    await send_file(page, talk)
    assert server.engine.opened[-1]["options"] == {"language": "fr", "prompt": "Tickertape"}


async def test_full_is_told_from_the_free_streams(page: Page, server: PageServer) -> None:
    """The engine has places, but what speaks already leaves no time for one more; and the other way about."""
    await listen(page, server.url)
    await stop(page)
    for free, text in ((0, "The server is full"), (3, "The server refuses more sessions for now")):
        why = await page.evaluate(
            f"""(async () => {{
              const capacity = {{ streams_used: 9, streams_total: 9, streams_free: {free} }};
              const answers = {{ ready: {{}}, capacity }};
              window.fetch = async (path) => Response.json(answers[path] ?? {{}});
              return (await import("{server.url}error-texts.js")).refusalReason("");
            }})()"""
        )
        assert why["text"] == text
