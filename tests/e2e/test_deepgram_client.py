"""The flow of Deepgram's live clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import RawClient, raw_client
from tests.e2e.test_extensions import opus
from tests.realtime.gateway_doubles import FakeEngine, silence, tone

QUERY = (
    "model=nova-3&encoding=linear16&sample_rate=16000&channels=1&interim_results=true&endpointing=25&smart_format=true"
)


def listen(running: Any, query: str = QUERY) -> str:
    return f"ws://127.0.0.1:{running.port}/v1/listen?{query}"


async def rest(client: RawClient) -> tuple[list[dict[str, Any]], int]:
    """Everything up to the close, and its code."""
    events = []
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            events.append(await client.receive())
    assert closed.value.rcvd is not None
    return events, closed.value.rcvd.code


def text_of(result: dict[str, Any]) -> str:
    return str(result["channel"]["alternatives"][0]["transcript"])


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("encoding=linear16&sample_rate=1000", "sample_rate"),
        ("encoding=linear16&sample_rate=x", "sample_rate"),
        ("encoding=amr-nb&sample_rate=8000", "encoding"),
        ("encoding=linear16&channels=2", "channels"),
        ("encoding=linear16&channels=9&multichannel=true", "channels"),
        ("channels=2&multichannel=true", "multichannel"),
        ("encoding=linear16&utterance_end_ms=soon&interim_results=true", "utterance_end_ms"),
        ("encoding=linear16&redact=pii", "redact"),
        ("encoding=linear16&redact=pii&redact=false", "redact"),
        ("encoding=linear16&callback=https://a.example", "callback"),
        ("encoding=linear16&language=en&language=de", "language"),
        ("encoding=linear16&encoding=mulaw", "encoding"),
        (f"encoding=linear16&model={'m' * 300}", "model"),
    ],
)
async def test_audio_we_cannot_read_is_refused_at_the_handshake(serve: Serve, query: str, param: str) -> None:
    async with serve() as running:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(listen(running, query)):
                pass
        assert refused.value.response.status_code == 400
        body = json.loads(refused.value.response.body)
        assert set(body) == {"err_code", "err_msg", "request_id"} and body["err_code"] == "Bad Request"
        assert f"'{param}" in body["err_msg"]
        assert refused.value.response.headers["dg-error"] == body["err_msg"]


async def test_unknown_message_is_an_error_and_the_socket_stays(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running)) as client:
        for frame in ("{nonsense", '{"type": "Dance"}', "[]"):
            await client.socket.send(frame)
            assert (await client.receive())["type"] == "Error"
        await client.socket.send(tone(1.0, 16_000) + silence(0.6, 16_000))
        assert (await client.receive())["type"] == "Results"


async def test_turns_give_interims_and_finals_that_do_not_overlap(serve: Serve) -> None:
    query = QUERY + "&vad_events=true"
    async with serve() as running, raw_client(listen(running, query)) as client:
        # LiveKit says this before any audio.
        await client.send("KeepAlive")
        for seconds in (1.3, 2.0):
            audio = tone(seconds, 16_000) + silence(0.8, 16_000)
            for start in range(0, len(audio), 1600):
                await client.socket.send(audio[start : start + 1600])
        await client.send("CloseStream")
        events, code = await rest(client)
    assert code == 1000 and events[-1]["type"] == "Metadata"
    assert events[-1]["duration"] == pytest.approx(4.9, abs=0.01)
    assert [event["type"] for event in events].count("SpeechStarted") == 2
    results = [event for event in events if event["type"] == "Results"]
    finals = [result for result in results if result["is_final"]]
    assert " ".join(text_of(final) for final in finals) == "w1 w2 w3 w4 w5 w6 w7 w8"
    assert all(final["speech_final"] for final in finals)
    assert finals[1]["start"] >= finals[0]["start"] + finals[0]["duration"]
    for interim in (result for result in results if not result["is_final"]):
        final = next(final for final in finals if final["start"] >= interim["start"])
        assert text_of(final).startswith(text_of(interim)) and not interim["speech_final"]
    word = finals[0]["channel"]["alternatives"][0]["words"][0]
    assert set(word) == {"word", "start", "end", "confidence", "punctuated_word"}
    assert {result["metadata"]["request_id"] for result in results} == {events[-1]["request_id"]}


async def test_finalize_answers_at_once_also_with_nothing(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running)) as client:
        await client.send("Finalize")
        empty = await client.receive()
        assert empty["is_final"] and empty["from_finalize"] and text_of(empty) == ""
        await client.socket.send(tone(1.0, 16_000))
        await client.send("Finalize", channel=0)
        while not (result := await client.receive())["is_final"]:
            pass
        assert result["from_finalize"] and text_of(result) == "w1 w2"


async def test_what_is_not_in_force_is_not_repeated_as_if_it_were(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running)) as client:
        await client.send("Configure", keyterms=["Tickertape"])
        answer = await client.receive()
        assert answer["type"] == "ConfigureFailure" and answer["code"] == "CONFIGURE_KEYTERMS_NOT_SUPPORTED"
        await client.send("Configure", features={"numerals": True})
        assert (await client.receive())["type"] == "ConfigureFailure"
        await client.send("Configure", keyterms=None)
        assert set(await client.receive()) == {"type", "request_id"}


@pytest.mark.parametrize("option", ["punctuate", "smart_format"])
async def test_marks_and_capitals_come_to_those_who_ask(serve: Serve, option: str) -> None:
    heard = {}
    for value in ("true", "false"):
        engine = FakeEngine(words=["Hello,", "World—it's", "3.5!"])
        query = f"encoding=linear16&sample_rate=16000&{option}={value}&numerals=true&diarize=false"
        async with serve(engine) as running, raw_client(listen(running, query)) as client:
            await client.socket.send(tone(1.3, 16_000))
            await client.send("CloseStream")
            heard[value] = (await rest(client))[0][0]
    assert text_of(heard["true"]) == "Hello, World—it's 3.5!"
    assert text_of(heard["false"]) == "hello world—it's 3.5"
    words = {value: result["channel"]["alternatives"][0]["words"] for value, result in heard.items()}
    assert [word["word"] for word in words["true"]] == [word["word"] for word in words["false"]]
    assert [word["punctuated_word"] for word in words["true"]] == ["Hello,", "World—it's", "3.5!"]
    assert set(words["false"][0]) == {"word", "start", "end", "confidence"}


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def listen_in_real_order(running: Any, query: str, audio: bytes) -> list[dict[str, Any]]:
    """Small pieces, each processed before the next comes, as in live speech."""
    async with raw_client(listen(running, query)) as client:
        for start in range(0, len(audio), 3200):
            await client.socket.send(audio[start : start + 3200])
            heard = min(start + 3200, len(audio)) // 2
            await until(lambda heard=heard: any(stream.samples >= heard for stream in running.engine.streams))
        await client.send("CloseStream")
        return (await rest(client))[0]


async def test_long_speech_is_final_every_few_seconds_and_its_end_is_told_once(serve: Serve) -> None:
    async with serve() as running:
        events = await listen_in_real_order(running, QUERY, tone(16.0, 16_000) + silence(0.6, 16_000))
    finals = [event for event in events if event["type"] == "Results" and event["is_final"]]
    assert [final["speech_final"] for final in finals] == [False] * (len(finals) - 1) + [True]
    assert len(finals) >= 3 and all(final["duration"] < 6 for final in finals)
    assert " ".join(filter(None, map(text_of, finals))) == " ".join(f"w{number}" for number in range(1, 41))


@pytest.mark.parametrize("endpointing", ["300", "false"])
async def test_the_end_of_an_utterance_comes_after_its_time(serve: Serve, endpointing: str) -> None:
    query = f"encoding=linear16&interim_results=true&utterance_end_ms=1000&endpointing={endpointing}"
    pauses = tone(1.0, 16_000) + silence(0.7, 16_000) + tone(1.0, 16_000) + silence(1.6, 16_000)
    async with serve() as running:
        events = await listen_in_real_order(running, query, pauses)
    kinds = [event["type"] for event in events]
    assert kinds.count("UtteranceEnd") == 1, "a pause of 0.7 s is no end"
    ended = next(event for event in events if event["type"] == "UtteranceEnd")
    before = [event for event in events[: kinds.index("UtteranceEnd")] if event["is_final"]]
    # What was said before it is final by then, and named by its last word.
    assert " ".join(filter(None, map(text_of, before))) == "w1 w2 w3 w4 w5"
    last = [word for event in before for word in event["channel"]["alternatives"][0]["words"]][-1]
    assert ended["last_word_end"] == last["end"] and ended["channel"] == [0, 1]
    assert any(event["speech_final"] for event in before) == (endpointing == "300")


async def test_no_end_of_utterances_without_interim_results(serve: Serve) -> None:
    async with serve() as running:
        audio = tone(1.0, 16_000) + silence(1.6, 16_000)
        events = await listen_in_real_order(running, "encoding=linear16&utterance_end_ms=1000", audio)
    assert "UtteranceEnd" not in [event["type"] for event in events]


@pytest.mark.parametrize(("encoding", "rate"), [("mulaw", 16_000), ("alaw", 24_000), ("linear16", 24_000)])
async def test_audio_is_read_at_the_rate_of_the_query(serve: Serve, encoding: str, rate: int) -> None:
    query = f"encoding={encoding}&sample_rate={rate}"
    async with serve() as running, raw_client(listen(running, query)) as client:
        await client.socket.send(bytes(rate * (2 if encoding == "linear16" else 1)))
        await client.socket.send(b"")
        events, _ = await rest(client)
    assert events[-1]["duration"] == pytest.approx(1.0, abs=0.01)


async def test_no_interims_unless_asked_for_and_an_empty_frame_closes(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running, "encoding=mulaw&sample_rate=8000")) as client:
        assert client.socket.response is not None and "dg-request-id" in client.socket.response.headers
        await client.socket.send((b"\x90" * 8 + b"\x10" * 8) * 500)
        await client.socket.send(b"")
        events, code = await rest(client)
    assert code == 1000 and [event["type"] for event in events] == ["Results", "Metadata"]
    assert text_of(events[0]) == "w1 w2"


async def test_container_without_encoding(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running, "model=x")) as client:
        data = opus("webm", 2.0)
        for start in range(0, len(data), 500):
            await client.socket.send(data[start : start + 500])
        await client.send("CloseStream")
        events, _ = await rest(client)
    finals = [event for event in events if event["type"] == "Results" and event["is_final"]]
    assert " ".join(text_of(final) for final in finals).startswith("w1 w2 w3 w4")
    assert events[-1]["duration"] == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("offer", [["token", "the-real-key"], ["bearer", "the-real-key"]])
async def test_browsers_send_their_key_as_a_subprotocol(serve: Serve, offer: list[str]) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        async with raw_client(listen(running), subprotocols=offer) as client:
            assert client.socket.subprotocol == offer[0]
            await client.send("CloseStream")
            events, code = await rest(client)
            assert code == 1000 and [event["type"] for event in events] == ["Metadata"]


async def test_client_that_waits_long_with_keepalives_is_kept(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine, limits={"idle_s": 1.0}) as running, raw_client(listen(running)) as client:
        for _ in range(20):
            await asyncio.sleep(0.1)
            await client.send("KeepAlive")
        await client.socket.send(tone(1.0, 16_000) + silence(0.6, 16_000))
        assert (await client.receive())["type"] == "Results"


async def test_container_audio_after_the_end_is_not_heard(serve: Serve) -> None:
    engine = FakeEngine()
    # The answer waits long enough for the late audio to come first.
    engine.output_delay_s = 0.2
    async with serve(engine) as running, raw_client(listen(running, "model=x")) as client:
        data = opus("webm", 2.0)
        await client.socket.send(data)
        await client.send("CloseStream")
        await client.socket.send(data[:5000])
        await client.send("CloseStream")
        await client.socket.send(b"")
        events, code = await rest(client)
    assert code == 1000 and events[-1]["type"] == "Metadata"
    assert events[-1]["duration"] == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("data", [b"", b"OggS not audio"])
async def test_a_stream_ends_also_without_audio_that_can_be_read(serve: Serve, data: bytes) -> None:
    async with serve() as running, raw_client(listen(running, "model=x")) as client:
        if data:
            await client.socket.send(data)
        await client.send("CloseStream")
        events, code = await rest(client)
        assert code == 1000 and events[-1]["type"] == "Metadata"
        assert [event["type"] for event in events[:-1]] == (["Error"] if data else [])
