"""Evaluates the deployment files as docker would, without docker: variables, environment, command."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
# ${NAME}, ${NAME:-default} and ${NAME:+replacement}, which is all that the file uses.
VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-+])([^{}]*))?\}")


@dataclass(frozen=True)
class Service:
    """How a container of the service runs its entry point."""

    arguments: list[str]
    environment: dict[str, str]
    health_check: list[str]
    folders: list[str]


def compose() -> Any:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def interpolate(text: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name, operator, other = found.groups()
        given = variables.get(name, "")
        if operator == ":+":
            return str(other) if given else ""
        return given or other or ""

    result = VARIABLE.sub(value, text)
    assert "${" not in result, f"{text!r} uses a form that this reader does not know"
    return result


def service(name: str, variables: dict[str, str]) -> Service:
    """The service as `docker compose up` starts it in a shell with these variables."""
    described = compose()["services"][name]
    image = _image()
    environment = dict(image["ENV"])
    for key, value in described["environment"].items():
        if value is not None:
            environment[key] = interpolate(str(value), variables)
        elif key in variables:
            environment[key] = variables[key]
    folders = [interpolate(volume, variables).split(":")[1] for volume in described["volumes"]]
    command = shlex.split(interpolate(described["command"], variables))
    return Service([*image["ENTRYPOINT"], *command], environment, image["HEALTHCHECK"], folders)


def _image() -> dict[str, Any]:
    """What the last stage of the Dockerfile sets."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stage = text[text.rindex("\nFROM ") :]
    found: dict[str, Any] = {}
    for line in stage.splitlines():
        word, _, rest = line.partition(" ")
        if word == "ENV":
            found["ENV"] = dict(part.split("=", 1) for part in rest.split())
        elif word in ("ENTRYPOINT", "CMD"):
            found[word] = json.loads(rest)
        elif word == "HEALTHCHECK":
            found[word] = json.loads(rest.partition("CMD ")[2])
    return found
