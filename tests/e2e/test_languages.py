"""A multilingual Whisper at the socket: languages that are set and detected, and one that it does not have."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from audio.containers import read_file
from engine.options import cache_folder
from tests.cached_models import skip_unless_cached
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.e2e.serve_process import NO_LOAD, Served, serving
from tests.engine.models.test_whisper_tiny import VOICES

# A word of each voice.
SAID = {"de": "Damen", "es": "Buenos", "fr": "messieurs"}
RATE = 24_000


@pytest.fixture
def blockbuster() -> None:
    """The test itself starts a server and reads files."""


def voice(folder: Path, language: str) -> bytes:
    """PCM at `RATE`, the socket's default."""
    file = folder / f"{language}.wav"
    subprocess.run(["espeak-ng", "-v", language, "-s", "140", "-w", str(file), VOICES[language]], check=True)
    samples = np.concatenate(list(read_file(file)))
    times = np.arange(len(samples) * RATE // 16_000) * 16_000 / RATE
    return (np.interp(times, np.arange(len(samples)), samples) * 32767).astype("<i2").tobytes()


async def transcribed(server: Served, pcm: bytes, **transcription: Any) -> dict[str, Any]:
    """The `completed` event of one turn."""
    async with greeted_client(server.ws) as client:
        await client.update(transcription=transcription, turn_detection=None)
        await client.append(pcm)
        await client.send("input_audio_buffer.commit")
        while True:
            # Without the bound of `receive`: on a busy machine a pass of these models takes long.
            event = json.loads(await client.socket.recv())
            assert event["type"] != "error", event
            if event["type"] == COMPLETED:
                return dict(event)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["whisper-base", "whisper-small"])
async def test_languages_are_named_set_and_detected_and_others_are_refused(model: str, tmp_path: Path) -> None:
    skip_unless_cached(model)
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    cache = {"TICKERTAPE_CACHE": str(cache_folder())}
    async with serving(tmp_path, "--model", model, "--port", "0", *NO_LOAD, environment=cache) as server:
        async with httpx.AsyncClient(base_url=server.base_url) as http:
            served = (await http.get("/models")).json()["data"][0]
        assert len(served["languages"]) == 99 and served["detects_language"]
        async with greeted_client(server.ws) as client:
            wish = {"transcription": {"language": "yue"}}
            await client.send("session.update", session={"type": "transcription", "audio": {"input": wish}})
            error = (await client.until("error"))[-1]["error"]
        assert error["param"].endswith("language") and "the language 'yue'" in error["message"]
        for language, word in SAID.items():
            pcm = voice(tmp_path, language)
            assert word in (await transcribed(server, pcm, language=language))["transcript"]
            found = await transcribed(server, pcm)
            # The end of a synthetic voice may sound like another language.
            assert word in found["transcript"] and found["languages"][0] == {"code": language}
