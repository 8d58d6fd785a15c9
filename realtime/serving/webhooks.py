"""Webhooks: queues finals and ends of sessions, and delivers them to the URLs of API keys and clients, with retries.

`Webhooks` owns the queues of this gateway process. Every URL of every key has an `Endpoint` with a bounded queue. The
events of a session are delivered in order, and retried with growing pauses until they are too old; sessions do not wait
for each other, nor do URLs. When a queue is full, its oldest event is dropped and counted, and the next event of the
same session says how many are missing. A session only puts events into queues (`SessionWebhooks`), so a receiver cannot
slow it.

`WebhookSender` sends one webhook: a signed POST to a checked address, without redirects, within a deadline. The
signature is that of the Standard Webhooks scheme. The URL may come from a client, so host and address are checked by
the rules of `checked_fetch.py`, and the connection is made to the address that was checked. Only the status of the
response counts; a bounded part of the rest is read and dropped.

`WebhookStore` keeps webhooks that wait for delivery in an SQLite file, so that they survive a restart of the gateway.
It is used if `webhooks.folder` is set. Every gateway process has a file of its own in that folder: the first one that
it can lock. At its start it also takes over the webhooks in files whose processes have ended. The event loop never
waits for the disk: changes are collected, and a thread writes them in batches. What is written survives the end of the
process, but not a power failure.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import random
import socket
import sqlite3
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from realtime.config import Config, hook_of
from realtime.errors import ClientFault
from realtime.serving.checked_fetch import (
    NotAllowed,
    ResolvedAddress,
    check_addresses,
    check_url,
    port_of,
    request_target,
)
from realtime.serving.daemon_thread import in_thread
from realtime.serving.metrics import Metrics
from realtime.session.events import Completed, ServerEvent
from realtime.session.formatting import FinalFormatter
from realtime.session.settings import Settings
from realtime.session.speakers import letter_name, speaker_of

log = logging.getLogger("tickertape.webhooks")

FINAL, ENDED = "session.final", "session.ended"
# Seconds before an event is sent again; doubles with each attempt. The pause is 50 to 100 % of it, by chance, so that
# sessions do not all come back at once.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
# Longest pause while the server stops.
STOPPING_WAIT_S = 0.5
# Requests to one URL at a time.
MAX_REQUESTS_AT_ONCE = 4
# URLs that the sessions of one key, or of one address on a server without keys, may name at a time; `webhooks.urls` is
# the limit of all.
MAX_URLS_PER_KEY = 16
# Bytes that an event counts in a queue in addition to its data.
EVENT_BYTES = 500
# The last second of the year 9999, the latest that `datetime` can represent.
LAST_SECOND = 253402300799
GONE = 410
# While the server stops: seconds between two checks of the queues, and for writing the last webhooks into the file.
STOPPING_POLL_S = 0.02
CLOSE_STORE_S = 2.0

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Account:
    """An API key, or all callers of a server without keys: its URLs in the configuration, and its signing secret. `id`
    names it in the store."""

    id: str
    secret: bytes
    urls: tuple[str, ...] = ()
    # Those of `urls` that are for this key alone.
    own_urls: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Account({self.id})"


@dataclass(slots=True, eq=False)
class _Event:
    """An event that waits. `dropped` events of its session were dropped before it. `is_named`: the client has named
    the URL."""

    number: int
    session: str
    kind: str
    at: float
    data: bytes
    expires_at: float
    is_named: bool
    dropped: int = 0

    @property
    def size(self) -> int:
        return len(self.data) + EVENT_BYTES


@dataclass(slots=True, eq=False)
class _Lane:
    """The events of one session for one URL, in order. `lost`: number of events that were dropped after the last one
    in `events`. `is_open`: the session may have more events."""

    events: deque[_Event] = field(default_factory=deque)
    lost: int = 0
    is_open: bool = False
    task: asyncio.Task[None] | None = None


class Endpoint:
    """One URL of one key: its queue, and the tasks that deliver it."""

    def __init__(self, hub: Webhooks, account: Account, url: str, named_by: str = "") -> None:
        """`named_by` is the caller that was the first to name the URL."""
        self.account = account
        self.url = url
        self.named_by = named_by
        self.bytes = 0
        # Without path and query, which may contain a token.
        self.shown = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
        self._hub = hub
        self._lanes: dict[str, _Lane] = {}
        # All events in the order of their arrival, and those that are being sent.
        self._waiting: dict[int, _Event] = {}
        self._in_flight: set[int] = set()
        self._slots = asyncio.Semaphore(MAX_REQUESTS_AT_ONCE)
        # Since the last delivery: whether an attempt has failed, and the number of events that were dropped.
        self._is_failing = False
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._lanes

    def attach(self, session: str) -> None:
        """The session will have events."""
        self._lanes.setdefault(session, _Lane()).is_open = True

    def detach(self, session: str) -> None:
        lane = self._lanes.get(session)
        if lane is not None:
            lane.is_open = False
            self._drop_unused(session, lane)

    def put(self, event: _Event, from_store: bool = False) -> None:
        """Queue an event. If the queue is full, the oldest is dropped. `from_store`: it comes from the file, where the
        queues of several processes may have waited; then none is dropped until there is a new one."""
        lane = self._lanes.setdefault(event.session, _Lane())
        settings = self._hub.settings
        if event.size > settings.queue_bytes:
            lane.lost += event.dropped + 1
            self._hub.unstore(event)
            self._count_drop("too_large")
            self._drop_unused(event.session, lane)
            return
        event.dropped += lane.lost
        lane.lost = 0
        lane.events.append(event)
        self._waiting[event.number] = event
        self.bytes += event.size
        self._hub.store(self, event)
        while not from_store and (len(self._waiting) > settings.queue_events or self.bytes > settings.queue_bytes):
            # The event that was just put is never being sent, so there is one to drop.
            oldest = next(other for other in self._waiting.values() if other.number not in self._in_flight)
            self._drop(oldest, "queue_full")
        if lane.task is None and lane.events:
            lane.task = asyncio.create_task(self._deliver_all(event.session, lane), name=f"webhook of {event.session}")

    @property
    def can_make_room(self) -> bool:
        """Whether another URL may take its place: its receiver fails, and no open session uses it."""
        return self._is_failing and not any(lane.is_open for lane in self._lanes.values())

    def drop_all(self, reason: str, problem: str = "") -> None:
        """Drop all events: the server stops, or the place is needed."""
        for event in list(self._waiting.values()):
            self._drop(event, reason, problem)

    def cancel(self) -> list[asyncio.Task[None]]:
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _deliver_all(self, session: str, lane: _Lane) -> None:
        wait_s = FIRST_WAIT_S
        try:
            while lane.events:
                event = lane.events[0]
                async with self._slots:
                    if not lane.events or lane.events[0] is not event:
                        continue  # it was dropped in the meantime
                    if asyncio.get_running_loop().time() >= event.expires_at:
                        self._drop(event, "expired")
                        continue
                    self._in_flight.add(event.number)
                    try:
                        problem, reason = await self._attempt(event)
                    finally:
                        self._in_flight.discard(event.number)
                if not problem:
                    wait_s = FIRST_WAIT_S
                    self._delivered(event)
                elif reason:
                    self._drop(event, reason, problem)
                else:
                    self._failed(problem)
                    await self._hub.pause(wait_s * random.uniform(0.5, 1.0))
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            lane.task = None
            self._drop_unused(session, lane)

    async def _attempt(self, event: _Event) -> tuple[str, str]:
        """Send an event. Returns the problem, empty if there was none, and the reason if it will never go away."""
        if (refusal := self._hub.refusal(self, event)) is not None:
            return refusal
        try:
            status = await self._hub.send(self, event)
        except NotAllowed as error:
            return str(error), "not_allowed"
        except TimeoutError:
            return "no answer in time", ""
        except OSError as error:
            return str(error) or type(error).__name__, ""
        except Exception:
            log.exception("webhook to %s failed", self.shown)
            return "internal error", ""
        if 200 <= status < 300:
            return "", ""
        redirects = ", and redirects are not followed" if 300 <= status < 400 else ""
        return f"the receiver answered {status}{redirects}", "gone" if status == GONE else ""

    def _delivered(self, event: _Event) -> None:
        self._remove(event)
        self._hub.metrics.webhook_delivered.inc()
        if self._is_failing or self._dropped:
            log.warning("webhook to %s works again; %d events were dropped", self.shown, self._dropped)
        self._is_failing, self._dropped = False, 0

    def _failed(self, problem: str) -> None:
        self._hub.metrics.webhook_failures.inc()
        if not self._is_failing:
            self._is_failing = True
            log.warning("webhook to %s fails and is tried again: %s", self.shown, problem)

    def _drop(self, event: _Event, reason: str, problem: str = "") -> None:
        """Drop an event that waits; the next one of its session will say so."""
        lane = self._lanes[event.session]
        following = lane.events.index(event) + 1
        if following < len(lane.events):
            lane.events[following].dropped += event.dropped + 1
            self._hub.store(self, lane.events[following])
        else:
            lane.lost += event.dropped + 1
        self._remove(event)
        self._count_drop(reason, problem)

    def _count_drop(self, reason: str, problem: str = "") -> None:
        self._hub.metrics.webhook_dropped.labels(reason).inc()
        if not self._dropped:
            # Once until an event is delivered again.
            log.warning("webhook to %s: events are dropped: %s", self.shown, problem or reason)
        self._dropped += 1

    def _remove(self, event: _Event) -> None:
        self._lanes[event.session].events.remove(event)
        del self._waiting[event.number]
        self.bytes -= event.size
        self._hub.unstore(event)

    def _drop_unused(self, session: str, lane: _Lane) -> None:
        if not lane.is_open and not lane.events and lane.task is None and self._lanes.get(session) is lane:
            del self._lanes[session]
            self._hub.drop_unused(self)


class SessionWebhooks:
    """The webhooks of one session: those of its key, and the one that its client has named."""

    def __init__(
        self,
        hub: Webhooks | None,
        account: Account | None,
        session: str,
        sample_rate: int,
        caller: str = "",
        finals: FinalFormatter | None = None,
    ) -> None:
        # Whether the client may change the URL; one with a client secret has the URL of its secret.
        self.may_change = True
        # None: webhooks are off.
        self._hub_and_account = None if hub is None or account is None else (hub, account)
        self._session = session
        self._rate = sample_rate
        self._caller = caller
        self._finals = finals or FinalFormatter()
        # The URLs of the key, and the one of the client.
        self._urls = () if self._hub_and_account is None else self._hub_and_account[1].urls
        self._url: str | None = None
        self._is_closed = False
        self._attach(*self._urls)

    def change(self, url: str | None) -> ClientFault | None:
        """Send to this URL too, or to none. Returns the fault for the client if that is not allowed; then the session
        keeps its URL."""
        if url == self._url or self._is_closed:
            return None
        if url is not None:
            if self._hub_and_account is None or not self._hub_and_account[0].settings.per_session:
                text = "Webhooks of sessions are off on this server; its operator can set webhooks.per_session."
                return _refused("webhooks_off", text)
            hub, account = self._hub_and_account
            if (fault := hub.check(account, url, self._caller)) is not None:
                return fault
            self._attach(url)
        self._detach_client_url()
        self._url = url
        return None

    def on_event(self, event: ServerEvent, settings: Settings) -> None:
        """An event was sent to the client; its final text is sent, as the client has asked for it."""
        if not isinstance(event, Completed) or not self._all or not event.transcript.strip():
            return
        final = self._finals.format(event.transcript, event.words, settings.formatting)
        data: dict[str, Any] = {
            "session_id": self._session,
            "item_id": event.item_id,
            "text": final.text.strip(),
            "start": round(event.start / self._rate, 2),
            "end": round(event.end / self._rate, 2),
        }
        if settings.labels_speakers and (speaker := speaker_of(event.words)) is not None:
            data["speaker"] = letter_name(speaker, settings.speaker_names)
        self._post(FINAL, data)

    def close(self, seconds: float, moves: bool = False) -> None:
        """The session has ended here, after this many seconds of audio. `moves`: another process continues it."""
        if self._is_closed:
            return
        self._is_closed = True
        if seconds and not moves:
            self._post(ENDED, {"session_id": self._session, "seconds": round(seconds, 2)})
        self._detach_client_url()
        self._detach(*self._urls)

    @property
    def _all(self) -> dict[str, bool]:
        """All URLs, and whether the client has named them."""
        return dict.fromkeys(self._urls, False) | ({} if self._url is None else {self._url: True})

    def _post(self, kind: str, data: dict[str, Any]) -> None:
        if self._hub_and_account is not None and self._all:
            hub, account = self._hub_and_account
            hub.post(account, self._all, self._session, kind, _encode(data))

    def _detach_client_url(self) -> None:
        """Leave the URL of the client."""
        if self._url is not None and self._url not in self._urls:
            self._detach(self._url)
        self._url = None

    def _attach(self, *urls: str) -> None:
        if self._hub_and_account is not None:
            hub, account = self._hub_and_account
            for url in urls:
                hub.endpoint(account, url, self._caller).attach(self._session)

    def _detach(self, *urls: str) -> None:
        if self._hub_and_account is not None:
            hub, account = self._hub_and_account
            for url in urls:
                hub.endpoint(account, url).detach(self._session)


class Webhooks:
    """All webhooks of this gateway process."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        wall_clock: Callable[[], float],
        name_of: Callable[[str], str],
        sender: WebhookSender | None = None,
    ) -> None:
        """`name_of` is the name of the caller with an API key."""
        self.settings = config.webhooks
        self.metrics = metrics
        self._config = config
        self._wall_clock = wall_clock
        self._name_of = name_of
        self._sender = sender or WebhookSender()
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        self._number = 0
        self._stopping = asyncio.Event()
        self._is_closed = False
        self._store: WebhookStore | None = None
        # By the name of the caller. Without keys all callers are one account.
        self._accounts: dict[str, Account] = {}
        self.reloaded()
        metrics.webhook_queued.set_function(lambda: self.queued)
        metrics.webhook_queued_bytes.set_function(lambda: self.queued_bytes)

    @property
    def queued(self) -> int:
        """Events that wait."""
        return sum(map(len, self._endpoints.values()))

    @property
    def queued_bytes(self) -> int:
        return sum(endpoint.bytes for endpoint in self._endpoints.values())

    @property
    def endpoints(self) -> int:
        """URLs that have sessions or events."""
        return len(self._endpoints)

    def reloaded(self) -> None:
        """Take the keys and URLs of the configuration, for sessions that begin from now on."""
        hooks = [hook_of(entry.reveal()) for entry in self.settings.on_final]
        keys = [key.reveal() for key in self._config.auth.keys]
        self._accounts = {self._name_of(key) if key else "": self._account(key, hooks) for key in keys or [""]}

    def _account(self, key: str, hooks: Sequence[tuple[str, str]]) -> Account:
        secret = signing_secret(self.settings.secret.reveal(), key)
        urls = dict.fromkeys(url for of, url in hooks if of in ("", key))
        own = dict.fromkeys(url for of, url in hooks if of == key)
        return Account(hmac.digest(secret, b"account", "sha256").hex()[:16], secret, tuple(urls), tuple(own))

    def account_of(self, caller: str) -> Account | None:
        return self._accounts.get("" if caller.startswith("address ") else caller)

    def shown_secret(self, caller: str) -> str | None:
        """The secret that the webhooks of this caller's key are signed with."""
        account = self.account_of(caller)
        return None if account is None else shown_secret(account.secret)

    def of_session(
        self, caller: str, session: str, sample_rate: int, finals: FinalFormatter | None = None
    ) -> SessionWebhooks:
        return SessionWebhooks(self, self.account_of(caller), session, sample_rate, caller, finals)

    def check(self, account: Account, url: str, caller: str) -> ClientFault | None:
        """The fault if this caller of this account may not name this URL now. If no place is free, the oldest URL that
        only waits for a receiver that fails makes room: otherwise one client could take all places for `retry_s`."""
        try:
            check_url(url, self.settings.hosts, HOSTS_SETTING)
        except NotAllowed as error:
            return _refused(error.code, error.client_message)
        if (account.id, url) in self._endpoints:
            return None
        named = [one for one in self._endpoints.values() if self._is_named(one)]
        of_caller = [one for one in named if one.account.id == account.id and one.named_by == caller]
        if len(of_caller) < MAX_URLS_PER_KEY and len(named) < self.settings.urls:
            return None
        # A caller that has all of its places makes room itself.
        among = of_caller if len(of_caller) >= MAX_URLS_PER_KEY else named
        oldest = next((one for one in among if one.can_make_room), None)
        if oldest is None:
            return _refused("too_many_webhooks", "Too many webhook URLs are in use; try again later.")
        oldest.cancel()
        oldest.drop_all("too_many_webhooks", "it fails, and another webhook URL needs its place")
        del self._endpoints[oldest.account.id, oldest.url]
        return None

    def _is_named(self, endpoint: Endpoint) -> bool:
        """Whether only clients have named the URL: it is not, and was not, one of the configuration."""
        return endpoint.url not in endpoint.account.urls and not self._is_configured(endpoint)

    def endpoint(self, account: Account, url: str, caller: str = "") -> Endpoint:
        endpoint = self._endpoints.get((account.id, url))
        if endpoint is None:
            endpoint = self._endpoints[account.id, url] = Endpoint(self, account, url, caller)
        return endpoint

    def drop_unused(self, endpoint: Endpoint) -> None:
        place = (endpoint.account.id, endpoint.url)
        if endpoint.is_idle and self._endpoints.get(place) is endpoint:
            del self._endpoints[place]

    def post(self, account: Account, urls: Mapping[str, bool], session: str, kind: str, data: bytes) -> None:
        """Queue an event for these URLs. The values: whether the client has named them."""
        now, clock = self._wall_clock(), asyncio.get_running_loop().time()
        for url, is_named in urls.items():
            if self._is_closed:
                self.metrics.webhook_dropped.labels("shutdown").inc()
                continue
            self._number += 1
            expires_at = clock + self.settings.retry_s
            self.endpoint(account, url).put(_Event(self._number, session, kind, now, data, expires_at, is_named))

    async def send(self, endpoint: Endpoint, event: _Event) -> int:
        """Send an event once; returns the status. Raises NotAllowed, OSError and TimeoutError."""
        when = datetime.fromtimestamp(min(max(event.at, 0.0), LAST_SECOND), UTC).isoformat(timespec="milliseconds")
        fields = {
            "type": event.kind,
            "timestamp": when.replace("+00:00", "Z"),
            "dropped": event.dropped,
            "data": msgspec.Raw(event.data),
        }
        body = _encode(fields)
        # The same at each attempt, in each process: receivers know an event that they have already.
        message_id = (
            f"msg_{hmac.digest(endpoint.account.secret, event.data + event.kind.encode(), 'sha256').hex()[:32]}"
        )
        timestamp = int(self._wall_clock())
        headers = {
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(endpoint.account.secret, message_id, timestamp, body),
        }
        return await self._sender.send(endpoint.url, self._hosts(endpoint), headers, body, self.settings.timeout_s)

    def refusal(self, endpoint: Endpoint, event: _Event) -> tuple[str, str] | None:
        """Why this event may not be sent any more, in words and as it is counted; None if it may be sent."""
        if all(account.id != endpoint.account.id for account in self._accounts.values()):
            return "its key was removed from auth.keys", "key_removed"
        if self._is_configured(endpoint):
            return None
        if not event.is_named:
            return "its URL was removed from webhooks.on_final", "not_allowed"
        return None if self.settings.per_session else ("webhooks.per_session is off", "not_allowed")

    def _is_configured(self, endpoint: Endpoint) -> bool:
        """Whether the URL is one of the configuration now."""
        of_key = [account for account in self._accounts.values() if account.id == endpoint.account.id]
        return any(endpoint.url in account.urls for account in of_key)

    def _hosts(self, endpoint: Endpoint) -> tuple[str, ...]:
        """The hosts that this webhook may reach now. A URL of the configuration lists its own host."""
        if not self._is_configured(endpoint):
            return self.settings.hosts
        split = urlsplit(endpoint.url)
        return (*self.settings.hosts, f"[{split.hostname}]:{port_of(split)}")

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt; shorter when the server stops."""
        if self._stopping.is_set():
            await asyncio.sleep(min(seconds, STOPPING_WAIT_S))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    # The file

    async def start(self) -> None:
        """Open the file, if there is one, and deliver what is in it. Raises OSError."""
        if self.settings.folder is None:
            return
        store = WebhookStore(self.settings.folder)
        kept = await store.open()
        self._store, self._number = store, max((event.number for event in kept), default=0)
        accounts = {account.id: account for account in self._accounts.values()}
        now, clock = self._wall_clock(), asyncio.get_running_loop().time()
        sessions: dict[tuple[Endpoint, str], None] = {}
        for event in kept:
            account = accounts.get(event.account)
            if account is None:
                self.metrics.webhook_dropped.labels("key_removed").inc()
                store.remove(event.number)
                continue
            # A clock that was set back does not keep an event for longer.
            rest_s = self.settings.retry_s - max(0.0, now - event.at)
            endpoint = self.endpoint(account, event.url)
            # Open until all are queued, so that an event that is dropped is told by the next one.
            endpoint.attach(event.session)
            sessions[endpoint, event.session] = None
            fields = (event.number, event.session, event.kind, event.at, event.data)
            endpoint.put(_Event(*fields, clock + rest_s, bool(event.named), event.dropped), from_store=True)
        for endpoint, session in sessions:
            endpoint.detach(session)

    def store(self, endpoint: Endpoint, event: _Event) -> None:
        if self._store is not None:
            account, url = endpoint.account.id, endpoint.url
            row = (event.number, account, url, event.session, event.kind, event.at, event.dropped, event.data)
            self._store.add(StoredEvent(*row, event.is_named))

    def unstore(self, event: _Event) -> None:
        if self._store is not None:
            self._store.remove(event.number)

    async def close(self, seconds: float) -> None:
        """Deliver what waits, for at most this time. What is left then is in the file, or is dropped."""
        if self._is_closed:
            return
        self._stopping.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.queued:  # noqa: ASYNC110
                    await asyncio.sleep(STOPPING_POLL_S)
        self._is_closed = True
        tasks = [task for endpoint in self._endpoints.values() for task in endpoint.cancel()]
        store = self._store
        await asyncio.gather(*tasks, return_exceptions=True)
        left = self.queued
        if store is not None and await store.close(CLOSE_STORE_S):
            self._store = None
            if left:
                log.info("%d webhooks wait in %s for the next start", left, self.settings.folder)
            return
        for endpoint in list(self._endpoints.values()):
            endpoint.drop_all("shutdown")


def _refused(code: str, message: str) -> ClientFault:
    return ClientFault(code, message, param="session.on_final")


# Sending one webhook


HOSTS_SETTING = "webhooks.hosts"
SECRET_PREFIX = "whsec_"
# The longest line of a response, and how many interim responses (100 to 199) may come before the final one.
MAX_LINE_BYTES = 16 * 1024
MAX_INTERIM_ANSWERS = 5
MAX_HEADER_LINES = 100
# Bytes of the response's body that are read, so that the receiver can finish it, and the seconds for that.
MAX_BODY_BYTES = 64 * 1024
BODY_S = 1.0
# Addresses of a host name that are tried.
MAX_ADDRESSES = 4


def signing_secret(secret: str, key: str) -> bytes:
    """The secret that webhooks of one API key are signed with; an empty key stands for a server without keys. It is
    derived, so that a receiver of one key cannot sign for another."""
    return hmac.digest(secret.encode(), b"tickertape webhook\0" + key.encode("utf-8", "surrogateescape"), "sha256")


def shown_secret(secret: bytes) -> str:
    """The secret as libraries for Standard Webhooks read it."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()


class WebhookSender:
    """Sends to any number of URLs. A name is looked up once at a time, in a thread of its own: a name whose lookup
    hangs delays only its own webhooks."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext | None = None
        self._lookups: dict[tuple[str, int], asyncio.Future[list[ResolvedAddress]]] = {}

    async def send(self, url: str, hosts: Sequence[str], headers: dict[str, str], body: bytes, seconds: float) -> int:
        """The status of the answer. Raises NotAllowed, OSError and TimeoutError."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(seconds):
                split = check_url(url, hosts, HOSTS_SETTING)
                found = await self._addresses(split)
                check_addresses(found, hosts, HOSTS_SETTING)
                reader, writer = await self._connect(split, found[:MAX_ADDRESSES], seconds)
                writer.write(_head(split, headers, len(body)) + body)
                await writer.drain()
                status = await _status(reader)
            await _finish(reader)
            return status
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _addresses(self, split: SplitResult) -> list[ResolvedAddress]:
        assert split.hostname is not None
        place = (split.hostname, port_of(split))
        lookup = self._lookups.get(place)
        if lookup is None:
            lookup = in_thread(lambda: _look_up(*place), f"lookup of {place[0]}")
            self._lookups[place] = lookup
            lookup.add_done_callback(lambda done: self._forget(place, done))
        return await asyncio.shield(lookup)

    def _forget(self, place: tuple[str, int], lookup: asyncio.Future[list[ResolvedAddress]]) -> None:
        del self._lookups[place]
        if not lookup.cancelled():
            lookup.exception()  # it may be that all that waited for it have given up

    async def _connect(
        self, split: SplitResult, found: Sequence[ResolvedAddress], seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = await self._context() if split.scheme == "https" else None
        failure: OSError = OSError("the host has no address")
        for *_, address in found:
            try:
                # An address that does not answer leaves time for the next one.
                async with asyncio.timeout(seconds / len(found)):
                    return await asyncio.open_connection(
                        str(address[0]),
                        address[1],
                        ssl=context,
                        server_hostname=split.hostname if context is not None else None,
                        limit=MAX_LINE_BYTES,
                    )
            except OSError as error:  # TimeoutError is one
                failure = error
        raise failure

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            # Reads the system's certificates.
            self._tls = await in_thread(ssl.create_default_context, "certificates")
        return self._tls


def _look_up(host: str, port: int) -> list[ResolvedAddress]:
    return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _head(split: SplitResult, headers: dict[str, str], length: int) -> bytes:
    """The head of the request. `check_url` has refused URLs with line ends and spaces."""
    host = split.netloc.rpartition("@")[2]
    lines = [
        f"POST {request_target(split)} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: tickertape",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode()


async def _status(reader: asyncio.StreamReader) -> int:
    for _ in range(MAX_INTERIM_ANSWERS + 1):
        version, _, rest = (await _line(reader)).partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit() or len(code) != 3:
            raise OSError("the answer is not HTTP")
        if not 100 <= int(code) < 200:
            return int(code)
        for _ in range(MAX_HEADER_LINES):
            if not (await _line(reader)).strip():
                break
    raise OSError("the answer has no end")


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        raise OSError("the connection was closed before the answer") from None
    except asyncio.LimitOverrunError:
        raise OSError("the answer has a line that is too long") from None


async def _finish(reader: asyncio.StreamReader) -> None:
    """Read the rest of the answer, within bounds, so that the receiver does not see a reset."""
    count = 0
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(BODY_S):
            while count < MAX_BODY_BYTES and (data := await reader.read(MAX_LINE_BYTES)):
                count += len(data)


# The file of webhooks that wait


# Files of one folder, each of one gateway process.
MAX_FILES = 256
# Seconds after which a failed write is tried again.
RETRY_S = 5.0
_TABLE = (
    "create table if not exists events (number integer primary key, account text, url text, session text, kind text, "
    "at real, dropped integer, data blob, named integer)"
)
# For a file of an older server, which had no such column: its URLs are checked like those that clients name.
_ADDED_COLUMN = "alter table events add column named integer default 1"


@dataclass(slots=True)
class StoredEvent:
    """An event that waits, with the number of its row and the time (of day) at which it happened. `named`: a client has
    named its URL."""

    number: int
    account: str
    url: str
    session: str
    kind: str
    at: float
    dropped: int
    data: bytes
    named: bool = False


class WebhookStore:
    """The file of this process. Opened by `open`; `add` and `remove` return at once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file: sqlite3.Connection | None = None
        # Held while the file is used: closing it while another thread writes would crash the process.
        self._file_lock = threading.Lock()
        self.unwritten: dict[int, StoredEvent] = {}
        # Numbers of events that are in the file, or in the write that runs; and those of them to be deleted.
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._has_failed = False

    async def open(self) -> list[StoredEvent]:
        """Lock a file for this process. Returns its events, and those of processes that have ended. Raises OSError."""
        events = await in_thread(self._lock_files, "webhook store")
        self._stored = {event.number for event in events}
        self._writing = asyncio.create_task(self._write_all(), name="webhook store")
        return events

    def add(self, event: StoredEvent) -> None:
        self.unwritten[event.number] = event
        self._changed.set()

    def remove(self, number: int) -> None:
        # Also what was added and not yet written: an older row of the event may be in the file. Without one there is
        # nothing to remember: a disk may be full for days.
        self.unwritten.pop(number, None)
        if number in self._stored:
            self._removed.add(number)
            self._changed.set()

    async def close(self, seconds: float) -> bool:
        """Write what is left, for at most this time. Returns whether all of it was written."""
        if self._writing is None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self.unwritten or self._removed) and not self._has_failed:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        self._writing = None
        await asyncio.wait((in_thread(self._close, "webhook store"),), timeout=seconds)
        return not self.unwritten and not self._removed

    async def _write_all(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Copies: what changes during the write is in the next batch.
            added, removed = list(self.unwritten.values()), set(self._removed)
            if not added and not removed:
                continue
            new = {event.number for event in added} - self._stored
            self._stored |= new
            try:
                await in_thread(lambda a=added, r=removed: self._write(a, r), "webhook store")  # type: ignore[misc]
            except (sqlite3.Error, OSError) as error:
                self._has_failed = True
                # A write is done whole or not at all.
                self._stored -= new
                self._removed -= new
                log.error("webhooks.folder: cannot write (%s); waiting webhooks are in memory only", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()
                continue
            self._has_failed = False
            self._stored -= removed - {event.number for event in added}
            self._removed -= removed
            for event in added:
                # Else it was changed or removed while it was written.
                if self.unwritten.get(event.number) is event:
                    del self.unwritten[event.number]

    # In a thread

    def _close(self) -> None:
        with self._file_lock:
            if self._file is not None:
                self._file.close()

    def _write(self, added: Iterable[StoredEvent], removed: Iterable[int]) -> None:
        assert self._file is not None
        with self._file_lock, self._file as file:
            file.executemany("delete from events where number = ?", [(number,) for number in removed])
            file.executemany("insert or replace into events values (?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, added))

    def _lock_files(self) -> list[StoredEvent]:
        problem = f"{MAX_FILES} processes use it"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            events, unreadable = self._read_free_files()
            if self._file is not None:
                return events
            problem = unreadable or problem
        except (OSError, sqlite3.Error) as error:
            if self._file is not None:
                self._file.close()
            problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OSError(f"webhooks.folder: cannot use {str(self._folder)!r}: {problem}")

    def _read_free_files(self) -> tuple[list[StoredEvent], str]:
        """The events of all files that no other process has, and why a file cannot be read (empty if all can)."""
        events: list[StoredEvent] = []
        problem = ""
        for number in range(MAX_FILES):
            path = self._folder / f"webhooks-{number}.sqlite"
            if self._file is not None and not path.exists():
                continue
            try:
                file = _locked(path)
                if file is None:
                    continue
                rows = [StoredEvent(*row) for row in file.execute("select * from events order by number")]
            except sqlite3.DatabaseError as error:
                log.error("webhooks.folder: cannot read %s (%s); it is left as it is", path, error)
                problem = str(error)
                continue
            if self._file is None:
                self._file = file
                events = rows
                continue
            # Copied before it is deleted: an end of this process between the two delivers some events twice.
            first = max((event.number for event in events), default=0) + 1
            for place, event in enumerate(rows):
                event.number = first + place
            with closing(file):
                self._write(rows, ())
                with file:
                    file.execute("delete from events")
            events += rows
        return events, problem


def _row(event: StoredEvent) -> tuple[object, ...]:
    return (
        event.number,
        event.account,
        event.url,
        event.session,
        event.kind,
        event.at,
        event.dropped,
        event.data,
        int(event.named),
    )


def _locked(path: Path) -> sqlite3.Connection | None:
    """The file, locked for this process as long as it is open; None if another process has it. A file is never removed,
    because another process may be about to lock it."""
    path.touch(mode=0o600)
    file = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        file.execute("pragma locking_mode = exclusive")
        file.execute("pragma journal_mode = truncate")
        file.execute("pragma synchronous = off")
        file.execute("begin exclusive")
        file.execute(_TABLE)
        if "named" not in [column[1] for column in file.execute("pragma table_info(events)")]:
            file.execute(_ADDED_COLUMN)
        file.commit()
    except sqlite3.OperationalError as error:
        file.close()
        if "locked" in str(error) or "busy" in str(error):
            return None
        raise
    return file
