"""What Ray must be told before it is imported: by environment variables, the same for every process of a fleet."""

from __future__ import annotations

import os
from importlib import metadata

from fleet.errors import FleetError
from fleet.plan import FleetPlan
from fleet.secret import cluster_token, read_secret

TESTED = "2.60"
# A node goes on without the head for so long; Ray's own minute is less than a machine takes to boot.
HEAD_AWAY_S = 3600
# How the head asks its nodes whether they are there: every 2 s, with 3 s for an answer, and a node is given up after 4
# misses, so after 20 s. With Ray's own figures (3 s, 10 s, 5) a machine that stands still, whose connections take
# everything and answer nothing, is missed for 65 s.
NODE_HEALTH = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}


def check_ray() -> None:
    """Raises FleetError if Ray is not there, or is not the one this was tested with."""
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        text = "a fleet needs Ray, which is not installed here: pip install 'tickertape[fleet]'"
        raise FleetError(text) from None
    if found.rpartition(".")[0] != TESTED:
        text = f"Ray {found} is installed here; a fleet was tested with {TESTED} and needs it on every node"
        raise FleetError(f"{text}: pip install 'tickertape[fleet]'")


def cluster_environment(plan: FleetPlan) -> dict[str, str]:
    """Raises FleetError if the secret cannot be read."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": cluster_token(read_secret(plan.secret_path)),
        # What the head knows is on its disk, so that it comes back with it.
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(plan.folder / "head"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_S),
        # Speech is not a batch job.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def set_up(plan: FleetPlan) -> None:
    """For this process; what the operator has set stays."""
    check_ray()
    for name, value in {**NODE_HEALTH, **cluster_environment(plan)}.items():
        os.environ.setdefault(name, value)
    # A token of another fleet in the environment is no use here.
    os.environ["RAY_AUTH_TOKEN"] = cluster_environment(plan)["RAY_AUTH_TOKEN"]
