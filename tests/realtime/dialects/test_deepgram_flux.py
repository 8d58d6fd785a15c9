"""Deepgram Flux: bad queries and bad `Configure` messages, and the order of the messages about turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.dialects.base import Nothing, SessionFacts, decode_json, encode_json
from realtime.dialects.deepgram_flux import MAX_TURN_CHARACTERS, FluxDialect, read_flux_query
from realtime.errors import ClientFault, Refusal
from realtime.session.events import (
    Commit,
    Committed,
    Completed,
    Configure,
    Delta,
    EagerTurnEnd,
    End,
    ItemFailed,
    Problem,
    ServerEvent,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TimedWord,
    TurnResumed,
)
from realtime.session.settings import AudioFormat, Settings

RATE = 16_000


def query(text: str) -> Settings:
    pairs = [tuple(pair.partition("=")[::2]) for pair in text.split("&") if pair]
    return read_flux_query(dict(pairs), pairs)


def flux() -> FluxDialect:
    return FluxDialect(SessionFacts("sess_1", 0, RATE, "m", frozenset({"m"}), lambda: "event_1"), "request")


DEFAULTS = query("model=flux-general-en&encoding=linear16&sample_rate=16000")

# Bad queries

NO_NUMBERS = ("", "x", "0_7", "00.7", "٠.7", "０．７", " 0.7", "0.7\r\nX: y", "nan", "inf", "1e400", "+0.7", "7" * 999)
OUT_OF_RANGE = ("0.2", "-0.7", "1.1", "499", "60001", "05000", "5_000", "５０００")


@pytest.mark.parametrize("name", ["eot_threshold", "eager_eot_threshold", "eot_timeout_ms"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, *OUT_OF_RANGE])
def test_thresholds_that_are_no_numbers_in_range_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Refusal) as refused:
        query(f"encoding=linear16&{name}={value}")
    assert refused.value.status == 400 and refused.value.param == name
    message = refused.value.message
    assert message.startswith(f"'{name}' must be a ") and len(message) < 120 and message.isprintable()


@pytest.mark.parametrize("text", ["eager_eot_threshold=0.8", "eager_eot_threshold=0.61&eot_threshold=0.6"])
def test_an_eager_threshold_above_the_other_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match="must not be above eot_threshold") as refused:
        query(text)
    assert (refused.value.status, refused.value.param) == (400, "eager_eot_threshold")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("encoding=linear32", "encoding"),
        ("encoding=opus", "encoding"),
        ("encoding=linear16\r\n", "encoding"),
        ("encoding=linear16&sample_rate=016000", "sample_rate"),
        ("encoding=linear16&sample_rate=16_000", "sample_rate"),
        ("redact=numbers", "redact"),
        (f"model={'m' * 257}", "model"),
    ],
)
def test_what_must_not_be_ignored_is_refused(text: str, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        query(text)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_query_becomes_settings() -> None:
    asked = query(
        "model=flux-general-multi&encoding=mulaw&sample_rate=8000&eot_threshold=0.85&eager_eot_threshold=.4"
        "&eot_timeout_ms=700&keyterm=Ticker&keyterm=Tape&language_hint=de&language_hint=en&mip_opt_out=true&tag=a"
    )
    assert asked.format == AudioFormat("audio/pcmu", 8000, binary=True)
    assert asked.keywords == (("Ticker", 1.0), ("Tape", 1.0)) and asked.languages == ("de", "en")
    assert asked.language is None and thresholds(asked) == (0.85, 0.4, 700)
    assert thresholds(DEFAULTS) == (0.7, None, 5000) and DEFAULTS.language == "en"
    assert query("").format.container and query("encoding=ogg-opus").format.container


def thresholds(settings: Settings) -> tuple[float, float | None, int]:
    detection = settings.turn_detection
    assert detection is not None and detection.scored is not None
    return detection.scored.threshold, detection.scored.eager, detection.scored.timeout_ms


# Messages of the client


@pytest.mark.parametrize("text", ['{"type": "Finalize"}', '{"type": 7}', "{}", '{"type": ["Configure"]}'])
def test_an_unknown_message_is_a_mistake(text: str) -> None:
    with pytest.raises(ClientFault) as fault:
        flux().read(decode_json(text), DEFAULTS)
    assert fault.value.code == "UNPARSABLE_CLIENT_MESSAGE"


@pytest.mark.parametrize(
    "fields",
    [
        '"thresholds": []',
        '"thresholds": "0.8"',
        '"thresholds": 0',
        '"thresholds": {"eot_threshold": "0.8"}',
        '"thresholds": {"eot_threshold": true}',
        '"thresholds": {"eot_threshold": 1.01}',
        '"thresholds": {"eot_threshold": 1e308}',
        f'"thresholds": {{"eot_threshold": {"9" * 400}}}',
        '"thresholds": {"eot_threshold": -0.0}',
        '"thresholds": {"eot_timeout_ms": 499}',
        '"thresholds": {"eot_timeout_ms": 1000.5}',
        '"thresholds": {"eot_timeout_ms": 123456789012345678901234567890}',
        '"thresholds": {"eot_timeout_ms": "1000"}',
        '"thresholds": {"eot_timeout_ms": [1000]}',
        '"thresholds": {"eager_eot_threshold": 0.75}',
        '"thresholds": {"eager_eot_threshold": false}',
        '"thresholds": {"eager_eot_threshold": {}}',
        '"thresholds": {"eot_threshold": 0.6, "eager_eot_threshold": 0.65}',
        '"keyterms": {"a": 1}',
        '"keyterms": ["a", 1]',
        '"keyterms": [null]',
        '"keyterms": 5',
        '"keyterms": ["a"], "thresholds": {"eot_timeout_ms": 1}',
    ],
)
def test_a_bad_configure_changes_nothing_and_says_why(fields: str) -> None:
    dialect = flux()
    with pytest.raises(ClientFault) as raised:
        dialect.read(decode_json(f'{{"type": "Configure", {fields}}}'), DEFAULTS)
    fault = raised.value
    (told,) = dialect.write(Problem(fault.code, fault.message, event_id=fault.event_id), DEFAULTS)
    assert (told["type"], told["code"], told["request_id"]) == ("ConfigureFailure", "INVALID_VALUE", "request")
    assert told["description"].endswith(".") and len(told["description"]) < 160


def test_lowering_the_threshold_below_the_eager_one_is_refused() -> None:
    with pytest.raises(ClientFault, match="must not be above"):
        flux().read({"type": "Configure", "thresholds": {"eot_threshold": 0.5}}, query("eager_eot_threshold=0.6"))


def test_configure_changes_what_it_names_and_keeps_the_rest() -> None:
    dialect, settings = flux(), query("eager_eot_threshold=0.4&keyterm=Ticker")

    def configured(text: str) -> Settings:
        request = dialect.read(decode_json(f'{{"type": "Configure", {text}}}'), settings)
        assert isinstance(request, Configure)
        return request.settings

    settings = configured('"thresholds": {"eot_threshold": 0.9}, "numerals": true')
    assert thresholds(settings) == (0.9, 0.4, 5000) and settings.keywords == (("Ticker", 1.0),)
    settings = configured('"thresholds": {"eot_timeout_ms": 800, "eot_threshold": null}, "keyterms": "Tape"')
    assert thresholds(settings) == (0.9, 0.4, 800) and settings.keywords == (("Tape", 1.0),)
    (told,) = dialect.write(SessionUpdated(settings), settings)
    assert told["thresholds"] == {"eot_threshold": 0.9, "eager_eot_threshold": 0.4, "eot_timeout_ms": 800}
    assert told["type"] == "ConfigureSuccess" and told["keyterms"] == ["Tape"]
    settings = configured('"thresholds": {"eager_eot_threshold": null}, "keyterms": []')
    assert thresholds(settings) == (0.9, None, 800) and settings.keywords == ()
    (told,) = dialect.write(SessionUpdated(settings), settings)
    assert "eager_eot_threshold" not in told["thresholds"]
    assert configured('"thresholds": null') == settings


def test_keyterms_that_the_model_cannot_use_are_not_repeated_as_if_they_were_in_force() -> None:
    told = flux().write(SessionUpdated(replace(DEFAULTS, keywords=None)), DEFAULTS)
    assert [message["type"] for message in told] == ["ConfigureSuccess", "Warning"]
    assert told[0]["keyterms"] == [] and told[1]["code"] == "KEYTERMS_NOT_SUPPORTED"


def test_the_other_messages() -> None:
    dialect = flux()
    assert dialect.read({"type": "CloseStream"}, DEFAULTS) == End()
    assert dialect.read({"type": "KeepAlive"}, DEFAULTS) == Nothing()
    force = dialect.read({"type": "ForceEndTurn"}, DEFAULTS)
    assert isinstance(force, Commit)
    # Without a turn it has no effect.
    assert dialect.write(Problem("empty", "nothing", event_id=force.event_id), DEFAULTS) == []


# Turns


class Wire:
    """A dialect, and a check of every message that it writes."""

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.dialect, self.settings = flux(), settings
        self.messages = [self.dialect.created(settings)]
        self.turn, self.open, self.eager = 0, False, None
        self.last = ""

    def __call__(self, *events: ServerEvent) -> list[str]:
        """The events of the messages that these events become."""
        new = [message for event in events for message in self.dialect.write(event, self.settings)]
        for message in new:
            assert message["sequence_id"] == len(self.messages) and message["request_id"] == "request"
            self.messages.append(message)
            if message["type"] == "TurnInfo":
                self.check(message)
        return [message.get("event", message["type"]) for message in new]

    def check(self, info: dict[str, Any]) -> None:
        """The promises of the wire, for a message about a turn."""
        event, text = info["event"], info["transcript"]
        assert info["turn_index"] == self.turn and text and text == text.strip()
        assert info["audio_window_start"] <= info["audio_window_end"]
        assert 0 <= info["end_of_turn_confidence"] <= 1
        assert ("trigger" in info) == (event == "EndOfTurn")
        assert self.open != (event == "StartOfTurn")
        assert text.startswith(self.last), "text is append-only"
        self.open, self.last = True, text
        if event == "TurnResumed":
            assert self.eager is not None
            self.eager = None
        elif self.eager is not None:
            assert event == "EndOfTurn" and text == self.eager
        if event == "EagerEndOfTurn":
            self.eager = text
        elif event == "EndOfTurn":
            self.turn, self.open, self.eager, self.last = self.turn + 1, False, None, ""


def said(text: str, start: float, end: float, item: str = "i1") -> Delta:
    return Delta(item, text, (TimedWord(text.strip(), int(start * RATE), int(end * RATE), confidence=0.875),))


def done(item: str = "i1", text: str = "", end: float = 3.0, confidence: float | None = 0.75, **more: Any) -> Completed:
    return Completed(item, text, (), 0, int(end * RATE), 0, 0.0, confidence=confidence, **more)


def test_a_turn_with_an_eager_end_that_speech_takes_back() -> None:
    wire = Wire()
    assert wire(SpeechStarted("i1", 1600)) == []
    assert wire(said("Hello", 0.2, 0.5)) == ["StartOfTurn"]
    assert wire(said(" there.", 0.5, 0.9)) == ["Update"]
    assert wire(EagerTurnEnd("i1", int(1.4 * RATE), 0.41)) == ["EagerEndOfTurn"]
    assert wire(TurnResumed("i1", int(1.6 * RATE)), said(" You", 1.6, 1.8)) == ["TurnResumed", "Update"]
    assert wire(EagerTurnEnd("i1", 2 * RATE, 0.41), SpeechStopped("i1", 3 * RATE)) == ["EagerEndOfTurn"]
    assert wire(Committed("i1", None), done()) == ["EndOfTurn"]
    assert wire.messages[0] == {"type": "Connected", "request_id": "request", "sequence_id": 0}
    assert wire.messages[-1] == {
        "type": "TurnInfo",
        "request_id": "request",
        "sequence_id": 7,
        "event": "EndOfTurn",
        "turn_index": 0,
        "audio_window_start": 0.1,
        "audio_window_end": 3.0,
        "transcript": "Hello there. You",
        "words": [
            {"word": "Hello", "confidence": 0.875, "start": 0.2, "end": 0.5},
            {"word": "there.", "confidence": 0.875, "start": 0.5, "end": 0.9},
            {"word": "You", "confidence": 0.875, "start": 1.6, "end": 1.8},
        ],
        "end_of_turn_confidence": 0.75,
        "trigger": "model",
    }
    assert wire(said("Next", 3.5, 3.9, "i2"), done("i2", end=5.0, timeout=True)) == ["StartOfTurn", "EndOfTurn"]
    assert wire.messages[-1]["trigger"] == "timeout"


def test_a_turn_begins_where_speech_began_also_if_its_first_word_is_incomplete() -> None:
    wire = Wire()
    wire(SpeechStarted("i1", 0), said("One", 0.2, 0.5), SpeechStarted("i2", 5 * RATE), done(end=3.0))
    wire(Delta("i2", "Tw"))
    assert (wire.messages[-1]["audio_window_start"], wire.messages[-1]["audio_window_end"]) == (5.0, 5.0)


def test_a_noise_starts_no_turn() -> None:
    wire = Wire()
    assert wire(SpeechStarted("i1", 0), EagerTurnEnd("i1", RATE, 0.5), TurnResumed("i1", RATE), done()) == []
    assert wire(Delta("i2", " "), done("i2"), ItemFailed("i3", "x", "y")) == ["Warning"]
    assert wire(said("Word", 1, 2, "i4"), done("i4")) == ["StartOfTurn", "EndOfTurn"]


def test_text_after_an_eager_end_resumes_the_turn_first() -> None:
    wire = Wire()
    wire(said("One", 0.2, 0.5), EagerTurnEnd("i1", RATE, 0.5))
    assert wire(said(" two", 0.5, 0.8), TurnResumed("i1", RATE), done()) == ["TurnResumed", "EndOfTurn"]


@pytest.mark.parametrize("committed", [Committed("i1", None, "force_end_turn"), Committed("i1", None)])
def test_a_turn_that_the_client_ends_is_ended_by_hand(committed: Committed) -> None:
    wire = Wire()
    assert wire(said("One", 0.2, 0.5), committed, done(confidence=None)) == ["StartOfTurn", "EndOfTurn"]
    assert (wire.messages[-1]["trigger"], wire.messages[-1]["end_of_turn_confidence"]) == ("manual", 1.0)


def test_a_turn_that_fails_ends_with_the_text_so_far() -> None:
    wire = Wire()
    assert wire(said("One", 0.2, 0.5), ItemFailed("i1", "transcription_failed", "It broke.")) == [
        "StartOfTurn", "Warning", "EndOfTurn",
    ]  # fmt: skip
    assert wire.messages[-2]["code"] == "TRANSCRIPTION_FAILED"
    assert wire(said("Two", 2, 3, "i2")) == ["StartOfTurn"]


def test_the_bytes_of_an_endless_turn_grow_linearly() -> None:
    """Each message repeats its turn, so the turn is cut and updates become rare."""
    sizes = []
    for words in (3_000, 9_000):
        wire = Wire()
        for number in range(words):
            wire(said(f" word{number}", number, number + 1))
            if number % 50 == 49:
                wire(EagerTurnEnd("i1", number * RATE, 0.5), TurnResumed("i1", number * RATE))
        sizes.append(sum(len(encode_json(message)) for message in wire.messages))
        longest = max(len(message.get("transcript", "")) for message in wire.messages)
        assert MAX_TURN_CHARACTERS <= longest < MAX_TURN_CHARACTERS + 20
        cut = [message for message in wire.messages if message.get("trigger") == "length"]
        assert len(cut) == wire.turn > 1
        text = " ".join(message["transcript"] for message in (*cut, wire.messages[-1]))
        assert text.split()[-1] == f"word{words - 1}" and len(text.split()) == words
    assert sizes[1] < 4 * sizes[0]


STEPS = st.lists(
    st.sampled_from(["word", "space", "eager", "resumed", "done", "failed", "force", "configure"]), max_size=60
)


@given(STEPS)
def test_any_order_of_events_keeps_the_promises_of_the_wire(steps: list[str]) -> None:
    wire, item, text = Wire(), 0, []
    for number, step in enumerate(steps):
        name = f"i{item}"
        match step:
            case "word":
                text.append(f"w{number}")
                wire(said(f" w{number}", number, number + 1, name))
            case "space":
                wire(Delta(name, " "))
            case "eager":
                wire(EagerTurnEnd(name, number * RATE, 0.5))
            case "resumed":
                wire(TurnResumed(name, number * RATE))
            case "force":
                wire(Committed(name, None, "force_end_turn"))
            case "configure":
                wire(SessionUpdated(DEFAULTS))
            case _:
                wire(done(name, end=number) if step == "done" else ItemFailed(name, "x", "y"))
                item += 1
    wire(done(f"i{item}"))
    ended = [message["transcript"] for message in wire.messages if message.get("event") == "EndOfTurn"]
    assert " ".join(ended).split() == text and not wire.open
    assert not wire.dialect._starts and not wire.dialect._forced - {f"i{item}"}
