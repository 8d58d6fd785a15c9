"""The file of the streams that the server pulls: one that is too large is refused by name, and not read as a whole or
overwritten."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from realtime.serving import pulled_streams
from realtime.serving.pulled_streams import SavedStream, StreamFile


async def opened(path: Path) -> list[SavedStream]:
    file = StreamFile(str(path), list[SavedStream])
    found = await file.open()
    await file.close()
    return found


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_file_that_is_too_large_is_refused_by_name(
    is_endless: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulled_streams, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "streams.json"
    if is_endless:
        path.symlink_to("/dev/zero")
    else:
        # Valid JSON without streams, but for its size.
        path.write_bytes(b"[" + b" " * 1000 + b"]")
    assert asyncio.run(opened(path)) == []
    assert "server.stream_file" in caplog.text and "more than 1000 bytes" in caplog.text
    # From now on the current streams are in it; what was there is kept.
    assert path.read_bytes() == b"[]"
    aside = tmp_path / "streams.json.unreadable"
    assert aside.is_symlink() if is_endless else len(aside.read_bytes()) == 1002
