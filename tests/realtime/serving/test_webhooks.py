"""Queues of webhooks: order, retries, bounds and counts, for any outcomes of the attempts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.handoff import AdoptedSession
from realtime.config import AuthConfig, Config, ConfigError, WebhooksConfig, load_config
from realtime.errors import UnreadableValue
from realtime.serving import webhooks
from realtime.serving.checked_fetch import NotAllowed
from realtime.serving.handoff import encode_live
from realtime.serving.metrics import Metrics
from realtime.serving.session_factory import GatewayServices, SessionFactory
from realtime.serving.webhooks import (
    FINAL,
    MAX_REQUESTS_AT_ONCE,
    MAX_URLS_PER_KEY,
    Webhooks,
    WebhookSender,
    WebhookStore,
)
from realtime.session.events import Completed, TimedWord
from realtime.session.settings import Settings
from tests.realtime.gateway_doubles import FakeEngine
from tests.realtime.serving.test_handoff_saved_session import SAVED
from tests.waiting import stays, until
from tests.webhook_receiver import hang, receiver

SECRET = "what-webhooks-are-signed-with"
URL = "http://hooks.example/final"
# The answer is lost: the receiver has the event, and the server does not know.
LOST = "lost"
OUTCOMES = [200, 204, 500, 302, 404, 410, LOST, OSError("refused"), TimeoutError(), NotAllowed("no")]


def hub(sender: WebhookSender | None = None, urls: Sequence[str] = (URL,), **changes: Any) -> Webhooks:
    values = {"on_final": tuple(urls), "secret": SECRET, "hosts": ("127.0.0.1:*",), "per_session": True, **changes}
    config = Config(webhooks=WebhooksConfig(**values))
    return Webhooks(config, Metrics(), lambda: 1_700_000_000.0, lambda key: f"key {key}", sender)


def count(of: Webhooks, name: str, **labels: str) -> float:
    return of.metrics.registry.get_sample_value(f"tickertape_webhook_{name}", labels) or 0.0


def dropped(of: Webhooks) -> float:
    families = [family for family in of.metrics.registry.collect() if family.name == "tickertape_webhook_dropped"]
    return sum(sample.value for family in families for sample in family.samples if sample.name.endswith("_total"))


def final(number: int, text: str = "") -> Completed:
    said = text or f"word {number}"
    return Completed(f"item_{number}", said, (), 16_000 * number, 16_000 * number + 8000, 1, 0.0)


class Scripted(WebhookSender):
    """Attempts end as the script says, each when it is let; without a script they succeed."""

    def __init__(self, outcomes: Sequence[Any]) -> None:
        super().__init__()
        self.outcomes = list(outcomes)
        self.permits = asyncio.Semaphore(0)
        # What the receiver has got, and what the server knows that it has got.
        self.got: list[dict[str, Any]] = []
        self.acknowledged: list[dict[str, Any]] = []
        self.running: dict[str, int] = defaultdict(int)

    async def send(self, url: str, hosts: Sequence[str], headers: dict[str, str], body: bytes, seconds: float) -> int:
        fields = json.loads(body)
        session = fields["data"]["session_id"]
        self.running[session] += 1
        assert self.running[session] == 1, "two events of one session are sent at once"
        try:
            await self.permits.acquire()
            outcome = self.outcomes.pop(0) if self.outcomes else 200
            if outcome == LOST or (isinstance(outcome, int) and outcome < 300):
                self.got.append(fields)
            if outcome == LOST:
                raise TimeoutError
            if isinstance(outcome, Exception):
                raise outcome
            if outcome < 300:
                self.acknowledged.append(fields)
            return int(outcome)
        finally:
            self.running[session] -= 1


# A final of a session, or attempts that may end.
ACTIONS = st.one_of(st.tuples(st.just("final"), st.integers(0, 2)), st.tuples(st.just("attempts"), st.integers(1, 4)))


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=30),
    outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=25),
    most=st.integers(1, 6),
)
def test_each_event_comes_at_least_once_in_order_or_is_counted(
    actions: list[tuple[str, int]], outcomes: list[Any], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webhooks, "FIRST_WAIT_S", 0.0)
        asyncio.run(deliver(actions, outcomes, most))


async def deliver(actions: list[tuple[str, int]], outcomes: list[Any], most: int) -> None:
    sender = Scripted(outcomes)
    of = hub(sender, queue_events=most)
    sessions = [of.of_session("address x", f"sess_{number}", 16_000) for number in range(3)]
    posted: dict[str, list[str]] = defaultdict(list)
    number = 0
    for kind, value in actions:
        if kind == "attempts":
            for _ in range(value):
                sender.permits.release()
                for _ in range(4):
                    await asyncio.sleep(0)
        else:
            number += 1
            posted[f"sess_{value}"].append(f"item_{number}")
            sessions[value].on_event(final(number), Settings())
            assert of.queued <= most
    for session in sessions:
        session.close(0.0)
    for _ in range(2 * (len(outcomes) + number) + 5):
        sender.permits.release()
    await until(lambda: of.queued == 0)
    await until(lambda: of.endpoints == 0)
    missing = 0
    for session, items in posted.items():
        got = [body["data"]["item_id"] for body in sender.got if body["data"]["session_id"] == session]
        # In order, with repetitions of an event only before the next one.
        assert [items.index(item) for item in got] == sorted(items.index(item) for item in got)
        known = [body for body in sender.acknowledged if body["data"]["session_id"] == session]
        # What was delivered says how many events before it were not.
        reached = 0
        for body in known:
            place = items.index(body["data"]["item_id"])
            assert body["dropped"] == place - reached
            reached = place + 1
        missing += len(items) - len(known)
    assert dropped(of) == missing
    assert count(of, "delivered_total") == len(sender.acknowledged)


async def test_memory_is_bounded_by_bytes_and_a_final_that_is_too_large_is_counted() -> None:
    of = hub(Scripted([]), queue_bytes=20_000)
    session = of.of_session("address x", "sess", 16_000)
    for number in range(1000):
        session.on_event(final(number, "x" * 2000), Settings())
        assert of.queued_bytes <= 20_000
    session.on_event(final(1000, "x" * 30_000), Settings())
    assert count(of, "dropped_total", reason="too_large") == 1
    assert of.queued + dropped(of) == 1001
    assert len(asyncio.all_tasks()) <= 3
    await of.close(0.0)
    assert dropped(of) == 1001 and of.queued == 0


async def test_expired_events_are_dropped_without_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Scripted([500])
    of = hub(sender, retry_s=0.0)
    session = of.of_session("address x", "sess", 16_000)
    for number in range(3):
        session.on_event(final(number), Settings())
    await until(lambda: count(of, "dropped_total", reason="expired") == 3)
    assert not sender.got and sender.outcomes == [500]


async def test_sessions_do_not_wait_for_each_other_and_a_url_has_few_requests_at_once() -> None:
    async with receiver() as hook:
        of = hub(urls=[hook.url()], timeout_s=60.0)
        hook.replies = [hang]
        blocked = of.of_session("address x", "sess_blocked", 16_000)
        blocked.on_event(final(1), Settings())
        await until(lambda: hook.heads)
        others = [of.of_session("address x", f"sess_{number}", 16_000) for number in range(30)]
        for session in others:
            session.on_event(final(1), Settings())
            session.on_event(final(2), Settings())
        await until(lambda: len(hook.taken) == 60)
        assert hook.most_at_once <= MAX_REQUESTS_AT_ONCE
        await of.close(0.0)


async def test_sessions_may_name_a_bounded_number_of_urls() -> None:
    of = hub(Scripted([]), urls=[])
    sessions = [of.of_session("address x", f"sess_{number}", 16_000) for number in range(100)]
    faults = [session.change(f"http://127.0.0.1/{number}") for number, session in enumerate(sessions)]
    assert faults.count(None) == MAX_URLS_PER_KEY
    assert {fault.code for fault in faults if fault is not None} == {"too_many_webhooks"}
    # A URL that is in use is taken by further sessions, and a session that ends makes room.
    assert sessions[-1].change("http://127.0.0.1/0") is None
    sessions[1].close(0.0)
    assert sessions[50].change("http://127.0.0.1/other") is None
    assert sessions[51].change("http://127.0.0.1/another") is not None
    for session in sessions:
        session.close(0.0)
    assert of.endpoints == 0


async def test_urls_that_fail_make_room_for_others_when_their_sessions_have_ended(tmp_path: Path) -> None:
    async with receiver() as failing, receiver() as good, receiver() as hanging:
        failing.usual, hanging.usual = 500, hang
        of = hub(urls=[failing.url("/operator")], folder=str(tmp_path), timeout_s=60.0)
        await of.start()
        urls = [hanging.url(), *(failing.url(f"/{number}") for number in range(1, MAX_URLS_PER_KEY))]
        sessions = [of.of_session("address x", f"sess_{number}", 16_000) for number in range(MAX_URLS_PER_KEY)]
        for session, url in zip(sessions, urls, strict=True):
            assert session.change(url) is None
            session.on_event(final(1), Settings())
        # All but the one that hangs: those of the clients, and the one of the operator.
        await until(lambda: sum(one._is_failing for one in of._endpoints.values()) == MAX_URLS_PER_KEY)
        late = of.of_session("address x", "sess_late", 16_000)
        refused = late.change(good.url())
        assert refused is not None and refused.code == "too_many_webhooks", "all places have sessions"
        # One that has not failed, one with an open session, and then the oldest that makes room.
        for session in (sessions[0], *sessions[2:]):
            session.close(0.0)
        assert late.change(good.url()) is None
        assert count(of, "dropped_total", reason="too_many_webhooks") == dropped(of) == 1
        left = {url for _, url in of._endpoints}
        assert urls[2] not in left and {*urls} - {urls[2]} <= left
        late.on_event(final(1), Settings())
        await until(lambda: count(of, "delivered_total") == 1)
        assert len(good.taken) == 1
        waiting = of.queued
        await of.close(0.0)
        store = WebhookStore(str(tmp_path))
        assert len(await store.open()) == waiting
        assert await store.close(30.0)


async def test_a_url_that_fails_makes_room_for_another_key_when_all_places_are_taken() -> None:
    sender = Scripted([500])
    hooks = WebhooksConfig(secret=SECRET, hosts=("*",), per_session=True, urls=1)
    config = Config(auth=AuthConfig(keys=("a-long-secret-key", "another-secret-key")), webhooks=hooks)
    of = Webhooks(config, Metrics(), lambda: 1_700_000_000.0, lambda key: f"key {key}", sender)
    one = of.of_session("key a-long-secret-key", "sess_one", 16_000)
    other = of.of_session("key another-secret-key", "sess_other", 16_000)
    assert one.change(URL) is None
    one.on_event(final(1), Settings())
    one.close(0.0)
    assert other.change(URL) is not None
    sender.permits.release()
    await until(lambda: count(of, "failures_total") == 1)
    assert other.change(URL) is None
    assert of.endpoints == 1 and count(of, "dropped_total", reason="too_many_webhooks") == 1
    await of.close(0.0)


async def test_one_caller_of_a_server_without_keys_cannot_take_all_places() -> None:
    of = hub(Scripted([]), urls=[], hosts=("*",))
    greedy = [of.of_session("address one", f"sess_{number}", 16_000) for number in range(of.settings.urls)]
    faults = [session.change(f"http://{number}.example/") for number, session in enumerate(greedy)]
    assert [fault is None for fault in faults] == [number < MAX_URLS_PER_KEY for number in range(len(greedy))]
    other = of.of_session("address other", "sess_other", 16_000)
    assert other.change("http://other.example/") is None
    # A URL that another caller has named is counted once.
    assert other.change("http://0.example/") is None
    await of.close(0.0)


@pytest.mark.parametrize("host", ["a..example.org", ".example.org", "x" * 64 + ".example.org"])
async def test_a_url_whose_host_cannot_be_looked_up_is_refused_to_clients_and_operators(host: str) -> None:
    of = hub(Scripted([]), urls=[], hosts=("*",))
    fault = of.of_session("address x", "sess", 16_000).change(f"http://{host}/")
    assert fault is not None and fault.code == "host_not_allowed"
    assert of.endpoints == 0
    with pytest.raises(ConfigError, match=r"webhooks\.on_final: entry 1 must be"):
        load_config(None, {"TICKERTAPE_WEBHOOKS_ON_FINAL": f"http://{host}/", "TICKERTAPE_WEBHOOKS_SECRET": SECRET})


async def test_a_session_that_cannot_be_adopted_leaves_no_webhook() -> None:
    of = hub(Scripted([]))
    services = GatewayServices(metrics=of.metrics, webhooks=of)
    maker = SessionFactory(FakeEngine(), Config(), lambda: 0.0, lambda: 1_700_000_000.0, services)
    base = encode_live(msgspec.structs.replace(SAVED, caller="address x"))
    with pytest.raises(UnreadableValue, match="entry"):
        maker.adopt("sess", "address x", AdoptedSession(2, base, [], [b"not an entry"]))
    assert of.endpoints == 0


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "after a restart"])
async def test_a_url_that_was_removed_gets_nothing_more_unless_a_client_has_named_it(
    restarts: bool, tmp_path: Path
) -> None:
    sender = Scripted([])
    of = hub(sender, hosts=("*",), folder=str(tmp_path))
    await of.start()
    silent, naming = (of.of_session("address x", name, 16_000) for name in ("sess_silent", "sess_naming"))
    assert naming.change(URL) is None
    silent.on_event(final(1), Settings())
    naming.on_event(final(1), Settings())
    if restarts:
        await of.close(0.0)
        sender = Scripted([])
        of = hub(sender, hosts=("*",), folder=str(tmp_path), urls=[])
        await of.start()
    else:
        # Before the first attempts: they wait for the next turn of the event loop.
        object.__setattr__(of.settings, "on_final", ())
        of.reloaded()
        silent.on_event(final(2), Settings())
        naming.on_event(final(2), Settings())
    for _ in range(8):
        sender.permits.release()
    await until(lambda: of.queued == 0)
    each = 1 if restarts else 2
    assert [body["data"]["session_id"] for body in sender.got] == ["sess_naming"] * each
    assert count(of, "dropped_total", reason="not_allowed") == dropped(of) == each
    await of.close(0.0)


async def test_events_of_a_key_that_was_removed_are_dropped_for_that_reason(caplog: pytest.LogCaptureFixture) -> None:
    sender = Scripted([])
    keys = AuthConfig(keys=("a-long-secret-key", "another-secret-key"))
    config = Config(auth=keys, webhooks=WebhooksConfig(on_final=(URL,), secret=SECRET))
    of = Webhooks(config, Metrics(), lambda: 1_700_000_000.0, lambda key: f"key {key}", sender)
    session = of.of_session("key a-long-secret-key", "sess", 16_000)
    session.on_event(final(1), Settings())
    object.__setattr__(config.auth, "keys", config.auth.keys[1:])
    of.reloaded()
    await until(lambda: of.queued == 0)
    assert count(of, "dropped_total", reason="key_removed") == dropped(of) == 1
    assert "its key was removed from auth.keys" in caplog.text and not sender.got


async def test_pauses_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    sender = Scripted([500] * 12)
    of = hub(sender)
    monkeypatch.setattr(of, "pause", pause)
    for _ in range(13):
        sender.permits.release()
    of.of_session("address x", "sess", 16_000).on_event(final(1), Settings())
    await until(lambda: sender.acknowledged)
    wanted = [min(2.0**number, 60.0) for number in range(12)]
    assert all(0.5 * most <= waited <= most for waited, most in zip(paused, wanted, strict=True))
    assert len(set(paused)) == 12


async def test_what_waits_for_a_key_that_is_gone_is_dropped(tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = hub(Scripted([]), folder=folder)
    await before.start()
    before.of_session("address x", "sess", 16_000).on_event(final(1), Settings())
    await before.close(0.0)
    assert dropped(before) == 0
    after = hub(Scripted([]), folder=folder, secret="another-secret-of-the-server")
    await after.start()
    assert count(after, "dropped_total", reason="key_removed") == 1
    await after.close(0.0)
    again = hub(Scripted([]), folder=folder)
    await again.start()
    assert again.queued == 0
    await again.close(0.0)


async def test_the_file_has_what_waits_and_nothing_that_was_dropped(tmp_path: Path) -> None:
    of = hub(Scripted([]), folder=str(tmp_path), queue_bytes=4096)
    await of.start()
    session = of.of_session("address x", "sess", 16_000)
    for number in range(6):
        session.on_event(final(number), Settings())
    await until(lambda: of._store is not None and not of._store.unwritten)
    session.on_event(final(6, "x" * 3000), Settings())
    waiting = of.queued
    assert waiting < 6
    await of.close(0.0)
    store = WebhookStore(str(tmp_path))
    assert len(await store.open()) == waiting
    assert await store.close(30.0)


async def test_queues_of_several_processes_are_taken_over_whole(tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = [hub(Scripted([]), folder=folder, queue_events=3) for _ in range(3)]
    for number, of in enumerate(before):
        await of.start()
        for item in range(3):
            of.of_session("address x", f"sess_{number}", 16_000).on_event(final(item), Settings())
    for of in before:
        await of.close(0.0)
        assert dropped(of) == 0
    after = hub(Scripted([]), folder=folder, queue_events=3)
    await after.start()
    assert (after.queued, dropped(after)) == (9, 0)
    # The bound holds again with the next event.
    after.of_session("address x", "sess_new", 16_000).on_event(final(1), Settings())
    assert (after.queued, dropped(after)) == (3, 7)
    await after.close(0.0)


async def test_a_kept_event_that_is_too_large_now_leaves_the_file_and_is_told(tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = hub(Scripted([]), folder=folder)
    await before.start()
    for name in ("sess", "other"):
        session = before.of_session("address x", name, 16_000)
        session.on_event(final(1, "x" * 5000), Settings())
        if name == "sess":
            session.on_event(final(2), Settings())
    await before.close(0.0)
    sender = Scripted([])
    after = hub(sender, folder=folder, queue_bytes=4096)
    await after.start()
    assert count(after, "dropped_total", reason="too_large") == 2
    sender.permits.release()
    await until(lambda: after.endpoints == 0)
    assert [(body["data"]["item_id"], body["dropped"]) for body in sender.acknowledged] == [("item_2", 1)]
    await after.close(0.0)
    store = WebhookStore(folder)
    assert await store.open() == []
    assert await store.close(30.0)


async def test_a_disk_that_fails_costs_only_the_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Scripted([])
    of = hub(sender, folder=str(tmp_path))
    await of.start()

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(WebhookStore, "_write", full)
    session = of.of_session("address x", "sess", 16_000)
    for number in range(3):
        session.on_event(final(number), Settings())
    await until(lambda: "in memory only" in caplog.text)
    for _ in range(3):
        sender.permits.release()
    await until(lambda: len(sender.acknowledged) == 3)
    await of.close(0.0)


def test_nothing_of_an_account_shows_its_secret() -> None:
    account = hub(Scripted([])).account_of("address x")
    assert account is not None and "secret" not in repr(account) and str(account.secret) not in repr(account)


async def test_speaker_is_told_only_if_the_client_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Scripted([])
    of = hub(sender)
    said = replace(final(1), words=(TimedWord("word", 0, 10, speaker=0), TimedWord(" 1", 10, 20, speaker=0)))
    session = of.of_session("address x", "sess", 16_000)
    session.on_event(said, Settings())
    session.on_event(said, Settings(speakers=True))
    session.on_event(replace(said, transcript=" "), Settings())
    for _ in range(4):
        sender.permits.release()
    await until(lambda: len(sender.acknowledged) == 2)
    assert ["speaker" in body["data"] for body in sender.acknowledged] == [False, True]
    await stays(lambda: len(sender.acknowledged) == 2, 0.05)
    assert {body["type"] for body in sender.acknowledged} == {FINAL}
