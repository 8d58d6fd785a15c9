"""`tickertape engine` with the engine of `engines.py` in place of a model: up in a moment, and its words are a pure
function of the audio, however busy the machine is."""

from __future__ import annotations

import argparse
import signal
import threading

from engine.fleet_secret import read_secret
from engine.server.host import DrainRequest
from engine.server.main import run_engine
from tests.realtime.workers.engines import labelling


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--fleet-secret-file", required=True)
    options = parser.parse_args()
    asked_to_drain = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_drain.set())
    drain = DrainRequest(asked_to_drain.is_set, 60.0)
    secret = read_secret(options.fleet_secret_file)
    run_engine(options.listen, labelling, lambda: False, warm=False, drain=drain, fleet_secret=secret)


if __name__ == "__main__":
    main()
