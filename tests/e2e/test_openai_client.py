"""The official openai package, unmodified, against a real server on a real socket."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, NotFoundError
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import raw_client
from tests.realtime.gateway_doubles import CHANCE, FakeEngine, silence, tone


def client_for(base_url: str, key: str = "unused") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)


async def send_audio(connection: Any, audio: bytes, chunk: int = 4800) -> None:
    for start in range(0, len(audio), chunk):
        await connection.input_audio_buffer.append(audio=base64.b64encode(audio[start : start + chunk]).decode())


async def events_until(connection: Any, last: str, count: int = 1) -> list[Any]:
    """Events up to and including the `count`-th of type `last`."""
    seen = []
    async with asyncio.timeout(10):
        while count:
            event = await connection.recv()
            seen.append(event)
            count -= event.type == last
    return seen


COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


async def test_vad_turn_has_every_event_in_order_under_one_item(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session={"type": "transcription"})
            await send_audio(connection, silence(0.5) + tone(2.0) + silence(1.0))
            events = await events_until(connection, COMPLETED)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["session.created", "session.updated"]
    order = [kind for kind in kinds[2:] if kind != DELTA]
    assert order == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        COMPLETED,
    ]
    started, stopped = (next(e for e in events if e.type.endswith(end)) for end in ("speech_started", "speech_stopped"))
    assert 150 <= started.audio_start_ms <= 260 and 2900 <= stopped.audio_end_ms <= 3100
    deltas = "".join(event.delta for event in events if event.type == DELTA)
    assert deltas == events[-1].transcript == "w1 w2 w3 w4 w5"
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert len({event.event_id for event in events}) == len(events)


async def test_semantic_turn_ends_soon_after_a_finished_sentence(serve: Serve) -> None:
    engine = FakeEngine(words=["It", "works", "now."])
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            turns = {"type": "semantic_vad", "eagerness": "high"}
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"turn_detection": turns}}}
            )
            updated = (await events_until(connection, "session.updated"))[-1]
            assert updated.session.audio.input.turn_detection.type == "semantic_vad"
            await send_audio(connection, tone(1.3))
            for _ in range(8):
                await send_audio(connection, silence(0.1))
                await asyncio.sleep(0.03)
            finished = await events_until(connection, COMPLETED)
            stopped = next(event for event in finished if event.type.endswith("speech_stopped"))
            assert finished[-1].transcript == "It works now." and stopped.audio_end_ms < 2100
            # An unfinished sentence gets its two seconds.
            await send_audio(connection, tone(0.85))
            for _ in range(25):
                await send_audio(connection, silence(0.1))
                await asyncio.sleep(0.01)
            unfinished = await events_until(connection, COMPLETED)
            started = next(event for event in unfinished if event.type.endswith("speech_started"))
            stopped = next(event for event in unfinished if event.type.endswith("speech_stopped"))
            assert stopped.audio_end_ms - started.audio_start_ms > 2700
            assert unfinished[-1].transcript == "It works"


async def test_idle_timeout_commits_the_silence_and_says_so(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            turns = {"type": "server_vad", "idle_timeout_ms": 5000}
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"turn_detection": turns}}}
            )
            updated = (await events_until(connection, "session.updated"))[-1]
            assert updated.session.audio.input.turn_detection.idle_timeout_ms == 5000
            await send_audio(connection, silence(5.5))
            events = await events_until(connection, COMPLETED)
    assert [event.type for event in events] == [
        "input_audio_buffer.timeout_triggered",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        COMPLETED,
    ]
    triggered = events[0]
    assert triggered.audio_start_ms == 0 and 5000 <= triggered.audio_end_ms < 5100
    assert triggered.item_id == events[-1].item_id and events[-1].transcript == ""


async def test_manual_turns_with_several_commits_chain_and_complete_once_each(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"turn_detection": None}}}
            )
            await send_audio(connection, tone(2.0))
            before = await events_until(connection, DELTA)
            await connection.input_audio_buffer.commit()
            await send_audio(connection, tone(1.0))
            await connection.input_audio_buffer.commit()
            await connection.input_audio_buffer.commit(event_id="the-empty-one")
            await connection.input_audio_buffer.clear()
            events = before + await events_until(connection, "input_audio_buffer.cleared")
            events += await events_until(connection, COMPLETED, 2 - sum(e.type == COMPLETED for e in events))
    committed = [event for event in events if event.type == "input_audio_buffer.committed"]
    completed = [event for event in events if event.type == COMPLETED]
    assert [event.previous_item_id for event in committed] == [None, committed[0].item_id]
    assert [event.item_id for event in completed] == [event.item_id for event in committed]
    # The delta before the commit was bound to the item that the commit then named.
    assert before[-1].item_id == committed[0].item_id
    assert " ".join(event.transcript for event in completed) == "w1 w2 w3 w4 w5 w6 w7"
    error = next(event for event in events if event.type == "error").error
    assert error.code == "input_audio_buffer_commit_empty" and error.event_id == "the-empty-one"
    kinds = [event.type for event in events]
    assert kinds.index("error") < kinds.index("input_audio_buffer.cleared")


async def test_manual_commit_inside_an_open_vad_turn_keeps_its_item(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await send_audio(connection, tone(1.0))
            started = (await events_until(connection, "input_audio_buffer.speech_started"))[-1]
            await connection.input_audio_buffer.commit()
            events = await events_until(connection, COMPLETED)
    kinds = [event.type for event in events if event.type != DELTA]
    assert kinds[:2] == ["input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {started.item_id}


async def test_closing_commit_right_behind_the_audio_waits_for_speech_detection(serve: Serve) -> None:
    """openai-agents sends all audio, then commit and clear at once; the last turn must not be lost."""
    engine = FakeEngine()
    engine.output_delay_s = 0.01
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await send_audio(connection, silence(0.3) + tone(1.3), chunk=100_000)
            await connection.input_audio_buffer.commit(event_id="closing")
            await connection.input_audio_buffer.clear()
            events = await events_until(connection, "input_audio_buffer.cleared")
            if COMPLETED not in [event.type for event in events]:
                events += await events_until(connection, COMPLETED)
    kinds = [event.type for event in events]
    assert kinds.index("input_audio_buffer.committed") < kinds.index("input_audio_buffer.cleared")
    assert [event.transcript for event in events if event.type == COMPLETED] == ["w1 w2 w3"]
    assert "error" not in kinds


async def test_closing_commit_over_silence_is_an_empty_commit_with_its_event_id(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await send_audio(connection, silence(2.0))
            await connection.input_audio_buffer.commit(event_id="closing")
            await connection.input_audio_buffer.clear()
            events = await events_until(connection, "input_audio_buffer.cleared")
            error = next(event for event in events if event.type == "error").error
            assert (error.code, error.event_id) == ("input_audio_buffer_commit_empty", "closing")
            assert error.message == (
                "Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, "
                "but buffer only has 0.00ms of audio."
            )
            # The session lives on.
            await send_audio(connection, tone(1.0) + silence(0.8))
            assert (await events_until(connection, COMPLETED))[-1].transcript == "w1 w2"


async def test_beta_client_gets_the_beta_shapes(serve: Serve) -> None:
    async with serve() as running:
        client = AsyncOpenAI(
            base_url=running.base_url, api_key="unused", websocket_base_url=f"ws://127.0.0.1:{running.port}/v1"
        )
        async with client.beta.realtime.connect(
            model="whisper-1", extra_query={"intent": "transcription"}
        ) as connection:
            await connection.transcription_session.update(
                session={
                    "input_audio_format": "pcm16",
                    "input_audio_transcription": {"model": "whisper-1", "language": "en"},
                    "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
                }
            )
            await send_audio(connection, tone(1.0) + silence(0.6))
            events = await events_until(connection, COMPLETED)
        await client.close()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["transcription_session.created", "transcription_session.updated"]
    assert events[1].session.turn_detection.silence_duration_ms == 300
    assert kinds.count("conversation.item.created") == 1 and "conversation.item.added" not in kinds
    assert events[-1].transcript == "w1 w2"


async def test_beta_in_a_browser_is_told_by_the_subprotocol(serve: Serve) -> None:
    offered = ["realtime", "openai-insecure-api-key.the-real-key", "openai-beta.realtime-v1"]
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        async with raw_client(f"{running.ws}?intent=transcription", subprotocols=offered) as client:
            assert client.socket.subprotocol == "realtime"
            created = await client.receive()
            assert created["type"] == "transcription_session.created" and "input_audio_format" in created["session"]
            await client.append(tone(1.0) + silence(0.8))
            kinds = [event["type"] for event in await client.until(COMPLETED)]
    assert "conversation.item.created" in kinds and "conversation.item.added" not in kinds


@pytest.mark.parametrize(
    ("offered", "headers", "selected"),
    [
        (["openai-beta.realtime-v1", "realtime", "openai-insecure-api-key.the-real-key"], {}, "realtime"),
        (["openai-insecure-api-key.the-real-key", "openai-beta.realtime-v1"], {}, "openai-beta.realtime-v1"),
        (None, {"Authorization": "Bearer the-real-key", "OpenAI-Beta": "assistants=v2, realtime=v1"}, None),
    ],
)
async def test_beta_greets_as_such_however_it_is_asked_for(
    serve: Serve, offered: list[Any] | None, headers: dict[str, str], selected: str | None
) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        url = f"{running.ws}?intent=transcription"
        async with raw_client(url, subprotocols=offered, additional_headers=headers) as client:
            assert client.socket.subprotocol == selected
            assert (await client.receive())["type"] == "transcription_session.created"


async def test_ga_greets_as_such_with_the_intent_of_the_beta(serve: Serve) -> None:
    """`intent=transcription` does not tell the two apart: clients of GA send it as well."""
    async with serve() as running, raw_client(f"{running.ws}?intent=transcription") as client:
        assert (await client.receive())["type"] == "session.created"


@pytest.mark.parametrize("query", [{"model": "gpt-4o-transcribe"}, {"model": "m", "intent": "transcription"}])
async def test_model_in_the_query_is_shown_and_served(serve: Serve, query: dict[str, str]) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        model, extra = query["model"], {k: v for k, v in query.items() if k != "model"}
        async with client.realtime.connect(model=model, extra_query=extra) as connection:
            created = await connection.recv()
            assert created.session.audio.input.transcription.model == query["model"]
            await send_audio(connection, tone(1.0) + silence(0.8))
            assert (await events_until(connection, COMPLETED))[-1].transcript == "w1 w2"


async def test_streaming_model_without_turn_detection_commits_itself(serve: Serve) -> None:
    """LiveKit leaves turn_detection out for these models and commits from its own detector."""
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            transcription = {"model": "gpt-realtime-whisper", "language": "en"}
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"transcription": transcription}}}
            )
            updated = (await events_until(connection, "session.updated"))[-1]
            assert updated.session.audio.input.turn_detection is None
            await send_audio(connection, tone(1.0) + silence(1.0) + tone(1.0))
            await connection.input_audio_buffer.commit()
            events = await events_until(connection, COMPLETED)
    assert [event.type for event in events if "speech" in event.type] == []
    assert events[-1].transcript == "w1 w2 w3 w4 w5"


async def test_second_update_in_the_middle_loses_no_audio(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"turn_detection": None}}}
            )
            await send_audio(connection, tone(1.3))
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"transcription": {"language": "de"}}}}
            )
            await send_audio(connection, tone(1.3))
            await connection.input_audio_buffer.commit()
            events = await events_until(connection, COMPLETED)
    # The second stream counts its words anew; between them all sound was heard.
    assert events[-1].transcript == "w1 w2 w3 w1 w2 w3"
    assert [opened["options"] for opened in engine.opened] == [{}, {"language": "de"}]
    assert sum(stream.samples for stream in engine.streams) == round(2.6 * 16000)


async def test_every_event_validates_against_the_sdk_models(serve: Serve) -> None:
    """The SDK builds its models without checking them; here they are checked."""
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            include = ["item.input_audio_transcription.logprobs"]
            await connection.session.update(session={"type": "transcription", "include": include})
            await send_audio(connection, tone(1.0) + silence(0.8))
            await connection.input_audio_buffer.commit()
            await connection.input_audio_buffer.clear()
            raw = []
            async with asyncio.timeout(10):
                while not {"input_audio_buffer.cleared", COMPLETED} <= {event["type"] for event in raw}:
                    raw.append(json.loads(await connection.recv_bytes()))
    checker: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
    for event in raw:
        # Extra keys are the SDK's to ignore; required ones must be there and of the right type.
        checked = checker.validate_python(event)
        assert checked.type == event["type"]
    completed = next(event for event in raw if event["type"] == COMPLETED)
    assert "".join(chance["token"] for chance in completed["logprobs"]) == completed["transcript"] == "w1 w2"
    assert all(chance["logprob"] == CHANCE and bytes(chance["bytes"]).decode() for chance in completed["logprobs"])
    assert {event["type"] for event in raw} >= {
        "error",
        "conversation.item.added",
        "input_audio_buffer.committed",
        DELTA,
    }


async def test_client_secret_opens_a_session_with_its_settings(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        async with client_for(running.base_url, "the-real-key") as client:
            session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
            secret = await client.realtime.client_secrets.create(
                session=session, expires_after={"anchor": "created_at", "seconds": 60}
            )
            assert secret.value.startswith("ek_") and secret.session.audio.input.turn_detection is None
        async with client_for(running.base_url, secret.value) as browser:
            async with browser.realtime.connect(extra_query={"intent": "transcription"}) as connection:
                created = await connection.recv()
                assert created.session.audio.input.turn_detection is None


async def test_models_are_listed_and_found(serve: Serve) -> None:
    async with serve(model={"aliases": ("another-name",)}) as running, client_for(running.base_url) as client:
        names = [model.id async for model in client.models.list()]
        assert names == ["fake-model", "another-name"]
        assert (await client.models.retrieve(names[1])).id == names[1]
        with pytest.raises(NotFoundError):
            await client.models.retrieve("no-such-model")


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(tone(seconds, 16_000))
    return file.getvalue()


async def test_file_in_every_response_format(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, client_for(running.base_url) as client:
        create = client.audio.transcriptions.create
        file = ("speech.wav", wav(2.1), "audio/x-wav")
        plain = await create(file=file, model="whatever")
        verbose = await create(
            file=file, model="m", response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
        text = await create(file=file, model="m", response_format="text")
        srt = await create(file=file, model="m", response_format="srt")
        vtt = await create(file=file, model="m", response_format="vtt")
    words = "w1 w2 w3 w4 w5"
    assert plain.text == verbose.text == text.strip() == words
    assert plain.usage.type == "duration" and verbose.duration == pytest.approx(2.1)
    assert [word.word for word in verbose.words] == words.split()
    assert verbose.segments[0].text == words and verbose.segments[0].start < 0.1
    assert srt == "1\n00:00:00,016 --> 00:00:02,016\nw1 w2 w3 w4 w5\n"
    assert vtt == "WEBVTT\n\n00:00:00.016 --> 00:00:02.016\nw1 w2 w3 w4 w5\n"
    # Files are backlog work: live sessions go first.
    assert [opened["live"] for opened in engine.opened] == [False] * 5


async def test_file_as_server_sent_events(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        file = ("speech.wav", wav(2.1), "audio/x-wav")
        stream = await client.audio.transcriptions.create(file=file, model="m", stream=True)
        events = [event async for event in stream]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == "w1 w2 w3 w4 w5"
    assert events[-1].type == "transcript.text.done" and events[-1].usage.type == "tokens"


async def test_streamed_file_has_times_of_words_when_asked(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient(base_url=running.base_url, trust_env=False) as client:
        data = {"model": "m", "stream": "true", "timestamp_granularities[]": "word"}
        answer = await client.post("audio/transcriptions", data=data, files={"file": ("speech.wav", wav(2.1))})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    words = [word for event in events[:-1] for word in event["words"]]
    assert " ".join(word["word"] for word in words) == events[-1]["text"]
    assert words[0].items() >= {"word": "w1", "start": 0.016, "end": 0.416}.items() and events[-1]["duration"] == 2.1


async def test_wrong_key_is_refused_at_the_handshake(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running, client_for(running.base_url, "wrong") as client:
        with pytest.raises(AuthenticationError):
            await client.models.list()
        with pytest.raises(InvalidStatus) as refused:
            async with client.realtime.connect(extra_query={"intent": "transcription"}):
                pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
