"""`tickertape wyoming`: runs a speech-to-text service for Home Assistant, over the Wyoming protocol.

This module reads the options and listens on the port; `wyoming_server.py` has the protocol. It is a server of its own
beside `tickertape serve`.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from realtime.commands.terminal import integer
from realtime.commands.transcription_options import add_model_options

EPILOG = """\
Examples:
  tickertape wyoming                                       with its own engine, on 127.0.0.1 port 10300
  tickertape wyoming --host 0.0.0.0                        for a Home Assistant on another machine
  tickertape wyoming --server http://127.0.0.1:8000        with a running server

In Home Assistant add the integration "Wyoming Protocol" with this host and port, and choose "tickertape" as the speech
to text of an assistant. The protocol has no keys and no encryption: every client that reaches the port may use it, so
keep it on loopback or a trusted network. TICKERTAPE_API_KEY is sent to a server as the API key.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "wyoming",
        help="speech to text for Home Assistant (Wyoming protocol)",
        description="Serve speech to text for Home Assistant, over the Wyoming protocol.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=integer, default=10300, help="the port to listen on (default: 10300)")
    parser.add_argument("--server", metavar="URL", help="use this server instead of a local engine")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from realtime.commands.terminal import INTERRUPTED, UsageError, check_server

    check_server(options.server)
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port must be between 0 and 65535, not {options.port}")
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


async def _serve(options: argparse.Namespace) -> None:
    from realtime.commands import file_transcription
    from realtime.commands.terminal import CommandFailed, announce
    from realtime.commands.wyoming_server import LocalBackend, ServerBackend, WyomingServer

    async def serve(server: WyomingServer) -> None:
        try:
            listener = await asyncio.start_server(server.serve, options.host, options.port, limit=server.MAX_LINE_BYTES)
        except OSError as error:
            text = f"cannot listen on {options.host} port {options.port}: {error.strerror or error}"
            raise CommandFailed(f"{text}; choose another --host or --port") from error
        async with listener:
            host, port = listener.sockets[0].getsockname()[:2]
            announce(f"listening on tcp://{host}:{port}; Ctrl-C stops")
            await listener.serve_forever()

    if options.server:
        await serve(WyomingServer(await ServerBackend.of(options.server, options.language)))
        return
    async with file_transcription.local_engine(options.model, options.device) as client:
        await serve(WyomingServer(LocalBackend(client, options.language)))
