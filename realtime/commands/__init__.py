"""The commands of `tickertape`, one module each, and the parts they share.

A module has `add(commands)`, which describes the command to argparse, and `run(options)`, which returns an exit code.
Runs in a process of its own; may import every room but `realtime.cli`. Heavy packages are imported inside `run`, so
that `--help` and usage errors answer at once.
"""
