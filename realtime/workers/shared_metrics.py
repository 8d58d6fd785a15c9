"""The worker's side of shared metrics: it reports its metrics to the parent, and asks the parent for the sums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from realtime.serving.metric_totals import report
from realtime.workers.worker_link import Counted, Line, Scrape, Scraped

# Interval of reports. If a worker is killed, its counts since the last report are lost.
REPORT_S = 0.25
# Timeout for an answer of the parent.
ANSWER_S = 5.0


class SharedMetrics:
    """Reports and asks for metrics. `families` returns the worker's metrics, each with a flag: all workers see the same
    values."""

    def __init__(self, line: Line, families: Callable[[], Iterable[tuple[Metric, bool]]]) -> None:
        self._line = line
        self._families = families
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    async def run(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(REPORT_S)

    def report(self) -> None:
        self._line.send(Counted(report(self._families())))

    async def of_all(self) -> bytes:
        """The metrics of all workers as Prometheus text, with the current ones of this worker. Raises TimeoutError."""
        self._number = number = self._number + 1
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        self._line.send(Scrape(number, report(self._families())))
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        finally:
            del self._asked[number]

    def on_message(self, message: Scraped) -> None:
        """Take an answer of the parent."""
        if message.number in self._asked and not self._asked[message.number].done():
            self._asked[message.number].set_result(message.text.encode())
