"""Adds up the metrics of several workers, so that a scrape of any worker shows the whole server.

Each worker sends its metrics to the parent process (`report`), where `Totals` adds them up: counters and histograms
over all workers that ever ran, gauges over the running ones. Metrics of engines are not added up, because all workers
see the same values.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

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
