"""The gateway's own figures."""

from __future__ import annotations

import os
import re
from importlib.metadata import version

from realtime.serving.metrics import PROCESS_SUMS, Metrics, build_collector, process_collector


def test_two_gateways_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.measure("stalls", 1)
    assert b"tickertape_stalls_total 1.0" in one.exposition() and b"tickertape_stalls_total 0.0" in other.exposition()


def test_the_version_and_the_process_are_shown() -> None:
    metrics = Metrics()
    metrics.add_collector(build_collector())
    metrics.add_collector(process_collector(), PROCESS_SUMS)
    text = metrics.exposition().decode()
    assert f'version="{version("tickertape")}"' in text and "tickertape_build_info{" in text
    memory = float(re.findall(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)[0])
    assert memory > os.sysconf("SC_PAGE_SIZE") * 1000
    assert float(re.findall(r"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)[0]) > 0
    alike = {family.name: is_alike for family, is_alike in metrics.families()}
    assert not alike["process_cpu_seconds"] and alike["tickertape_build_info"] and alike["process_start_time_seconds"]
