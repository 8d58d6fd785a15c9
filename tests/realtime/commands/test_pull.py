"""What `tickertape pull` and the first start of a server fetch."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from engine.options import DEFAULT_MODEL
from engine.weights.store import WeightsError
from realtime.commands import pull


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names that are fetched, into an empty cache."""
    names: list[str] = []
    monkeypatch.setenv("TICKERTAPE_CACHE", str(tmp_path))

    def fetch(name: str, *, fresh: bool = False) -> Path:
        names.append(name + (" fresh" if fresh else ""))
        return tmp_path / name

    monkeypatch.setattr(pull, "fetch", fetch)
    return names


@pytest.mark.parametrize("names", [[], [DEFAULT_MODEL]])
def test_the_default_model_comes_with_the_turn_detector(fetched: list[str], names: list[str]) -> None:
    assert pull.run_pull(Namespace(name=names, fresh=False)) == 0
    assert fetched == [DEFAULT_MODEL, "turn-detector", *([] if names else [pull.SAMPLE])]


def test_fresh_renews_both_and_other_models_come_alone(fetched: list[str]) -> None:
    pull.run_pull(Namespace(name=[DEFAULT_MODEL], fresh=True))
    pull.run_pull(Namespace(name=["whisper-tiny"], fresh=False))
    assert fetched == [f"{DEFAULT_MODEL} fresh", "turn-detector fresh", "whisper-tiny"]


def test_a_turn_detector_that_cannot_be_fetched_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fetch(name: str, *, fresh: bool = False) -> Path:
        if name == "turn-detector":
            raise WeightsError("no network")
        return tmp_path

    monkeypatch.setattr(pull, "fetch", fetch)
    assert pull.run_pull(Namespace(name=[], fresh=False)) == 0
    assert "text and silence alone: no network" in capsys.readouterr().err


def test_a_server_fetches_it_with_the_first_download_of_the_default_model(fetched: list[str], tmp_path: Path) -> None:
    pull.fetch_for_serving("moonshine-tiny")
    pull.fetch_for_serving(DEFAULT_MODEL)
    (tmp_path / DEFAULT_MODEL).mkdir()
    pull.fetch_for_serving(DEFAULT_MODEL)
    assert fetched == ["moonshine-tiny", DEFAULT_MODEL, "turn-detector", DEFAULT_MODEL]


def test_a_model_is_here_if_it_is_in_the_cache_or_a_path(fetched: list[str], tmp_path: Path) -> None:
    assert not pull.is_here(DEFAULT_MODEL) and not pull.is_here("no-such-model") and not pull.is_here("")
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert pull.is_here(DEFAULT_MODEL) and pull.is_here(str(tmp_path)) and not fetched
