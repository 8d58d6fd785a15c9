"""The deployment files name things that exist: metrics on the dashboard, keys in the environment, pinned images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from fleet.cluster.connect import TESTED_RAY_VERSION
from fleet.plan import read_plan
from realtime.config import ENVIRONMENT_PREFIX, known_keys
from realtime.serving.metrics import Metrics, build_collector, engine_collector, name_collector

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def metrics(engine_figures: tuple[object, object]) -> set[str]:
    """The names of all that `/metrics` shows."""
    shown = Metrics()
    figures, capacity = engine_figures
    shown.add_collector(engine_collector(lambda: figures, lambda: capacity))  # type: ignore[arg-type,return-value]
    shown.add_collector(name_collector("g1"))
    shown.add_collector(build_collector())
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
    assert {"tickertape_uploads_in_progress", "tickertape_upload_seconds_bucket", "tickertape_uploads_total"} <= used
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_metric_of_the_alerts_exists_and_every_alert_is_explained(metrics: set[str]) -> None:
    rules = yaml.safe_load((ROOT / "deploy/helm/tickertape/files/alerts.yml").read_text())["groups"][0]["rules"]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name in re.findall(r"tickertape_\w+", rule["expr"])}
    assert used and used <= metrics | recorded, used - metrics
    alerts = [rule for rule in rules if "alert" in rule]
    page = (ROOT / "docs/operations.md").read_text()
    for alert in alerts:
        assert {"summary", "description"} <= alert["annotations"].keys() and alert["labels"]["severity"]
        assert f"`{alert['alert']}`" in page, alert["alert"]


def test_every_metric_that_the_documentation_names_exists(metrics: set[str]) -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"`(tickertape_\w+)", text))
    assert len(named) > 10 and named <= metrics, named - metrics


def test_compose_services_are_pinned_and_configured_with_real_keys() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    variables = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper() for key in (*known_keys(), "debug")}
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+(-cuda)?$", service["image"]), f"{name}: pin the image"
        for variable in service.get("environment", {}):
            assert not variable.startswith(ENVIRONMENT_PREFIX) or variable in variables, variable


def test_the_manifest_for_kuberay_says_that_it_is_untested_and_names_the_tested_ray() -> None:
    text = (ROOT / "deploy/kuberay.yaml").read_text()
    cluster, *_ = yaml.safe_load_all(text)
    assert "UNTESTED" in text.splitlines()[0]
    assert cluster["spec"]["rayVersion"].startswith(f"{TESTED_RAY_VERSION}.")
    environment = {
        entry["name"] for entry in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_gcs_storage", "RAY_worker_niceness"} <= environment


def test_the_fleet_of_the_manifest_for_kuberay_uses_its_pods_and_can_read_what_is_mounted(tmp_path: Path) -> None:
    text = (ROOT / "deploy/kuberay.yaml").read_text()
    cluster, *others = yaml.safe_load_all(text)
    claims = {one["metadata"]["name"] for one in others if one["kind"] == "PersistentVolumeClaim"}
    (tmp_path / "server.toml").touch()
    lines = "\n".join(re.findall(r"^#   ((?:\w+ = |\[).*)$", text, re.MULTILINE))
    (tmp_path / "fleet.toml").write_text(lines.replace("/etc/tickertape/", f"{tmp_path}/"))
    described = read_plan(tmp_path / "fleet.toml")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert described.engine.most == groups["gpu"]["maxReplicas"] and described.engine.gpus == 1
    assert described.gateway.count == groups["edge"]["replicas"] and not described.head_works
    pods = [cluster["spec"]["headGroupSpec"], *groups.values()]
    for pod in [one["template"]["spec"] for one in pods]:
        assert pod["securityContext"]["fsGroup"] == 10001 and pod["enableServiceLinks"] is False
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
        assert volumes["secret"]["secret"]["defaultMode"] == 0o440
        named = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in volumes.values()]
        used = {name for name in named if name}
        assert used <= claims
    engine = {volume["name"]: volume for volume in groups["gpu"]["template"]["spec"]["volumes"]}
    assert "persistentVolumeClaim" in engine["weights"], "an engine that starts again does not fetch its weights again"
