"""`tickertape check-config`: checks a configuration and prints all values in force.

It reads the same file and environment as `tickertape serve`, but no flags of it. It starts nothing, and does not print
secrets. The configuration itself is `realtime/config.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from realtime.commands.terminal import note, out, read_config
from realtime.config import Config, Secret, check_tls

EPILOG = """\
Examples:
  tickertape check-config tickertape.toml
  TICKERTAPE_SERVER_PORT=9000 tickertape check-config      the environment and the defaults alone

Prints every key with its value in force as a TOML file, without secrets. If the configuration is invalid, prints one
line about the first error and exits with 2. docs/tickertape.toml explains every key.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "check-config",
        help="check a configuration file and show the values in force",
        description="Check the configuration: file, then environment, as `tickertape serve` reads them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", help="a TOML file; without one, the environment and the defaults")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = read_config(options.file, {})
    check_tls(config.server)
    if not options.quiet:
        out(as_toml(config))
        note("the configuration is valid")
    return 0


def as_toml(config: Config) -> str:
    """Every key and its value as TOML; for secrets, only whether they are set."""
    lines: list[str] = []
    for section in fields(config):
        values = getattr(config, section.name)
        lines.append(f"[{section.name}]")
        for key in fields(values):
            value = getattr(values, key.name)
            if secrets := _secrets_in(value):
                lines.append(f"# {key.name} is set and not shown" + (f": {secrets} of them" if secrets > 1 else ""))
            elif value is None:
                lines.append(f"# {key.name} is not set")
            else:
                lines.append(f"{key.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _secrets_in(value: object) -> int:
    """The number of non-empty secrets in a value."""
    return sum(isinstance(item, Secret) and bool(item) for item in (value if isinstance(value, tuple) else (value,)))


def _toml(value: object) -> str:
    if isinstance(value, Secret):
        return '""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
