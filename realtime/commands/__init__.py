"""The commands of `tickertape`, one module each, and the parts they share.

A command module has `add(commands)`, which describes the command to argparse, and `run(options)`, which returns an exit
code. Commands may import every package but `realtime.cli`. Heavy packages are imported inside `run`, so that `--help`
and usage errors are fast.
"""
