"""Languages as clients write them."""

from __future__ import annotations

import pytest

from engine.spec import NAMES, language_code


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("en", "en"),
        ("English", "en"),
        ("en-US", "en"),
        ("en_gb", "en"),
        (" DE ", "de"),
        ("zh-Hant-TW", "zh"),
        ("Haitian Creole", "ht"),
        ("nb-NO", "no"),
        ("Mandarin", "zh"),
        ("yue", "yue"),
        ("multi", None),
        ("auto", None),
    ],
)
def test_codes_regions_and_names_are_understood(written: str, code: str | None) -> None:
    assert language_code(written) == code


@pytest.mark.parametrize("written", ["", "xx", "klingon", "e", "\0", "en us", "-", "x" * 1000])
def test_what_is_no_language(written: str) -> None:
    with pytest.raises(ValueError, match="is not a language"):
        language_code(written)


def test_every_code_and_every_name_means_one_language() -> None:
    assert len(NAMES) == 100 and len(set(NAMES.values())) == 100
    assert all(language_code(code) == code == language_code(name) for code, name in NAMES.items())
