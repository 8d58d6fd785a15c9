"""Every service of docker-compose.yml comes up with exactly the environment it gets, answers, and drains; so does the
unit for systemd. Run on this machine with the installed entry point; what docker maps (folders, port) is mapped here.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from engine.options import DEFAULT_MODEL, cache_folder
from realtime.client.wire_client import CannotConnect, HttpClient
from realtime.config import known_keys
from tests.deploy.services import ROOT, Service, compose, interpolate, service

SCRIPT = Path(sys.executable).with_name("tickertape")
KEYS = {"TICKERTAPE_AUTH_KEYS": "a-long-secret,another-long-secret"}
START_S, STOP_S = 200.0, 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def root() -> Iterator[Path]:
    """A container's file system. Its path is short: the path of a socket has room for about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="tt-") as folder:
        yield Path(folder)


class Container:
    """The entry point of a service, with its folders under `root`. Weights that are here are not fetched again."""

    def __init__(self, described: Service, root: Path) -> None:
        self.port = free_port()
        self.environment = {"HOME": str(root), "PYTHONPATH": str(ROOT), **described.environment}
        for name in described.folders:
            (root / name.lstrip("/")).mkdir(parents=True)
        for name, value in self.environment.items():
            if value in described.folders:
                self.environment[name] = str(root / value.lstrip("/"))
        self.environment["PATH"] = f"{SCRIPT.parent}:{os.environ['PATH']}"
        self.environment["TICKERTAPE_CACHE"] = str(cache_folder())
        assert self.environment["TICKERTAPE_SERVER_PORT"] == "8000", "prometheus looks there"
        self.environment["TICKERTAPE_SERVER_PORT"] = str(self.port)
        self.health_check = described.health_check
        self.process = subprocess.Popen(
            [str(SCRIPT), *described.arguments[1:]], env=self.environment, cwd=root, stderr=subprocess.PIPE, text=True
        )

    def is_healthy(self) -> bool:
        check = subprocess.run(self.health_check, env=self.environment, capture_output=True, timeout=30)
        return check.returncode == 0

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_healthy():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=STOP_S)
        return self.process.returncode, said


@contextmanager
def container(described: Service, root: Path) -> Iterator[Container]:
    running = Container(described, root)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def prometheus_target() -> str:
    """What stands in `Host` when Prometheus asks for the metrics: it looks the name up and uses the address."""
    described = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (discovery,) = described["scrape_configs"][0]["dns_sd_configs"]
    for name in ("server", "server-gpu"):
        assert compose()["services"][name]["networks"]["default"]["aliases"] == discovery["names"]
    return f"172.18.0.3:{discovery['port']}"


def asked_by_name(port: int, name: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers={"Host": name})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("name", ["server", "server-gpu"])
@pytest.mark.parametrize("keys", [{}, KEYS], ids=["open", "with-keys"])
def test_service_comes_up_answers_and_drains(
    name: str, keys: dict[str, str], engine: dict[str, str], root: Path
) -> None:
    with container(service(name, keys | engine), root) as running:
        running.wait_until_healthy()
        url = f"http://127.0.0.1:{running.port}"
        assert HttpClient(url).get("/ready").json() == {"status": "ready"}
        assert HttpClient(url).get("/v1/models").status == (401 if keys else 200)
        assert asked_by_name(running.port, prometheus_target()) == 200
        if keys:
            assert HttpClient(url, "another-long-secret").get("/v1/models").status == 200
        code, said = running.stop()
        assert code == 0, said
        assert not running.is_healthy()


@pytest.mark.timeout(300)
def test_service_loads_the_embedded_model(root: Path) -> None:
    """With nothing set at all: the GPU service too, whose device is left to the model."""
    if not (cache_folder() / DEFAULT_MODEL).exists():
        pytest.skip("the embedded model is not here; `tickertape pull` fetches it")
    with container(service("server-gpu", {}), root) as running:
        running.wait_until_healthy()
        models = HttpClient(f"http://127.0.0.1:{running.port}").get("/v1/models").json()
        assert "moonshine" in json.dumps(models)
        code, said = running.stop()
        assert code == 0, said


def test_contradiction_is_refused_not_served_without_keys(root: Path) -> None:
    """Who says that there must be keys and gives none is told so, and no port opens."""
    with container(service("server", {"TICKERTAPE_AUTH_NO_AUTH": "false"}), root) as running:
        _, said = running.process.communicate(timeout=START_S)
        assert running.process.returncode == 2 and "set auth.keys" in said


def test_every_setting_passes_through() -> None:
    """But for the address and the port in the container, which are fixed; keys decide about `auth.no_auth`."""
    fixed = {"server.host", "server.port", "server.allowed_hosts", "auth.no_auth"}
    wanted = {f"TICKERTAPE_{key.replace('.', '_').upper()}": "x" for key in set(known_keys()) - fixed}
    for name in ("server", "server-gpu"):
        assert wanted.items() <= service(name, wanted).environment.items()


def test_uploads_wait_on_a_volume() -> None:
    described = service("server", {})
    assert described.environment["TMPDIR"] in described.folders
    assert described.environment["TRITON_HOME"] in described.folders, "the rest of the file system is read-only"
    volumes = compose()["volumes"]
    assert all(volume.split(":")[0] in volumes for volume in compose()["services"]["server"]["volumes"])


def published(variables: dict[str, str], *profiles: str) -> list[str]:
    """Addresses on this machine that `docker compose up` publishes with these profiles."""
    services = compose()["services"].values()
    started = [one for one in services if set(one.get("profiles", profiles)) <= set(profiles)]
    return [interpolate(port, variables).rpartition(":")[0] for one in started for port in one["ports"]]


@pytest.mark.parametrize("profiles", [(), ("gpu",)])
def test_no_two_services_publish_the_same_port(profiles: tuple[str, ...]) -> None:
    addresses = published({}, *profiles)
    assert len(addresses) == len(set(addresses)) == 3 + len(profiles)
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_published_port_is_the_one_that_was_asked_for() -> None:
    assert published({}, "gpu")[:2] == ["127.0.0.1:8000", "127.0.0.1:8001"]
    asked = {"TICKERTAPE_SERVER_PORT": "9000", "GPU_PORT": "9001"}
    assert published(asked, "gpu")[:2] == ["127.0.0.1:9000", "127.0.0.1:9001"]


def test_health_check_knows_port_and_certificate(engine: dict[str, str], root: Path, tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=its.name",
    ]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *files], check=True, capture_output=True)
    described = service("server", engine)
    tls = {"TICKERTAPE_SERVER_TLS_CERT": tmp_path / "cert.pem", "TICKERTAPE_SERVER_TLS_KEY": tmp_path / "key.pem"}
    described.environment.update({name: str(path) for name, path in tls.items()})
    with container(described, root) as running:
        running.wait_until_healthy()
        with pytest.raises(CannotConnect):
            HttpClient(f"http://127.0.0.1:{running.port}").get("/ready")
        assert running.stop()[0] == 0


# systemd


def unit() -> dict[str, list[str]]:
    lines = (ROOT / "deploy/systemd/tickertape.service").read_text().splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_unit_starts_says_ready_and_stopping(engine: dict[str, str], tmp_path: Path) -> None:
    described = unit()
    assert described["Type"] == ["notify"] and described["KillMode"] == ["mixed"], "the engine is needed for draining"
    config = tmp_path / "tickertape.toml"
    shutil.copy(ROOT / "docs/tickertape.toml", config)
    arguments = described["ExecStart"][0].replace("/etc/tickertape/tickertape.toml", str(config)).split()[1:]
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(START_S)
        environment = os.environ | engine | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [str(SCRIPT), *arguments, "--port", "0", "--ready-fd", str(writer)], env=environment, pass_fds=[writer]
        )
        os.close(writer)
        try:
            url = systemd.recv(4096).decode().partition("STATUS=listening on ")[2].strip()
            assert HttpClient(url).get("/ready").status == 200
            with os.fdopen(reader) as file:
                assert file.read() == f"{url}\n"
            assert reload(described["ExecReload"], config, process.pid) == [0, 0]
            config.write_text("[server]\nprot = 1")
            assert reload(described["ExecReload"][:1], config, process.pid) == [2], "`systemctl reload` fails"
            assert HttpClient(url).get("/ready").status == 200
            process.send_signal(signal.SIGTERM)
            assert systemd.recv(4096).startswith(b"STOPPING=1\n")
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()
            process.wait()


def test_unit_and_services_may_open_many_files() -> None:
    limits = [int(unit()["LimitNOFILE"][0])]
    limits += [compose()["services"][name]["ulimits"]["nofile"] for name in ("server", "server-gpu")]
    assert min(limits) >= 65536


def reload(commands: list[str], config: Path, pid: int) -> list[int]:
    """What the commands of `systemctl reload` end with."""
    ended = []
    for command in commands:
        command = command.replace("/etc/tickertape/tickertape.toml", str(config)).replace("$MAINPID", str(pid))
        words = command.replace("/opt/tickertape/bin/tickertape", str(SCRIPT)).split()
        ended.append(subprocess.run(words, capture_output=True, timeout=60).returncode)
    return ended


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze reads the unit")
    text = (ROOT / "deploy/systemd/tickertape.service").read_text()
    file = tmp_path / "tickertape.service"
    file.write_text(text.replace("/opt/tickertape/bin/tickertape", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "tickertape.service" not in done.stderr, done.stderr
