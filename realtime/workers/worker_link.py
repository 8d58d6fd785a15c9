"""The link between the parent process and its workers: messages, their connection, and the session limits over all.

The messages are msgspec structs; `WorkerConnection` is one end of a socket pair and sends them as lines of JSON. The
parent sends the configuration and stops workers. Workers ask it to admit sessions, exchange counts of sessions and
metrics with it, and reach the coordinator of published sessions through it.

Session limits count over all workers. `QuotaCoordinator` counts in the parent. `SharedQuota` runs in each worker and
implements `SessionQuota` (`realtime/serving/quota.py`) with messages to the parent; if the parent does not answer in
time, new sessions are refused. A server with a single process uses `LocalQuota` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from realtime.config import Config, LimitsConfig, Secret
from realtime.serving.publishing import FromCoordinator, ToCoordinator
from realtime.serving.quota import Counts, Figures, QuotaDecision

log = logging.getLogger("tickertape.workers")

# Bytes of the longest message. The words of a published session (`Current`) are bounded well below it.
LONGEST_LINE = 4 * 1024 * 1024
# Interval at which a worker sends its figures.
FIGURES_INTERVAL_S = 1.0
# Timeout for an answer of the parent.
ANSWER_S = 5.0
# Most requests without an answer; beyond it new sessions are refused at once.
MOST_QUESTIONS = 1024


class Start(msgspec.Struct, tag="start"):
    """The parent's first message. `config` is made by `encode_config`."""

    config: msgspec.Raw
    secret: bytes
    engines: list[str]
    port: int
    # The secret with which viewer links are signed until the server is restarted.
    link_secret: bytes = b""

    def __repr__(self) -> str:
        return f"Start(port={self.port})"


class Ready(msgspec.Struct, tag="ready"):
    """The worker listens and has an engine."""


class Enter(msgspec.Struct, tag="enter"):
    """Request to admit new sessions of a caller, answered by `EnterAnswer`.

    With `again` the sessions were adopted: they are only counted, and there is no answer.
    """

    number: int
    caller: str
    sessions: int = 1
    again: bool = False


class EnterAnswer(msgspec.Struct, tag="entered"):
    """The parent's answer to `Enter`."""

    number: int
    answer: QuotaDecision


class Leave(msgspec.Struct, tag="leave"):
    """Sessions of a caller that were counted have ended, or were not opened."""

    caller: str
    sessions: int = 1


class OwnFigures(msgspec.Struct, tag="own"):
    """The session figures of the sending worker."""

    figures: Figures


class OtherFigures(msgspec.Struct, tag="others"):
    """The session figures of all other workers."""

    figures: Figures


class MetricsReport(msgspec.Struct, tag="counted"):
    """The metrics of the sending worker, made by `realtime.serving.metrics.report`."""

    report: msgspec.Raw


class Scrape(msgspec.Struct, tag="scrape"):
    """Request for the metrics of all workers, with the sender's own in `report`. Answered by `ScrapeAnswer`."""

    number: int
    report: msgspec.Raw


class ScrapeAnswer(msgspec.Struct, tag="scraped"):
    """The parent's answer to `Scrape`: the metrics as Prometheus text."""

    number: int
    text: str


class Reload(msgspec.Struct, tag="reload"):
    """Apply this configuration, made by `encode_config`."""

    config: msgspec.Raw

    def __repr__(self) -> str:
        return "Reload()"


class Retire(msgspec.Struct, tag="retire"):
    """Stop, and hand off resumable sessions to the other workers."""


Message = (
    Start
    | Ready
    | Enter
    | EnterAnswer
    | Leave
    | OwnFigures
    | OtherFigures
    | MetricsReport
    | Scrape
    | ScrapeAnswer
    | Reload
    | Retire
    | ToCoordinator
    | FromCoordinator
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


def encode_config(config: Config) -> msgspec.Raw:
    """The whole configuration including its secrets; only for a worker."""
    return msgspec.Raw(msgspec.json.encode(config, enc_hook=Secret.reveal))


def decode_config(encoded: msgspec.Raw) -> Config:
    return msgspec.json.decode(encoded, type=Config, dec_hook=lambda kind, text: kind(text))


class WorkerConnection:
    """One end of the connection between the parent and a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def from_socket(cls, end: socket.socket) -> WorkerConnection:
        reader, writer = await asyncio.open_connection(sock=end, limit=LONGEST_LINE)
        # By default `StreamWriter.drain` returns with up to 64 KiB unsent, which are lost if the process ends then.
        writer.transport.set_write_buffer_limits(0)
        return cls(reader, writer)

    def send(self, message: Message) -> None:
        """Send without waiting. The buffer stays small, because both sides always read."""
        if not self._writer.is_closing():
            self._writer.write(_encoder.encode(message) + b"\n")

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the other side is gone, or sends a message that is too long to read."""
        while True:
            try:
                line = await self._reader.readline()
            except OSError:
                return
            except ValueError:
                log.error("a message between the parent and a worker has more than %d bytes", LONGEST_LINE)
                return
            if not line:
                return
            yield _decoder.decode(line)

    async def drain(self) -> None:
        """Wait until all messages have been sent, or the other side is gone."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class _Question:
    """A request to admit sessions of a caller. The parent answers every request, and counts the granted sessions."""

    caller: str
    sessions: int
    answer: asyncio.Future[QuotaDecision]
    # Whether the task that asked was cancelled or timed out.
    is_abandoned: bool = False

    @property
    def granted(self) -> bool:
        return self.answer.done() and self.answer.result().reason is None


class SharedQuota:
    """The quota in a worker: asks the parent to admit sessions, and keeps the last figures of the other workers."""

    def __init__(self, connection: WorkerConnection, clock: Callable[[], float]) -> None:
        self.others = Figures()
        self._connection = connection
        self._clock = clock
        # Requests stay here until they are answered, also after a timeout or cancellation: a late grant is returned.
        self.asked: dict[int, _Question] = {}
        self._number = 0
        self._sent_at = 0.0

    async def enter(self, caller: str, sessions: int) -> QuotaDecision:
        if len(self.asked) >= MOST_QUESTIONS:
            return QuotaDecision("capacity", 1)
        self._number = number = self._number + 1
        question = _Question(caller, sessions, asyncio.get_running_loop().create_future())
        self.asked[number] = question
        self._connection.send(Enter(number, caller, sessions))
        try:
            async with asyncio.timeout(ANSWER_S):
                # Shielded, because a cancellation must not cancel the future, which still gets its answer.
                return await asyncio.shield(question.answer)
        except TimeoutError:
            self._abandon(question)
            return QuotaDecision("capacity", 1)
        except BaseException:
            self._abandon(question)
            raise

    def _abandon(self, question: _Question) -> None:
        question.is_abandoned = True
        if question.granted:
            self.leave(question.caller, question.sessions)

    def enter_again(self, caller: str) -> None:
        self._connection.send(Enter(0, caller, again=True))

    def leave(self, caller: str, sessions: int = 1) -> None:
        self._connection.send(Leave(caller, sessions))

    def tick(self, own: Figures) -> None:
        if self._clock() - self._sent_at >= FIGURES_INTERVAL_S:
            self._sent_at = self._clock()
            self._connection.send(OwnFigures(own))

    def on_message(self, message: EnterAnswer | OtherFigures) -> None:
        """Handle a message of the parent."""
        if isinstance(message, OtherFigures):
            self.others = message.figures
        elif (question := self.asked.pop(message.number, None)) is not None:
            question.answer.set_result(message.answer)
            if question.is_abandoned:
                self._abandon(question)


class QuotaCoordinator:
    """The quota in the parent: counts the sessions of all workers, which are identified by their numbers."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        self.counts = Counts(limits, clock)
        self._connections: dict[int, WorkerConnection] = {}
        # The last figures of each worker, plus the sessions granted to it since.
        self._figures: dict[int, Figures] = {}

    def add(self, worker: int, connection: WorkerConnection) -> None:
        self._connections[worker], self._figures[worker] = connection, Figures()

    def remove(self, worker: int) -> None:
        self._connections.pop(worker, None)
        self._figures.pop(worker, None)
        self.counts.forget(worker)

    def on_message(self, worker: int, message: Enter | Leave | OwnFigures) -> None:
        """Handle a message of a worker. It is ignored if the worker was removed."""
        if worker not in self._connections:
            return
        match message:
            case Enter(again=True):
                self.counts.add(worker, message.caller)
            case Enter():
                self._connections[worker].send(EnterAnswer(message.number, self._enter(worker, message)))
            case Leave():
                self.counts.leave(worker, message.caller, message.sessions)
            case OwnFigures():
                self._figures[worker] = message.figures
                self.counts.tick()
                for other, connection in self._connections.items():
                    connection.send(OtherFigures(self._others(other)))

    def _enter(self, worker: int, asked: Enter) -> QuotaDecision:
        refused = self.counts.enter(worker, asked.caller, asked.sessions)
        others = self._others(worker)
        if refused is not None:
            return QuotaDecision(*refused, others)
        # Until the worker sends new figures, the granted sessions count as waiting for a stream.
        count = asked.sessions
        self._figures[worker] += Figures(sessions=count, streamless=count, waiting=count)
        return QuotaDecision(others=others)

    def _others(self, worker: int) -> Figures:
        return reduce(Figures.__add__, (figures for key, figures in self._figures.items() if key != worker), Figures())
