"""Broken manifests and recordings are named; good ones become sessions."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recordings import Clip, Session, joined_sessions, load_audio, one_session_per_clip, read_manifest
from realtime.bench.clients import BadManifest


def write_wav(path: Path, seconds: float, value: int = 1000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.full(round(seconds * 16_000), value, np.int16).tobytes())
    return path


def write_manifest(folder: Path, *entries: object) -> Path:
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


GOOD = {"path": "a.wav", "text": "hello there", "seconds": 0.5}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ({"text": "hello", "seconds": 1}, "`path` is missing"),
        ({"path": "a.wav", "seconds": 1}, "`text` is missing"),
        ({"path": "a.wav", "text": "hello"}, "`seconds` is missing"),
        ({"path": "a.wav", "text": None, "seconds": 1}, "`text` has the wrong type"),
        ({"path": "a.wav", "text": "hello", "seconds": "long"}, "`seconds` has the wrong type"),
        ({"path": "a.wav", "text": "hello", "seconds": 0}, "above zero"),
        ({"path": "a.wav", "text": "hello", "seconds": True}, "above zero"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, problem: str) -> None:
    write_wav(tmp_path / "a.wav", 0.5)
    with pytest.raises(BadManifest, match=f"manifest.jsonl, line 3: .*{problem}"):
        read_manifest(write_manifest(tmp_path, GOOD, "", line))


def test_a_manifest_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(BadManifest, match="cannot read the manifest"):
        read_manifest(tmp_path / "nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadManifest, match="cannot read the manifest"):
        read_manifest(tmp_path / "binary")


@pytest.mark.parametrize("content", [[], ["", "  "]])
def test_an_empty_manifest(tmp_path: Path, content: list[str]) -> None:
    with pytest.raises(BadManifest, match="has no recordings"):
        read_manifest(write_manifest(tmp_path, *content))


def test_a_kind_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(BadManifest, match="no recording of kind 'long'; it has clips, noise"):
        read_manifest(write_manifest(tmp_path, GOOD, {**GOOD, "text": ""}), kind="long")


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadManifest, match=r"a\.wav, which cannot be used"):
        read_manifest(write_manifest(tmp_path, GOOD))


@pytest.mark.parametrize("content", [b"", b"this is a letter, not a sound. " * 50])
def test_a_file_that_is_not_audio_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "letter.wav"
    path.write_bytes(content)
    with pytest.raises(BadManifest, match=r"cannot use .*letter\.wav"):
        load_audio(path)
    with pytest.raises(BadManifest, match=r"names .*letter\.wav, which cannot be used"):
        read_manifest(write_manifest(tmp_path, {**GOOD, "path": "letter.wav"}))


def test_recordings_are_chosen_by_kind_and_number(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", 0.5)
    manifest = write_manifest(
        tmp_path, GOOD, {**GOOD, "text": " ", "extra": 1}, {**GOOD, "kind": "long"}, {**GOOD, "text": "again"}
    )
    assert [clip.kind for clip in read_manifest(manifest)] == ["clips", "noise", "long", "clips"]
    assert [clip.text for clip in read_manifest(manifest, kind="clips")] == ["hello there", "again"]
    assert read_manifest(manifest, limit=1) == [Clip(tmp_path / "a.wav", "hello there", 0.5, "clips")]


def test_a_session_is_its_clips_with_pauses(tmp_path: Path) -> None:
    first = Clip(write_wav(tmp_path / "a.wav", 0.5, 3000), "a", 0.5, "clips")
    second = Clip(write_wav(tmp_path / "b.wav", 0.25, 6000), "b", 0.25, "clips")
    samples, parts = Session("s", (first, second), pause_seconds=1.0).load()
    assert len(samples) == 2.75 * 16_000
    assert [(part.clip, part.start, part.end) for part in parts] == [(first, 0.0, 1.5), (second, 1.5, 2.75)]
    assert samples[8_000:24_000].any() == np.False_
    assert samples[24_000:28_000] == pytest.approx(6000 / 32768, abs=1e-4)


def test_clips_are_dealt_to_sessions() -> None:
    clips = [Clip(Path(name), name, 1.0, "clips") for name in "abcde"]
    assert [len(session.clips) for session in one_session_per_clip(clips, 1.0)] == [1] * 5
    dealt = joined_sessions(clips, 2, 1.0)
    assert ["".join(clip.text for clip in session.clips) for session in dealt] == ["ace", "bd"]
    assert len({session.name for session in dealt}) == 2
    assert len(joined_sessions(clips[:1], 3, 1.0)) == 1
    again = joined_sessions(clips, 2, 1.0, rounds=2)
    assert ["".join(clip.text for clip in session.clips) for session in again] == ["aceace", "bdbd"]
