"""The gateway between clients and engines, and the `tickertape` command line.

`app` builds a server from all packages, `cli` is the command line, `config` and `errors` are used everywhere. The
layers from bottom to top: session; dialects and metrics; serving; http; `app`; workers; commands.
"""
