"""The dialect of phone calls without a server: the options of `start`, and the clock of a call with two tracks."""

from __future__ import annotations

from typing import Any

import pytest

from realtime.dialects.base import AudioText, GapRequest, Nothing, Request, SessionFacts
from realtime.dialects.twilio import TwilioDialect, read_start
from realtime.errors import ClientFault, Refusal
from realtime.session.events import End, Problem
from realtime.session.settings import AudioFormat, Settings
from tests.phone_calls import CALL, start_message

BOTH = ("inbound", "outbound")
# 20 ms of mu-law audio.
CHUNK = "/" * 212 + "/w=="
FACTS = SessionFacts("s", 0, 16_000, "m", frozenset({"m"}), lambda: "e", gap_seconds=60.0)


def media(dialect: TwilioDialect, track: str, at_ms: int | str | None, payload: str = CHUNK) -> Request:
    times: dict[str, Any] = {} if at_ms is None else {"timestamp": str(at_ms)}
    return dialect.read({"event": "media", "media": {"track": track, "payload": payload, **times}}, Settings())


def test_start_has_the_options_of_the_session() -> None:
    parameters = {
        "key": "a-key",
        "key2": "-in-two",
        "publish": "line",
        "language": "de",
        "keyterm": "Kittila, Van der Berg",
        "redact": "pci,email",
        "encoding": "linear16",
        "multichannel": "true",
        "unknown": "x",
    }
    start = read_start(start_message(BOTH, customParameters=parameters))
    settings = start.settings
    assert (start.key, start.tracks, settings.publish, settings.language) == ("a-key-in-two", BOTH, "line", "de")
    assert settings.format == AudioFormat("audio/pcmu", 8_000)
    assert settings.keywords == (("Kittila", 1.0), ("Van der Berg", 1.0))
    assert set(settings.formatting.redact) == {"card", "email"}


def test_a_call_without_parameters_has_the_name_of_the_call_and_no_key() -> None:
    start = read_start(start_message(customParameters=None))
    assert (start.key, start.tracks, start.settings.publish) == (None, ("inbound",), CALL)


@pytest.mark.parametrize(
    "given", ["name:Smith,pci,name:Jones", "pci,name:Smith, name:Jones", "name:Smith,name:Jones,PCI"]
)
def test_names_and_kinds_are_redacted_in_any_order(given: str) -> None:
    formatting = read_start(start_message(customParameters={"redact": given})).settings.formatting
    assert set(formatting.redact) == {"card"} and set(formatting.names) == {"Smith", "Jones"}


@pytest.mark.parametrize("bad", [{"redact": "shoes"}, {"replace": "," * 500}, {"language": "x" * 300}])
def test_options_that_must_not_be_ignored_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises((ClientFault, Refusal)):
        read_start(start_message(customParameters=bad))


def test_tracks_have_names_of_their_own() -> None:
    named = Settings(publish="line")
    assert TwilioDialect(FACTS, "inbound", ("inbound",)).start_settings(named).publish == "line"
    assert TwilioDialect(FACTS, "outbound", BOTH).start_settings(named).publish == "line-outbound"


def test_audio_goes_to_its_track() -> None:
    inbound, outbound = (TwilioDialect(FACTS, track, BOTH) for track in BOTH)
    assert media(inbound, "inbound", 0) == AudioText(CHUNK) and media(outbound, "inbound", 0) == Nothing()


def test_a_track_for_which_nothing_comes_gets_the_time_of_the_call_as_silence() -> None:
    outbound = TwilioDialect(FACTS, "outbound", BOTH)
    asked = [media(outbound, "inbound", at) for at in range(0, 3_000, 20)]
    silent = [request.source_samples for request in asked if isinstance(request, GapRequest)]
    assert silent == [8_000, 8_000], "a second at a time, and nothing twice"
    assert media(outbound, "outbound", 5_000) == AudioText(CHUNK, silence_before=3_000 * 8)
    # What came late or twice adds no silence, and the clock goes on from there.
    assert media(outbound, "outbound", 0) == AudioText(CHUNK) and media(outbound, "outbound", None) == AudioText(CHUNK)
    assert media(outbound, "outbound", 6_059) == AudioText(CHUNK)


def test_silence_for_a_jump_of_the_clock_is_bounded() -> None:
    inbound = TwilioDialect(FACTS, "inbound", BOTH)
    assert media(inbound, "inbound", 500_000_000) == AudioText(CHUNK, silence_before=60 * 8_000)
    for wrong in (10**12, "-1", "1e3", "٣", "", "00"):
        with pytest.raises(ClientFault, match="media.timestamp"):
            media(inbound, "inbound", wrong)


def test_nothing_is_written_to_twilio_and_stop_ends_the_call() -> None:
    inbound = TwilioDialect(FACTS, "inbound", BOTH)
    assert inbound.write(Problem("invalid_value", "x"), Settings()) == [] and inbound.created(Settings()) is None
    assert inbound.read({"event": "stop"}, Settings()) == End()
    assert inbound.read({"event": "dtmf", "dtmf": {"digit": "1"}}, Settings()) == Nothing()
