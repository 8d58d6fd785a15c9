"""Starts, joins and stops the Ray cluster, and calls the fleet's manager. Used by the commands of `tickertape fleet`.

It runs in the process of a command. Ray reads environment variables when it is imported; `set_environment` sets them,
the same for every process of a fleet, so Ray is imported inside functions only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from typing import Any

from engine.fleet_secret import cluster_token, fingerprint, make_secret
from fleet.plan import FleetPlan
from fleet.state import FleetError
from fleet.supervisors import Record, Records, is_running, launch, send

TESTED_RAY_VERSION = "2.60"
# Seconds that a node waits for a lost head. Ray's default of a minute is shorter than the boot of a machine.
HEAD_AWAY_S = 3600
# Health checks of the head: every 2 s, with 3 s for an answer, and a node is given up after 4 misses, so after 20 s.
# With Ray's defaults (3 s, 10 s, 5) a stopped machine, whose connections stay open without answers, is given up after
# 65 s.
NODE_HEALTH = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}


def check_ray() -> None:
    """Raises FleetError if Ray is not installed, or not in the tested version."""
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        text = "a fleet needs Ray, which is not installed here: pip install 'tickertape[fleet]'"
        raise FleetError(text) from None
    if found.rpartition(".")[0] != TESTED_RAY_VERSION:
        text = f"Ray {found} is installed here; a fleet was tested with {TESTED_RAY_VERSION} and needs it on every node"
        raise FleetError(f"{text}: pip install 'tickertape[fleet]'")


def cluster_environment(plan: FleetPlan) -> dict[str, str]:
    """Environment variables for Ray's processes. Raises FleetError if the secret cannot be read."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": cluster_token(plan.read_secret()),
        # The head keeps its state on disk, so that it survives a restart.
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(plan.folder / "head"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_S),
        # Ray's workers start engines and gateways, which must not run at the low priority of batch jobs.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def set_environment(plan: FleetPlan) -> None:
    """Sets the variables of this process; those that the operator has set stay. Raises FleetError."""
    check_ray()
    for name, value in {**NODE_HEALTH, **cluster_environment(plan)}.items():
        os.environ.setdefault(name, value)
    # The environment may have the token of another fleet.
    os.environ["RAY_AUTH_TOKEN"] = cluster_environment(plan)["RAY_AUTH_TOKEN"]


FLEET = "fleet"
HEAD = "head"
START_S = 180.0
CALL_S = 30.0
# A command does not show the cluster's logs.
QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": 50}
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def head_command(plan: FleetPlan) -> list[str]:
    host, port = address_of(plan)
    room = [] if plan.head_works else ["--num-cpus=0", "--num-gpus=0"]
    return [
        *RAY,
        "start",
        "--head",
        *room,
        *("--node-ip-address", host),
        *("--port", str(port)),
        *("--node-name", node_name()),
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--block",
    ]


def join_command(plan: FleetPlan, name: str, edge: bool) -> list[str]:
    resources = ["--resources", '{"tickertape_edge": 1}'] if edge else []
    host, port = address_of(plan)
    address = ("--address", f"{host}:{port}")
    return [*RAY, "start", *address, "--node-name", name, *resources, "--disable-usage-stats", "--block"]


def node_name() -> str:
    return socket.gethostname()


def address_of(plan: FleetPlan) -> tuple[str, int]:
    host, _, port = plan.cluster.rpartition(":")
    return host, int(port)


def is_listening(plan: FleetPlan) -> bool:
    """Whether a process listens at the cluster's address."""
    try:
        socket.create_connection(address_of(plan), 2.0).close()
        return True
    except OSError:
        return False


def is_on_this_machine(plan: FleetPlan) -> bool:
    """Whether the cluster's address is one of this machine."""
    try:
        with socket.create_server((address_of(plan)[0], 0)):
            return True
    except OSError:
        return False


def start_head(plan: FleetPlan) -> None:
    """Starts a cluster on this machine that others can join. It outlives this process. Raises FleetError."""
    make_secret(plan.secret_path)
    set_environment(plan)
    _forget_head_before(plan)
    records = Records(plan.folder / "cluster")
    log = records.log_of(HEAD)
    environment = {**os.environ, **cluster_environment(plan)}
    pid, began = launch(head_command(plan), environment, log)
    record = Record(HEAD, "head", address_of(plan)[1], 0, pid, began)
    records.write(record)
    deadline = time.monotonic() + START_S
    while not is_listening(plan):
        if not is_running(record) or time.monotonic() > deadline:
            text = f"no cluster started at {plan.cluster}: {records.last_line(HEAD)}"
            raise FleetError(f"{text}; the whole log is {log}")
        time.sleep(0.2)


def _forget_head_before(plan: FleetPlan) -> None:
    """Ray remembers the address of its last head on this machine, and starts no other head there while a node of that
    cluster runs here. No process answers at that address, so the head is gone and its nodes wait for the new one."""
    from ray._common.utils import reset_ray_address
    from ray._private.utils import read_ray_address

    if (read_ray_address() or "").endswith(f":{address_of(plan)[1]}"):
        reset_ray_address()


def stop_head(plan: FleetPlan) -> bool:
    """Stops the cluster that was started on this machine, and no other. Returns whether there was one."""
    records = Records(plan.folder / "cluster")
    record = records.read(HEAD)
    if record is None or not is_running(record):
        return False
    send(record, signal.SIGTERM)
    deadline = time.monotonic() + START_S
    while is_running(record) and time.monotonic() < deadline:
        time.sleep(0.1)
    records.remove(HEAD)
    return True


def check_head(plan: FleetPlan) -> None:
    """Checks that the head accepts our token: with a wrong one, Ray's join would retry for ever. Raises FleetError."""
    set_environment(plan)
    if not is_listening(plan):
        raise FleetError(f"no cluster answers at {plan.cluster}: start it there with `tickertape fleet up`")
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError, RayError

    try:
        GcsClient(address=plan.cluster)
    except AuthenticationError:
        text = f"the cluster at {plan.cluster} has another secret: is {plan.secret_path} the same file as there?"
        raise FleetError(text) from None
    except RayError as error:
        raise FleetError(f"the process at {plan.cluster} is not a head of Ray: {_first_line(error)}") from error


def connect(plan: FleetPlan, patience_s: float = 0.0) -> None:
    """Connects to the cluster; retries for `patience_s`, for a head that has just started. Raises FleetError."""
    deadline = time.monotonic() + patience_s
    check_head(plan)
    import ray
    from ray.exceptions import RayError

    while True:
        try:
            ray.init(address=plan.cluster, namespace=plan.name, **QUIET)
            return
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() < deadline:
                time.sleep(1.0)
                continue
            text = f"the cluster at {plan.cluster} refuses this machine: {_first_line(error)}"
            raise FleetError(f"{text}; run this on a node of the cluster, with its version of Ray") from error


class FleetCalls:
    """Calls of a command to the fleet's manager; `connect` must be called before."""

    def __init__(self, plan: FleetPlan, start: bool = False) -> None:
        import ray

        self._ray = ray
        try:
            self._actor = self._started(plan) if start else ray.get_actor(FLEET, namespace=plan.name)
        except ValueError:
            text = f"the cluster at {plan.cluster} has no fleet {plan.name!r}"
            raise FleetError(f"{text}: start it with `tickertape fleet up`") from None

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Calls a method of `ManagerActor`. Raises FleetError."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout_s)
        except GetTimeoutError:
            raise FleetError(f"the fleet's manager did not answer within {timeout_s:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, FleetError) else FleetError(_first_line(error))) from None
        except RayError as error:
            raise FleetError(f"the fleet's manager does not answer: {_first_line(error)}") from error

    def end(self) -> None:
        """Ends the manager and deletes its stored state."""
        self.call("forget")
        self._ray.kill(self._actor)

    def _started(self, plan: FleetPlan) -> Any:
        from fleet.cluster.actors import ManagerActor

        secret_fingerprint = fingerprint(plan.read_secret())
        options = {"name": FLEET, "namespace": plan.name, "lifetime": "detached", "get_if_exists": True}
        manager = self._ray.remote(ManagerActor).options(
            **options,
            max_restarts=-1,
            num_cpus=0,
            # On the head's machine, where its memory file is.
            resources={"node:__internal_head__": 0.001},
        )
        return manager.remote(asdict(plan), secret_fingerprint)


def run_node(plan: FleetPlan, name: str, edge: bool) -> subprocess.Popen[bytes]:
    """Makes this machine a node of the cluster for as long as the returned process runs. Raises FleetError."""
    check_head(plan)
    return subprocess.Popen(join_command(plan, name, edge), env={**os.environ, **cluster_environment(plan)})


def end_units_here(plan: FleetPlan) -> list[str]:
    """Ends the fleet's units on this machine without a cluster; returns their names."""
    ended = []
    for folder in sorted((plan.folder / "nodes").glob("*")):
        for record in Records(folder).running():
            send(record, signal.SIGTERM)
            ended.append(record.name)
    return ended


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
