"""The subcommands of `tickertape`, one module each, and the modules that several of them share.

A command module has `add(commands)`, which describes the command to argparse, and `run(options)`, which returns an exit
code; `realtime/cli.py` calls both. Commands may import every package but `realtime.cli`. Heavy packages are imported
inside `run`, so that `--help` and usage errors are fast.
"""
