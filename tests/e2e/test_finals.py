"""Finals of a model with a second pass, as unmodified clients read them. The fake engine revises words to capitals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine import messages
from engine.options import REVISED
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import raw_client
from tests.e2e.test_deepgram_client import QUERY, listen, rest, text_of
from tests.e2e.test_openai_client import COMPLETED, DELTA, client_for, events_until, send_audio
from tests.realtime import gateway_doubles
from tests.realtime.gateway_doubles import ENGLISH, FakeEngine, FakeStream, silence, tone

TURNS = 2


class RevisingStream(FakeStream):
    """Announces a revision with each flush that has words before it, and sends it afterwards."""

    def put(self, output: messages.Output) -> None:
        said = self.__dict__.setdefault("said", list[messages.Word]())
        if isinstance(output, messages.Text):
            said += output.words
        is_revised = REVISED in (self._engine.opened[-1]["options"] or {})  # type: ignore[operator]
        ends = isinstance(output, messages.Flushed | messages.Closed)
        if not (ends and is_revised and said):
            super().put(output)
            return
        words = [
            messages.Word(
                word.text.upper(), word.start_sample, word.end_sample, [(f" {word.text.upper()}".encode(), -0.1)]
            )
            for word in said
        ]
        said.clear()
        start, self.__dict__["revised_until"] = self.__dict__.get("revised_until", 0), self.samples
        revised = messages.Revised(self.id, start, self.samples, words)
        if isinstance(output, messages.Flushed):
            output.is_revised = True
            super().put(output)
            super().put(revised)
        else:
            super().put(revised)
            super().put(output)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(gateway_doubles, "FakeStream", RevisingStream)
    made = FakeEngine()
    made.takes(replace(ENGLISH, revises=True))
    return made


def turn(rate: int) -> bytes:
    return tone(1.2, rate) + silence(1.0, rate)


def update(**transcription: Any) -> Any:
    return {"type": "transcription", "audio": {"input": {"transcription": transcription}}}


async def test_completed_has_the_better_words_and_deltas_stay(serve: Serve, engine: FakeEngine) -> None:
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            events = []
            for _ in range(TURNS):
                await send_audio(connection, turn(24_000))
                events += await events_until(connection, COMPLETED)
    finals = [event.transcript for event in events if event.type == COMPLETED]
    deltas = " ".join(event.delta for event in events if event.type == DELTA)
    assert all(final and final == final.upper() for final in finals) and deltas and deltas != deltas.upper()
    assert " ".join(finals).lower().split() == deltas.lower().split()


async def test_a_client_may_choose_the_streamed_words(serve: Serve, engine: FakeEngine) -> None:
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=update(finals="streamed"))
            updated = (await events_until(connection, "session.updated"))[-1]
            assert updated.session.audio.input.transcription.model_extra["finals"] == "streamed"
            await send_audio(connection, turn(24_000))
            events = await events_until(connection, COMPLETED)
    finals = [event.transcript for event in events if event.type == COMPLETED]
    assert "".join(event.delta for event in events if event.type == DELTA) == "".join(finals)


@pytest.mark.parametrize("wrong", ["best", 7, ["better"], {}])
async def test_another_value_is_refused_and_the_session_goes_on(serve: Serve, engine: FakeEngine, wrong: Any) -> None:
    async with serve(engine) as running, client_for(running.base_url) as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=update(finals=wrong))
            error = (await events_until(connection, "error"))[-1].error
            assert error.param.endswith("transcription.finals") and "'better' or 'streamed'" in error.message
            await send_audio(connection, turn(24_000))
            await events_until(connection, COMPLETED)


async def test_deepgrams_final_results_have_the_better_words(serve: Serve, engine: FakeEngine) -> None:
    async with (
        serve(engine) as running,
        raw_client(listen(running, QUERY + "&punctuate=true")) as client,
    ):
        audio = turn(16_000)
        for start in range(0, len(audio), 3200):
            await client.socket.send(audio[start : start + 3200])
        await client.send("CloseStream")
        events, _ = await rest(client)
    results = [event for event in events if event["type"] == "Results"]
    finals = [text_of(result) for result in results if result["is_final"] and text_of(result)]
    assert finals and all(final == final.upper() for final in finals)
    assert all(text_of(result) != text_of(result).upper() for result in results if not result["is_final"])
