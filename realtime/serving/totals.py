"""The metrics of all gateway processes of a server as one: whichever process is asked, the answer is the same.

Each process reports what it has counted, and one adds up: counters and histograms over all processes that there ever
were, gauges over those that live. Figures of the engines are not added up, since every process sees the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# When a counter was made: a moment of one process, which says nothing about several.
CREATED = "_created"

# A sample is known by one text: the name of its family, its own name, and its labels by name and value. Tuples would
# take most of the time of a scrape: their hash is worked out at every look.
_BETWEEN = "\0"


class _Sample(msgspec.Struct, array_like=True, frozen=True):
    name: str
    labels: dict[str, str]
    # JSON has no word for values that are no numbers; they are left out.
    value: float | None


class _Family(msgspec.Struct, array_like=True, frozen=True):
    name: str
    text: str
    kind: str
    # Every process sees the same values.
    seen_alike: bool
    samples: list[_Sample]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[_Family])


def report(metrics: Iterable[tuple[Metric, bool]]) -> msgspec.Raw:
    """What a process has counted, for `Totals.hear`; with each metric, whether every process sees the same values."""
    families = [
        _Family(metric.name, metric.documentation, metric.type, seen_alike, _samples(metric))
        for metric, seen_alike in metrics
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
    """The last report of each living process, and what those that have ended had counted.

    What is kept does not grow with the number of processes that have ended, and no counter ever goes down: the last
    report of a process counts on after its end. What it counted after that report is lost if it was killed.
    """

    def __init__(self) -> None:
        # Every family that was ever reported, without its samples.
        self._families: dict[str, _Family] = {}
        self._living: dict[int, dict[str, float]] = {}
        self._ended: dict[str, float] = {}
        # The highest value of each counter that every process sees alike.
        self._highest: dict[str, float] = {}

    def __len__(self) -> int:
        """How many numbers are kept."""
        return len(self._ended) + len(self._highest) + sum(map(len, self._living.values()))

    def hear(self, process: int, reported: msgspec.Raw) -> None:
        values: dict[str, float] = {}
        for family in _decoder.decode(reported):
            self._families[family.name] = msgspec.structs.replace(family, samples=[])
            for sample in family.samples:
                if sample.value is not None:
                    values[_key(family, sample)] = sample.value
        self._living[process] = values

    def forget(self, process: int) -> None:
        """It has ended. What it counted stays in the sums."""
        for key, value in self._living.pop(process, {}).items():
            family = self._families[key.partition(_BETWEEN)[0]]
            if family.kind != "gauge" and not family.seen_alike:
                self._ended[key] = self._ended.get(key, 0.0) + value

    def exposition(self) -> bytes:
        """All figures as Prometheus reads them."""
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
            if family.seen_alike:
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
