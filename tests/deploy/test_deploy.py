"""The deployment files name things that exist: metrics on the dashboard, keys in the environment, pinned images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from fleet.cluster.connect import TESTED
from realtime.config import ENVIRONMENT_PREFIX, known_keys
from realtime.metrics.engine import engine_collector
from realtime.metrics.gateway import Metrics, name_collector

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def metrics(engine_figures: tuple[object, object]) -> set[str]:
    """The names of all that `/metrics` shows."""
    shown = Metrics()
    figures, capacity = engine_figures
    shown.add_collector(engine_collector(lambda: figures, lambda: capacity))  # type: ignore[arg-type,return-value]
    shown.add_collector(name_collector("g1"))
    exposed = set(re.findall(r"^# TYPE (\S+)", shown.exposition().decode(), re.MULTILINE))
    return exposed | {f"{name}_bucket" for name in exposed}


def test_every_metric_on_the_dashboard_exists(metrics: set[str]) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/tickertape.json").read_text())
    used = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"tickertape_\w+", target["expr"])
    }
    assert used and used <= metrics, used - metrics


def test_every_metric_that_the_documentation_names_exists(metrics: set[str]) -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"`(tickertape_\w+)", text))
    assert len(named) > 10 and named <= metrics, named - metrics


def test_compose_services_are_pinned_and_configured_with_real_keys() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    variables = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper() for key in known_keys()}
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), f"{name}: pin the image"
        for variable in service.get("environment", {}):
            assert not variable.startswith(ENVIRONMENT_PREFIX) or variable in variables, variable


def test_the_image_does_not_run_as_root_and_says_when_it_is_ready() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER tickertape$", dockerfile, re.MULTILINE)
    assert "HEALTHCHECK" in dockerfile and "--ready" in dockerfile
    assert all(re.search(r":\d+\.\d+\.\d+", line) for line in dockerfile.splitlines() if line.startswith("FROM"))


def test_the_manifest_for_kuberay_says_that_it_is_untested_and_names_the_tested_ray() -> None:
    text = (ROOT / "deploy/kuberay.yaml").read_text()
    cluster, *_ = yaml.safe_load_all(text)
    assert "UNTESTED" in text.splitlines()[0]
    assert cluster["spec"]["rayVersion"].startswith(f"{TESTED}.")
    environment = {
        entry["name"] for entry in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_gcs_storage", "RAY_worker_niceness"} <= environment
