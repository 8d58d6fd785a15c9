"""Formatted and redacted text over real sockets and uploads, for Deepgram's and OpenAI's clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from realtime.session import formatting
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import raw_client
from tests.e2e.test_deepgram_client import listen, rest, text_of
from tests.e2e.test_deepgram_files import post, wav
from tests.e2e.test_openai_client import COMPLETED, DELTA, client_for, events_until, send_audio
from tests.realtime.gateway_doubles import FakeEngine, silence, tone

QUERY = "encoding=linear16&sample_rate=16000&interim_results=true&endpointing=300"
MONEY = ["It", "costs", "twenty", "five", "dollars", "now."]
CARD = ["The", "card", "4111", "1111", "1111", "9876", "is", "mine", "truly", "yes."]
SPOKEN = tone(5.0, 16_000) + silence(1.0, 16_000)


def final_text(events: list[dict[str, Any]]) -> str:
    return " ".join(text_of(event) for event in events if event["type"] == "Results" and event["is_final"])


def said_in(value: Any) -> str:
    """All of a message as text, without ids and digests, which have random digits."""
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if not name.endswith(("id", "sha256", "token"))}
        return "".join(f"{name} {said_in(item)} " for name, item in kept.items())
    if isinstance(value, list):
        return " ".join(map(said_in, value))
    return str(value)


async def heard(serve: Serve, engine: FakeEngine, query: str) -> list[dict[str, Any]]:
    async with serve(engine) as running, raw_client(listen(running, f"{QUERY}&{query}")) as client:
        for start in range(0, len(SPOKEN), 6400):
            await client.socket.send(SPOKEN[start : start + 6400])
        await client.send("CloseStream")
        events, code = await rest(client)
    assert code == 1000
    return events


async def test_deepgrams_finals_are_formatted_and_interims_are_not(serve: Serve) -> None:
    events = await heard(serve, FakeEngine(words=MONEY), "smart_format=true&search=costs&replace=now:today")
    finals = [event for event in events if event["type"] == "Results" and event["is_final"]]
    assert "$25" in final_text(events) and "today." in final_text(events)
    interims = [text_of(event) for event in events if event["type"] == "Results" and not event["is_final"]]
    assert any("twenty five" in text for text in interims) and not any("$" in text for text in interims)
    words = [word for final in finals for word in final["channel"]["alternatives"][0]["words"]]
    merged = next(word for word in words if word["punctuated_word"] == "$25")
    after = words[words.index(merged) + 1]
    assert merged["end"] - merged["start"] > 0.5 and merged["end"] <= after["start"] + 0.1
    assert "twenty five dollars" in finals[0]["channel"]["alternatives"][0]["raw_transcript"]
    (sought,) = finals[0]["channel"]["search"]
    assert sought["query"] == "costs" and sought["hits"][0]["snippet"] == "costs"


GERMAN = ["Es", "kostet", "acht", "Euro", "fünfzig,", "heute."]


async def test_a_deepgram_client_chooses_the_language_of_the_rules(serve: Serve) -> None:
    events = await heard(serve, FakeEngine(words=GERMAN), "smart_format=true&language=de-DE")
    assert "8,50\u00a0€, heute." in final_text(events)
    interims = [text_of(event) for event in events if event["type"] == "Results" and not event["is_final"]]
    assert any("acht Euro" in text for text in interims) and not any("8" in text for text in interims)
    # A language without rules is left as it is, and English rules do not touch it.
    polish = await heard(serve, FakeEngine(words=MONEY), "smart_format=true&language=pl")
    assert "twenty five dollars" in final_text(polish)
    async with serve(FakeEngine(words=GERMAN)) as running:
        answer = await post(running, wav(SPOKEN), params={"numerals": "true", "language": "de"})
    assert "acht euro 50" in answer.json()["results"]["channels"][0]["alternatives"][0]["transcript"]


async def test_an_openai_session_keeps_the_language_of_an_earlier_update(serve: Serve) -> None:
    """The engine cannot be set to a language, and the client tells it once."""
    async with serve(FakeEngine(words=GERMAN)) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=update(language="de"))
            await connection.session.update(session=update(format={"smart": True}))
            await send_audio(connection, tone(3.0, 24_000) + silence(1.0, 24_000))
            events = await events_until(connection, COMPLETED)
    assert "8,50\u00a0€, heute." in events[-1].transcript and "acht Euro fünfzig" in events[-1].raw_transcript


async def test_no_message_to_a_deepgram_client_has_the_digits(serve: Serve) -> None:
    events = await heard(serve, FakeEngine(words=CARD), "redact=pci&punctuate=true")
    everything = said_in(events)
    assert "4111" not in everything and "1111" not in everything and "9876" not in everything
    assert final_text(events).startswith("The card [REDACTED] is mine truly yes.")
    without = await heard(serve, FakeEngine(words=CARD), "redact=pci")
    assert final_text(without).startswith("the card [REDACTED] is mine")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("redact=pii", "'redact' cannot be 'pii'; it can be card, ssn, phone, numbers, email"),
        ("&".join(f"replace=a{number}:b" for number in range(201)), "'replace' may have at most 200 terms"),
        ("search=" + "x" * 200, "'search' must have 1 to 100 characters"),
        ("search=", "'search' must have 1 to 100 characters"),
        ("redact=name:", "'names' must have 1 to 100 characters"),
        ("numerals=true&numerals=false", "numerals"),
    ],
)
async def test_options_out_of_bounds_are_refused_by_name(serve: Serve, query: str, said: str) -> None:
    async with serve() as running:
        answer = await post(running, b"x", params=httpx.QueryParams(query))
    assert answer.status_code == 400
    assert said.split(";")[0] in answer.json()["err_msg"]


def update(**transcription: Any) -> Any:
    return {"type": "transcription", "audio": {"input": {"transcription": transcription}}}


async def test_openai_sessions_are_formatted_at_the_final(serve: Serve) -> None:
    async with serve(FakeEngine(words=MONEY)) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=update(format={"smart": True}))
            updated = (await events_until(connection, "session.updated"))[-1]
            assert updated.session.model_dump()["audio"]["input"]["transcription"]["format"] == {"smart": True}
            await send_audio(connection, tone(3.0, 24_000) + silence(1.0, 24_000))
            events = await events_until(connection, COMPLETED)
    assert "$25" in events[-1].transcript and "twenty five dollars" in events[-1].raw_transcript
    assert "twenty five" in "".join(event.delta for event in events if event.type == DELTA)


async def test_a_published_final_is_formatted_once_although_other_sessions_have_finals_too(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    formatted: list[Any] = []

    def counted(text: str, words: Any, options: Any) -> formatting.Final:
        formatted.append(words)
        return format_final(text, words, options)

    format_final = formatting.format_final
    monkeypatch.setattr(formatting, "format_final", counted)

    async def speak(client: Any, name: str) -> None:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session={**update(format={"smart": True}), "publish": name})
            await send_audio(connection, tone(3.0, 24_000) + silence(1.0, 24_000))
            done = (await events_until(connection, COMPLETED))[-1]
            assert "$25" in done.transcript

    async with serve(FakeEngine(words=MONEY)) as running, client_for(running.base_url) as client:
        await asyncio.gather(*(speak(client, f"talk{number}") for number in range(3)))
    assert len(formatted) == len({id(words) for words in formatted}) == 3


async def test_no_event_of_an_openai_session_has_the_digits(serve: Serve) -> None:
    options = {"redact": ["card"], "names": ["Ada"]}
    async with serve(FakeEngine(words=CARD)) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=update(format=options))
            await send_audio(connection, tone(5.0, 24_000) + silence(1.0, 24_000))
            events = await events_until(connection, COMPLETED)
    everything = said_in([event.model_dump() for event in events])
    assert "4111" not in everything and "1111" not in everything and "9876" not in everything
    assert "[REDACTED] is mine" in events[-1].transcript and events[-1].redactions[0]["start"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("smart", "must be an object"),
        ({"redakt": ["card"]}, "has no 'redakt'"),
        ({"redact": "card"}, "must be a list of strings"),
        ({"redact": ["pii"]}, "cannot be 'pii'"),
        ({"replace": {"a": 1}}, "must be an object with strings as values"),
        ({"names": ["x"] * 300}, "at most 200 terms"),
        ({"smart": 1}, "must be true or false"),
    ],
)
async def test_a_wrong_format_is_an_error_and_the_session_goes_on(serve: Serve, options: Any, said: str) -> None:
    async with serve() as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=update(format=options))
            error = (await events_until(connection, "error"))[-1].error
            assert said in error.message and error.param == "session.audio.input.transcription.format"
            await send_audio(connection, tone(1.2, 24_000) + silence(1.0, 24_000))
            assert (await events_until(connection, COMPLETED))[-1].transcript


async def test_a_deepgram_file_has_paragraphs_formats_and_search(serve: Serve) -> None:
    async with serve(FakeEngine(words=MONEY)) as running:
        answer = await post(running, wav(SPOKEN), params={"smart_format": "true", "search": "costs"})
    channel = answer.json()["results"]["channels"][0]
    (best,) = channel["alternatives"]
    assert best["transcript"].startswith("It costs $25 now.") and best["raw_transcript"].startswith("It costs twenty")
    paragraph = best["paragraphs"]["paragraphs"][0]
    assert paragraph["sentences"][0]["text"] == "It costs $25 now." and paragraph["sentences"][0]["start"] >= 0
    assert best["paragraphs"]["transcript"].startswith("\nIt costs $25 now.")
    assert channel["search"][0]["hits"][0]["snippet"] == "costs"


@pytest.mark.parametrize("response_format", ["json", "verbose_json", "text", "srt"])
@pytest.mark.parametrize("stream", [False, True])
async def test_uploads_are_formatted_and_redacted(serve: Serve, response_format: str, stream: bool) -> None:
    fields = {
        "model": "m",
        "response_format": response_format,
        "stream": str(stream).lower(),
        "format": json.dumps({"smart": True, "redact": ["card"]}),
        "timestamp_granularities[]": "word",
    }
    async with serve(FakeEngine(words=[*MONEY, *CARD])) as running:
        async with httpx.AsyncClient(timeout=60) as client:
            files = {"file": ("a.wav", wav(tone(8.0, 16_000)))}
            answer = await client.post(f"{running.base_url}/audio/transcriptions", data=fields, files=files)
    assert answer.status_code == 200, answer.text
    assert "$25" in answer.text and "[REDACTED]" in answer.text
    assert "4111" not in answer.text and "9876" not in answer.text


async def test_a_wrong_format_of_an_upload_is_refused(serve: Serve) -> None:
    async with serve() as running:
        async with httpx.AsyncClient(timeout=60) as client:
            for written, said in (("{", "JSON object"), ('{"x": 1}', "has no 'x'")):
                files = {"file": ("a.wav", wav(tone(1.0, 16_000)))}
                answer = await client.post(
                    f"{running.base_url}/audio/transcriptions", data={"model": "m", "format": written}, files=files
                )
                assert answer.status_code == 400 and said in answer.json()["error"]["message"]
                assert answer.json()["error"]["param"] == "format"


async def test_a_format_of_an_upload_that_is_no_object_has_no_effect(serve: Serve) -> None:
    """Clients send other things by this name, such as the container of the audio."""
    async with serve(FakeEngine(words=MONEY)) as running:
        async with httpx.AsyncClient(timeout=60) as client:
            for written in ("wav", "json", "[]", " "):
                files = {"file": ("a.wav", wav(tone(4.0, 16_000)))}
                answer = await client.post(
                    f"{running.base_url}/audio/transcriptions", data={"model": "m", "format": written}, files=files
                )
                assert answer.status_code == 200, answer.text
                assert "$25" not in answer.text and "raw_text" not in answer.json()
