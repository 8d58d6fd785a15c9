"""Who speaks, as unmodified clients of both APIs read it. The fake engine gives two words to each speaker."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from openai.types.audio import TranscriptionDiarized
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from realtime.http.upload_forms import MAX_REFERENCE_BYTES
from tests.e2e import ecosystem_clients as clients
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import raw_client
from tests.e2e.test_deepgram_client import QUERY, listen, rest
from tests.e2e.test_deepgram_files import wav
from tests.e2e.test_ecosystem import needs
from tests.e2e.test_openai_client import COMPLETED, client_for, events_until, send_audio
from tests.realtime.gateway_doubles import ENGLISH, FakeEngine, silence, tone

SPEAKERS = "item.input_audio_transcription.speakers"
WITH_SPEAKERS: Any = {"type": "transcription", "include": [SPEAKERS]}
AUDIO = tone(1.6, 16_000) + silence(0.8, 16_000)


def labelling() -> FakeEngine:
    engine = FakeEngine()
    engine.takes(replace(ENGLISH, speakers=True))
    return engine


def speakers(result: Any) -> list[Any]:
    return [word.get("speaker") for word in result["channel"]["alternatives"][0]["words"]]


async def test_a_server_without_the_weights_says_how_to_get_them(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client, httpx.AsyncClient() as http:
        with pytest.raises(BadRequestError, match="tickertape pull speakers"):
            await client.audio.transcriptions.create(
                file=("a.wav", wav(AUDIO)), model="gpt-4o-transcribe-diarize", response_format="diarized_json"
            )
        with pytest.raises(InvalidStatus) as refused:
            async with connect(listen(running, QUERY + "&diarize=true")):
                pass
        assert "tickertape pull speakers" in json.loads(refused.value.response.body)["err_msg"]
        answer = await http.post(f"{running.base_url}/listen?diarize=true", content=wav(AUDIO))
        assert answer.status_code == 400 and "tickertape pull speakers" in answer.json()["err_msg"]
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=WITH_SPEAKERS)
            error = (await events_until(connection, "error"))[-1].error
            assert "tickertape pull speakers" in error.message and error.param.endswith("include")


async def test_deepgrams_live_results_have_a_speaker_on_every_final_word(serve: Serve) -> None:
    async with serve(labelling()) as running, raw_client(listen(running, QUERY + "&diarize=true")) as client:
        for start in range(0, len(AUDIO), 3200):
            await client.socket.send(AUDIO[start : start + 3200])
        await client.send("CloseStream")
        events, _ = await rest(client)
    finals = [event for event in events if event["type"] == "Results" and event["is_final"]]
    assert [one for final in finals for one in speakers(final)] == [0, 0, 1, 1]


async def test_a_long_turn_is_final_only_as_far_as_its_speakers_are_known(serve: Serve) -> None:
    query = QUERY + "&diarize=true"
    async with serve(labelling()) as running, raw_client(listen(running, query)) as client:
        audio = tone(13.0, 16_000)
        for start in range(0, len(audio), 3200):
            await client.socket.send(audio[start : start + 3200])
        await client.send("CloseStream")
        events, _ = await rest(client)
    finals = [event for event in events if event["type"] == "Results" and event["is_final"]]
    assert len(finals) > 2
    said = [word for final in finals for word in final["channel"]["alternatives"][0]["words"]]
    assert [word["word"] for word in said] == [f"w{number + 1}" for number in range(len(said))]
    assert [word["speaker"] for word in said] == [number // 2 % 2 for number in range(len(said))]


async def test_without_diarize_nothing_changes(serve: Serve) -> None:
    engine = labelling()
    async with serve(engine) as running, raw_client(listen(running)) as client:
        await client.socket.send(AUDIO)
        await client.send("CloseStream")
        events, _ = await rest(client)
    assert engine.opened[0]["options"] == {}
    assert not any("speaker" in json.dumps(event) for event in events)


async def test_deepgrams_answer_to_a_file_has_speakers_and_utterances_of_one_speaker(serve: Serve) -> None:
    async with serve(labelling()) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/listen?diarize=true&utterances=true"
        results = (await http.post(url, content=wav(AUDIO))).json()["results"]
    words = results["channels"][0]["alternatives"][0]["words"]
    assert [(word["speaker"], word["speaker_confidence"]) for word in words] == [(0, 0.9)] * 2 + [(1, 0.9)] * 2
    assert [(one["speaker"], one["transcript"]) for one in results["utterances"]] == [(0, "w1 w2"), (1, "w3 w4")]


@needs("deepgram")
async def test_deepgrams_package_reads_speakers(serve: Serve) -> None:
    async with serve(labelling()) as running:
        answer = await clients.deepgram_file(running.base_url, wav(AUDIO), diarize=True)
    words = answer.results.channels[0].alternatives[0].words
    assert [(word.speaker, word.speaker_confidence) for word in words] == [(0, 0.9)] * 2 + [(1, 0.9)] * 2


async def test_openais_package_reads_a_diarized_file(serve: Serve) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        answer = await client.audio.transcriptions.create(
            file=("a.wav", wav(AUDIO)), model="gpt-4o-transcribe-diarize", response_format="diarized_json"
        )
    assert isinstance(answer, TranscriptionDiarized)
    assert answer.text == "w1 w2 w3 w4"
    assert [(one.id, one.speaker, one.text, one.type) for one in answer.segments] == [
        ("seg_000", "A", "w1 w2", "transcript.text.segment"),
        ("seg_001", "B", "w3 w4", "transcript.text.segment"),
    ]
    assert answer.segments[0].start < answer.segments[0].end <= answer.segments[1].start


async def test_openais_package_reads_segments_as_they_become_known(serve: Serve) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        events = await client.audio.transcriptions.create(
            file=("a.wav", wav(tone(60, 16_000))), model="gpt-4o-transcribe-diarize", stream=True
        )
        told = [event async for event in events]
    segments = [event for event in told if event.type == "transcript.text.segment"]
    assert [(one.speaker, one.text) for one in segments] == [
        ("AB"[number % 2], f"w{2 * number + 1} w{2 * number + 2}") for number in range(len(segments))
    ]
    assert len(segments) >= 5
    assert told[-1].type == "transcript.text.done"
    # Not all at the end.
    assert told.index(segments[0]) < max(told.index(event) for event in told if event.type == "transcript.text.delta")


@pytest.mark.parametrize(
    ("response_format", "found"),
    [
        ("srt", "Speaker 2: w3 w4\n"),
        ("vtt", "<v Speaker 2>w3 w4\n"),
        ("text", "Speaker 1: w1 w2\nSpeaker 2: w3 w4\n"),
        ("verbose_json", '"speaker":"B"'),
    ],
)
async def test_every_format_can_say_who_speaks(serve: Serve, response_format: str, found: str) -> None:
    async with serve(labelling()) as running, httpx.AsyncClient() as http:
        url, form = f"{running.base_url}/audio/transcriptions", {"response_format": response_format}
        files = {"file": ("a.wav", wav(AUDIO), "audio/wav")}
        assert "peaker" not in (await http.post(url, data=form, files=files)).text
        assert found in (await http.post(url, data={**form, "speakers": "true"}, files=files)).text


async def test_openais_sockets_have_speakers_on_words_and_on_completed(serve: Serve) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=WITH_SPEAKERS)
            assert (await events_until(connection, "session.updated"))[-1].session.include == [SPEAKERS]
            await send_audio(connection, tone(1.2) + silence(1.6))
            done = (await events_until(connection, COMPLETED))[-1]
    assert [word["speaker"] for word in done.words] == ["A", "A", "B"]
    assert done.speaker == "A"


async def test_a_new_stream_of_a_session_goes_on_with_the_voices_of_the_one_before(serve: Serve) -> None:
    engine = labelling()
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=WITH_SPEAKERS)
            await send_audio(connection, tone(1.2) + silence(1.6))
            await events_until(connection, COMPLETED)
            engine.streams[0].fail()
            await send_audio(connection, tone(1.2) + silence(1.6))
            await events_until(connection, COMPLETED)
    first, second = engine.labels_resumed
    assert first is None
    assert second is not None and second[0]["labels"]["voices"]


# Enrolled speakers.


def data_url(audio: bytes) -> str:
    return f"data:audio/wav;base64,{b64encode(audio).decode()}"


VOICE = data_url(wav(tone(3.0, 16_000)))


async def test_openais_package_enrols_speakers_by_name(serve: Serve) -> None:
    engine = labelling()
    engine.one_voice = True
    async with serve(engine) as running, client_for(running.base_url) as client:
        answer = await client.audio.transcriptions.create(
            file=("a.wav", wav(AUDIO)),
            model="gpt-4o-transcribe-diarize",
            response_format="diarized_json",
            known_speaker_names=["Ann", "Bob"],
            known_speaker_references=[VOICE, VOICE],
        )
    assert [segment.speaker for segment in answer.segments] == ["Ann"]
    options = [str(opened["options"]["speakers"]).split("\n") for opened in engine.opened]  # type: ignore[index]
    assert options[:2] == [["labels"], ["labels"]]
    assert [line.partition("\t")[0] for line in options[2]] == ["labels", "Ann", "Bob"]
    assert not engine.active


HOSTILE = "<script>alert(1)</script> --> &"


async def test_a_name_is_a_text_in_subtitles(serve: Serve) -> None:
    engine = labelling()
    engine.one_voice = True
    async with serve(engine) as running, httpx.AsyncClient() as http:
        answer = await http.post(
            f"{running.base_url}/audio/transcriptions",
            data={"response_format": "vtt", "known_speaker_names[]": HOSTILE, "known_speaker_references[]": VOICE},
            files={"file": ("a.wav", wav(AUDIO), "audio/wav")},
        )
    assert "<script" not in answer.text
    assert answer.text.count("-->") == 1
    assert "<v &lt;script&gt;alert(1)&lt;/script&gt; --&gt; &amp;>w1" in answer.text


@pytest.mark.parametrize(
    ("names", "references", "complaint"),
    [
        (["Ann"], [], "'known_speaker_names' has 1 entries and 'known_speaker_references' 0"),
        (["Ann"], ["https://a.example/voice.wav"], "'Ann' must be a data URL"),
        (["Ann"], ["data:audio/wav;base64,???"], "'Ann' is not valid base64"),
        (["Ann"], ["data:audio/wav;base64,AAAA"], "The recording of 'Ann' cannot be read"),
        (["Ann"], [data_url(wav(tone(1.0, 16_000)))], "'Ann' lasts 1.0 s; send 2 to 10 seconds"),
        (["Ann"], [data_url(wav(tone(11.0, 16_000)))], "'Ann' is longer; send 2 to 10 seconds"),
        (["Ann"], [data_url(wav(silence(3.0, 16_000)))], "'Ann' has 0.0 s of speech"),
        (["Ann"], [VOICE], "'Ann' has more than one voice"),
        (["A" * 65], [VOICE], "1 to 64 characters"),
        (["Ann\n"], [VOICE], "control characters"),
        (["Ann", "Ann"], [VOICE, VOICE], "two speakers are named 'Ann'"),
        ([f"{number}" for number in range(17)], ["data:,"] * 17, "at most 16 speakers"),
    ],
)
async def test_a_reference_that_cannot_be_used_is_refused_in_a_sentence(
    serve: Serve, names: list[str], references: list[str], complaint: str
) -> None:
    engine = labelling()
    async with serve(engine) as running, httpx.AsyncClient() as http:
        answer = await http.post(
            f"{running.base_url}/audio/transcriptions",
            data={"speakers": "true", "known_speaker_names[]": names, "known_speaker_references[]": references},
            files={"file": ("a.wav", wav(AUDIO), "audio/wav")},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert complaint in answer.json()["error"]["message"]
    assert not engine.active


async def test_recordings_of_speakers_are_bounded(serve: Serve) -> None:
    async with serve(labelling()) as running, httpx.AsyncClient() as http:
        url, files = f"{running.base_url}/audio/transcriptions", {"file": ("a.wav", wav(AUDIO), "audio/wav")}
        form = {"known_speaker_names[]": ["Ann"], "known_speaker_references[]": ["x" * (MAX_REFERENCE_BYTES + 1)]}
        assert (await http.post(url, data=form, files=files)).status_code == 400
        form["known_speaker_references[]"] = ["x" * MAX_REFERENCE_BYTES] * 6
        answer = await http.post(url, data=form, files=files)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "form_too_large")


# Turns that end where the speaker changes.


def cutting(kind: str = "server_vad", **fields: Any) -> Any:
    detection = {"type": kind, "speaker_change": True, **fields}
    return {"type": "transcription", "include": [SPEAKERS], "audio": {"input": {"turn_detection": detection}}}


@pytest.mark.parametrize("kind", ["server_vad", "semantic_vad"])
async def test_a_turn_ends_where_the_speaker_changes(serve: Serve, kind: str) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=cutting(kind))
            updated = (await events_until(connection, "session.updated"))[-1].session
            assert updated.audio.input.turn_detection.speaker_change is True
            await send_audio(connection, tone(2.0) + silence(8.0))
            events = []
            for _ in range(3):
                events += await events_until(connection, COMPLETED)
    done = [event for event in events if event.type == COMPLETED]
    assert [(one.transcript, one.speaker) for one in done] == [("w1 w2", "A"), ("w3 w4", "B"), ("w5", "A")]
    texts: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    assert texts == {one.item_id: one.transcript for one in done}


@pytest.mark.parametrize(
    ("session", "complaint", "param"),
    [
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "speaker_change": True}}}},
            "turn_detection.speaker_change needs speaker labels: add 'item.input_audio_transcription.speakers'",
            "session.audio.input.turn_detection.speaker_change",
        ),
        (cutting(speaker_change="yes"), "must be true or false", "session.audio.input.turn_detection.speaker_change"),
        (cutting(speaker_change=1), "must be true or false", "session.audio.input.turn_detection.speaker_change"),
    ],
)
async def test_a_wrong_speaker_change_is_refused_by_name(
    serve: Serve, session: Any, complaint: str, param: str
) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session={"type": "transcription", **session})
            error = (await events_until(connection, "error"))[-1].error
            assert complaint in error.message and error.param == param
            # Nobody is hurt: the session goes on without it.
            await send_audio(connection, tone(1.2) + silence(1.6))
            assert (await events_until(connection, COMPLETED))[-1].transcript == "w1 w2 w3"


async def test_a_server_without_the_weights_refuses_speaker_change(serve: Serve) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=cutting())
            first = (await events_until(connection, "error"))[-1].error
            second = (await events_until(connection, "error"))[-1].error
    assert "tickertape pull speakers" in first.message and first.param == "session.include"
    assert "needs speaker labels" in second.message


# Voices that a client of a socket names.

SHORT_VOICE = data_url(wav(tone(2.0, 8000), 8000))


def knowing(*voices: Any, **fields: Any) -> Any:
    transcription = {"known_speakers": list(voices), **fields}
    return {"type": "transcription", "include": [SPEAKERS], "audio": {"input": {"transcription": transcription}}}


async def test_a_socket_enrols_speakers_by_name_one_after_the_other(serve: Serve) -> None:
    engine = labelling()
    engine.one_voice = True
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=knowing({"name": "Ann", "reference": SHORT_VOICE}))
            await events_until(connection, "session.updated")
            both = knowing({"name": "Ann"}, {"name": "Bob", "reference": SHORT_VOICE})
            await connection.session.update(session=both)
            shown = (await events_until(connection, "session.updated"))[-1].session.audio.input.transcription
            assert shown.known_speakers == [{"name": "Ann"}, {"name": "Bob"}], "no audio is sent back"
            await send_audio(connection, tone(1.2) + silence(1.6))
            done = (await events_until(connection, COMPLETED))[-1]
            # A session object that is sent back as it is changes nothing.
            await connection.session.update(session=knowing({"name": "Ann"}, {"name": "Bob"}))
            await events_until(connection, "session.updated")
    assert (done.speaker, [word["speaker"] for word in done.words]) == ("Ann", ["Ann"] * 3)
    options = [str(opened["options"]["speakers"]).split("\n") for opened in engine.opened]  # type: ignore[index]
    assert options[:2] == [["labels"], ["labels"]]
    assert [line.partition("\t")[0] for line in options[2]] == ["labels", "Ann", "Bob"]
    assert len(options) == 3 and not engine.active


@pytest.mark.parametrize(
    ("voices", "complaint"),
    [
        ("Ann", "must be a list of objects"),
        (["Ann"], "must be a list of objects"),
        ([{"reference": SHORT_VOICE}], "must be a string"),
        ([{"name": "Ann", "reference": 5}], "must be a data URL"),
        ([{"name": "Ann"}], "'Ann' needs a 'reference'"),
        ([{"name": "Ann", "reference": "https://a.example/voice.wav"}], "'Ann' must be a data URL"),
        ([{"name": "Ann", "reference": "data:audio/wav;base64,???"}], "'Ann' is not valid base64"),
        ([{"name": "Ann", "reference": "data:audio/wav;base64,AAAA"}], "The recording of 'Ann' cannot be read"),
        ([{"name": "Ann", "reference": data_url(wav(tone(1.0, 8000), 8000))}], "'Ann' lasts 1.0 s; send 2 to 10"),
        ([{"name": "Ann", "reference": data_url(wav(silence(2.5, 8000), 8000))}], "'Ann' has 0.0 s of speech"),
        ([{"name": "Ann", "reference": SHORT_VOICE}], "'Ann' has more than one voice"),
        ([{"name": "A" * 65, "reference": SHORT_VOICE}], "1 to 64 characters"),
        ([{"name": "Ann\n", "reference": SHORT_VOICE}], "control characters"),
        ([{"name": "Ann", "reference": "data:,"}] * 2, "two speakers are named 'Ann'"),
        ([{"name": f"{number}", "reference": "data:,"} for number in range(17)], "at most 16 speakers"),
    ],
)
async def test_a_voice_that_a_socket_cannot_enrol_is_refused_by_name(serve: Serve, voices: Any, complaint: str) -> None:
    engine = labelling()
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            session = knowing()
            session["audio"]["input"]["transcription"]["known_speakers"] = voices
            await connection.session.update(session=session)
            error = (await events_until(connection, "error"))[-1].error
            assert complaint in error.message
            assert error.param.startswith("session.audio.input.transcription.known_speakers")
            await send_audio(connection, tone(1.2) + silence(1.6))
            assert (await events_until(connection, COMPLETED))[-1].speaker == "A"


async def test_a_socket_without_labels_or_after_its_first_audio_cannot_enrol(serve: Serve) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            voice = {"name": "Ann", "reference": SHORT_VOICE}
            await connection.session.update(session={**knowing(voice), "include": None})
            assert "add 'item" in (await events_until(connection, "error"))[-1].error.message
            await send_audio(connection, tone(0.5))
            await connection.session.update(session=knowing(voice))
            assert "before the first audio" in (await events_until(connection, "error"))[-1].error.message
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{running.base_url}/realtime/client_secrets", json={"session": knowing(voice)})
            assert answer.status_code == 400 and "on the socket" in answer.json()["error"]["message"]


async def test_a_long_message_with_a_voice_is_refused_and_the_session_goes_on(serve: Serve) -> None:
    async with serve(labelling()) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            long = {"name": "Ann", "reference": "data:audio/wav;base64," + "A" * 100_000}
            await connection.session.update(session=knowing(long))
            assert (await events_until(connection, "error"))[-1].error.code == "message_too_large"
            await send_audio(connection, tone(1.2) + silence(1.6))
            assert (await events_until(connection, COMPLETED))[-1].transcript == "w1 w2 w3"
