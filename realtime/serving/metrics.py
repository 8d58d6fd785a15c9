"""Prometheus metrics of a gateway: its own, those of its engines, and their sums over several workers.

Each gateway process has one `Metrics` (sessions, lag, refusals, uploads, viewers, webhooks, and the process itself),
and the other modules count with its attributes. It has a registry of its own, so that several gateways can run in one
process. `scrape` returns the text for `/metrics`.

`engine_collector` reads steps, caches, streams and load from the engine client at each scrape; nothing is counted
there. All gateways of an engine show the same values, except for the metrics in `COUNTED_BY_EACH_GATEWAY`.

With several workers, a scrape of any worker shows the whole server: each worker sends its metrics to the parent process
(`report`), where `Totals` adds them up, counters and histograms over all workers that ever ran, gauges over the running
ones. Metrics of engines are not added up, because all workers see the same values.
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

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client.pool import Capacity
from engine.client.supervisor import EngineMetrics
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


# Metrics of the engines


# Metrics that each gateway process counts itself, of its own cache and streams. Engines report the others to all.
COUNTED_BY_EACH_GATEWAY = (
    "mm_cache_queries",
    "mm_cache_hits",
    "mm_cache_bytes_sent",
    "mm_cache_bytes_saved",
    "mm_cache_repairs",
    "engine_streams_recovered",
    "engine_streams_given_up",
    "engine_poisonous_streams",
    "engine_recovery_seconds",
)


def engine_collector(
    metrics: Callable[[], EngineMetrics], capacity: Callable[[], Capacity]
) -> Callable[[], Iterable[Metric]]:
    """The collector for `Metrics.add_collector`."""

    def collect() -> Iterable[Metric]:
        seen, room = metrics(), capacity()
        cache = seen.input_cache
        for name, text, count in (
            ("mm_cache_queries", "Items looked up in the input cache", cache.queries),
            ("mm_cache_hits", "Items found in the input cache, which were not sent to the engine", cache.hits),
            ("mm_cache_bytes_sent", "Bytes of audio sent to the engines", cache.bytes_sent),
            ("mm_cache_bytes_saved", "Bytes of audio that the input cache saved", cache.bytes_saved),
            ("mm_cache_repairs", "Times the two sides of the input cache disagreed and were repaired", cache.repairs),
            ("encoder_cache_queries", "Items looked up in the encoder cache", seen.encoder_queries),
            ("encoder_cache_hits", "Items found in the encoder cache", seen.encoder_hits),
            ("steps", "Steps the engines have run", seen.steps),
            ("blank_guard", "Tokens changed by the guard against endless blanks", seen.blank_guard),
            ("finals_revised", "Parts of finals that were decoded again", seen.revised),
            ("finals_not_revised", "Parts of finals not decoded again for lack of time", seen.revisions_skipped),
            ("words_revised", "Words of finals that differ from the streamed ones", seen.words_revised),
            ("engine_restarts", "Engines that were lost and came back", seen.restarts),
            ("engine_streams_recovered", "Streams rebuilt on a new engine", seen.streams_recovered),
            ("engine_streams_given_up", "Streams that could not be rebuilt", seen.streams_given_up),
            ("engine_poisonous_streams", "Streams ended because they crashed the engine", seen.crashing_streams),
            ("engine_recovery_seconds", "Time until streams of a lost engine were rebuilt", seen.recovery_seconds_sum),
        ):
            yield CounterMetricFamily(f"tickertape_{name}", text, value=count)
        parts = CounterMetricFamily("tickertape_step_seconds", "Time of all steps, by part", labels=["part"])
        for part, nanoseconds in seen.step_ns.items():
            parts.add_metric([part], nanoseconds / 1e9)
        yield parts
        for name, text, value in (
            ("engine_streams", "Streams open on the engines", room.used),
            ("engine_streams_max", "Streams the engines have room for", room.total),
            ("engine_streams_parked", "Silent streams whose state is in host memory", room.parked),
            ("engine_speaking", "Engine streams with speech now", room.speaking),
            ("engine_streams_counted", "Live streams with speech now or recently", room.counted),
            ("engine_streams_that_hold", "Live streams that could have speech at once, by measured cost", room.holds),
            ("engine_spares", "Spare engines, which replace an engine that is lost", room.spares_ready),
            ("engine_load", "Share of its time the least busy engine spends on live streams", room.load),
            ("engine_load_per_stream", "Load that one more stream with speech would add", room.load_per_stream),
        ):
            yield GaugeMetricFamily(f"tickertape_{name}", text, value=value)
        yield from _by_engine(room)

    return collect


def _by_engine(room: Capacity) -> Iterable[Metric]:
    """The metrics of each engine, labelled with its name."""
    for name, text, values in (
        ("streams", "Streams open on an engine", [engine.used for engine in room.engines]),
        ("streams_free", "Streams an engine can still take", [engine.free for engine in room.engines]),
        ("load", "Share of its time an engine spends on live streams", [engine.load for engine in room.engines]),
        ("draining", "Whether an engine takes no new streams", [engine.draining for engine in room.engines]),
        ("beat_age_seconds", "Time since an engine's last message", [engine.silent_s for engine in room.engines]),
    ):
        gauge = GaugeMetricFamily(f"tickertape_each_engine_{name}", text, labels=["engine"])
        for engine, value in zip(room.engines, values, strict=True):
            gauge.add_metric([engine.name], value)
        yield gauge
    up = GaugeMetricFamily("tickertape_each_engine_up", "Whether an engine is connected", labels=["engine"])
    for engine in room.engines:
        up.add_metric([engine.name], 1)
    for missing in room.missing:
        up.add_metric([missing.name], 0)
    yield up


# Sums over several workers


# Suffix of samples with the creation time of a counter, which is meaningless for a sum over processes.
CREATED = "_created"

# The key of a sample is one string: family name, sample name, label names and values. Strings cache their hash, which
# tuples do not.
_BETWEEN = "\0"


class _Sample(msgspec.Struct, array_like=True, frozen=True):
    name: str
    labels: dict[str, str]
    # None for NaN and infinity, which JSON cannot express.
    value: float | None


class _Family(msgspec.Struct, array_like=True, frozen=True):
    """A metric with its samples, as a worker reports it to the parent."""

    name: str
    text: str
    kind: str
    # Every process sees the same values, as for engine metrics.
    is_shared: bool
    samples: list[_Sample]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[_Family])


def report(metrics: Iterable[tuple[Metric, bool]]) -> msgspec.Raw:
    """The metrics of a process for `Totals.add_report`. Each comes with a flag: every process sees the same values."""
    families = [
        _Family(metric.name, metric.documentation, metric.type, is_shared, _samples(metric))
        for metric, is_shared in metrics
    ]
    return msgspec.Raw(_encoder.encode(families))


def _samples(metric: Metric) -> list[_Sample]:
    return [
        _Sample(sample.name, dict(sample.labels), float(sample.value))
        for sample in metric.samples
        if not sample.name.endswith(CREATED)
    ]


def _key(family: _Family, sample: _Sample) -> str:
    labels = (text.replace(_BETWEEN, "") for label in sample.labels.items() for text in label)
    return _BETWEEN.join((family.name, sample.name, *labels))


class Totals:
    """The last report of each running process, and the sums of the counters of processes that have ended.

    Memory does not grow with the number of ended processes, and counters never decrease: the last report of a process
    stays in the sums. Counts after that report are lost if the process was killed.
    """

    def __init__(self) -> None:
        # Every family ever reported, without samples.
        self._families: dict[str, _Family] = {}
        # Values by sample key, of each running process and of all ended processes together.
        self._living: dict[int, dict[str, float]] = {}
        self._ended: dict[str, float] = {}
        # The highest value shown so far of each counter whose value is the same in all processes.
        self._highest: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of values kept."""
        return len(self._ended) + len(self._highest) + sum(map(len, self._living.values()))

    def add_report(self, process: int, reported: msgspec.Raw) -> None:
        """Replace the report of a process by a newer one."""
        values: dict[str, float] = {}
        for family in _decoder.decode(reported):
            self._families[family.name] = msgspec.structs.replace(family, samples=[])
            for sample in family.samples:
                if sample.value is not None:
                    values[_key(family, sample)] = sample.value
        self._living[process] = values

    def forget(self, process: int) -> None:
        """A process has ended: add its counters to the sums."""
        for key, value in self._living.pop(process, {}).items():
            family = self._families[key.partition(_BETWEEN)[0]]
            if family.kind != "gauge" and not family.is_shared:
                self._ended[key] = self._ended.get(key, 0.0) + value

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self._collect()))
        return generate_latest(registry)

    def _collect(self) -> list[Metric]:
        sums, highest = dict(self._ended), dict[str, float]()
        for values in self._living.values():
            for key, value in values.items():
                sums[key] = sums.get(key, 0.0) + value
                highest[key] = max(value, highest.get(key, value))
        shown = {name: Metric(name, family.text, family.kind) for name, family in self._families.items()}
        for key, value in sums.items():
            name, sample, *labels = key.split(_BETWEEN)
            family = self._families[name]
            if family.is_shared:
                value = highest[key]
                if family.kind != "gauge":
                    self._highest[key] = value = max(value, self._highest.get(key, 0.0))
            shown[name].add_sample(sample, dict(zip(labels[::2], labels[1::2], strict=True)), value)
        return list(shown.values())


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
