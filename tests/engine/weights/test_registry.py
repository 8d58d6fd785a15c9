"""The properties of a model in the registry equal those of the loaded model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.moonshine import Moonshine
from engine.models.whisper import Whisper, WhisperConfig
from engine.options import MAX_KEYWORDS, Options
from engine.runner.windowed.runner import windowed_spec
from engine.weights.registry import FAMILIES, REGISTRY, options_of


def loaded(options: Options) -> Options:
    """As the runner has it: keywords are its own work."""
    return replace(options, keywords=windowed_spec("any", 192, 10, 350).options.keywords)


def checkpoint(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("vocabulary", [51_864, 51_865, 51_866])
def test_whisper_says_the_same_before_and_after_it_is_loaded(vocabulary: int, tmp_path: Path) -> None:
    model = Whisper(WhisperConfig(80, vocabulary, 1500, 16, 2, 1, 64, 2, 2))
    assert options_of(checkpoint(tmp_path, model_type="whisper", vocab_size=vocabulary)) == loaded(model.options)


def test_moonshine_says_the_same_before_and_after_it_is_loaded(tmp_path: Path) -> None:
    assert options_of(checkpoint(tmp_path, model_type="moonshine")) == loaded(Moonshine.options)
    assert options_of("moonshine-base-streaming") == loaded(Moonshine.options)


def test_models_that_can_be_pulled_are_known_before_they_are() -> None:
    for name, entry in REGISTRY.items():
        assert (options_of(name) is None) == bool(entry.single_file), name
    english, all_but_one, all_of_them = (
        options_of(f"whisper-{size}") for size in ("tiny.en", "medium", "large-v3-turbo")
    )
    assert english == Options(("en",), prompt=True, keywords=MAX_KEYWORDS)
    assert all_but_one is not None and len(all_but_one.languages) == 99 and all_but_one.translates
    assert all_of_them is not None and all_of_them.languages[-1] == "yue"


def test_openai_files_tell_by_their_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    assert options_of(str(file)) is None
    (tmp_path / "vocabulary.tiktoken").write_text("IQ== 0\n" * 50_256)
    english = options_of(str(file))
    assert english is not None and english.languages == ("en",) and options_of(str(tmp_path)) == english
    (tmp_path / "vocabulary.tiktoken").write_text("IQ== 0\n" * 50_257)
    assert options_of(str(file)) is None, "its number of languages is not told"


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"model_type": "unheard"}', '{"model_type": ["x"]}'])
def test_a_configuration_that_says_nothing_is_left_to_the_loader(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert options_of(str(tmp_path)) is None
    assert options_of(str(tmp_path / "nowhere")) is None


def test_every_family_that_is_loaded_is_known() -> None:
    assert set(FAMILIES) == {"moonshine", "whisper", "voxtral_realtime"}
