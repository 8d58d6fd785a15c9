"""The small parts of the gateway, each alone: wire, outbox, keys, pace, transcripts, turns, stalls."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from realtime.dialects.base import SessionFacts
from realtime.dialects.json_frames import decode_base64, decode_json, encode_json
from realtime.dialects.openai import OpenAIDialect
from realtime.errors import ClientFault, Refusal
from realtime.http.auth import Gatekeeper, offered_key, select_subprotocol
from realtime.metrics.gateway import Metrics
from realtime.serving.intake import Intake
from realtime.serving.live_session import LiveLimits, LiveSession
from realtime.serving.outbox import Outbox
from realtime.serving.throttle import Pace
from realtime.session.core import Session
from realtime.session.endpointing import Paused, Started, Stopped, TurnWatch
from realtime.session.events import Acknowledged, Append, Cleared, Delta, Hangup, TimedWord
from realtime.session.settings import AudioFormat, Settings, TurnDetection
from realtime.session.stall import StallGuard
from realtime.session.subtitles import subtitles, to_srt, to_vtt
from realtime.session.words import WordCutter, ends_sentence
from tests.realtime.gateway_doubles import FakeEngine

RATE = 16_000

# Wire.


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "1", "null", '{"a":', "[" * 100_000, b"\xff\xfe", '{"a": NaN}'])
def test_what_is_no_json_object_is_a_clients_fault(text: str | bytes) -> None:
    with pytest.raises(ClientFault) as fault:
        decode_json(text)
    assert fault.value.code == "invalid_json"


@pytest.mark.parametrize("text", ["A", "AAA", "A===", "AA=A", "A A=", "ÄÄÄÄ", "AAAA\n", "-_-_", "\x00AAA"])
def test_what_is_no_base64_is_a_clients_fault(text: str) -> None:
    with pytest.raises(ClientFault) as fault:
        decode_base64(text)
    assert (fault.value.code, fault.value.param) == ("invalid_audio", "audio")


@given(st.binary(max_size=200))
def test_base64_round_trip(data: bytes) -> None:
    assert decode_base64(base64.b64encode(data).decode()) == data


def test_json_round_trip_keeps_other_alphabets() -> None:
    assert decode_json(encode_json({"text": "žluťoučký 🐎"})) == {"text": "žluťoučký 🐎"}


# Intake: any split of the bytes gives the same samples, and every sample is counted once.


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), st.sampled_from([8000, 16000, 24000, 44100]))
def test_intake_counts_every_sample_once_however_the_bytes_are_cut(cuts: list[int], rate: int) -> None:
    data = np.random.default_rng(0).integers(-3000, 3000, sum(cuts), np.int16).tobytes()
    whole, pieces = Intake(AudioFormat("audio/pcm", rate)), Intake(AudioFormat("audio/pcm", rate))
    expected = [whole.decode(data), whole.flush()]
    appended, start = [], 0
    for number, cut in enumerate(cuts):
        end = start + 2 * cut + (1 if number % 2 else 0)
        appended.append(pieces.decode(data[start : min(end, len(data))]))
        start = min(end, len(data))
    appended += [pieces.decode(data[start:]), pieces.flush()]
    assert sum(item.source_samples for item in appended) == len(data) // 2
    one, other = (np.concatenate([item.samples for item in items]) for items in (expected, appended))
    assert len(one) == (len(data) // 2 * RATE + rate // 2) // rate
    np.testing.assert_array_equal(one, other)


def test_intake_flush_of_nothing_is_nothing() -> None:
    intake = Intake(AudioFormat())
    assert len(intake.flush().samples) == 0
    assert intake.silence(24_000).samples == RATE


# Outbox.


def test_outbox_joins_deltas_of_one_item_and_nothing_else() -> None:
    outbox = Outbox(10, 1000)
    word = TimedWord("b", 1, 2)
    for event in (Delta("1", "a"), Delta("1", " b", (word,)), Delta("2", "c"), Cleared(), Delta("2", "d")):
        outbox.put(event)
    outbox.put(Acknowledged(5))
    outbox.put(Acknowledged(9))
    outbox.hang_up(Hangup(1000, "bye", "test"))
    outbox.put(Cleared())

    async def take_all() -> list[object]:
        return [await outbox.get() for _ in range(7)]

    taken = asyncio.run(take_all())
    expected = [Delta("1", "a b", (word,)), Delta("2", "c"), Cleared(), Delta("2", "d"), Acknowledged(9)]
    assert taken == [*expected, Hangup(1000, "bye", "test"), Hangup(1000, "bye", "test")]


@pytest.mark.parametrize("text", [" word", "x" * 600])
def test_outbox_is_overrun_once_by_events_or_by_text(text: str) -> None:
    outbox = Outbox(5, 1000)
    calls = []
    outbox.on_overrun = lambda: calls.append(True)
    for number in range(20):
        outbox.put(Delta(str(number % 2), text))
    assert outbox.overrun and calls == [True] and len(outbox) <= 6


def test_slow_reader_of_one_long_item_holds_one_event() -> None:
    outbox = Outbox(5, 1_000_000)
    for number in range(10_000):
        outbox.put(Delta("1", f" {number}"))
    assert len(outbox) == 1 and not outbox.overrun


# Keys.


def test_keys_are_found_wherever_clients_put_them() -> None:
    assert offered_key({"authorization": "bearer k1"}, []) == "k1"
    assert offered_key({"authorization": "Token k2"}, []) == "k2"
    assert offered_key({"authorization": "Basic abc"}, []) is None
    assert offered_key({"authorization": "Bearer "}, []) is None
    assert offered_key({"api-key": "k3"}, []) == "k3"
    assert offered_key({}, ["realtime", "openai-insecure-api-key.k4"]) == "k4"
    assert offered_key({}, ["token", "k5"]) == "k5"
    assert offered_key({}, ["token"]) is None


def test_subprotocol_with_a_secret_is_never_selected() -> None:
    assert select_subprotocol(["openai-insecure-api-key.k", "realtime"]) == "realtime"
    assert select_subprotocol(["openai-insecure-api-key.k"]) is None
    assert select_subprotocol([]) is None


def test_client_secrets_expire_and_are_limited() -> None:
    now = 1000.0
    keeper = Gatekeeper(("the-real-key",), 2, lambda: now)
    caller = keeper.check("the-real-key", "")
    secret = keeper.issue(caller, Settings(language="de"), 60)
    assert keeper.check(secret.value, "").settings == Settings(language="de")
    assert keeper.check(secret.value, "").name == caller.name
    keeper.issue(caller, Settings(), 60)
    with pytest.raises(Refusal) as refused:
        keeper.issue(caller, Settings(), 60)
    assert refused.value.status == 429
    now = 1061.0
    with pytest.raises(Refusal) as refused:
        keeper.check(secret.value, "")
    assert refused.value.status == 401
    keeper.issue(caller, Settings(), 60)


def test_without_keys_anybody_may_come_and_is_counted_by_address() -> None:
    keeper = Gatekeeper((), 10)
    assert keeper.check("whatever", "10.0.0.1").name == "address 10.0.0.1"
    assert keeper.check("ek_unknown", "10.0.0.1").settings is None


def test_pace_lets_a_second_through_and_then_slows() -> None:
    now = 0.0
    pace = Pace(10.0, lambda: now)
    assert [pace.delay() for _ in range(10)] == [0.0] * 10
    assert pace.delay() == pytest.approx(0.1) and pace.delay() == pytest.approx(0.2)
    now = 10.0
    assert pace.delay() == 0.0


# Transcripts.


def test_cutter_gives_each_letter_once_whatever_the_deltas() -> None:
    cutter = WordCutter()
    assert cutter.cut_words(" He", [], 0) == []
    assert cutter.take_loose() == " He"
    assert cutter.take_loose() == ""
    (piece,) = cutter.cut_words("llo wor", [messages.Word("Hello", 0, 10)], 100)
    assert (piece.fresh, piece.continues, piece.word) == ("llo", True, TimedWord("Hello", 100, 110))
    assert cutter.cut_loose() == " wor" and cutter.cut_loose() == ""


def test_cutter_takes_what_there_is_for_a_word_that_is_not_in_the_text() -> None:
    cutter = WordCutter()
    (piece,) = cutter.cut_words(" 5", [messages.Word("five", 0, 10)], 0)
    assert piece.fresh == " 5" and cutter.cut_loose() == ""


@pytest.mark.parametrize(
    ("text", "ends"),
    [("It works.", True), ('"Really?"', True), ("Wait...", False), ("Well, ", False), ("", False), ("So …", False)],
)
def test_sentences_end_where_readers_would_say_so(text: str, ends: bool) -> None:
    assert ends_sentence(text) is ends


def test_subtitles_break_at_sentences_and_before_they_grow_too_long() -> None:
    words = [TimedWord("Yes.", 0, RATE)]
    words += [TimedWord("word", RATE * n, RATE * n + RATE // 2) for n in range(2, 40)]
    lines = subtitles(words, RATE)
    assert lines[0].text == "Yes." and all(line.end - line.start <= 6.0 for line in lines)
    assert " ".join(line.text for line in lines) == " ".join(word.text for word in words)
    assert subtitles([], RATE) == [] and to_srt([]) == "" and to_vtt([]) == "WEBVTT\n\n"
    late = subtitles([TimedWord("late", 3_661 * RATE, 3_662 * RATE)], RATE)
    assert to_srt(late) == "1\n01:01:01,000 --> 01:01:02,000\nlate\n"


# Turns.


def frames(watch: TurnWatch, probability: float, count: int, text: str = "") -> list[object]:
    return [sign for _ in range(count) for sign in watch.watch(probability, 512, text)]


def test_plain_detection_ends_after_its_silence() -> None:
    watch = TurnWatch(TurnDetection(silence_duration_ms=320), RATE, 0, first_frame=0)
    assert frames(watch, 0.9, 10) == [Started(0)]
    assert frames(watch, 0.0, 12) == [Stopped(5120 + 5120)]


def test_semantic_detection_asks_for_text_once_per_pause_and_judges_it() -> None:
    watch = TurnWatch(TurnDetection(semantic=True, eagerness="low"), RATE, 0, first_frame=0)
    frames(watch, 0.9, 10)
    assert frames(watch, 0.0, 20, "and then") == [Paused()]
    frames(watch, 0.9, 3)
    assert frames(watch, 0.0, 20, "It works.") == [Paused()]
    assert len(frames(watch, 0.0, 15, "It works.")) == 1


@pytest.mark.parametrize(("eagerness", "seconds"), [("high", 2), ("auto", 4), ("medium", 4), ("low", 8)])
def test_semantic_detection_waits_no_longer_than_its_cap(eagerness: str, seconds: int) -> None:
    watch = TurnWatch(TurnDetection(semantic=True, eagerness=eagerness), RATE, 0, first_frame=0)
    frames(watch, 0.9, 10)
    signs = frames(watch, 0.0, 300, "unfinished")
    assert signs == [Paused(), Stopped(5120 + seconds * RATE)]


def test_turns_begin_no_earlier_than_told() -> None:
    watch = TurnWatch(TurnDetection(), RATE, 5000, first_frame=1024)
    assert frames(watch, 0.9, 20) == [Started(5000)]
    watch.restart(30_000)
    assert frames(watch, 0.9, 100)[0] == Started(30_000)


# Stalls.


def test_kept_audio_is_forgotten_to_the_sample() -> None:
    guard = StallGuard(RATE, 1.0, 10.0)
    guard.keep(0, np.arange(1000, dtype=np.float32))
    guard.keep(1000, 500)
    guard.keep(1500, np.arange(1500, 2000, dtype=np.float32))
    guard.forget_before(300)
    anchor = guard.reanchor(2000, 0.0)
    assert anchor.base == 300 and anchor.replay[1] == 500
    first = anchor.replay[0]
    assert not isinstance(first, int) and first[0] == 300 and len(first) == 700
    guard.forget_before(1200)
    assert guard.reanchor(2000, 0.0).replay[0] == 300
    guard.forget_before(9999)
    assert guard.reanchor(2000, 0.0).base == 2000


def test_stall_needs_speech_and_time_and_can_be_switched_off() -> None:
    guard, off = StallGuard(RATE, 1.0, 10.0), StallGuard(RATE, 0.0, 10.0)
    for watched in (guard, off):
        watched.heard_speech(0.9, 2 * RATE, 0.0)
    assert not guard.stalled(0.5) and guard.stalled(1.0) and not off.stalled(100.0)
    guard.heard_text(messages.Text("s", "x", [], []), 0, 1.0)
    assert not guard.stalled(100.0)
    guard.heard_speech(0.3, 100 * RATE, 101.0)
    assert not guard.stalled(200.0)


# Live sessions.


async def test_closed_session_starts_nothing_again() -> None:
    """A tick that was on its way when the session ended must not open a new engine stream."""
    engine = FakeEngine()
    session = Session(Settings(turn_detection=None), RATE, lambda: "item")
    dialect = OpenAIDialect(SessionFacts("sess", 0, RATE, "m", frozenset(), lambda: "event"))
    live = LiveSession("sess", session, dialect, engine, LiveLimits(), Metrics(), lambda: 0.0)
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    await asyncio.sleep(0.01)
    await live.close()
    await live.close()
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    live.tick()
    await asyncio.sleep(0.01)
    assert not engine.active and engine.streams[0].samples == RATE and not live.full
