"""Keepers: each starts, watches and drains one `tickertape engine` or `tickertape serve` process on its own node.

They do not use Ray. A process outlives its keeper; the next keeper of the same name finds the process by the record on
the node's disk and continues with it.
"""
