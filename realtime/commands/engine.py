"""`tickertape engine`: an engine alone, for a gateway in another process or on another machine."""

from __future__ import annotations

import argparse
from typing import Any

from realtime.commands.pull import fetch, model_name
from realtime.commands.serve import set_up_logging
from realtime.commands.terminal import UsageError
from realtime.config import ModelConfig

EPILOG = """\
Examples:
  tickertape engine --listen tcp://127.0.0.1:5555
  tickertape engine --listen tcp://10.0.0.7:5555 --model whisper-small.en --device cuda
  CUDA_VISIBLE_DEVICES=1 tickertape engine --listen ipc:///run/tickertape/engine1

then: tickertape serve --engine tcp://127.0.0.1:5555
The connection is neither encrypted nor authenticated: listen only on networks where every machine is trusted.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "engine",
        help="run an engine alone, for a server elsewhere",
        description="Run the engine alone. Gateways connect to it with `tickertape serve --engine ADDRESS`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="tcp://HOST:PORT or ipc://PATH")
    parser.add_argument(
        "--model", default=ModelConfig().name, help="a name from `tickertape models`, or a path to a checkpoint"
    )
    parser.add_argument("--device", default=ModelConfig().device, choices=("auto", "cpu", "cuda"))
    parser.add_argument("--max-streams", type=int, default=0, help="streams at once; 0 takes what memory allows")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the model; 0 leaves it to the model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import signal
    import threading
    from functools import partial

    from engine.boundary.sockets import check_address
    from engine.config import EngineConfig
    from engine.server.build import build_loop
    from engine.server.main import run_engine

    try:
        check_address(options.listen)
    except ValueError as error:
        raise UsageError(str(error)) from error
    name = model_name(options.model)
    fetch(name)
    set_up_logging()
    asked_to_stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_stop.set())
    config = EngineConfig(name, options.device, options.max_streams, options.threads)
    run_engine(options.listen, partial(build_loop, config), asked_to_stop.is_set)
    return 0
