"""The entry point of the `tickertape` command: parses the command line and runs one of the commands.

Each command is a module in `realtime/commands`; `_COMMANDS` lists them. An exception of a command becomes one line on
standard error and an exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from engine.errors import EngineError
from realtime.commands import (
    bench,
    check_config,
    completion,
    demo,
    doctor,
    engine,
    fleet,
    listen,
    mic,
    plan,
    pull,
    serve,
    status,
    transcribe,
    wyoming,
)
from realtime.commands.terminal import (
    DEBUG_VARIABLE,
    FAILED,
    INTERRUPTED,
    USAGE,
    CommandFailed,
    UsageError,
    drop_unwritten_output,
    is_debugging,
    note,
    out,
)
from realtime.config import ConfigError

DESCRIPTION = "A self-hosted realtime transcription server for sessions of any length."
EPILOG = """\
To begin:
  tickertape serve                          start the server; its web page is http://127.0.0.1:8000
  tickertape transcribe talk.mp3            print the transcript of a file
  tickertape mic                            show live captions of your microphone

Exit codes: 0 success, 1 failure, 2 error in the command line or the configuration, 130 interrupted.
TICKERTAPE_DEBUG=1 shows a stack trace with every error; TICKERTAPE_CACHE is the folder for models.
"""

_COMMANDS = (
    serve,
    engine,
    fleet,
    status,
    transcribe,
    mic,
    listen,
    wyoming,
    bench,
    plan,
    demo,
    pull,
    doctor,
    check_config,
    completion,
)


class _Parser(argparse.ArgumentParser):
    """Names an unknown flag without its value, because it may be a misspelt flag with a key."""

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            self.error(f"unrecognized arguments: {' '.join(flags or unknown)}")
        return options


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tickertape",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in _COMMANDS:
        module.add(commands)
    for command in commands.choices.values():
        # A misspelt flag must not be accepted as the abbreviation of a longer one.
        command.allow_abbrev = False
    # Completion scripts are generated from the whole parser.
    commands.choices["completion"].set_defaults(parser=parser)
    return parser


def _open_closed_streams() -> None:
    """Send output to /dev/null if standard output or error is closed (`>&-`); Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    _open_closed_streams()
    try:
        return _run(arguments)
    finally:
        drop_unwritten_output()


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        if options.version:
            return _print_version()
        if options.command is None:
            parser.print_help(sys.stderr)
            return USAGE
        code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left.
        return FAILED
    except Exception as error:
        if is_debugging():
            raise
        note(f"error: {_one_line(error)}")
        return USAGE if isinstance(error, ConfigError | UsageError) else FAILED


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, CommandFailed | UsageError | ConfigError | EngineError | OSError):
        return text
    return f"unexpected {type(error).__name__}: {text} (set {DEBUG_VARIABLE}=1 for the stack trace)"


def _print_version() -> int:
    from importlib.metadata import version

    out(f"tickertape {version('tickertape')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
