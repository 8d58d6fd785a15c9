"""Webhooks of several workers: each delivers for its sessions, and the next one takes over what a killed one left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from realtime.config import Secret, WebhooksConfig
from tests.engine import fakes
from tests.realtime.workers import engines
from tests.realtime.workers.clients import SpeakingClient
from tests.realtime.workers.test_worker import CONFIG, get, kill, url_of, workers
from tests.webhook_receiver import receiver

pytestmark = pytest.mark.timeout(240)
SESSIONS = 4


async def test_workers_deliver_for_their_sessions_also_what_a_killed_worker_left(tmp_path: Path) -> None:
    async with receiver() as hook:
        secret, folder = Secret("a-secret-of-the-server"), str(tmp_path / "queue")
        hooks = WebhooksConfig(on_final=(Secret(hook.url()),), secret=secret, folder=folder)
        hook.usual = 500
        async with workers(replace(CONFIG, webhooks=hooks)) as parent:
            speakers = [SpeakingClient(lambda: url_of(parent), engines.talk(8, 1)) for _ in range(SESSIONS)]
            await asyncio.gather(*(speaker.speak() for speaker in speakers))
            files = await asyncio.to_thread(lambda: sorted(path.name for path in (tmp_path / "queue").glob("*.sqlite")))
            assert files == ["webhooks-0.sqlite", "webhooks-1.sqlite"]
            # The first event of every session has been tried twice, a pause apart: what waits is in the files.
            await fakes.until(lambda: len(hook.heads) >= 2 * SESSIONS and len(firsts(hook.heads)) == SESSIONS)
            for number in list(parent.workers):
                kill(parent, number)
            hook.usual = 200
            texts = sorted(text for speaker in speakers for text in speaker.text)
            await fakes.until(lambda: sorted(set(hook.texts)) == sorted(set(texts)) and len(hook.texts) >= len(texts))
            for session in {body["data"]["session_id"] for body in hook.taken}:
                finals = [body["data"] for body in hook.taken if body["type"] == "session.final"]
                starts = [final["start"] for final in finals if final["session_id"] == session]
                assert starts == sorted(starts) and len(starts) == 4
            await fakes.until(lambda: len(parent.workers) == 2)
            await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
            # The metrics are those of both workers together.
            async with asyncio.timeout(60):
                while "tickertape_webhook_queue_events 0.0" not in await get(parent, "/metrics"):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


def firsts(heads: list[dict[str, str]]) -> set[str]:
    """The ids of events that were tried twice."""
    ids = [head["webhook-id"] for head in heads]
    return {one for one in ids if ids.count(one) >= 2}
