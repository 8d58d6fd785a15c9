"""Options that a client asks for, and those that are in force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.options import MAX_PROMPT_CHARACTERS, Options
from engine.spec import ModelSpec
from realtime.errors import ClientFault
from realtime.session.settings import INCLUDE_SPEAKERS, Settings, TurnDetection
from tests.realtime.gateway_doubles import ENGLISH, MULTILINGUAL


def spec(options: Options, delays: int = 0) -> ModelSpec:
    return ModelSpec("m", 16_000, 1280, max_delay_positions=delays, options=options)


SILENT = spec(Options())
WITH_WORDS = Options(languages=("en", "de"), detects_language=True, keywords=500)


@pytest.mark.parametrize(
    ("options", "asked", "param", "text"),
    [
        (ENGLISH, {"language": "de"}, "language", "the language 'de'. It supports en."),
        (ENGLISH, {"language": "klingon"}, "language", "'klingon' is not a language"),
        (MULTILINGUAL, {"language": "yue"}, "language", "It supports en, zh, de"),
        (WITH_WORDS, {"languages": ("fr", "nl")}, "languages", "none of these languages. It supports en, de."),
        (WITH_WORDS, {"languages": ("en", "xx")}, "languages", "'xx' is not a language"),
        (ENGLISH, {"languages": ("de", "fr")}, "languages", "none of these languages. It supports en."),
        (ENGLISH, {"languages": ("xx",)}, "languages", "'xx' is not a language"),
        (ENGLISH, {"task": "translate"}, "task", "does not translate"),
        (MULTILINGUAL, {"task": "sing"}, "task", "transcribe or translate"),
        (MULTILINGUAL, {"prompt": "x" * (MAX_PROMPT_CHARACTERS + 1)}, "prompt", "at most 16384"),
        (MULTILINGUAL, {"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
        (WITH_WORDS, {"keywords": (("w", 1.0),) * 10_000}, "keywords", "At most 500 keywords"),
        (ENGLISH, {"keywords": (("", 1.0),)}, "keywords", "A keyword is empty"),
        (ENGLISH, {"keywords": (("x" * 10_000, 1.0),)}, "keywords", "at most 64 characters"),
        (WITH_WORDS, {"keywords": (("a\x07b", 1.0),)}, "keywords", "control characters"),
        (WITH_WORDS, {"keywords": (("word", 1e9),)}, "keywords", "lies between 0.1 and 10"),
        (WITH_WORDS, {"prompt": "word," * 501}, "prompt", "At most 500 keywords"),
        # Each of them is written as two characters.
        (WITH_WORDS, {"keywords": (("\u0958" * 33, 1.0),)}, "keywords", "at most 64 characters"),
    ],
)
def test_what_cannot_be_is_refused(options: Options, asked: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(ClientFault) as caught:
        Settings(**asked).in_force(spec(options))
    assert caught.value.param == param and text in caught.value.message
    assert caught.value.message[0].isupper() or caught.value.message[0] == "'"


def test_what_a_model_does_not_take_is_null() -> None:
    asked = Settings(language="xx", prompt="Names.", keywords=(("tape", 1.0),), languages=("de",), delay="low")
    taken = asked.in_force(SILENT)
    shown = (taken.language, taken.prompt, taken.keywords, taken.languages, taken.delay)
    assert shown == (None, None, None, None, None)
    assert asked.ignored_options(taken) == ["prompt", "keywords"] and taken.engine_options() == {}
    asked = Settings(noise_reduction={"type": "near_field"}, include=("session.resume", "usage", "session.resumes"))
    taken = asked.in_force(spec(ENGLISH))
    assert asked.ignored_options(taken) == ["noise_reduction"] and taken.noise_reduction is None, "no model does that"
    assert taken.include == ("session.resume",), "nothing else was switched on"
    nothing = Settings().in_force(SILENT)
    assert nothing.ignored_options(nothing) == [] and nothing.keywords == () == nothing.languages


@pytest.mark.parametrize("written", ["en", "English", "en-US"])
def test_a_language_is_shown_as_its_code(written: str) -> None:
    assert Settings(language=written).in_force(spec(ENGLISH)).language == "en"
    assert Settings(language=written).in_force(spec(MULTILINGUAL)).engine_options() == {"language": "en"}


def test_what_is_in_force_stays_in_force() -> None:
    asked = Settings(
        language="German", prompt="Namen.", keywords=(("tape", 2.5), ("ticker", 1.0)), task="translate", delay=320
    )
    both = spec(Options(("en", "de"), True, True, True, 500), delays=6)
    taken = asked.in_force(both)
    assert taken == taken.in_force(both)
    keywords = "tape\t2.5\nticker\t1"
    told = {"language": "de", "task": "translate", "prompt": "Namen.", "keywords": keywords}
    assert taken.engine_options() == told and taken.delay == 320
    both.options.check(told)


def test_languages_that_may_be_spoken_are_those_the_model_has() -> None:
    some = Settings(languages=("German", "fr", "en-GB", "de")).in_force(spec(WITH_WORDS))
    assert some.languages == ("de", "en") and some.engine_options() == {"languages": "de,en"}
    assert Settings(language="auto", languages=("multi",)).in_force(spec(WITH_WORDS)).engine_options() == {}
    assert Settings(language="en", languages=("de",)).in_force(spec(WITH_WORDS)).engine_options() == {"language": "en"}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("Keywords: Tickertape, Van der Berg.", ["Tickertape", "Van der Berg"]),
        ("Tickertape, Kittila,\nTalvivaara", ["Tickertape", "Kittila", "Talvivaara"]),
        ("names to expect: Kittila", ["Kittila"]),
        ("Kittila", None),
        ("See https://" + "x" * 65, None),
        ("We talk about mines in Finland, and about what becomes of their tailings.", None),
        ("", None),
    ],
)
def test_a_prompt_that_is_a_list_of_words(prompt: str, words: list[str] | None) -> None:
    """A model that takes keywords and no prompt gets them as keywords; one that takes prompts gets it as it is."""
    taken = Settings(prompt=prompt, keywords=(("Gyula", 2.0),)).in_force(spec(WITH_WORDS))
    assert taken.all_keywords == (("Gyula", 2.0), *((word, 1.0) for word in words or ()))
    assert taken.shown_prompt == (None if words is None else "")
    assert taken.engine_options() == {"keywords": "\n".join(["Gyula\t2", *(f"{word}\t1" for word in words or ())])}
    prompted = Settings(prompt=prompt).in_force(spec(replace(WITH_WORDS, prompt=True)))
    assert (prompted.prompt, prompted.keywords) == (prompt, ())


def test_words_of_a_prompt_go_when_another_prompt_comes() -> None:
    model = spec(WITH_WORDS)
    taken = Settings(prompt="Kittila, Jaroka", keywords=(("Gyula", 2.0), ("Jaroka", 3.0))).in_force(model)
    assert taken.all_keywords == (("Gyula", 2.0), ("Jaroka", 3.0), ("Kittila", 1.0))
    assert taken.in_force(model) == taken
    for prompt, words in (("Kittila, Jaroka", ["Kittila"]), ("Foo, Bar", ["Foo", "Bar"]), ("", [])):
        taken = replace(taken, prompt=prompt).in_force(model)
        assert [word for word, _ in taken.all_keywords or ()] == ["Gyula", "Jaroka", *words]


@pytest.mark.parametrize("written", [" Kittila", "Kittila ", "\u00a0Kittila\u2003"])
def test_spaces_around_a_keyword_are_no_part_of_it(written: str) -> None:
    assert Settings(keywords=((written, 2.0),)).in_force(spec(WITH_WORDS)).keywords == (("Kittila", 2.0),)


def test_a_keyword_is_written_as_models_write_it() -> None:
    """One space between words, and a letter with its accent as one character."""
    asked = Settings(keywords=(("van  der\u00a0Berg", 1.0), ("Kittila\u0308", 1.0)))
    assert asked.in_force(spec(WITH_WORDS)).keywords == (("van der Berg", 1.0), ("Kittil\u00e4", 1.0))


@given(
    words=st.lists(st.text(min_size=1, max_size=64), max_size=4),
    prompt=st.text(max_size=80) | st.lists(st.text(max_size=30)).map(", ".join),
)
def test_what_is_in_force_stays_so_and_is_what_the_engine_takes(words: list[str], prompt: str) -> None:
    """Each change of a session puts all of its settings in force again."""
    for options in (WITH_WORDS, replace(WITH_WORDS, prompt=True)):
        try:
            taken = Settings(prompt=prompt, keywords=tuple((word, 1.0) for word in words)).in_force(spec(options))
        except ClientFault:
            continue
        assert taken.in_force(spec(options)) == taken
        options.check(taken.engine_options())


@pytest.mark.parametrize(
    "held",
    [
        {"include": (INCLUDE_SPEAKERS,)},
        {"speakers": True},
        {"language": "de"},
        {"task": "translate"},
        {"include": (INCLUDE_SPEAKERS,), "language": "de", "task": "translate"},
    ],
)
def test_settings_of_an_engine_that_has_more_are_cleared_and_named_once(held: dict[str, Any]) -> None:
    """A session that another gateway's engine had: what is in force there cannot be here, and is no reason to ask again
    for ever."""
    current = Settings(**held)
    asked = replace(current, delay="low")
    taken, faults = asked.in_force_after(current, spec(ENGLISH))
    assert taken == taken.in_force(spec(ENGLISH))
    assert not taken.labels_speakers and taken.language is None and taken.task is None
    assert sorted(fault.param or "" for fault in faults) == sorted(held)


@pytest.mark.parametrize(
    "turns", [TurnDetection(silence_duration_ms=2000, threshold=0.8), TurnDetection(semantic=True, eagerness="low")]
)
def test_an_engine_without_labels_takes_the_change_of_speakers_from_turn_detection_and_nothing_else(
    turns: TurnDetection,
) -> None:
    current = Settings(include=(INCLUDE_SPEAKERS,), turn_detection=replace(turns, speaker_change=True))
    taken, _ = replace(current, delay="low").in_force_after(current, spec(ENGLISH))
    assert taken.turn_detection == turns


def test_voices_that_are_asked_for_are_no_settings_that_can_be_in_force() -> None:
    asked = replace(Settings(), asked_speakers=(("Ann", "data:x"),))
    assert asked.in_force_after(asked, spec(ENGLISH)) == (Settings().in_force(spec(ENGLISH)), [])
