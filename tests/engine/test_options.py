"""The options that a model takes, and their bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.options import MAX_KEYWORDS, Keyword, Options, check_keywords, check_names, keywords_text, read_keywords

MANY = Options(languages=("en", "de"), detects_language=True, translates=True, prompt=True, keywords=3)


@pytest.mark.parametrize(
    ("options", "given", "why"),
    [
        (MANY, {"colour": "red"}, "takes no option 'colour'"),
        (Options(), {"language": "en"}, "takes no option 'language'"),
        (MANY, {"language": "fr"}, "no language 'fr'; it has en, de"),
        (MANY, {"language": ""}, "no language ''"),
        (MANY, {"languages": "en,fr"}, "no language 'fr'"),
        (Options(languages=("en",)), {"languages": "en"}, "takes no option 'languages'"),
        (MANY, {"task": "sing"}, "'translate', not 'sing'"),
        (replace(MANY, translates=False), {"task": "translate"}, "takes no option 'task'"),
        (MANY, {"prompt": "x" * 16_385}, "at most 16384 characters"),
        (MANY, {"keywords": "a\t1\nb\t1\nc\t1\nd\t1"}, "at most 3 keywords"),
        (MANY, {"keywords": "a"}, "not a number"),
        (MANY, {"keywords": ""}, "not a number"),
        (MANY, {"keywords": "a\tnan"}, "between 0.1 and 10, not at nan"),
    ],
)
def test_what_a_model_does_not_take_is_refused(options: Options, given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        options.check(given)


@pytest.mark.parametrize(
    ("keyword", "why"),
    [
        (Keyword(""), "empty"),
        (Keyword("  "), "empty"),
        (Keyword("x" * 10_000), "at most 64 characters"),
        (Keyword("two\nlines"), "control characters"),
        (Keyword("nul\0"), "control characters"),
        (Keyword("\ud800"), "control characters"),
        (Keyword("word", 11.0), "not at 11"),
        (Keyword("word", -1.0), "not at -1"),
        (Keyword("word", float("inf")), "not at inf"),
    ],
)
def test_keywords_that_nobody_can_mean(keyword: Keyword, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_keywords([Keyword("good"), keyword])


def test_too_many_keywords_are_not_looked_at_one_by_one() -> None:
    seen = 0

    def words() -> list[Keyword]:
        nonlocal seen
        for _ in range(10_000):
            seen += 1
            yield Keyword("word")

    with pytest.raises(ValueError, match="at most 500"):
        check_keywords(words())
    assert seen == MAX_KEYWORDS + 1


def test_keywords_are_bounded_together() -> None:
    names = [Keyword(f"Van der Ber{number:03d}") for number in range(500)]
    check_keywords(names)
    for word in ("x" * 64, "\u0416" * 64):
        with pytest.raises(ValueError, match="at most 7000 bytes; give fewer or shorter ones"):
            check_keywords([Keyword(word)] * 110)


@pytest.mark.parametrize("control", ["\n", "\0", "\u2028", "\u202e", "\u2067"])
def test_a_name_cannot_change_how_the_words_after_it_are_shown(control: str) -> None:
    with pytest.raises(ValueError, match="holds control characters"):
        check_names(["Ann", f"B{control}ob"])
    check_names(["Ann", "\u05d0\u05d1", "\u0645\u06cc\u200c\u062e"])


def test_what_a_model_takes() -> None:
    MANY.check({})
    MANY.check({"language": "de", "task": "translate", "prompt": "Names.", "keywords": "Van der Berg\t2.5"})
    MANY.check({"languages": "de,en"})
    assert MANY.names == ("language", "task", "prompt", "keywords") and Options().names == ()
    words = [Keyword("Van der Berg", 2.5), Keyword("Łódź"), Keyword("می‌خواهم", 0.1)]
    assert read_keywords(keywords_text(words)) == words
    check_keywords(words)
