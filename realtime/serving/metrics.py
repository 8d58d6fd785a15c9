"""Prometheus metrics of a gateway process, and the text for `/metrics`.

Each gateway process has one `Metrics` (sessions, lag, refusals, uploads, viewers, webhooks, and the process itself),
and the other modules count with its attributes. It has a registry of its own, so that several gateways can run in one
process. `scrape` returns the text for `/metrics`. Metrics of engines are added as a collector (`engine_metrics.py`);
with several workers, `metrics_totals.py` adds their metrics up.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from realtime.session.events import MEASURES

# Bucket bounds of histograms, in seconds. Those of the lag lie around the 80 ms step of live models.
LAG_BUCKETS = (0.02, 0.04, 0.08, 0.12, 0.16, 0.24, 0.32, 0.5, 0.8, 1.2, 2.0, 4.0, 8.0, 30.0, 60.0)
FINAL_BUCKETS = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
UPLOAD_BUCKETS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
LOOP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """The gateway's metrics; `add_collector` adds those of the engine to the same registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        # Set in a worker: asks the parent for the metrics of all workers.
        self.of_all: Callable[[], Awaitable[bytes]] | None = None
        self._own: list[Counter | Gauge | Histogram] = []
        self._borrowed: list[_Borrowed] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            self._own.append(made := Counter(f"tickertape_{name}", text, labels, registry=registry))
            return made

        def gauge(name: str, text: str) -> Gauge:
            self._own.append(made := Gauge(f"tickertape_{name}", text, registry=registry))
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            self._own.append(made := Histogram(f"tickertape_{name}", text, buckets=buckets, registry=registry))
            return made

        self.sessions = gauge("sessions", "Sessions that exist, connected or waiting to be resumed")
        self.connected = gauge("sessions_connected", "Sessions with a socket")
        self.speaking = gauge("sessions_speaking", "Sessions with speech now")
        self.opened = counter("sessions_opened", "Sessions opened, by wire dialect at the time", "dialect")
        self.resumed = counter("sessions_resumed", "Sessions continued by a reconnected client")
        self.refused = counter("refused", "Connections and requests refused, by reason", "reason")
        self.closed = counter("closed", "Sockets closed by the server, by reason", "reason")
        self.lag = histogram("lag_seconds", "Audio received but not yet processed by the engine", LAG_BUCKETS)
        self.final = histogram("final_seconds", "From the end of a turn to its completed transcript", FINAL_BUCKETS)
        self.stalls = counter("stalls", "Speech without text: streams re-anchored from kept audio")
        self.engine_failures = counter("stream_failures", "Engine streams that failed and were replaced")
        self.audio_in = counter("audio_received_seconds", "Audio received from clients")
        self.audio_heard = counter("audio_heard_seconds", "Audio processed by the engine")
        self.queued = gauge("audio_queued_seconds", "Audio waiting in the gateway for the engine, all sessions")
        self.outbox = gauge("outbox_events", "Events waiting for slow clients, all sessions")
        self.viewers = gauge("viewers", "Connections that read published sessions")
        self.viewer_skips = counter("viewer_skips", "Slow viewers that were given the newest words instead of all")
        self.webhook_delivered = counter("webhook_delivered", "Events that a webhook's receiver has taken")
        self.webhook_failures = counter("webhook_failures", "Attempts to deliver an event that failed")
        self.webhook_dropped = counter("webhook_dropped", "Events that no webhook delivered, by reason", "reason")
        self.webhook_queued = gauge("webhook_queue_events", "Events that wait for the receivers of webhooks")
        self.webhook_queued_bytes = gauge("webhook_queue_bytes", "Bytes of these events")
        self.loop_lag = histogram("loop_lag_seconds", "How late the event loop runs a timer", LOOP_BUCKETS)
        # Counting tasks is slow, so it is done at a scrape.
        gauge("tasks", "Tasks of the event loop; more than a few for each session are a leak").set_function(_tasks)
        self.uploads = counter("uploads", "Files sent to the transcription endpoint, by outcome", "outcome")
        self.uploads_in_progress = gauge(
            "uploads_in_progress", "Files that arrive, wait, or are transcribed or answered"
        )
        text = "From the first byte of a file to the end of its answer, for every outcome"
        self.upload_seconds = histogram("upload_seconds", text, UPLOAD_BUCKETS)
        self._measures: dict[str, Callable[[float], None]] = {
            "lag_seconds": self.lag.observe,
            "final_seconds": self.final.observe,
            "stalls": self.stalls.inc,
            "engine_failures": self.engine_failures.inc,
        }
        assert set(self._measures) == MEASURES

    def measure(self, name: str, value: float) -> None:
        self._measures[name](value)

    def add_collector(self, collect: Callable[[], Iterable[Metric]], own: Collection[str] = ()) -> None:
        """Add metrics that another part counts, such as the engine's. With several workers all see the same values,
        except for the names in `own`, which each worker counts itself."""
        names = frozenset(name if name.startswith("process_") else f"tickertape_{name}" for name in own)
        self._borrowed.append(_Borrowed(collect, names))
        self.registry.register(self._borrowed[-1])

    def families(self) -> Iterator[tuple[Metric, bool]]:
        """Every metric of this process, and whether all processes of a server see the same values."""
        for metric in self._own:
            yield from ((family, False) for family in metric.collect())
        for borrowed in self._borrowed:
            yield from ((family, family.name not in borrowed.own) for family in borrowed.collect())

    def exposition(self) -> bytes:
        """The metrics of this process in the Prometheus text format."""
        return generate_latest(self.registry)

    async def scrape(self) -> bytes:
        """The metrics of the whole server. Raises TimeoutError if the parent of several workers does not answer."""
        return self.exposition() if self.of_all is None else await self.of_all()


def _tasks() -> float:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0.0  # no event loop runs


def name_collector(gateway: str) -> Callable[[], Iterable[Metric]]:
    """The collector for `Metrics.add_collector` of a metric with the gateway's name as label, for joins in queries."""

    def collect() -> Iterable[Metric]:
        info = GaugeMetricFamily("tickertape_gateway_info", "The name of this gateway", labels=["gateway"])
        info.add_metric([gateway], 1)
        yield info

    return collect


def build_collector() -> Callable[[], Iterable[Metric]]:
    """The collector of a metric with the versions of the server and of Python as labels."""
    labels = {"version": version("tickertape"), "python": platform.python_version()}

    def collect() -> Iterable[Metric]:
        info = GaugeMetricFamily("tickertape_build_info", "Versions of the server and of Python", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    return collect


# Metrics of the gateway's process that add up over several workers. Of the start the latest is shown.
PROCESS_SUMS = ("process_cpu_seconds", "process_resident_memory_bytes")
_STARTED = time.time()


def process_collector() -> Callable[[], Iterable[Metric]]:
    """The collector of processor time, memory and start of the gateway's process, under the names that they have in all
    programs. Open files are not counted: listing thousands of them would hold up the event loop."""

    def collect() -> Iterable[Metric]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime
        yield CounterMetricFamily("process_cpu_seconds", "Processor time of the gateway", value=seconds)
        with suppress(OSError, AttributeError):
            # One page of the kernel, which no disk holds up.
            memory = os.open("/proc/self/statm", os.O_RDONLY)
            try:
                pages = int(os.pread(memory, 200, 0).split()[1])
            finally:
                os.close(memory)
            resident = pages * os.sysconf("SC_PAGE_SIZE")
            yield GaugeMetricFamily("process_resident_memory_bytes", "Memory of the gateway", value=resident)
        yield GaugeMetricFamily("process_start_time_seconds", "When the gateway was started", value=_STARTED)

    return collect


class _Borrowed(Collector):
    """Metrics that another part counts; `own` are the names that each worker counts itself."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], own: frozenset[str]) -> None:
        self._collect = collect
        self.own = own

    def collect(self) -> Iterable[Metric]:
        return self._collect()
