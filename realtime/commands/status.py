"""`tickertape status`: a live view of a running server, a JSON object, or an exit code for health checks.

This module finds the server's address and chooses the form of the answer; `status_view.py` reads the server and shows
it.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from realtime.commands.terminal import FAILED, KEY_VARIABLE, OK, CommandFailed, check_server, decimal, out, read_config

if TYPE_CHECKING:
    from realtime.client.wire_client import HttpClient
    from realtime.config import ServerConfig

EPILOG = """\
Examples:
  tickertape status                           the server of this machine's configuration, until Ctrl-C
  tickertape status https://captions.example
  tickertape status --json | jq .load         one object, once
  tickertape status --ready                   exit code 0 if it takes sessions, else 1: for health checks

Without a URL, the address, port and certificate come from the configuration, as `tickertape serve` reads it: --config,
then the environment. If the server stops answering, the view keeps trying. In a pipe each refresh is one line.
TICKERTAPE_API_KEY is sent to the server as the API key. The times in --json are since the server's start; those in the
view are of the last minute.
"""
# A server that listens on all addresses is reached at the loopback address.
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="watch a running server: sessions, load, lag, engines",
        description="Watch a running server: sessions, load, lag, engines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", help="the server (default: from the configuration)")
    parser.add_argument("--config", metavar="FILE", help="the server's configuration file")
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="seconds between refreshes")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object and exit")
    how.add_argument("--ready", action="store_true", help="exit with 0 if the server takes sessions, with 1 if not")
    parser.set_defaults(run=run)


def _interval(text: str) -> float:
    value = decimal(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be between 0.1 and 3600 seconds")
    return value


def run(options: argparse.Namespace) -> int:
    from realtime.client.wire_client import CannotConnect

    check_server(options.url)
    try:
        server = _server(options)
        if options.ready:
            return _print_readiness(server)
        if options.json:
            return _print_json(server)
        from realtime.commands.status_view import watch

        watch(server, options.interval)
    except CannotConnect as error:
        raise CommandFailed(str(error)) from error
    except KeyboardInterrupt:
        return OK
    return OK


def _print_readiness(server: HttpClient) -> int:
    from realtime.commands.status_view import readiness

    is_ready, state = readiness(server)
    out(state)
    return OK if is_ready else FAILED


def _print_json(server: HttpClient) -> int:
    import json

    from realtime.commands.status_view import read_snapshot

    out(json.dumps(read_snapshot(server).as_json(server.url)))
    return OK


def _server(options: argparse.Namespace) -> HttpClient:
    from realtime.client.wire_client import HttpClient

    key = os.environ.get(KEY_VARIABLE)
    if options.url is not None:
        return HttpClient(options.url, key)
    settings = read_config(options.config, {}).server
    return HttpClient(own_url(settings), key, _tls_context(settings))


def own_url(settings: ServerConfig) -> str:
    """The URL of a server with these settings, from its own machine."""
    host = ANY_ADDRESS.get(settings.host, settings.host)
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _tls_context(settings: ServerConfig) -> Any:
    """A TLS context that trusts the server's own certificate, which is for its public name and not for this address."""
    if settings.tls_cert is None:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(settings.tls_cert)
    return context
