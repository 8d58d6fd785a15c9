"""What the engine tells of a reference recording becomes a voice that the engine knows again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from engine.messages import Closed, Item, Labels, Output, Speech
from engine.options import MAX_ENROLLED, SPEAKERS, speakers_text
from engine.server.speaker_labels import FRAME_SAMPLES, SAMPLE_RATE
from realtime.errors import Refusal
from realtime.serving import enrolment
from realtime.serving.engine_api import EngineApi
from realtime.serving.enrolment import SocketEnrolment
from realtime.serving.enrolment import _voice as voice_of
from realtime.session.core import SavedSession, Session
from realtime.session.settings import INCLUDE_SPEAKERS, Settings
from tests.engine.server.test_speakers_tracks import Embeddings, conversation, heard, loop_tracks
from tests.waiting import until


def labels_of(turns: Sequence[tuple[int, int]], option: str) -> Labels:
    """All labels that an engine tells of turns (voice, frames), with their last state."""
    audio, probabilities = conversation(turns)
    embeddings = Embeddings()
    tracks = loop_tracks(embeddings)
    tracks.open("s", {SPEAKERS: option}, live=False)
    tracks.add_audio("s", [Item(0, 1, 0, b"k", audio, samples=len(audio))])
    tracks.add_frames(*heard(Speech("s", 0, FRAME_SAMPLES, probabilities)))
    embeddings.compute()
    outputs: list[Output] = [Closed("s", len(audio))]
    tracks.add_labels(outputs)
    embeddings.compute()
    tracks.add_labels(outputs)
    told = [output for output in outputs if isinstance(output, Labels)]
    state = [labels.state for labels in told if labels.state is not None]
    return Labels("s", [span for labels in told for span in labels.decided], [], state[-1] if state else None)


def test_an_enrolled_voice_is_known_again_and_another_is_not() -> None:
    ann, bob = (voice_of(name, labels_of([(voice, 100)], speakers_text()), SAMPLE_RATE) for name, voice in NAMED)
    both = speakers_text([("Ann", ann), ("Bob", bob)])
    found = labels_of([(3, 60), (1, 60), (2, 60), (3, 60)], both).decided
    first = [speaker for at, speaker in enumerate(span[2] for span in found) if not at or found[at - 1][2] != speaker]
    assert first == [1, 0, 2, 1], "Bob, Ann, somebody, Bob"


NAMED = (("Ann", 1), ("Bob", 3))


def test_a_voice_is_the_mean_of_its_embeddings() -> None:
    vector = np.frombuffer(voice_of("Ann", labels_of([(1, 100)], speakers_text()), SAMPLE_RATE), "<i2")
    again = labels_of([(1, 100)], speakers_text([("Ann", vector.tobytes())]))
    assert again.state is not None
    (voice,) = again.state["labels"]["voices"]
    total = np.frombuffer(voice["total"], "<i4") / voice["weight"]
    assert total @ vector > 0.98 * np.linalg.norm(total) * np.linalg.norm(vector)


def test_a_session_is_saved_with_its_voices_and_not_with_their_audio() -> None:
    voices = tuple((f"{number:064}", bytes(range(192)) * 2) for number in range(MAX_ENROLLED))
    chosen = Settings(include=(INCLUDE_SPEAKERS,), known_speakers=voices)
    value = msgspec.msgpack.encode(Session(chosen, SAMPLE_RATE, lambda: "item").save())
    assert len(value) < 12_000
    saved = msgspec.msgpack.decode(value, type=SavedSession)
    assert saved.settings == chosen
    assert saved.settings.engine_options() == chosen.engine_options()


@pytest.mark.parametrize(
    ("turns", "complaint"),
    [
        ([(1, 8)], "'Ann' has 0.2 s of speech"),
        ([(1, 70), (3, 60)], "'Ann' has more than one voice"),
        ([(1, 0)], "'Ann' has 0.0 s of speech"),
        ([(1, 31)], "'Ann' has 0.9 s of speech"),
    ],
)
def test_a_recording_without_one_voice_is_refused(turns: Sequence[tuple[int, int]], complaint: str) -> None:
    with pytest.raises(Refusal) as refused:
        voice_of("Ann", labels_of(turns, speakers_text()), SAMPLE_RATE)
    assert complaint in refused.value.message


async def test_a_caller_with_many_sockets_has_one_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = list[str](), asyncio.Event()

    async def enrolled(engine: Any, references: Sequence[tuple[str, bytes]]) -> tuple[tuple[str, Any], ...]:
        begun.extend(name for name, _ in references)
        await may_go_on.wait()
        return tuple((name, b"voice") for name, _ in references)

    monkeypatch.setattr(enrolment, "enrolled", enrolled)
    places = SocketEnrolment(cast(EngineApi, None))
    url = "data:audio/wav;base64,AAAA"
    many = [asyncio.create_task(places.enrol("greedy", [(f"g{number}", url)], ())) for number in range(8)]
    await until(lambda: begun == ["g0"])
    other = asyncio.create_task(places.enrol("other", [("o", url)], ()))
    await until(lambda: begun == ["g0", "o"])
    may_go_on.set()
    await asyncio.gather(*many, other)
    assert len(begun) == 9
