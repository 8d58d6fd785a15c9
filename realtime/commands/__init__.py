"""The commands of `tickertape`, one module each.

A module has `add(commands)`, which describes the command to argparse, and `run(options)`, which returns an exit code.
Heavy packages are imported inside `run`, so that `--help` and usage errors answer at once.
"""
