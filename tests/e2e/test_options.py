"""Options of a model over the wire: values in force are shown, others are reported, and mistakes change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from engine import messages
from engine.options import Options
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client, raw_client
from tests.e2e.test_deepgram_client import listen
from tests.e2e.test_openai_client import wav
from tests.realtime import gateway_doubles
from tests.realtime.gateway_doubles import ENGLISH, MULTILINGUAL, FakeEngine, FakeStream, silence, tone

EXPECTING = "encoding=linear16&sample_rate=16000&keyterm=Ticker"
WITH_WORDS = replace(MULTILINGUAL, keywords=500)


def engine_with(options: Options) -> FakeEngine:
    engine = FakeEngine()
    engine.takes(options)
    return engine


async def in_force(client: Any, **transcription: Any) -> dict[str, Any]:
    await client.send("session.update", session={"audio": {"input": {"transcription": transcription}}})
    event = (await client.until("session.updated"))[-1]
    return dict(event["session"]["audio"]["input"]["transcription"])


# Bad input


async def test_what_only_the_engine_can_refuse_is_the_clients_mistake_too(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """How many pieces keywords take together is a matter of the model's vocabulary."""
    engine = engine_with(WITH_WORDS)
    engine.refuse_open = ValueError("these keywords are too long together")
    async with serve(engine) as running, greeted_client(running.ws) as client, httpx.AsyncClient() as http:
        files = {"file": ("a.wav", wav(0.2), "audio/wav")}
        response = await http.post(f"{running.base_url}/audio/transcriptions", files=files, data={"model": "m"})
        assert response.status_code == 400 and "too long together" in response.json()["error"]["message"]
        await client.append(tone(0.5))
        error = (await client.until("error"))[-1]["error"]
        assert error["code"] == "invalid_value" and "too long together" in error["message"]
        await client.socket.wait_closed()
        assert client.socket.close_code == 1008
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("wish", "param", "text"),
    [
        ({"language": "klingon"}, "language", "It supports en, zh, de"),
        ({"language": "yue"}, "language", "the language 'yue'"),
        ({"task": "sing"}, "task", "transcribe or translate"),
        ({"keywords": ["w"] * 10_000}, "keywords", "At most 500"),
        ({"keywords": [""]}, "keywords", "empty"),
        ({"keywords": ["x" * 10_000]}, "keywords", "at most 64"),
        ({"keywords": ["a\u0007"]}, "keywords", "control"),
        ({"keywords": [["a", 99]]}, "keywords", "list of strings"),
        ({"keywords": {}}, "keywords", "list of strings"),
        ({"keywords": ""}, "keywords", "list of strings"),
        ({"languages": 0}, "languages", "list of at most"),
    ],
)
async def test_a_mistake_is_told_and_the_session_goes_on_with_what_it_had(
    serve: Serve, wish: dict[str, Any], param: str, text: str
) -> None:
    engine = engine_with(WITH_WORDS)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        assert (await in_force(client, language="de-AT"))["language"] == "de"
        await client.send("session.update", event_id="mine", session={"audio": {"input": {"transcription": wish}}})
        error = (await client.until("error"))[-1]["error"]
        assert error["code"] == "invalid_value" and error["event_id"] == "mine" and text in error["message"]
        assert error["param"] == f"session.audio.input.transcription.{param}"
        await client.append(tone(1.0) + silence(0.8))
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2"
        assert engine.opened[-1]["options"] == {"language": "de"}
        assert (await in_force(client))["language"] == "de"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"input_audio_transcription": "whisper-1"}, "session.input_audio_transcription"),
        ({"input_audio_transcription": {"language": 5}}, "session.input_audio_transcription.language"),
        ({"input_audio_transcription": {"language": "xx"}}, "session.input_audio_transcription.language"),
        ({"input_audio_noise_reduction": 5}, "session.input_audio_noise_reduction"),
    ],
)
async def test_a_mistake_is_named_as_the_client_of_the_beta_wrote_it(
    serve: Serve, session: dict[str, Any], param: str
) -> None:
    async with serve(engine_with(WITH_WORDS)) as running, raw_client(running.ws) as client:
        await client.send("transcription_session.update", session=session)
        assert (await client.until("error"))[-1]["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "options", "fields", "param", "text"),
    [
        ("transcriptions", ENGLISH, {"language": "de"}, "language", "the language 'de'. It supports en."),
        ("transcriptions", ENGLISH, {"language": "xx"}, "language", "not a language"),
        ("transcriptions", MULTILINGUAL, {"prompt": "x" * 16_385}, "prompt", "at most 16384 characters"),
        ("transcriptions", WITH_WORDS, {"keywords[]": ["w"] * 501}, "keywords", "At most 500"),
        ("transcriptions", WITH_WORDS, {"keywords[]": ""}, "keywords", "empty"),
        ("transcriptions", WITH_WORDS, {"keywords[]": "x" * 10_000}, "keywords", "at most 64"),
        ("transcriptions", WITH_WORDS, {"keywords[]": "a\u0007"}, "keywords", "control"),
        ("transcriptions", ENGLISH, {"languages[]": "de"}, "languages", "none of these languages. It supports en."),
        ("transcriptions", ENGLISH, {"temperature": "5"}, "temperature", "from 0 to 1"),
        ("transcriptions", ENGLISH, {"temperature": "nan"}, "temperature", "from 0 to 1"),
        ("transcriptions", ENGLISH, {"temperature": "hot"}, "temperature", "from 0 to 1"),
        (
            "transcriptions",
            ENGLISH,
            {"timestamp_granularities[]": "letter"},
            "timestamp_granularities",
            "word and segment",
        ),
        ("transcriptions", ENGLISH, {"include[]": "everything"}, "include", "can contain logprobs"),
        (
            "transcriptions",
            ENGLISH,
            {"include[]": "logprobs", "response_format": "srt"},
            "include",
            "needs 'response_format'",
        ),
        ("translations", ENGLISH, {}, "task", "does not translate"),
    ],
)
async def test_an_upload_is_refused_with_the_reason(
    serve: Serve, path: str, options: Options, fields: dict[str, Any], param: str, text: str
) -> None:
    async with serve(engine_with(options)) as running, httpx.AsyncClient() as http:
        files = {"file": ("a.wav", wav(0.9), "audio/wav")}
        response = await http.post(f"{running.base_url}/audio/{path}", data=fields, files=files)
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["param"] == param and text in error["message"]


@pytest.mark.parametrize("hint", [{"prompt": "Names and places."}, {"keywords[]": ["tape", "ticker"]}], ids=str)
async def test_a_hint_that_the_model_does_not_take_changes_nothing_on_either_side(
    serve: Serve, hint: dict[str, Any]
) -> None:
    """Clients of OpenAI send a prompt whatever the model is: they must work, as they do on a socket."""
    engine = engine_with(ENGLISH)
    async with serve(engine) as running, httpx.AsyncClient() as http, greeted_client(running.ws) as client:
        files = {"file": ("a.wav", wav(0.9), "audio/wav")}
        response = await http.post(f"{running.base_url}/audio/transcriptions", data=hint, files=files)
        assert (response.status_code, response.json()["text"]) == (200, "w1 w2")
        shown = await in_force(client, **{name.removesuffix("[]"): value for name, value in hint.items()})
        assert not shown.get("prompt") and not shown.get("keywords")
        await client.append(tone(1.0) + silence(0.8))
        await client.until(COMPLETED)
        assert [opened["options"] for opened in engine.opened] == [{}, {}]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("language=klingon", "not a language"),
        ("language=de", "It supports en."),
        ("keyterm=", "empty"),
        ("&".join(["keyterm=w"] * 501), "At most 500"),
        ("keyterm=" + "x" * 5_000, "at most 64"),
        ("keyterm=a%07", "control"),
        ("keywords=tape:loud", "word with a boost"),
        ("keywords=tape:-3", "between 0.1 and 10"),
        ("keywords=tape:11", "between 0.1 and 10"),
        ("keywords=tape:nan", "word with a boost"),
    ],
)
async def test_a_query_is_refused_in_the_dialects_own_shape(serve: Serve, query: str, text: str) -> None:
    async with serve(engine_with(replace(ENGLISH, keywords=500))) as running, httpx.AsyncClient() as http:
        with pytest.raises(InvalidStatus) as caught:
            async with connect(f"{running.ws.replace('/realtime', '/listen')}?encoding=linear16&{query}"):
                pass
        assert caught.value.response.status_code == 400 and text in caught.value.response.headers["dg-error"]
        answer = await http.post(f"{running.base_url}/listen?{query}", content=wav(0.9))
        assert answer.status_code == 400 and text in answer.json()["err_msg"]


async def test_a_task_that_the_model_cannot_do_is_told_and_the_session_goes_on(serve: Serve) -> None:
    engine = engine_with(ENGLISH)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        update = {"audio": {"input": {"transcription": {"task": "translate"}}}}
        await client.send("session.update", session=update)
        error = (await client.until("error"))[-1]["error"]
        assert error["param"] == "session.audio.input.transcription.task" and "translate" in error["message"]
        await client.append(tone(1.0) + silence(0.8))
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2"
        assert "task" not in engine.opened[-1]["options"]


@pytest.mark.parametrize(
    ("terms", "code", "text"),
    [
        (["w"] * 10_000, "CONFIGURE_KEYTERM_LIMIT_EXCEEDED", "At most 500"),
        (["x" * 10_000], "CONFIGURE_KEYTERM_LIMIT_EXCEEDED", "at most 64"),
        ([""], "CONFIGURE_KEYTERM_LIMIT_EXCEEDED", "empty"),
        (["a\u0007"], "CONFIGURE_KEYTERM_LIMIT_EXCEEDED", "control"),
        ([1], "CONFIGURE_INTERNAL_ERROR", "must be a string"),
        ("tape", "CONFIGURE_INTERNAL_ERROR", "as a list"),
    ],
)
async def test_keyterms_that_cannot_be_used_leave_the_others_in_force(
    serve: Serve, terms: Any, code: str, text: str
) -> None:
    engine = engine_with(WITH_WORDS)
    async with serve(engine) as running, raw_client(listen(running, EXPECTING)) as client:
        await client.send("Configure", keyterms=terms)
        answer = await client.receive()
        assert (answer["type"], answer["code"]) == ("ConfigureFailure", code) and text in answer["description"]
        await client.socket.send(tone(1.0, 16_000))
        await client.send("Finalize")
        while not (await client.receive())["is_final"]:
            pass
        assert [opened["options"] for opened in engine.opened] == [{"keywords": "Ticker\t1"}]


# Normal use


async def test_keyterms_may_change_in_the_middle(serve: Serve) -> None:
    engine = engine_with(WITH_WORDS)
    async with serve(engine) as running, raw_client(listen(running, EXPECTING)) as client:
        for keyterms, shown in ((["Tape", "van der Berg"], ["Tape", "van der Berg"]), ([], [])):
            await client.socket.send(tone(1.0, 16_000))
            await client.send("Configure", keyterms=keyterms)
            while (answer := await client.receive())["type"] != "ConfigureSuccess":
                pass
            assert answer["keyterms"] == shown
        await client.socket.send(tone(1.0, 16_000))
        await client.send("CloseStream")
        while (await client.receive())["type"] != "Metadata":
            pass
        told = [{"keywords": "Ticker\t1"}, {"keywords": "Tape\t1\nvan der Berg\t1"}, {}]
        assert [opened["options"] for opened in engine.opened] == told


async def test_what_the_model_does_not_take_is_null(serve: Serve) -> None:
    engine = engine_with(ENGLISH)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        shown = await in_force(client, language="en-US", prompt="Names.", keywords=["tape"], delay="low")
        assert (shown["language"], shown["prompt"], shown["keywords"]) == ("en", None, None)
        await client.append(tone(1.0) + silence(0.8))
        await client.until(COMPLETED)
        assert engine.opened[-1]["options"] == {"language": "en"}


async def test_what_is_in_force_is_shown_and_reaches_the_engine(serve: Serve) -> None:
    engine = engine_with(WITH_WORDS)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        asked = {"language": "German", "prompt": "Namen.", "keywords": ["Ticker", "Tape"], "task": "translate"}
        shown = await in_force(client, **asked)
        assert {name: shown[name] for name in asked} == {**asked, "language": "de"}
        await client.append(tone(1.0) + silence(0.8))
        await client.until(COMPLETED)
        told = {"language": "de", "task": "translate", "prompt": "Namen.", "keywords": "Ticker\t1\nTape\t1"}
        assert engine.opened[-1]["options"] == told


async def test_deepgrams_words_reach_the_engine(serve: Serve) -> None:
    engine = engine_with(WITH_WORDS)
    query = "language=multi&keyterm=Ticker%20Tape&keywords=Moonshine:2.5&keywords=Whisper"
    async with serve(engine) as running, httpx.AsyncClient() as http:
        answer = await http.post(f"{running.base_url}/listen?{query}", content=wav(0.9))
        assert answer.status_code == 200
        assert engine.opened[-1]["options"] == {"keywords": "Ticker Tape\t1\nMoonshine\t2.5\nWhisper\t1"}


async def test_logprobs_of_a_streamed_upload_are_its_text(serve: Serve) -> None:
    async with serve(engine_with(ENGLISH)) as running, httpx.AsyncClient() as http:
        answer = await http.post(
            f"{running.base_url}/audio/transcriptions",
            data={"stream": "true", "include[]": "logprobs"},
            files={"file": ("a.wav", wav(0.9), "audio/wav")},
        )
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [chance for event in events[:-1] for chance in event["logprobs"]]
    assert parts == events[-1]["logprobs"] and "".join(part["token"] for part in parts) == events[-1]["text"] == "w1 w2"


class LateWords(FakeStream):
    """Its words are complete when the text goes on, or ends, as those of the models are."""

    late: Sequence[messages.Word] = ()

    def put(self, output: messages.Output) -> None:
        if isinstance(output, messages.Text):
            output.words, self.late = list(self.late), output.words
        elif isinstance(output, messages.Closed):
            super().put(messages.Text(self.id, "", list(self.late), [], output.sample))
        super().put(output)


async def test_the_last_word_of_a_streamed_upload_is_told(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_doubles, "FakeStream", LateWords)
    asked = {"timestamp_granularities[]": "word", "include[]": "logprobs"}
    async with serve(engine_with(ENGLISH)) as running, httpx.AsyncClient() as http:
        for extras in ({}, asked):
            answer = await http.post(
                f"{running.base_url}/audio/transcriptions",
                data={"stream": "true", **extras},
                files={"file": ("a.wav", wav(0.9), "audio/wav")},
            )
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert events[-1]["text"] == "w1 w2" and len(events) == (4 if extras else 3), "nothing is told without need"
    assert [word["word"] for event in events[:-1] for word in event["words"]] == ["w1", "w2"]
    assert [chance for event in events[:-1] for chance in event["logprobs"]] == events[-1]["logprobs"]


async def test_a_translation_is_an_upload_in_english(serve: Serve) -> None:
    engine = engine_with(MULTILINGUAL)
    async with serve(engine) as running, httpx.AsyncClient() as http:
        for response_format in ("json", "text", "srt", "vtt", "verbose_json"):
            response = await http.post(
                f"{running.base_url}/audio/translations",
                data={"model": "whisper-1", "prompt": "Names.", "response_format": response_format},
                files={"file": ("a.wav", wav(0.9), "audio/wav")},
            )
            assert response.status_code == 200 and "w1 w2" in response.text
        assert (response.json()["task"], response.json()["language"]) == ("translate", "english")
        assert engine.opened[-1]["options"] == {"task": "translate", "prompt": "Names."}


@pytest.mark.parametrize(
    ("transcription", "param"),
    [
        ({"language": "qq"}, "language"),
        ({"language": 7}, "language"),
        ({"task": "sing"}, "task"),
        ({"keywords": ["x" * 65]}, "keywords"),
        ({"keywords": "tape"}, "keywords"),
        ({"prompt": "x" * 20_000}, "prompt"),
        ({"delay": "never"}, "delay"),
    ],
)
async def test_one_wrong_option_does_not_cost_the_others(serve: Serve, transcription: Any, param: str) -> None:
    """Audio comes in the new format from here on: it must not be heard in the old one."""
    async with serve() as running, greeted_client(running.ws) as client:
        running.engine.keep_audio = True
        await client.update(transcription={"language": "de", "prompt": "before"}, turn_detection=None)
        given = {"prompt": "after", **transcription}
        audio_input = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": given}
        await client.send("session.update", event_id="mine", session={"audio": {"input": audio_input}})
        error = (await client.receive())["error"]
        assert error["param"] == f"session.audio.input.transcription.{param}" and error["event_id"] == "mine"
        updated = await client.receive()
        assert updated["type"] == "session.updated"
        shown = updated["session"]["audio"]["input"]
        assert shown["format"] == {"type": "audio/pcm", "rate": 16_000} and shown["transcription"]["language"] == "de"
        assert shown["transcription"]["prompt"] == ("before" if param == "prompt" else "after")
        await client.append(tone(1.0, 16_000))
        await client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")
        assert sum(map(len, running.engine.streams[-1].heard)) == 16_000


async def test_each_wrong_field_of_an_update_is_named(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        audio_input = {
            "format": {"type": "audio/mp9"},
            "turn_detection": {"type": "server_vad", "threshold": 2},
            "transcription": {"model": "mine", "language": "qq", "languages": "de", "delay": "never"},
        }
        await client.send("session.update", session={"audio": {"input": audio_input}, "include": "words"})
        events = await client.until("session.updated")
        wrong = {event["error"]["param"].removeprefix("session.").removeprefix("audio.input.") for event in events[:-1]}
        assert wrong == {"format.type", "turn_detection.threshold", "include"} | {
            f"transcription.{name}" for name in ("language", "languages", "delay")
        }
        assert events[-1]["session"]["audio"]["input"]["transcription"]["model"] == "mine"


async def test_an_update_of_which_nothing_can_be_taken_is_an_error_and_no_more(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.send("session.update", session={"audio": {"input": {"transcription": {"language": "qq"}}}})
        assert (await client.receive())["type"] == "error"
        await client.send("input_audio_buffer.clear")
        assert (await client.receive())["type"] == "input_audio_buffer.cleared"


async def test_words_that_do_not_go_together_leave_those_that_were(serve: Serve) -> None:
    """A list in the prompt counts as keywords, and both together are too many."""
    async with serve() as running, greeted_client(running.ws) as client:
        running.engine.takes(replace(ENGLISH, keywords=True))
        many = [f"word{number}" for number in range(300)]
        first = await client.update(transcription={"prompt": ", ".join(many)})
        audio_input = {
            "format": {"type": "audio/pcmu"},
            "transcription": {"keywords": [f"other{n}" for n in range(300)]},
        }
        await client.send("session.update", session={"audio": {"input": audio_input}})
        events = await client.until("session.updated")
        assert {event["type"] for event in events[:-1]} == {"error"}
        shown = events[-1]["session"]["audio"]["input"]
        assert shown["format"] == {"type": "audio/pcmu"}
        assert shown["transcription"]["keywords"] == first["audio"]["input"]["transcription"]["keywords"]
