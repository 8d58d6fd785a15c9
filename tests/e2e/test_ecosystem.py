"""Real clients of other projects against a real server. Each is skipped where its package is not installed.

    pip install openai-agents livekit-agents livekit-plugins-openai livekit-plugins-deepgram deepgram-sdk \
        "pipecat-ai[openai,deepgram,websocket]"
    pip install --upgrade soxr    # pipecat pins an older one than the server needs
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.options import read_keywords
from tests.e2e import ecosystem_clients as clients
from tests.e2e.conftest import Serve
from tests.e2e.test_deepgram_channels import stereo
from tests.e2e.test_deepgram_files import wav
from tests.realtime.gateway_doubles import MULTILINGUAL, FakeEngine, FakeStream, silence, tone

# Other projects' packages warn about each other; that says nothing about this one.
pytestmark = pytest.mark.filterwarnings("ignore")
PACE_S = 0.01
Client = Callable[..., Awaitable[list[str]]]


@pytest.fixture
def blockbuster() -> None:
    """These clients read files and resolve names on the event loop they share with the server here."""


class Obedient(FakeEngine):
    """An engine that hears nothing but the words it was told to expect."""

    def __init__(self) -> None:
        super().__init__()
        self.takes(replace(MULTILINGUAL, keywords=500, prompt=False))

    async def open(self, stream: str, *, options: dict[str, str] | None = None, **named: Any) -> FakeStream:
        self.words = [word.text for word in read_keywords((options or {})["keywords"])]
        return await super().open(stream, options=options, **named)


def needs(module: str) -> pytest.MarkDecorator:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return pytest.mark.skipif(not found, reason=f"{module} is not installed")


def two_turns(rate: int) -> bytes:
    turn = tone(1.0, rate) + silence(1.0, rate)
    return silence(0.3, rate) + turn + turn


@pytest.mark.parametrize(
    ("client", "rate"),
    [
        pytest.param(clients.openai_agents, 24_000, marks=needs("agents.voice")),
        pytest.param(clients.deepgram_sdk, 16_000, marks=needs("deepgram")),
    ],
)
async def test_client_that_ends_by_itself(serve: Serve, client: Client, rate: int) -> None:
    async with serve() as running, asyncio.timeout(30):
        finals = await client(running.base_url, two_turns(rate), PACE_S)
    assert " ".join(finals) in ("w1 w2 w3 w4", "w1 w2 w3 w4 w5")


@needs("deepgram")
async def test_deepgrams_package_reads_the_answer_to_a_file(serve: Serve) -> None:
    async with serve() as running, asyncio.timeout(30):
        answer = await clients.deepgram_file(running.base_url, wav(two_turns(16_000)))
    assert answer.metadata.channels == 1 and answer.metadata.duration == pytest.approx(4.3, abs=0.01)
    best = answer.results.channels[0].alternatives[0]
    assert best.transcript == " ".join(word.punctuated_word for word in best.words)
    assert [part.transcript for part in answer.results.utterances] == ["w1 w2", "w3 w4 w5"]


@needs("deepgram")
async def test_deepgrams_package_reads_two_channels(serve: Serve) -> None:
    audio = stereo(two_turns(16_000), silence(4.3, 16_000))
    async with serve() as running, asyncio.timeout(30):
        messages = await clients.deepgram_channels(running.base_url, audio)
    finals = [message for message in messages if message.type == "Results" and message.is_final]
    assert {tuple(message.channel_index) for message in finals} == {(0, 2)}, "the other channel is silent"
    spoken = " ".join(message.channel.alternatives[0].transcript for message in finals)
    assert spoken.split() == ["w1", "w2", "w3", "w4", "w5"]
    assert messages[-1].type == "Metadata" and messages[-1].channels == 2


@pytest.mark.parametrize(
    ("client", "rate"),
    [
        pytest.param(clients.livekit_openai, 24_000, marks=needs("livekit.plugins.openai")),
        pytest.param(clients.livekit_deepgram, 16_000, marks=needs("livekit.plugins.deepgram")),
        pytest.param(clients.livekit_flux, 16_000, marks=needs("livekit.plugins.deepgram")),
        pytest.param(clients.pipecat_openai, 16_000, marks=needs("pipecat")),
        pytest.param(clients.pipecat_deepgram, 16_000, marks=needs("pipecat")),
        pytest.param(clients.pipecat_flux, 16_000, marks=needs("pipecat")),
    ],
)
async def test_client_that_hears_turns(serve: Serve, client: Client, rate: int) -> None:
    async with serve() as running, asyncio.timeout(30):
        finals = await client(running.base_url, two_turns(rate), PACE_S, 2)
    assert " ".join(finals) in ("w1 w2 w3 w4", "w1 w2 w3 w4 w5")


@needs("deepgram")
async def test_deepgrams_package_reads_turns_of_flux(serve: Serve) -> None:
    audio = tone(1.3, 16_000) + silence(0.7, 16_000) + two_turns(16_000) + silence(1.5, 16_000)
    async with serve() as running, asyncio.timeout(30):
        messages = await clients.deepgram_flux(
            running.base_url,
            audio,
            PACE_S,
            {"eot_threshold": 0.8, "eager_eot_threshold": 0.3, "eot_timeout_ms": 700},
            keyterm=["Ticker", "Tape"],
            eot_threshold=0.9,
            tag=["a", "b"],
        )
    kinds = [type(message).__name__ for message in messages]
    assert kinds[0] == "ListenV2Connected" and kinds.count("ListenV2ConfigureSuccess") == 1
    assert [message.sequence_id for message in messages] == list(range(len(messages)))
    assert messages[1].thresholds.eager_eot_threshold == 0.3 and messages[1].thresholds.eot_timeout_ms == 700
    told = [message for message in messages if message.type == "TurnInfo"]
    ends = [message for message in told if message.event == "EndOfTurn"]
    assert [message.turn_index for message in ends] == list(range(len(ends))) and len(ends) >= 2
    assert {message.event for message in told} >= {"StartOfTurn", "EagerEndOfTurn", "EndOfTurn"}
    text = " ".join(end.transcript for end in ends)
    assert text.split() == [word.word for end in ends for word in end.words] == [f"w{n + 1}" for n in range(8)]
    assert all(end.trigger in ("model", "timeout") and 0 < end.end_of_turn_confidence <= 1 for end in ends)


EXPECTED = ["Ticker", "Tape"]


@pytest.mark.parametrize(
    ("client", "rate", "options"),
    [
        pytest.param(
            clients.livekit_openai,
            24_000,
            {"model": "gpt-transcribe", "language": "de", "keywords": EXPECTED},
            marks=needs("livekit.plugins.openai"),
        ),
        pytest.param(
            clients.livekit_deepgram,
            16_000,
            {"language": "de", "keyterm": EXPECTED},
            marks=needs("livekit.plugins.deepgram"),
        ),
        # It knows no keywords for a live session; a prompt that lists words stands for them. Its own model has none.
        pytest.param(
            clients.pipecat_openai,
            16_000,
            {"model": "gpt-4o-transcribe", "language": "de", "prompt": "Ticker, Tape"},
            marks=needs("pipecat"),
        ),
        pytest.param(clients.pipecat_deepgram, 16_000, {"language": "de", "keyterm": EXPECTED}, marks=needs("pipecat")),
        pytest.param(
            clients.livekit_flux,
            16_000,
            {"model": "flux-general-multi", "language_hint": ["de"], "keyterm": EXPECTED, "eager_eot_threshold": 0.4},
            marks=needs("livekit.plugins.deepgram"),
        ),
        pytest.param(
            clients.pipecat_flux,
            16_000,
            {"model": "flux-general-multi", "language_hints": ["de"], "keyterm": EXPECTED},
            marks=needs("pipecat"),
        ),
    ],
)
async def test_language_and_keywords_of_a_client_reach_the_engine(
    serve: Serve, client: Client, rate: int, options: dict[str, Any]
) -> None:
    engine = Obedient()
    async with serve(engine) as running, asyncio.timeout(30):
        finals = await client(running.base_url, two_turns(rate), PACE_S, 2, **options)
    assert set(" ".join(finals).split()) == set(EXPECTED)
    told = engine.opened[-1]["options"]
    assert told in (
        {"language": "de", "keywords": "Ticker\t1\nTape\t1"},
        {"languages": "de", "keywords": "Ticker\t1\nTape\t1"},
    )


@needs("deepgram")
async def test_deepgrams_package_changes_its_keyterms_in_the_middle(serve: Serve) -> None:
    engine = Obedient()
    async with serve(engine) as running, asyncio.timeout(30):
        messages = await clients.deepgram_keyterms(running.base_url, two_turns(16_000), ["Ticker"], ["Tape", "Worm"])
    (changed,) = [at for at, message in enumerate(messages) if message.type == "ConfigureSuccess"]
    assert messages[changed].keyterms == ["Tape", "Worm"]
    keywords = ["Ticker\t1", "Tape\t1\nWorm\t1"]
    assert [opened["options"] for opened in engine.opened] == [
        {"language": "de", "keywords": words} for words in keywords
    ]
    finals = [message for message in messages if message.type == "Results" and message.is_final]
    heard = " ".join(message.channel.alternatives[0].transcript for message in finals).lower().split()
    assert heard[0] == "ticker" and set(heard[-2:]) == {"tape", "worm"}
