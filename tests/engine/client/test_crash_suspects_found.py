"""Values that no codec can write or read, against a real engine host: only their stream ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from engine import messages
from engine.boundary.items import hash_payload
from engine.client.client import EngineClient
from engine.client.engine_handles import EngineThread
from engine.messages import Closed, Failed, Item
from tests.engine import fakes

SPEC = fakes.FRAMES
PAYLOAD = fakes.speech(1, 9)[: SPEC.look_back_samples + SPEC.samples_per_position + SPEC.look_ahead_samples]


def item(**changes: Any) -> Item:
    fields = {
        "offset": SPEC.prefix_positions,
        "length": 1,
        "sample": 0,
        "key": hash_payload(PAYLOAD),
        "payload": PAYLOAD,
    }
    return Item(**(fields | changes))


POISONED: dict[str, Item] = {
    "an offset without bytes": item(offset=2**70),
    "samples that are a text": item(samples="x"),
    "a mask that is a set": item(mask={1}),
    "audio that is a list": item(payload=[1.0]),
    "audio of doubles": item(payload=PAYLOAD.astype(np.float64)),
    "audio with holes": item(payload=np.repeat(PAYLOAD, 2)[::2]),
    "a key that is a text": item(key="k" * 16),
    "an offset before the beginning": item(offset=-5),
}


@pytest.mark.parametrize("poison", POISONED)
async def test_a_poisoned_item_ends_its_stream_and_no_other(poison: str) -> None:
    audio = [np.tile(fakes.speech(1, seed), 3) for seed in range(2)]
    async with fakes.running(EngineThread(fakes.build)) as client:
        wanted = [(await fakes.transcribe(client, "s", samples)).words for samples in audio]
    async with fakes.running(EngineThread(fakes.build)) as client:
        (link,) = client.supervisor.pool.links()
        ended: list[messages.Output] = []

        async def attack(count: int) -> None:
            if count % 4:
                return
            stream = await client.open(f"bad {count}")
            link.send(messages.Feed(stream.id, []), [POISONED[poison]])
            transcript = fakes.Transcript()
            await asyncio.wait_for(transcript.collect(stream), 5)
            ended.append(transcript.last)
            # The audio of the bad command is not to blame: it is sent again for other streams.
            other = await client.open(f"good {count}")
            await other.feed_items([item()])
            await other.abort()
            await transcript.collect(other)

        said = await asyncio.gather(
            fakes.transcribe(client, "a", audio[0], between=attack), fakes.transcribe(client, "b", audio[1])
        )
        assert client.supervisor.pool.links() == [link] and link.lost is None
        assert client.metrics().restarts == 0 and client.metrics().input_cache.repairs == 0
        await fakes.until(lambda: client.capacity().used == 0)
    assert [transcript.words for transcript in said] == wanted
    assert all(isinstance(transcript.last, Closed) for transcript in said)
    assert ended and all(isinstance(output, Failed) and output.code == "BadItem" for output in ended)


@pytest.mark.parametrize("options", [{"language": ["en", "de"]}, {"language": None}, {5: "x"}, {"language": b"en"}])
async def test_options_that_are_no_texts_are_refused_at_once(options: Any) -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        with pytest.raises(ValueError, match="must be strings"):
            await client.open("a", options=options)
        await (await client.open("a", options={"language": "en"})).abort()


@pytest.mark.parametrize(("stream", "language"), [("a", "\ud800"), ("\ud800", "en")])
async def test_a_text_without_bytes_is_refused_and_leaves_nothing_behind(stream: str, language: str) -> None:
    async with fakes.running(EngineThread(fakes.build)) as client:
        with pytest.raises(ValueError, match="cannot be sent"):
            await asyncio.wait_for(client.open(stream, options={"language": language}), 5)
        assert client.metrics().restarts == 0
        await check_it_works(client)


async def check_it_works(client: EngineClient) -> None:
    assert isinstance((await fakes.transcribe(client, "after", fakes.speech(1, 1))).last, Closed)
