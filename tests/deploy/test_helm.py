"""The Helm chart: helm accepts it, what it renders is valid for two versions of Kubernetes, and the pods start commands
that exist with settings that are accepted. Nothing here runs in a cluster.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from realtime.cli import build_parser
from realtime.commands.serve import config_of
from tests.deploy.services import ROOT
from tests.deploy.test_packaging import PROJECT

CHART = ROOT / "deploy/helm/tickertape"
TOOLS = ROOT / ".venv-chart/bin"
VERSIONS = ("1.30", "1.34")
# Defined by the Prometheus operator, not by Kubernetes.
OTHERS = {"ServiceMonitor", "PrometheusRule"}
ALL = {
    "gateway.autoscaling.enabled": "true",
    "engine.autoscaling.enabled": "true",
    "engine.modelsClaim": "checkpoints",
    "gateway.trustedProxies": "{10.0.0.0/8}",
    "ingress.enabled": "true",
    "ingress.tlsSecret": "tls",
    "monitoring.serviceMonitor.enabled": "true",
    "monitoring.prometheusRule.enabled": "true",
    "config.limits.sessions_per_key": "10",
}
KEYS = {"auth.keys": "{a-long-secret,another-long-secret}"}


def helm(*arguments: str, values: dict[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run helm. Its answer is kept until the chart changes: emulated, helm takes 15 s to start."""
    texts = [path.read_text() for path in sorted(CHART.rglob("*")) if path.is_file()]
    digest = hashlib.sha256(json.dumps([arguments, values, texts]).encode()).hexdigest()
    kept = TOOLS / f"helm-{digest[:16]}.json"
    if kept.exists():
        return subprocess.CompletedProcess(arguments, *json.loads(kept.read_text()))
    done = _helm(*arguments, values=values, home=home)
    if TOOLS.exists():
        kept.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return done


def _helm(*arguments: str, values: dict[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    command = [found] if (found := shutil.which("helm")) else []
    if not command:
        if not (TOOLS / "helm").exists():
            pytest.skip("helm is not installed: make chart-tools")
        emulator = [] if platform.machine() == "x86_64" else [shutil.which("qemu-x86_64-static")]
        if None in emulator:
            pytest.skip("helm is for x86-64, and qemu-user-static is not installed")
        command = [*map(str, emulator), str(TOOLS / "helm")]
    for key, value in values.items():
        arguments += ("--set", f"{key}={value}")
    environment = os.environ | {f"HELM_{name}_HOME": str(home) for name in ("CACHE", "CONFIG", "DATA")}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=110)


def rendered(values: dict[str, str], home: Path) -> str:
    done = helm("template", "captions", str(CHART), "--namespace", "speech", values=values, home=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_kind(text: str) -> dict[tuple[str, str], Any]:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With everything that can be switched on."""
    return rendered(KEYS | ALL, tmp_path_factory.mktemp("helm"))


def test_helm_has_no_complaint(tmp_path: Path) -> None:
    done = helm("lint", str(CHART), "--strict", values=KEYS | ALL, home=tmp_path)
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout


def test_a_server_without_keys_must_be_asked_for(tmp_path: Path) -> None:
    done = helm("template", "captions", str(CHART), values={}, home=tmp_path)
    assert done.returncode != 0 and "set auth.keys (or auth.existingSecret)" in done.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As the chart comes, on the CPU, without keys."""
    return rendered({"engine.gpus": "0", "auth.noAuth": "true"}, tmp_path_factory.mktemp("helm"))


@pytest.mark.parametrize("which", ["whole", "small"])
def test_manifests_are_valid_for_two_versions_of_kubernetes(which: str, request: pytest.FixtureRequest) -> None:
    if not (TOOLS / "python").exists():
        pytest.skip("the schemas of Kubernetes are not installed: make chart-tools")
    text = request.getfixturevalue(which)
    command = [str(TOOLS / "python"), str(Path(__file__).with_name("validate_manifests.py")), *VERSIONS]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(VERSIONS) * len(by_kind(text)) > 8
    assert [one for one in found if one["problem"] and one["kind"] not in OTHERS] == []


def container(manifests: dict[tuple[str, str], Any], kind: str, name: str) -> Any:
    (one,) = manifests[kind, name]["spec"]["template"]["spec"]["containers"]
    return one


def test_engines_with_a_gpu_use_the_image_with_cuda(whole: str, small: str) -> None:
    for text, ending in ((whole, "-cuda"), (small, "")):
        gateway = container(by_kind(text), "Deployment", "captions-gateway")["image"]
        assert container(by_kind(text), "StatefulSet", "captions-engine")["image"] == gateway + ending


def test_pods_start_commands_that_exist_with_settings_that_are_accepted(
    whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = by_kind(whole)
    settings = tmp_path / "tickertape.toml"
    settings.write_text(manifests["ConfigMap", "captions"]["data"]["tickertape.toml"])
    for name in [name for name in os.environ if name.startswith("TICKERTAPE_")]:
        monkeypatch.delenv(name)
    for kind, name in (("StatefulSet", "captions-engine"), ("Deployment", "captions-gateway")):
        pod = container(manifests, kind, name)
        for variable in pod.get("env", ()):
            monkeypatch.setenv(variable["name"], "a-value-of-some-length")
        arguments = [one.replace("/etc/tickertape/tickertape.toml", str(settings)) for one in pod["args"]]
        options = build_parser().parse_args(arguments)
        config = config_of(options)
        assert config.fleet.secret_file == "/etc/tickertape-secret/fleet-secret"
        assert config.limits.sessions_per_key == 10
        # Variables like TICKERTAPE_PORT, which Kubernetes makes for a Service of that name, would be unknown settings.
        assert manifests[kind, name]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    gateway = config
    assert gateway.model.engines == tuple(
        f"tcp://captions-engine-{number}.captions-engine.speech.svc:5555" for number in range(4)
    )
    assert gateway.auth.keys and gateway.server.host == "0.0.0.0" and gateway.server.trusted_proxies == ("10.0.0.0/8",)


def test_pods_have_time_to_drain_and_a_user_that_may_read_the_secret(whole: str) -> None:
    manifests = by_kind(whole)
    gateway = manifests["Deployment", "captions-gateway"]["spec"]["template"]["spec"]
    engine = manifests["StatefulSet", "captions-engine"]["spec"]["template"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] >= 5 + 30 and engine["terminationGracePeriodSeconds"] > 60
    assert gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert engine["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    user = (ROOT / "Dockerfile").read_text().partition("--uid ")[2].split()[0]
    for pod in (gateway, engine):
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)
        (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "secret"]
        assert secret["defaultMode"] & 0o040
    data = manifests["Secret", "captions"]["data"]
    assert set(data) == {"keys", "fleet-secret"}


def test_the_budget_keeps_all_but_one_pod_and_the_alerts_are_those_of_prometheus(whole: str) -> None:
    manifests = by_kind(whole)
    for name in ("captions-gateway", "captions-engine"):
        assert manifests["PodDisruptionBudget", name]["spec"]["maxUnavailable"] == 1
    alerts = yaml.safe_load((CHART / "files/alerts.yml").read_text())
    assert manifests["PrometheusRule", "captions"]["spec"] == alerts
    (timeout,) = [
        value
        for key, value in manifests["Ingress", "captions"]["metadata"]["annotations"].items()
        if key.endswith("proxy-read-timeout")
    ]
    assert int(timeout) >= 3600


def test_the_chart_has_the_version_of_the_product() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]
