"""The table of buffers in docs/operations.md against the code: every bound is as stated, and none is left out."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from realtime.config import Config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operations.md"
BOUND = re.compile(r"`([a-z_]+(?:\.[a-zA-Z_0-9]+)+)` = ([0-9.]+)")
# Not bounds of anything that a client fills: how long to wait, and an older name.
NO_BOUNDS = {"session.stall_s", "session.resume_s", "limits.outbox_characters"}

# Folders whose constants bound what strangers can make the server hold or do, and how such constants are called.
WALKED = ("audio", "engine/boundary", "engine/client", "engine/server", "realtime/dialects", "realtime/http")
WALKED += ("realtime/serving", "realtime/session", "realtime/webrtc")
LOOKS_LIKE_A_BOUND = re.compile(r"(MAX_|MOST_).*|.*(_BYTES|AT_ONCE)")
NO_BOUNDING_CONSTANTS = {
    "audio.containers.HEAD_BYTES": "how much is looked at to know a format",
    "audio.formats.MAX_OVERSHOOT": "how loud a sample may be",
    "audio.formats._SAMPLE_BYTES": "the size of a sample",
    "audio.mp4_filter.MAX_MEDIA_BYTES": "stands for a box that lasts to the end",
    "audio.container_filters.READ_BYTES": "the size of a read",
    "audio.formats.MAX_RATE": "a range of a setting",
    "realtime.serving.decoder_process.MAX_JUMP_S": "tells a gap from a changed clock",
    "engine.boundary.crash_suspects.RECORD_BYTES": "a file of fixed size",
    "engine.boundary.items.KEY_BYTES": "the length of a hash",
    "engine.boundary.sockets.MAX_SOCKETS": "a limit of ZeroMQ that is lifted",
    "engine.boundary.sockets.REFUSALS_READ_AT_ONCE": "how much is read at once",
    "engine.boundary.sockets.CURVE_BYTES": "what encryption adds to a frame",
    "engine.client.link.ITEM_HEADER_BYTES": "the size of an entry of a message",
    "engine.client.link.SAMPLE_BYTES": "the size of a sample",
    "engine.client.recovery.MAX_MIGRATING": "how many streams are interrupted at a time",
    "engine.client.supervisor.MAX_BACKOFF_S": "a time to wait",
    "realtime.dialects.openai.MAX_DELAY_MS": "a range of a setting",
    "realtime.dialects.deepgram.MAX_BOOST": "a range of a setting",
    "realtime.dialects.deepgram.MAX_PAUSE_MS": "a range of a setting",
    "realtime.dialects.deepgram.MAX_PAUSE_S": "a range of a setting",
    "realtime.dialects.deepgram.MAX_UTTERANCE_END_MS": "a range of a setting",
    "realtime.dialects.twilio.MAX_MS": "a range of a parameter",
    "realtime.http.websocket_routes.MAX_SEQUENCE": "a range of a parameter",
    "realtime.http.websocket_routes.REASON_BYTES": "the longest reason in a close frame",
    "realtime.http.stream_routes.MAX_EVENT_NUMBER": "a range of a parameter",
    "realtime.http.websocket_routes.SAMPLE_BYTES": "the size of a sample",
    "realtime.http.file_transcription.READ_BYTES": "the size of a read",
    "realtime.serving.inbox.FED_BYTES": "how much is decoded at once",
    "realtime.serving.inbox.PIECE_BYTES": "how much is read at once",
    "realtime.http.upload_forms.LETTER_BYTES": "the length of a letter",
    "realtime.serving.signed_tokens.MAC_BYTES": "the length of a signature",
    "realtime.serving.viewers.MAX_PAUSE_S": "a time to wait",
    "realtime.serving.uvicorn_protocols._HEADER_BYTES": "the length of a frame's head",
    "realtime.serving.webrtc_calls.READ_BYTES": "the size of a read",
    "realtime.webrtc.sdp.DEFAULT_MESSAGE_BYTES": "what a client takes that does not say so",
    "realtime.webrtc.opus_track.MAX_JUMP": "tells a gap from a changed count",
    "realtime.webrtc.opus_track.MAX_PACKET_SAMPLES": "the longest packet of the codec",
    "realtime.session.settings.MAX_RATE": "a range of a setting",
    "realtime.session.formatting.MAX_PARAGRAPH_WORDS": "the shape of a paragraph",
    "realtime.session.redaction.MAX_FILLERS": "how far a rule looks",
    "realtime.session.words.MAX_SUBTITLE_CHARACTERS": "the shape of a subtitle",
    "realtime.session.words.MAX_SUBTITLE_SECONDS": "the shape of a subtitle",
}


def rows() -> list[list[str]]:
    lines = PAGE.read_text().splitlines()
    start = lines.index("| buffer | bound | set by | when full |")
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def bounds() -> list[tuple[str, float]]:
    return [(name, float(value)) for row in rows() for name, value in BOUND.findall(row[2])]


def value_of(name: str) -> float:
    """What a setting's default, a module's constant or the default of a dataclass's field is."""
    place, _, last = name.rpartition(".")
    if hasattr(Config(), place):
        return float(getattr(getattr(Config(), place), last))
    module, _, kind = place.rpartition(".")
    if kind[:1].isupper():
        owner = getattr(importlib.import_module(module), kind)
        return float({field.name: field.default for field in dataclasses.fields(owner)}[last])
    return float(getattr(importlib.import_module(place), last))


def constants() -> set[str]:
    """Constants of the walked folders that look like a bound, by their full names."""
    found = set()
    for path in [path for folder in WALKED for path in (ROOT / folder).glob("*.py")]:
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found |= {f"{module}.{name}" for name in names if LOOKS_LIKE_A_BOUND.fullmatch(name)}
    return found


@pytest.mark.parametrize(("name", "stated"), bounds())
def test_a_bound_is_what_the_page_says(name: str, stated: float) -> None:
    assert value_of(name) == stated


def test_every_row_says_what_happens_when_the_buffer_is_full() -> None:
    assert len(rows()) > 30
    assert all(len(row) == 4 and row[3] for row in rows())


@pytest.mark.parametrize("part", ["limits", "session"])
def test_every_setting_that_bounds_something_is_in_the_table(part: str) -> None:
    settings = {f"{part}.{field.name}" for field in dataclasses.fields(getattr(Config(), part))}
    assert settings - NO_BOUNDS <= {name for name, _ in bounds()}


def test_every_constant_that_bounds_something_is_in_the_table() -> None:
    assert len(constants()) > 40
    missing = constants() - {name for name, _ in bounds()} - NO_BOUNDING_CONSTANTS.keys()
    assert not missing, f"docs/operations.md does not say what happens when these are full: {sorted(missing)}"
    assert NO_BOUNDING_CONSTANTS.keys() <= constants(), "an exception is out of date"
