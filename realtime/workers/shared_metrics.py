"""The metrics of a server with several workers: they report to the parent, which adds up, and ask it for the sums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from realtime.serving.totals import report
from realtime.workers.worker_link import Counted, Line, Scrape, Scraped

# How often a worker reports. What a worker that is killed counted after its last report is lost.
REPORT_S = 0.25
# A parent that does not answer for so long is gone, and this worker with it.
ANSWER_S = 5.0


class SharedMetrics:
    """The worker's side. `families` are its own metrics, and with each whether all workers see the same values."""

    def __init__(self, line: Line, families: Callable[[], Iterable[tuple[Metric, bool]]]) -> None:
        self._line = line
        self._families = families
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    async def run(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(REPORT_S)

    def tell(self) -> None:
        self._line.send(Counted(report(self._families())))

    async def of_all(self) -> bytes:
        """The figures of the server, with those of this worker as they are now. Raises TimeoutError."""
        self._number = number = self._number + 1
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        self._line.send(Scrape(number, report(self._families())))
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        finally:
            del self._asked[number]

    def hear(self, message: Scraped) -> None:
        """What the parent says."""
        if message.number in self._asked and not self._asked[message.number].done():
            self._asked[message.number].set_result(message.text.encode())
