"""The audio of a load test: bad manifests are named, every client plays different audio, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.bench.clients import (
    AudioPiece,
    BadManifest,
    Bank,
    Clip,
    Playlist,
    build_bank,
    chunks,
    playlist,
    read_manifest,
)
from tests.realtime.commands.conftest import sound, write_wav

RATE = 8_000
BANK = Bank(Path("unused"), RATE, tuple(Clip(n * 16_000, 16_000, f"text {n}") for n in range(20)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 1"),
        ('{"path": "a.wav"}', "line 1"),
        ('["a.wav"]', "line 1"),
        ('{"path": "a.wav", "text": "x", "seconds": "long"}', "line 1"),
        ('{"path": "a.wav", "text": "", "seconds": 1}', "no recording with speech"),
        ('{"path": "a.wav", "text": "x", "seconds": 99}', "no recording with speech of at most 30 s"),
    ],
)
def test_bad_manifest_is_named(tmp_path: Path, line: str, said: str) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(line + "\n")
    with pytest.raises(BadManifest, match=said):
        read_manifest(manifest, 30)


def test_recording_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_text("no audio in here, whatever the name says")
    for name in ("bad.wav", "missing.wav"):
        with pytest.raises(BadManifest, match=name):
            build_bank([(tmp_path / name, "x")], RATE, tmp_path / "bank")


def test_bank_holds_all_recordings_at_the_wire_rate(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        write_wav(tmp_path / f"{number}.wav", sound(1.0 + number))
        files.append({"path": f"{number}.wav", "text": f"text {number}", "seconds": 1.0 + number})
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, files)))
    bank = build_bank(read_manifest(tmp_path / "m.jsonl", 30), 24_000, tmp_path / "bank")
    assert [(clip.start, clip.samples, clip.text) for clip in bank.clips] == [
        (0, 24_000, "text 0"),
        (24_000, 48_000, "text 1"),
    ]
    assert bank.path.stat().st_size == 2 * 72_000


def test_every_client_says_something_else_and_always_the_same() -> None:
    lists = [playlist(BANK, client, 10.0, 0.5) for client in range(10)]
    assert lists == [playlist(BANK, client, 10.0, 0.5) for client in range(10)]
    assert len({parts.text for parts in lists}) == 10
    for parts in lists:
        spoken = [piece for piece in parts.pieces if piece.start is not None]
        assert parts.text == " ".join(f"text {(piece.start or 0) // 16_000}" for piece in spoken)
        assert 9 * RATE <= parts.samples <= 11 * RATE and parts.pieces[-1].start is None


def test_single_recording_is_cut_at_different_places_and_filled_up() -> None:
    bank = Bank(Path("unused"), RATE, (Clip(0, 3 * RATE, None),))
    lists = [playlist(bank, client, 10.0, 0.5) for client in range(10)]
    assert len({parts.pieces[0] for parts in lists}) == 10
    assert all(parts.text is None and parts.samples == round(10.5 * RATE) for parts in lists)


@given(
    pieces=st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=6),
    chunk=st.integers(1, 64),
)
def test_chunks_are_equal_and_lose_nothing(pieces: list[tuple[bool, int]], chunk: int) -> None:
    samples = np.arange(1, 101, dtype="<i2")
    parts = Playlist(tuple(AudioPiece(7 if loud else None, count) for loud, count in pieces), None)
    expected = b"".join(samples[7 : 7 + count].tobytes() if loud else bytes(2 * count) for loud, count in pieces)
    sent = list(chunks(memoryview(samples.tobytes()), parts, chunk))
    assert b"".join(sent) == expected
    assert all(len(piece) == 2 * chunk for piece in sent[:-1])
