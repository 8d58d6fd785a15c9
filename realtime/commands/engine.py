"""`tickertape engine`: runs an engine without a gateway, for gateways in other processes or on other machines.

It reads the options and handles the signals; the engine process itself is `engine/server/main.py`. Gateways connect to
it with `tickertape serve --engine`.
"""

from __future__ import annotations

import argparse
from typing import Any

from engine.logs import set_up_logging
from engine.options import EngineConfig
from realtime.commands.pull import fetch, model_name
from realtime.commands.serve import add_config_options, check_fleet_secret, config_of
from realtime.commands.terminal import CommandFailed, UsageError, decimal, note

EPILOG = """\
Examples:
  tickertape engine --listen tcp://127.0.0.1:5555
  tickertape engine --listen tcp://10.0.0.7:5555 --model /models/voxtral --device cuda --model.kv-8bit true
  tickertape engine --listen ipc:///run/tickertape/engine1 --model /models/voxtral --device cuda:1

then: tickertape serve --engine tcp://127.0.0.1:5555
Its settings are the keys of the section [model] for engines, from the same file, environment and flags that
`tickertape serve` reads. Engines of one gateway must run the same weights with the same settings.
SIGTERM drains the engine: it takes no new streams, its gateways migrate its streams to other engines, and it ends; a
second SIGTERM, or Ctrl-C, ends it at once.
Connections over tcp are encrypted and authenticated if --fleet-secret-file is given here and at the gateways; without
it, listen only on networks where every machine is trusted.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "engine",
        help="run only an engine, for gateways on other machines",
        description="Run only an engine. Gateways connect to it with `tickertape serve --engine ADDRESS`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="tcp://HOST:PORT or ipc://PATH")
    parser.add_argument(
        "--drain-s",
        type=decimal,
        default=60.0,
        metavar="SECONDS",
        help="seconds for the migration of streams to other engines after SIGTERM (default 60)",
    )
    keys = ["fleet.secret_file", *(f"model.{name}" for name in ("name", *EngineConfig.setting_names()))]
    add_config_options(parser, keys, "the key of this name in docs/tickertape.toml")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import signal
    import threading
    from functools import partial

    import engine.server.fast_import  # noqa: F401
    from engine.boundary.sockets import CannotListen, check_address
    from engine.server.host import DrainRequest
    from engine.server.main import build_loop, run_engine

    try:
        check_address(options.listen)
    except ValueError as error:
        raise UsageError(str(error)) from error
    config = config_of(options)
    settings, secret = config.model, check_fleet_secret(config)
    name = model_name(settings.name)
    fetch(name)
    set_up_logging(level=config.server.log_level, log_format=config.server.log_format)
    stop_requested, drain_requested = threading.Event(), threading.Event()

    def terminate(*_: Any) -> None:
        # The first SIGTERM drains the engine, the second stops it.
        (stop_requested if drain_requested.is_set() else drain_requested).set()

    signal.signal(signal.SIGINT, lambda *_: stop_requested.set())
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGHUP, lambda *_: note("SIGHUP has no effect: an engine needs a restart for new settings"))
    engine_config = EngineConfig.from_settings(name, settings)
    drain = DrainRequest(drain_requested.is_set, options.drain_s)
    try:
        run_engine(
            options.listen, partial(build_loop, engine_config), stop_requested.is_set, drain=drain, fleet_secret=secret
        )
    except CannotListen as error:
        raise CommandFailed(str(error)) from error
    return 0
